//! Expressions as steps that write to registers, which compute an element-wise op on a run of
//! elements at a time.

use std::collections::BTreeMap;

use super::expr::{Expr, Function, Operator, Term};

/// Most registers.
pub(super) const REGISTERS: usize = 32;

/// Source of the numbers of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum From {
    Operand(usize),
    Register(usize),
}

/// Destination of the numbers of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum To {
    Register(usize),
    Result(usize),
}

/// The computation of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Copy(From),
    Of(Function, From),
    Both(Operator, From, From),
}

/// A step: its computation, and the destination of its numbers. It writes to no register that it
/// reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Step {
    pub(super) action: Action,
    pub(super) to: To,
}

impl Step {
    /// Whether it reads only operands and writes a result.
    pub(super) fn is_free_of_registers(&self) -> bool {
        let is_operand = |from| matches!(from, From::Operand(_));
        let reads = match self.action {
            Action::Copy(x) | Action::Of(_, x) => is_operand(x),
            Action::Both(_, a, b) => is_operand(a) && is_operand(b),
        };
        reads && matches!(self.to, To::Result(_))
    }
}

/// Initial contents of a register.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fill {
    /// Bits of an f32.
    Constant(u32),
    /// The only element of an operand.
    Operand(usize),
}

/// Steps that compute some results.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Steps {
    /// Registers that hold one number throughout: the first ones.
    pub(super) fills: Vec<Fill>,
    /// Steps between numbers that are the same for all elements.
    pub(super) once: Vec<Step>,
    pub(super) steps: Vec<Step>,
}

/// Distinct computations, in order.
#[derive(Default)]
struct Nodes {
    /// Operands of a node are indices of nodes.
    nodes: Vec<Node>,
    seen: BTreeMap<*const Term, usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Node {
    Operand(usize),
    Constant(u32),
    Of(Function, usize),
    Both(Operator, usize, usize),
}

impl Node {
    fn reads(self) -> [Option<usize>; 2] {
        match self {
            Self::Operand(_) | Self::Constant(_) => [None, None],
            Self::Of(_, x) => [Some(x), None],
            Self::Both(_, a, b) => [Some(a), Some(b)],
        }
    }

    /// Its computation, given the sources of the nodes that it reads.
    fn action(self, at: &[Option<From>]) -> Option<Action> {
        match self {
            Self::Operand(_) | Self::Constant(_) => None,
            Self::Of(function, x) => Some(Action::Of(function, at[x]?)),
            Self::Both(operator, a, b) => Some(Action::Both(operator, at[a]?, at[b]?)),
        }
    }
}

impl Nodes {
    /// The node of an expression; equal ones are one node.
    fn node(&mut self, expr: &Expr) -> usize {
        let key = std::sync::Arc::as_ptr(&expr.0);
        if let Some(&node) = self.seen.get(&key) {
            return node;
        }
        let node = match &*expr.0 {
            Term::As(x, _) => return self.node(x),
            Term::Operand(index) => Node::Operand(*index),
            Term::Constant(bits) => Node::Constant(*bits),
            Term::Of(function, x) => Node::Of(*function, self.node(x)),
            Term::Both(operator, a, b) => Node::Both(*operator, self.node(a), self.node(b)),
        };
        let known = self.nodes.iter().position(|known| *known == node);
        let index = known.unwrap_or_else(|| {
            self.nodes.push(node);
            self.nodes.len() - 1
        });
        self.seen.insert(key, index);
        index
    }
}

impl Steps {
    /// The steps of some results; `is_scalar` says which operands have one element for all. `None`
    /// if they need too many registers.
    pub(super) fn new(results: &[Expr], is_scalar: &[bool]) -> Option<Self> {
        let mut nodes = Nodes::default();
        let results: Vec<usize> = results.iter().map(|result| nodes.node(result)).collect();
        let nodes = nodes.nodes;
        let mut steps = Self::default();
        // For each node the source of its numbers, once they are computed.
        let mut at: Vec<Option<From>> = vec![None; nodes.len()];
        for (at, node) in at.iter_mut().zip(&nodes) {
            let fill = match *node {
                Node::Operand(index) if !is_scalar[index] => {
                    *at = Some(From::Operand(index));
                    continue;
                }
                Node::Operand(index) => Fill::Operand(index),
                Node::Constant(bits) => Fill::Constant(bits),
                Node::Of(..) | Node::Both(..) => continue,
            };
            *at = Some(From::Register(steps.fills.len()));
            steps.fills.push(fill);
        }
        let mut first = steps.fills.len();
        for (index, node) in nodes.iter().enumerate() {
            let is_uniform = |read: usize| matches!(at[read], Some(From::Register(_)));
            let reads: Vec<usize> = node.reads().into_iter().flatten().collect();
            if !reads.is_empty() && reads.into_iter().all(is_uniform) {
                let to = To::Register(first);
                let action = node.action(&at)?;
                steps.once.push(Step { action, to });
                at[index] = Some(From::Register(first));
                first += 1;
            }
        }
        let mut is_free = vec![true; REGISTERS.saturating_sub(first)];
        let last_read = |node: usize| {
            nodes
                .iter()
                .rposition(|other| other.reads().contains(&Some(node)))
        };
        for (index, node) in nodes.iter().enumerate() {
            if at[index].is_some() {
                continue;
            }
            let action = node.action(&at)?;
            let wanted = results.iter().filter(|result| **result == index).count();
            // A node without other readers is written to its result directly.
            let to = if wanted == 1 && last_read(index).is_none() {
                To::Result(results.iter().position(|result| *result == index)?)
            } else {
                let register = is_free.iter().position(|is_free| *is_free)?;
                is_free[register] = false;
                at[index] = Some(From::Register(first + register));
                To::Register(first + register)
            };
            steps.steps.push(Step { action, to });
            for read in node.reads().into_iter().flatten() {
                let done = last_read(read) == Some(index) && !results.contains(&read);
                if let (true, Some(From::Register(register))) = (done, at[read])
                    && register >= first
                {
                    is_free[register - first] = true;
                }
            }
        }
        for (result, node) in results.into_iter().enumerate() {
            if let Some(from) = at[node] {
                steps.steps.push(Step {
                    action: Action::Copy(from),
                    to: To::Result(result),
                });
            }
        }
        (first <= REGISTERS).then_some(steps)
    }
}
