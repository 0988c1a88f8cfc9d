//! Building a program: ops in order, equal ops once.

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::op::{Builder, Home, Node, Op, Result, refuse};
use crate::precision::Precision;
use crate::store::{Slot, Store};
use crate::value::{StepScalar, Type, Value};

/// The part that the time of all gradient ops counts towards.
pub const BACKWARD: &str = "backward";

impl Builder {
    /// An empty program.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty program with this storage precision. On the CPU it is the precision of the factors
    /// of products.
    pub fn with_precision(precision: Precision) -> Self {
        Self {
            precision,
            ..Self::default()
        }
    }

    /// Names the part of the program to which the next ops belong, for
    /// [`Given::part_times`](crate::Given::part_times). Gradients are [`BACKWARD`]. An op
    /// that exists already keeps its part.
    pub fn part(&mut self, name: &'static str) {
        self.part = name;
    }

    /// From now on makes ops without their causal masks: every position sees every other one, so a
    /// test of causality can show that it would see a leak.
    pub fn remove_masks(&mut self) {
        self.removed_masks.get_or_insert(0);
    }

    /// Number of causal masks that ops were made without.
    pub fn removed_masks(&self) -> usize {
        self.removed_masks.unwrap_or(0)
    }

    /// Whether an op that is causal by a mask is to have it; asked once for each op.
    pub fn keeps_mask(&mut self) -> bool {
        match &mut self.removed_masks {
            None => true,
            Some(removed) => {
                *removed += 1;
                false
            }
        }
    }

    /// A tensor of the store; asking twice gives one value.
    pub fn persistent(&mut self, store: &Store, slot: Slot) -> Value {
        if let Some(&value) = self.persistent.get(&slot) {
            return value;
        }
        let value = self.value(store.ty(slot).clone(), Home::Persistent(slot));
        self.persistent.insert(slot, value);
        if store.is_frozen(slot) {
            self.frozen.insert(slot);
        }
        if store.is_sharded(slot) {
            self.sharded.insert(slot);
        }
        if store.is_in_bf16(slot) {
            self.in_bf16.insert(slot);
        }
        value
    }

    /// An input that the host writes before each replay; asking twice for a name gives one value.
    ///
    /// # Errors
    ///
    /// When the name stands for another type already.
    pub fn input(&mut self, name: &str, ty: &Type) -> Result<Value> {
        if let Some(&value) = self.inputs.get(name) {
            if self.ty(value) == ty {
                return Ok(value);
            }
            return refuse!("input", "`{name}` is {} already, not {ty}", self.ty(value));
        }
        let value = self.value(ty.clone(), Home::Input);
        self.inputs.insert(name.to_owned(), value);
        Ok(value)
    }

    /// A scalar that changes from step to step; asking twice for a name gives one.
    pub fn step_scalar(&mut self, name: &str) -> StepScalar {
        let index = self
            .scalars
            .iter()
            .position(|known| known == name)
            .unwrap_or_else(|| {
                self.scalars.push(name.to_owned());
                self.scalars.len() - 1
            });
        StepScalar(u32::try_from(index).expect("a program has few step scalars"))
    }

    /// Names a value as an output, which can be read after a replay.
    pub fn output(&mut self, name: impl Into<String>, value: Value) {
        self.outputs.push((name.into(), value));
    }

    /// Adds an op, or finds an equal one.
    ///
    /// # Errors
    ///
    /// When its inputs do not fit together.
    pub fn op(&mut self, op: impl Op + 'static, inputs: &[Value]) -> Result<Vec<Value>> {
        if !op.writes(inputs.len()).is_empty() {
            return self.node(Arc::new(op), inputs, Vec::new());
        }
        self.known_or_new(op, inputs, None)
    }

    /// Adds an op with one result.
    ///
    /// # Errors
    ///
    /// When its inputs do not fit together.
    pub fn op1(&mut self, op: impl Op + 'static, inputs: &[Value]) -> Result<Value> {
        Ok(self.op(op, inputs)?[0])
    }

    /// Adds an op whose result is added to `into`, if it is given, or finds an equal one. Other
    /// readers of `into` read its old value.
    ///
    /// # Errors
    ///
    /// When its inputs do not fit together, or `into` is of another type.
    pub(crate) fn op_into(
        &mut self,
        op: impl Op + 'static,
        inputs: &[Value],
        into: Option<Value>,
    ) -> Result<Value> {
        Ok(self.known_or_new(op, inputs, into)?[0])
    }

    /// The results of an equal op that reads the same values, or of `op`.
    fn known_or_new(
        &mut self,
        op: impl Op + 'static,
        inputs: &[Value],
        into: Option<Value>,
    ) -> Result<Vec<Value>> {
        let reads = (inputs.to_vec(), into);
        let equal = |(known, _): &&(Arc<dyn Op>, _)| {
            let known: &dyn Any = &**known;
            op.dyn_eq(known)
        };
        if let Some((_, outputs)) = self
            .known
            .get(&reads)
            .and_then(|ops| ops.iter().find(equal))
        {
            return Ok(outputs.clone());
        }
        let op: Arc<dyn Op> = Arc::new(op);
        let targets = into.map(Some).into_iter().collect();
        let outputs = self.node(Arc::clone(&op), inputs, targets)?;
        self.known
            .entry(reads)
            .or_default()
            .push((op, outputs.clone()));
        Ok(outputs)
    }

    pub(crate) fn node(
        &mut self,
        op: Arc<dyn Op>,
        inputs: &[Value],
        into: Vec<Option<Value>>,
    ) -> Result<Vec<Value>> {
        let output_types = op.outputs(&self.types_of(inputs))?;
        self.check_written(&*op, inputs)?;
        for (target, ty) in into.iter().zip(&output_types) {
            if let Some(target) = *target
                && self.ty(target) != ty
            {
                return refuse!(op, "adds {ty} to {}", self.ty(target));
            }
        }
        let index = self.nodes.len();
        let outputs: Vec<Value> = output_types
            .into_iter()
            .map(|ty| self.value(ty, Home::Node(index)))
            .collect();
        if let Some(region) = self.region.filter(|_| !self.eager) {
            self.regions.insert(index, region);
        }
        self.nodes.push(Node {
            op,
            inputs: inputs.to_vec(),
            into,
            outputs: outputs.clone(),
            eager: self.eager,
            part: if self.eager { BACKWARD } else { self.part },
        });
        Ok(outputs)
    }

    /// Checks that an op writes only to tensors of the store that are not frozen, and that each is
    /// one of its inputs once: with a second writer or a reader, the result would depend on their
    /// order.
    fn check_written(&self, op: &dyn Op, inputs: &[Value]) -> Result<()> {
        let written = op.writes(inputs.len());
        if written.is_empty() {
            return Ok(());
        }
        let mut sorted = inputs.to_vec();
        sorted.sort_unstable();
        let refuse = |input, why| refuse!(op, "writes to {}, which {why}", self.ty(input));
        for &input in &inputs[written] {
            let first = sorted.partition_point(|&other| other < input);
            match self.homes[input.index()] {
                Home::Persistent(slot) if self.frozen.contains(&slot) => {
                    return refuse(input, "is frozen");
                }
                Home::Persistent(_) if sorted.get(first + 1) == Some(&input) => {
                    return refuse(input, "it is given twice");
                }
                Home::Persistent(_) => (),
                Home::Input | Home::Node(_) => return refuse(input, "is not in the store"),
            }
        }
        Ok(())
    }

    /// Type of a value.
    pub fn ty(&self, value: Value) -> &Type {
        &self.types[value.index()]
    }

    /// Types of values.
    pub(crate) fn types_of(&self, values: &[Value]) -> Vec<&Type> {
        values.iter().map(|&value| self.ty(value)).collect()
    }

    /// The node that makes a value, if one does.
    pub(crate) fn maker(&self, value: Value) -> Option<usize> {
        match self.homes[value.index()] {
            Home::Node(node) => Some(node),
            Home::Persistent(_) | Home::Input => None,
        }
    }

    /// Type of a value without padding.
    pub(crate) fn unpadded(&self, value: Value) -> &Type {
        self.unpadded.get(&value).unwrap_or_else(|| self.ty(value))
    }

    /// The same values, made by other nodes; the homes of values follow from their outputs.
    pub(crate) fn with_nodes(&self, nodes: Vec<Node>) -> Self {
        let mut to = Self {
            types: self.types.clone(),
            homes: self.homes.clone(),
            nodes: Vec::with_capacity(nodes.len()),
            inputs: self.inputs.clone(),
            outputs: self.outputs.clone(),
            scalars: self.scalars.clone(),
            frozen: self.frozen.clone(),
            sharded: self.sharded.clone(),
            in_bf16: self.in_bf16.clone(),
            blocks: self.blocks,
            reduction: self.reduction,
            unpadded: self.unpadded.clone(),
            all_reduced: self.all_reduced.clone(),
            associated: self.associated.clone(),
            precision: self.precision,
            ..Self::default()
        };
        nodes.into_iter().for_each(|node| to.append(node));
        to
    }

    /// The inputs of a node that are held in bf16.
    pub(crate) fn inputs_in_bf16(&self, node: &Node) -> impl Iterator<Item = (usize, Slot)> {
        let homes = node.inputs.iter().map(|input| self.homes[input.index()]);
        homes.enumerate().filter_map(|(index, home)| match home {
            Home::Persistent(slot) if self.in_bf16.contains(&slot) => Some((index, slot)),
            _ => None,
        })
    }

    /// Adds a node whose outputs are existing values. Values in the store stay there.
    pub(crate) fn append(&mut self, node: Node) {
        for output in &node.outputs {
            let home = &mut self.homes[output.index()];
            if !matches!(home, Home::Persistent(_)) {
                *home = Home::Node(self.nodes.len());
            }
        }
        self.nodes.push(node);
    }

    pub(crate) fn value(&mut self, ty: Type, home: Home) -> Value {
        let value = Value(u32::try_from(self.types.len()).expect("a program has few values"));
        self.types.push(ty);
        self.homes.push(home);
        value
    }

    /// Records that `product` depends on values that it does not read.
    pub(crate) fn bypass(&mut self, values: Vec<Value>, product: Value) {
        for value in values {
            self.bypassed.entry(value).or_default().insert(product);
        }
    }

    /// Whether each value depends on one of `of` through the ops from `first` on. No gradient
    /// passes through a constant.
    pub(crate) fn dependants(
        &self,
        of: impl IntoIterator<Item = Value>,
        first: usize,
    ) -> Vec<bool> {
        let mut depends = vec![false; self.types.len()];
        for value in of {
            depends[value.index()] = true;
        }
        for node in &self.nodes[first..] {
            let mut operands = node.inputs.iter().chain(node.into.iter().flatten());
            if !node.op.is_constant() && operands.any(|v| depends[v.index()]) {
                for output in &node.outputs {
                    depends[output.index()] = true;
                }
            }
        }
        depends
    }

    /// Whether `value` depends on `wanted` through products that do not read it.
    pub(crate) fn bypasses(&self, wanted: Value, value: Value) -> bool {
        let mut products: BTreeSet<Value> = BTreeSet::new();
        let mut bypassed = vec![wanted];
        // A bypassed value may itself be the product that bypasses another.
        while let Some(value) = bypassed.pop() {
            let by = self.bypassed.get(&value).into_iter().flatten();
            bypassed.extend(by.filter(|&&product| products.insert(product)));
        }
        !products.is_empty() && self.dependants(products, 0)[value.index()]
    }

    /// Replaces the op that makes `value` by `op`, on the same inputs. `op` has the same results
    /// and one more, which is returned.
    pub(crate) fn widen(&mut self, value: Value, op: Arc<dyn Op>) -> Result<Value> {
        let index = self.maker(value).expect("results have an op");
        let node = &self.nodes[index];
        let mut types = op.outputs(&self.types_of(&node.inputs))?;
        let added = types.pop().expect("one more than there are");
        assert!(
            types.iter().eq(self.types_of(&node.outputs)),
            "{op:?} keeps the results of the op that it replaces"
        );
        let added = self.value(added, Home::Node(index));
        self.nodes[index].op = op;
        self.nodes[index].outputs.push(added);
        Ok(added)
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;
    use crate::cpu::{Alone, Frame, Pool};
    use crate::cuda::Lowering;
    use crate::op::Gradients;
    use crate::op::NodeView;
    use crate::ops::{Elementwise, Halt, MatMul};

    fn matrix() -> (Builder, Value) {
        let mut b = Builder::new();
        let x = b.input("x", &Type::f32(&[2, 2])).unwrap();
        (b, x)
    }

    #[test]
    fn equal_ops_on_equal_values_are_one_value() {
        let (mut b, x) = matrix();
        let square = b.matmul(x, x).unwrap();
        assert_eq!(b.matmul(x, x).unwrap(), square);
        let twice = |alpha| MatMul {
            a_transposed: false,
            b_transposed: false,
            alpha,
        };
        // Another setting, other values, another order: other values.
        let others = [
            b.op1(twice(2.0), &[x, x]).unwrap(),
            b.matmul(square, x).unwrap(),
            b.matmul(x, square).unwrap(),
        ];
        let mut distinct = vec![square];
        distinct.extend(others);
        distinct.dedup();
        assert_eq!((distinct.len(), b.nodes.len()), (4, 4));
    }

    /// Adds a private op, `Same`, whose result is `$value`.
    macro_rules! same {
        ($b:expr, $value:literal) => {{
            #[derive(Debug, PartialEq)]
            struct Same;
            impl Op for Same {
                fn name(&self) -> &'static str {
                    "same"
                }
                fn outputs(&self, _inputs: &[&Type]) -> Result<Vec<Type>> {
                    Ok(vec![Type::scalar()])
                }
                fn gradient(&self, _: &NodeView<'_>, _: &mut Gradients<'_>) -> Result<()> {
                    Ok(())
                }
                fn run(&self, frame: &mut Frame<'_>) {
                    frame.output(0).values.fill($value);
                }
                fn cuda(&self, to: &mut Lowering<'_>) {
                    Elementwise::constant($value, &[]).cuda(to);
                }
            }
            $b.op1(Same, &[]).unwrap()
        }};
    }

    #[test]
    fn ops_of_one_name_and_two_types_are_two_values() {
        let mut b = Builder::new();
        let values = [same!(b, 1.0), same!(b, 2.0)];
        for (name, value) in ["one", "two"].into_iter().zip(values) {
            b.output(name, value);
        }
        let (mut executor, mut store) = (Alone::new(&b, Arc::new(Pool::single())), Store::new());
        executor.run(&mut store);
        let found = ["one", "two"].map(|name| executor.output(name, &store)[0].to_bits());
        assert_eq!(found, [1f32, 2.0].map(f32::to_bits));
    }

    #[test]
    fn ops_of_one_debug_text_and_two_settings_are_two_values() {
        #[derive(PartialEq)]
        struct Hidden(f32);
        impl fmt::Debug for Hidden {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "Hidden")
            }
        }
        impl Op for Hidden {
            fn name(&self) -> &'static str {
                "hidden"
            }
            fn run(&self, _: &mut Frame<'_>) {}
            fn cuda(&self, _: &mut Lowering<'_>) {}
        }
        let (mut b, x) = matrix();
        let [one, two, again] =
            [1.0, 2.0, 1.0].map(|setting| b.op1(Hidden(setting), &[x]).unwrap());
        assert_ne!(one, two);
        assert_eq!(one, again);
    }

    #[test]
    fn an_op_writes_only_to_tensors_of_the_store_given_once() {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let slot = store.zeros("halt", &[2]);
        let halt = b.persistent(&store, slot);
        let input = b.input("input", &Type::f32(&[2])).unwrap();
        let mut refused = |halt, norms: &[Value]| b.halt(halt, norms).unwrap_err().to_string();
        assert_eq!(
            refused(halt, &[input, halt]),
            "halt: writes to f32 [2], which it is given twice"
        );
        assert_eq!(
            refused(input, &[]),
            "halt: writes to f32 [2], which is not in the store"
        );
    }

    #[test]
    fn ops_that_write_to_the_store_are_never_merged() {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let slot = store.zeros("halt", &[2]);
        let halt = b.persistent(&store, slot);
        b.op(Halt, &[halt]).unwrap();
        b.op(Halt, &[halt]).unwrap();
        assert_eq!(b.nodes.len(), 2);
    }

    #[test]
    fn inputs_tensors_and_step_scalars_are_found_by_name() {
        let (mut b, x) = matrix();
        let mut store = Store::new();
        let slot = store.zeros("w", &[3]);
        assert_eq!(b.input("x", &Type::f32(&[2, 2])), Ok(x));
        assert_eq!(b.persistent(&store, slot), b.persistent(&store, slot));
        assert_eq!(b.step_scalar("lr"), b.step_scalar("lr"));
        assert_ne!(b.step_scalar("lr"), b.step_scalar("p"));
        let other = b.input("x", &Type::f32(&[4]));
        assert_eq!(
            other.map_err(|error| error.to_string()),
            Err("input: `x` is f32 [2, 2] already, not f32 [4]".to_owned())
        );
    }

    #[test]
    fn step_scalars_are_set_by_name() {
        let (mut b, x) = matrix();
        let (lr, p) = (b.step_scalar("lr"), b.step_scalar("p"));
        b.output("x", x);
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        executor.set_scalar("p", 0.5);
        executor.set_scalar("a name of another program", 7.0);
        let found = [executor.scalar(lr), executor.scalar(p)].map(f32::to_bits);
        assert_eq!(found, [0f32, 0.5].map(f32::to_bits));
    }

    #[test]
    fn adding_to_a_value_of_another_type_is_refused() {
        let (mut b, x) = matrix();
        let op = MatMul::stored(false, false);
        let row = b.input("row", &Type::f32(&[1, 2])).unwrap();
        let error = b.matmul_into(op, row, x, x).unwrap_err();
        assert_eq!(error.to_string(), "matmul: adds f32 [1, 2] to f32 [2, 2]");
    }

    #[test]
    #[should_panic(expected = "the CPU executor holds no bf16 values")]
    fn a_bf16_program_does_not_run_on_the_cpu() {
        let mut b = Builder::new();
        let ty = Type {
            dtype: crate::DType::Bf16,
            dims: vec![2],
        };
        let x = b.input("x", &ty).unwrap();
        b.output("x", x);
        Alone::new(&b, Arc::new(Pool::single()));
    }
}
