//! Values that a key cannot have.

use super::{assert_said, tiny, toy};

#[test]
fn a_wrong_value_is_reported_with_the_expected_one() {
    assert_said(&[
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
                r#"run.toml:3:1: precision: expected "f32", "tf32" or "bf16", found the string "f16""#,
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
            &[
                "run.toml:17:1: [loss.0] coeff: expected a finite number, or knots such as [{ at = 0, value = 1 }, { at = 1, value = 0.1 }], found nan",
            ],
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
            &[("[train]", "[eval]\ncomponents = 24\n[train]")],
            &["run.toml:19:1: [eval] components: expected 0 for a tms target, found 24"],
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
    ]);
}
