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
            &[
                "--set loss.0: unknown key `probability` in [loss.0]; known keys: `kind`, `coeff`, `auxiliaries`",
            ],
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

#[test]
fn knots_are_refused_where_they_do_not_rise_or_are_none() {
    assert_said(&[
        toy_with(
            &[
                "loss.0.coeff=[{ at = 0, value = 1 }, { at = 0.5, value = 2 }, { at = 0.5, value = 3 }]",
            ],
            &[
                "--set loss.0.coeff: [loss.0.coeff.2] at: expected a number above that of the knot before, 0.5, found 0.5",
            ],
        ),
        toy_with(
            &["train.lr=[{ at = 0.5, value = 1 }, { at = 0, value = 2 }]"],
            &[
                "--set train.lr: [train.lr.1] at: expected a number above that of the knot before, 0.5, found 0",
            ],
        ),
        toy_with(
            &["train.lr=[{ at = 2, value = -1, interp = 'hold' }]"],
            &[
                "--set train.lr: [train.lr.0] at: expected a number in [0, 1], found 2",
                "--set train.lr: [train.lr.0] value: expected a number of at least 0, found -1",
                "--set train.lr: unknown key `interp` in [train.lr.0]; known keys: `at`, `value`, `shape`",
            ],
        ),
        toy_with(
            &["train.lr=[]"],
            &["--set train.lr: expected at least one table, found []"],
        ),
        toy_with(
            &["train.lr=[1, 2]"],
            &["--set train.lr: expected a list of tables [[train.lr]], found [1, 2]"],
        ),
        toy_with(
            &["loss.0.coeff={ start = 1 }"],
            &[
                "--set loss.0.coeff: expected a finite number, or knots such as [{ at = 0, value = 1 }, { at = 1, value = 0.1 }], found a table",
            ],
        ),
    ]);
}

#[test]
fn a_penalty_is_refused_by_what_it_lacks() {
    assert_said(&[
        toy_with(
            &["loss=[{ kind = 'smooth_l0', coeff = 1 }]"],
            &[
                "--set loss: missing key `gamma` in [loss.0]; expected a number from 1e-6 to 1e6, or knots such as [{ at = 0, value = 1 }, { at = 1, value = 0.1 }]",
            ],
        ),
        toy_with(
            &[
                "loss=[{ kind = 'smooth_l0', coeff = 1, gamma = [{ at = 0, value = 1 }, { at = 1, value = 0 }], normalize_at_one = 1 }]",
            ],
            &[
                "--set loss: [loss.0.gamma.1] value: expected a number from 1e-6 to 1e6, found 0",
                "--set loss: [loss.0] normalize_at_one: expected true or false, found 1",
            ],
        ),
        toy_with(
            &["loss=[{ kind = 'frequency', coeff = 1, reference_count = 0, halflife = 1e7 }]"],
            &[
                "--set loss: [loss.0] reference_count: expected a whole number of at least 1, found 0",
                "--set loss: [loss.0] halflife: expected a number of steps above 0 and at most 1e6, found 1e7",
            ],
        ),
        toy_with(
            &["loss=[{ kind = 'frequency', coeff = 1, reference_count = 32768 }]"],
            &[
                "--set loss: frequency is of the importances that another loss penalises; expected importance_minimality or smooth_l0 beside it, found neither",
            ],
        ),
        toy_with(
            &[
                "loss=[{ kind = 'smooth_l0', coeff = 1, gamma = 1 }, { kind = 'importance_minimality', coeff = 1, p = 1 }]",
            ],
            &[
                "--set loss: expected one penalty of importances, found smooth_l0 and importance_minimality",
            ],
        ),
        toy_with(
            &["loss=[{ kind = 'faithfulness', coeff = 1, relative = 'yes' }]"],
            &[r#"--set loss: [loss.0] relative: expected true or false, found the string "yes""#],
        ),
        toy_with(
            &[
                "loss=[{ kind = 'nonlinearity_locality', coeff = 1, relative_threshold = 0, unit_kind_coefficients = { neuron = -1 } }]",
            ],
            &[
                "--set loss: [loss.0] relative_threshold: expected a number from 1e-6 to 1e6, or knots such as [{ at = 0, value = 1 }, { at = 1, value = 0.1 }], found 0",
                "--set loss: [loss.0.unit_kind_coefficients] neuron: expected a number of at least 0, found -1",
            ],
        ),
        toy_with(
            &[
                "loss=[{ kind = 'nonlinearity_locality', coeff = 1, relative_threshold = 4, unit_kind_coefficients = {} }]",
            ],
            &[
                "--set loss: [loss.0.unit_kind_coefficients]: expected weights of kinds of units, found none",
            ],
        ),
    ]);
}
