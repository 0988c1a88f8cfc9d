//! The components of a site: `V` `[d_in, c]` and `U` `[c, d_out]`, whose product approximates the
//! transposed weight.

use spd_engine::{Builder, Result, Store, Value};

use super::aligned;
use super::streams::stream;
use crate::fault::Fault;
use crate::networks::{Start, Target};
use crate::parameters::{self, Group, Parameters};
use crate::run_file::ComponentStart;
use crate::sites::Site;

/// `V` and `U` in a program.
#[derive(Debug, Clone, Copy)]
pub struct SiteValues {
    /// f32 `[d_in, c]`.
    pub v_ic: Value,
    /// f32 `[c, d_out]`.
    pub u_co: Value,
}

impl SiteValues {
    /// The same for what a block of a batch computes of them.
    pub(super) fn per_block(self, b: &mut Builder) -> Result<Self> {
        Ok(Self {
            v_ic: b.per_block(self.v_ic)?,
            u_co: b.per_block(self.u_co)?,
        })
    }
}

/// For each site the one whose components it shares, transposed: if `is_tied`, `linear2` of a TMS
/// has no components of its own. One update follows the sum of the gradients of both, or else each
/// has an update of its own ([`add_tied`]).
pub(super) fn tied(is_tied: bool, target: &dyn Target, sites: &[Site]) -> Vec<Option<usize>> {
    let pair = target.tied().filter(|_| is_tied);
    let at = |path: &str| sites.iter().position(|site| site.path() == path);
    let partner = |site: &Site| match pair {
        Some([first, second]) if site.path() == second => at(first),
        _ => None,
    };
    sites.iter().map(partner).collect()
}

pub(super) fn add(parameters: &mut Parameters, store: &mut Store, site: &Site) {
    let (c, layer) = (site.components, &site.layer);
    parameters.add(store, &site.v_name(), &[layer.d_in, c], Group::Components);
    parameters.add(store, &site.u_name(), &[c, layer.d_out], Group::Components);
}

/// The transposes of another site's components, with gradients and moments of their own, as the
/// reference has them.
pub(super) fn add_tied(parameters: &mut Parameters, store: &mut Store, site: &Site, other: &Site) {
    let (c, layer) = (other.components, &other.layer);
    let (v, u) = (other.v_name(), other.u_name());
    for (name, of, dims) in [
        (site.v_name(), u, [c, layer.d_out]),
        (site.u_name(), v, [layer.d_in, c]),
    ] {
        parameters.add_transposed(store, &name, &of, &dims, Group::Components);
    }
}

/// Refuses sites whose components cannot start so.
pub(super) fn check(start: ComponentStart, sites: &[Site]) -> Result<(), Fault> {
    let reason = match start {
        ComponentStart::Random => None,
        ComponentStart::NonlinearityAligned => sites.iter().find_map(aligned::refuses),
    };
    match reason {
        None => Ok(()),
        Some(reason) => Err(Fault::BadInput(format!("[decomposition] start: {reason}"))),
    }
}

/// Normal starting values with standard deviation one over the root of the rows (Kaiming, gain 1),
/// independent of the target, as in the reference.
pub(super) fn start(store: &mut Store, site: &Site, (seed, index): (u64, usize)) {
    for (part, name) in [site.v_name(), site.u_name()].iter().enumerate() {
        let slot = store.slot(name).expect("made by `add`");
        let std = 1.0 / (store.ty(slot).rows() as f64).sqrt();
        parameters::start(store, slot, stream(index, part), seed, Start::Normal(std));
    }
}

pub(super) fn values(b: &mut Builder, store: &Store, site: &Site) -> SiteValues {
    let mut value = |name: String| b.persistent(store, store.slot(&name).expect("made by `add`"));
    SiteValues {
        v_ic: value(site.v_name()),
        u_co: value(site.u_name()),
    }
}

#[cfg(test)]
mod tests {
    use crate::run_file::{Run, TiedUpdate};

    use spd_draws::{Purpose, Stream};

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::decomposition::Decomposition;

    // Both have seed 0 in most runs: with the same draws, one would be the other but for its scale.
    #[test]
    fn components_do_not_start_from_the_draws_of_the_target() {
        let mut run = preset("tiny-tms", &Overrides::default()).unwrap().run;
        run.decomposition.tied = false;
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run, &mut store).unwrap();
        let weight = store.slot("target_model.linear1.weight").unwrap();
        let target = Stream::new(Purpose::TargetInit, 0, 0);
        parameters::start(&mut store, weight, target, run.seed, Start::Normal(1.0));
        decomposition.initialise(&mut store);
        let ratio = |slot| store.get(slot)[1] / store.get(slot)[0];
        for slot in store.slots().filter(|&slot| slot != weight) {
            assert!(
                store.get(slot)[0] == 0.0 || (ratio(slot) - ratio(weight)).abs() > 1e-3,
                "{}",
                store.name(slot)
            );
        }
    }

    #[test]
    fn separate_updates_add_moments_and_no_values() {
        let mut run = preset("tiny-tms", &Overrides::default()).unwrap().run;
        let made = |run: &Run| {
            let mut store = Store::new();
            let decomposition = Decomposition::new(run, &mut store).unwrap();
            (store, decomposition.parameters.of(&[Group::Components]))
        };
        let names = |(store, parameters): &(Store, Parameters)| -> Vec<String> {
            let names = parameters.names(store, Group::Components);
            let names = names.filter_map(|name| name.strip_prefix("_components."));
            names.map(str::to_owned).collect()
        };
        let summed = made(&run);
        assert_eq!(names(&summed), ["linear1.V", "linear1.U"]);
        run.decomposition.tied_update = TiedUpdate::Separate;
        let separate = made(&run);
        let all = ["linear1.V", "linear1.U", "linear2.V", "linear2.U"];
        assert_eq!(names(&separate), all);
        // The memory plan and a checkpoint hold what the store has.
        let values = summed.1.len(&summed.0);
        assert_eq!(separate.1.len(&separate.0), values);
        assert_eq!(separate.0.bytes() - summed.0.bytes(), 2 * 4 * values);
        let shape = |name: &str| {
            let slot = separate.0.slot(&format!("adamw.first._components.{name}"));
            separate.0.ty(slot.unwrap()).dims.clone()
        };
        assert_eq!(shape("linear2.U"), shape("linear1.V"));
        // In the order of the sites, as the reference updates them.
        run.decomposition.sites.swap(0, 1);
        let turned = made(&run);
        assert_eq!(names(&turned), [&all[2..], &all[..2]].concat());
    }
}
