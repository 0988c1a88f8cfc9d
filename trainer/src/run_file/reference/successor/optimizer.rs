//! `components_optimizer` and `ci_fn_optimizer`: one of ours moves both.

use spd_configs::{
    reader::Table,
    values::{Kind, Number, OneOf},
};

use super::super::found::Found;
use super::super::made::Made;
use super::schedule::{self, Knots};

/// Settings that have to be the same for components and importance functions.
#[derive(PartialEq)]
struct Moved {
    lr: Knots,
    /// The numbers of Muon, if it is that.
    muon: Option<[f64; 4]>,
}

/// Makes the keys of `[train]` of both.
pub(super) fn read(pd: &mut Table<'_>, found: &mut Found, made: &mut Made) {
    let mut both: Vec<Moved> = Vec::new();
    for (key, clip) in [
        ("components_optimizer", "clip_components"),
        ("ci_fn_optimizer", "clip_importance"),
    ] {
        let moved = pd.table(key, |of| {
            let mut own = Made::default();
            let moved = optimizer(of, found, &mut own);
            made.carry(of, "grad_clip_norm", clip);
            if both.is_empty() {
                made.append(own);
            }
            moved
        });
        both.extend(moved);
    }
    if let [one, other] = &both[..]
        && one != other
    {
        pd.refuse::<()>(
            "ci_fn_optimizer",
            "components and importance functions move alike here; expected what components_optimizer says, but for grad_clip_norm",
        );
    }
}

fn optimizer(of: &mut Table<'_>, found: &mut Found, made: &mut Made) -> Option<Moved> {
    let is_muon = of.or("type", OneOf(&[("adamw", false), ("muon", true)]), false);
    let lr = schedule::read(of, "lr_schedule", (made, "lr"));
    let decay = of.or("weight_decay", Number::NOT_NEGATIVE, 0.0);
    let muon = match is_muon? {
        true => {
            let place = of.place("type");
            let mut own = Made::default();
            let beta = of.or("beta", Number::DECAY, 0.95);
            let rms = of.or("consistent_rms", Number::POSITIVE, 0.2);
            let iterations = of.or("ns_steps", Number::POSITIVE, 5.0);
            for (theirs, ours) in [
                ("beta", "beta"),
                ("consistent_rms", "rms"),
                ("weight_decay", "weight_decay"),
                ("ns_steps", "iterations"),
            ] {
                own.carry(of, theirs, ours);
            }
            // Products have the precision of the run.
            found.unused(of, &["ns_dtype"]);
            made.table("muon", place, own);
            Some([beta?, rms?, decay?, iterations?])
        }
        false => {
            adam(of, decay?);
            None
        }
    };
    Some(Moved { lr: lr?, muon })
}

/// Refuses numbers of AdamW that are not those of ours.
fn adam(of: &mut Table<'_>, decay: f64) {
    if decay != 0.0 {
        of.refuse::<()>(
            "weight_decay",
            format!(
                "components and importance functions do not decay here; expected 0, found {decay}"
            ),
        );
    }
    let betas = of.raw("betas").and_then(|(_, betas)| betas.as_array());
    let betas = betas.map(|betas| {
        let number =
            |beta: &toml::Spanned<toml::de::DeValue<'_>>| Number::DECAY.read(beta.get_ref());
        betas.iter().map(number).collect::<Result<Vec<f64>, _>>()
    });
    if betas.is_some_and(|betas| betas != Ok(vec![0.9, 0.999])) {
        of.refuse::<()>(
            "betas",
            "expected [0.9, 0.999], which are those of AdamW here",
        );
    }
}
