//! Counts of made-up importances, beside plain counts of the same.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    reason = "small numbers of bins and tokens, and numbers that are to be the same bits"
)]

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::RowAccessor;
use serde_json::{Value, json};

use crate::counts::{ACTIVATION_BINS, IMPORTANCE_BINS, STRONGEST};
use crate::part::{LIKELY, OF_PROBABILITY};
use crate::{
    Attribution, Counts, Datasets, OfSite, Part, Removal, Setup, Site, Source, StateError, Text,
    load, save, write_attributions, write_lines, write_tables,
};

const T: usize = 50;
const V: usize = 7;
const SITES: [(&str, usize); 2] = [("a.b", 5), ("c", 3)];
const ALIVE: f32 = 0.3;

fn setup(examples: usize) -> Setup {
    let site = |(name, components): (&str, usize)| Site {
        name: name.to_owned(),
        components,
        activations: name == "a.b",
    };
    Setup {
        sites: SITES.into_iter().map(site).collect(),
        vocab: V,
        positions: T,
        alive: ALIVE,
        seed: 7,
        examples,
        pairs: true,
    }
}

/// Some number in `[0, 1)` for a place.
fn draw(what: u32, row: u64, position: usize, of: usize) -> f32 {
    let numbers = [row as f32, position as f32, of as f32];
    let [row, position, of] = numbers;
    let wave = (row * 12.9898 + position * 78.233 + of * 37.719 + what as f32 * 11.13).sin();
    (wave * 43.5453).fract().abs()
}

fn token(row: u64, position: usize) -> u32 {
    (draw(0, row, position, 0) * V as f32) as u32
}

/// Most are 0, and many are 1. Component 4 is active at fewer positions than a part has words of
/// bits.
fn importance(row: u64, position: usize, of: usize) -> f32 {
    logit(row, position, of).clamp(0.0, 1.0)
}

fn logit(row: u64, position: usize, of: usize) -> f32 {
    3.0 * draw(1, row, position, of) - if of == 4 { 2.685 } else { 1.7 }
}

fn activation(row: u64, position: usize, of: usize) -> f32 {
    300.0 * draw(2, row, position, of).powi(9)
}

/// The last token is unlikely everywhere.
fn probability(row: u64, position: usize, token: usize) -> f32 {
    match token {
        6 => LIKELY / 2.0,
        _ => draw(3, row, position, token) / 4.0,
    }
}

/// The counts of some rows, in parts of 4 rows of two batches each.
fn counted(setup: &Setup, parts: &[u64], rows: u64) -> Counts {
    let mut counts = Counts::new(setup.clone());
    for &number in parts {
        let mut part = Part::new(&counts, 0, number);
        for first_row in [4 * number, 4 * number + 2] {
            let all = || (first_row..first_row + 2).flat_map(|row| (0..T).map(move |t| (row, t)));
            let tokens: Vec<u32> = all().map(|(row, t)| token(row, t)).collect();
            let each = |width: usize, of: fn(u64, usize, usize) -> f32| -> Vec<f32> {
                let values = |(row, t)| (0..width).map(move |i| of(row, t, i));
                all().flat_map(values).collect()
            };
            let next = each(V, probability);
            let measured =
                SITES.map(|(_, c)| [importance, logit, activation].map(|of| each(c, of)));
            let sites: Vec<OfSite<'_>> = measured
                .iter()
                .zip(&setup.sites)
                .map(|([importance, logits, activation], site)| OfSite {
                    importance,
                    logits,
                    activation: site.activations.then_some(&**activation),
                })
                .collect();
            let text = Text {
                first_row,
                rows: usize::try_from(rows.saturating_sub(first_row).min(2)).unwrap(),
                tokens: &tokens,
                next: &next,
            };
            part.measure(&mut counts, text, &sites).unwrap();
        }
        part.finish(&mut counts);
    }
    counts.settle();
    counts
}

const ROWS: u64 = 39;

fn all_places() -> impl Iterator<Item = (u64, usize)> {
    (0..ROWS).flat_map(|row| (0..T).map(move |t| (row, t)))
}

#[test]
fn counts_are_those_of_a_plain_count() {
    let parts: Vec<u64> = (0..10).collect();
    let counts = counted(&setup(6), &parts, ROWS);
    assert_eq!((counts.positions(), counts.parts()), (ROWS * T as u64, 10));
    let is_active = |place: (u64, usize), of: usize| importance(place.0, place.1, of) > ALIVE;
    let mut first = 0;
    for (index, (name, c)) in SITES.into_iter().enumerate() {
        let found = &counts.sites[index];
        for of in 0..c {
            let active: Vec<_> = all_places().filter(|&place| is_active(place, of)).collect();
            assert_eq!(found.active[of], active.len() as u64);
            let n = counts.positions();
            let sum: f64 = all_places()
                .map(|(row, t)| f64::from(importance(row, t, of)))
                .sum();
            // Each is rounded to a multiple of 2^-24.
            let mean = crate::counts::mean_importance(found.importance[of], n);
            assert!((mean - sum / n as f64).abs() < 2_f64.powi(-25), "{mean}");
            let bin = |(row, t)| (importance(row, t, of) * 20.0) as usize;
            let mut bins = [0_u64; IMPORTANCE_BINS];
            all_places().for_each(|place| bins[bin(place).min(IMPORTANCE_BINS - 1)] += 1);
            assert_eq!(
                found.histograms[0][of * IMPORTANCE_BINS..][..IMPORTANCE_BINS],
                bins
            );
            if name == "a.b" {
                check_activations(&counts, of, &active);
            }
            let mut by_token = [0_u64; V];
            let mut by_next = [0_u64; V];
            for &(row, t) in &active {
                by_token[token(row, t) as usize] += 1;
                for (next, mass) in by_next.iter_mut().enumerate() {
                    let p = probability(row, t, next);
                    if p >= LIKELY {
                        *mass += (f64::from(p) * OF_PROBABILITY).round() as u64;
                    }
                }
            }
            let dense = |row: &crate::sparse::Row| {
                let mut all = [0_u64; V];
                row.iter()
                    .for_each(|(key, count)| all[key as usize] = count);
                all
            };
            assert_eq!(dense(&counts.input[first + of]), by_token);
            assert_eq!(dense(&counts.next[first + of]), by_next);
            let mut others = BTreeMap::new();
            for &place in &active {
                for other in first + of + 1..8 {
                    let of = if other < 5 { other } else { other - 5 };
                    if is_active(place, of) {
                        *others.entry(u32::try_from(other).unwrap()).or_insert(0_u64) += 1;
                    }
                }
            }
            assert!(counts.pairs[first + of].iter().eq(others));
            check_examples(&counts, (index, of), &active);
        }
        first += c;
    }
}

fn check_activations(counts: &Counts, of: usize, active: &[(u64, usize)]) {
    let found = &counts.sites[0];
    let mut bins = [0_u64; ACTIVATION_BINS];
    for (row, t) in all_places() {
        let size = activation(row, t, of);
        // The largest bin that begins at or below it: bins begin at powers of 2 and half as much
        // again.
        let bin = (1..ACTIVATION_BINS).rev().find(|&bin| {
            let octave = 2_f32.powi(i32::try_from(bin / 2).unwrap() - 24);
            size >= octave * if bin % 2 == 0 { 1.0 } else { 1.5 }
        });
        bins[bin.unwrap_or(0)] += 1;
    }
    assert_eq!(
        found.histograms[1][of * ACTIVATION_BINS..][..ACTIVATION_BINS],
        bins
    );
    let sum = |places: &mut dyn Iterator<Item = (u64, usize)>| -> f64 {
        places
            .map(|(row, t)| f64::from(activation(row, t, of)))
            .sum()
    };
    let sums = [sum(&mut all_places()), sum(&mut active.iter().copied())];
    for (units, expected) in found.activation.iter().zip(sums) {
        let mean = crate::counts::mean_activation(units[of], 1);
        // Rounded to 2^-40 each; the sum beside it to 2^-53 of some 10^4.
        assert!((mean - expected).abs() < 1e-7, "{mean} {expected}");
    }
}

fn check_examples(counts: &Counts, (site, of): (usize, usize), active: &[(u64, usize)]) {
    let sample = counts.sample(site, of);
    assert_eq!(sample.len(), active.len().min(6));
    for example in sample {
        let (row, t) = (example.row, example.position as usize);
        assert!(active.contains(&(row, t)));
        assert_eq!(example.importance, importance(row, t, of));
        let places = example.places(T);
        assert_eq!(places, t.saturating_sub(20)..(t + 21).min(T));
        for (found, place) in example.importances(T).zip(places) {
            assert!((found - importance(row, place, of)).abs() <= 0.5 / 255.0);
        }
    }
    let mut peaks = BTreeMap::new();
    for &(row, t) in active {
        let peak = peaks.entry(row).or_insert(f32::NEG_INFINITY);
        *peak = logit(row, t, of).max(*peak);
    }
    let mut peaks: Vec<f32> = peaks.into_values().collect();
    peaks.sort_by(|a, b| b.total_cmp(a));
    peaks.truncate(STRONGEST);
    let strongest = counts.strongest(site, of).iter();
    assert!(strongest.map(|example| example.logit).eq(peaks));
}

#[test]
fn parts_add_up_to_the_same_bytes_in_any_order_and_after_a_save() {
    let dir = tempfile::tempdir().unwrap();
    let setup = setup(4);
    let about = json!({"of": "a test"});
    let path = |name: &str| dir.path().join(name);
    let written = |name: &str, counts: &mut Counts| {
        save(&path(name), counts, &about).unwrap();
        std::fs::read(path(name)).unwrap()
    };
    let mut whole = counted(&setup, &(0..10).collect::<Vec<_>>(), ROWS);
    let bytes = written("whole", &mut whole);
    for cut in [[3, 1, 8, 0].as_slice(), &[9], &[]] {
        let mut some = counted(&setup, cut, ROWS);
        let rest: Vec<u64> = (0..10).rev().filter(|part| !cut.contains(part)).collect();
        let others = counted(&setup, &rest, ROWS);
        assert!(!some.overlaps(&others));
        written("some", &mut some);
        let (mut read, of) = load(&path("some")).unwrap();
        assert_eq!((&read, &of), (&some, &about));
        read.add(&others);
        assert!(written("sum", &mut read) == bytes);
        let mut other_way = others;
        other_way.add(&some);
        assert!(written("sum", &mut other_way) == bytes);
    }
}

#[test]
fn a_damaged_file_is_named_and_never_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("harvest.safetensors");
    save(&path, &mut counted(&setup(2), &[0, 1], ROWS), &json!(1)).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        spd_files::atomic::write_file(&path, &[bytes]).unwrap();
        match load(&path) {
            Err(error @ StateError::Damaged { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    for at in (0..whole.len()).step_by(97) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x11;
        refused(&bytes);
        refused(&whole[..at]);
    }
    let mut bytes = whole.clone();
    *bytes.last_mut().unwrap() ^= 1;
    assert_eq!(
        refused(&bytes),
        format!(
            "{}: expected the counts of a harvest, found other bytes than were written; remove it, and harvest again",
            path.display()
        )
    );
    // A later format, with other settings.
    let (old, new) = (br#"\"version\":1,\"setup\""#, br#"\"version\":2,\"other\""#);
    let at = whole.windows(old.len()).position(|bytes| bytes == old);
    let at = at.unwrap();
    let mut bytes = whole;
    bytes[at..at + old.len()].copy_from_slice(new);
    assert!(refused(&bytes).contains("found version 2, and this program reads 1; "));
}

#[test]
fn an_importance_that_is_no_number_ends_the_harvest() {
    let setup = setup(2);
    let mut counts = Counts::new(setup);
    let mut part = Part::new(&counts, 0, 0);
    let mut values = [vec![0.5; T * 5], vec![0.5; T * 3]];
    values[1][3 * 7 + 2] = f32::NAN;
    let sites = values.each_ref().map(|values| OfSite {
        importance: values,
        logits: values,
        activation: None,
    });
    let text = Text {
        first_row: 9,
        rows: 1,
        tokens: &[0; T],
        next: &[0.0; T * V],
    };
    assert_eq!(
        part.measure(&mut counts, text, &sites).unwrap_err(),
        "c:2: its importance or activation is not finite at position 7 of row 9; the checkpoint cannot be harvested"
    );
}

struct Data;

impl Datasets for Data {
    fn row(&mut self, _: u16, row: u64) -> io::Result<(u64, Vec<u32>)> {
        Ok((row * T as u64, (0..T).map(|t| token(row, t)).collect()))
    }

    fn text(&mut self, token: u32) -> String {
        format!("<{token}>")
    }
}

/// The rows of a table, as the parquet crate shows them.
fn rows(path: &Path) -> Vec<parquet::record::Row> {
    let reader = SerializedFileReader::new(std::fs::File::open(path).unwrap()).unwrap();
    let rows = reader.get_row_iter(None).unwrap();
    rows.map(Result::unwrap).collect()
}

#[test]
fn tables_hold_the_counts() {
    let dir = tempfile::tempdir().unwrap();
    let mut counts = counted(&setup(6), &(0..10).collect::<Vec<_>>(), ROWS);
    let removal = Removal {
        positions: 8,
        kl: 0.25,
        up: vec![(3, 1.5)],
        down: vec![(1, -2.0), (2, -1.0)],
    };
    let removals = BTreeMap::from([((1, 2), removal)]);
    write_tables(dir.path(), &mut counts, &mut Data, &removals).unwrap();
    let table = |name: &str| rows(&dir.path().join(format!("{name}.parquet")));
    let components = table("components");
    assert_eq!(components.len(), 8);
    let (of_a, of_c) = (&components[1], &components[7]);
    assert_eq!(of_a.get_string(0).unwrap(), "a.b");
    assert_eq!((of_a.get_int(1).unwrap(), of_c.get_int(1).unwrap()), (1, 2));
    assert_eq!(
        of_a.get_long(3).unwrap(),
        counts.sites[0].active[1].cast_signed()
    );
    assert!(of_a.get_double(6).is_ok() && of_c.get_double(6).is_err());
    assert!(of_a.get_double(9).is_err());
    assert_eq!(of_c.get_double(9).unwrap(), 0.25);
    let tokens = table("tokens");
    let of_input = tokens
        .iter()
        .filter(|row| row.get_string(2).unwrap() == "input");
    for row in of_input {
        let site = usize::from(row.get_string(0).unwrap() == "c");
        let component = usize::try_from(row.get_int(1).unwrap()).unwrap();
        let token = u32::try_from(row.get_int(5).unwrap()).unwrap();
        assert_eq!(row.get_string(6).unwrap(), &format!("<{token}>"));
        let of = &counts.input[5 * site + component];
        let (_, count) = of.iter().find(|(key, _)| *key == token).unwrap();
        assert_eq!(row.get_double(7).unwrap(), count as f64);
        let (n, of_token) = (counts.positions, counts.all_input[token as usize]);
        let part = count as f64 / counts.sites[site].active[component] as f64;
        let information = (part / (of_token as f64 / n as f64)).ln();
        // Rounded a few times, of numbers below 10.
        assert!((row.get_double(8).unwrap() - information).abs() < 1e-13);
    }
    let of_removal = tokens
        .iter()
        .filter(|row| row.get_string(2).unwrap() == "removal");
    let of_removal: Vec<_> = of_removal
        .map(|row| {
            (
                row.get_string(3).unwrap().as_str(),
                row.get_int(5).unwrap(),
                row.get_double(9).unwrap(),
            )
        })
        .collect();
    assert_eq!(
        of_removal,
        [("up", 3, 1.5), ("down", 1, -2.0), ("down", 2, -1.0)]
    );
    let examples = table("examples");
    let kept: usize = (0..5)
        .map(|of| counts.sample(0, of).len() + counts.strongest(0, of).len())
        .sum();
    assert_eq!(
        examples
            .iter()
            .filter(|row| row.get_string(0).unwrap() == "a.b")
            .count(),
        kept
    );
    for row in &examples {
        let (of, t) = (
            row.get_long(5).unwrap().cast_unsigned(),
            row.get_int(6).unwrap(),
        );
        assert_eq!(
            row.get_long(7).unwrap(),
            of.cast_signed() * 50 + i64::from(t)
        );
        let tokens = row.get_list(11).unwrap();
        let first = usize::try_from(row.get_int(8).unwrap()).unwrap();
        let text: Vec<String> = tokens.elements().iter().map(ToString::to_string).collect();
        let expected = (first..first + text.len()).map(|t| token(of, t).to_string());
        assert!(text.iter().cloned().eq(expected));
        assert_eq!(row.get_list(12).unwrap().len(), text.len());
    }
    let pairs = table("pairs");
    let both: i64 = pairs.iter().map(|row| row.get_long(4).unwrap()).sum();
    let expected: u64 = counts.pairs.iter().flat_map(|row| &row.counts).sum();
    assert_eq!(both, expected.cast_signed());
    let row = &pairs[0];
    assert_eq!(
        (row.get_string(0).unwrap().as_str(), row.get_int(1).unwrap()),
        ("a.b", 0)
    );
}

#[test]
fn attributions_have_a_row_for_each_source() {
    let dir = tempfile::tempdir().unwrap();
    let source = |site, component, mean| Source {
        site,
        component,
        mean,
        mean_square: 9.0,
    };
    let of = |sources| Attribution {
        positions: 8,
        target: 0.5,
        sources,
    };
    let to_component = of(vec![source(0, Some(4), -2.0), source(0, None, 1.0)]);
    // The logits come after the two sites.
    let found = BTreeMap::from([
        ((1, 2), to_component),
        ((2, 0), of(vec![source(1, Some(1), 0.25)])),
    ]);
    write_attributions(dir.path(), &setup(6), &found).unwrap();
    let rows = rows(&dir.path().join("attributions.parquet"));
    let text = |row: &parquet::record::Row, column| row.get_string(column).unwrap().clone();
    let shown: Vec<_> = rows
        .iter()
        .map(|row| {
            let [component, rank, from] = [1, 4, 6].map(|column| row.get_int(column).unwrap());
            let mean = row.get_double(7).unwrap();
            (text(row, 0), component, rank, text(row, 5), from, mean)
        })
        .collect();
    let row = |site: &str, component, rank, from: &str, number, mean| {
        (
            site.to_owned(),
            component,
            rank,
            from.to_owned(),
            number,
            mean,
        )
    };
    let expected = [
        row("c", 2, 0, "a.b", 4, -2.0),
        row("c", 2, 1, "a.b", -1, 1.0),
        row("logits", 0, 0, "c", 1, 0.25),
    ];
    assert_eq!(shown, expected);
    assert_eq!(rows[0].get_long(2).unwrap(), 8);
    let [target, mean_square] = [3, 8].map(|column| rows[0].get_double(column).unwrap());
    assert_eq!((target, mean_square), (0.5, 9.0));
}

#[test]
fn lines_show_each_component_in_its_text() {
    let dir = tempfile::tempdir().unwrap();
    let mut counts = counted(&setup(40), &(0..10).collect::<Vec<_>>(), ROWS);
    let removal = Removal {
        positions: 8,
        kl: 0.123_456_7,
        up: vec![(3, 1.5)],
        down: vec![(1, -2.0)],
    };
    let removals = BTreeMap::from([((0, 2), removal)]);
    write_lines(dir.path(), &mut counts, &mut Data, &removals).unwrap();
    let text = |name: &str| spd_files::read_to_string(&dir.path().join(name)).unwrap();
    let (list, details) = (text("list.jsonl"), text("details.jsonl"));
    let parsed = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    let list: Vec<Value> = list.lines().map(parsed).collect();
    assert_eq!(list.len(), 8);
    for (line, whole) in list.iter().zip(details.lines()) {
        let [begin, end] =
            [0, 1].map(|i| usize::try_from(line["at"][i].as_u64().unwrap()).unwrap());
        assert_eq!(&details[begin..end], whole);
        let found = parsed(whole);
        for key in ["index", "mean_importance", "density"] {
            assert_eq!(line[key], found[key]);
        }
    }
    let (line, found) = (&list[2], parsed(details.lines().nth(2).unwrap()));
    let (of, n) = (&counts.sites[0], counts.positions);
    assert_eq!((&line["site"], &line["index"]), (&json!("a.b"), &json!(2)));
    assert_eq!(found["active"], json!(of.active[2]));
    let density = of.active[2] as f64 / n as f64;
    // Five digits.
    assert!((found["density"].as_f64().unwrap() / density - 1.0).abs() < 1e-4);
    assert_eq!(
        found["importance_histogram"],
        json!(of.histograms[0][2 * IMPORTANCE_BINS..][..IMPORTANCE_BINS])
    );
    assert_eq!(
        found["activation_histogram"],
        json!(of.histograms[1][2 * ACTIVATION_BINS..][..ACTIVATION_BINS])
    );
    // Four of the strongest, and four of each quarter of the sample; the strongest first.
    let contexts = found["contexts"].as_array().unwrap();
    let parts: Vec<&Value> = contexts.iter().map(|of| &of["part"]).collect();
    assert_eq!(
        (parts.len(), parts[3], parts[4]),
        (20, &Value::Null, &json!([0.75, 1.0]))
    );
    assert_eq!(parts[19], &json!([0.0, 0.25]));
    let logits =
        |of: &[Value]| -> Vec<f64> { of.iter().map(|of| of["logit"].as_f64().unwrap()).collect() };
    for part in [&contexts[..4], &contexts[4..]] {
        assert!(logits(part).is_sorted_by(|a, b| a >= b), "{contexts:?}");
    }
    let strongest = &counts.strongest(0, 2)[0];
    let (row, t) = (strongest.row, strongest.position as usize);
    let first = t.saturating_sub(20);
    assert_eq!(contexts[0]["token"], json!(row * T as u64 + t as u64));
    assert_eq!(contexts[0]["position"], json!(t - first));
    let tokens: Vec<String> = (first..(t + 21).min(T))
        .map(|t| format!("<{}>", token(row, t)))
        .collect();
    assert_eq!(contexts[0]["tokens"], json!(tokens));
    let from = t.saturating_sub(8);
    assert_eq!(
        line["text"]["tokens"],
        json!(tokens[from - first..(t + 13).min(T) - first])
    );
    assert_eq!(line["text"]["position"], json!(t - from));
    // Those active together most, beside a plain count of all pairs.
    let each: Vec<(&str, u64, u64)> = (0..8)
        .map(|number: usize| match number {
            0..5 => ("a.b", number as u64, of.active[number]),
            _ => ("c", number as u64 - 5, counts.sites[1].active[number - 5]),
        })
        .collect();
    let mut both: Vec<(f64, Value)> = (0..8_usize)
        .filter(|&other| other != 2)
        .filter_map(|other| {
            let (low, high) = (other.min(2), u32::try_from(other.max(2)).unwrap());
            let (_, count) = counts.pairs[low].iter().find(|(key, _)| *key == high)?;
            let (site, index, active) = each[other];
            let found = json!({"site": site, "index": index, "both": count});
            Some(((count as f64).powi(2) / active as f64, found))
        })
        .collect();
    both.sort_by(|a, b| b.0.total_cmp(&a.0));
    let together = found["together"].as_array().unwrap().iter().map(|of| {
        let part = of["both"].as_f64().unwrap() / of_active(&counts);
        assert!((of["part"].as_f64().unwrap() / part - 1.0).abs() < 1e-4);
        json!({"site": of["site"], "index": of["index"], "both": of["both"]})
    });
    let both: Vec<Value> = both.into_iter().map(|(_, found)| found).collect();
    assert_eq!(together.collect::<Vec<_>>(), both);
    let moved = json!({"positions": 8, "kl": 0.12346, "activation": line["activation"],
        "up": [{"token": "<3>", "change": 1.5}], "down": [{"token": "<1>", "change": -2.0}]});
    assert_eq!((&found["removal"], &line["kl"]), (&moved, &json!(0.12346)));
    let input = found["input"].as_array().unwrap();
    let information: Vec<f64> = input.iter().map(|of| of["pmi"].as_f64().unwrap()).collect();
    assert!(
        !input.is_empty() && information.is_sorted_by(|a, b| a >= b),
        "{input:?}"
    );
    // A site with other rows has no activations.
    assert_eq!(
        parsed(details.lines().last().unwrap())["activation_histogram"],
        Value::Null
    );
}

/// Positions where component 2 of the first site is active.
fn of_active(counts: &Counts) -> f64 {
    counts.sites[0].active[2] as f64
}
