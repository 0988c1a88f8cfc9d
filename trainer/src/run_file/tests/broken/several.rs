//! Files with more than one fault.

use super::{Case, assert_said, tiny, toy};
use crate::run_file::tests::TMS;

#[test]
fn all_faults_are_reported_at_once_in_file_order() {
    assert_said(&[
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
                r#"run.toml:16:1: [loss.0] kind: expected "faithfulness", "importance_minimality", "smooth_l0", "frequency", "nonlinearity_locality", "unmasked_recon", "ci_masked_recon", "ci_masked_recon_subset", "ci_masked_recon_layerwise", "stochastic_recon", "stochastic_recon_subset", "stochastic_recon_layerwise", "stochastic_hidden_acts_recon", "pgd_recon", "pgd_recon_subset", "pgd_recon_layerwise", "persistent_pgd_recon", "persistent_pgd_recon_subset" or "merged_recon", found the string "stochastic""#,
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
    ]);
}
