//! Components that start along the units of a nonlinearity: each acts through one unit, and their
//! sum is the matrix.
//!
//! At the end of a site where its nonlinearity is, each column is a unit here, of a head too. As
//! `[units, rest]`, with `rest` the columns at the other end, the weight is `A R`: row `c` of `R`
//! `[c, rest]` has weights of the unit of component `c`, which is the only 1 in column `c` of `A`
//! `[units, c]`. If the units are outputs, `V` is `R` transposed and `U` is `A` transposed; if they
//! are inputs, `V` is `A` and `U` is `R`.
//!
//! With as many components as units, `A` is the identity. With more, each unit gets as many, and a
//! random few get one more; the row of a unit is dealt out to its components, in parts whose sizes
//! differ by one at most. With fewer, random units get one each, with all of their row: the
//! matrices of other units are left for the faithfulness warm-up to fill in.

use spd_draws::Stream;
use spd_engine::{Slot, Store};

use super::streams::stream;
use crate::networks::{Alignment, LayerKind, Side};
use crate::sites::Site;

/// Why a site's components cannot start so, if so.
pub(super) fn refuses(site: &Site) -> Option<String> {
    let layer = &site.layer;
    if layer.aligned.is_none() {
        return Some(format!(
            "\"nonlinearity_aligned\" is of layers before or behind a nonlinearity, and `{}` is neither; with \"random\" any layer \
             may be a site",
            site.path()
        ));
    }
    let weights = layer.d_in.saturating_mul(layer.d_out);
    (weights < site.components).then(|| {
        format!(
            "\"nonlinearity_aligned\" gives each component a part of a row, and `{}` has {} components for {weights} weights",
            site.path(),
            site.components
        )
    })
}

/// Sets `V` and `U` of a site.
///
/// - `weight`: the frozen matrix
pub(super) fn start(store: &mut Store, site: &Site, weight: Slot, (seed, index): (u64, usize)) {
    let layer = &site.layer;
    let Alignment { side, .. } = layer.aligned.expect("checked by `refuses`");
    let weights = store.read(weight).into_owned();
    let at = |input: usize, output: usize| match layer.kind {
        LayerKind::OutIn => weights[output * layer.d_in + input],
        _ => weights[input * layer.d_out + output],
    };
    let c = site.components;
    let [mut v, mut u] = [layer.d_in * c, c * layer.d_out].map(|len| vec![0.0; len]);
    let (units, rest) = match side {
        Side::Output => (layer.d_out, layer.d_in),
        Side::Input => (layer.d_in, layer.d_out),
    };
    let draws = Draws { seed, index };
    for (component, part) in draws.parts(units, rest, c).iter().enumerate() {
        match side {
            Side::Output => {
                u[component * layer.d_out + part.unit] = 1.0;
                for &input in &part.coordinates {
                    v[input * c + component] = at(input, part.unit);
                }
            }
            Side::Input => {
                v[part.unit * c + component] = 1.0;
                for &output in &part.coordinates {
                    u[component * layer.d_out + output] = at(part.unit, output);
                }
            }
        }
    }
    for (name, values) in [(site.v_name(), v), (site.u_name(), u)] {
        let slot = store.slot(&name).expect("made by `add`");
        store.change(slot, |held| held.copy_from_slice(&values));
    }
}

/// The part of a matrix that a component starts as.
#[derive(Debug, PartialEq)]
struct Part {
    unit: usize,
    /// Its columns of the unit's row.
    coordinates: Vec<usize>,
}

/// The draws of a site's components.
struct Draws {
    seed: u64,
    index: usize,
}

impl Draws {
    /// The parts of all components.
    fn parts(&self, units: usize, rest: usize, components: usize) -> Vec<Part> {
        let order = permutation(stream(self.index, 0), (self.seed, 0), units);
        if components < units {
            let chosen = order[..components].iter();
            let whole = |&unit: &usize| Part {
                unit,
                coordinates: (0..rest).collect(),
            };
            return chosen.map(whole).collect();
        }
        let mut shards = vec![components / units; units];
        for &unit in &order[..components % units] {
            shards[unit] += 1;
        }
        let dealt = shards.into_iter().enumerate();
        dealt
            .flat_map(|(unit, shards)| self.dealt(unit, shards, rest))
            .collect()
    }

    /// The row of a unit, dealt out to so many components.
    fn dealt(&self, unit: usize, shards: usize, rest: usize) -> Vec<Part> {
        let row = u32::try_from(unit).expect("a layer has fewer than 2^32 columns");
        let order = permutation(stream(self.index, 1), (self.seed, row), rest);
        let mut parts: Vec<Part> = (0..shards)
            .map(|_| Part {
                unit,
                coordinates: Vec::new(),
            })
            .collect();
        for (place, coordinate) in order.into_iter().enumerate() {
            parts[place * shards / rest].coordinates.push(coordinate);
        }
        parts
    }
}

/// The numbers below `len` in the order of a row of draws.
fn permutation(stream: Stream, (seed, row): (u64, u32), len: usize) -> Vec<usize> {
    let mut keys = vec![0.0; len];
    stream.fill_uniform(seed, 0, row, &mut keys);
    let mut order: Vec<usize> = (0..len).collect();
    // Stable: equal draws stay in order.
    order.sort_by(|&a, &b| keys[a].total_cmp(&keys[b]));
    order
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::decomposition::Decomposition;
    use crate::run_file::{ComponentStart, Run};

    /// Its sites with so many components each, which start along units.
    fn run(workload: &str, components: usize) -> Run {
        let mut run = preset(workload, &Overrides::default()).unwrap().run;
        for site in &mut run.decomposition.sites {
            site.components = components;
        }
        run.decomposition.start = ComponentStart::NonlinearityAligned;
        run
    }

    /// A started decomposition whose weights are all different, and each site's weight `[in, out]`.
    fn started(run: &Run) -> (Store, Decomposition, Vec<Vec<f32>>) {
        let mut store = Store::new();
        let decomposition = Decomposition::new(run, &mut store).unwrap();
        let mut number = 0.0;
        let tensors = decomposition.target.tensors().into_iter();
        let weights: Vec<_> = tensors
            .map(|tensor| {
                let values = (0..tensor.dims.iter().product()).map(|_: usize| {
                    number += 1.0;
                    number
                });
                (tensor.name, tensor.dims, values.collect())
            })
            .collect();
        decomposition.set_target(&mut store, &weights);
        decomposition.initialise(&mut store);
        let of_site = |site: &Site| {
            let (layer, name) = (&site.layer, site.layer.weight_name());
            let (_, _, values) = weights.iter().find(|weight| weight.0 == name).unwrap();
            match layer.kind {
                LayerKind::OutIn => {
                    crate::component_model::transposed(values, layer.d_out, layer.d_in)
                }
                _ => values.clone(),
            }
        };
        let of_sites = decomposition.sites.iter().map(of_site).collect();
        (store, decomposition, of_sites)
    }

    /// Columns of `V` and rows of `U` of each component.
    fn components(store: &Store, model: &Decomposition, index: usize) -> Vec<[Vec<f32>; 2]> {
        let site = &model.sites[index];
        let (v, u) = model.component_values(store, index);
        let (c, d_out) = (site.components, site.layer.d_out);
        let of = |k: usize| {
            let column = v.iter().skip(k).step_by(c).copied().collect();
            [column, u[k * d_out..][..d_out].to_vec()]
        };
        (0..c).map(of).collect()
    }

    fn nonzero(values: &[f32]) -> usize {
        values.iter().filter(|value| **value != 0.0).count()
    }

    /// Sites of both sides and both layouts, of neurons and of heads: up to 48 units, and 100
    /// weights or more.
    const WORKLOADS: [&str; 3] = ["tiny-resid", "tiny-gpt2-h1", "tiny-ss-llama"];

    // Each weight is in one product, with a 1.
    #[test]
    fn components_add_up_to_the_matrix_where_there_are_enough() {
        for workload in WORKLOADS {
            let run = run(workload, 90);
            let (store, model, weights) = started(&run);
            for (index, site) in model.sites.iter().enumerate() {
                let units = match site.layer.aligned.unwrap().side {
                    Side::Output => site.layer.d_out,
                    Side::Input => site.layer.d_in,
                };
                assert!(units <= site.components, "{units} units");
                let mut sum = vec![0.0; weights[index].len()];
                for [v, u] in components(&store, &model, index) {
                    for (row, v) in sum.chunks_mut(u.len()).zip(&v) {
                        for (sum, u) in row.iter_mut().zip(&u) {
                            *sum += v * u;
                        }
                    }
                }
                assert!(sum == weights[index], "{workload} {}", site.path());
            }
        }
    }

    #[test]
    fn a_component_has_one_unit_and_parts_differ_by_one_at_most() {
        for workload in WORKLOADS {
            let (store, model, _) = started(&run(workload, 90));
            for (index, site) in model.sites.iter().enumerate() {
                let side = site.layer.aligned.unwrap().side;
                let mut sizes: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
                for [v, u] in components(&store, &model, index) {
                    let (unit, part) = match side {
                        Side::Output => (u, v),
                        Side::Input => (v, u),
                    };
                    assert_eq!(nonzero(&unit), 1, "{workload} {}", site.path());
                    let unit = unit.iter().position(|value| *value != 0.0).unwrap();
                    sizes.entry(unit).or_default().push(nonzero(&part));
                }
                let each = sizes.values().map(Vec::len);
                assert!(each.clone().max().unwrap() - each.min().unwrap() <= 1);
                for sizes in sizes.values() {
                    let [least, most] = [sizes.iter().min(), sizes.iter().max()];
                    assert!(most.unwrap() - least.unwrap() <= 1, "{sizes:?}");
                }
            }
        }
    }

    #[test]
    fn few_components_have_the_whole_rows_of_units_of_their_own() {
        let (store, model, weights) = started(&run("tiny-resid", 3));
        for (index, site) in model.sites.iter().enumerate() {
            let Side::Output = site.layer.aligned.unwrap().side else {
                continue;
            };
            let mut seen = Vec::new();
            for [v, u] in components(&store, &model, index) {
                let unit = u.iter().position(|value| *value != 0.0).unwrap();
                let column = weights[index].iter().skip(unit).step_by(u.len());
                assert!(column.eq(&v) && nonzero(&u) == 1 && !seen.contains(&unit));
                seen.push(unit);
            }
        }
    }

    #[test]
    fn as_many_components_as_units_are_the_units_in_order() {
        let draws = Draws { seed: 3, index: 1 };
        let parts = draws.parts(4, 3, 4);
        let units: Vec<usize> = parts.iter().map(|part| part.unit).collect();
        assert_eq!(units, [0, 1, 2, 3]);
        assert!(parts.iter().all(|part| part.coordinates.len() == 3));
        // Another seed deals other parts.
        let other = Draws { seed: 4, index: 1 };
        assert!(draws.parts(4, 30, 9) != other.parts(4, 30, 9));
    }

    #[test]
    fn sites_without_units_or_weights_enough_are_refused() {
        let refusal = |run: &Run| {
            let made = Decomposition::new(run, &mut Store::new());
            made.unwrap_err().to_string()
        };
        let mut tms = run("tiny-tms", 4);
        tms.decomposition.tied = false;
        assert_eq!(
            refusal(&tms),
            "[decomposition] start: \"nonlinearity_aligned\" is of layers before or behind a nonlinearity, and `linear1` is \
             neither; with \"random\" any layer may be a site"
        );
        let many = run("tiny-resid", 100_000);
        let line = refusal(&many);
        assert!(
            line.starts_with(
                "[decomposition] start: \"nonlinearity_aligned\" gives each component a part of a row, and `layers.0.mlp_in` has \
                 100000 components for "
            ),
            "{line}"
        );
    }
}
