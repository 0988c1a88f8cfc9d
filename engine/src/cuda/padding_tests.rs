//! Padded programs beside the same programs without padding.

use std::collections::BTreeSet;

use spd_draws::{Purpose, Stream};

use super::casts::stored;
use super::every_op::{EVEN, EveryOp, RAGGED, Sizes};
use super::padding::padded;
use super::placed::Step;
use super::program::Program;
use super::tests::{Found, Inputs, numbers, replay};
use crate::derivation::SiteInputs;
use crate::op::{Builder, Result};
use crate::ops::oracle::random;
use crate::ops::{Draw, Mask, MaskValues};
use crate::precision::Precision;
use crate::step_parameters::StepParameters;
use crate::store::Store;
use crate::value::{DType, Type, Value};

/// A gated MLP whose three matrices are sites, behind a clean pass and before a head: hidden values
/// of 67 columns, a vocabulary of 131.
struct Mlp {
    b: Builder,
    store: Store,
    inputs: Vec<(&'static str, Vec<u32>)>,
}

const BATCH: [usize; 2] = [2, 35];
const D: usize = 64;
const HIDDEN: usize = 67;
const VOCABULARY: usize = 131;
const COMPONENTS: usize = 72;

/// Name of a real device ([`Found`]). Its library adds up products of other sizes in another order,
/// and what is summed then rounds to the bf16 beside it.
const ON_A_GPU: &str = "on the GPU";

/// Tolerance of results whose operands may be off by a bf16, 2^-8, behind several products.
const OTHER_SUMS: f32 = 2e-2;

/// How passes are compared.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Head {
    /// By their results.
    None,
    /// By logits, of which the target's are stored.
    Stored,
    /// By logits, of which none are stored.
    Streamed,
    /// By logits of a head that learns, and that knows labels.
    Learns,
}

const HEADS: [Head; 4] = [Head::None, Head::Stored, Head::Streamed, Head::Learns];

/// A site: its frozen matrix `[d_out, d_in]`, and `V` and `U`.
#[derive(Clone, Copy)]
struct Site {
    w: Value,
    v: Value,
    u: Value,
}

impl Mlp {
    fn new(head: Head) -> Self {
        let mut mlp = Self {
            b: Builder::with_precision(Precision::Bf16),
            store: Store::new(),
            inputs: Vec::new(),
        };
        mlp.build(head).unwrap();
        mlp
    }

    fn kept(&mut self, name: &str, dims: [usize; 2], frozen: bool) -> Value {
        let seed = self.store.slots().count() as u64;
        let scale = 1.0 / (dims[0] as f32).sqrt();
        let values = random(&dims, seed)
            .values
            .iter()
            .map(|x| scale * x)
            .collect();
        let slot = self.store.add(name, &dims, values);
        if frozen {
            self.store.freeze(slot);
        }
        self.b.persistent(&self.store, slot)
    }

    fn site(&mut self, name: &str, [d_in, d_out]: [usize; 2]) -> Site {
        Site {
            w: self.kept(&format!("{name} W"), [d_out, d_in], true),
            v: self.kept(&format!("{name} V"), [d_in, COMPONENTS], false),
            u: self.kept(&format!("{name} U"), [COMPONENTS, d_out], false),
        }
    }

    /// A matrix as it is, or through its components with masks number `number`.
    fn through(
        &mut self,
        site: Site,
        x: Value,
        number: Option<(u16, Option<Value>)>,
    ) -> Result<Value> {
        let Some((number, route)) = number else {
            return self.b.linear_oi(x, site.w, None);
        };
        let stream = Stream::new(Purpose::Source, 0, number);
        let masks = MaskValues {
            mask: Mask::Drawn(Draw::Uniform(stream)),
            importance: None,
            given: None,
            delta: None,
            route,
        };
        let a = match route {
            Some(route) => self.b.routed_matmul(x, site.v, route)?,
            None => self.b.matmul(x, site.v)?,
        };
        let h = self.b.masked(a, &masks)?;
        let clean = route
            .map(|_| self.b.linear_oi(x, site.w, None))
            .transpose()?;
        let with = SiteInputs {
            clean,
            route,
            ..SiteInputs::default()
        };
        self.b.site_output(h, site.u, &with)
    }

    fn build(&mut self, of: Head) -> Result<()> {
        if of == Head::Streamed {
            self.b.stream_target_logits();
        }
        let dims = [&BATCH[..], &[D]].concat();
        let x = self.b.input("x", &Type::f32(&dims))?;
        let words = random(&dims, 100).values;
        self.inputs
            .push(("x", words.iter().map(|x| x.to_bits()).collect()));
        let sites = [
            self.site("gate", [D, HIDDEN]),
            self.site("up", [D, HIDDEN]),
            self.site("down", [HIDDEN, D]),
        ];
        let head = self.kept("head", [VOCABULARY, D], true);
        let learns = self.kept("head that learns", [VOCABULARY, D], false);
        let rows = BATCH[0] * BATCH[1];
        let route = self
            .b
            .bernoulli(Stream::new(Purpose::Routing, 0, 0), rows, 0.5)?;
        let mut passes = Vec::new();
        for masks in [None, Some((0, None)), Some((3, Some(route)))] {
            let numbers = |site: u16| masks.map(|(first, route): (u16, _)| (first + site, route));
            let gate = self.through(sites[0], x, numbers(0))?;
            let up = self.through(sites[1], x, numbers(1))?;
            let hidden = self.b.swiglu(gate, up)?;
            let y = self.through(sites[2], hidden, numbers(2))?;
            passes.push(match of {
                Head::None => y,
                Head::Learns if masks.is_some() => self.b.linear_oi(y, learns, None)?,
                _ => self.b.linear_oi(y, head, None)?,
            });
        }
        let mut terms = Vec::new();
        if of != Head::Learns {
            terms.push((1.0, self.b.mean(passes[1])?));
        }
        let lse = self.b.log_sum_exp(passes[0])?;
        for &pass in &passes[1..] {
            terms.push((
                1.0,
                match of {
                    Head::None => self.b.mse(pass, passes[0])?,
                    _ => self.b.kl_divergence(passes[0], lse, pass)?,
                },
            ));
        }
        let mut leaves: Vec<Value> = sites.iter().flat_map(|site| [site.v, site.u]).collect();
        if of == Head::Learns {
            let labels = self.b.input("labels", &Type::u32(&BATCH))?;
            let words = (0..70).map(|row| if row % 5 == 3 { u32::MAX } else { row + 61 });
            self.inputs.push(("labels", words.collect()));
            terms.push((1.0, self.b.cross_entropy(passes[1], labels)?));
            leaves.push(learns);
        }
        let loss = self.b.weighted_sum(&terms)?;
        self.b.output("loss", loss);
        for (index, gradient) in self.b.gradients(loss, &leaves)?.into_iter().enumerate() {
            self.b
                .output(format!("gradient {index}"), gradient.expect("it has one"));
        }
        Ok(())
    }
}

/// Results of a program with and without padding; `None` without an emulator.
fn both(
    b: &Builder,
    store: &Store,
    inputs: Inputs<'_>,
    numbers: &StepParameters,
) -> Option<[Found; 2]> {
    let programs = [padded(stored(b)), stored(b)];
    let [found, expected] = programs.map(|b| replay(Program::of(&b), store, inputs, numbers));
    Some([found?, expected?])
}

/// Columns and sums of bf16 products with sides of at least 64.
fn sides(b: &Builder) -> Vec<[usize; 2]> {
    let program = Program::laid_out(b);
    let steps = program.steps.iter();
    let products = steps.filter_map(|step| match step {
        Step::Product(placed) => Some(placed.product),
        Step::Launch { .. } | Step::Copy { .. } => None,
    });
    let bf16 = products.filter(|product| product.a.operand.dtype == DType::Bf16);
    let large = bf16.filter(|product| product.m.min(product.n).min(product.k) >= 64);
    large.map(|product| [product.n, product.k]).collect()
}

#[test]
fn large_products_have_whole_vectors() {
    // Rows of the batch are summed over as they are.
    let rows = BATCH[0] * BATCH[1];
    let odd = |sides: Vec<[usize; 2]>| {
        let odd = |side: &usize| !side.is_multiple_of(8) && *side != rows;
        sides.iter().filter(|sides| sides.iter().any(odd)).count()
    };
    for head in HEADS {
        let b = stored(&Mlp::new(head).b);
        assert!(odd(sides(&b)) >= 20);
        assert_eq!(odd(sides(&padded(b))), 0);
    }
}

#[test]
fn what_is_kept_and_what_is_read_has_its_own_shape() {
    let from = stored(&Mlp::new(Head::Stored).b);
    let to = padded(stored(&Mlp::new(Head::Stored).b));
    for (name, output) in &to.outputs {
        assert_eq!(to.ty(*output), from.ty(*output), "{name}");
    }
    for (&value, &unpadded) in to.inputs.values().zip(from.inputs.values()) {
        assert_eq!(to.ty(value), from.ty(unpadded));
    }
    // The three frozen matrices and the head are padded as they are sent, in no op.
    let names = |b: &Builder| {
        let nodes = b.nodes.iter().filter(|node| node.op.name() == "cast");
        nodes.count()
    };
    assert_eq!(names(&to), names(&from));
}

#[test]
fn a_padded_program_gives_the_same_results() {
    for head in HEADS {
        let Mlp { b, store, inputs } = Mlp::new(head);
        let Some([(device, found), (_, expected)]) =
            both(&b, &store, &inputs, &StepParameters::default())
        else {
            return;
        };
        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
            let tolerance = match (name.starts_with("gradient"), head) {
                _ if device == ON_A_GPU => OTHER_SUMS,
                // A row of logits is summed in another order, up to 131 2^-24 of its sum off; a
                // gradient may then round to the other bf16 beside it, 2^-8 of an element off, in
                // some of 70 rows.
                (true, Head::Stored | Head::Streamed | Head::Learns) => 2e-3,
                // A product is rounded before it is added to the gradient of a weight.
                (true, Head::None) => 2.0 * f32::EPSILON,
                // Other orders of some thousand numbers.
                (false, _) => 1e-6,
            };
            near(name, found, expected, tolerance);
        }
    }
}

/// Asserts that results differ by up to a share of the largest of them.
fn near(name: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    let most =
        |values: &mut dyn Iterator<Item = f32>| values.fold(0f32, |most, x| most.max(x.abs()));
    let pairs = found.iter().zip(expected);
    let (off, scale) = (
        most(&mut pairs.map(|(found, expected)| found - expected)),
        most(&mut expected.iter().copied()),
    );
    println!("{name}: {off:e} of {scale:e}");
    assert!(
        off <= tolerance * scale,
        "{name} is {off} off, where the largest is {scale}"
    );
}

// Every op, with dimensions that are padded wherever the op allows it: the hidden values of the
// model. Others keep their lengths: targets are inputs in f32.
#[test]
fn every_op_gives_the_same_results_around_padding() {
    let sizes = Sizes {
        batch: 2,
        positions: 33,
        heads: 3,
        kv_heads: 1,
        size: 22,
        components: 67,
        hidden: 9,
        vocabulary: 131,
    };
    let every_op = EveryOp::new(sizes, true);
    let padded = padded(stored(&every_op.b));
    let names = padded.nodes.iter().filter(|node| {
        let mut operands = node.inputs.iter().chain(&node.outputs);
        operands.any(|value| padded.unpadded.contains_key(value))
    });
    let names: BTreeSet<_> = names.map(|node| node.op.name()).collect();
    for name in [
        "add",
        "cast",
        "gelu",
        "gelu_grad",
        "matmul",
        "swiglu",
        "swiglu_grad",
    ] {
        assert!(names.contains(name), "{name} is not among {names:?}");
    }
    let numbers = numbers(&every_op);
    let EveryOp {
        b, store, inputs, ..
    } = &every_op;
    let Some([(device, found), (_, expected)]) = both(b, store, inputs, &numbers) else {
        return;
    };
    for ((name, found), (_, expected)) in found.iter().zip(&expected) {
        // An update divides a gradient by its size, however small it is beside its roundings.
        if device != ON_A_GPU || !name.starts_with("leaf") {
            near(name, found, expected, OTHER_SUMS);
        }
    }
}

#[test]
fn small_programs_stay_as_they_are() {
    for sizes in [EVEN, RAGGED] {
        let b = padded(stored(&EveryOp::new(sizes, false).b));
        assert!(b.unpadded.is_empty());
    }
}
