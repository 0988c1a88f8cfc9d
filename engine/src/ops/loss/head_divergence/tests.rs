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

/// Divergence, cross-entropy and gradient of two rows of hidden values by one head, with the
/// target's logits streamed and with them made; and the divergence in f64.
#[test]
fn a_streamed_target_agrees_with_its_logits_and_with_f64() {
    for ([rows, d, vocabulary], (transposed, bias)) in SHAPES.into_iter().zip([
        (true, false),
        (false, true),
        (true, true),
        (false, false),
        (true, false),
        (true, true),
        (true, true),
    ]) {
        let mut results: Vec<Vec<Vec<f32>>> = Vec::new();
        let w = match transposed {
            true => [vocabulary, d],
            false => [d, vocabulary],
        };
        let given = [
            random(&[rows, d], 1),
            random(&[rows, d], 2),
            random(&w, 3),
            random(&[vocabulary], 4),
        ];
        for streamed in [false, true] {
            let (mut b, mut store) = (Builder::new(), Store::new());
            let v: Vec<Value> = (0..)
                .zip(&given)
                .map(|(index, sample): (u32, _)| {
                    let slot = store.add(index.to_string(), &sample.dims, sample.values.clone());
                    b.persistent(&store, slot)
                })
                .collect();
            if streamed {
                b.stream_target_logits();
            }
            let ids = b.input("labels", &Type::u32(&[rows])).unwrap();
            let [target, logits] = [0, 1].map(|hidden| {
                let v = [v[0], v[hidden], v[2], v[3]];
                head(&mut b, &v, (transposed, bias)).unwrap()
            });
            let lse = b.log_sum_exp(target).unwrap();
            let both = b.kl_divergence_and_cross_entropy([target, lse, logits], ids);
            let both = both.unwrap();
            let dh = b.gradients(both[0], &[v[1]]).unwrap()[0].unwrap();
            for (name, value) in [("kl", both[0]), ("ce", both[1]), ("dh", dh)] {
                b.output(name, value);
            }
            let is_whole = |&node: &usize| {
                let mut outputs = b.nodes[node].outputs.iter();
                outputs.any(|&value| b.ty(value).len() == rows * vocabulary)
            };
            let wide = order(&b).iter().filter(|&node| is_whole(node)).count();
            assert_eq!(wide, usize::from(!streamed && d < vocabulary));
            let words = labels(rows, vocabulary);
            for threads in [1, 2] {
                let mut executor = Alone::new(&b, Arc::new(Pool::new(threads).unwrap()));
                executor.input_u32("labels").copy_from_slice(&words);
                executor.run(&mut store);
                let outputs = ["kl", "ce", "dh"];
                results.push(
                    outputs
                        .map(|name| executor.output(name, &store).to_vec())
                        .into(),
                );
            }
            agree(
                &b,
                &store,
                &[("labels", words)],
                &StepParameters::default(),
                TOLERANCE,
            );
        }
        assert!(
            results[2] == results[3],
            "the bits depend on the number of threads"
        );
        for (name, (streamed, made)) in ["kl", "ce", "dh"]
            .iter()
            .zip(results[2].iter().zip(&results[0]))
        {
            close(name, streamed, made, TOLERANCE);
        }
        let [t, h, w, b] = given.map(|sample| sample.values);
        let row_logits = |hidden: &[f32], row: usize| -> Vec<f64> {
            let logit = |column: usize| {
                let product = |k: usize| {
                    let at = if transposed {
                        column * d + k
                    } else {
                        k * vocabulary + column
                    };
                    f64::from(hidden[row * d + k]) * f64::from(w[at])
                };
                (0..d).map(product).sum::<f64>() + f64::from(u8::from(bias)) * f64::from(b[column])
            };
            let logits: Vec<f64> = (0..vocabulary).map(logit).collect();
            let lse = logits.iter().map(|x| x.exp()).sum::<f64>().ln();
            logits.iter().map(|x| x - lse).collect()
        };
        let of_row = |row: usize| -> f64 {
            let (p, q) = (row_logits(&t, row), row_logits(&h, row));
            p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
        };
        let exact = (0..rows).map(of_row).sum::<f64>() / rows as f64;
        // Products of up to 200 terms in f32 are off by some 1e-6 of logits below 40.
        let off = (f64::from(results[2][0][0]) - exact).abs();
        assert!(off <= 1e-5 * exact.max(1.0), "{off:.1e} of {exact}");
    }
}

/// The gradient of the cross-entropy makes the logits of both sides.
#[test]
fn a_cross_entropy_has_its_gradient_beside_a_streamed_target() {
    let ids = labels(70, 33);
    let gradients = [false, true].map(|streamed| {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let dims: [&[usize]; 3] = [&[70, 3], &[70, 3], &[3, 33]];
        let v: Vec<Value> = (0..)
            .zip(dims)
            .map(|(index, dims): (u32, _)| {
                let slot = store.add(index.to_string(), dims, random(dims, index.into()).values);
                b.persistent(&store, slot)
            })
            .collect();
        if streamed {
            b.stream_target_logits();
        }
        let labels = b.input("labels", &Type::u32(&[70])).unwrap();
        let [target, logits] = [0, 1].map(|hidden| b.matmul(v[hidden], v[2]).unwrap());
        let lse = b.log_sum_exp(target).unwrap();
        let both = b.kl_divergence_and_cross_entropy([target, lse, logits], labels);
        let both = both.unwrap();
        let loss = b.weighted_sum(&[(0.5, both[0]), (2.0, both[1])]).unwrap();
        let gradient = b.gradients(loss, &[v[1]]).unwrap()[0].unwrap();
        b.output("gradient", gradient);
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        executor.input_u32("labels").copy_from_slice(&ids);
        executor.run(&mut store);
        executor.output("gradient", &store).to_vec()
    });
    close("gradient", &gradients[1], &gradients[0], TOLERANCE);
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
fn step(terms: usize, streamed: bool) -> (Builder, Value) {
    let (rows, d, vocabulary) = (640, 4, 5000);
    let (mut b, mut store) = (Builder::new(), Store::new());
    if streamed {
        b.stream_target_logits();
    }
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
        let (b, _) = step(terms, false);
        let wide = |&node: &usize| {
            let mut outputs = b.nodes[node].outputs.iter();
            outputs.any(|&value| b.ty(value).bytes() == matrix)
        };
        assert_eq!(order(&b).iter().filter(|&node| wide(node)).count(), 1);
        assert_eq!((walks(&b, true), walks(&b, false)), (terms, 0));
        // A chunk of 96 rows, and little else.
        let matrices = Plan::new(&b).live_bytes() as f64 / matrix as f64;
        assert!((1.0..1.25).contains(&matrices), "{matrices}");
        // Two chunks of 96 rows.
        let (streamed, _) = step(terms, true);
        let matrices = Plan::new(&streamed).live_bytes() as f64 / matrix as f64;
        assert!((0.3..0.5).contains(&matrices), "{matrices}");
    }
}

#[test]
fn a_gradient_that_is_asked_for_twice_is_one_value() {
    let (mut b, x) = step(2, false);
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
    // For logits that do not fit, the error is about the logits.
    let other = b.input("other", &Type::f32(&[8, 33])).unwrap();
    let error = b.kl_divergence(other, lse, logits).unwrap_err().to_string();
    assert!(error.starts_with("kl_divergence: needs logits"), "{error}");
}
