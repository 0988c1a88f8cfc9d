//! Run files of the reference's successor: what they become, and what of them is refused.

use super::{reference::load, stories::stories};

/// A toy whose sites are named, with a merged adversary and a frequency term.
const TOY: &str = "
run_name: tiny toy
cadence:
  train_log_every: 30
  checkpointing: {kind: periodic, save_every: 700, retention: {kind: keep_last, n: 3}}
target:
  n_features: 6
  n_hidden: 3
  n_hidden_layers: 1
  hidden_layer_init: identity
  init_bias_to_zero: true
  pretrain: {steps: 90, batch_size: 32, lr: 1e-2, seed: 4}
data: {feature_probability: 0.2, data_generation_type: exactly_two_active}
decomposition:
  sites:
    kind: explicit
    sites:
    - {name: linear1, C: 9}
    - {name: hidden_layers.0, C: 4}
    - {name: linear2, C: 9}
  ci: {type: layerwise_mlp, hidden_dims: [7]}
pd:
  seed: 5
  steps: 800
  batch_size: 64
  components_optimizer: &moved
    betas: [0.9, 0.999]
    weight_decay: 0.0
    grad_clip_norm: 0.5
    lr_schedule: {max_val: 2e-3, points: [{at: 0.0, frac: 1.0}, {at: 1.0, frac: 0.25, interp: cosine}]}
  ci_fn_optimizer: *moved
  faithfulness_warmup_steps: 20
  faithfulness_warmup_lr: 0.02
  loss_metrics:
  - type: ImportanceMinimalityLoss
    coeff: 3e-4
    gamma: {max_val: 2.0, points: [{at: 0.0, frac: 1.0}, {at: 0.5, frac: 0.25, interp: hold}, {at: 1.0, frac: 0.125}]}
    normalize_at_one: true
    frequency: {coeff: 0.125, reference_token_count: 512, ema_halflife_steps: 50}
  - type: MergedStochasticSubsetPPGDReconLoss
    coeff: {max_val: 2.0, points: [{at: 0.0, frac: 0.5}, {at: 1.0, frac: 1.0}]}
    adv_fraction: 0.25
    n_warmup_steps: 2
    source_shape: bc
    routing: {type: static_probability, p: 0.75}
    optimizer: {type: momentum_sgd, momentum: 0.5, lr_schedule: 0.125}
  - {type: PGDReconSubsetLoss, coeff: 0.5, init: ones, step_size: 0.5, n_steps: 2, source_shape: bc}
  - {type: FaithfulnessLoss, coeff: 1.5}
eval:
  batch_size: 16
  n_steps: 2
  every: 100
  slow_every: 200
  metrics:
  - {type: CI_L0, groups: {ends: [\"linear*\"]}, ci_alive_threshold: 0.125}
  - {type: PGDReconLoss, name: twenty, init: random, source_shape: c, n_steps: 20, step_size: 0.125}
  - {type: IdentityCIError, identity_ci: [{layer_pattern: linear1, n_features: 6}], dense_ci: null}
  - {type: SlowPGDReconLoss, name: many, init: random, source_shape: c, n_steps: 80, step_size: 0.125}
  - {type: SlowPGDReconLoss, name: some, init: random, source_shape: c, n_steps: 40, step_size: 0.125}
  - {type: UVPlots, identity_patterns: null, dense_patterns: null}
runtime: {sharding: owner}
wandb: {project: somewhere}
";

/// The same by our keys.
const OUR_TOY: &str = r#"
name = "tiny-toy"
seed = 5
target = { kind = "tms", n_features = 6, n_hidden = 3, n_hidden_layers = 1, zero_bias = true, train = { steps = 90, batch_size = 32, lr = 1e-2, seed = 4 } }
data = { kind = "sparse_features", exactly_active = 2 }
checkpoint = { every = 700, keep = 3 }
log = { every = 30 }
importance = { kind = "shared_mlp", hidden = [7] }

[decomposition]
tied = false
sites = [{ pattern = "linear1", C = 9 }, { pattern = "hidden_layers.0", C = 4 }, { pattern = "linear2", C = 9 }]

[[loss]]
kind = "smooth_l0"
coeff = 3e-4
gamma = [{ at = 0, value = 2.0 }, { at = 0.5, value = 0.5, shape = "constant" }, { at = 1, value = 0.25 }]
normalize_at_one = true

[[loss]]
kind = "frequency"
coeff = 0.125
reference_count = 512
halflife = 50

[[loss]]
kind = "merged_recon"
coeff = [{ at = 0, value = 1.0 }, { at = 1, value = 2.0 }]
adv_fraction = 0.25
n_warmup_steps = 2
scope = "bc"
probability = 0.75
optimizer = "momentum"
momentum = 0.5
lr = 0.125

[[loss]]
kind = "pgd_recon_subset"
coeff = 0.5
init = "ones"
step_size = 0.5
steps = 2
scope = "unique_per_datapoint"

[[loss]]
kind = "faithfulness"
relative = true
coeff = 1.5

[train]
steps = 800
batch_size = 64
lr = [{ at = 0, value = 2e-3 }, { at = 1, value = 5e-4, shape = "cosine" }]
clip_components = 0.5
clip_importance = 0.5
faithfulness_warmup = { steps = 20, lr = 0.02 }

[eval]
batch_size = 16
batches = 2
every = 100
slow_every = 200
alive_threshold = 0.125
ladder = { steps = [40, 80], step_size = 0.125 }
known = [{ pattern = "linear1", identity = 6 }]
subset = [{ name = "ends", sites = ["linear*"], masked = false }]
loss = [{ kind = "pgd_recon", name = "twenty", steps = 20, step_size = 0.125, scope = "shared_across_batch" }]
"#;

/// A language model whose importances are those of a transformer over taps.
const LANGUAGE: &str = "
run_name: tiny
cadence: {checkpointing: {kind: periodic, save_every: 700, retention: {kind: keep_last, n: 1}}}
target:
  attention_implementation: flash
  weights_dtype: bfloat16
  spec:
    kind: pretrained
    model_class: param_decomp.experiments.lm.pretrain.models.llama_simple_mlp.LlamaSimpleMLP
    run_path: someone/models/runs/t-1234abcd
  output_edge: {kind: streamed, n_vocab_chunks: 5}
data:
  train: {kind: name, name: stories}
  eval: {kind: name, name: held_out}
decomposition:
  sites:
    kind: simple_mlp
    layers: {kind: range, start: 0, end: 2}
    cs: {q_proj: 8, down_proj: 12}
    initialization: nonlinearity_aligned
  ci:
    type: chunkwise_transformer
    blocks_per_chunk: 2
    d_model: 16
    n_blocks: 3
    learned_norm_scale: true
    attention: {kind: gqa, n_heads: 4, n_kv_heads: 2, mask: causal, implementation: xla}
    ffn: {kind: swiglu, hidden: 24}
eval:
  {batch_size: 4, n_steps: 1, every: 10, slow_every: 20, metrics: [
    {type: CIMaskedAttnPatternsReconLoss}, {type: StochasticAttnPatternsReconLoss},
    {type: CIActiveCountsPerPosition},
    {type: SlowPGDReconLoss, init: random, source_shape: c, read_out_steps: [20, 40], step_size: 0.125},
    {type: WellTemperedness, groups: null, n_locations: 9, n_components_per_region: 5, ablations_per_forward: 3}]}
pd:
  steps: 800
  batch_size: 8
  components_optimizer: &moved
    type: muon
    beta: 0.875
    ns_steps: 4
    grad_clip_norm: 1.0
    lr_schedule: {max_val: 1e-3, points: [{at: 0.0, frac: 1.0}, {at: 1.0, frac: 0.5}]}
  ci_fn_optimizer: *moved
  loss_metrics:
  - {type: ImportanceMinimalityLoss, coeff: 1e-4, gamma: 0.5}
  - type: NonlinearityLocalityLoss
    coeff: 3e-5
    relative_threshold: 4.0
    unit_kind_coefficients: {neuron: 1.0, attention_head: 0.5}
  - type: MergedStochasticSubsetPooledPPGDReconLoss
    coeff: 1.0
    adv_fraction: 0.5
    pool: {size_per_batch_element: 4}
    adversary_objective: e2e
    auxiliaries: []
    optimizer: {type: adam, beta1: 0.01, beta2: 0.99, lr_schedule: 0.01}
  - type: StochasticReconSubsetLoss
    coeff: 0.5
    routing: {type: all}
    auxiliaries:
    - name: within
      coeff: 0.25
      comparisons:
      - {capture: resid.0, distance: relative_squared_error}
      - {capture: resid.2, distance: relative_squared_error}
      - {capture: h.1.mlp.down_proj.out, distance: categorical_kl_from_logits}
  - type: PersistentPGDReconLoss
    coeff: 0.5
    source_shape: bsc
    adversary_objective: term
    hidden_acts_reconstruction: {coeff: 0.5, points: [resid.1]}
    optimizer: {type: sgd, lr_schedule: {max_val: 0.5, points: [{at: 0.0, frac: 1.0}, {at: 1.0, frac: 1.0}]}}
  - {type: FaithfulnessLoss, coeff: 1000.0}
";

const SET: [&str; 4] = [
    r#"target={kind="llama_simple_mlp",vocab=50,n_ctx=64,d_model=16,n_layer=2,n_head=4,n_kv_head=2,weights="x.pt",dtype="bf16"}"#,
    "data.train=a",
    "data.eval=b",
    "data.seq_len=32",
];

const OUR_LANGUAGE: &str = r#"
name = "tiny"
precision = "bf16"
target = { kind = "llama_simple_mlp" }
data = { kind = "tokens" }
checkpoint = { every = 700, keep = 1 }
log = { every = 20 }

[decomposition]
start = "nonlinearity_aligned"
sites = [
  { pattern = "h.0.attn.q_proj", C = 8 },
  { pattern = "h.1.attn.q_proj", C = 8 },
  { pattern = "h.0.mlp.down_proj", C = 12 },
  { pattern = "h.1.mlp.down_proj", C = 12 },
]

[importance]
kind = "chunkwise_transformer"
blocks_per_chunk = 2
input_tap = "first_block_resid"
d_model = 16
n_layer = 3
learned_norm_scale = true
n_head = 4
n_kv_head = 2
causal = true
ffn = "swiglu"
hidden = 24

[[loss]]
kind = "smooth_l0"
coeff = 1e-4
gamma = 0.5

[[loss]]
kind = "nonlinearity_locality"
coeff = 3e-5
relative_threshold = 4.0
unit_kind_coefficients = { neuron = 1.0, attention_head = 0.5 }

[[loss]]
kind = "merged_recon"
coeff = 1.0
adv_fraction = 0.5
pool = 4
scope = "bc"
optimizer = "adam"
beta1 = 0.01
beta2 = 0.99
lr = 0.01

[[loss]]
kind = "stochastic_recon"
coeff = 0.5

[[loss.auxiliaries]]
name = "within"
coeff = 0.25
comparisons = [
  { capture = "resid_pre.0", distance = "relative_squared_error" },
  { capture = "resid_post.1", distance = "relative_squared_error" },
  { capture = "out.h.1.mlp.down_proj", distance = "categorical_kl_from_logits" },
]

[[loss]]
kind = "persistent_pgd_recon"
coeff = 0.5
adversary_objective = "term"
auxiliaries = [
  { name = "hidden_acts_reconstruction", coeff = 0.5, comparisons = [
    { capture = "resid_post.0", distance = "relative_squared_error" },
  ] },
]
scope = "bsc"
optimizer = "sgd"
lr = [{ at = 0, value = 0.5 }, { at = 1, value = 0.5 }]

[[loss]]
kind = "faithfulness"
relative = true
coeff = 1e3

[train]
steps = 800
batch_size = 8
lr = [{ at = 0, value = 1e-3 }, { at = 1, value = 5e-4 }]
streamed_kl = true
muon = { beta = 0.875, iterations = 4 }
clip_components = 1.0
clip_importance = 1.0

[eval]
batch_size = 4
batches = 1
every = 10
slow_every = 20
attention_patterns = "target"
well_tempered = { positions = 9, components = 5 }
ladder = { steps = [20, 40], step_size = 0.125 }
"#;

#[test]
fn a_toy_and_a_language_model_become_run_files_of_ours() {
    for (theirs, ours, set) in [(TOY, OUR_TOY, &[][..]), (LANGUAGE, OUR_LANGUAGE, &SET)] {
        let run = load("a.yaml", theirs, set).unwrap_or_else(|faults| panic!("{faults}"));
        let expected = load("a.toml", ours, set).unwrap_or_else(|faults| panic!("{faults}"));
        assert_eq!(run.differences(&expected), Vec::<String>::new());
        assert_eq!(run.to_toml(), expected.to_toml());
    }
}

/// Keys that target a decomposition at prompts.
const PROMPTS: &str = "
prompts: {kind: arithmetic_grid, operation: add, a_range: [1, 9], b_range: [1, 20]}
nontarget:
  batch_size: 4
  impmin_coeff: {max_val: 2e-4, points: [{at: 0.0, frac: 0.0}, {at: 1.0, frac: 1.0}]}
  recon:
  - {type: StochasticReconSubsetLoss, coeff: 1.0, routing: {type: uniform_k_subset}}
  - {type: UnmaskedNoDeltaReconLoss, coeff: 0.5}
";

const OUR_NONTARGET: &str = r#"
[nontarget]
data = "c"
batch_size = 4
seq_len = 16
minimality_coeff = [{ at = 0, value = 0 }, { at = 1, value = 2e-4 }]
weight_decay = 0.125
loss = [
  { kind = "stochastic_recon_subset", coeff = 1 },
  { kind = "unmasked_recon", coeff = 0.5 },
]
"#;

/// A decomposition that is targeted at prompts, with a learning rate of importance functions.
fn targeted() -> String {
    let changes = [
        (
            "  batch_size: 8\n",
            "  batch_size: 8\n  ci_scaled_weight_decay: 0.125\n",
        ),
        (
            "  ci_fn_optimizer: *moved\n",
            "  ci_fn_optimizer: {type: muon, beta: 0.875, ns_steps: 4, grad_clip_norm: 1.0, lr_schedule: 5e-4}\n",
        ),
        ("  - {type: FaithfulnessLoss, coeff: 1000.0}\n", ""),
        ("source_shape: bsc", "source_shape: sc"),
    ];
    let change = |file: String, (old, new): (&str, &str)| {
        assert!(file.contains(old), "{old}");
        file.replacen(old, new, 1)
    };
    changes.into_iter().fold(LANGUAGE.to_owned(), change) + PROMPTS
}

#[test]
fn a_decomposition_targeted_at_prompts_is_read() {
    let (before, rest) = OUR_LANGUAGE
        .split_once("[[loss]]\nkind = \"faithfulness\"")
        .expect("it is there");
    let (_, train) = rest.split_once("[train]\n").expect("it is there");
    let before = before.replace("scope = \"bsc\"", "scope = \"broadcast_across_batch\"");
    let ours = format!("{before}[train]\nlr_importance = 5e-4\n{train}{OUR_NONTARGET}");
    // `--set` replaces a key that is there, and here it is the only one that says the data.
    let set = [&SET[..], &["nontarget.data=c", "nontarget.seq_len=16"]].concat();
    let run = load("a.yaml", &targeted(), &set).unwrap_or_else(|faults| panic!("{faults}"));
    let expected = load("a.toml", &ours, &SET).unwrap_or_else(|faults| panic!("{faults}"));
    assert_eq!(run.to_toml(), expected.to_toml());
    let faults = load("a.yaml", &targeted(), &[]).unwrap_err();
    for told in [
        "[data] train: the prompts are A+B= with A of 1 to 9 and B of 1 to 20, to be written to a file, one a line; make",
        "[data] seq_len: the file does not say how many tokens a prompt has; give them by --set data.seq_len=8",
        "[nontarget] data: the datasets \"stories\" and \"held_out\" are in a store of the reference; make token datasets by \
         `spd-launch tokenize`, and give them by --set nontarget.data=DIR",
        "give it by --set nontarget.seq_len=512",
    ] {
        assert!(faults.contains(told), "{told}: {faults}");
    }
}

#[test]
fn a_global_transformer_is_read_with_its_conditioning() {
    let (before, rest) = LANGUAGE
        .split_once("    type: chunkwise")
        .expect("it is there");
    let (_, rest) = rest.split_once("    d_model").expect("it is there");
    let theirs = format!(
        "{before}    type: global_transformer\n    input_tap: {{kind: residual_boundaries, offsets: [0, 1]}}\n    \
         component_conditioning: {{kind: affine_clipped_component_activation, output_scale_init: 0.5, calibration: {{min_n_tokens: 64}}}}\n    \
         d_model{rest}"
    );
    let (before, rest) = OUR_LANGUAGE
        .split_once("kind = \"chunkwise_transformer\"")
        .expect("it is there");
    let (_, rest) = rest.split_once("d_model").expect("it is there");
    let ours = format!(
        "{before}kind = \"global_transformer\"\ninput_tap = {{ kind = \"residual_boundaries\", offsets = [0, 1] }}\n\
         conditioning = {{ output_scale = 0.5, min_tokens = 64 }}\nd_model{rest}"
    );
    let run = load("a.yaml", &theirs, &SET).unwrap_or_else(|faults| panic!("{faults}"));
    let expected = load("a.toml", &ours, &SET).unwrap_or_else(|faults| panic!("{faults}"));
    assert_eq!(run.to_toml(), expected.to_toml());
}

#[test]
fn what_is_not_here_is_refused_in_one_line() {
    for story in stories(include_str!("successor.txt")) {
        let faults = load("a.yaml", &story.edited(TOY), &[]).unwrap_err();
        assert!(faults.contains(story.said[0]), "{story:?}: {faults}");
    }
    let other = LANGUAGE.replace(
        "ci_fn_optimizer: *moved",
        "ci_fn_optimizer: {lr_schedule: 1e-3}",
    );
    let faults = load("a.yaml", &other, &SET).unwrap_err();
    assert!(
        faults.contains(
            "[pd] ci_fn_optimizer: one optimizer moves components and importance functions here"
        ),
        "{faults}"
    );
    let faults = load("a.yaml", LANGUAGE, &[]).unwrap_err();
    for told in [
        "[target.spec] run_path: ",
        "--set data.train=DIR",
        "--set data.seq_len=512",
    ] {
        assert!(faults.contains(told), "{told}: {faults}");
    }
}
