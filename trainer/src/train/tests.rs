use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use spd_checkpoint::atomic::write_file;
use spd_checkpoint::{Lock, Tensor, load, step_path};
use spd_draws::{Purpose, Stream};
use spd_engine::{Pool, Processor, SharedMemory};
use tempfile::TempDir;

use super::*;
use crate::bench::{Overrides, preset};
use crate::component_model::{Conditioning, Routing};
use crate::decomposition::Decomposition;
use crate::decomposition_task::DecompositionTask;
use crate::fault::Outcome;
use crate::figures::FIGURES;
use crate::losses::adversary::{Adversary, Optimizer, Scope, SourceDtype};
use crate::losses::{
    AdversaryObjective, Auxiliaries, Auxiliary, CiMaskedRecon, Comparison, Distance, Frequency,
    Loss, MergedRecon, NonlinearityLocality, PersistentPgdRecon, Remembered, SmoothL0,
    StochasticRecon, Term, UnmaskedRecon,
};
use crate::metrics::{Measure, Rungs};
use crate::run_file::{
    Data, Decays, EvalData, Ids, Knot, Nontarget, Recompute, Run, Schedule, Shape, SitePattern,
    TiedUpdate,
};
use crate::world::World;

/// All that a rank has in its phases: a warm-up, evaluations at both ends and between, figures,
/// and a checkpoint that was made while nobody asked for a stop.
fn small_run() -> Run {
    small_run_of("tiny-tms")
}

fn small_run_of(workload: &str) -> Run {
    let mut run = preset(workload, &Overrides::default()).unwrap().run;
    run.train.steps = 5;
    run.train.faithfulness_warmup.steps = 3;
    (run.eval.every, run.eval.batches, run.eval.slow_every) = (2, 2, 2);
    run.eval.batch_size = 8;
    (run.log.every, run.checkpoint.every, run.checkpoint.keep) = (1, 3, 9);
    run
}

/// Trains in a directory until a stop is asked for at the given question, counted from 0. How
/// many questions there were, and how it ended.
fn trained(run: &Run, place: (&Path, &Lock), stop_at: u64) -> (u64, Outcome) {
    let asked = Cell::new(0);
    let stop = || {
        asked.set(asked.get() + 1);
        asked.get() > stop_at
    };
    let outcome = trained_with(run, place, &stop);
    (asked.get(), outcome)
}

fn trained_with(run: &Run, (dir, lock): (&Path, &Lock), stop: Stop<'_>) -> Outcome {
    trained_as(&World::default(), run, (dir, Some(lock)), stop).unwrap()
}

/// The same as a rank of a world, of which the first has the lock.
fn trained_as(
    world: &World,
    run: &Run,
    (dir, lock): (&Path, Option<&Lock>),
    stop: Stop<'_>,
) -> Result<Outcome, Fault> {
    let processor = Processor::Cpu(Arc::new(Pool::single()));
    let sources = crate::data::open(run).unwrap();
    let mut store = Store::new();
    let decomposition = Decomposition::new(run, &mut store).unwrap();
    let mut losses = run.losses.iter();
    let compares_more = losses.any(|loss| !loss.auxiliaries.rows.is_empty());
    if run.nontarget.is_some() || compares_more {
        // Of zeros, importances of all rows are alike, and squared errors are no part of
        // squares.
        let weights = decomposition.target.tensors().into_iter().map(|tensor| {
            let wave = |i: usize| 0.3 * (i as f32 * 1.3).sin();
            let values = (0..tensor.dims.iter().product()).map(wave).collect();
            (tensor.name, tensor.dims, values)
        });
        decomposition.set_target(&mut store, &weights.collect::<Vec<_>>());
    }
    let task = DecompositionTask::new(decomposition, sources, &mut store, &processor, world);
    let mut task = task.unwrap();
    task.make_room().unwrap();
    let place = Place {
        dir,
        lock,
        world,
        checkpoint: run.checkpoint,
        log: run.log,
        config: "",
        made_of: &[],
        is_kept: false,
        progress: None,
        heartbeat: &Arc::default(),
    };
    Outcome::of(train(&mut task, &mut store, &place, stop).map(drop))
}

/// Trains in a directory by so many ranks, until the first is asked to stop at the given
/// question. How often it was asked, and how all of them ended, in words.
fn trained_by(ranks: usize, run: &Run, dir: &Path, stop_at: u64) -> (u64, String) {
    let lock = Lock::take(dir).unwrap();
    let file = SharedMemory::file().unwrap();
    let rank = |rank: usize, lock: Option<&Lock>, stop: Stop<'_>| {
        let file = file.try_clone().unwrap();
        let world = match ranks {
            1 => World::default(),
            _ => World::in_memory(rank, ranks, file, &Arc::default()).unwrap(),
        };
        match trained_as(&world, run, (dir, lock), stop) {
            Ok(outcome) => format!("{outcome:?}"),
            Err(fault) => fault.to_string(),
        }
    };
    let asked = Cell::new(0);
    let stop = || {
        asked.set(asked.get() + 1);
        asked.get() > stop_at
    };
    let ended = thread::scope(|scope| {
        let rank = &rank;
        let others = (1..ranks).map(|other| scope.spawn(move || rank(other, None, &|| false)));
        let others: Vec<_> = others.collect();
        let ended = rank(0, Some(&lock), &stop);
        for other in others {
            assert_eq!(other.join().unwrap(), ended);
        }
        ended
    });
    (asked.get(), ended)
}

/// Every bit that training leaves: rows, and the last state with its moments.
fn remains(run: &Run, dir: &Path) -> (String, Vec<u8>) {
    let rows = fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let state = step_path(&dir.join("checkpoints"), run.train.steps);
    (rows, fs::read(state.join("tensors.safetensors")).unwrap())
}

fn events(dir: &Path) -> Vec<String> {
    let text = fs::read_to_string(dir.join("system.jsonl")).unwrap();
    let rows = text.lines().map(|line| {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        (row["kind"] != "system").then(|| row["note"].as_str().unwrap().to_owned())
    });
    rows.flatten().collect()
}

#[test]
fn a_stop_is_heard_everywhere_and_the_run_goes_on_to_the_same_bits() {
    goes_on_to_the_same_bits(&small_run());
}

#[test]
fn resumed_tied_sites_with_moments_give_the_same_bits() {
    let mut run = small_run();
    run.decomposition.tied_update = TiedUpdate::Separate;
    goes_on_to_the_same_bits(&run);
}

// Stopped after a step, and started again by a launcher that decides otherwise.
#[test]
fn a_run_goes_on_with_intermediates_made_again_to_the_same_bits() {
    let [kept, again] = [Recompute::Never, Recompute::Always].map(|recompute| {
        let mut run = small_run();
        run.train.recompute = recompute;
        run
    });
    let [straight, changed] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let in_turn = [
        (&straight, &kept, u64::MAX),
        (&changed, &kept, 12),
        (&changed, &again, u64::MAX),
    ];
    let ended = in_turn.map(|(dir, run, stop_at)| {
        let lock = Lock::take(dir.path()).unwrap();
        trained(run, (dir.path(), &lock), stop_at).1
    });
    assert_eq!(ended, [Outcome::Done, Outcome::Stopped, Outcome::Done]);
    let continued = events(changed.path()).into_iter().nth(1);
    assert!(
        continued
            .unwrap()
            .starts_with("continued from the checkpoint of step")
    );
    assert!(remains(&again, changed.path()) == remains(&kept, straight.path()));
}

/// A run that estimates frequencies, with knots for all that may have them.
fn estimating_run() -> Run {
    let knots = |first, last| {
        let knot = |at, value| Knot {
            at,
            value,
            shape: Shape::Cosine,
        };
        Schedule::Knots(vec![knot(0.0, first), knot(0.7, last)])
    };
    let mut run = small_run();
    run.train.lr = knots(1e-2, 1e-3);
    run.losses
        .retain(|loss| loss.term.term().penalty().is_none());
    let smooth = SmoothL0 {
        gamma: knots(1.0, 0.1),
        normalize_at_one: true,
    };
    let frequency = Frequency {
        reference_count: 1000,
        halflife: Some(3.0),
    };
    for term in [Term::SmoothL0(smooth), Term::Frequency(frequency)] {
        let coeff = knots(1e-3, 1e-2);
        run.losses.push(Loss::new(coeff, term));
    }
    run
}

#[test]
fn resumed_estimates_and_knots_give_the_same_bits() {
    let mut run = estimating_run();
    for shards in [1, 2] {
        run.train.shards = Some(shards);
        goes_on_to_the_same_bits(&run);
    }
}

#[test]
fn counted_units_and_conditioned_logits_are_the_same_by_all_worlds() {
    let mut run = small_run_of("tiny-resid");
    run.train.shards = Some(4);
    run.importance.conditioning = Some(Conditioning {
        output_scale: 1.0,
        input_scale: Some(1.0),
        min_tokens: None,
    });
    let knot = |at, value| Knot {
        at,
        value,
        shape: Shape::Linear,
    };
    let term = Term::NonlinearityLocality(NonlinearityLocality {
        relative_threshold: Schedule::Knots(vec![knot(0.0, 8.0), knot(1.0, 2.0)]),
        normalize_at_one: true,
        unit_kind_coefficients: [("neuron", 1.0)].into(),
    });
    let coeff = Schedule::Constant(0.1);
    run.losses.push(Loss::new(coeff, term));
    let [one, ..] = the_same_by_all_worlds(&run);
    let rows = fs::read_to_string(one.path().join("metrics.jsonl")).unwrap();
    assert!(rows.contains("\"loss/nonlinearity_locality\":"), "{rows}");
    assert!(rows.contains("\"relative_threshold\":"), "{rows}");
}

#[test]
fn estimates_are_of_the_whole_batch_and_the_same_by_all_worlds() {
    let mut run = estimating_run();
    run.train.shards = Some(4);
    let [one, ..] = the_same_by_all_worlds(&run);
    let estimate = |step| tensor(one.path(), step, "losses.frequency.linear1");
    assert_eq!(estimate(3).shape, [8]);
    assert!(estimate(3) != estimate(5));
    // A row has what moves.
    let rows = fs::read_to_string(one.path().join("metrics.jsonl")).unwrap();
    for name in ["gamma", "coeff/smooth_l0", "coeff/frequency"] {
        assert!(rows.contains(&format!("\"{name}\":")), "{rows}");
    }
}

/// A run on two datasets in a directory, in four blocks, with estimates of frequencies on both
/// streams, an adversary on one, and components that decay.
fn targeted_run(dir: &Path) -> Run {
    let dataset = |name: &str, factor: u16| {
        let tokens = (0..40 * 16 + 1u16).flat_map(|i| (i / 3 * factor % 50).to_le_bytes());
        let path = dir.join(name);
        write_file(&path, &tokens.collect::<Vec<u8>>()).unwrap();
        path
    };
    let mut run = small_run_of("tiny-gpt2-h1");
    let estimating = estimating_run();
    let Data::Tokens {
        train, eval, dtype, ..
    } = &mut run.data
    else {
        panic!("a language model");
    };
    (*train, *dtype) = (dataset("target.bin", 7), Some(Ids::U16));
    *eval = EvalData::HeldOut { held_out: 0.5 };
    let patterns = ["*.attn.c_attn", "*.mlp.c_fc"].map(|pattern| SitePattern {
        pattern: pattern.into(),
        components: 6,
    });
    run.decomposition.sites = patterns.to_vec();
    (run.train.batch_size, run.train.shards) = (8, Some(4));
    run.train.lr = estimating.train.lr;
    run.train.lr_importance = Some(Schedule::Constant(2e-3));
    (run.eval.components, run.eval.batches) = (0, 1);
    // At both ends alone: a question of a stop is asked at each.
    (run.eval.every, run.eval.slow_every) = (0, 0);
    let loss = |term| Loss::new(Schedule::Constant(0.5), term);
    let routing = Routing::UniformK;
    let own = [
        Term::StochasticRecon(StochasticRecon { routing }),
        Term::CiMaskedRecon(CiMaskedRecon { routing }),
        Term::UnmaskedRecon(UnmaskedRecon),
    ];
    let estimates = estimating.losses.into_iter();
    let estimates = estimates.filter(|loss| {
        let term = loss.term.term();
        term.penalty().is_some() || term.reads_penalty()
    });
    let mut living = living_run().losses.into_iter();
    let living = living.find(|loss| loss.term.name() == "merged_recon");
    run.losses = estimates.chain(living).collect();
    run.losses.push(loss(own[0].clone()));
    run.nontarget = Some(Nontarget {
        data: dataset("other.bin", 11),
        batch_size: 4,
        // Half of the positions of the target stream.
        seq_len: Some(8),
        minimality_coeff: Some(Schedule::Constant(1e-3)),
        weight_decay: 5.0,
        decays: Decays::Factors,
        losses: own.map(loss).to_vec(),
    });
    run
}

#[test]
fn two_streams_are_the_same_by_all_worlds() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = targeted_run(dir.path());
    let [one, ..] = the_same_by_all_worlds(&run);
    let site = "transformer-h-1-mlp-c_fc";
    let [of_target, of_other] = ["frequency", "nontarget/frequency"].map(|loss| {
        let name = format!("losses.{loss}.{site}");
        let [before, after] = [3, 5].map(|step| tensor(one.path(), step, &name));
        assert!(before != after, "{name}");
        after.bytes
    });
    assert!(of_target != of_other);
    let rows = fs::read_to_string(one.path().join("metrics.jsonl")).unwrap();
    for name in [
        "loss/frequency",
        "loss/ci_masked_recon_subset",
        "l0/transformer.h.1.mlp.c_fc",
    ] {
        assert!(rows.contains(&format!("\"nontarget/{name}\":")), "{rows}");
    }
    // Trained tensors depend on the other stream, and on the decay.
    let trained = |dir: &TempDir| tensor(dir.path(), 5, &format!("_components.{site}.V"));
    let nontarget = run.nontarget.as_mut().unwrap();
    nontarget.weight_decay = 0.0;
    let [still, alone] = [true, false].map(|has_other| {
        if !has_other {
            run.nontarget = None;
        }
        let dir = tempfile::tempdir().unwrap();
        trained_by(1, &run, dir.path(), u64::MAX);
        trained(&dir)
    });
    assert!(still != trained(&one) && alone != still);
}

#[test]
fn a_refused_step_names_losses_of_both_streams() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = targeted_run(dir.path());
    // The first update leaves numbers whose products are infinite; without importances the decay
    // would bring them to 0.
    run.train.lr = Schedule::Constant(1e30);
    run.train.lr_importance = None;
    let (_, ended) = trained_by(2, &run, dir.path(), u64::MAX);
    let names_both = ended.starts_with("step 1: loss/") && ended.contains(", nontarget/loss/");
    assert!(names_both, "{ended}");
}

#[test]
fn any_number_of_ranks_goes_on_with_two_streams_of_any_other() {
    let dir = tempfile::tempdir().unwrap();
    goes_on_by_any_number_of_ranks(&targeted_run(dir.path()));
}

#[test]
fn importance_functions_move_at_a_rate_of_their_own() {
    let mut run = small_run();
    run.train.lr_importance = Some(Schedule::Constant(0.0));
    let dir = tempfile::tempdir().unwrap();
    let lock = Lock::take(dir.path()).unwrap();
    let (_, outcome) = trained(&run, (dir.path(), &lock), u64::MAX);
    assert_eq!(outcome, Outcome::Done);
    let [before, after] = [3, 5].map(|step| {
        let state = load(&step_path(&dir.path().join("checkpoints"), step)).unwrap();
        state.tensors
    });
    let (mut still, mut moved) = (0, 0);
    for (before, after) in before.iter().zip(&after) {
        let stays = before.bytes == after.bytes;
        if before.name.starts_with("_ci_fns.") {
            assert!(stays, "{}", before.name);
            still += 1;
        } else if before.name.ends_with(".V") && !before.name.starts_with("adamw.") {
            assert!(!stays, "{}", before.name);
            moved += 1;
        }
    }
    assert!(still > 0 && moved > 0, "{still} {moved}");
}

/// A run with a state that is sharded with the batch in four blocks.
fn remembering_run() -> Run {
    let mut run = small_run();
    run.train.shards = Some(4);
    let term = Term::Remembered(Remembered);
    let coeff = Schedule::Constant(0.1);
    run.losses.push(Loss::new(coeff, term));
    run
}

fn tensor(dir: &Path, step: u64, name: &str) -> Tensor {
    let state = load(&step_path(&dir.join("checkpoints"), step)).unwrap();
    let mut tensors = state.tensors.into_iter();
    tensors.find(|tensor| tensor.name == name).unwrap()
}

/// Every bit of the checkpoint of a step, and all rows.
fn saved(dir: &Path, step: u64) -> Vec<Vec<u8>> {
    let state = step_path(&dir.join("checkpoints"), step);
    let files = ["tensors.safetensors", "meta.json", "manifest.json"];
    let files = files.map(|file| state.join(file)).into_iter();
    let files = files.chain([dir.join("metrics.jsonl")]);
    files.map(|file| fs::read(file).unwrap()).collect()
}

/// Trains by 1, 2 and 4 ranks, which leave the same bits. Returns the directory of each.
fn the_same_by_all_worlds(run: &Run) -> [TempDir; 3] {
    let worlds = [1, 2, 4].map(|ranks| {
        let dir = tempfile::tempdir().unwrap();
        let (_, ended) = trained_by(ranks, run, dir.path(), u64::MAX);
        assert_eq!(ended, "Done");
        dir
    });
    for step in [3, 5] {
        let [one, two, four] = worlds.each_ref().map(|dir| saved(dir.path(), step));
        assert!(one == two && one == four, "step {step}");
    }
    worlds
}

#[test]
fn rows_that_ranks_hold_are_saved_whole_and_the_same_by_all_worlds() {
    let run = remembering_run();
    let worlds = the_same_by_all_worlds(&run);
    // They change, and what is trained depends on them.
    let rows = |step| tensor(worlds[0].path(), step, "losses.remembered.linear1");
    assert!(rows(3) != rows(5));
    let mut other = run.clone();
    other.losses.pop();
    let dir = tempfile::tempdir().unwrap();
    trained_by(1, &other, dir.path(), u64::MAX);
    let trained = |dir: &TempDir| tensor(dir.path(), 5, "_ci_fns.linear1.layers.0.W");
    assert!(trained(&dir) != trained(&worlds[0]));
}

/// A run with adversaries that live on, in four blocks: sources that all ranks share, which
/// climb less or all of their loss, and those of elements of the batch; kept in f32 and in 16
/// bits.
fn living_run() -> Run {
    let mut run = small_run();
    run.train.shards = Some(4);
    let metrics = &mut run.eval.metrics;
    metrics.adversaries.adversaries = true;
    metrics.site_outputs.site_outputs = true;
    metrics.ladder.ladder = Some(Rungs {
        steps: vec![1, 3],
        step_size: 0.1,
        batches: 2,
        joint: true,
        subset: true,
        routing: Routing::UniformK,
    });
    let adversary = |scope, optimizer| Adversary {
        scope,
        pool: None,
        optimizer,
        lr: Schedule::Constant(0.05),
        n_warmup_steps: 2,
        start_frac: 0.0,
        sigmoid: false,
        source_dtype: SourceDtype::Float32,
    };
    let adam = Optimizer::Adam {
        beta1: 0.5,
        beta2: 0.99,
        eps: 1e-8,
    };
    let shared = Scope::RepeatAcrossBatch { n_sources: 2 };
    let shared = PersistentPgdRecon {
        routing: Routing::All,
        adversary: Adversary {
            source_dtype: SourceDtype::Bfloat16,
            ..adversary(shared, adam)
        },
        n_samples: 1,
        route_warmup: false,
    };
    let routed = PersistentPgdRecon {
        routing: Routing::UniformK,
        adversary: Adversary {
            start_frac: 0.3,
            ..adversary(Scope::SingleSource, Optimizer::Sgd)
        },
        n_samples: 2,
        route_warmup: true,
    };
    let merged = MergedRecon {
        routing: Routing::UniformK,
        adversary: Adversary {
            pool: Some(2),
            source_dtype: SourceDtype::Uint16,
            ..adversary(
                Scope::PerBatchElement,
                Optimizer::Momentum { momentum: 0.5 },
            )
        },
        adv_fraction: Schedule::Constant(0.5),
    };
    for (term, objective) in [
        (Term::PersistentPgdRecon(shared), AdversaryObjective::E2e),
        (Term::PersistentPgdRecon(routed), AdversaryObjective::Term),
    ] {
        let compared = Comparison {
            capture: "out.linear1".into(),
            distance: Distance::RelativeSquaredError,
        };
        let auxiliary = Auxiliary {
            name: "hidden".into(),
            coeff: Schedule::Constant(0.3),
            comparisons: vec![compared],
        };
        let mut loss = Loss::new(Schedule::Constant(0.5), term);
        loss.auxiliaries = Auxiliaries {
            rows: vec![auxiliary],
            objective,
        };
        run.losses.push(loss);
    }
    let merged = Term::MergedRecon(merged);
    run.losses.push(Loss::new(Schedule::Constant(0.5), merged));
    run
}

#[test]
fn adversaries_that_live_on_are_the_same_by_all_worlds() {
    let [one, ..] = the_same_by_all_worlds(&living_run());
    for (name, shape) in [
        // Two numbers a word.
        ("persistent_pgd_recon.sources.linear1", vec![2, 1, 4]),
        (
            "persistent_pgd_recon.second.delta_sources.linear2",
            vec![2, 1, 1],
        ),
        ("persistent_pgd_recon_subset.sources.linear1", vec![8]),
        ("merged_recon.sources.linear1", vec![64, 2, 4]),
        (
            "merged_recon.velocity.delta_sources.linear2",
            vec![64, 2, 1],
        ),
    ] {
        let name = format!("losses.{name}");
        let [before, after] = [3, 5].map(|step| tensor(one.path(), step, &name));
        assert_eq!(before.shape, shape, "{name}");
        assert!(before != after, "{name}");
    }
    // Held-out rows meet them, and at the end those that are patient.
    let rows = fs::read_to_string(one.path().join("metrics.jsonl")).unwrap();
    for (name, count) in [
        ("eval/adversary/merged_recon", 3),
        ("eval/adversary/merged_recon/linear2", 3),
        ("eval/adversary/persistent_pgd_recon_subset/sites", 3),
        ("eval/site_outputs/stochastic/linear1", 3),
        ("eval/ladder/1", 1),
        ("eval/ladder/3", 1),
    ] {
        assert_eq!(
            rows.matches(&format!("\"{name}\":")).count(),
            count,
            "{name}"
        );
    }
}

#[test]
fn any_number_of_ranks_goes_on_from_adversaries_of_any_other() {
    goes_on_by_any_number_of_ranks(&living_run());
}

#[test]
fn rows_start_with_draws_of_their_number_in_the_batch() {
    let run = remembering_run();
    let dir = tempfile::tempdir().unwrap();
    // The question after the two of the start.
    let (_, ended) = trained_by(2, &run, dir.path(), 2);
    assert_eq!(ended, "Stopped");
    for (number, site) in [(0, "linear1"), (1, "linear2")] {
        let rows = tensor(dir.path(), 0, &format!("losses.remembered.{site}"));
        let stream = Stream::new(Purpose::State, 0, number);
        let places = (0..64).flat_map(|row| (0..8).map(move |column| (row, column)));
        let draws =
            places.map(|(row, column)| 2.0 * stream.uniform(run.seed, 0, row, column) - 1.0);
        let draws: Vec<u8> = draws.flat_map(f32::to_le_bytes).collect();
        assert!(rows.shape == [64, 8] && rows.bytes == draws, "{site}");
    }
}

#[test]
fn any_number_of_ranks_goes_on_from_rows_of_any_other() {
    goes_on_by_any_number_of_ranks(&remembering_run());
}

/// Stops at every question, and goes on by another number of ranks.
fn goes_on_by_any_number_of_ranks(run: &Run) {
    let straight = tempfile::tempdir().unwrap();
    let (questions, _) = trained_by(1, run, straight.path(), u64::MAX);
    let expected = remains(run, straight.path());
    let worlds = [(1, 4), (4, 1), (2, 4), (4, 2), (1, 2), (2, 1)];
    for (stop_at, (before, after)) in (0..questions).zip(worlds.into_iter().cycle()) {
        let dir = tempfile::tempdir().unwrap();
        let (_, ended) = trained_by(before, run, dir.path(), stop_at);
        assert_eq!(ended, "Stopped");
        let (_, ended) = trained_by(after, run, dir.path(), u64::MAX);
        assert_eq!(ended, "Done");
        let same = remains(run, dir.path()) == expected;
        assert!(same, "{before} ranks, stopped at {stop_at}, then {after}");
    }
}

#[test]
fn rows_before_a_refused_step_are_saved_by_all_worlds() {
    let mut run = remembering_run();
    // The first update leaves numbers whose products are infinite.
    run.train.lr = Schedule::Constant(1e30);
    let [one, two, four] = [1, 2, 4].map(|ranks| {
        let dir = tempfile::tempdir().unwrap();
        let (_, ended) = trained_by(ranks, &run, dir.path(), u64::MAX);
        assert!(ended.starts_with("step 1: "), "{ended}");
        (ended, saved(dir.path(), 1))
    });
    assert!(one == two && one == four);
}

#[test]
fn a_last_state_that_is_written_late_counts_no_row_that_follows_it() {
    let run = small_run();
    let straight = tempfile::tempdir().unwrap();
    let lock = Lock::take(straight.path()).unwrap();
    let (questions, _) = trained(&run, (straight.path(), &lock), u64::MAX);
    let dir = tempfile::tempdir().unwrap();
    let lock = Lock::take(dir.path()).unwrap();
    let in_the_way = step_path(&dir.path().join("checkpoints"), run.train.steps);
    let asked = Cell::new(0);
    let stop = || {
        asked.set(asked.get() + 1);
        if asked.get() == 1 {
            write_file(&in_the_way, b"no directory").unwrap();
        } else if asked.get() == questions {
            // Long enough for the first try to fail.
            std::thread::sleep(std::time::Duration::from_millis(300));
            fs::remove_file(&in_the_way).unwrap();
        }
        false
    };
    let outcome = trained_with(&run, (dir.path(), &lock), &stop);
    assert_eq!(outcome, Outcome::Done);
    let tried = "is tried once more";
    assert!(
        events(dir.path())
            .iter()
            .any(|event| event.ends_with(tried))
    );
    // A process that died before it could say that it was done.
    let (_, outcome) = trained(&run, (dir.path(), &lock), u64::MAX);
    assert_eq!(outcome, Outcome::Done);
    assert!(remains(&run, dir.path()) == remains(&run, straight.path()));
}

#[test]
fn rows_name_all_figures_whatever_the_disk_takes() {
    let run = small_run();
    let straight = tempfile::tempdir().unwrap();
    let lock = Lock::take(straight.path()).unwrap();
    trained(&run, (straight.path(), &lock), u64::MAX);
    let rows = remains(&run, straight.path()).0;
    let mut named = Vec::new();
    for row in rows.lines() {
        let row: serde_json::Value = serde_json::from_str(row).unwrap();
        let values = row.as_object().unwrap().values();
        named.extend(values.filter_map(|value| Some(value.get("file")?.as_str()?.to_owned())));
    }
    let mut drawn = Vec::new();
    for step in fs::read_dir(straight.path().join("figures")).unwrap() {
        for file in fs::read_dir(step.unwrap().path()).unwrap() {
            let path = file.unwrap().path();
            let inside = path.strip_prefix(straight.path()).unwrap();
            drawn.push(inside.to_str().unwrap().to_owned());
        }
    }
    drawn.retain(|name| name.ends_with(".svg"));
    named.sort_unstable();
    drawn.sort_unstable();
    assert_eq!(named, drawn);
    assert_eq!(named.len(), 3 * FIGURES);

    let dir = tempfile::tempdir().unwrap();
    let lock = Lock::take(dir.path()).unwrap();
    write_file(&dir.path().join("figures"), b"in the way").unwrap();
    trained(&run, (dir.path(), &lock), u64::MAX);
    assert_eq!(remains(&run, dir.path()).0, rows);
}

#[test]
fn a_slow_term_is_in_the_rows_of_slow_evaluations_alone() {
    let mut run = small_run();
    (run.eval.every, run.eval.slow_every) = (1, 2);
    run.eval.metrics.terms.rows = [("often", false), ("slow", true)]
        .map(|(name, slow)| Measure {
            name: name.into(),
            slow,
            term: run.losses[1].term.clone(),
        })
        .to_vec();
    let dir = tempfile::tempdir().unwrap();
    let lock = Lock::take(dir.path()).unwrap();
    trained(&run, (dir.path(), &lock), u64::MAX);
    let rows = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    let rows = rows.lines().map(|row| serde_json::from_str(row).unwrap());
    let rows: Vec<serde_json::Value> = rows.collect();
    let steps_with = |name: &str| {
        let rows = rows.iter().filter(|row| row.get(name).is_some());
        rows.map(|row| row["step"].as_u64().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(steps_with("eval/loss/often"), [0, 1, 2, 3, 4, 5]);
    assert_eq!(steps_with("eval/loss/slow"), [2, 4, 5]);
    assert_eq!(steps_with("start/loss/slow"), [0]);
    assert_eq!(steps_with("eval/l0_above_0.1/linear1"), [2, 4, 5]);
    for mask in ["ci_masked", "stochastic"] {
        let hidden = |site: &str| steps_with(&format!("eval/hidden_acts/{mask}/{site}"));
        assert_eq!(hidden("linear2"), [2, 4, 5]);
        // Nothing lies before it.
        assert!(hidden("linear1").is_empty());
    }
}

fn goes_on_to_the_same_bits(run: &Run) {
    let straight = tempfile::tempdir().unwrap();
    let lock = Lock::take(straight.path()).unwrap();
    let (questions, outcome) = trained(run, (straight.path(), &lock), u64::MAX);
    assert_eq!(outcome, Outcome::Done);
    let expected = remains(run, straight.path());
    // Start 2, warm-up 3, steps 5, evaluations before steps 0, 2 and 4 and at the end 8,
    // figures before 2 and 4 and at the end 3 each, and one before each figure.
    assert_eq!(questions, 18 + 3 * (3 + FIGURES as u64));
    let (mut said, mut continued) = (Vec::new(), Vec::new());
    for stop_at in 0..questions {
        let dir = tempfile::tempdir().unwrap();
        let lock = Lock::take(dir.path()).unwrap();
        let (asked, outcome) = trained(run, (dir.path(), &lock), stop_at);
        assert_eq!((asked, outcome), (stop_at + 1, Outcome::Stopped));
        said.push(events(dir.path()).pop().unwrap());
        let (_, outcome) = trained(run, (dir.path(), &lock), u64::MAX);
        assert_eq!(outcome, Outcome::Done);
        continued.extend(events(dir.path()).into_iter().nth(1));
        let same = remains(run, dir.path()) == expected;
        assert!(same, "stopped at {stop_at}");
    }
    said.dedup();
    continued.dedup();
    let saved = |place: &str| format!("stopped {place} is saved; the same command goes on");
    let mut words = vec![
        "stopped before the first step; nothing is saved yet, and the same command starts over"
            .to_owned(),
        saved("before the first step, and its start"),
        saved("after update 1 of the warm-up, which"),
        saved("after update 2 of the warm-up, which"),
        saved("before the first step, and its start"),
    ];
    words.extend((1..=5).map(|step| saved(&format!("after step {step}, which"))));
    assert_eq!(said, words);
    let updates = (0..3).map(|made| format!("update {made} of the warm-up"));
    let places = updates.chain((0..=5).map(|step| format!("step {step}")));
    let from = places.map(|place| format!("continued from the checkpoint of {place}"));
    assert_eq!(continued, from.collect::<Vec<_>>());
}
