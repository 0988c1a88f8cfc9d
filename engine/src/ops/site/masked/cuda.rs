use super::{Draw, Mask, Masked, MaskedGrad};
use crate::cuda::lowering::{
    Argument, Lowering, Source, arguments, constants, row_threads, stretches,
};
use crate::cuda::operand::Operand;
use crate::ops::importance::gates::cuda::{Sums, named, settings as settings_of_gates};
use crate::ops::{Gates, ImportanceGates, indices};
use crate::value::Type;

const KERNELS: Source = Source::new(
    "masked",
    concat!(
        include_str!("../../importance/gates/sigmoids.cuh"),
        include_str!("kernel.cu")
    ),
);

/// The settings of a mask for the kernels, the stream of its draws, and its threshold.
fn settings(op: &Masked) -> ([&'static str; 2], u32, f32) {
    let none = ("DRAW_NONE", 0);
    let draw = |draw: Draw| match draw {
        Draw::Uniform(stream) => ("DRAW_UNIFORM", stream.word()),
        Draw::Coin(stream) => ("DRAW_COIN", stream.word()),
        Draw::Given => ("DRAW_GIVEN", 0),
    };
    let (mask, (draw, word), threshold) = match op.mask {
        Mask::Importance => ("MASK_IMPORTANCE", none, 0.0),
        Mask::Between(from) => ("MASK_BETWEEN", draw(from), 0.0),
        Mask::Drawn(from) => ("MASK_DRAWN", draw(from), 0.0),
        Mask::Rounded(threshold) => ("MASK_ROUNDED", none, threshold),
        Mask::Ones => ("MASK_ONES", none, 0.0),
    };
    ([mask, draw], word, threshold)
}

/// The operands of a masked site, and its constants in the kernels: rows and columns, settings, then
/// which operands there are.
struct Site {
    /// Rows of importances, draws and deltas.
    rows: usize,
    /// Rows of activations: those that there is room for, if there is a list.
    own_rows: usize,
    columns: usize,
    a: Operand,
    importance: Option<Operand>,
    /// Whether the importances are logits, and the sigmoids of these.
    gates: Option<Gates>,
    given: Option<Operand>,
    delta: Option<Operand>,
    /// Rows that the list of routed rows has room for; 0 without a list.
    room: usize,
    /// The list, or any words without one.
    list: Operand,
    /// Stream of the draws.
    word: u32,
    threshold: f32,
    /// Index of the op's first input behind them.
    end: usize,
    constants: Vec<String>,
}

impl Site {
    /// Inputs from the one at `first` on.
    fn new(op: &Masked, gates: Option<Gates>, first: usize, to: &Lowering<'_>) -> Self {
        let (own_rows, columns) = (to.ty(first).rows(), to.ty(first).columns());
        let at = op.operands(first);
        let [_, given, delta, list] = at.map(|index| index.map(|index| to.ty(index)));
        let rows = list.map_or(own_rows, |list| list.len() - own_rows);
        let room = list.map_or(0, |_| own_rows);
        let given_rows = given.map_or(0, |given| given.len() / columns.max(1));
        let deltas = delta.map_or(0, Type::len);
        let end = first + 1 + at.into_iter().flatten().count();
        let [importance, given, delta, list] = at.map(|index| index.map(|index| to.input(index)));
        let ([mask, draw], word, threshold) = settings(op);
        Self {
            rows,
            own_rows,
            columns,
            a: to.input(first),
            importance,
            gates,
            given,
            delta,
            room,
            list: list.unwrap_or_else(|| to.parameters()),
            word,
            threshold,
            end,
            constants: constants![rows, columns, mask, draw, given_rows, deltas, room].to_vec(),
        }
    }

    /// The first arguments of the kernels: the step's parameters, the stream of the mask's draws,
    /// the gradient of its result if it is `gh`, activations, importances, given draws, deltas and
    /// the list.
    fn arguments(&self, gh: Option<Operand>, to: &Lowering<'_>) -> Vec<Argument> {
        let mut all = arguments![to.parameters(), Argument::Word(self.word)].to_vec();
        all.extend(gh.map(Argument::from));
        let (importance, list) = (self.importance(), self.list);
        all.extend(arguments![self.a, importance, self.given, self.delta, list]);
        all
    }

    fn importance(&self) -> Argument {
        match (self.gates, self.importance) {
            (Some(gates), Some(logits)) => Argument::Wrapped {
                by: "Gated",
                constant: named(gates),
                operand: logits,
            },
            (_, importance) => importance.into(),
        }
    }
}

/// `gates`: the sigmoids of the logits that stand in the place of importances, if they do.
pub(crate) fn value(op: &Masked, gates: Option<Gates>, to: &mut Lowering<'_>) {
    let site = Site::new(op, gates, 0, to);
    let mut arguments = site.arguments(None, to);
    arguments.extend(arguments![to.output(0), site.threshold]);
    to.kernel(KERNELS, "masked", &site.constants)
        .fours(site.own_rows, site.columns)
        .launch(&arguments);
}

/// As [`value`] with logits, and then their penalty sums and L0, two more results.
pub(crate) fn with_sums(op: &Masked, gates: &ImportanceGates, to: &mut Lowering<'_>) {
    let site = Site::new(op, None, 0, to);
    let sums = Sums::new(site.rows, site.columns, to);
    let ([sigmoids, _, penalty, parameter], _) = settings_of_gates(gates);
    let mut constants = site.constants.clone();
    constants.extend(constants![sigmoids, penalty, parameter, sums.stretch]);
    let ([across, down], [parts, counts]) = (sums.blocks, sums.parts());
    let mut arguments = site.arguments(None, to);
    let (h, threshold) = (to.output(0), site.threshold);
    arguments.extend(arguments![h, parts, counts, threshold, gates.alive]);
    to.kernel(KERNELS, "masked_with_sums", &constants)
        .blocks(across, down)
        .launch(&arguments);
    sums.finish(1, to);
}

/// A gradient that is written or added to.
type Gradient = Option<(Operand, bool)>;

/// The number of a gradient in the kernels: whether it is needed, and added to.
fn want(gradient: Gradient) -> usize {
    gradient.map_or(0, |(_, add)| 1 + usize::from(add))
}

/// As [`value`].
pub(crate) fn gradient(op: &MaskedGrad, gates: Option<Gates>, to: &mut Lowering<'_>) {
    let site = Site::new(&op.of, gates, 1, to);
    let gh = to.input(0);
    let [a, importance, given, delta] = op.results().map(|index| -> Gradient {
        let index = index?;
        Some((to.output(index), to.adds(index)))
    });
    let sums = op.sums(|index| to.ty(index), site.rows);
    let each_given = given.filter(|_| !sums.given);
    let each = [a, importance, each_given];
    // Any result can stand for one that is not needed: the kernel does not touch it.
    if let Some((any, _)) = each.into_iter().flatten().next() {
        let mut constants = site.constants.clone();
        constants.extend(each.map(|gradient| want(gradient).to_string()));
        let mut arguments = site.arguments(Some(gh), to);
        arguments.extend(each.map(|gradient| Argument::from(gradient.map_or(any, |g| g.0))));
        arguments.push(site.threshold.into());
        to.kernel(KERNELS, "masked_grad", &constants)
            .fours(site.rows, site.columns)
            .launch(&arguments);
    }
    if let Some(given) = given.filter(|_| sums.given) {
        source_sums(op, &site, gh, given, to);
    }
    if let Some(delta) = delta {
        delta_grad(&site, gh, (delta, sums.delta), to);
    }
}

/// Lowers the gradients of activations, if they are wanted, and of the logits of importances. Two
/// inputs follow those of `op`, if they are there: the gradient of the importances from other
/// readers, and that of the penalty sums. If there is one more result, it is the sums over the rows
/// of the gradient of the logits.
pub(crate) fn to_logits(
    op: &MaskedGrad,
    gates: &ImportanceGates,
    [before, of_sums]: [bool; 2],
    to: &mut Lowering<'_>,
) {
    let site = Site::new(&op.of, None, 1, to);
    let of_a = op.is_of_activations();
    let a = of_a.then(|| (to.output(0), to.adds(0)));
    let logits = to.output(usize::from(of_a));
    let ([sigmoids, _, penalty, parameter], _) = settings_of_gates(gates);
    let sums_rows = to.outputs() > usize::from(of_a) + 1;
    let row_sums = sums_rows.then(|| to.row_sums(site.rows, site.columns, 4));
    let stretch = row_sums.as_ref().map_or(0, |sums| sums.stretch);
    let mut constants = site.constants.clone();
    constants.extend(constants![sigmoids, penalty, parameter]);
    constants.extend(constants![want(a), before, of_sums, stretch]);
    let after = indices(site.end, [before, of_sums]);
    let after = after.map(|index| Argument::from(index.map(|index| to.input(index))));
    let mut arguments = site.arguments(Some(to.input(0)), to);
    arguments.extend(after);
    arguments.extend(arguments![a.map_or(logits, |(a, _)| a), logits]);
    // Without sums, the kernel takes any result.
    let parts = row_sums.as_ref().map_or(logits, |sums| sums.parts.out());
    arguments.extend(arguments![parts, site.threshold]);
    let kernel = to.kernel(KERNELS, "masked_logits_grad", &constants);
    match row_sums {
        None => kernel.fours(site.rows, site.columns).launch(&arguments),
        Some(sums) => {
            kernel
                .blocks(sums.blocks[0], sums.blocks[1])
                .launch(&arguments);
            let at = usize::from(of_a) + 1;
            let to_sums = (to.output(at), to.adds(at));
            to.add_stretches(sums.parts, (0, site.columns), to_sums);
        }
    }
}

fn source_sums(
    op: &MaskedGrad,
    site: &Site,
    gh: Operand,
    given: (Operand, bool),
    to: &mut Lowering<'_>,
) {
    let (stretch, count) = stretches(site.rows, site.columns);
    let parts = to.scratch(count * site.columns);
    let between = matches!(op.of.mask, Mask::Between(_));
    let constants = constants![site.rows, site.columns, stretch, between, site.room];
    let importance = site.importance();
    let arguments = arguments![gh, site.a, importance, site.list, parts.out()];
    to.kernel(KERNELS, "masked_source_sums", &constants)
        .blocks(site.columns.div_ceil(32), count)
        .launch(&arguments);
    to.add_stretches(parts, (0, site.columns), given);
}

fn delta_grad(
    site: &Site,
    gh: Operand,
    (delta, summed): ((Operand, bool), bool),
    to: &mut Lowering<'_>,
) {
    let dots = if summed {
        to.scratch(site.rows)
    } else {
        delta.0
    };
    let threads = row_threads(site.columns);
    let constants = constants![threads, site.columns, delta.1 && !summed, site.room];
    to.kernel(KERNELS, "masked_delta_grad", &constants)
        .blocks(site.rows, 1)
        .threads(threads)
        .launch(&arguments![gh, site.a, site.list, dots.out()]);
    if summed {
        to.sum_parts(dots, delta, 1.0);
    }
}
