use spd_engine::Alone;

use super::*;
use crate::removal::tests::{TOKENS, logits, made, processor};

/// The program in which each of the three rows has its target at one position. All masks are 1.
fn program(
    (of, store): (&Decomposition, &Store),
    to: To,
    positions: [usize; 3],
) -> (Alone, Vec<usize>) {
    let (b, sites) = of.attribution_program(store, to).unwrap();
    let mut program = Alone::new(&b, &processor()).unwrap();
    let t = of.shape(1).positions;
    for (row, position) in positions.into_iter().enumerate() {
        program.input_u32("row")[row * t..][..t].fill(number(row));
        program.input_u32("position")[row] = number(row * t + position);
    }
    for &site in &sites {
        for what in ["kept", "delta"] {
            let name = format!("{what} {}", of.sites[site].path());
            if program.has_input(&name) {
                program.input(&name).fill(1.0);
            }
        }
    }
    (program, sites)
}

fn row(values: &[f32], row: usize) -> &[f32] {
    let width = values.len() / 3;
    &values[row * width..][..width]
}

fn sum(values: &[f32]) -> f32 {
    values.iter().sum()
}

/// Two rows may differ by the roundings of sums of some ten products below 1.
fn near(found: f32, expected: f32) -> bool {
    (found - expected).abs() < 1e-5
}

// `linear2` is linear in the output of `linear1`, and the network's output where it is above 0 in
// that of `linear2`, but for a bias.
#[test]
fn components_and_delta_add_up_to_a_target_that_is_linear_in_them() {
    let (of, mut store) = made("tiny-tms", &["linear1", "linear2"], 4);
    let input = [
        0.5, 0.0, 0.75, 0.0, 0.25, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.25, 1.0, 0.5,
    ];
    let (mut components, sites) = program((&of, &store), To::Components, [0; 3]);
    assert_eq!(sites, [0, 1]);
    components.input("input").copy_from_slice(&input);
    let c = of.sites[1].components;
    let mut largest: f32 = 0.0;
    for component in [0, 2, 5] {
        let seed = components.input("seed linear2");
        seed.fill(0.0);
        (0..3).for_each(|at| seed[at * c + component] = 1.0);
        components.run_and_fetch(&mut store).unwrap();
        let [target, from, delta] = ["target linear2", "from linear1", "from delta linear1"]
            .map(|name| components.output(name, &store).to_vec());
        for at in 0..3 {
            let all = sum(row(&from, at)) + row(&delta, at)[0];
            let target = row(&target, at)[component];
            assert!(near(all, target), "{all} {target}");
            largest = largest.max(target.abs());
        }
    }
    assert!(largest > 0.1, "{largest}");
    let (mut to_logits, _) = program((&of, &store), To::Logits, [0; 3]);
    to_logits.input("input").copy_from_slice(&input);
    to_logits.run_and_fetch(&mut store).unwrap();
    let outputs = to_logits.output("target", &store).to_vec();
    let bias = store.slot("target_model.linear2.bias").unwrap();
    let bias = store.get(bias).to_vec();
    let mut above = 0;
    for feature in 0..5 {
        let seed = to_logits.input("seed");
        seed.fill(0.0);
        (0..3).for_each(|at| seed[at * 5 + feature] = 1.0);
        to_logits.run_and_fetch(&mut store).unwrap();
        let [from, delta] = ["from linear2", "from delta linear2"]
            .map(|name| to_logits.output(name, &store).to_vec());
        for at in 0..3 {
            let all = sum(row(&from, at)) + row(&delta, at)[0];
            let output = row(&outputs, at)[feature];
            let expected = if output > 0.0 {
                output - bias[feature]
            } else {
                0.0
            };
            above += usize::from(output > 0.0);
            assert!(near(all, expected), "{all} {expected}");
        }
    }
    assert!(above > 2, "{above} outputs are above 0");
    // All that `linear1` writes goes through `linear2`.
    let names: Vec<&str> = to_logits.output_names().collect();
    assert!(!names.contains(&"from linear1"), "{names:?}");
}

/// The derivative of row `at` of an output by a mask of that row, from differences of two widths,
/// which leave out its third derivative.
fn difference(
    (program, store): (&mut Alone, &mut Store),
    (mask, of): (&str, usize),
    value: &dyn Fn(&Alone, &Store) -> f32,
) -> f32 {
    let mut at = |step: f32| {
        program.input(mask)[of] = 1.0 + step;
        program.run_and_fetch(store).unwrap();
        value(program, store)
    };
    let [wide, narrow] = [0.1, 0.05].map(|step| (at(step) - at(-step)) / (2.0 * step));
    at(0.0);
    (4.0 * narrow - wide) / 3.0
}

// Between two sites, and from the last one to the logits, there is no other site: what is direct is
// all there is. Differences of numbers near 1, rounded to some 1e-7, over 0.1 are off by 1e-5, and by
// as much again for their fifth derivative.
#[test]
fn an_attribution_is_a_difference_of_the_masked_forward() {
    let cases = [
        ("tiny-gpt2-h1", ["*.0.attn.c_attn", "*.1.mlp.c_fc"]),
        ("tiny-ss-llama", ["*.0.attn.v_proj", "*.1.mlp.down_proj"]),
    ];
    for (name, patterns) in cases {
        let (of, mut store) = made(name, &patterns, 4);
        let paths = [0, 1].map(|site| of.sites[site].path().to_owned());
        let counts = [0, 1].map(|site| of.sites[site].components);
        let vocab = 50;
        for to in [To::Components, To::Logits] {
            let (mut program, sites) = program((&of, &store), to, [5, 0, 3]);
            assert_eq!(sites, [0, 1]);
            for (place, token) in program.input_u32("input").iter_mut().enumerate() {
                *token = TOKENS[place % 16] + number(place / 16);
            }
            let (source, target, width) = match to {
                To::Components => (0, format!(" {}", paths[1]), counts[1]),
                To::Logits => (1, String::new(), vocab),
            };
            for at in 0..3 {
                program.input(&format!("seed{target}"))[at * width + 2 * at + 1] = 1.0;
            }
            program.run_and_fetch(&mut store).unwrap();
            let [from, delta] = ["from", "from delta"].map(|what| {
                let name = format!("{what} {}", paths[source]);
                program.output(&name, &store).to_vec()
            });
            let mut largest: f32 = 0.0;
            for at in 0..3 {
                let value = |program: &Alone, store: &Store| {
                    program.output(&format!("target{target}"), store)[at * width + 2 * at + 1]
                };
                let c = counts[source];
                let masks = [0, 3, c - 1].map(|of| ("kept", at * c + of, from[at * c + of]));
                for (what, of, found) in masks.into_iter().chain([("delta", at, delta[at])]) {
                    let mask = format!("{what} {}", paths[source]);
                    let on = (&mut program, &mut store);
                    let expected = difference(on, (&mask, of), &value);
                    let tolerance = 1e-4 + 1e-3 * expected.abs();
                    assert!(
                        (found - expected).abs() < tolerance,
                        "{name} {to:?} {what} {of}: {found} {expected}"
                    );
                    largest = largest.max(expected.abs());
                }
            }
            assert!(largest > 0.01, "{name} {to:?}: {largest}");
        }
    }
}

// The batch has three rows, of which two are asked for. Logits are sums of tens of products below 1.
#[test]
fn targets_are_those_of_the_network_itself() {
    let (of, mut store) = made("tiny-gpt2-h1", &["*.c_attn", "*.c_fc"], 4);
    let again: Vec<u32> = TOKENS.iter().map(|token| token + 1).collect();
    let asked = |component| {
        let asked = |tokens, position| Asked {
            component,
            tokens,
            position,
        };
        [asked(&TOKENS[..], 5), asked(&again[..], 9)]
    };
    let of_logits = [&TOKENS[..], &again[..]].map(|row| logits(&of, &mut store, row));
    let processor = processor();
    let on = On {
        processor: &processor,
        fits: &|_| Ok(()),
    };
    let mut attributor = Attributor::new(&of, &store, To::Logits, &on).unwrap();
    let found = attributor.measure(&of, &mut store, &asked(None)).unwrap();
    for ((found, logits), position) in found.iter().zip(&of_logits).zip([5, 9]) {
        let logits = &logits[50 * position..][..50];
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let expected = f64::from(largest - sum(logits) / 50.0);
        assert!((found.target - expected).abs() < 1e-4, "{found:?}");
        let sources: usize = of.sites.iter().map(|site| site.components + 1).sum();
        assert_eq!(found.sources.len(), sources);
    }

    let mut attributor = Attributor::new(&of, &store, To::Components, &on).unwrap();
    let last = of.sites.len() - 1;
    let two = asked(Some((last, 3)));
    let found = attributor.measure(&of, &mut store, &two).unwrap();
    let alone = attributor.measure(&of, &mut store, &two[1..]).unwrap();
    assert_eq!((found.len(), alone.len()), (2, 1));
    let mut both = found[1].sources.iter().zip(&alone[0].sources);
    assert!(both.all(|(a, b)| near(*a, *b)));
    // Nothing comes from the site itself, or from later positions: a token there changes nothing.
    let own = of.sites[last].components + 1;
    let (before, from_own) = found[0].sources.split_at(found[0].sources.len() - own);
    assert!(from_own.iter().all(|&of| of == 0.0));
    assert!(before.iter().any(|&of| of.abs() > 1e-3));
    let mut other = TOKENS;
    other[6] = 0;
    let changed = Asked {
        tokens: &other,
        ..two[0]
    };
    let changed = attributor.measure(&of, &mut store, &[changed]).unwrap();
    let mut both = found[0].sources.iter().zip(&changed[0].sources);
    assert!(both.all(|(a, b)| near(*a, *b)));
}
