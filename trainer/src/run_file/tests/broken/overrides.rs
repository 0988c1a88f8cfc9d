//! What `--set` says wrongly.

use super::{assert_said, toy_with};

#[test]
fn an_override_is_refused_as_a_key_of_the_file_would_be() {
    assert_said(&[
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
            &[
                r#"--set train.steps: expected a whole number of at least 1, found the string "many""#,
            ],
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
            &[
                "--set loss.7.coeff: `loss` has 1 row, numbered from 0 or named `stochastic_recon`; found no `7`",
            ],
        ),
        toy_with(
            &["loss.first.coeff=0.1"],
            &[
                "--set loss.first.coeff: `loss` has 1 row, numbered from 0 or named `stochastic_recon`; found no `first`",
            ],
        ),
        toy_with(
            &["loss.stochastic_recon.coef=0.1"],
            &[
                "--set loss.stochastic_recon.coef: unknown key `coef` in [loss.0]; did you mean `coeff`?",
            ],
        ),
        toy_with(
            &[
                "loss=[{ kind = 'faithfulness', coeff = 1 }, { kind = 'faithfulness', coeff = 2 }]",
                "loss.faithfulness.coeff=3",
            ],
            &[
                r#"--set loss: [loss.1] kind: found "faithfulness" twice; add up the coefficients"#,
                "--set loss.faithfulness.coeff: `loss` has 2 rows of the name `faithfulness`: 0, 1; give the number of one",
            ],
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
    ]);
}
