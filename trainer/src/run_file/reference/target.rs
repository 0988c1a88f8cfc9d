//! The network and its data: `pretrained_model_...` and `task_config`.

use std::path::Path;

use super::found::Found;
use super::made::Made;
use crate::networks::KINDS;
use spd_configs::{
    faults::about,
    reader::Table,
    values::{Flag, OneOf, Text},
    yaml::Value,
};

/// How the reference trained the toys of its run files, as `[target]` says it.
const TOYS: &[(&str, &str)] = &[
    (
        "0hsp07o4",
        "{kind=\"tms\",n_features=5,n_hidden=2,zero_bias=true,train={steps=10000,batch_size=1024,lr=5e-3}}",
    ),
    (
        "gfgchmxj",
        "{kind=\"tms\",n_features=5,n_hidden=2,n_hidden_layers=1,zero_bias=true,train={steps=10000,batch_size=1024,lr=5e-3}}",
    ),
    (
        "urpntmfu",
        "{kind=\"tms\",n_features=40,n_hidden=10,zero_bias=true,train={steps=10000,batch_size=8192,lr=5e-3}}",
    ),
    (
        "eggs3wp8",
        "{kind=\"tms\",n_features=40,n_hidden=10,n_hidden_layers=1,zero_bias=true,train={steps=10000,batch_size=8192,lr=5e-3}}",
    ),
    (
        "pziyck78",
        "{kind=\"resid_mlp\",n_features=100,d_embed=1000,d_mlp=50,n_layer=1,train={steps=1000,batch_size=2048,lr={start=3e-3,shape=\"cosine\"}}}",
    ),
    (
        "any9ekl9",
        "{kind=\"resid_mlp\",n_features=100,d_embed=1000,d_mlp=25,n_layer=2,train={steps=1000,batch_size=2048,lr={start=3e-3,shape=\"cosine\"}}}",
    ),
    (
        "6hk3uciu",
        "{kind=\"resid_mlp\",n_features=102,d_embed=1000,d_mlp=17,n_layer=3,train={steps=10000,batch_size=2048,lr={start=3e-3,shape=\"cosine\"}}}",
    ),
];

/// Makes `[target]` and `[data]`.
pub(super) fn read(table: &mut Table<'_>, found: &mut Found) -> (Made, Made) {
    let mut target = Made::default();
    let class = table.need("pretrained_model_class", Text::ANY);
    let class = class.map(
        |class| match class.strip_prefix("simple_stories_train.models.") {
            Some(class) => format!("spd.pretrain.models.{class}"),
            None => class,
        },
    );
    let place = table.place("pretrained_model_class");
    let kind = class.as_deref().and_then(|class| kind(table, class));
    if let Some(kind) = kind.filter(|kind| !kind.is_empty()) {
        target.text("kind", place, kind);
    }
    let key = [
        "pretrained_model_path",
        "pretrained_model_name",
        "pretrained_model_name_hf",
    ]
    .into_iter()
    .find(|key| table.has(key))
    .unwrap_or("pretrained_model_name");
    let of = table.need(key, Text::ANY);
    for key in [
        "pretrained_model_path",
        "pretrained_model_name",
        "pretrained_model_name_hf",
        "pretrained_model_output_attr",
    ] {
        table.raw(key);
    }
    if let (Some(of), Some(kind)) = (of, kind) {
        put_weights(&mut target, (table, key), (&of, kind), found);
    }
    let tokenizer = table.maybe("tokenizer_name", Text::ANY).flatten();
    let mut data = Made::default();
    table.table("task_config", |task| {
        read_task(task, tokenizer.as_deref(), &mut data, found);
        Some(())
    });
    (target, data)
}

/// Our kind; empty for a network of Hugging Face, whose `config.json` says it.
fn kind(table: &mut Table<'_>, class: &str) -> Option<&'static str> {
    if class.starts_with("transformers.") {
        return Some("");
    }
    let known = KINDS
        .0
        .iter()
        .filter_map(|(word, kind)| Some((kind.of_reference()?.class, *word)));
    if let Some((_, word)) = known.clone().find(|(known, _)| *known == class) {
        return Some(word);
    }
    let known: Vec<&str> = known.map(|(known, _)| known).collect();
    let message = format!(
        "the network {class:?} is not here; those that are: {}, and those of `transformers` that configs/README.md names",
        known.join(", ")
    );
    table.refuse("pretrained_model_class", message)
}

/// Puts the weights that the name at a key means, or asks for others.
pub(super) fn put_weights(
    target: &mut Made,
    (table, key): (&Table<'_>, &str),
    (name, kind): (&str, &str),
    found: &mut Found,
) {
    let place = table.place(key);
    match weights(name, kind) {
        Ok(weights) => target.text("weights", place, &weights),
        Err(message) => {
            let message = about(&table.path, key) + &message;
            found.want(("target", &["weights", "train"]), (place, message));
        }
    }
}

/// The weights that a name of the reference means, or what to do about it.
fn weights(name: &str, kind: &str) -> Result<String, String> {
    if Path::new(name).try_exists().unwrap_or(true) {
        return Ok(name.to_owned());
    }
    let Some(run) = wandb_run(name, kind) else {
        return Ok(match kind {
            "" => format!("hf://{name}"),
            _ => name.to_owned(),
        });
    };
    let files = match kind {
        "tms" | "resid_mlp" => format!("`{kind}.pth` and `{kind}_train_config.yaml`"),
        _ => "`model_config.yaml` and the last `model_step_*.pt`".to_owned(),
    };
    let mut message = format!(
        "{name:?} is a run of W&B, where nothing is fetched from; put its files {files} into a directory, and give that by \
         --set target.weights=DIR"
    );
    if let Some((_, recipe)) = TOYS.iter().find(|(known, _)| *known == run) {
        message += &format!(", or train such a network here by --set 'target={recipe}'");
    }
    Err(message)
}

/// The run of W&B that a name means, in any of the forms that the reference takes.
fn wandb_run<'n>(name: &'n str, kind: &str) -> Option<&'n str> {
    let prefixed = ["wandb:", "https://wandb.ai/"]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix));
    let parts: Vec<&str> = prefixed.unwrap_or(name).split('/').collect();
    // `entity/project/run`, or `entity/project/runs/run` and what follows it in an address.
    let run = match parts[..] {
        [_, _, "runs", run, ..] | [_, _, run] => run,
        _ => return prefixed,
    };
    let run = run.split(['?', '#']).next().unwrap_or(run);
    let is_run = !run.is_empty() && run.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    (prefixed.is_some() || is_run && !kind.is_empty()).then_some(run)
}

const TASKS: OneOf<&str> = OneOf(&[
    ("tms", "tms"),
    ("resid_mlp", "resid_mlp"),
    ("lm", "lm"),
    ("ih", "ih"),
]);

const ACTIVE: OneOf<Option<u8>> = OneOf(&[
    ("at_least_zero_active", None),
    ("exactly_one_active", Some(1)),
    ("exactly_two_active", Some(2)),
    ("exactly_three_active", Some(3)),
    ("exactly_four_active", Some(4)),
    ("exactly_five_active", Some(5)),
]);

fn read_task(task: &mut Table<'_>, tokenizer: Option<&str>, data: &mut Made, found: &mut Found) {
    let Some(name) = task.need_kind("task_name", TASKS) else {
        return;
    };
    let place = task.place("task_name");
    match name {
        "lm" => {
            data.text("kind", place, "tokens");
            tokens(task, tokenizer, data, found);
        }
        "ih" => {
            task.pass_over();
            task.refuse::<()>(
                "task_name",
                "induction heads are not here; tasks that are: \"tms\", \"resid_mlp\", \"lm\"",
            );
        }
        _ => {
            data.text("kind", place, "sparse_features");
            features(task, data);
        }
    }
}

pub(super) fn features(task: &mut Table<'_>, data: &mut Made) {
    let active = task.or("data_generation_type", ACTIVE, None);
    if let Some(Some(count)) = active {
        let place = task.place("data_generation_type");
        data.put("exactly_active", place, Value::Number(count.to_string()));
        task.raw("feature_probability");
    } else {
        data.need(
            task,
            ("feature_probability", "a number in (0, 1]"),
            "probability",
        );
    }
}

fn tokens(task: &mut Table<'_>, tokenizer: Option<&str>, data: &mut Made, found: &mut Found) {
    let usual = (task.place("task_name"), Value::Number("512".to_owned()));
    data.carry_or(task, "max_seq_len", "seq_len", usual);
    if task.or("shuffle_each_epoch", Flag, true) == Some(false) {
        task.refuse::<()>(
            "shuffle_each_epoch",
            "expected true, found false; every epoch has an order of its own here",
        );
    }
    let word = |task: &mut Table<'_>, key, or: &str| {
        task.or(key, Text::ANY, or.to_owned()).unwrap_or_default()
    };
    let name = word(task, "dataset_name", "lennart-finke/SimpleStories");
    let column = word(task, "column_name", "story");
    let train = word(task, "train_data_split", "train");
    let eval = word(task, "eval_data_split", "test");
    let with = tokenizer.map_or(String::new(), |name| {
        format!(" with the tokenizer {name:?}")
    });
    let held_out = match train == eval {
        true => "'data.eval={held_out=0.01}'",
        false => "data.eval=DIR",
    };
    let splits = match train == eval {
        true => format!("a token dataset of its split {train:?}"),
        false => format!("token datasets of its splits {train:?} and {eval:?}"),
    };
    let message = format!(
        "{}the dataset {name:?} is on Hugging Face; make {splits}, column {column:?}, by `spd-launch tokenize`{with}, and give \
         it by --set data.train=DIR --set {held_out}",
        about("task_config", "dataset_name")
    );
    found.want(("data", &["train"]), (task.place("dataset_name"), message));
    // How the reference reads its datasets.
    found.unused(
        task,
        &["buffer_size", "is_tokenized", "streaming", "dataset_seed"],
    );
}
