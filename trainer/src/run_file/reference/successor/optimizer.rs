//! `components_optimizer` and `ci_fn_optimizer`: one of ours moves both, each at its own rate.

use spd_configs::{
    reader::Table,
    values::{Kind, Number, OneOf},
};

use super::super::found::Found;
use super::super::made::Made;
use super::schedule::{self, Knots};

/// The settings of one.
struct Moved {
    lr: Knots,
    /// The numbers of Muon, if it is that, which have to be the same for both.
    muon: Option<[f64; 4]>,
}

/// Makes the keys of `[train]` of both.
pub(super) fn read(pd: &mut Table<'_>, found: &mut Found, made: &mut Made) {
    let components = pd.table("components_optimizer", |of| {
        let moved = optimizer(of, found, (made, "lr"));
        made.carry(of, "grad_clip_norm", "clip_components");
        moved
    });
    let mut own = Made::default();
    let importance = pd.table("ci_fn_optimizer", |of| {
        let moved = optimizer(of, found, (&mut own, "lr_importance"));
        made.carry(of, "grad_clip_norm", "clip_importance");
        moved
    });
    let (Some(components), Some(importance)) = (components, importance) else {
        return;
    };
    if components.muon != importance.muon {
        pd.refuse::<()>(
            "ci_fn_optimizer",
            "one optimizer moves components and importance functions here; expected that of components_optimizer, but for \
             lr_schedule and grad_clip_norm",
        );
    }
    if components.lr != importance.lr {
        made.append(own.only("lr_importance"));
    }
}

fn optimizer(
    of: &mut Table<'_>,
    found: &mut Found,
    (made, lr): (&mut Made, &str),
) -> Option<Moved> {
    let is_muon = of.or("type", OneOf(&[("adamw", false), ("muon", true)]), false);
    let lr = schedule::read(of, "lr_schedule", (made, lr));
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
