//! Properties of the networks, by their numbers in the notes.

use spd_draws::{Purpose, Stream};
use spd_engine::{Store, Type};
use spd_trainer::networks::{Start, TargetTensor};
use spd_trainer::parameters::start;

use super::training::Training;
use super::{Subject, network};
use crate::golden::compare::Comparison;
use crate::golden::numbers::Numbers;
use crate::harness::{Compared, Outcome};

/// A property by the name of its test.
type Property = (&'static str, fn() -> Outcome);

pub(super) const ALL: [Property; 8] = [
    ("s1_shapes", s1),
    ("k2_kaufmann_is_causal", k2),
    ("n1_parameter_counts", n1),
    ("n4_n5_starts_at_ln_65_and_learns_a_batch_by_heart", n4_n5),
    ("n6_penalties_are_a_hundredth_of_their_sum", n6),
    ("n7_ramanujan_sums", n7),
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

/// Later positions change no bit of earlier ones.
fn k2() -> Outcome {
    let (positions, d_model, d_coords) = (9, 8, 4);
    let mut subject = Subject::at_start(network(&format!(
        "kind = \"kaufmann\"\npositions = {positions}\nd_model = {d_model}\nn_head = 2\nd_coords = {d_coords}"
    )));
    let ty = Type::f32(&[1, positions * (d_model + d_coords)]);
    let input = subject.b.input("input", &ty).expect("new");
    let (output, _) = subject.forward(input);
    subject.b.output("output", output);
    let mut executor = subject.executor();
    let mut row: Vec<f32> = (0u16..)
        .take(ty.len())
        .map(|i| f32::from(i).sin())
        .collect();
    let mut output = |row: &[f32]| {
        executor.input("input").copy_from_slice(row);
        subject.replay(&mut executor);
        executor.output("output", &subject.store).to_vec()
    };
    let before = output(&row);
    let kept = 5;
    let (x, c) = row.split_at_mut(positions * d_model);
    x[kept * d_model..].iter_mut().for_each(|x| *x += 1.0);
    c[kept * d_coords..].iter_mut().for_each(|c| *c -= 1.0);
    let after = output(&row);
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
