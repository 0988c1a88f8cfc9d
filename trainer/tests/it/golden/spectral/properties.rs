//! Properties of the networks, by their numbers in the notes.

use spd_draws::{Purpose, Stream};
use spd_engine::ops::Expr;
use spd_engine::{Builder, Executor, Store, Type, Value};
use spd_trainer::networks::{Start, TargetTensor};
use spd_trainer::parameters::start;

use super::training::Training;
use super::{Subject, network, processor};
use crate::golden::compare::Comparison;
use crate::golden::numbers::Numbers;
use crate::harness::{Compared, Outcome};

/// A property by the name of its test.
type Property = (&'static str, fn() -> Outcome);

pub(super) const ALL: [Property; 14] = [
    ("s1_shapes", s1),
    ("s2_s10_vectors_of_a_basis_have_a_sum_or_a_length", s2_s10),
    ("s6_positions_of_a_basis_have_no_order", s6),
    ("s7_sums_of_a_basis_have_no_gradient", s7),
    ("k2_kaufmann_is_causal", k2),
    ("k5_what_both_rows_of_scores_gain_changes_nothing", k5),
    ("k12_memory_grows_with_the_positions", k12),
    ("n1_parameter_counts", n1),
    ("n4_n5_starts_at_ln_65_and_learns_a_batch_by_heart", n4_n5),
    ("n6_penalties_are_a_hundredth_of_their_sum", n6),
    ("n7_ramanujan_sums", n7),
    ("b3_b8_rolled_bytes_have_rolled_logits", b3_b8),
    ("b15_a_prefix_has_the_logits_of_the_longer_row", b15),
    ("b16_parameter_counts", b16),
];

/// Presets of the notes: layers, heads, width, positions, coordinates, basis, MLP.
const MICRO: [usize; 7] = [2, 2, 64, 64, 16, 8, 170];
const NANO: [usize; 7] = [4, 4, 128, 256, 32, 16, 341];
const SHAKESPEARE: [usize; 7] = [6, 6, 384, 256, 64, 32, 1024];

/// The keys of a preset, the last of which is the `wire_basis` of its blocks.
fn nm_gpt_mini([layers, heads, d, t, m, k, mlp]: [usize; 7], wire_basis: bool) -> String {
    format!(
        "kind = \"nm_gpt_mini\"\nvocab = 65\nn_layer = {layers}\nn_head = {heads}\nd_model = {d}\n\
         n_ctx = {t}\nd_coords = {m}\nn_basis = {k}\nd_mlp = {mlp}\nwire_basis = {wire_basis}\n"
    )
}

/// Numbers in the tensors of a network that count.
fn count(target: &str, counts: impl Fn(&TargetTensor) -> bool) -> usize {
    let tensors = network(target).tensors().into_iter();
    let tensors = tensors.filter(counts);
    tensors
        .map(|tensor| tensor.dims.iter().product::<usize>())
        .sum()
}

const SPECTRAL: &str = "kind = \"spectral\"\nd_coords = 64\nn_basis = 32";

/// The basis of the published sizes, and its parameters.
fn s1() -> Outcome {
    for (rows, positions) in [(2, 64), (1, 128)] {
        let mut subject =
            Subject::at_start(network(&format!("{SPECTRAL}\npositions = {positions}")));
        let ty = Type::f32(&[rows, positions * 64]);
        let input = subject.b.input("input", &ty).expect("new");
        let (basis, penalty) = subject.forward(input);
        assert_eq!(subject.b.ty(basis).dims, [rows, positions * 32]);
        assert!(subject.b.ty(penalty).dims.is_empty());
    }
    assert_eq!(
        count(&format!("{SPECTRAL}\npositions = 1"), |_| true),
        12_481
    );
    Ok(Compared::default())
}

/// Numbers of a wave.
fn wave(len: usize) -> Vec<f32> {
    let numbers = (0u16..).take(len);
    numbers.map(|i| f32::from(i).sin()).collect()
}

/// A basis of 3 functions of 6 coordinates at 5 positions: the network and its vectors.
fn basis(form: &str) -> (Subject, Value) {
    let keys = format!(
        "kind = \"spectral\"\npositions = 5\nd_coords = 6\nn_basis = 3\nbasis = \"{form}\""
    );
    let mut subject = Subject::at_start(network(&keys));
    let input = subject.b.input("input", &Type::f32(&[1, 5 * 6]));
    let (output, penalty) = subject.forward(input.expect("new"));
    subject.b.output("output", output);
    subject.b.output("penalty", penalty);
    (subject, output)
}

/// An output of a replay on a row of features.
fn output(subject: &mut Subject, row: &[f32], name: &str) -> Vec<f32> {
    let mut executor = subject.executor();
    executor.input("input").copy_from_slice(row);
    subject.replay(&mut executor);
    executor.output(name, &subject.store).to_vec()
}

/// Asserts that numbers of size 1 differ by rounding alone.
fn assert_close(ours: &[f32], theirs: &[f32]) {
    let mut both = ours.iter().zip(theirs);
    let is_close = both.all(|(x, y)| (x - y).abs() < 1e-5);
    assert!(
        ours.len() == theirs.len() && is_close,
        "{ours:?} {theirs:?}"
    );
}

/// Vectors of a softmax are positive and have the sum 1; others have the length `1 / sqrt(k)`.
fn s2_s10() -> Outcome {
    let vectors = |form: &str| output(&mut basis(form).0, &wave(30), "output");
    for vector in vectors("softmax").chunks(3) {
        assert!(vector.iter().all(|x| *x > 0.0), "{vector:?}");
        assert_close(&[vector.iter().sum()], &[1.0]);
    }
    for vector in vectors("l2").chunks(3) {
        assert_close(&[vector.iter().map(|x| x * x).sum()], &[1.0 / 3.0]);
    }
    Ok(Compared::default())
}

/// Positions in another order have the same vectors in that order, and the same penalty.
fn s6() -> Outcome {
    let (mut subject, _) = basis("softmax");
    let mut row = wave(30);
    let [mut vectors, penalty] = ["output", "penalty"].map(|name| output(&mut subject, &row, name));
    row.rotate_left(2 * 6);
    vectors.rotate_left(2 * 3);
    assert_close(&output(&mut subject, &row, "output"), &vectors);
    assert_close(&output(&mut subject, &row, "penalty"), &penalty);
    Ok(Compared::default())
}

/// The sum of all vectors of a softmax is constant; and a shift of all its logits changes nothing,
/// so the rows of the gradient of the last matrix add up to 0.
fn s7() -> Outcome {
    let (mut subject, vectors) = basis("softmax");
    let last = subject.weights["spectral_proj.2.weight"];
    let sum = |b: &mut Builder, of: fn(Expr) -> Expr| {
        let names = ["sum", "sum_grad"];
        let loss = b.elementwise_sum(names, 1.0, [vectors], |[x]| of(x));
        let gradients = b.gradients(loss.expect("numbers"), &[last]);
        gradients.expect("ops with gradients")[0].expect("it depends on it")
    };
    let of_sum = sum(&mut subject.b, |x| x);
    let of_squares = sum(&mut subject.b, |x| x.square());
    subject.b.output("of_sum", of_sum);
    subject.b.output("of_squares", of_squares);
    let of_sum = output(&mut subject, &wave(30), "of_sum");
    assert_close(&of_sum, &vec![0.0; of_sum.len()]);
    let of_squares = output(&mut subject, &wave(30), "of_squares");
    assert!(of_squares.iter().any(|x| x.abs() > 1e-3));
    let rows: Vec<&[f32]> = of_squares.chunks(of_squares.len() / 3).collect();
    let columns = 0..rows[0].len();
    let sums: Vec<f32> = columns
        .map(|at| rows.iter().map(|row| row[at]).sum())
        .collect();
    assert_close(&sums, &vec![0.0; sums.len()]);
    Ok(Compared::default())
}

/// Kaufmann attention of two heads on so many rows, and its input.
fn kaufmann(rows: usize, positions: usize, d_model: usize, d_coords: usize) -> (Subject, Value) {
    let mut subject = Subject::at_start(network(&format!(
        "kind = \"kaufmann\"\npositions = {positions}\nd_model = {d_model}\nn_head = 2\nd_coords = {d_coords}"
    )));
    let ty = Type::f32(&[rows, positions * (d_model + d_coords)]);
    let input = subject.b.input("input", &ty).expect("new");
    (subject, input)
}

/// Scores are those of one row less the other.
fn k5() -> Outcome {
    let (mut subject, input) = kaufmann(1, 9, 8, 4);
    let (y, _) = subject.forward(input);
    subject.b.output("output", y);
    let before = output(&mut subject, &wave(9 * 12), "output");
    for name in ["weight", "bias"] {
        let slot = subject
            .store
            .slot(&format!("knot_gate.crossing_net.2.{name}"));
        let values = subject
            .store
            .get_mut(slot.expect("a tensor of the network"));
        let columns = values.len() / 2;
        for row in values.chunks_mut(columns) {
            row.iter_mut()
                .zip(wave(columns + 1)[1..].iter())
                .for_each(|(x, more)| *x += more);
        }
    }
    assert_close(&output(&mut subject, &wave(9 * 12), "output"), &before);
    Ok(Compared::default())
}

/// Of twice as many positions outputs and gradients need at most twice the memory: none of it is
/// of pairs.
fn k12() -> Outcome {
    let bytes = |positions: usize| {
        let (mut subject, input) = kaufmann(64, positions, 32, 16);
        let (output, _) = subject.forward(input);
        let loss = subject.network.loss(&mut subject.b, input, output);
        let weights: Vec<Value> = subject.weights.values().copied().collect();
        let gradients = subject
            .b
            .partial_gradients(loss.expect("shapes fit"), &weights);
        let gradients = gradients.expect("ops with gradients").into_iter().flatten();
        for (number, gradient) in gradients.enumerate() {
            subject.b.output(format!("gradient {number}"), gradient);
        }
        let program = Executor::planned(&subject.b, &processor(2));
        program.plan().arena_bytes()
    };
    let (short, long) = (bytes(128), bytes(256));
    assert!(long <= 2 * short, "{short} {long}");
    Ok(Compared::default())
}

/// Later positions change no bit of earlier ones.
fn k2() -> Outcome {
    let (positions, d_model, d_coords) = (9, 8, 4);
    let (mut subject, input) = kaufmann(1, positions, d_model, d_coords);
    let (y, _) = subject.forward(input);
    subject.b.output("output", y);
    let mut row = wave(positions * (d_model + d_coords));
    let before = output(&mut subject, &row, "output");
    let kept = 5;
    let (x, c) = row.split_at_mut(positions * d_model);
    x[kept * d_model..].iter_mut().for_each(|x| *x += 1.0);
    c[kept * d_coords..].iter_mut().for_each(|c| *c -= 1.0);
    let after = output(&mut subject, &row, "output");
    let [before, after] = [&before, &after].map(|output| output.split_at(kept * d_model));
    assert_eq!(before.0, after.0);
    let mut later = before.1.iter().zip(after.1);
    assert!(later.all(|(a, b)| a.to_bits() != b.to_bits()));
    Ok(Compared::default())
}

/// Without learned positions; of the published parameters, the `diffusion_rate` of each layer,
/// which nothing reads, is not ours.
fn n1() -> Outcome {
    for (preset, without, with) in [
        (MICRO, 147_470, 156_046),
        (NANO, 1_108_124, 1_240_732),
        (SHAKESPEARE, 14_455_338, 16_231_722),
    ] {
        for (wire_basis, expected) in [(false, without), (true, with)] {
            let counts = |tensor: &TargetTensor| tensor.name != "pos_embedding.weight";
            let found = count(&nm_gpt_mini(preset, wire_basis), counts);
            assert_eq!(found + preset[0], expected, "{preset:?} {wire_basis}");
        }
    }
    let kaufmann = "kind = \"kaufmann\"\npositions = 1\nd_model = 512\nn_head = 8\nd_coords = 64";
    assert_eq!(count(kaufmann, |_| true) + 1, 1_902_854);
    Ok(Compared::default())
}

fn n4_n5() -> Outcome {
    let target = nm_gpt_mini(MICRO, true);
    let (rows, positions) = (2, 16);
    let settings = "steps = 101, batch_size = 2, lr = 0.01, weight_decay = 0.0";
    let mut training = Training::new(&target, settings, positions);
    let tokens: Vec<u32> = (0u32..)
        .take(rows * (positions + 1))
        .map(|i| i * i * 7 % 65)
        .collect();
    let mut step = || training.step(tokens.clone(), rows)[0];
    let first = step();
    assert!((first - 65f64.ln()).abs() < 0.1, "{first}");
    let mut last = first;
    for _ in 0..100 {
        last = step();
    }
    assert!(last < 0.1, "{last}");
    Ok(Compared {
        report: format!(
            "nm_gpt_mini: loss {first:.3} at the start, {last:.3} of a batch known by heart"
        ),
        left_out: Vec::new(),
    })
}

fn n6() -> Outcome {
    let mut comparison = Comparison::new("penalties", super::VALUES);
    comparison.group("penalties");
    for case in ["nmgpt", "nmgpt_plain"] {
        let numbers = Numbers::open(&format!("spectral/{case}"))?;
        let mut subject = Subject::new(&numbers, "param");
        let tokens = numbers.get("in.tokens");
        let input = subject.b.input("tokens", &Type::u32(&tokens.dims));
        let (_, penalty) = subject.forward(input.expect("new"));
        subject.b.output("penalty", penalty);
        let mut executor = subject.executor();
        executor.input_u32("tokens").copy_from_slice(&tokens.u32());
        subject.replay(&mut executor);
        let sum: f64 = numbers
            .under("out.ortho.")
            .map(|(_, loss)| loss.values[0])
            .sum();
        comparison.tensor(
            case,
            executor.output("penalty", &subject.store),
            &[0.01 * sum],
        );
    }
    Ok(comparison.finish())
}

fn n7() -> Outcome {
    let numbers = Numbers::open("spectral/ramanujan")?;
    let theirs = numbers.get("out.table");
    let mut store = Store::new();
    let slot = store.zeros("table", &theirs.dims);
    let stream = Stream::new(Purpose::TargetInit, 0, 0);
    start(&mut store, slot, stream, 0, Start::Ramanujan);
    let mut comparison = Comparison::new("ramanujan", 1e-7);
    comparison.group("table");
    comparison.tensor("table", store.get(slot), &theirs.values);
    Ok(comparison.finish())
}

/// A spectrum of the whole window and a circular convolution have no first position.
fn b3_b8() -> Outcome {
    let keys =
        "kind = \"byte_spectral\"\nencoder = \"loop\"\nmixing = \"circular\"\nallow_leak = true";
    let keys = format!("{keys}\nn_ctx = 16\nd_model = 16\nn_layer = 2\n");
    let mut subject = Subject::at_start(network(&keys));
    let input = subject.b.input("tokens", &Type::u32(&[1, 16]));
    let (logits, _) = subject.forward(input.expect("new"));
    subject.b.output("logits", logits);
    let mut executor = subject.executor();
    let mut logits = |bytes: &[u32]| {
        executor.input_u32("tokens").copy_from_slice(bytes);
        subject.replay(&mut executor);
        executor.output("logits", &subject.store).to_vec()
    };
    let mut bytes: Vec<u32> = (0u32..16).map(|i| i * i * 37 % 251).collect();
    let mut expected = logits(&bytes);
    bytes.rotate_left(5);
    expected.rotate_left(5 * 256);
    assert_close(&logits(&bytes), &expected);
    Ok(Compared::default())
}

/// A causal network's logits do not depend on the length of the row.
fn b15() -> Outcome {
    let mut comparison = Comparison::new("prefixes", super::VALUES);
    comparison.group("prefixes");
    for case in [
        "nmgpt",
        "byte_embedding_causal",
        "byte_spectral_causal",
        "byte_traditional",
    ] {
        let numbers = Numbers::open(&format!("spectral/{case}"))?;
        let tokens = numbers.get("in.tokens");
        let whole = tokens.dims[1];
        let logits = |positions: usize| {
            let mut subject = Subject::new(&numbers, "param");
            let input = subject.b.input("tokens", &Type::u32(&[1, positions]));
            let (logits, _) = subject.forward(input.expect("new"));
            subject.b.output("logits", logits);
            let mut executor = subject.executor();
            let row = &tokens.u32()[..positions];
            executor.input_u32("tokens").copy_from_slice(row);
            subject.replay(&mut executor);
            executor.output("logits", &subject.store).to_vec()
        };
        let all = logits(whole);
        for positions in [1, whole / 2 + 1] {
            let expected = all[..all.len() / whole * positions]
                .iter()
                .map(|&x| x.into());
            let expected: Vec<f64> = expected.collect();
            comparison.tensor(
                &format!("{case}, {positions}"),
                &logits(positions),
                &expected,
            );
        }
    }
    Ok(comparison.finish())
}

fn b16() -> Outcome {
    let sizes = |n_layer: usize| format!("n_ctx = 64\nd_model = 256\nn_layer = {n_layer}\n");
    for (keys, n_layer, expected) in [
        ("kind = \"byte_spectral\"\nencoder = \"loop\"", 4, 2_699_904),
        ("kind = \"byte_spectral\"\nencoder = \"loop\"", 6, 3_884_672),
        (
            "kind = \"byte_spectral\"\nencoder = \"causal\"",
            4,
            2_699_904,
        ),
        ("kind = \"byte_enhanced\"", 4, 2_510_848),
        ("kind = \"byte_traditional\"\nn_head = 8", 4, 3_290_880),
    ] {
        let found = count(&format!("{keys}\n{}", sizes(n_layer)), |tensor| {
            tensor.trained
        });
        assert_eq!(found, expected, "{keys}, {n_layer} layers");
    }
    Ok(Compared::default())
}
