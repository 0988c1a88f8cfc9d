//! What is known of a toy: how its importances and components should look.

use std::sync::Arc;

use spd_configs::{KnownSolution, Model, pattern_matches};
use spd_engine::{Builder, Executor, Store};

use super::known_importance::{dense_error, identity_error, mmcs_ml2r};
use crate::decomposition::{BatchShape, Decomposition, Draws};
use crate::decomposition_task::DecompositionTask;
use crate::fault::Fault;

/// Magnitude of the single feature in each probing row.
const PROBE: f32 = 0.75;
/// Distance from 0 and 1 that still counts as right.
const TOLERANCE: f32 = 0.1;

/// Known-solution errors, MMCS and ML2R of a toy; nothing for other targets.
///
/// `ci_error` is the reference's target-solution error at tolerance 0.1: importances above it where there should be none,
/// and missing where there should be one, on rows with one feature of 0.75 each.
pub(crate) fn toy_values(
    task: &DecompositionTask,
    store: &mut Store,
) -> Result<Vec<(String, f64)>, Fault> {
    let decomposition = &task.decomposition;
    let Model::Tms { n_features, .. } = decomposition.run.target.model else {
        return Ok(Vec::new());
    };
    let mut values = Vec::new();
    let importances = probe(decomposition, store, n_features, task)?;
    let mut total = 0;
    for (site, importance) in decomposition.sites.iter().zip(&importances) {
        let known = decomposition.run.eval.known.iter();
        let Some(known) = known
            .clone()
            .find(|known| pattern_matches(&known.pattern, site.path()))
        else {
            continue;
        };
        let error = match known.solution {
            KnownSolution::Identity { .. } => {
                identity_error(importance, n_features, site.components, TOLERANCE)
            }
            KnownSolution::Dense { k } => {
                dense_error(importance, n_features, site.components, k, TOLERANCE)
            }
        };
        total += error;
        values.push((format!("ci_error/{}", site.path()), error as f64));
    }
    if !values.is_empty() {
        values.insert(0, ("ci_error".into(), total as f64));
    }
    if let Some(site) = decomposition
        .sites
        .iter()
        .find(|site| site.path() == "linear1")
    {
        let get = |name: &str| store.slot(name).map(|slot| store.get(slot));
        let parts = (
            get("target_model.linear1.weight"),
            get(&site.v_name()),
            get(&site.u_name()),
        );
        if let (Some(w), Some(v), Some(u)) = parts {
            let (mmcs, ml2r) = mmcs_ml2r(w, v, u, n_features);
            values.extend([("mmcs".to_owned(), mmcs), ("ml2r".to_owned(), ml2r)]);
        }
    }
    Ok(values)
}

/// Importances of each site, f32 `[features, c]`, on rows with one feature each.
fn probe(
    decomposition: &Decomposition,
    store: &mut Store,
    features: usize,
    task: &DecompositionTask,
) -> Result<Vec<Vec<f32>>, Fault> {
    let mut b = Builder::new();
    let shape = BatchShape {
        rows: features,
        positions: 1,
    };
    let front = decomposition.front(&mut b, store, shape, &Draws::Counters)?;
    for (site, values) in decomposition.sites.iter().zip(&front.sites) {
        b.output(site.path(), values.importance);
    }
    let mut executor = Executor::new(&b, Arc::clone(task.pool()));
    let input = executor.input("input");
    input.fill(0.0);
    for (row, values) in input.chunks_mut(features).enumerate() {
        values[row] = PROBE;
    }
    executor.run(store);
    Ok(decomposition
        .sites
        .iter()
        .map(|site| executor.output(site.path(), store).to_vec())
        .collect())
}
