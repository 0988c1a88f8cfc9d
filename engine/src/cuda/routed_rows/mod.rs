//! Routed rows on a device, next to each other in matrices that have room for them.
//!
//! Each step draws which rows take part in a site, and how many, but a captured graph has fixed
//! sizes. So a compacted matrix has room for more rows than any step routes: `n p + 4 sqrt(n)` of
//! `n` rows that are routed with probability `p`, each apart from all others. By Hoeffding's
//! inequality more are routed with a probability below `e^-32`; a row without room is NaN in the
//! site's output, which stops a run. Matrices have room for all rows where the program does not draw
//! the route. Rows behind those that are routed are zeros.
//!
//! ```text
//! route -> routed_rows -> list           the numbers of the routed rows, and the place of each row
//! x, list -> gather -> x of these rows
//! rows, list -> spread -> y              the rows at their positions, beside the clean path
//! ```
//!
//! [`on_device`] writes every op on routed rows by these, and by ops on matrices that just have
//! fewer rows. A gathered matrix serves the product of a pass and that of its gradient.
//!
//! The clean path of a site has the share `s` of its positions, of which those that are not routed
//! have `s = 1`. So a site's output takes the place of its clean output, if nothing else reads that,
//! and only routed rows are read and written. With `G` the gradient of the output, that of `x` is
//!
//! ```text
//! (s G) W + spread(gA V^T)    as    s (G W) + spread(gA V^T)
//! ```
//!
//! which does the same to the product `G W`, and makes no `s G`.

#[cfg(feature = "compare-emulated")]
pub(super) mod on_cpu;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::lowering::{Argument, Lowering, Source, arguments, constants};
use super::readers::Readers;
use crate::alike::{Alike, Of};
use crate::derivation::SiteInputs;
use crate::op::{Builder, Home, Node, Op, op};
use crate::ops::indices;
use crate::ops::site::masked::{MaskedGrad, unlisted_bytes};
use crate::ops::site::output::Share;
use crate::ops::site::routed_matmul::Kind;
use crate::ops::{CompactRows, Masked, MatMul, RoutedMatMul, SiteOutput, Uniform, UniformSubsets};
use crate::value::{DType, Type, Value};

const KERNELS: Source = Source::new("routed_rows", include_str!("kernel.cu"));

/// Threads of the block that lists routed rows.
const THREADS: usize = 512;

/// Square roots of the number of rows by which there is room for more rows than expected. A standard
/// deviation of the number of routed rows is half a root at most.
const ROOTS: f64 = 4.0;

/// Room is a multiple of so many rows: a part of the tile of a product.
const TILE: usize = 64;

/// The list of routed rows: from routes f32 `[rows]`, the numbers of the routed rows in order, then
/// of each row its place among them, u32 `[room + rows]`.
#[derive(Debug, PartialEq)]
struct RoutedRows;

/// The listed rows of a matrix of all rows, or of a compacted one, whose own list follows.
#[derive(Debug, PartialEq)]
struct Gather;

/// Rows of a compacted matrix at their positions, beside the clean path: `y = x + s c + (1 - s) b`.
/// Inputs: `x`, a clean value that is read, bias, delta, list.
#[derive(Debug, PartialEq)]
struct Spread {
    clean: Option<Clean>,
    bias: bool,
    delta: bool,
}

impl Spread {
    /// Indices of the clean value that is read, bias and delta.
    fn others(&self) -> [Option<usize>; 3] {
        let reads = self.clean == Some(Clean::Read);
        indices(1, [reads, self.bias, self.delta])
    }
}

/// A clean value.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Clean {
    /// It is an input.
    Read,
    /// The result takes its place.
    Replaced,
}

impl Op for RoutedRows {
    op! { name "routed_rows"; of_devices; }

    fn cuda(&self, to: &mut Lowering<'_>) {
        let rows = to.ty(0).len();
        let room = to.output_ty(0).len() - rows;
        let (route, list) = (to.input(0), to.output(0));
        to.kernel(KERNELS, "list_rows", &constants![THREADS, rows, room])
            .threads(THREADS)
            .launch(&arguments![route, list]);
    }
}

impl Op for Gather {
    op! {
        name "gather_rows"; of_devices;
        alike(self, _inputs, _outputs) Alike::columns([Of::Input(0), Of::Output(0)]);
        untouched_bytes(self, inputs, _outputs, _adds) match inputs {
            [x, list] => unlisted_bytes(x, list),
            _ => 0,
        };
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        let (room, columns) = (to.output_ty(0).rows(), to.ty(0).columns());
        let is_compacted = to.inputs() > 2;
        let room_of_x = if is_compacted { to.ty(0).rows() } else { 0 };
        let (x, list, y) = (to.input(0), to.input(1), to.output(0));
        let list_of_x = if is_compacted { to.input(2) } else { list };
        to.kernel(
            KERNELS,
            "gather_rows",
            &constants![room, columns, room_of_x],
        )
        .fours(room, columns)
        .launch(&arguments![x, list, list_of_x, y]);
    }
}

impl Op for Spread {
    op! {
        name "spread_rows"; of_devices;
        untouched_bytes(self, inputs, outputs, adds) match self.clean {
            Some(Clean::Read) => 0,
            // Rows that are not routed stay as they are.
            _ if adds => 2 * unlisted_bytes(outputs[0], inputs[inputs.len() - 1]),
            _ => 0,
        };
    }

    fn alike(&self, _inputs: &[&Type], _outputs: &[&Type]) -> Vec<Alike> {
        let [clean, bias, _] = self.others();
        let columns = [Some(0), clean, bias].into_iter().flatten();
        Alike::columns(columns.map(Of::Input).chain([Of::Output(0)]))
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        let (rows, columns) = (to.output_ty(0).rows(), to.ty(0).columns());
        let [clean, bias, delta] = self.others();
        let replaced = self.clean == Some(Clean::Replaced);
        let deltas = delta.map_or(0, |delta| to.ty(delta).len());
        let adds = to.adds(0) && !replaced;
        let sizes = constants![rows, columns, to.ty(0).rows()];
        let settings = constants![clean.is_some(), replaced, self.bias, deltas, adds];
        let optional = |index: Option<usize>| Argument::from(index.map(|index| to.input(index)));
        let (x, list, y) = (to.input(0), to.input(to.inputs() - 1), to.output(0));
        let arguments = [
            x.into(),
            list.into(),
            // Of any type, where none is read.
            to.input(clean.unwrap_or(0)).into(),
            optional(bias),
            optional(delta),
            y.into(),
        ];
        to.kernel(KERNELS, "spread_rows", &[&sizes[..], &settings].concat())
            .fours(rows, columns)
            .launch(&arguments);
    }
}

/// The program of a device, with compacted matrices of fixed sizes; values keep their numbers.
pub(crate) fn on_device(from: &Builder) -> Builder {
    compacted_by(from, room)
}

/// With room for as many rows as a function gives, from all rows and the probability of each.
fn compacted_by(from: &Builder, room: fn(usize, f64) -> usize) -> Builder {
    let readers = Readers::new(from);
    let (nodes, scaled) = share_behind_products(from, &readers);
    let mut compacting = Compacting {
        room,
        readers,
        scaled,
        to: from.with_nodes(Vec::new()),
        lists: BTreeMap::new(),
        list_of: BTreeMap::new(),
        gathered: BTreeMap::new(),
    };
    for (index, node) in nodes.iter().enumerate() {
        if let Some(node) = node {
            compacting.append(index, node);
        }
    }
    compacting.to
}

/// The clean path beside the rows of a site, and a value to add to.
#[derive(Debug, Clone, Copy)]
struct Beside {
    path: Option<SiteInputs>,
    into: Option<Value>,
}

impl Beside {
    /// Of a node without a clean path.
    fn of(node: &Node) -> Self {
        let into = node.into.first().copied().flatten();
        Self { path: None, into }
    }
}

/// The nodes of a program in which the products `(s G) W` are `G W` wherever a node that spreads
/// rows can multiply by `s`, and what is beside the rows of such nodes, by their indices.
fn share_behind_products(
    from: &Builder,
    readers: &Readers,
) -> (Vec<Option<Node>>, BTreeMap<usize, Beside>) {
    let mut nodes: Vec<Option<Node>> = from.nodes.iter().cloned().map(Some).collect();
    let mut scaled = BTreeMap::new();
    for (index, share) in from.nodes.iter().enumerate() {
        let Some(path) = share.op.get::<Share>().map(|op| op.inputs(&share.inputs)) else {
            continue;
        };
        let (g, s_g) = (share.inputs[0], share.outputs[0]);
        let adds = share.into.iter().any(Option::is_some);
        let Some(at) = readers.only(s_g).filter(|_| !adds) else {
            continue;
        };
        let product = &from.nodes[at];
        let g_w = product.outputs[0];
        let Some(spread) = readers.only(g_w) else {
            continue;
        };
        let is_product = product
            .op
            .get::<MatMul>()
            .is_some_and(|op| !op.a_transposed)
            && product.inputs[0] == s_g
            && product.inputs.len() == 2
            && from.ty(g).dtype == from.ty(s_g).dtype;
        let node = &from.nodes[spread];
        let is_spread = node.op.get::<RoutedMatMul>().is_some_and(|op| op.spreads())
            && node.into == [Some(g_w)]
            && node.inputs.get(2) == path.route.as_ref();
        if is_product && is_spread {
            let beside = Beside {
                path: Some(SiteInputs {
                    clean: Some(g_w),
                    ..path
                }),
                into: product.into.first().copied().flatten(),
            };
            scaled.insert(spread, beside);
            nodes[index] = None;
            nodes[at] = Some(Node {
                inputs: vec![g, product.inputs[1]],
                into: Vec::new(),
                ..product.clone()
            });
        }
    }
    (nodes, scaled)
}

/// A list of routed rows, and the number of rows that it has room for.
#[derive(Debug, Clone, Copy, PartialEq)]
struct List {
    value: Value,
    room: usize,
}

/// A program while it is compacted.
struct Compacting {
    room: fn(usize, f64) -> usize,
    readers: Readers,
    scaled: BTreeMap<usize, Beside>,
    to: Builder,
    /// The list of each route.
    lists: BTreeMap<Value, List>,
    /// The list of each compacted matrix.
    list_of: BTreeMap<Value, List>,
    /// Gathered rows, by their matrix and list.
    gathered: BTreeMap<[Value; 2], Value>,
}

impl Compacting {
    fn append(&mut self, index: usize, node: &Node) {
        if let Some(&op) = node.op.get::<RoutedMatMul>() {
            return self.product(op, index, node);
        }
        if let Some(op) = node.op.get::<CompactRows>() {
            return self.compact_rows(op.back, index, node);
        }
        let output = node.op.get::<SiteOutput>();
        if let Some(path) = output.map(|op| op.joined(&node.inputs))
            && path.route.is_some()
        {
            return self.output(path, index, node);
        }
        let mut node = node.clone();
        let (route, is_compacted) = match (node.op.get::<Masked>(), node.op.get::<MaskedGrad>()) {
            (Some(mask), _) => (mask.route(0), true),
            (_, Some(grad)) => (grad.of.route(1), grad.is_of_activations()),
            // Casts and sums treat each row alike.
            _ => (None, true),
        };
        let list = match route {
            Some(route) => {
                let list = self.list(node.inputs[route], &node);
                node.inputs[route] = list.value;
                Some(list)
            }
            None => node
                .inputs
                .first()
                .and_then(|x| self.list_of.get(x).copied()),
        };
        if let Some(list) = list.filter(|_| is_compacted) {
            self.compact(node.outputs[0], list);
        }
        self.to.append(node);
    }

    /// `Y = A W` or `W = A^T G`, over the rows that both matrices of rows have.
    fn product(&mut self, op: RoutedMatMul, index: usize, node: &Node) {
        let ([a, b], y) = ([0, 1].map(|index| node.inputs[index]), node.outputs[0]);
        let routes = &node.inputs[2..];
        let mut list = |is_compacted: bool, route: Option<&Value>| {
            let route = route.filter(|_| is_compacted);
            route.map(|&route| self.list(route, node))
        };
        let lists = [
            list(op.first, routes.first()),
            list(op.second, routes.last()),
        ];
        match (op.kind, lists) {
            (Kind::Rows { transposed }, [_, None]) => {
                let product = self.product_of_rows(transposed, [a, b], node);
                let beside = self.scaled.get(&index).copied();
                self.spread(product, beside.unwrap_or(Beside::of(node)), index, node);
            }
            (Kind::Rows { transposed }, [_, Some(list)]) => {
                let a = self.gather(a, list, node);
                self.compact(y, list);
                self.multiply([false, transposed], [a, b], node);
            }
            (Kind::Sums, [_, Some(list)]) => {
                let a = self.gather(a, list, node);
                self.multiply([true, false], [a, b], node);
            }
            (Kind::Sums, [first, None]) => {
                let b = first.map_or(b, |list| self.gather(b, list, node));
                self.multiply([true, false], [a, b], node);
            }
        }
    }

    fn compact_rows(&mut self, back: bool, index: usize, node: &Node) {
        let [x, route] = [0, 1].map(|index| node.inputs[index]);
        if back {
            return self.spread(x, Beside::of(node), index, node);
        }
        let (list, rows) = (self.list(route, node), node.outputs[0]);
        self.compact(rows, list);
        self.gather_to(rows, x, list, node);
    }

    fn output(&mut self, path: SiteInputs, index: usize, node: &Node) {
        let factors = [0, 1].map(|index| node.inputs[index]);
        let product = self.product_of_rows(false, factors, node);
        let path = Some(path);
        self.spread(product, Beside { path, into: None }, index, node);
    }

    /// The product of a compacted matrix and a weight, which a node then spreads.
    fn product_of_rows(&mut self, transposed: bool, factors: [Value; 2], node: &Node) -> Value {
        let list = self.list_of[&factors[0]];
        let ty = self.to.ty(node.outputs[0]).clone();
        let product = self.rows(ty, list);
        let node = Node {
            into: Vec::new(),
            outputs: vec![product],
            ..node.clone()
        };
        self.multiply([false, transposed], factors, &node);
        product
    }

    /// Multiplies two matrices in the place of a node.
    fn multiply(&mut self, [a, b]: [bool; 2], factors: [Value; 2], node: &Node) {
        self.to.append(Node {
            op: Arc::new(MatMul::stored(a, b)),
            inputs: factors.to_vec(),
            ..node.clone()
        });
    }

    /// Spreads a compacted matrix in the place of a node, beside what else there is.
    fn spread(&mut self, x: Value, beside: Beside, index: usize, node: &Node) {
        let Beside { path, into } = beside;
        let SiteInputs {
            clean, bias, delta, ..
        } = path.unwrap_or_default();
        let replaced = clean.filter(|&clean| {
            let is_result = self.to.maker(clean).is_some();
            let [is, becomes] = [clean, node.outputs[0]].map(|value| self.to.ty(value).dtype);
            let alone = self.readers.only(clean) == Some(index);
            into.is_none() && is_result && is == becomes && alone
        });
        let read = clean.filter(|_| replaced.is_none());
        let list = self.list_of[&x].value;
        let op = Spread {
            clean: clean.map(|_| replaced.map_or(Clean::Read, |_| Clean::Replaced)),
            bias: bias.is_some(),
            delta: delta.is_some(),
        };
        let inputs = [Some(x), read, bias, delta, Some(list)];
        self.to.append(Node {
            op: Arc::new(op),
            inputs: inputs.into_iter().flatten().collect(),
            into: vec![into.or(replaced)],
            ..node.clone()
        });
    }

    /// The listed rows of a matrix.
    fn gather(&mut self, x: Value, list: List, node: &Node) -> Value {
        if self.list_of.get(&x) == Some(&list) {
            return x;
        }
        if let Some(&known) = self.gathered.get(&[x, list.value]) {
            return known;
        }
        let ty = self.to.ty(x).clone();
        let rows = self.rows(ty, list);
        self.gathered.insert([x, list.value], rows);
        self.gather_to(rows, x, list, node);
        rows
    }

    fn gather_to(&mut self, rows: Value, x: Value, list: List, node: &Node) {
        let of_x = self.list_of.get(&x).map(|list| list.value);
        self.to.append(Node {
            op: Arc::new(Gather),
            inputs: [x, list.value].into_iter().chain(of_x).collect(),
            into: Vec::new(),
            outputs: vec![rows],
            eager: false,
            part: node.part,
        });
    }

    /// A new compacted matrix, with the columns of a type.
    fn rows(&mut self, ty: Type, list: List) -> Value {
        let home = Home::Node(self.to.nodes.len());
        let value = self.to.value(ty, home);
        self.compact(value, list);
        value
    }

    /// Makes a value a compacted matrix.
    fn compact(&mut self, value: Value, list: List) {
        let ty = &mut self.to.types[value.index()];
        ty.dims = vec![list.room, ty.columns()];
        self.list_of.insert(value, list);
    }

    /// The list of a route.
    fn list(&mut self, route: Value, node: &Node) -> List {
        if let Some(&list) = self.lists.get(&route) {
            return list;
        }
        let rows = self.to.ty(route).len();
        let room = (self.room)(rows, self.share(route));
        let ty = Type {
            dtype: DType::U32,
            dims: vec![room + rows],
        };
        let home = Home::Node(self.to.nodes.len());
        let value = self.to.value(ty, home);
        self.to.append(Node {
            op: Arc::new(RoutedRows),
            inputs: vec![route],
            into: Vec::new(),
            outputs: vec![value],
            eager: false,
            part: node.part,
        });
        let list = List { value, room };
        self.lists.insert(route, list);
        list
    }

    /// The probability of a row to be routed: 1 if the program does not draw the route.
    fn share(&self, route: Value) -> f64 {
        let Some(maker) = self.to.maker(route) else {
            return 1.0;
        };
        let op = &self.to.nodes[maker].op;
        let below = op.get::<Uniform>().and_then(|op| op.below);
        match (below, op.get::<UniformSubsets>()) {
            (Some(probability), _) => f64::from(probability),
            (_, Some(op)) => (op.sites as f64 + 1.0) / (2.0 * op.sites as f64),
            _ => 1.0,
        }
    }
}

/// Rows to have room for, of `rows` that are each routed with a probability.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it is positive, and little more than `rows`"
)]
fn room(rows: usize, probability: f64) -> usize {
    let expected = rows as f64 * probability;
    let most = expected + ROOTS * (rows as f64).sqrt();
    (most.ceil() as usize).next_multiple_of(TILE).min(rows)
}

#[cfg(test)]
mod tests;
