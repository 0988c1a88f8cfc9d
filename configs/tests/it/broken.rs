//! Broken run files, and the exact words each is refused with.

use crate::{GPT2, LLAMA, RESID_MLP, TMS, load};

/// What is done to a good file, and what is said of it.
struct Case {
    file: &'static str,
    /// Each text is replaced by the other.
    edits: &'static [(&'static str, &'static str)],
    overrides: &'static [&'static str],
    faults: &'static [&'static str],
}

const fn toy(
    edits: &'static [(&'static str, &'static str)],
    faults: &'static [&'static str],
) -> Case {
    Case {
        file: TMS,
        edits,
        overrides: &[],
        faults,
    }
}

const fn tiny(
    edits: &'static [(&'static str, &'static str)],
    faults: &'static [&'static str],
) -> Case {
    Case {
        file: GPT2,
        edits,
        overrides: &[],
        faults,
    }
}

const fn llama(
    edits: &'static [(&'static str, &'static str)],
    faults: &'static [&'static str],
) -> Case {
    Case {
        file: LLAMA,
        edits,
        overrides: &[],
        faults,
    }
}

const fn toy_with(overrides: &'static [&'static str], faults: &'static [&'static str]) -> Case {
    Case {
        file: TMS,
        edits: &[],
        overrides,
        faults,
    }
}

const fn tiny_with(overrides: &'static [&'static str], faults: &'static [&'static str]) -> Case {
    Case {
        file: GPT2,
        edits: &[],
        overrides,
        faults,
    }
}

const fn resid(
    edits: &'static [(&'static str, &'static str)],
    faults: &'static [&'static str],
) -> Case {
    Case {
        file: RESID_MLP,
        edits,
        overrides: &[],
        faults,
    }
}

const KEYS: &[Case] = &[
    toy(
        &[("lr = 1e-3", "lr_shedule = 1e-3")],
        &["run.toml:21:1: unknown key `lr_shedule` in [train]; did you mean `lr`?"],
    ),
    toy(
        &[("steps = 106", "steps = 106\nlr_shedule = 1")],
        &["run.toml:20:1: unknown key `lr_shedule` in [train]; did you mean `lr`?"],
    ),
    toy(
        &[("steps = 106", "")],
        &["run.toml:18:1: missing key `steps` in [train]; expected a whole number of at least 1"],
    ),
    toy(
        &[("[train]", "[train]\nmomentum = 0.9")],
        &[
            "run.toml:19:1: unknown key `momentum` in [train]; known keys: `steps`, `batch_size`, `mask_samples`, `output_loss`, `lr`, `clip_components`, `clip_importance`, `faithfulness_warmup`",
        ],
    ),
    toy(
        &[("[train]", "[trian]")],
        &["run.toml:18:2: unknown key `trian`; did you mean `train`?"],
    ),
    toy(
        &[("name = \"toy\"", "")],
        &[
            "run.toml:1:1: missing key `name`; expected a string of letters, digits, `.`, `_` and `-` that starts with a letter or a digit",
        ],
    ),
    toy(
        &[("[importance]\nkind = \"mlp\"\nhidden = [16]\n", "")],
        &["run.toml:1:1: missing table [importance]"],
    ),
    toy(
        &[("lr = 1e-3", "lr = { strat = 1e-3 }")],
        &["run.toml:21:8: unknown key `strat` in [train.lr]; did you mean `start`?"],
    ),
    toy(
        &[("lr = 1e-3", "lr = { shape = \"linear\" }")],
        &["run.toml:21:6: missing key `start` in [train.lr]; expected a number of at least 0"],
    ),
    toy(
        &[("C = 20 }, {", "c = 20 }, {")],
        &["run.toml:11:33: unknown key `c` in [decomposition.sites.0]; did you mean `C`?"],
    ),
    toy(
        &[("kind = \"tms\"\n", "")],
        &[
            r#"run.toml:2:1: missing key `kind` in [target]; expected "tms", "resid_mlp", "gpt2", "gpt2_simple", "llama_simple" or "llama_simple_mlp""#,
        ],
    ),
    toy(
        &[("kind = \"tms\"", "kind = \"lstm\"")],
        &[
            r#"run.toml:3:1: [target] kind: expected "tms", "resid_mlp", "gpt2", "gpt2_simple", "llama_simple" or "llama_simple_mlp", found the string "lstm""#,
        ],
    ),
    tiny(
        &[("p = 2", "p = 2\ngamma = 1")],
        &[
            "run.toml:27:1: unknown key `gamma` in [loss.0]; known keys: `kind`, `coeff`, `p`, `p_final`, `anneal_start`, `anneal_end`, `beta`",
        ],
    ),
    toy(
        &[("[train]", "[\"tr\\nain\"]\n[train]")],
        &["run.toml:18:2: unknown key `tr\\nain`; did you mean `train`?"],
    ),
];

const VALUES: &[Case] = &[
    toy(
        &[("steps = 106", "steps = \"many\"")],
        &[
            r#"run.toml:19:1: [train] steps: expected a whole number of at least 1, found the string "many""#,
        ],
    ),
    toy(
        &[("steps = 106", "steps = 0")],
        &["run.toml:19:1: [train] steps: expected a whole number of at least 1, found 0"],
    ),
    toy(
        &[("steps = 106", "steps = -3")],
        &["run.toml:19:1: [train] steps: expected a whole number of at least 1, found -3"],
    ),
    toy(
        &[("steps = 106", "steps = 1e4")],
        &["run.toml:19:1: [train] steps: expected a whole number of at least 1, found 1e4"],
    ),
    toy(
        &[("steps = 106", "steps = 4294967296")],
        &[
            "run.toml:19:1: [train] steps: expected a whole number of at most 4294967295, found 4294967296",
        ],
    ),
    toy(
        &[("batch_size = 8", "batch_size = 0")],
        &["run.toml:20:1: [train] batch_size: expected a whole number of at least 1, found 0"],
    ),
    toy(
        &[("name = \"toy\"", "name = \"../toy\"")],
        &[
            r#"run.toml:1:1: name: expected a string of letters, digits, `.`, `_` and `-` that starts with a letter or a digit, found the string "../toy""#,
        ],
    ),
    toy(
        &[("name = \"toy\"", "name = 5\nseed = -1\nprecision = \"f16\"")],
        &[
            "run.toml:1:1: name: expected a string of letters, digits, `.`, `_` and `-` that starts with a letter or a digit, found 5",
            "run.toml:2:1: seed: expected a whole number, found -1",
            r#"run.toml:3:1: precision: expected "f32" or "bf16", found the string "f16""#,
        ],
    ),
    toy(
        &[("C = 20 }]", "C = 0 }]")],
        &[
            "run.toml:11:66: [decomposition.sites.1] C: expected a whole number of at least 1, found 0",
        ],
    ),
    toy(
        &[("hidden = [16]", "hidden = []")],
        &[
            "run.toml:14:1: [importance] hidden: expected a list of widths of at least 1, such as [16], found []",
        ],
    ),
    toy(
        &[("hidden = [16]", "hidden = [16, 0]")],
        &[
            "run.toml:14:1: [importance] hidden: expected a list of widths of at least 1, such as [16], found [16, 0]",
        ],
    ),
    toy(
        &[("probability = 0.05", "probability = 0")],
        &["run.toml:9:1: [data] probability: expected a number in (0, 1], found 0"],
    ),
    toy(
        &[("coeff = 1.0", "coeff = nan")],
        &["run.toml:17:1: [loss.0] coeff: expected a finite number, found nan"],
    ),
    toy(
        &[("lr = 1e-3", "lr = \"fast\"")],
        &[
            r#"run.toml:21:1: [train] lr: expected a number of at least 0, or a table such as { start = 1e-3, shape = "cosine" }, found the string "fast""#,
        ],
    ),
    toy(
        &[(
            "lr = 1e-3",
            "lr = { start = 1e-3, warmup = 1.5, shape = \"cos\" }",
        )],
        &[
            "run.toml:21:22: [train.lr] warmup: expected a number in [0, 1], found 1.5",
            r#"run.toml:21:36: [train.lr] shape: expected "constant", "linear" or "cosine", found the string "cos""#,
        ],
    ),
    toy(
        &[(
            "lr = 1e-3",
            "lr = 1e-3\nclip_components = 0\nclip_importance = true",
        )],
        &[
            "run.toml:22:1: [train] clip_components: expected a number above 0, or false, found 0",
            "run.toml:23:1: [train] clip_importance: expected a number above 0, or false, found true",
        ],
    ),
    toy(
        &[(
            "sites = [{ pattern = \"linear1\", C = 20 }, ",
            "sites = [3, ",
        )],
        &[
            "run.toml:11:1: [decomposition] sites: expected a list of tables [[decomposition.sites]], found [3, a table]",
        ],
    ),
    toy(
        &[("[[loss]]", "[loss]")],
        &["run.toml:15:2: loss: expected a list of tables [[loss]], found a table"],
    ),
    toy(
        &[("[[loss]]\nkind = \"stochastic_recon\"\ncoeff = 1.0\n", "")],
        &["run.toml:1:1: missing key `loss`; expected a list of tables [[loss]]"],
    ),
    toy(
        &[(
            "[train]",
            "[checkpoint]\nevery = 0\nkeep = 0\n[log]\nevery = 0\n[train]",
        )],
        &[
            "run.toml:19:1: [checkpoint] every: expected a whole number of at least 1, found 0",
            "run.toml:20:1: [checkpoint] keep: expected a whole number of at least 1, found 0",
            "run.toml:22:1: [log] every: expected a whole number of at least 1, found 0",
        ],
    ),
    toy(
        &[(
            "[train]",
            "[eval]\nbatches = 0\nalive_threshold = 2\n[train]",
        )],
        &[
            "run.toml:19:1: [eval] batches: expected a whole number of at least 1, found 0",
            "run.toml:20:1: [eval] alive_threshold: expected a number in [0, 1], found 2",
        ],
    ),
    toy(
        &[(
            "weights = \"toy.safetensors\"",
            "weights = \"\"\nzero_bias = 1",
        )],
        &[
            r#"run.toml:6:1: [target] weights: expected a path, found the string """#,
            "run.toml:7:1: [target] zero_bias: expected true or false, found 1",
        ],
    ),
    tiny(
        &[("p = 2", "p = 0\nbeta = -1")],
        &[
            "run.toml:26:1: [loss.0] p: expected a number above 0, found 0",
            "run.toml:27:1: [loss.0] beta: expected a number of at least 0, found -1",
        ],
    ),
    tiny(
        &[(
            "batch_size = 16",
            "batch_size = 16\nbeta2 = 1.0\nweight_decay = 1979-05-27",
        )],
        &[
            "run.toml:12:1: [target.train] beta2: expected a number in [0, 1), found 1.0",
            "run.toml:13:1: [target.train] weight_decay: expected a number of at least 0, found a date",
        ],
    ),
];

const CROSS: &[Case] = &[
    llama(
        &[("n_head = 4", "n_head = 3")],
        &[
            "run.toml:8:1: [target] n_head: expected a divisor of d_model = 64, found 3",
            "run.toml:9:1: [target] n_kv_head: expected a divisor of n_head = 3, found 2",
        ],
    ),
    llama(
        &[("n_head = 4", "n_head = 64")],
        &[
            "run.toml:8:1: [target] n_head: expected heads of an even width, whose columns rotary positions turn in pairs, found d_model / n_head = 1",
        ],
    ),
    llama(
        &[("n_kv_head = 2", "n_kv_head = 3\nn_kv_heads = 1")],
        &[
            "run.toml:9:1: [target] n_kv_head: expected a divisor of n_head = 4, found 3",
            "run.toml:10:1: unknown key `n_kv_heads` in [target]; did you mean `n_kv_head`?",
        ],
    ),
    llama(
        &[
            ("seq_len = 128", "seq_len = 129"),
            ("C = 256 }]", "C = 256 }]\ntied = true"),
        ],
        &[
            "run.toml:15:1: [data] seq_len: expected at most the target's 128 positions (n_ctx), found 129",
            "run.toml:18:1: [decomposition] tied: expected false for a llama_simple target, found true",
        ],
    ),
    llama(
        &[(
            "kind = \"tokens\"\ntrain = \"data/train\"\neval = \"data/val\"\nseq_len = 128",
            "kind = \"sparse_features\"\nprobability = 1",
        )],
        &[
            r#"run.toml:12:1: [data] kind: expected "tokens" for a llama_simple target, found "sparse_features""#,
        ],
    ),
    tiny(
        &[("n_head = 4", "n_head = 3")],
        &["run.toml:8:1: [target] n_head: expected a divisor of d_model = 64, found 3"],
    ),
    tiny(
        &[("seq_len = 128", "seq_len = 256")],
        &[
            "run.toml:17:1: [data] seq_len: expected at most the target's 128 positions (n_ctx), found 256",
        ],
    ),
    tiny(
        &[(
            "[target.train]",
            "weights = \"x.safetensors\"\n[target.train]",
        )],
        &[
            "run.toml:9:1: [target] weights: expected either `weights` or [target.train], found both",
        ],
    ),
    toy(
        &[("weights = \"toy.safetensors\"\n", "")],
        &[
            r#"run.toml:2:1: [target]: expected `weights = "FILE.safetensors"` or a table [target.train], found neither"#,
        ],
    ),
    toy(
        &[(
            "kind = \"sparse_features\"\nprobability = 0.05",
            "kind = \"tokens\"\ntrain = \"a\"\neval = \"b\"\nseq_len = 4",
        )],
        &[
            r#"run.toml:8:1: [data] kind: expected "sparse_features" for a tms target, found "tokens""#,
        ],
    ),
    tiny_with(
        &["data={ kind = 'sparse_features', probability = 1 }"],
        &[
            r#"--set data: [data] kind: expected "tokens" for a gpt2 target, found "sparse_features""#,
        ],
    ),
    toy(
        &[(
            "probability = 0.05",
            "probability = 0.05\nlow = 1\nhigh = 0.5",
        )],
        &["run.toml:11:1: [data] high: expected low below high, found 1 and 0.5"],
    ),
    toy(
        &[
            (
                "weights = \"toy.safetensors\"",
                "train = { steps = 1, batch_size = 1, lr = 0 }",
            ),
            ("probability = 0.05", "probability = 0.05\nlow = -1"),
        ],
        &[
            "run.toml:10:1: [data] low: expected at least 0 for a tms target that learns to give |x|, found -1",
        ],
    ),
    toy(
        &[("probability = 0.05", "probability = 0.05\nlow = 1")],
        &["run.toml:10:1: [data] low: expected low below high, found 1 and 1"],
    ),
    toy(
        &[("lr = 1e-3", "lr = 1e-3\noutput_loss = \"kl\"")],
        &[
            r#"run.toml:22:1: [train] output_loss: expected "mse" for a tms target, whose outputs are no logits, found "kl""#,
        ],
    ),
    toy(
        &[("lr = 1e-3", "lr = { start = 1e-3, final_fraction = 0.1 }")],
        &[
            r#"run.toml:21:22: [train.lr] final_fraction: expected 1 for the shape "constant", found 0.1; is it "linear" or "cosine"?"#,
        ],
    ),
    toy(
        &[("pattern = \"linear2\"", "pattern = \"linear1\"")],
        &[
            r#"run.toml:11:45: [decomposition.sites.1] pattern: found "linear1" twice; a site has one C"#,
        ],
    ),
    toy(
        &[
            ("[importance]", "tied = true\n[importance]"),
            ("C = 20 }]", "C = 10 }]"),
        ],
        &[
            "run.toml:12:1: [decomposition] tied: expected linear1 and linear2 of equal C, found 20 and 10",
        ],
    ),
    toy(
        &[
            ("[importance]", "tied = true\n[importance]"),
            ("linear2", "linear3"),
        ],
        &[
            "run.toml:12:1: [decomposition] tied: expected linear1 and linear2 among the sites, found one or none",
        ],
    ),
    tiny(
        &[("[importance]", "tied = true\n[importance]")],
        &["run.toml:20:1: [decomposition] tied: expected false for a gpt2 target, found true"],
    ),
    toy(
        &[(
            "[train]",
            "[[loss]]\nkind = \"stochastic_recon\"\ncoeff = 2\n[train]",
        )],
        &[
            r#"run.toml:19:1: [loss.1] kind: found "stochastic_recon" twice; add up the coefficients"#,
        ],
    ),
    tiny(
        &[("[train]\n", "[train]\nmask_samples = 4\n")],
        &["run.toml:28:1: [train] mask_samples: expected 1 without a stochastic loss, found 4"],
    ),
    tiny(
        &[(
            "p = 2",
            "p = 2\np_final = 1\nanneal_start = 0.5\nanneal_end = 0.5",
        )],
        &[
            "run.toml:29:1: [loss.0] anneal_end: expected anneal_start below anneal_end, found 0.5 and 0.5",
        ],
    ),
    toy_with(
        &["eval.known=[{ pattern = 'linear1', identity = 4 }]"],
        &["--set eval.known: [eval.known.0] identity: expected the target's 5 features, found 4"],
    ),
    toy_with(
        &[
            "decomposition.sites.0.C=4",
            "eval.known=[{ pattern = 'linear1', identity = 5 }]",
        ],
        &[
            r#"--set eval.known: [eval.known.0] identity: expected at most C = 4 of "linear1", found 5"#,
        ],
    ),
    resid(
        &[(
            "[train]\n",
            "[eval]\nknown = [{ pattern = \"layers.*.mlp_in.pre_identity\", dense = 9 }]\n[train]\n",
        )],
        &[
            r#"run.toml:22:54: [eval.known.0] dense: expected at most C = 8 of "layers.*.mlp_in.pre_identity", found 9"#,
        ],
    ),
    resid(
        &[("identity = [{", "tied = true\nidentity = [{")],
        &["run.toml:14:1: [decomposition] tied: expected false for a resid_mlp target, found true"],
    ),
    resid(
        &[(
            "C = 8 }]",
            "C = 8 }, { pattern = \"layers.*.mlp_in\", C = 3 }]",
        )],
        &[
            r#"run.toml:14:55: [decomposition.identity.1] pattern: found "layers.*.mlp_in" twice; a site has one C"#,
        ],
    ),
    resid(
        &[(
            "n_layer = 2",
            "n_layer = 2\nactivation = \"tanh\"\nin_bias = 1",
        )],
        &[
            r#"run.toml:8:1: [target] activation: expected "relu" or "gelu", found the string "tanh""#,
            "run.toml:9:1: [target] in_bias: expected true or false, found 1",
        ],
    ),
    resid(
        &[("lr = 1e-3", "lr = 1e-3\noutput_loss = \"kl\"")],
        &[
            r#"run.toml:25:1: [train] output_loss: expected "mse" for a resid_mlp target, whose outputs are no logits, found "kl""#,
        ],
    ),
    resid(
        &[("exactly_active = 2", "exactly_active = 7")],
        &[
            "run.toml:11:1: [data] exactly_active: expected at most the target's 6 features, found 7",
        ],
    ),
    resid(
        &[(
            "exactly_active = 2",
            "exactly_active = 2\nprobability = 0.1",
        )],
        &[
            "run.toml:11:1: [data] exactly_active: expected either `probability` or `exactly_active`, found both",
        ],
    ),
    resid(
        &[("exactly_active = 2\n", "")],
        &[
            "run.toml:9:1: [data]: expected `probability = CHANCE` or `exactly_active = FEATURES`, found neither",
        ],
    ),
    resid(
        &[(
            "exactly_active = 2",
            "exactly_active = 2\nsynced_inputs = [[0, 1]]",
        )],
        &[
            "run.toml:12:1: [data] synced_inputs: expected `probability` with it, found `exactly_active`",
        ],
    ),
    toy_with(
        &["data.synced_inputs=[[0, 5], [1, 0]]"],
        &[
            "--set data.synced_inputs: expected features below the target's 5, numbered from 0, found 5",
            "--set data.synced_inputs: expected each feature in one group, found 0 twice",
        ],
    ),
    toy_with(
        &["data.synced_inputs=[[0, 1], []]"],
        &[
            "--set data.synced_inputs: expected a list of groups of features, such as [[0, 1], [2, 3]], found [[0, 1], []]",
        ],
    ),
    toy_with(
        &["data.synced_inputs=[0, 1]"],
        &[
            "--set data.synced_inputs: expected a list of groups of features, such as [[0, 1], [2, 3]], found [0, 1]",
        ],
    ),
    toy_with(
        &["eval.known=[{ pattern = 'linear*', dense = 21 }]"],
        &[
            r#"--set eval.known: [eval.known.0] dense: expected at most C = 20 of "linear1", found 21"#,
        ],
    ),
    toy_with(
        &["eval.known=[{ pattern = 'linear3', dense = 2 }]"],
        &[
            r#"--set eval.known: [eval.known.0] pattern: expected one of the sites "linear1", "linear2", found "linear3""#,
        ],
    ),
    toy(
        &[("[train]", "[[eval.known]]\npattern = \"linear1\"\n[train]")],
        &[
            "run.toml:18:1: [eval.known.0]: expected `identity = FEATURES` or `dense = COLUMNS`, found neither",
        ],
    ),
    toy(
        &[(
            "[train]",
            "[[eval.known]]\npattern = \"linear1\"\nidentity = 5\ndense = 2\n[train]",
        )],
        &["run.toml:21:1: [eval.known.0] dense: expected either `identity` or `dense`, found both"],
    ),
    tiny_with(
        &["eval.known=[{ pattern = 'transformer.h.0.mlp.c_fc', dense = 2 }]"],
        &[
            "--set eval.known: expected a tms or resid_mlp target, whose features are known, found gpt2",
        ],
    ),
];

const SEVERAL: &[Case] = &[
    toy(
        &[
            ("n_hidden = 2", "n_hidden = 0"),
            ("probability = 0.05", "probability = 2"),
            ("C = 20 }, {", "C = 0 }, { typo = 1,"),
            ("kind = \"stochastic_recon\"", "kind = \"stochastic\""),
            ("steps = 106", "stepz = 104"),
            ("lr = 1e-3", "lr = 1e-3\noutput_loss = \"kl\""),
        ],
        &[
            "run.toml:5:1: [target] n_hidden: expected a whole number of at least 1, found 0",
            "run.toml:9:1: [data] probability: expected a number in (0, 1], found 2",
            "run.toml:11:33: [decomposition.sites.0] C: expected a whole number of at least 1, found 0",
            "run.toml:11:44: unknown key `typo` in [decomposition.sites.1]; known keys: `pattern`, `C`",
            r#"run.toml:16:1: [loss.0] kind: expected "faithfulness", "importance_minimality", "unmasked_recon", "ci_masked_recon", "ci_masked_recon_subset", "ci_masked_recon_layerwise", "stochastic_recon", "stochastic_recon_subset", "stochastic_recon_layerwise", "stochastic_hidden_acts_recon", "pgd_recon", "pgd_recon_subset" or "pgd_recon_layerwise", found the string "stochastic""#,
            "run.toml:19:1: unknown key `stepz` in [train]; did you mean `steps`?",
            r#"run.toml:22:1: [train] output_loss: expected "mse" for a tms target, whose outputs are no logits, found "kl""#,
        ],
    ),
    tiny(
        &[
            ("\n[target.train]", "0\n[target.train]"),
            ("seq_len = 128", "seq_len = 129\nmade = 1"),
        ],
        &[
            "run.toml:8:1: [target] n_head: expected a divisor of d_model = 64, found 40",
            "run.toml:17:1: [data] seq_len: expected at most the target's 128 positions (n_ctx), found 129",
            "run.toml:18:1: unknown key `made` in [data]; did you mean `make`?",
        ],
    ),
    Case {
        file: TMS,
        edits: &[("lr = 1e-3", "lr = -1")],
        overrides: &["train.steps=0", "train.stepz=5", "seed=x"],
        faults: &[
            r#"run.toml:21:1: [train] lr: expected a number of at least 0, or a table such as { start = 1e-3, shape = "cosine" }, found -1"#,
            "--set train.steps: expected a whole number of at least 1, found 0",
            "--set train.stepz: unknown key `stepz` in [train]; did you mean `steps`?",
            r#"--set seed: expected a whole number, found the string "x""#,
        ],
    },
    toy(
        &[
            ("n_hidden = 2", "n_hidden = = 2"),
            ("steps = 106", "steps 104"),
        ],
        &[
            "run.toml:5:12: not TOML: extra `=`, expected nothing",
            "run.toml:5:14: not TOML: unexpected key or value, expected newline, `#`",
            "run.toml:19:7: not TOML: key with no value, expected `=`",
        ],
    ),
    toy(
        &[("steps = 106", "steps = 106\nsteps = 107")],
        &["run.toml:20:1: not TOML: duplicate key"],
    ),
    toy(
        &[("coeff = 1.0", "coeff = \"1.0")],
        &[r#"run.toml:17:13: not TOML: invalid basic string, expected `"`"#],
    ),
];

const OVERRIDES: &[Case] = &[
    toy_with(
        &["train.stepz=5"],
        &["--set train.stepz: unknown key `stepz` in [train]; did you mean `steps`?"],
    ),
    toy_with(
        &["trian.steps=5"],
        &["--set trian.steps: unknown key `trian`; did you mean `train`?"],
    ),
    toy_with(
        &["train.steps"],
        &["--set train.steps: expected KEY=VALUE, such as train.steps=100"],
    ),
    toy_with(
        &["train..steps=5"],
        &["--set train..steps: expected KEY=VALUE, such as train.steps=100"],
    ),
    toy_with(
        &["train.steps=many"],
        &[r#"--set train.steps: expected a whole number of at least 1, found the string "many""#],
    ),
    toy_with(
        &["name=a b"],
        &[
            r#"--set name: expected a string of letters, digits, `.`, `_` and `-` that starts with a letter or a digit, found the string "a b""#,
        ],
    ),
    toy_with(
        &["train.steps.x=5"],
        &["--set train.steps.x: `train.steps` is 106, which has no key `x`"],
    ),
    toy_with(
        &["loss.7.coeff=0.1"],
        &["--set loss.7.coeff: `loss` has 1 row, numbered from 0; found no `7`"],
    ),
    toy_with(
        &["loss.first.coeff=0.1"],
        &["--set loss.first.coeff: `loss` has 1 row, numbered from 0; found no `first`"],
    ),
    toy_with(
        &["loss.0.coef=0.1"],
        &["--set loss.0.coef: unknown key `coef` in [loss.0]; did you mean `coeff`?"],
    ),
    toy_with(
        &["target.train.steps=5"],
        &[
            "run.toml:6:1: [target] weights: expected either `weights` or [target.train], found both",
            "--set target.train.steps: missing key `batch_size` in [target.train]; expected a whole number of at least 1",
            r#"--set target.train.steps: missing key `lr` in [target.train]; expected a number of at least 0, or a table such as { start = 1e-3, shape = "cosine" }"#,
        ],
    ),
    toy_with(
        &["decomposition.sites=[{ pattern = 'linear1', D = 1 }]"],
        &[
            "--set decomposition.sites: unknown key `D` in [decomposition.sites.0]; known keys: `pattern`, `C`",
            "--set decomposition.sites: missing key `C` in [decomposition.sites.0]; expected a whole number of at least 1",
        ],
    ),
];

const TERMS: &[Case] = &[
    toy_with(
        &["loss.0={ kind = 'pgd_recon', coeff = 1 }"],
        &[
            "--set loss.0: missing key `steps` in [loss.0]; expected a whole number of at least 1",
            "--set loss.0: missing key `step_size` in [loss.0]; expected a number in (0, 1]",
            r#"--set loss.0: missing key `scope` in [loss.0]; expected "unique_per_datapoint" or "shared_across_batch""#,
        ],
    ),
    toy_with(
        &[
            "loss.0={ kind = 'pgd_recon', coeff = 1, steps = 0, step_size = 2, scope = 'all', init = 'zeros' }",
        ],
        &[
            r#"--set loss.0: [loss.0] init: expected "random", "ones" or "zeroes", found the string "zeros""#,
            "--set loss.0: [loss.0] steps: expected a whole number of at least 1, found 0",
            "--set loss.0: [loss.0] step_size: expected a number in (0, 1], found 2",
            r#"--set loss.0: [loss.0] scope: expected "unique_per_datapoint" or "shared_across_batch", found the string "all""#,
        ],
    ),
    toy_with(
        &[
            "loss.0={ kind = 'pgd_recon', coeff = 1, steps = 1001, step_size = 0, scope = 'shared_across_batch' }",
        ],
        &[
            "--set loss.0: [loss.0] steps: expected a whole number of at most 1000, found 1001",
            "--set loss.0: [loss.0] step_size: expected a number in (0, 1], found 0",
        ],
    ),
    toy_with(
        &["loss.0={ kind = 'stochastic_recon_subset', coeff = 1, probability = 0 }"],
        &["--set loss.0: [loss.0] probability: expected a number in (0, 1], found 0"],
    ),
    toy_with(
        &["loss.0={ kind = 'stochastic_recon', coeff = 1, probability = 0.5 }"],
        &["--set loss.0: unknown key `probability` in [loss.0]; known keys: `kind`, `coeff`"],
    ),
    toy_with(
        &["loss.0={ kind = 'stochastic_hidden_acts_recon', coeff = 1, layer = 0 }"],
        &["--set loss.0: unknown key `layer` in [loss.0]; known keys: `kind`, `coeff`"],
    ),
    toy_with(
        &["train.mask_samples=128"],
        &["--set train.mask_samples: expected at most 127 for 1 losses, found 128"],
    ),
    toy_with(
        &[
            "train.mask_samples=64",
            "loss=[{ kind = 'stochastic_recon', coeff = 1 }, { kind = 'faithfulness', coeff = 1 }]",
        ],
        &["--set train.mask_samples: expected at most 63 for 2 losses, found 64"],
    ),
    toy_with(
        &["eval.loss=[{ kind = 'faithfulness' }]"],
        &[
            r#"--set eval.loss: [eval.loss.0] kind: expected "unmasked_recon", "ci_masked_recon", "ci_masked_recon_subset", "ci_masked_recon_layerwise", "stochastic_recon", "stochastic_recon_subset", "stochastic_recon_layerwise", "stochastic_hidden_acts_recon", "pgd_recon", "pgd_recon_subset" or "pgd_recon_layerwise", found the string "faithfulness""#,
        ],
    ),
    toy_with(
        &["eval.loss=[{ kind = 'unmasked_recon', coeff = 1 }]"],
        &["--set eval.loss: unknown key `coeff` in [eval.loss.0]; known keys: `kind`, `name`"],
    ),
    toy_with(
        &["eval.loss=[{ kind = 'unmasked_recon', name = 'a b' }]"],
        &[
            r#"--set eval.loss: [eval.loss.0] name: expected a string of letters, digits, `.`, `_` and `-` that starts with a letter or a digit, found the string "a b""#,
        ],
    ),
    toy_with(
        &["eval.loss=[{ kind = 'unmasked_recon' }, { kind = 'unmasked_recon' }]"],
        &[
            r#"--set eval.loss: [eval.loss.1] kind: found "unmasked_recon" twice; tell them apart by `name`"#,
        ],
    ),
    toy_with(
        &[
            "eval.loss=[{ kind = 'unmasked_recon', name = 'a' }, { kind = 'ci_masked_recon', name = 'a' }]",
        ],
        &[r#"--set eval.loss: [eval.loss.1] name: found "a" twice; tell them apart by `name`"#],
    ),
    toy_with(
        &[
            "train.mask_samples=100",
            "eval.loss=[{ kind = 'unmasked_recon' }, { kind = 'ci_masked_recon' }]",
        ],
        &["--set eval.loss: expected at most 1 with mask_samples = 100, found 2"],
    ),
    toy(
        &[("[train]", "[[eval.loss]]\nname = \"a\"\n[train]")],
        &[
            r#"run.toml:18:1: missing key `kind` in [eval.loss.0]; expected "unmasked_recon", "ci_masked_recon", "ci_masked_recon_subset", "ci_masked_recon_layerwise", "stochastic_recon", "stochastic_recon_subset", "stochastic_recon_layerwise", "stochastic_hidden_acts_recon", "pgd_recon", "pgd_recon_subset" or "pgd_recon_layerwise""#,
        ],
    ),
];

fn said(case: &Case) -> Vec<String> {
    let mut text = case.file.to_owned();
    for (old, new) in case.edits {
        assert!(text.contains(old), "{old} is not in\n{text}");
        text = text.replacen(old, new, 1);
    }
    match load(text.as_bytes(), case.overrides) {
        Ok(run) => panic!("{:?} {:?} made {run:?}", case.edits, case.overrides),
        Err(faults) => faults.lines().map(str::to_owned).collect(),
    }
}

fn assert_said(cases: &[Case]) {
    for case in cases {
        assert_eq!(
            said(case),
            case.faults,
            "{:?} {:?}",
            case.edits,
            case.overrides
        );
    }
}

#[test]
fn a_wrong_key_is_named_with_the_key_it_was_meant_to_be() {
    assert_said(KEYS);
}

#[test]
fn a_wrong_value_is_named_with_what_was_expected() {
    assert_said(VALUES);
}

#[test]
fn values_that_do_not_go_together_are_refused() {
    assert_said(CROSS);
}

#[test]
fn a_term_is_refused_by_the_key_that_is_wrong() {
    assert_said(TERMS);
}

#[test]
fn all_faults_are_said_at_once_in_the_order_of_the_file() {
    assert_said(SEVERAL);
}

#[test]
fn an_override_is_refused_as_a_key_of_the_file_would_be() {
    assert_said(OVERRIDES);
}
