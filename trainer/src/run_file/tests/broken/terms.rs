//! Losses and metrics that are said wrongly.

use super::{assert_said, toy, toy_with};

#[test]
fn a_term_is_refused_by_the_key_that_is_wrong() {
    assert_said(&[
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
            &["eval.subset=[{ sites = ['*'] }, { name = 'a', all_but = [] }, { name = 'a' }]"],
            &[
                "--set eval.subset: missing key `name` in [eval.subset.0]; expected a string of letters, digits, `.`, `_` and `-` that starts with a letter or a digit",
                r#"--set eval.subset: [eval.subset.1] all_but: expected a list of patterns of sites, such as ["h.*.mlp.*"], found []"#,
                r#"--set eval.subset: [eval.subset.2] name: found "a" twice"#,
                "--set eval.subset: [eval.subset.2]: expected `sites = [PATTERN, ..]` or `all_but = [PATTERN, ..]`, found neither",
            ],
        ),
        toy_with(
            &["eval.subset=[{ name = 'a', sites = ['*'], all_but = ['b'], masked = true }]"],
            &[
                "--set eval.subset: [eval.subset.0] all_but: expected either `sites` or `all_but`, found both",
                "--set eval.subset: [eval.subset.0] masked: expected false for a tms target, found true",
            ],
        ),
        toy_with(
            &["eval.loss=[{ kind = 'unmasked_recon', coeff = 1 }]"],
            &[
                "--set eval.loss: unknown key `coeff` in [eval.loss.0]; known keys: `kind`, `name`, `slow`",
            ],
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
    ]);
}
