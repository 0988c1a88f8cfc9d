//! What nothing is recorded for, against [`candle`](super::candle): adversaries in training runs,
//! with each start, scope and routing, with and without delta; several mask samples; sites with
//! numbers of components of their own; deeper importance functions of each kind; every sigmoid;
//! gradients through binomial sampling; schedules by knots, smooth counts with estimated
//! frequencies, and faithfulness relative to the weights.

use spd_dataloader::Batch;
use spd_engine::{Given, Store};
use spd_trainer::decomposition::{Decomposition, Draws};
use spd_trainer::replay::Replay;

use super::candle::Oracle;
use super::compare::Comparison;
use super::replica::rounded;
use super::{processor, run_file};
use crate::harness::Outcome;

/// A run on a toy model of superposition with a hidden layer.
pub(super) struct Case {
    pub(super) name: &'static str,
    delta: bool,
    importance: &'static str,
    /// Further lines of `[train]`.
    train: &'static str,
    losses: &'static str,
    /// Which draws: such that no sign of an adversary's gradient is a matter of rounding.
    draws: u64,
}

/// Two updates of the warm-up and four of everything.
pub(super) const CASES: [Case; 6] = [
    Case {
        name: "deep_mlp_three_samples_shared_adversary",
        delta: true,
        importance: "kind = 'mlp'\nhidden = [5, 4]\nsigmoid = 'leaky_hard'",
        train: "mask_samples = 3\nclip_components = 0.05\nclip_importance = 0.02",
        losses: "
            [[loss]]\nkind = 'faithfulness'\ncoeff = 0.7
            [[loss]]\nkind = 'importance_minimality'\ncoeff = 0.01\np = 2.0\np_final = 0.9\nbeta = 0.3
            [[loss]]\nkind = 'stochastic_recon'\ncoeff = 1.0
            [[loss]]\nkind = 'stochastic_recon_layerwise'\ncoeff = 0.9
            [[loss]]\nkind = 'stochastic_hidden_acts_recon'\ncoeff = 0.4
            [[loss]]\nkind = 'pgd_recon'\ncoeff = 0.5\nsteps = 3\nstep_size = 0.2\nscope = 'shared_across_batch'",
        draws: 0,
    },
    Case {
        name: "deep_vector_mlp_logistic_adversary_from_ones_without_delta",
        delta: false,
        importance: "kind = 'vector_mlp'\nhidden = [4, 3]\nsigmoid = 'normal'",
        train: "mask_samples = 2",
        losses: "
            [[loss]]\nkind = 'importance_minimality'\ncoeff = 0.01\np = 1.5
            [[loss]]\nkind = 'stochastic_recon_subset'\ncoeff = 1.0
            [[loss]]\nkind = 'pgd_recon'\ncoeff = 0.5\ninit = 'ones'\nsteps = 2\nstep_size = 0.3\nscope = 'unique_per_datapoint'",
        draws: 1,
    },
    Case {
        name: "deep_shared_mlp_hard_layerwise_adversaries_from_zeroes",
        delta: true,
        importance: "kind = 'shared_mlp'\nhidden = [6, 5]\nsigmoid = 'hard'",
        train: "mask_samples = 1\nclip_importance = 0.02",
        losses: "
            [[loss]]\nkind = 'importance_minimality'\ncoeff = 0.01\np = 2.0
            [[loss]]\nkind = 'unmasked_recon'\ncoeff = 0.3
            [[loss]]\nkind = 'ci_masked_recon'\ncoeff = 0.3
            [[loss]]\nkind = 'pgd_recon_layerwise'\ncoeff = 0.5\ninit = 'zeroes'\nsteps = 3\nstep_size = 0.2\nscope = 'shared_across_batch'",
        draws: 0,
    },
    Case {
        name: "mlp_upper_leaky_binomial_adversary_on_subsets",
        delta: true,
        importance: "kind = 'mlp'\nhidden = [5]\nsigmoid = 'upper_leaky_hard'\nsampling = 'binomial'",
        train: "mask_samples = 2",
        losses: "
            [[loss]]\nkind = 'importance_minimality'\ncoeff = 0.01\np = 2.0
            [[loss]]\nkind = 'stochastic_recon'\ncoeff = 1.0
            [[loss]]\nkind = 'ci_masked_recon_subset'\ncoeff = 0.4\nprobability = 0.5
            [[loss]]\nkind = 'pgd_recon_subset'\ncoeff = 0.5\nsteps = 2\nstep_size = 0.25\nscope = 'shared_across_batch'",
        draws: 0,
    },
    Case {
        name: "vector_mlp_swish_binomial_adversary_from_zeroes_without_delta",
        delta: false,
        importance: "kind = 'vector_mlp'\nhidden = [4]\nsigmoid = 'swish_hard'\nsampling = 'binomial'",
        train: "mask_samples = 2",
        losses: "
            [[loss]]\nkind = 'importance_minimality'\ncoeff = 0.01\np = 2.0
            [[loss]]\nkind = 'stochastic_recon_layerwise'\ncoeff = 1.0
            [[loss]]\nkind = 'ci_masked_recon_layerwise'\ncoeff = 0.3
            [[loss]]\nkind = 'pgd_recon'\ncoeff = 0.5\ninit = 'zeroes'\nsteps = 2\nstep_size = 0.3\nscope = 'unique_per_datapoint'",
        draws: 17,
    },
    Case {
        name: "vector_mlp_smooth_l0_with_estimated_frequencies_and_knots",
        delta: true,
        importance: "kind = 'vector_mlp'\nhidden = [4]\nsigmoid = 'leaky_hard'",
        train: "clip_components = 0.05",
        losses: "
            [[loss]]\nkind = 'faithfulness'\nrelative = true
            coeff = [{ at = 0, value = 0.5 }, { at = 1, value = 2, shape = 'cosine' }]
            [[loss]]\nkind = 'smooth_l0'\ncoeff = 0.02\nnormalize_at_one = true
            gamma = [{ at = 0, value = 1 }, { at = 0.5, value = 0.3 }, { at = 1, value = 0.1 }]
            [[loss]]\nkind = 'frequency'\nreference_count = 1000\nhalflife = 2
            coeff = [{ at = 0, value = 0.01 }, { at = 0.4, value = 0.03, shape = 'constant' }]
            [[loss]]\nkind = 'stochastic_recon'\ncoeff = 1.0",
        draws: 0,
    },
];

const FEATURES: usize = 6;
const ROWS: usize = 7;

/// Single steps, and steps that carry on the rounding of those before.
const STEP: f64 = 1e-5;
const TRAJECTORY: f64 = 1e-4;

impl Case {
    fn run_file(&self) -> String {
        let Self {
            delta,
            importance,
            train,
            losses,
            ..
        } = self;
        format!(
            "name = 'unrecorded'\nseed = 3\n\
             [target]\nkind = 'tms'\nn_features = {FEATURES}\nn_hidden = 3\nn_hidden_layers = 1\nweights = 'drawn'\n\
             [data]\nkind = 'sparse_features'\nexactly_active = 2\n\
             [decomposition]\ndelta = {delta}\ntied = false\n\
             [[decomposition.sites]]\npattern = 'linear1'\nC = 7\n\
             [[decomposition.sites]]\npattern = 'linear2'\nC = 5\n\
             [[decomposition.sites]]\npattern = 'hidden_layers.0'\nC = 4\n\
             [importance]\n{importance}\n{losses}\n\
             [train]\nsteps = 4\nbatch_size = {ROWS}\n{train}\n\
             lr = {{ start = 0.01, shape = 'cosine', warmup = 0.25, final_fraction = 0.1 }}\n\
             [train.faithfulness_warmup]\nsteps = 2\nlr = 0.01\nweight_decay = 0.1\n"
        )
    }

    /// The run at its start: the programs, and candle's.
    fn start(&self) -> (Decomposition, Store, Replay, Oracle) {
        let run = run_file::read(&self.run_file());
        let mut store = Store::new();
        let mut decomposition = Decomposition::new(&run, &mut store).expect("its own sites");
        decomposition.draws = Draws::Inputs;
        decomposition.initialise(&mut store);
        for slot in store.slots().collect::<Vec<_>>() {
            let name = store.name(slot).to_owned();
            // Biases start at zero, where a mistake would not show.
            let scale = match name.as_str() {
                name if name.starts_with("target_model.") => 1.0,
                name if name.starts_with("_ci_fns.") && name.ends_with(".b") => 0.6,
                _ => continue,
            };
            let drawn = uniform(&name, store.get(slot).len()).into_iter();
            let drawn: Vec<f32> = drawn.map(|r| scale * (2.0 * r - 0.9)).collect();
            store.get_mut(slot).copy_from_slice(&drawn);
        }
        let oracle = Oracle::new(&decomposition, &store).expect("shapes fit");
        let replay = Replay::new(&decomposition, &mut store, &processor(2)).expect("programs");
        (decomposition, store, replay, oracle)
    }

    /// The draws of a step under the name of their input.
    fn draw(&self, step: u64, name: &str, len: usize) -> Vec<f32> {
        let is_coin = name.starts_with("route.")
            || self.importance.contains("binomial") && name.starts_with("src.stochastic");
        let drawn = uniform(&format!("{} {step} {name}", self.draws), len).into_iter();
        drawn.map(|r| if is_coin { r.round() } else { r }).collect()
    }

    /// Gives a program all draws that it takes.
    fn feed(&self, decomposition: &Decomposition, given: &mut Given, step: u64) {
        let mut names = Vec::new();
        for site in &decomposition.sites {
            let path = site.path();
            names.push(format!("noise.{path}"));
            for loss in &decomposition.run.losses {
                for kind in ["src", "dmask", "route"] {
                    for k in 0..3 {
                        let term = loss.term.name();
                        names.push(format!("{kind}.{term}.m{k}.{path}"));
                        names.push(format!("{kind}.{term}.p{k}.{path}"));
                    }
                }
            }
        }
        for name in names
            .iter()
            .filter(|name| given.has_input(name))
            .collect::<Vec<_>>()
        {
            let input = given.input(name);
            input.copy_from_slice(&self.draw(step, name, input.len()));
        }
    }

    /// Features of a step: two of three are off.
    fn batch(&self, step: u64) -> Batch {
        let values = uniform(&format!("{} {step} batch", self.draws), ROWS * FEATURES).into_iter();
        Batch {
            rows: ROWS,
            features: values.map(|r| (3.0 * r - 2.0).max(0.0)).collect(),
            ..Batch::default()
        }
    }

    pub(super) fn check(&self) -> Outcome {
        let single = self.single_step();
        let trajectory = self.trajectory();
        let mut compared = single.finish();
        compared.report += &trajectory.finish().report;
        Ok(compared)
    }

    /// Losses at the start, and gradients as they are clipped, which both leave in their first
    /// moments.
    fn single_step(&self) -> Comparison {
        let (decomposition, mut store, mut replay, mut oracle) = self.start();
        let mut comparison = Comparison::new(self.name, STEP);
        comparison.group("step 0");
        self.step(
            &decomposition,
            (&mut store, &mut replay, &mut oracle),
            0,
            &mut comparison,
        );
        for (index, parameter) in decomposition.parameters.iter().enumerate() {
            let name = oracle.name(index, store.name(parameter.slot));
            let share = 1.0 - rounded(0.9);
            let ours = store.get(parameter.first).iter().map(|m| m / share);
            let ours: Vec<f32> = ours.collect();
            let theirs = oracle.first_moment(&name).affine(10.0, 0.0).expect("f64");
            comparison.tensor(&format!("gradient of {name}"), &ours, &flat(&theirs));
        }
        comparison
    }

    /// Warm-up and all steps.
    fn trajectory(&self) -> Comparison {
        let (decomposition, mut store, mut replay, mut oracle) = self.start();
        let mut comparison = Comparison::new(&format!("{}, trajectory", self.name), TRAJECTORY);
        let train = &decomposition.run.train;
        comparison.group("warm-up");
        for made in 0..train.faithfulness_warmup.steps {
            replay.warm_up(&mut store, made).expect("a finite loss");
            oracle.warm_up(made).expect("shapes fit");
        }
        parameters(&decomposition, &store, &oracle, &mut comparison);
        for step in 0..train.steps {
            comparison.group(format!("step {step}"));
            self.step(
                &decomposition,
                (&mut store, &mut replay, &mut oracle),
                step,
                &mut comparison,
            );
        }
        comparison.group("end");
        parameters(&decomposition, &store, &oracle, &mut comparison);
        comparison
    }

    /// A step of both, and their losses.
    fn step(
        &self,
        decomposition: &Decomposition,
        (store, replay, oracle): (&mut Store, &mut Replay, &mut Oracle),
        step: u64,
        comparison: &mut Comparison,
    ) {
        let batch = self.batch(step);
        self.feed(decomposition, replay.given(), step);
        replay
            .step(store, &batch, step)
            .expect("a processor that works");
        let draws = |name: &str, len: usize| self.draw(step, name, len);
        let found = oracle
            .look(&batch.features, step, &draws)
            .expect("shapes fit");
        oracle.update(&found, step).expect("shapes fit");
        for (name, theirs) in &found.losses {
            let ours = replay.output(name, store)[0];
            comparison.number(name, ours.into(), *theirs);
        }
    }
}

fn parameters(
    decomposition: &Decomposition,
    store: &Store,
    oracle: &Oracle,
    comparison: &mut Comparison,
) {
    for (index, parameter) in decomposition.parameters.iter().enumerate() {
        let name = oracle.name(index, store.name(parameter.slot));
        let theirs = flat(oracle.parameter(&name));
        comparison.tensor(&name, store.get(parameter.slot), &theirs);
    }
}

fn flat(tensor: &candle_core::Tensor) -> Vec<f64> {
    let flat = tensor.flatten_all().and_then(|flat| flat.to_vec1());
    flat.expect("f64")
}

/// Numbers in [0, 1) that follow from a name: SplitMix64 from its FNV hash.
fn uniform(name: &str, len: usize) -> Vec<f32> {
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..len).map(|_| next()).collect()
}
