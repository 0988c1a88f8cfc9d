//! Values that are fine alone and do not go together.

use super::{assert_said, llama, resid, tiny, tiny_with, toy, toy_with};

#[test]
fn a_second_stream_that_does_not_fit_is_refused() {
    assert_said(&[
        toy_with(
            &["nontarget={ zz = 0 }"],
            &[
                "--set nontarget: [nontarget]: expected a language model, found a tms target, whose rows are made by [data] alone",
            ],
        ),
        tiny_with(
            &["decomposition.delta=false", "nontarget={ zz = 0 }"],
            &[
                "--set nontarget: [nontarget]: expected delta = true in [decomposition], found false: what the components leave over takes part here as a whole",
            ],
        ),
        tiny_with(
            &[
                "nontarget={ data = 'x', batch_size = 8, loss = [{ kind = 'pgd_recon', coeff = 1, steps = 1, step_size = 1, scope = 'shared_across_batch' }] }",
            ],
            &[
                "--set nontarget: [nontarget.loss.0] kind: expected stochastic_recon, ci_masked_recon or unmasked_recon on the non-target stream, found \"pgd_recon\"",
                "--set nontarget: missing key `minimality_coeff` in [nontarget]; expected a finite number, or knots such as [{ at = 0, value = 1 }, { at = 1, value = 0.1 }]",
            ],
        ),
        tiny_with(
            &[
                "loss=[{ kind = 'unmasked_recon', coeff = 1 }]",
                "nontarget={ data = 'x', batch_size = 8, minimality_coeff = 1, loss = [{ kind = 'unmasked_recon', coeff = 1 }] }",
            ],
            &[
                "--set nontarget: [nontarget] minimality_coeff: expected importance_minimality or smooth_l0 in [[loss]] with it, found neither",
            ],
        ),
        tiny_with(
            &[
                "nontarget={ data = 'x', batch_size = 8, seq_len = 129, minimality_coeff = 1, loss = [{ kind = 'unmasked_recon', coeff = 1 }] }",
            ],
            &[
                "--set nontarget: [nontarget] seq_len: expected at most the target's 128 positions (n_ctx), found 129",
            ],
        ),
        tiny_with(
            &[
                "train.shards=2",
                "nontarget={ data = 'x', batch_size = 3, minimality_coeff = 1, loss = [{ kind = 'unmasked_recon', coeff = 1 }] }",
            ],
            &[
                "--set train.shards: expected a divisor of the rows of a batch, nontarget.batch_size = 3, found 2",
            ],
        ),
    ]);
}

#[test]
fn values_that_do_not_go_together_are_refused() {
    assert_said(&[
        toy(
            &[("lr = 1e-3", "lr = 1e-3\nmuon = {}")],
            &[
                "run.toml:22:1: [train] muon: it does not move the MLPs of \"mlp\"; importance functions that it moves: \"global_shared_transformer\", \"global_reverse_residual\", \"global_transformer\", \"chunkwise_transformer\"",
            ],
        ),
        tiny_with(
            &[
                "importance={ kind = 'chunkwise_transformer', blocks_per_chunk = 0, input_tap = 'all', d_model = 6, n_layer = 1, n_head = 3, n_kv_head = 2, ffn = 'relu' }",
            ],
            &[
                "--set importance: [importance] blocks_per_chunk: expected a whole number of at least 1, found 0",
                r#"--set importance: [importance] input_tap: expected "first_block_resid", "all_block_resids", "all_block_taps" or "all_resids", found the string "all""#,
                r#"--set importance: [importance] ffn: expected "gelu" or "swiglu", found the string "relu""#,
                "--set importance: [importance] n_kv_head: expected a divisor of n_head = 3, found 2",
            ],
        ),
        tiny_with(
            &[
                "importance={ kind = 'chunkwise_transformer', blocks_per_chunk = 1, chunks = [{ sites = [], taps = [1] }], d_model = 5, n_layer = 0, n_head = 1 }",
            ],
            &[
                r#"--set importance: [importance.chunks.0] sites: expected a list of patterns of sites, such as ["h.*.mlp.*"], found []"#,
                r#"--set importance: [importance.chunks.0] taps: expected a list of taps, such as ["resid_pre.0", "resid_mid.0"], found [1]"#,
                "--set importance: unknown key `n_head` in [importance]; known keys: `kind`, `chunks`, `blocks_per_chunk`, `input_tap`, `d_model`, `n_layer`, `conditioning`, `sigmoid`, `sampling`",
            ],
        ),
        tiny_with(
            &[
                "importance={ kind = 'chunkwise_transformer', blocks_per_chunk = 1, chunks = [{ sites = ['*'], taps = ['resid_pre.0'] }], d_model = 5, n_layer = 0 }",
            ],
            &[
                "--set importance: [importance] chunks: expected either `chunks` or `blocks_per_chunk`, found both",
            ],
        ),
        tiny_with(
            &["importance={ kind = 'chunkwise_transformer', d_model = 5, n_layer = 0 }"],
            &[
                "--set importance: [importance]: expected `blocks_per_chunk` or `chunks`, found neither",
            ],
        ),
        tiny_with(
            &[
                "importance={ kind = 'global_transformer', taps = ['resid_pre.0'], input_tap = 'all_resids', d_model = 4, n_layer = 1, n_head = 1 }",
            ],
            &[
                "--set importance: [importance] input_tap: expected it to be left out, as `taps` names them",
            ],
        ),
        tiny_with(
            &[
                "importance={ kind = 'global_transformer', input_tap = { kind = 'residual_boundaries', offsets = [] }, d_model = 6, n_layer = 0, conditioning = { input_scale = 0 } }",
            ],
            &[
                "--set importance: [importance.input_tap] offsets: expected at least one boundary, found []",
                "--set importance: [importance] n_layer: expected a whole number of at least 1, found 0",
                "--set importance: [importance.conditioning] input_scale: expected a number above 0, found 0",
                "--set importance: missing key `output_scale` in [importance.conditioning]; expected a finite number",
                "--set importance: missing key `n_head` in [importance]; expected a whole number of at least 1",
            ],
        ),
        tiny_with(
            &["importance.conditioning={ output_scale = 1 }"],
            &[
                "--set importance.conditioning: [importance.conditioning]: expected either `input_scale` or `min_tokens`, found neither",
            ],
        ),
        toy(
            &[
                (
                    "kind = \"mlp\"\nhidden = [16]",
                    "kind = \"global_shared_transformer\"\nd_model = 4\nn_layer = 1\nn_head = 1",
                ),
                (
                    "C = 20 }]",
                    "C = 20 }]\ntied = true\ntied_update = \"separate\"",
                ),
                ("lr = 1e-3", "lr = 1e-3\nmuon = {}"),
            ],
            &[
                "run.toml:26:1: [train] muon: it moves a tensor once a step, and tied_update = \"separate\" moves it twice",
            ],
        ),
        toy(
            &[("lr = 1e-3", "lr = 1e-3\nmuon = { iterations = 0 }")],
            &[
                "run.toml:22:10: [train.muon] iterations: expected a whole number of at least 1, found 0",
            ],
        ),
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
            &[("lr = 1e-3", "lr = 1e-3\nstreamed_kl = true")],
            &[
                r#"run.toml:22:1: [train] streamed_kl: expected false with output_loss = "mse", which compares outputs as they are, found true"#,
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
            &[(
                "[importance]",
                "tied = false\ntied_update = \"separate\"\n[importance]",
            )],
            &[
                r#"run.toml:13:1: [decomposition] tied_update: expected it to be left out, as no components are tied, found "separate""#,
            ],
        ),
        toy(
            &[("[importance]", "tied_update = \"twice\"\n[importance]")],
            &[
                r#"run.toml:12:1: [decomposition] tied_update: expected "summed" or "separate", found the string "twice""#,
            ],
        ),
        tiny(
            &[("[importance]", "tied_update = \"summed\"\n[importance]")],
            &[
                r#"run.toml:20:1: [decomposition] tied_update: expected it to be left out, as no components are tied, found "summed""#,
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
            &[
                "--set eval.known: [eval.known.0] identity: expected the target's 5 features, found 4",
            ],
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
            &[
                "run.toml:14:1: [decomposition] tied: expected false for a resid_mlp target, found true",
            ],
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
            &[
                "run.toml:21:1: [eval.known.0] dense: expected either `identity` or `dense`, found both",
            ],
        ),
        tiny_with(
            &["eval.known=[{ pattern = 'transformer.h.0.mlp.c_fc', dense = 2 }]"],
            &[
                "--set eval.known: expected a tms or resid_mlp target, whose features are known, found gpt2",
            ],
        ),
    ]);
}
