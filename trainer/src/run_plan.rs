//! The plan of a run, for the table that is printed before it starts: everything is checked and
//! every program is built, nothing is started, and nothing is written but what was found of a
//! dataset, into the cache.

use std::sync::Arc;

use spd_configs::brief;
use spd_engine::{Pool, Processor, Store, bf16_is_slower, has_bf16_products};

use crate::data;
use crate::decomposition::Decomposition;
use crate::decomposition_task::DecompositionTask;
use crate::fault::Fault;
use crate::gather::GATHERED;
use crate::given_weights;
use crate::losses::Loss;
use crate::memory::Memory;
use crate::networks::{described, shipped};
use crate::run_file::{Active, Data, Dtype, EvalData, Precision, Recompute, Run};
use crate::target;
use crate::target_task::{Lessons, TargetTask};
use crate::world::World;

/// The plan of a run. Values are ready to print.
#[derive(Debug, Clone, Default)]
pub struct RunPlan {
    /// Label and value, in the order to print.
    pub rows: Vec<(String, String)>,
    /// The sites, in the order of the network.
    pub sites: Vec<SitePlan>,
    /// Parameters of what gives importances to all sites together.
    pub shared_importance: usize,
    /// Bytes of a checkpoint: parameters and moments.
    pub state_bytes: usize,
    /// Bytes of the target's weights, which all checkpoints share.
    pub frozen_bytes: usize,
    /// Peak memory of all ranks.
    pub memory: Memory,
    /// Peak GPU memory, if it runs on one.
    pub gpu_memory: Option<Memory>,
}

/// A site in the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SitePlan {
    /// Module path.
    pub path: String,
    /// Length of what its matrix reads.
    pub d_in: usize,
    /// Length of what its matrix writes.
    pub d_out: usize,
    /// Number of components.
    pub components: usize,
    /// Parameters of its components, and of its importance function if it has its own.
    pub parameters: usize,
}

/// Reads the weights of a run that were fetched after its plan, to see whether they are those of
/// its network.
///
/// # Errors
///
/// As [`run_plan`], of weights.
pub fn check_weights(run: &Run) -> Result<(), Fault> {
    given_weights::check_weights(run, &*shipped(&run.target.model)?)
}

/// Checks a run against its target and data, builds its programs, and says what they need; on a
/// GPU, if `on_gpu`.
///
/// # Errors
///
/// Any fault that would keep the run from starting, as bad input. Weights of the hub that are still
/// to be fetched are not looked at: see [`check_weights`].
pub fn run_plan(run: &Run, threads: usize, on_gpu: bool, world: &World) -> Result<RunPlan, Fault> {
    check_precision(run, on_gpu)?;
    let sources = data::open_checked(run)?;
    let network = shipped(&run.target.model)?;
    target::check_cache(run, &*network)?;
    given_weights::check_ids(run, &sources)?;
    if !given_weights::are_to_come(run)? {
        given_weights::check_weights(run, &*network)?;
    }
    let processor = if on_gpu {
        Processor::Gpu(None)
    } else {
        Processor::Cpu(Arc::new(Pool::planned(threads)))
    };
    // Planned and not made: what would not fit is to be refused, not tried.
    let mut store = Store::of_shapes();
    let decomposition = Decomposition::of(run, &network, &mut store)?;
    let layers = network.layers().len();
    check_length(run, decomposition.sites.len(), layers)?;
    let task = DecompositionTask::new(
        decomposition,
        sources.clone(),
        &mut store,
        &processor,
        world,
    )?;
    let larger = |one: Memory, other: Memory| {
        if other.total() > one.total() {
            other
        } else {
            one
        }
    };
    let (mut memory, mut gpu_memory) = (task.memory(&store), task.gpu_memory(&store));
    let of_all = memory.parts.iter_mut();
    for (_, bytes) in of_all.filter(|(part, _)| *part != GATHERED) {
        *bytes = bytes.saturating_mul(world.size());
    }
    if let Some(settings) = &run.target.train {
        let mut store = Store::of_shapes();
        let lessons = Lessons {
            run,
            network: &network,
            settings,
        };
        let task = TargetTask::new(lessons, sources, &mut store, &processor)?;
        // The target's programs are gone when those of the decomposition are made.
        memory = larger(memory, task.memory(&store));
        gpu_memory = gpu_memory
            .zip(task.gpu_memory(&store))
            .map(|(one, other)| larger(one, other));
    }
    let decomposition = &task.decomposition;
    let (counts, shared_importance) = decomposition.parameter_counts(&store);
    let sites = decomposition.sites.iter().zip(counts);
    let sites = sites.map(|(site, parameters)| SitePlan {
        path: site.path().to_owned(),
        d_in: site.layer.d_in,
        d_out: site.layer.d_out,
        components: site.components,
        parameters,
    });
    let sites: Vec<SitePlan> = sites.collect();
    let mut rows = rows(decomposition, (threads, world), on_gpu)?;
    if on_gpu && run.precision == Precision::Bf16 {
        rows.extend(slow_components(&sites).map(|slow| ("slow sites".to_owned(), slow)));
    }
    let frozen = store.slots().filter(|&slot| store.is_frozen(slot));
    let frozen_bytes = frozen
        .map(|slot| store.ty(slot).bytes() / (1 + usize::from(store.is_in_bf16(slot))))
        .sum();
    Ok(RunPlan {
        rows,
        sites,
        shared_importance,
        state_bytes: store.bytes() - frozen_bytes,
        frozen_bytes,
        memory,
        gpu_memory,
    })
}

/// Fewest components of a site whose products on a GPU are worth a hint.
const MANY_COMPONENTS: usize = 64;

/// Sites whose number of components makes their products in bf16 slow on a GPU, if there are any.
fn slow_components(sites: &[SitePlan]) -> Option<String> {
    let mut slow = sites
        .iter()
        .filter(|site| site.components >= MANY_COMPONENTS && site.components % 8 != 0);
    let first = slow.next()?;
    let (components, path) = (first.components, &first.path);
    let more = match slow.count() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Some(format!(
        "C = {components} of {path}{more}: products with a C that is no multiple of 8 take a GPU several times as long; {} is one",
        components.next_multiple_of(8)
    ))
}

/// Layers that the losses of a step pass through, at most: such a plan takes some five seconds. All
/// 224 sites of a model of 32 blocks, layerwise, are 50,000.
const MOST_MASKED_LAYERS: usize = 250_000;

/// Refuses a step that would take minutes to plan: a layerwise loss passes through the whole target
/// for each site.
fn check_length(run: &Run, sites: usize, layers: usize) -> Result<(), Fault> {
    let streams = run.streams();
    let losses = streams.iter().flat_map(|(.., losses)| losses);
    let trained = losses.map(|loss| &loss.term);
    let measured = run
        .eval
        .metrics
        .terms
        .rows
        .iter()
        .map(|measure| &measure.term);
    let passes = trained
        .chain(measured)
        .map(|term| term.term().pass_count(sites, run.train.mask_samples))
        .fold(0, usize::saturating_add);
    let masked = passes.saturating_mul(layers);
    if masked <= MOST_MASKED_LAYERS {
        return Ok(());
    }
    Err(Fault::BadInput(format!(
        "[[loss]]: a step would pass through the target {passes} times, {layers} layers each: {masked} layers, and at most \
         {MOST_MASKED_LAYERS} are planned; decompose fewer sites, take fewer mask samples or adversary steps, or leave out a \
         layerwise loss"
    )))
}

/// Refuses a precision that the processor has not.
///
/// # Errors
///
/// One line that names the setting.
pub fn check_precision(run: &Run, on_gpu: bool) -> Result<(), Fault> {
    match why_not(run.precision, on_gpu, has_bf16_products()) {
        None => Ok(()),
        Some(reason) => Err(Fault::BadInput(format!(
            "precision: {reason}; start the run with --gpus 1, or set precision = \"f32\""
        ))),
    }
}

/// Why a precision is refused where a step is computed: on a GPU, or on a processor that multiplies
/// bf16 or does not.
pub(crate) fn why_not(
    precision: Precision,
    on_gpu: bool,
    bf16_products: bool,
) -> Option<&'static str> {
    match precision {
        Precision::Tf32 if !on_gpu => Some("tf32 is for GPUs, and a CPU has none"),
        Precision::Bf16 if !on_gpu && !bf16_products => Some(
            "bf16 on a CPU is for processors with AVX512_BF16 or AMX, and this one has neither",
        ),
        Precision::F32 | Precision::Tf32 | Precision::Bf16 => None,
    }
}

/// - `is_slower`: whether this processor multiplies bf16 slower than f32
fn precision_name(precision: Precision, on_gpu: bool, is_slower: bool) -> &'static str {
    match (precision, on_gpu) {
        (Precision::F32, _) => "f32",
        (Precision::Tf32, _) => "tf32 in what is multiplied, f32 in what is stored",
        (Precision::Bf16, true) => "bf16 in what a step stores, f32 in what it keeps",
        (Precision::Bf16, false) if is_slower => {
            "bf16 in what is multiplied, f32 in what is stored; f32 is faster here: with AVX512_BF16 and without AMX, a step in bf16 takes \
             this processor 1.4 to 1.8 times as long"
        }
        (Precision::Bf16, false) => "bf16 in what is multiplied, f32 in what is stored",
    }
}

fn rows(
    decomposition: &Decomposition,
    (threads, world): (usize, &World),
    on_gpu: bool,
) -> Result<Vec<(String, String)>, Fault> {
    let (run, network) = (&decomposition.run, &*decomposition.target);
    let row = |label: &str, value: String| (label.to_owned(), value);
    let data = match &run.data {
        Data::SparseFeatures { active, low, high } => {
            let on = match active {
                Active::ByChance {
                    probability,
                    synced_inputs,
                } => {
                    let probability = brief(*probability);
                    match synced_inputs.len() {
                        0 => format!("features on with probability {probability}"),
                        1 => format!("features on with probability {probability}, 1 group in sync"),
                        n => format!(
                            "features on with probability {probability}, {n} groups in sync"
                        ),
                    }
                }
                Active::Exactly { exactly_active } => format!("{exactly_active} features on"),
            };
            format!("{on}, uniform in [{}, {})", brief(*low), brief(*high))
        }
        Data::Tokens {
            train,
            eval,
            seq_len,
            cross_documents,
            ..
        } => {
            let held_out = match eval {
                EvalData::Dataset(path) => path.display().to_string(),
                EvalData::HeldOut { held_out } => format!("the last {} of it", brief(*held_out)),
            };
            let within = match cross_documents {
                true => "",
                false => ", each of one document",
            };
            format!(
                "{} (held out: {held_out}), {seq_len} tokens a row{within}",
                train.display()
            )
        }
    };
    let said = |losses: &[Loss]| {
        let losses = losses.iter();
        let losses = losses.map(|loss| format!("{} {}{}", loss.coeff, loss.term, loss.auxiliaries));
        losses.collect::<Vec<_>>().join(" + ")
    };
    let mut weights = target::origin(run, network)?;
    if run.target.dtype == Dtype::Bf16 {
        weights += "; held in bf16";
    }
    let kind = &run.importance.kind;
    let importance = match decomposition.sees_later_tokens() {
        true => format!("{}, {SEES_LATER}", kind.describe()),
        false => kind.describe(),
    };
    let train = &run.train;
    let mut rows = vec![
        row("run", format!("{}, seed {}", run.name, run.seed)),
        row("target", described(network)),
        row("weights", weights),
        row("data", data),
        row("importance", importance),
        row("losses", said(&run.losses)),
        row(
            "steps",
            format!("{} of {} rows", train.steps, train.batch_size),
        ),
        row(
            "precision",
            precision_name(run.precision, on_gpu, bf16_is_slower()).into(),
        ),
        row("device", device(train.blocks(), threads, on_gpu, world)),
    ];
    if let Some(nontarget) = &run.nontarget {
        let (path, rows_of_step) = (nontarget.data.display(), nontarget.batch_size);
        let losses = said(&nontarget.all_losses(&run.losses));
        let within = match nontarget.seq_len {
            Some(seq_len) => format!(", {seq_len} tokens each"),
            None => String::new(),
        };
        let mut of_stream = format!("{rows_of_step} rows of {path} a step{within}: {losses}");
        if nontarget.weight_decay > 0.0 {
            of_stream += &format!("; weight decay {}", brief(nontarget.weight_decay));
        }
        rows.push(row("nontarget", of_stream));
    }
    if train.recompute == Recompute::Always {
        rows.push(row("recompute", RECOMPUTED.into()));
    }
    if train.streamed_kl {
        rows.push(row("logits", "the target's a few rows at a time".into()));
    }
    Ok(rows)
}

/// A warning of importances that are not causal.
const SEES_LATER: &str = "sees later tokens, so masks may give them away";

/// The intermediates that gradients make again.
const RECOMPUTED: &str = "blocks of masked passes, and importance functions";

/// Processor and number of ranks or threads of a run.
fn device(shards: usize, threads: usize, on_gpu: bool, world: &World) -> String {
    let threads = format!("{threads} thread{}", if threads == 1 { "" } else { "s" });
    let device = match (on_gpu, world.size()) {
        (true, 1) => "GPU 0".to_owned(),
        (true, ranks) => format!("{ranks} GPUs, a rank each"),
        (false, 1) => format!("CPU, {threads}"),
        (false, ranks) => format!("CPU, {ranks} ranks of {threads}"),
    };
    match shards {
        1 => device,
        shards => format!("{device}; each batch in {shards} shards"),
    }
}

#[cfg(test)]
mod tests {
    use spd_engine::Executor;

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::component_model::Routing;
    use crate::losses::{StochasticRecon, Term};

    fn run(precision: Precision) -> Run {
        let preset = preset("tiny-gpt2-h1", &Overrides::default());
        let mut run = preset.unwrap().run;
        run.precision = precision;
        run
    }

    #[test]
    fn components_that_slow_a_gpu_down_are_named() {
        let sites = |components: &[usize]| -> Vec<SitePlan> {
            let sites = components.iter().zip(["a", "b", "c"]);
            let sites = sites.map(|(&components, path)| SitePlan {
                path: path.to_owned(),
                d_in: 64,
                d_out: 64,
                components,
                parameters: 0,
            });
            sites.collect()
        };
        // A toy's few components take no time.
        assert_eq!(slow_components(&sites(&[1200, 20, 64])), None);
        assert_eq!(
            slow_components(&sites(&[64, 300, 65])).unwrap(),
            "C = 300 of b and 1 more: products with a C that is no multiple of 8 take a GPU several times as long; 304 is one"
        );
    }

    #[test]
    fn bf16_is_for_gpus_and_processors_that_multiply_it_and_tf32_for_gpus() {
        use Precision::{Bf16, F32, Tf32};
        for (precision, on_gpu, products, expected) in [
            (F32, false, false, true),
            (Bf16, true, false, true),
            (Bf16, false, true, true),
            (Bf16, false, false, false),
            (Tf32, true, false, true),
            (Tf32, false, true, false),
        ] {
            let found = why_not(precision, on_gpu, products).is_none();
            assert_eq!(found, expected, "{precision:?} {on_gpu} {products}");
        }
    }

    #[test]
    fn the_plan_names_a_processor_that_bf16_makes_slower() {
        use Precision::{Bf16, F32};
        let told = precision_name(Bf16, false, true);
        assert_eq!(
            told,
            "bf16 in what is multiplied, f32 in what is stored; f32 is faster here: with AVX512_BF16 and without AMX, a step in \
             bf16 takes this processor 1.4 to 1.8 times as long"
        );
        for (precision, on_gpu, is_slower) in
            [(Bf16, false, false), (Bf16, true, true), (F32, false, true)]
        {
            let name = precision_name(precision, on_gpu, is_slower);
            assert!(!name.contains("faster"), "{name}");
        }
    }

    #[test]
    fn a_step_that_takes_minutes_to_plan_is_refused() {
        let mut run = run(Precision::F32);
        run.train.mask_samples = 2;
        run.eval.metrics.terms.rows.clear();
        run.losses.truncate(1);
        let stochastic = |routing| Term::StochasticRecon(StochasticRecon { routing });
        run.losses[0].term = stochastic(Routing::Layerwise);
        assert!(check_length(&run, 125, 1000).is_ok());
        let Err(Fault::BadInput(line)) = check_length(&run, 126, 1000) else {
            panic!("a step of 252,000 layers");
        };
        assert_eq!(
            line,
            "[[loss]]: a step would pass through the target 252 times, 1000 layers each: 252000 layers, and at most \
             250000 are planned; decompose fewer sites, take fewer mask samples or adversary steps, or leave out a \
             layerwise loss"
        );
        run.losses[0].term = stochastic(Routing::All);
        assert!(check_length(&run, 100_000, 100_000).is_ok());
    }

    #[test]
    fn a_step_in_bf16_takes_less_memory_of_a_gpu() {
        let bytes = |precision| {
            let mut store = Store::of_shapes();
            let decomposition = Decomposition::new(&run(precision), &mut store).unwrap();
            let step = decomposition.step_program(&store).unwrap();
            let executor = Executor::planned(&step, &Processor::Gpu(None));
            executor.plan().arena_bytes()
        };
        let (full, rounded) = (bytes(Precision::F32), bytes(Precision::Bf16));
        assert!(10 * rounded < 9 * full, "{rounded} of {full}");
    }
}
