use candle_core::{D, Device, Tensor};

use super::*;
use crate::cpu::Alone;
use crate::cuda::tests::agree;
use crate::ops::oracle::{Oracle, close, random};
use crate::schedule::order;
use crate::{Plan, Pool, StepParameters, Store};

/// Rows, columns of `H`, and size of the vocabulary, for: one row; a head that is a multiple of no
/// size; chunks of many blocks, and a partial one; several strips; several blocks, some missing
/// from the last chunk; several strips in a part; one part with all strips.
const SHAPES: [[usize; 3]; 7] = [
    [1, 1, 2],
    [7, 3, 33],
    [14_000, 2, 20],
    [350, 5, 1100],
    [1100, 3, 300],
    [3, 2, 17_000],
    [100, 200, 300],
];

// Sums of 17,000 products of probabilities and differences of logarithms below 60, and of 1100
// gradients.
const TOLERANCE: f32 = 1e-5;

fn divergence(b: &mut Builder, target: Value, logits: Value) -> Result<Value> {
    let lse = b.log_sum_exp(target)?;
    b.kl_divergence(target, lse, logits)
}

fn log_softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    x.broadcast_sub(&x.exp()?.sum_keepdim(D::Minus1)?.log()?)
}

fn reference(target: &Tensor, logits: &Tensor) -> candle_core::Result<Tensor> {
    let rows = target.elem_count() / target.dim(D::Minus1)?;
    let (target, logits) = (log_softmax(target)?, log_softmax(logits)?);
    (target.exp()? * (target - logits)?)?.sum_all()? / rows as f64
}

/// Logits of `h` by a head, stored either way, with or without bias.
fn head(b: &mut Builder, v: &[Value], (transposed, bias): (bool, bool)) -> Result<Value> {
    let bias = bias.then(|| v[3]);
    if transposed {
        b.linear_oi(v[1], v[2], bias)
    } else {
        b.linear_io(v[1], v[2], bias)
    }
}

fn reference_head(v: &[Tensor], (transposed, bias): (bool, bool)) -> candle_core::Result<Tensor> {
    let w = if transposed { v[2].t()? } else { v[2].clone() };
    let logits = v[1].matmul(&w)?;
    if bias {
        logits.broadcast_add(&v[3])
    } else {
        Ok(logits)
    }
}

/// Target logits, `H`, `W` and `b` of a shape.
fn point([rows, d, vocabulary]: [usize; 3], transposed: bool, bias: bool) -> Oracle {
    let w = if transposed {
        [vocabulary, d]
    } else {
        [d, vocabulary]
    };
    let mut samples = vec![
        random(&[rows, vocabulary], 1),
        random(&[rows, d], 2),
        random(&w, 3),
    ];
    samples.extend(bias.then(|| random(&[vocabulary], 4)));
    Oracle::new(&samples).constant(0)
}

fn walks(b: &Builder, gradient: bool) -> usize {
    let name = format!("gradient: {gradient}");
    let nodes = order(b).into_iter().map(|node| &b.nodes[node].op);
    let walks = nodes.filter(|op| op.name() == "head_divergence");
    walks.filter(|op| format!("{op:?}").contains(&name)).count()
}

#[test]
fn value_and_gradient_agree_with_candle() {
    for (shape, how) in SHAPES.into_iter().zip([
        (true, false),
        (false, true),
        (true, true),
        (false, false),
        (true, false),
        (true, true),
        (true, false),
    ]) {
        let mut oracle = point(shape, how.0, how.1).constant(2);
        if how.1 {
            oracle = oracle.constant(3);
        }
        oracle
            .ours(|b, v| {
                let logits = head(b, v, how)?;
                divergence(b, v[0], logits)
            })
            .candle(|v| reference(&v[0], &reference_head(v, how)?))
            .agree(TOLERANCE);
    }
}

#[test]
fn gradients_of_a_trained_head_agree_with_candle() {
    for how in [(true, true), (false, true), (true, false)] {
        point([70, 3, 33], how.0, how.1)
            .ours(|b, v| {
                let logits = head(b, v, how)?;
                divergence(b, v[0], logits)
            })
            .candle(|v| reference(&v[0], &reference_head(v, how)?))
            .agree(TOLERANCE);
    }
}

#[test]
fn a_second_use_adds_to_the_gradient() {
    let how = (true, false);
    point([70, 3, 33], how.0, how.1)
        .constant(2)
        .ours(|b, v| {
            let logits = head(b, v, how)?;
            let twice = b.add(v[0], v[0])?;
            let (first, second) = (divergence(b, v[0], logits)?, divergence(b, twice, logits)?);
            b.add(first, second)
        })
        .candle(|v| {
            let logits = reference_head(v, how)?;
            reference(&v[0], &logits)? + reference(&(&v[0] * 2.0)?, &logits)?
        })
        .agree(TOLERANCE);
}

/// Labels of `rows`, some of them ignored.
fn labels(rows: usize, vocabulary: usize) -> Vec<u32> {
    let label = |row: usize| {
        if row % 5 == 3 {
            u32::MAX
        } else {
            u32::try_from((row * 37 + vocabulary - 1) % vocabulary).unwrap()
        }
    };
    (0..rows).map(label).collect()
}

#[test]
fn gradients_of_the_cross_entropy_agree_with_candle() {
    let (rows, vocabulary, how) = (70, 33, (false, true));
    let ids = labels(rows, vocabulary);
    point([rows, 3, vocabulary], how.0, how.1)
        .tokens("labels", &[rows], &ids)
        .ours(|b, v| {
            let logits = head(b, v, how)?;
            let labels = b.input("labels", &Type::u32(&[rows]))?;
            let lse = b.log_sum_exp(v[0])?;
            let both = b.kl_divergence_and_cross_entropy([v[0], lse, logits], labels)?;
            b.weighted_sum(&[(0.5, both[0]), (2.0, both[1])])
        })
        .candle(|v| {
            let logits = reference_head(v, how)?;
            let counts = ids.iter().filter(|&&id| id != u32::MAX).count();
            let onehot = ids.iter().flat_map(|&id| {
                (0..33u32).map(move |column| if id == column { 1f32 } else { 0.0 })
            });
            let onehot = Tensor::from_vec(onehot.collect(), (rows, vocabulary), &Device::Cpu)?;
            let likely = (log_softmax(&logits)? * onehot)?.sum_all()?;
            (reference(&v[0], &logits)? * 0.5)? - (likely * (2.0 / counts as f64))?
        })
        .agree(TOLERANCE);
}

/// A program that asks for all results of a walk, and for those of the plain ops on the same
/// logits.
#[test]
fn one_walk_gives_divergence_cross_entropy_and_gradient() {
    for [rows, d, vocabulary] in SHAPES {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let mut kept = |dims: &[usize], seed: u64| {
            let slot = store.add(seed.to_string(), dims, random(dims, seed).values);
            b.persistent(&store, slot)
        };
        let [target, h, w, bias] = [
            kept(&[rows, vocabulary], 1),
            kept(&[rows, d], 2),
            kept(&[vocabulary, d], 3),
            kept(&[vocabulary], 4),
        ];
        let ids = b.input("labels", &Type::u32(&[rows])).unwrap();
        let lse = b.log_sum_exp(target).unwrap();
        let logits = b.linear_oi(h, w, Some(bias)).unwrap();
        let ours = b.kl_divergence_and_cross_entropy([target, lse, logits], ids);
        let ours = ours.unwrap();
        let plain = [
            b.op1(KlDivergence, &[target, lse, logits]).unwrap(),
            b.cross_entropy(logits, ids).unwrap(),
        ];
        let [of_ours, of_plain] =
            [ours[0], plain[0]].map(|loss| b.gradients(loss, &[h]).unwrap()[0].unwrap());
        for (name, value) in [
            ("kl", ours[0]),
            ("ce", ours[1]),
            ("dh", of_ours),
            ("plain kl", plain[0]),
            ("plain ce", plain[1]),
            ("plain dh", of_plain),
        ] {
            b.output(name, value);
        }
        assert_eq!((walks(&b, true), walks(&b, false)), (1, 0));
        let words = labels(rows, vocabulary);
        let mut bits: Vec<Vec<u32>> = Vec::new();
        for threads in [1, 2] {
            let mut executor = Alone::new(&b, Arc::new(Pool::new(threads).unwrap()));
            executor.input_u32("labels").copy_from_slice(&words);
            executor.run(&mut store);
            for name in ["kl", "ce", "dh"] {
                let (found, plain) = (
                    executor.output(name, &store),
                    executor.output(&format!("plain {name}"), &store),
                );
                close(name, found, plain, TOLERANCE);
                bits.push(found.iter().map(|x| x.to_bits()).collect());
            }
        }
        assert!(
            bits[..3] == bits[3..],
            "the bits depend on the number of threads"
        );
        let inputs = [("labels", words)];
        agree(&b, &store, &inputs, &StepParameters::default(), TOLERANCE);
    }
}

#[test]
fn equal_logits_have_divergence_zero() {
    let h = random(&[70, 3], 2);
    Oracle::new(&[h.clone(), h, random(&[1100, 3], 3)])
        .constant(0)
        .constant(2)
        .ours(|b, v| {
            let [target, logits] = [0, 1].map(|index| b.linear_oi(v[index], v[2], None).unwrap());
            divergence(b, target, logits)
        })
        .candle(|v| (&v[1] - &v[1])?.sum_all())
        // The two computations of the logits differ in bits: sums of 3 products below 10, their
        // log-sum-exps below 20.
        .agree(4e-6);
}

/// A step that learns the factors of logits, `terms` of them: the program, its target and the
/// learned values.
fn step(terms: usize) -> (Builder, Value) {
    let (rows, d, vocabulary) = (640, 4, 5000);
    let (mut b, mut store) = (Builder::new(), Store::new());
    let [clean, x, w] = [[rows, d], [rows, d], [d, vocabulary]].map(|dims| {
        let slot = store.zeros(store.slots().count().to_string(), &dims);
        b.persistent(&store, slot)
    });
    let target = b.matmul(clean, w).unwrap();
    let mut h = x;
    let mut losses = Vec::new();
    for _ in 0..terms {
        h = b.relu(h).unwrap();
        let logits = b.matmul(h, w).unwrap();
        losses.push((1.0, divergence(&mut b, target, logits).unwrap()));
    }
    let loss = b.weighted_sum(&losses).unwrap();
    b.output("loss", loss);
    let gradient = b.gradients(loss, &[x]).unwrap()[0].unwrap();
    b.output("gradient", gradient);
    (b, x)
}

#[test]
fn only_the_logits_of_the_target_are_held_whole() {
    let matrix = 4 * 640 * 5000;
    for terms in [1, 3] {
        let (b, _) = step(terms);
        let wide = |&node: &usize| {
            let mut outputs = b.nodes[node].outputs.iter();
            outputs.any(|&value| b.ty(value).bytes() == matrix)
        };
        assert_eq!(order(&b).iter().filter(|&node| wide(node)).count(), 1);
        assert_eq!((walks(&b, true), walks(&b, false)), (terms, 0));
        // A chunk of 96 rows, and little else.
        let matrices = Plan::new(&b).live_bytes() as f64 / matrix as f64;
        assert!((1.0..1.25).contains(&matrices), "{matrices}");
    }
}

#[test]
fn a_gradient_that_is_asked_for_twice_is_one_value() {
    let (mut b, x) = step(2);
    let loss = b.outputs[0].1;
    let again = b.gradients(loss, &[x]).unwrap()[0].unwrap();
    b.output("again", again);
    assert_eq!(walks(&b, true), 2);
}

#[test]
fn logits_no_wider_than_their_factors_are_made() {
    for (d, expected) in [(33, 0), (32, 1)] {
        let mut b = Builder::new();
        let mut input = |name: &str, dims: &[usize]| b.input(name, &Type::f32(dims)).unwrap();
        let [target, h, w] = [
            input("target", &[7, 33]),
            input("h", &[7, d]),
            input("w", &[d, 33]),
        ];
        let logits = b.matmul(h, w).unwrap();
        let loss = divergence(&mut b, target, logits).unwrap();
        b.output("loss", loss);
        assert_eq!(walks(&b, false), expected, "{d}");
    }
}

#[test]
fn invalid_operands_are_refused() {
    let mut b = Builder::new();
    let mut input = |name: &str, dims: &[usize]| b.input(name, &Type::f32(dims)).unwrap();
    let [target, lse, h, w] = [
        input("target", &[7, 33]),
        input("lse", &[7]),
        input("h", &[7, 4]),
        input("w", &[4, 33]),
    ];
    let logits = b.matmul(h, w).unwrap();
    let loss = b.kl_divergence(target, lse, logits).unwrap();
    assert_eq!(
        b.gradients(loss, &[target, h]).unwrap_err().to_string(),
        "head_divergence: the target has no gradient"
    );
    let op = HeadDivergence {
        transposed: true,
        labels: false,
        bias: false,
        gradient: false,
    };
    assert_eq!(
        b.op(op, &[target, lse, h, w]).unwrap_err().to_string(),
        "head_divergence: needs f32 [.., v], [..], [.., d] and a head of [33, 4], found f32 [7, 33] with f32 [7], f32 [7, 4] \
         and f32 [4, 33]"
    );
    // For logits that do not fit, the error is about the logits.
    let other = b.input("other", &Type::f32(&[8, 33])).unwrap();
    let error = b.kl_divergence(other, lse, logits).unwrap_err().to_string();
    assert!(error.starts_with("kl_divergence: needs logits"), "{error}");
}
