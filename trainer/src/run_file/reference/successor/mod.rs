//! Run files of the reference's successor, `param-decomp`: its tables `pd`, `decomposition`,
//! `target`, `data`, `eval` and `cadence`, as tables of ours.
//!
//! All components start and move as there. Keys of how its program is spread over devices change
//! nothing here, and are told. Other keys that are not here are refused, all of them at once.

mod importance;
mod losses;
mod metrics;
mod optimizer;
mod schedule;
mod sites;
mod target;
mod targeted;

use std::path::Path;

use spd_configs::{
    reader::Table,
    values::{OneOf, Text},
    yaml::Value,
};

use super::found::Found;
use super::made::{Made, named_after};
use super::top::warmup;
use super::{OF_ANOTHER, refuse};

/// Whether a file is one of the successor.
pub(super) fn is_one(table: &mut Table<'_>) -> bool {
    table.has("pd")
}

/// Whether a run is of a toy, which says the sizes of its own network.
#[derive(Clone, Copy, PartialEq)]
enum Of {
    Features,
    Tokens,
}

/// Makes the tables of a run.
pub(super) fn read(table: &mut Table<'_>, path: &Path, found: &mut Found) -> Made {
    let mut run = Made::default();
    let name = table.maybe("run_name", Text::ANY).flatten();
    run.text("name", table.place("run_name"), &named_after(name, path));
    let mut of = Of::Tokens;
    let place = table.place("target");
    let mut streamed = None;
    table.table("target", |target| {
        if !target.has("spec") {
            of = Of::Features;
        }
        let place_of_edge = target.place("output_edge");
        let edge = target
            .maybe_table("output_edge", target::is_streamed)
            .flatten();
        streamed = edge.filter(|&is| is).map(|_| place_of_edge);
        run.table("target", place, target::read(target, of, found));
        Some(())
    });
    if of == Of::Tokens {
        run.text("precision", place, "bf16");
    }
    let is_targeted = table.has("prompts") || table.has("nontarget");
    let prompts = is_targeted
        .then(|| table.table("prompts", targeted::prompts))
        .flatten();
    let place = table.place("data");
    table.table("data", |data| {
        run.table(
            "data",
            place,
            target::data(data, of, found, prompts.as_deref()),
        );
        Some(())
    });
    let place = table.place("decomposition");
    table.table("decomposition", |said| {
        let mut importance = Made::default();
        said.table("ci", |ci| importance::read(ci, of, &mut importance));
        run.table("importance", said.place("ci"), importance);
        run.table("decomposition", place, sites::read(said));
        Some(())
    });
    let place = table.place("pd");
    let mut nontarget = Made::default();
    table.table("pd", |pd| {
        run.carry(pd, "seed", "seed");
        if !is_targeted && pd.has("ci_scaled_weight_decay") {
            pd.refuse::<()>(
                "ci_scaled_weight_decay",
                "expected `nontarget` with it, found none",
            );
        }
        let losses = losses::read(pd, "loss_metrics", of);
        run.rows("loss", pd.place("loss_metrics"), losses);
        let mut train = train(pd, found);
        if let Some(place) = streamed {
            train.put("streamed_kl", place, Value::Flag(true));
        }
        run.table("train", place, train);
        nontarget.carry(pd, "ci_scaled_weight_decay", "weight_decay");
        Some(())
    });
    if is_targeted {
        let place = table.place("nontarget");
        table.table("nontarget", |other| {
            run.table("nontarget", place, targeted::nontarget(other, nontarget));
            Some(())
        });
    }
    let place = table.place("eval");
    table.maybe_table("eval", |eval| {
        run.table("eval", place, metrics::read(eval, found));
        Some(())
    });
    let place = table.place("cadence");
    table.table("cadence", |cadence| {
        let mut log = Made::default();
        let usual = (place, Value::Number("20".to_owned()));
        log.carry_or(cadence, "train_log_every", "every", usual);
        run.table("log", place, log);
        found.unused(cadence, &["dense_log_phase"]);
        if let Some(checkpoint) = checkpoint(cadence) {
            run.table("checkpoint", cadence.place("checkpointing"), checkpoint);
        }
        Some(())
    });
    refuse(table, &[("resume_provenance", OF_ANOTHER)]);
    found.unused(table, &["runtime", "wandb"]);
    run
}

fn checkpoint(cadence: &mut Table<'_>) -> Option<Made> {
    let kinds = OneOf(&[("periodic", true), ("none", false)]);
    cadence.table("checkpointing", |of| {
        let mut made = Made::default();
        if !of.need_kind("kind", kinds)? {
            return of.refuse(
                "kind",
                "a run that saves nothing is not here; expected \"periodic\", found \"none\"",
            );
        }
        made.need(of, ("save_every", "a whole number"), "every");
        of.table("retention", |kept| {
            match kept.need_kind("kind", OneOf(&[("keep_last", true), ("keep_all", false)]))? {
                true => made.need(kept, ("n", "a whole number"), "keep"),
                false => kept.refuse::<()>(
                    "kind",
                    "a run that keeps all it saves is not here; expected \"keep_last\", found \"keep_all\"",
                )?,
            }
            Some(())
        });
        Some(made)
    })
}

fn train(pd: &mut Table<'_>, found: &mut Found) -> Made {
    let mut made = Made::default();
    pd.or("type", OneOf(&[("faithful", ()), ("targeted", ())]), ());
    made.need(pd, ("steps", "a whole number"), "steps");
    made.need(pd, ("batch_size", "a whole number"), "batch_size");
    optimizer::read(pd, found, &mut made);
    warmup(pd, &mut made);
    made
}
