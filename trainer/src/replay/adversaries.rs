//! Adversaries that live on, in training runs of a toy whose parameters stay where they are.

use std::sync::Arc;

use spd_dataloader::Batch;
use spd_draws::{Purpose, Stream};
use spd_engine::{Alone, Pool, Store};

use crate::decomposition::Decomposition;
use crate::networks::Start;
use crate::parameters;
use crate::replay::Replay;
use crate::run_file::Run;

const ROWS: usize = 16;

/// A toy with two sites, on losses that a run file says.
struct Toy {
    decomposition: Decomposition,
    store: Store,
    replay: Replay,
}

/// A run file of a toy with these losses.
fn run_file(losses: &str) -> String {
    format!(
        "name = 'toy'\n\
         [target]\nkind = 'tms'\nn_features = 5\nn_hidden = 2\nweights = 'toy.safetensors'\n\
         [data]\nkind = 'sparse_features'\nprobability = 0.5\n\
         [decomposition]\ntied = false\n\
         sites = [{{ pattern = 'linear1', C = 6 }}, {{ pattern = 'linear2', C = 4 }}]\n\
         [importance]\nkind = 'mlp'\nhidden = [4]\n{losses}\n\
         [train]\nsteps = 20\nbatch_size = {ROWS}\nlr = 0\n"
    )
}

fn refused(losses: &str) -> String {
    let faults = Run::from_resolved(&run_file(losses)).unwrap_err();
    assert_eq!(faults.iter().count(), 1, "{faults}");
    faults.to_string()
}

impl Toy {
    fn new(losses: &str, threads: usize) -> Self {
        let run = Run::from_resolved(&run_file(losses)).unwrap_or_else(|faults| panic!("{faults}"));
        assert_eq!(Run::from_resolved(&run.to_toml()).as_ref(), Ok(&run));
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run, &mut store).unwrap();
        for (number, name) in [(0, "linear1"), (1, "linear2")] {
            let slot = store.slot(&format!("target_model.{name}.weight")).unwrap();
            let stream = Stream::new(Purpose::TargetInit, 0, number);
            parameters::start(&mut store, slot, stream, 7, Start::Normal(1.0));
        }
        let pool = Arc::new(Pool::new(threads).unwrap());
        let replay = Replay::new(&decomposition, &mut store, &pool.into()).unwrap();
        decomposition.initialise(&mut store);
        Self {
            decomposition,
            store,
            replay,
        }
    }

    /// Steps, each on the same batch. Returns the losses of the first and of the last.
    fn steps(&mut self, steps: u64) -> [f32; 2] {
        let mut features = vec![0.0; ROWS * 5];
        Stream::new(Purpose::Features, 0, 0).fill_uniform(0, 0, 0, &mut features);
        let batch = Batch {
            rows: ROWS,
            features,
            ..Batch::default()
        };
        let name = self.decomposition.run.losses[0].term.name();
        let losses = (0..steps).map(|step| {
            self.replay.step(&mut self.store, &batch, step).unwrap();
            self.replay.output(&format!("loss/{name}"), &self.store)[0]
        });
        let losses: Vec<f32> = losses.collect();
        [losses[0], losses[losses.len() - 1]]
    }

    /// Every bit of the state of losses.
    fn state(&self) -> Vec<u32> {
        let slots = self.store.slots();
        let slots = slots.filter(|slot| self.store.name(*slot).starts_with("losses."));
        slots
            .flat_map(|slot| self.store.get(slot).iter().map(|value| value.to_bits()))
            .collect()
    }

    /// The largest magnitude of a gradient of the last step.
    fn gradient(&self) -> f32 {
        let all = self.decomposition.parameters.iter();
        let firsts = all.flat_map(|parameter| self.store.get(parameter.first));
        firsts.fold(0.0, |most, value| most.max(value.abs()))
    }
}

const SCOPES: [&str; 3] = [
    "scope = 'single_source'",
    "scope = 'repeat_across_batch'\nn_sources = 4",
    "scope = 'per_batch_element'",
];

const OPTIMIZERS: [&str; 4] = [
    "optimizer = 'sign'\nlr = 0.05",
    "optimizer = 'sgd'\nlr = 0.1",
    "optimizer = 'momentum'\nmomentum = 0.5\nlr = 0.1",
    "optimizer = 'adam'\nbeta1 = 0.5\nlr = 0.05",
];

fn persistent(coeff: &str, keys: &str) -> String {
    format!("[[loss]]\nkind = 'persistent_pgd_recon'\ncoeff = {coeff}\n{keys}")
}

#[test]
fn adversaries_climb_from_step_to_step() {
    for scope in SCOPES {
        for optimizer in OPTIMIZERS {
            for sigmoid in ["", "sigmoid = true\nn_warmup_steps = 1"] {
                let keys = format!("{scope}\n{optimizer}\n{sigmoid}");
                let [first, last] = Toy::new(&persistent("1", &keys), 1).steps(20);
                assert!(first < last, "{keys}: {first} {last}");
            }
        }
    }
}

// Sources that start at one number end near each other; words of 16 bits take half the memory.
#[test]
fn sources_of_16_bits_climb_as_those_of_f32() {
    for (dtype, optimizer, bound) in [
        // Twenty updates, each rounded by half of a 256th of a number below 1 at most.
        ("bfloat16", OPTIMIZERS[3], 21.0 / 512.0),
        // Rounded by less than a 65535th, twenty times and at the start.
        ("uint16", OPTIMIZERS[1], 1e-3),
    ] {
        let keys = |dtype: &str| format!("{}\n{optimizer}\nsource_dtype = '{dtype}'", SCOPES[2]);
        let [mut exact, mut short] =
            ["float32", dtype].map(|dtype| Toy::new(&persistent("0", &keys(dtype)), 1));
        let [first, last] = short.steps(20);
        assert!(first < last, "{dtype}: {first} {last}");
        let [_, exact_last] = exact.steps(20);
        assert!(
            (last - exact_last).abs() < bound * exact_last,
            "{dtype}: {last} {exact_last}"
        );
        let bytes = |toy: &Toy| 4 * toy.state().len();
        // Of 6 and 4 components and two deltas, the deltas fill half a word each.
        assert_eq!(2 * bytes(&short) * 6, bytes(&exact) * 7, "{dtype}");
    }
}

// A step far shorter than half a unit moves sources, on average by what it is.
#[test]
fn short_steps_are_not_lost() {
    let keys = format!(
        "{}\noptimizer = 'sign'\nlr = 3e-6\nsource_dtype = 'uint16'",
        SCOPES[2]
    );
    let mut toy = Toy::new(&persistent("0", &keys), 1);
    let before = toy.state();
    toy.steps(1);
    let moved = toy
        .state()
        .iter()
        .zip(&before)
        .filter(|(a, b)| a != b)
        .count();
    // 0.2 units: a fifth of the numbers move, of 1 to 2 in each of 16 x 7 words.
    assert!((10..80).contains(&moved), "{moved} of {}", before.len());
}

#[test]
fn a_source_dtype_that_does_not_fit_is_refused() {
    for (keys, line) in [
        (
            format!("{}\nsource_dtype = 'uint16'", OPTIMIZERS[3]),
            "expected \"float32\" or \"bfloat16\" with optimizer = \"adam\", whose moments are no fractions, found \"uint16\"",
        ),
        (
            format!("{}\nsigmoid = true\nsource_dtype = 'uint16'", OPTIMIZERS[1]),
            "expected \"float32\" or \"bfloat16\" with sigmoid = true, whose sources have no bounds, found \"uint16\"",
        ),
        (
            format!(
                "{}\nstart_frac = 0.5\nsource_dtype = 'bfloat16'",
                OPTIMIZERS[1]
            ),
            "expected \"float32\" with start_frac, found \"bfloat16\"",
        ),
    ] {
        let found = refused(&persistent("1", &format!("{}\n{keys}", SCOPES[2])));
        assert!(found.ends_with(&format!("source_dtype: {line}")), "{found}");
    }
}

// A loss of coefficient 0 trains nothing, and one of 3 whatever it trains.
#[test]
fn a_coefficient_moves_no_source_and_scales_what_is_trained() {
    let ends = ["0", "1", "3"].map(|coeff| {
        let keys = format!("{}\n{}\nn_warmup_steps = 1", SCOPES[2], OPTIMIZERS[3]);
        let mut toy = Toy::new(&persistent(coeff, &keys), 1);
        let start = toy.state();
        toy.steps(1);
        let gradient = toy.gradient();
        toy.steps(4);
        assert!(toy.state() != start);
        (toy.state(), gradient)
    });
    let [(none, zero), (once, one), (thrice, three)] = ends;
    assert!(none == once && once == thrice);
    assert!(zero == 0.0 && one > 0.0);
    // A product, rounded once.
    assert!((three / one - 3.0).abs() < 1e-6, "{one} {three}");
}

#[test]
fn before_the_start_nothing_moves_and_nothing_counts() {
    let keys = format!("{}\n{}\nstart_frac = 0.15", SCOPES[0], OPTIMIZERS[3]);
    let mut toy = Toy::new(&persistent("1", &keys), 1);
    let start = toy.state();
    let [first, last] = toy.steps(3);
    assert!(first == 0.0 && last == 0.0);
    assert!(toy.gradient() == 0.0);
    assert!(toy.state() == start);
    let [_, last] = toy.steps(4);
    assert!(last > 0.0);
    assert!(toy.state() != start);
}

const MERGED: &str = "[[loss]]\nkind = 'merged_recon'\ncoeff = 1\nscope = 'bc'\n";

#[test]
fn a_chance_of_one_attacks_all_and_of_zero_none() {
    let end = |chance: &str, pool: &str| {
        let keys = format!("{}\nadv_fraction = {chance}\n{pool}", OPTIMIZERS[1]);
        let mut toy = Toy::new(&format!("{MERGED}{keys}"), 1);
        let start = toy.state();
        let losses = toy.steps(20);
        let moved = toy
            .state()
            .iter()
            .zip(&start)
            .filter(|(a, b)| a != b)
            .count();
        (losses, moved, start.len())
    };
    let ([first, last], moved, _) = end("1", "");
    assert!(first < last && moved > 0);
    let (_, moved, all) = end("0", "");
    assert_eq!((moved, all), (0, ROWS * (6 + 4 + 2)));
    // One chance as a constant, and as knots.
    let half = end("0.5", "");
    assert_eq!(half, end("[{ at = 0, value = 0.5 }]", ""));
    let (_, moved, all) = end("1", "pool = 3");
    assert!(moved > 0 && all == 3 * ROWS * (6 + 4 + 2));
}

#[test]
fn threads_change_no_bit() {
    for losses in [
        persistent("1", &format!("{}\n{}", SCOPES[0], OPTIMIZERS[3])),
        format!("{MERGED}{}\nadv_fraction = 0.5\npool = 2", OPTIMIZERS[2]),
    ] {
        let [one, two] = [1, 2].map(|threads| {
            let mut toy = Toy::new(&losses, threads);
            toy.steps(3);
            toy.state()
        });
        assert!(one == two, "{losses}");
    }
}

#[test]
fn keys_that_do_not_go_together_are_refused_in_one_line() {
    let sign = OPTIMIZERS[0];
    let with = |keys: &str| refused(&persistent("1", keys));
    for (keys, told) in [
        (
            format!("scope = 'bsc'\n{sign}"),
            "persistent_pgd_recon: scope: expected \"per_batch_element\" for a tms target, which has no positions, found \"per_batch_per_position\"",
        ),
        (
            format!("scope = 'repeat_across_batch'\n{sign}"),
            "n_sources: missing",
        ),
        (
            format!("scope = 'bc'\nn_sources = 2\n{sign}"),
            "n_sources: expected it with scope = \"repeat_across_batch\" alone, found scope = \"per_batch_element\"",
        ),
        (
            format!("scope = 'bc'\n{sign}\nbeta1 = 0.5"),
            "beta1: expected it with optimizer = \"adam\" alone, found \"sign\"",
        ),
        (
            "scope = 'bc'\noptimizer = 'momentum'\nlr = 1".to_owned(),
            "momentum: missing; expected a number in [0, 1), such as 0.9",
        ),
        (
            format!("scope = 'bc'\n{sign}\nn_warmup_steps = 1001"),
            "n_warmup_steps: expected a whole number of at most 1000, found 1001",
        ),
        (
            format!("scope = 'bc'\n{sign}\nroute_warmup = true"),
            "unknown key `route_warmup`",
        ),
        (
            format!("scope = 'bc'\n{sign}\nadversary_objective = 'term'"),
            "adversary_objective: expected auxiliaries with it, found none: without them both objectives are one",
        ),
        (
            format!(
                "scope = 'bc'\n{sign}\nauxiliaries = [{{ name = 'a', coeff = 1, comparisons = [] }}]"
            ),
            "comparisons: expected at least one table, found []",
        ),
    ] {
        let found = with(&keys);
        assert!(found.contains(told), "{found}");
    }
    let pooled = MERGED.replace("'bc'", "'single_source'");
    let found = refused(&format!("{pooled}{sign}\nadv_fraction = 0.5\npool = 2"));
    let told = "pool: each element of the batch has its own; expected scope = \"per_batch_element\", found \"single_source\"";
    assert!(found.contains(told), "{found}");
}

/// An auxiliary of weight `coeff` that compares a value inside of a pass.
fn auxiliary(coeff: &str, capture: &str) -> String {
    let comparison = format!("{{ capture = '{capture}', distance = 'relative_squared_error' }}");
    format!("auxiliaries = [{{ name = 'a', coeff = {coeff}, comparisons = [{comparison}] }}]")
}

#[test]
fn a_value_that_the_target_does_not_have_is_refused() {
    let keys = format!("{}\n{}\n", SCOPES[2], OPTIMIZERS[0]) + &auxiliary("1", "out.linear9");
    let run = Run::from_resolved(&run_file(&persistent("1", &keys))).unwrap();
    let refused = Decomposition::new(&run, &mut Store::new()).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "[[loss]] persistent_pgd_recon auxiliaries: the target has no value `out.linear9`; did you mean `out.linear1`?"
    );
}

// Values that are compared beside the output train the components, and move the sources of an
// adversary whose objective is the whole term, and of no other.
#[test]
fn an_adversary_climbs_what_its_objective_says() {
    let ends = |more: &str| {
        let keys = format!(
            "{}\n{}\nn_warmup_steps = 1\n{more}",
            SCOPES[2], OPTIMIZERS[1]
        );
        let mut toy = Toy::new(&persistent("1", &keys), 1);
        let [loss, _] = toy.steps(1);
        let gradient = toy.gradient();
        toy.steps(4);
        (toy.state(), loss, gradient)
    };
    let without = ends("");
    let e2e = ends(&auxiliary("1", "out.linear1"));
    let knots = "[{ at = 0, value = 1 }, { at = 1, value = 1 }]";
    let moving = ends(&auxiliary(knots, "out.linear1"));
    let objective = "\nadversary_objective = 'term'";
    let term = ends(&(auxiliary("1", "out.linear1") + objective));
    assert!(without.0 == e2e.0 && e2e.0 != term.0);
    assert!(without.1 < e2e.1 && without.2.to_bits() != e2e.2.to_bits());
    assert!(e2e == moving);
}

#[test]
fn sources_go_round_in_the_rows_of_a_shard() {
    let losses = persistent(
        "1",
        &format!(
            "scope = 'repeat_across_batch'\nn_sources = 3\n{}",
            OPTIMIZERS[0]
        ),
    );
    let run = Run::from_resolved(&run_file(&losses)).unwrap();
    let refused = Decomposition::new(&run, &mut Store::new()).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "[[loss]] persistent_pgd_recon: n_sources: expected a divisor of 16, the rows of a batch or of each of its shards, found 3"
    );
}

// A step of the ascent computes no gradient of a weight: those of the last pass alone.
#[test]
fn warm_up_updates_make_the_gradients_of_sources_alone() {
    let products = |n_warmup_steps: usize| {
        let keys = format!(
            "{}\n{}\nn_warmup_steps = {n_warmup_steps}",
            SCOPES[2], OPTIMIZERS[0]
        );
        let toy = Toy::new(&persistent("1", &keys), 1);
        let program = toy.decomposition.step_program(&toy.store).unwrap();
        let mut executor = Alone::new(&program, &Arc::new(Pool::single()).into()).unwrap();
        executor.start_profile();
        let ops = executor.profile();
        ops.iter().filter(|op| op.name == "matmul").count()
    };
    // As for fresh adversaries: two forward, four backward.
    assert_eq!(products(3) - products(2), 6);
}
