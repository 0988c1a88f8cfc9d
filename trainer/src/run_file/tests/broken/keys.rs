//! Keys that nobody knows, and keys that are missing.

use super::{assert_said, tiny, toy};

#[test]
fn a_wrong_key_is_named_with_the_key_it_was_meant_to_be() {
    assert_said(&[
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
            &[
                "run.toml:18:1: missing key `steps` in [train]; expected a whole number of at least 1",
            ],
        ),
        toy(
            &[("[train]", "[train]\nmomentum = 0.9")],
            &[
                "run.toml:19:1: unknown key `momentum` in [train]; known keys: `steps`, `batch_size`, `shards`, `reduction`, `mask_samples`, `output_loss`, `lr`, `lr_importance`, `clip_components`, `clip_importance`, `muon`, `recompute`, `streamed_kl`, `faithfulness_warmup`",
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
                r#"run.toml:2:1: missing key `kind` in [target]; expected "tms", "resid_mlp", "gpt2", "gpt2_simple", "gpt_neo", "gpt_neox", "llama", "llama_simple", "llama_simple_mlp", "spectral", "kaufmann", "nm_gpt_mini", "byte_spectral", "byte_enhanced", "byte_traditional" or "custom""#,
            ],
        ),
        toy(
            &[("kind = \"tms\"", "kind = \"lstm\"")],
            &[
                r#"run.toml:3:1: [target] kind: expected "tms", "resid_mlp", "gpt2", "gpt2_simple", "gpt_neo", "gpt_neox", "llama", "llama_simple", "llama_simple_mlp", "spectral", "kaufmann", "nm_gpt_mini", "byte_spectral", "byte_enhanced", "byte_traditional" or "custom", found the string "lstm""#,
            ],
        ),
        tiny(
            &[(
                "kind = \"gpt2\"",
                "kind = \"nm_gpt_mini\"\nd_coords = 4\nn_basis = 2\nwire_basis = false\nfsa_gain = 2.5",
            )],
            &[
                "run.toml:7:1: [target] fsa_gain: nothing is multiplied by it with wire_basis = false",
            ],
        ),
        tiny(
            &[(
                "kind = \"gpt2\"",
                "kind = \"gpt2\"\ndecompose_filters = true",
            )],
            &[
                "run.toml:4:1: unknown key `decompose_filters` in [target]; known keys: `kind`, `vocab`, `n_ctx`, `d_model`, `n_layer`, `n_head`, `d_mlp`, `activation`, `norm_eps`, `tied_head`, `weights`, `commit`, `dtype`, `allow_leak`, `train`",
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
    ]);
}
