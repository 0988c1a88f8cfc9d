//! A resolved run is a run file: it loads to the same run, and two of them can be compared.

use crate::component_model::Routing;
use crate::losses::{ImportanceMinimality, PgdInit, PgdRecon, PgdScope, StochasticRecon, Term};
use crate::networks::{LlamaSimple, Model, Nonlinearity, ResidMlp, pre_identity};
use crate::run_file::{Active, ComponentStart, Data, EvalData, Ids, Run, TiedUpdate};

use crate::run_file::tests::{GPT2, LLAMA, RESID_MLP, TMS, decay, load};

#[test]
fn a_toy_is_filled_in_with_the_defaults_of_a_toy() {
    let run = load(TMS, &["target.zero_bias=true"]).unwrap();
    assert_eq!(run.to_toml(), include_str!("toy.resolved.toml"));
}

#[test]
fn a_language_model_is_filled_in_with_the_defaults_of_gpt2() {
    let run = load(GPT2, &[]).unwrap();
    assert_eq!(run.to_toml(), include_str!("tiny.resolved.toml"));
}

// Files of earlier builds leave out what was usual.
#[test]
fn a_resolved_run_of_before_is_the_same_run() {
    let run = load(GPT2, &[]).unwrap();
    let text = run.to_toml();
    let usual = [
        "activation = \"gelu_tanh\"\n",
        "norm_eps = 0.00001\n",
        "cross_documents = true\n",
        "reduction = \"exact\"\n",
    ];
    let older = usual.iter().fold(text.clone(), |older, line| {
        assert!(older.contains(line), "{line}{older}");
        older.replace(line, "")
    });
    let older = Run::from_resolved(&older).unwrap();
    assert_eq!(older.differences(&run), Vec::<String>::new());
    assert_eq!((older == run, older.to_toml()), (true, text));
}

#[test]
fn a_row_of_a_list_may_be_named() {
    let named = [
        "loss.stochastic_recon.coeff=3",
        "decomposition.sites.linear1.C=7",
    ];
    let named = load(TMS, &named).unwrap();
    let numbered = ["loss.0.coeff=3", "decomposition.sites.0.C=7"];
    assert_eq!(named, load(TMS, &numbered).unwrap());
}

#[test]
fn subsets_of_sites_are_masked_where_there_are_tokens() {
    let subset = "eval.subset=[{ name = 'rest', all_but = ['*.c_fc'] }]";
    let run = load(GPT2, &[subset]).unwrap();
    let of = &run.eval.metrics.subsets.rows[0];
    assert!(of.masked && of.has("h.0.mlp.c_proj") && !of.has("h.0.mlp.c_fc"));
    let run = load(TMS, &["eval.subset=[{ name = 'a', sites = ['linear1'] }]"]);
    let of = &run.as_ref().unwrap().eval.metrics.subsets.rows[0];
    assert!(!of.masked && of.has("linear1") && !of.has("linear2"));
}

#[test]
fn a_second_stream_is_written_and_takes_over_the_losses_of_sparsity() {
    let run = load(
        GPT2,
        &[
            "nontarget={ data = 'x', batch_size = 3, minimality_coeff = 0.5, decays = 'product', loss = [{ kind = 'ci_masked_recon_subset', coeff = 2 }] }",
        ],
    );
    let run = run.unwrap();
    let nontarget = run.nontarget.as_ref().unwrap();
    let losses = nontarget.all_losses(&run.losses);
    let said: Vec<String> = losses
        .iter()
        .map(|loss| format!("{} {}", loss.coeff, loss.term.name()))
        .collect();
    assert_eq!(
        said,
        ["0.5 importance_minimality", "2 ci_masked_recon_subset"]
    );
    assert_eq!(
        run.refuses_shards(2).unwrap(),
        "expected a divisor of the rows of a batch, nontarget.batch_size = 3, found 2"
    );
}

#[test]
fn the_mlp_of_a_llama_is_as_large_as_one_of_four_widths() {
    let llama = |n_kv_head, d_mlp| LlamaSimple {
        vocab: 256,
        n_ctx: 128,
        d_model: 64,
        n_layer: 2,
        n_head: 4,
        n_kv_head,
        d_mlp,
    };
    let gated = load(LLAMA, &[]).unwrap();
    assert_eq!(gated.target.model, Model::LlamaSimple(llama(2, 170)));
    let plain = LLAMA
        .replace("llama_simple", "llama_simple_mlp")
        .replace("n_kv_head = 2\n", "");
    let plain = load(&plain, &[]).unwrap();
    assert_eq!(plain.target.model, Model::LlamaSimpleMlp(llama(4, 256)));
}

#[test]
fn files_of_ids_and_their_held_out_part_are_read_and_written() {
    let given = [
        "data.train=owt.bin",
        "data.eval={ held_out = 0.05 }",
        "data.dtype=u16",
        "data.cross_documents=false",
        "data.document_end=255",
    ];
    let run = load(GPT2, &given).unwrap();
    let expected = Data::Tokens {
        train: "owt.bin".into(),
        eval: EvalData::HeldOut { held_out: 0.05 },
        seq_len: 128,
        dtype: Some(Ids::U16),
        cross_documents: false,
        document_end: Some(255),
        make: None,
    };
    assert_eq!(run.data, expected);
    for (given, fault) in [
        (
            &["data.eval=0.05"][..],
            "--set data.eval: expected a path, or { held_out = PART } for the end of the \
             training data, found 0.05",
        ),
        (
            &["data.eval={ held_out = 1 }"],
            "--set data.eval: [data.eval] held_out: expected a number above 0 and below 1, \
             found 1",
        ),
        (
            &["data.document_end=255"],
            "--set data.document_end: expected `cross_documents = false` with it: rows \
             go on over the ends of documents otherwise",
        ),
        (
            &["data.dtype=u8"],
            "--set data.dtype: expected \"u16\" or \"u32\", found the string \"u8\"",
        ),
    ] {
        assert_eq!(load(GPT2, given).unwrap_err(), fault);
    }
}

#[test]
fn the_references_gpt2_is_read_as_the_other() {
    let given = ["target.kind=gpt2_simple"];
    let run = load(GPT2, &given).unwrap();
    let Model::Gpt2Simple(sizes) = &run.target.model else {
        panic!("{:?}", run.target.model)
    };
    assert_eq!((sizes.d_mlp, sizes.n_head), (256, 4));
}

#[test]
fn a_toy_is_trained_with_the_defaults_of_adamw() {
    let text = TMS.replace(
        "weights = \"toy.safetensors\"",
        "train = { steps = 1, batch_size = 2, lr = 0 }",
    );
    let train = load(&text, &[]).unwrap().target.train.unwrap();
    assert_eq!(
        (
            train.beta2,
            train.weight_decay,
            train.decay_vectors,
            train.clip
        ),
        (0.999, 0.01, true, None)
    );
}

#[test]
fn a_residual_mlp_is_filled_in_with_the_defaults_of_one() {
    let run = load(RESID_MLP, &[]).unwrap();
    let expected = Model::ResidMlp(ResidMlp {
        n_features: 6,
        d_embed: 20,
        d_mlp: 3,
        n_layer: 2,
        activation: Nonlinearity::Relu,
        in_bias: false,
        out_bias: false,
    });
    assert_eq!(run.target.model, expected);
    let train = run.target.train.unwrap();
    assert_eq!(
        (train.beta2, train.weight_decay, train.clip),
        (0.999, 0.01, None)
    );
    let data = Data::SparseFeatures {
        active: Active::Exactly { exactly_active: 2 },
        low: -1.0,
        high: 1.0,
    };
    assert_eq!(run.data, data);
    assert!(!run.decomposition.tied);
    let [before] = &run.decomposition.identity[..] else {
        panic!("{:?}", run.decomposition)
    };
    assert_eq!(
        (before.pattern.as_str(), before.components),
        ("layers.*.mlp_in", 8)
    );
    assert_eq!(
        pre_identity("layers.0.mlp_in"),
        "layers.0.mlp_in.pre_identity"
    );
}

#[test]
fn features_are_on_by_chance_in_groups_or_exactly_so_many() {
    let active = |overrides: &[&str]| {
        let run = load(TMS, overrides).unwrap();
        match run.data {
            Data::SparseFeatures { active, .. } => active,
            other => panic!("{other:?}"),
        }
    };
    let by_chance = |synced_inputs: Vec<Vec<usize>>| Active::ByChance {
        probability: 0.05,
        synced_inputs,
    };
    assert_eq!(active(&[]), by_chance(Vec::new()));
    let groups = "data.synced_inputs=[[0, 1], [4, 2, 3]]";
    assert_eq!(
        active(&[groups]),
        by_chance(vec![vec![0, 1], vec![4, 2, 3]])
    );
    let exactly = "data={ kind = 'sparse_features', exactly_active = 5 }";
    assert_eq!(active(&[exactly]), Active::Exactly { exactly_active: 5 });
}

#[test]
fn a_known_solution_may_be_that_of_an_identity_matrix() {
    let known = "eval.known=[{ pattern = 'layers.0.mlp_in.pre_identity', dense = 6 }]";
    let run = load(RESID_MLP, &[known]).unwrap();
    assert_eq!(run.eval.metrics.known.rows.len(), 1);
}

#[test]
fn every_word_is_written_as_it_is_read() {
    for (given, words) in [
        ("precision=WORD", &["f32", "tf32", "bf16"][..]),
        ("importance.kind=WORD", &["mlp", "vector_mlp", "shared_mlp"]),
        (
            "importance.sigmoid=WORD",
            &[
                "leaky_hard",
                "normal",
                "hard",
                "upper_leaky_hard",
                "swish_hard",
            ],
        ),
        ("importance.sampling=WORD", &["continuous", "binomial"]),
        (
            "train.lr={ start = 1, shape = 'WORD' }",
            &["constant", "linear", "cosine"],
        ),
        ("train.output_loss=WORD", &["kl", "mse"]),
        (
            "loss=[{ kind = 'WORD', coeff = 1 }]",
            &[
                "faithfulness",
                "unmasked_recon",
                "ci_masked_recon",
                "ci_masked_recon_subset",
                "ci_masked_recon_layerwise",
                "stochastic_recon",
                "stochastic_recon_subset",
                "stochastic_recon_layerwise",
                "stochastic_hidden_acts_recon",
            ],
        ),
        (
            "loss=[{ kind = 'WORD', coeff = 1, steps = 1, step_size = 1, scope = 'shared_across_batch' }]",
            &["pgd_recon", "pgd_recon_subset", "pgd_recon_layerwise"],
        ),
        (
            "loss=[{ kind = 'pgd_recon', coeff = 1, steps = 1, step_size = 1, scope = 'WORD' }]",
            &["unique_per_datapoint", "shared_across_batch"],
        ),
        (
            "eval.loss=[{ kind = 'pgd_recon', steps = 1, step_size = 1, scope = 'shared_across_batch', init = 'WORD' }]",
            &["random", "ones", "zeroes"],
        ),
    ] {
        for word in words {
            let run = load(GPT2, &[&given.replace("WORD", word)]).unwrap();
            assert!(
                run.to_toml().contains(&format!(" = \"{word}\"\n")),
                "{given} {word}"
            );
        }
    }
}

#[test]
fn numbers_are_written_to_the_last_bit() {
    for written in [
        "0.1",
        "0.30000000000000004",
        "1e-7",
        "5e-324",
        "2.2250738585072014e-308",
        "1.7976931348623157e308",
        "123456789.12345679",
        "1e23",
        "-0.0",
        "-3",
        "9007199254740993", // not a double: rounds to the even neighbour
    ] {
        let run = load(TMS, &[&format!("loss.0.coeff={written}")]).unwrap();
        let expected: f64 = written.parse().unwrap();
        assert_eq!(
            run.losses[0].coeff.at(0, 1).to_bits(),
            expected.to_bits(),
            "{written}"
        );
        let again = Run::from_resolved(&run.to_toml()).unwrap();
        assert_eq!(
            again.losses[0].coeff.at(0, 1).to_bits(),
            expected.to_bits(),
            "{written}"
        );
    }
}

#[test]
fn strings_are_written_to_the_last_character() {
    let make = r#"data.make='tok "a\b" # é'"#;
    load(GPT2, &[make, "data.train=C:\\data\\x y"]).unwrap();
}

#[test]
fn optional_values_are_written_when_present() {
    let run = load(
        TMS,
        &[
            "train.clip_components=0.01",
            "train.faithfulness_warmup.steps=3",
            "eval.known=[{ pattern = 'linear*', identity = 5 }, { pattern = 'linear1', dense = 2 }]",
            "decomposition.tied=false",
            "loss.0={ kind = 'importance_minimality', coeff = 1, p = 2, p_final = 0.3, beta = 0.5 }",
            "eval.loss=[{ kind = 'pgd_recon', steps = 20, step_size = 0.1, scope = 'shared_across_batch' }, { kind = 'stochastic_recon_subset', name = 'half', probability = 0.5 }]",
        ],
    )
    .unwrap();
    assert_eq!(run.train.clip_components, Some(0.01));
    assert_eq!(run.eval.metrics.known.rows.len(), 2);
    assert!(!run.decomposition.tied);
    let pgd = PgdRecon {
        routing: Routing::All,
        init: PgdInit::Random,
        steps: 20,
        step_size: 0.1,
        scope: PgdScope::SharedAcrossBatch,
    };
    let half = Term::StochasticRecon(StochasticRecon {
        routing: Routing::Probability(0.5),
    });
    let measured = run.eval.metrics.terms.rows.iter();
    let measured: Vec<_> = measured.map(|m| (&*m.name, &m.term)).collect();
    assert_eq!(
        measured,
        [("pgd_recon", &Term::PgdRecon(pgd)), ("half", &half)]
    );
    let penalty = ImportanceMinimality {
        p: 2.0,
        p_final: Some(0.3),
        anneal_start: 0.0,
        anneal_end: 1.0,
        beta: 0.5,
    };
    assert_eq!(run.losses[0].term, Term::ImportanceMinimality(penalty));
}

#[test]
fn a_term_is_named_by_what_distinguishes_it() {
    let said = |loss: &str| {
        let loss = format!("loss=[{{ coeff = 1, {loss} }}]");
        load(TMS, &[&loss]).unwrap().losses[0].term.to_string()
    };
    assert_eq!(said("kind = 'stochastic_recon'"), "stochastic_recon");
    assert_eq!(
        said("kind = 'stochastic_recon_subset', probability = 0.5"),
        "stochastic_recon_subset (probability 0.5)"
    );
    assert_eq!(
        said("kind = 'pgd_recon', steps = 20, step_size = 0.1, scope = 'shared_across_batch'"),
        "pgd_recon (20 steps of 0.1, shared_across_batch)"
    );
    let pgd = "kind = 'pgd_recon_subset', steps = 1, step_size = 1, scope = 'unique_per_datapoint'";
    assert_eq!(
        said(&format!("{pgd}, init = 'ones', probability = 0.25")),
        "pgd_recon_subset (1 step of 1, unique_per_datapoint, from ones, probability 0.25)"
    );
}

#[test]
fn gpt2_can_be_trained_without_clipping() {
    let run = load(GPT2, &["target.train.clip=false"]).unwrap();
    assert_eq!(run.target.train.as_ref().unwrap().clip, None);
}

#[test]
fn separate_updates_of_tied_components_are_written() {
    let separate = ["decomposition.tied_update=separate"];
    let run = load(TMS, &separate).unwrap();
    assert_eq!(run.decomposition.tied_update, TiedUpdate::Separate);
    // A run of an older file goes on: its text is what it was.
    let summed = load(TMS, &["decomposition.tied_update=summed"]).unwrap();
    assert_eq!(summed, load(TMS, &[]).unwrap());
    assert!(!summed.to_toml().contains("tied_update"));
}

#[test]
fn starts_and_counts_along_units_are_written() {
    let loss = "loss=[{ kind = 'nonlinearity_locality', coeff = 3e-5, relative_threshold = [{ at = 0, value = 8 }, { at = 1, value = 2 }], \
                normalize_at_one = true, unit_kind_coefficients = { neuron = 1, attention_head = 0.5 } }]";
    let overrides = [
        "decomposition.start=nonlinearity_aligned",
        "eval.unit_counts=true",
        loss,
    ];
    let run = load(GPT2, &overrides).unwrap();
    assert_eq!(run.decomposition.start, ComponentStart::NonlinearityAligned);
    assert_eq!(
        run.losses[0].term.to_string(),
        "nonlinearity_locality (threshold 8 to 2, 1 at 1, attention_head 0.5, neuron 1)"
    );
}

#[test]
fn importance_functions_of_the_residual_stream_are_written() {
    let body = "d_model = 8, n_layer = 1, n_head = 2";
    for importance in [
        format!("kind = 'chunkwise_transformer', blocks_per_chunk = 2, {body}"),
        format!(
            "kind = 'chunkwise_transformer', blocks_per_chunk = 1, input_tap = 'all_block_taps', {body}, n_kv_head = 1, causal = true, \
             hidden = 5, ffn = 'swiglu', learned_norm_scale = true"
        ),
        format!(
            "kind = 'chunkwise_transformer', blocks_per_chunk = 1, input_tap = {{ kind = 'residual_boundaries', offsets = [0, 1] }}, {body}"
        ),
        "kind = 'chunkwise_transformer', chunks = [{ sites = ['*'], taps = ['resid_mid.0', 'resid_post.0'] }], d_model = 5, n_layer = 0"
            .to_owned(),
        format!("kind = 'global_transformer', {body}, conditioning = {{ input_scale = 0.3, output_scale = 1 }}"),
        format!("kind = 'global_transformer', {body}, conditioning = {{ min_tokens = 65536, output_scale = 1 }}"),
        format!("kind = 'global_transformer', taps = ['resid_pre.0'], {body}"),
    ] {
        load(GPT2, &[&format!("importance={{ {importance} }}")]).unwrap();
    }
}

#[test]
fn sites_of_unequal_c_are_not_tied_unless_asked() {
    let tied = |overrides: &[&str]| load(TMS, overrides).unwrap().decomposition.tied;
    assert!(tied(&[]));
    assert!(tied(&[
        "decomposition.sites=[{ pattern = 'linear?', C = 3 }]"
    ]));
    assert!(!tied(&["decomposition.sites.1.C=19"]));
    assert!(!tied(&[
        "decomposition.sites=[{ pattern = 'linear1', C = 3 }]"
    ]));
}

#[test]
fn the_last_override_of_a_key_holds() {
    let overrides = [
        "train.steps = 7",
        "name=other",
        "train.steps=8",
        "train.lr={ start = 0.5 }",
    ];
    let run = load(TMS, &overrides).unwrap();
    assert_eq!(
        (
            run.name.as_str(),
            run.train.steps,
            decay(&run.train.lr).start
        ),
        ("other", 8, 0.5)
    );
}

#[test]
fn every_difference_is_a_line_and_equal_runs_have_none() {
    let here = load(TMS, &[]).unwrap();
    assert_eq!(here.differences(&here.clone()), Vec::<String>::new());
    let there = load(
        TMS,
        &[
            "train.steps=500",
            "train.clip_components=0.01",
            "importance.hidden=[16, 8]",
            "decomposition.sites.1.pattern=linear*",
            "loss=[{ kind = 'stochastic_recon', coeff = 0.5 }, { kind = 'faithfulness', coeff = 1 }]",
        ],
    )
    .unwrap();
    assert_eq!(
        here.differences(&there),
        [
            "decomposition.sites.1.pattern: \"linear2\" here, \"linear*\" there",
            "eval.every: 11 here, 50 there",
            "importance.hidden.1: nothing here, 8 there",
            "loss.0.coeff: 1.0 here, 0.5 there",
            "loss.1.coeff: nothing here, 1.0 there",
            "loss.1.kind: nothing here, \"faithfulness\" there",
            "train.clip_components: false here, 0.01 there",
            "train.steps: 106 here, 500 there",
        ]
    );
}
