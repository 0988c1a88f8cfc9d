//! `persistent_pgd_recon` and `..._subset`: reconstruction under the worst ablation that an
//! adversary has found over all steps so far. It is that of [`adversary`](super::adversary): its
//! sources are not started again, so each step needs few updates to attack far more than a fresh
//! adversary would with as many.
//!
//! The loss is the mean over `n_samples` passes, which differ in their routes. The passes of
//! updates before it go through all sites, or are routed as the loss with `route_warmup`, as the
//! branch `dev` of the reference does.
//!
//! # Keys of `[[loss]]`
//!
//! - persistent_pgd_recon...: `n_samples` | 1 | `n_samples` | passes that the loss is the mean of,
//!   at most 16, each with routes of its own
//! - persistent_pgd_recon_subset: `route_warmup` | false | true | whether the passes of warm-up
//!   updates are routed too, of which there are 16 at most then

use serde::Serialize;
use serde_json::{Map, Value as Json, json};
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, OneOf, Size, Text};
use spd_configs::yaml;
use spd_engine::{Builder, Result, Value};

use super::adversary::{Adversary, Attack, Climb, Optimizer, Scope, SourceDtype};
use super::{Auxiliaries, LossInputs, LossTerm};
use crate::component_model::{Routing, Sites};
use crate::run_file::reference::{self, Made};
use crate::run_file::schedule::Schedule;

/// Masks between importance and 1 that an adversary chooses, which lives on from step to step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PersistentPgdRecon {
    /// Which sites go through components, and where.
    #[serde(flatten)]
    pub routing: Routing,
    /// The sources, and how they climb.
    #[serde(flatten)]
    pub adversary: Adversary,
    /// Passes that the loss is the mean of.
    pub n_samples: usize,
    /// Whether the passes of warm-up updates are routed too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub route_warmup: bool,
}

/// Each has numbers of its own for its draws, of which a step has 127.
const SAMPLES: usize = 16;

impl LossTerm for PersistentPgdRecon {
    fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self> {
        let routing = Routing::read(table, sites);
        let adversary = Adversary::read(table);
        let n_samples = table.or("n_samples", Size::between(1, SAMPLES), 1);
        let route_warmup = match sites {
            Sites::Subset => table.or("route_warmup", Flag, false),
            Sites::All | Sites::Layerwise => Some(false),
        };
        if let (Some(adversary), Some(true)) = (&adversary, route_warmup)
            && adversary.n_warmup_steps > SAMPLES
        {
            let found = adversary.n_warmup_steps;
            let message = format!("expected at most {SAMPLES} with route_warmup, found {found}");
            table.refuse::<()>("n_warmup_steps", message);
        }
        all_read! { Self: routing, adversary, n_samples, route_warmup }
    }

    fn from_reference(row: &mut Table<'_>, made: &mut Made) {
        scope_of_reference(row, made);
        row.table("optimizer", |of| {
            let place = of.place("type");
            let word = of.need("type", OneOf(&[("adam", "adam"), ("sign", "sign")]))?;
            made.text("optimizer", place, word);
            for key in ["beta1", "beta2", "eps"] {
                made.carry(of, key, key);
            }
            if of.has("step_size") {
                made.carry(of, "step_size", "lr");
            } else {
                reference::read_rate(of, made);
            }
            Some(())
        });
        made.carry(row, "use_sigmoid_parameterization", "sigmoid");
        made.carry(row, "n_warmup_steps", "n_warmup_steps");
        made.carry(row, "n_samples", "n_samples");
        made.carry(row, "start_frac", "start_frac");
        made.carry(row, "source_dtype", "source_dtype");
        let class = row.or("classname", Text::ANY, String::new());
        if class.is_some_and(|class| class.contains("Subset")) {
            let place = row.place("n_warmup_steps");
            made.put("route_warmup", place, yaml::Value::Flag(true));
        }
    }

    fn to_reference(&self, row: &mut Map<String, Json>) {
        let Adversary {
            scope,
            optimizer,
            lr,
            n_warmup_steps,
            start_frac,
            sigmoid,
            ..
        } = &self.adversary;
        let scope = match *scope {
            Scope::RepeatAcrossBatch { n_sources } => {
                json!({ "type": scope.word(), "n_sources": n_sources })
            }
            // The nearest that there is.
            Scope::PerBatchElement => json!({ "type": Scope::PerBatchPerPosition.word() }),
            scope => json!({ "type": scope.word() }),
        };
        row.insert("scope".into(), scope);
        let lr = reference::written_rate(lr);
        let optimizer = match *optimizer {
            Optimizer::Adam { beta1, beta2, eps } => {
                json!({ "type": "adam", "beta1": beta1, "beta2": beta2, "eps": eps, "lr_schedule": lr })
            }
            _ => json!({ "type": "sign", "lr_schedule": lr }),
        };
        row.insert("optimizer".into(), optimizer);
        row.insert("use_sigmoid_parameterization".into(), json!(sigmoid));
        row.insert("n_warmup_steps".into(), json!(n_warmup_steps));
        row.insert("n_samples".into(), json!(self.n_samples));
        row.insert("start_frac".into(), json!(start_frac));
    }

    fn left_out(&self) -> Option<&'static str> {
        let adversary = &self.adversary;
        if adversary.scope == Scope::PerBatchElement {
            return Some("scope");
        }
        if let Optimizer::Sgd | Optimizer::Momentum { .. } = adversary.optimizer {
            return Some("optimizer");
        }
        if adversary.source_dtype != SourceDtype::Float32 {
            return Some("source_dtype");
        }
        matches!(adversary.lr, Schedule::Knots(_)).then_some("lr")
    }

    fn auxiliaries(table: &mut Table<'_>) -> Option<Auxiliaries> {
        Auxiliaries::read(table, true)
    }

    fn routing(&self) -> Option<Routing> {
        Some(self.routing)
    }

    fn details(&self) -> Vec<String> {
        let mut details = self.adversary.details();
        if self.n_samples > 1 {
            details.push(format!("{} samples", self.n_samples));
        }
        details
    }

    fn adversary(&self) -> Option<&Adversary> {
        Some(&self.adversary)
    }

    fn samples(&self, _: usize) -> usize {
        let warmup = if self.route_warmup {
            self.adversary.n_warmup_steps
        } else {
            0
        };
        self.n_samples + warmup
    }

    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        Ok(self.attacked(b, from)?.0)
    }

    fn attacked(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<(Value, Option<Attack>)> {
        let (model, clean_pass) = (from.model, from.clean_pass);
        let climb = Climb::new(b, &self.adversary, from, None)?;
        let warmup = if self.route_warmup {
            self.routing
        } else {
            Routing::All
        };
        climb.up(
            b,
            |b, update| {
                let sample = from.sample(self.n_samples + update, &format!("w{update}"));
                model.routes(b, clean_pass, warmup, &sample)
            },
            |b, climb, sources| {
                let over_rows = climb.over_rows(b, sources)?;
                let passes = (0..self.n_samples).map(|k| {
                    let sample = from.sample(k, &format!("m{k}"));
                    let routes = model.routes(b, clean_pass, self.routing, &sample)?;
                    climb.pass(b, &over_rows, &routes)
                });
                passes.collect()
            },
        )
    }

    fn pass_count(&self, _: usize, _: usize) -> usize {
        self.adversary.n_warmup_steps + self.n_samples
    }
}

/// The scope of a row of the reference, by a table or by a word, with those of older files.
fn scope_of_reference(row: &mut Table<'_>, made: &mut Made) {
    const SCOPES: OneOf<'_, &str> = OneOf(&[
        ("single_source", "single_source"),
        ("broadcast_across_batch", "broadcast_across_batch"),
        ("repeat_across_batch", "repeat_across_batch"),
        ("per_batch_per_position", "per_batch_per_position"),
        ("single_mask", "single_source"),
        ("batch_invariant", "repeat_across_batch"),
        ("per_batch", "per_batch_per_position"),
        ("unique_per_batch_per_token", "per_batch_per_position"),
    ]);
    let place = row.place("scope");
    if !row.has_table("scope") {
        if let Some(word) = row.need("scope", SCOPES) {
            made.text("scope", place, word);
        }
        return;
    }
    row.table("scope", |of| {
        let word = of.need("type", SCOPES)?;
        made.text("scope", place, word);
        for key in ["n_sources", "n_masks"] {
            made.carry(of, key, "n_sources");
        }
        Some(())
    });
}
