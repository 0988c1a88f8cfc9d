#![expect(
    clippy::disallowed_methods,
    reason = "test files are written once, and read by nobody else"
)]

use std::sync::Arc;

use serde_json::Value;
use spd_engine::{Pool, Processor};

use super::*;
use crate::bench::{Overrides, preset};
use crate::data;
use crate::decomposition::Decomposition;
use crate::run_file::{Data, EvalData, Ids, SitePattern};
use crate::world::World;

const SITES: [&str; 3] = ["*.attn.c_attn", "*.mlp.c_fc", "*.mlp.c_proj"];

/// A token of the dataset.
fn token(i: u64) -> u16 {
    u16::try_from((i * i + i / 7) % 50).unwrap()
}

/// A small language model at its starting values, whose held-out rows are 7, read 9 at a time.
fn made(dir: &Path, threads: usize) -> (DecompositionTask, Store) {
    let tokens = (0..=14 * 16).flat_map(|i| token(i).to_le_bytes());
    let path = dir.join("tokens.bin");
    std::fs::write(&path, tokens.collect::<Vec<u8>>()).unwrap();
    let mut run = preset("tiny-gpt2-h1", &Overrides::default()).unwrap().run;
    let Data::Tokens {
        train, eval, dtype, ..
    } = &mut run.data
    else {
        panic!("a language model");
    };
    (*train, *eval, *dtype) = (path, EvalData::HeldOut { held_out: 0.5 }, Some(Ids::U16));
    let site = |pattern: &str| SitePattern {
        pattern: pattern.into(),
        components: 12,
    };
    run.decomposition.sites = SITES.map(site).to_vec();
    (run.eval.components, run.eval.batches, run.eval.batch_size) = (5, 3, 3);
    run.eval.metrics.active.alive_threshold = 0.3;
    let processor = Processor::Cpu(Arc::new(Pool::new(threads).unwrap()));
    let sources = data::open(&run).unwrap();
    let mut store = Store::new();
    let decomposition = Decomposition::new(&run, &mut store).unwrap();
    let task = DecompositionTask::new(
        decomposition,
        sources,
        &mut store,
        &processor,
        &World::default(),
    );
    let mut task = task.unwrap();
    task.make_room().unwrap();
    task.decomposition.initialise(&mut store);
    for slot in store.slots().collect::<Vec<_>>() {
        if store.name(slot).starts_with("target_model.") {
            let wave = |(i, value): (usize, &mut f32)| *value = 0.3 * (i as f32 * 1.3).sin();
            store.change(slot, |values| values.iter_mut().enumerate().for_each(wave));
        }
    }
    (task, store)
}

fn written(dir: &Path, threads: usize) -> (Vec<u8>, u64) {
    let (mut task, mut store) = made(dir, threads);
    let mut asked = 0;
    let mut check_stop = || {
        asked += 1;
        Ok(())
    };
    crate::figures::write(&mut task, &mut store, dir, 3, &mut check_stop).unwrap();
    let file = crate::figures::directory(dir, 3).join(FILE);
    (std::fs::read(file).unwrap(), asked)
}

/// Importances and logits `[position][component]` of the held-out rows, in order: by site, row.
fn measured(task: &mut DecompositionTask, store: &mut Store) -> Vec<Vec<[Vec<f32>; 2]>> {
    let paths: Vec<String> = task
        .decomposition
        .sites
        .iter()
        .map(|site| site.path().into())
        .collect();
    let source = task.held_out().clone();
    let feed = eval_feed(task.decomposition.run.seed, 3);
    let (program, arena) = (&mut task.figures, &mut task.arena);
    let mut found = vec![Vec::new(); paths.len()];
    let mut batch = Batch::default();
    for index in 0..3 {
        source.fill(&feed, index * 3, &mut batch).unwrap();
        data::fill(program, &batch);
        program.run_and_fetch(store, arena).unwrap();
        for (found, path) in found.iter_mut().zip(&paths) {
            let [importance, logits] = ["importance", "logits"].map(|what| {
                let all = program.output(&format!("{what} {path}"), store, arena);
                all.chunks(16 * 12).map(<[f32]>::to_vec)
            });
            found.extend(importance.zip(logits).map(|(one, other)| [one, other]));
        }
    }
    found
}

#[test]
fn numbers_are_those_of_a_plain_count_and_the_same_for_any_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let (json, _) = written(dir.path(), 1);
    assert!(json == written(dir.path(), 2).0);
    let shown: Value = serde_json::from_slice(&json).unwrap();
    let (mut task, mut store) = made(dir.path(), 1);
    let all = measured(&mut task, &mut store);
    assert_eq!(
        (&shown["step"], shown["sites"].as_array().unwrap().len()),
        (&3.into(), 6)
    );
    let (mut contexts, mut measured) = (0, 0);
    for ((site, rows), shown) in task
        .decomposition
        .sites
        .iter()
        .zip(&all)
        .zip(shown["sites"].as_array().unwrap())
    {
        assert_eq!((&shown["name"], rows.len()), (&site.path().into(), 9));
        let of = |component: usize| {
            let all = rows.iter().flat_map(|[importance, _]| importance);
            all.skip(component).step_by(12).copied()
        };
        let mean = |component: usize| of(component).map(f64::from).sum::<f64>() / 144.0;
        let mut order: Vec<usize> = (0..12).collect();
        order.sort_by(|&a, &b| mean(b).total_cmp(&mean(a)));
        let components = shown["components"].as_array().unwrap();
        assert_eq!(components.len(), 5);
        for (&component, shown) in order.iter().zip(components) {
            assert_eq!(shown["index"], component);
            assert!((shown["mean_importance"].as_f64().unwrap() - mean(component)).abs() < 1e-12);
            let active = of(component).filter(|&g| g > 0.3).count() as f64;
            assert!((shown["density"].as_f64().unwrap() - active / 144.0).abs() < 1e-12);
            contexts += check_contexts(&task, rows, component, shown);
            let is_active = |row: &&[Vec<f32>; 2]| {
                let of_row = row[0].iter().skip(component).step_by(12);
                of_row.into_iter().any(|&g| g > 0.3)
            };
            let active = rows[..7].iter().filter(is_active).count();
            let removal = &shown["removal"];
            if active == 0 {
                assert!(removal.is_null(), "{removal}");
                continue;
            }
            measured += 1;
            assert!(removal["kl"].as_f64().unwrap() > 0.0, "{shown}");
            assert_eq!(removal["rows"], active.min(ROWS));
            assert!(removal["positions"].as_u64() >= removal["rows"].as_u64());
        }
    }
    assert_eq!(contexts, 6 * 5 * 7);
    assert!((1..30).contains(&measured), "{measured}");
}

/// The first seven rows, which differ, each at its highest logit, the highest first; of equal ones
/// any.
fn check_contexts(
    task: &DecompositionTask,
    rows: &[[Vec<f32>; 2]],
    component: usize,
    shown: &Value,
) -> usize {
    let of =
        |all: &[f32]| -> Vec<f32> { all.iter().skip(component).step_by(12).copied().collect() };
    let highest = |logits: &[f32]| of(logits).into_iter().fold(f32::NEG_INFINITY, f32::max);
    let mut peaks: Vec<f32> = rows[..7].iter().map(|[_, z]| highest(z)).collect();
    peaks.sort_by(|a, b| b.total_cmp(a));
    let Source::Tokens(windows) = task.held_out() else {
        panic!("rows of tokens");
    };
    let feed = eval_feed(task.decomposition.run.seed, 1);
    let order = Order::new(feed.seed, windows.samples());
    let of_row = |row: u64| (windows.number(order.at(row)), row);
    let mut samples: BTreeMap<u64, u64> = (0..7).map(of_row).collect();
    let contexts = shown["contexts"].as_array().unwrap();
    let mut batch = Batch::default();
    for (logit, context) in peaks.iter().zip(contexts) {
        let number = |key: &str| context[key].as_u64().unwrap();
        let row = samples.remove(&number("sample")).expect("another row");
        task.held_out().fill(&feed, row, &mut batch).unwrap();
        let at = usize::try_from(number("sample_position")).unwrap();
        let [importance, logits] = &rows[usize::try_from(row).unwrap()];
        let found: f32 = serde_json::from_value(context["logit"].clone()).unwrap();
        assert_eq!(found.to_bits(), logit.to_bits());
        assert_eq!(found.to_bits(), of(logits)[at].to_bits());
        let places = at.saturating_sub(20)..16.min(at + 21);
        let tokens: Vec<String> = batch.tokens[places.clone()]
            .iter()
            .map(u32::to_string)
            .collect();
        let found: Vec<f32> = serde_json::from_value(context["importances"].clone()).unwrap();
        assert_eq!(found, of(importance)[places.clone()].to_vec());
        assert_eq!(context["tokens"], serde_json::json!(tokens));
        assert_eq!(context["position"], at - places.start);
        // The held-out samples are the last 7 of 14, of 16 tokens each, in one file.
        assert!((7..14).contains(&number("sample")), "{context}");
        assert_eq!(number("token"), 16 * number("sample") + at as u64);
        assert_eq!(
            token(number("token")).to_string(),
            context["tokens"][at - places.start],
        );
    }
    contexts.len()
}

#[test]
fn a_request_to_stop_is_heard_before_each_batch_and_nothing_is_written_then() {
    let house = tempfile::tempdir().unwrap();
    let (json, questions) = written(house.path(), 1);
    let shown: Value = serde_json::from_slice(&json).unwrap();
    let sites = shown["sites"].as_array().unwrap().iter();
    let components = sites.flat_map(|site| site["components"].as_array().unwrap());
    let rows = components.filter_map(|component| component["removal"]["rows"].as_u64());
    // Figures, 3 batches of importances, each figure, removals from 3 rows at a time, and the file.
    let figures = crate::figures::OF_ALL.len() as u64;
    assert_eq!(
        questions,
        1 + 3 + figures + rows.sum::<u64>().div_ceil(3) + 1
    );
    let (mut task, mut store) = made(house.path(), 1);
    for stop_at in 0..questions {
        let dir = house.path().join(stop_at.to_string());
        std::fs::create_dir(&dir).unwrap();
        let mut asked = 0;
        let mut check_stop = || {
            asked += 1;
            Interrupt::when(asked > stop_at)
        };
        let ended = crate::figures::write(&mut task, &mut store, &dir, 3, &mut check_stop);
        assert!(matches!(ended, Err(Interrupt::Stop)));
        assert_eq!(asked, stop_at + 1);
        assert!(!crate::figures::directory(&dir, 3).join(FILE).is_file());
    }
}

#[test]
fn components_of_equal_means_are_in_the_order_of_their_numbers_and_no_number_comes_last() {
    let mut site = SiteSums::new("a", 6);
    site.add(&[0.5, f32::NAN, 1.0, 0.5, 0.0, 0.75], &[0.0; 6], 0.1);
    assert_eq!(order(&site, 9), [2, 5, 0, 3, 1]);
    assert_eq!(order(&site, 3), [2, 5, 0]);
    let dir = tempfile::tempdir().unwrap();
    let (task, _) = made(dir.path(), 1);
    let Source::Tokens(windows) = task.held_out() else {
        panic!("rows of tokens");
    };
    let feed = eval_feed(task.decomposition.run.seed, 1);
    let samples = Order::new(feed.seed, windows.samples());
    let data = (&Rows(BTreeMap::new()), &samples, windows);
    let texts = RefCell::new(windows.dataset().token_texts().unwrap());
    let shown = shown_component((&site, 1), None, data, &texts);
    let json = serde_json::to_value(shown).unwrap();
    assert_eq!(
        (&json["mean_importance"], &json["density"]),
        (&Value::Null, &0.0.into())
    );
}
