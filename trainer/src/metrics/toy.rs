//! Metrics of toys: importances and components against the known solution.

use spd_engine::Store;

use super::known_importance::{
    columns_in_use, dense_error, identity_error, matched_features, mmcs_ml2r,
};
use crate::arena::in_arena_of;
use crate::decomposition::Decomposition;
use crate::decomposition_task::DecompositionTask;
use crate::fault::Fault;
use crate::networks::{FeatureDirections, Input, Target};
use crate::run_file::{KnownSolution, pattern_matches};
use crate::sites::Site;

/// Magnitude of the single feature in each probing row.
const PROBE: f32 = 0.75;

/// Distances from 0 and 1 that still count as right, and what a value at each of them is called
/// after.
const TOLERANCES: [(f32, &str); 2] = [(0.1, ""), (0.2, "_0p2")];

/// One site against what is known of it.
pub(crate) struct KnownSite {
    /// Module path.
    pub(crate) path: String,
    /// Importances against the known solution, if the run file has one for the site.
    pub(crate) importance: Option<Against>,
    /// MMCS and ML2R of its components, where each feature has a column of its own in the weight.
    pub(crate) directions: Option<[f64; 2]>,
}

impl KnownSite {
    /// Whether there is any figure.
    pub(crate) fn says_something(&self) -> bool {
        self.importance.is_some() || self.directions.is_some()
    }
}

/// Importances against a known solution, on rows with one feature of 0.75 each.
pub(crate) struct Against {
    /// The solution.
    pub(crate) solution: KnownSolution,
    /// The reference's "target CI error" at each tolerance.
    pub(crate) errors: [usize; 2],
    /// Features with a component of their own, or columns in use, at each tolerance.
    pub(crate) matched: [usize; 2],
}

/// The known solution of each site of a toy; empty for other targets.
pub(crate) fn known_sites(
    task: &mut DecompositionTask,
    store: &mut Store,
) -> Result<Vec<KnownSite>, Fault> {
    let Input::Features(features) = task.decomposition.target.input() else {
        return Ok(Vec::new());
    };
    let answers = probe(task, store)?.unwrap_or_default();
    store.fetch()?;
    let decomposition = &task.decomposition;
    let sites = decomposition.sites.iter().zip(&answers);
    let known = sites.map(|(site, answer)| KnownSite {
        path: site.path().to_owned(),
        importance: against(decomposition, site, &answer.importance, features),
        directions: directions(&*decomposition.target, store, site, features),
    });
    Ok(known.collect())
}

/// The figures by name: `ci_error`, `ci_error/<site>` and `matched/<site>`, the same at tolerance
/// 0.2 as `ci_error_0p2` and so on; `matched` is the least of the sites that should have a
/// component a feature. `mmcs` and `ml2r` are means over the sites that have them, `mmcs/<site>`,
/// `ml2r/<site>`.
pub(crate) fn values(sites: &[KnownSite]) -> Vec<(String, f64)> {
    let mut values = Vec::new();
    let known: Vec<(&str, &Against)> = sites
        .iter()
        .filter_map(|site| Some((&*site.path, site.importance.as_ref()?)))
        .collect();
    for (at, (_, suffix)) in TOLERANCES.iter().enumerate() {
        let total: usize = known.iter().map(|(_, known)| known.errors[at]).sum();
        if !known.is_empty() {
            values.push((format!("ci_error{suffix}"), total as f64));
        }
        let of_features = known
            .iter()
            .filter(|(_, known)| matches!(known.solution, KnownSolution::Identity { .. }));
        if let Some(least) = of_features.map(|(_, known)| known.matched[at]).min() {
            values.push((format!("matched{suffix}"), least as f64));
        }
        for (path, known) in &known {
            values.push((format!("ci_error{suffix}/{path}"), known.errors[at] as f64));
            values.push((format!("matched{suffix}/{path}"), known.matched[at] as f64));
        }
    }
    let directions: Vec<(&str, [f64; 2])> = sites
        .iter()
        .filter_map(|site| Some((&*site.path, site.directions?)))
        .collect();
    for (at, name) in ["mmcs", "ml2r"].into_iter().enumerate() {
        let total: f64 = directions.iter().map(|(_, both)| both[at]).sum();
        if !directions.is_empty() {
            values.push((name.to_owned(), total / directions.len() as f64));
        }
        for (path, both) in &directions {
            values.push((format!("{name}/{path}"), both[at]));
        }
    }
    values
}

fn against(
    decomposition: &Decomposition,
    site: &Site,
    importance: &[f32],
    features: usize,
) -> Option<Against> {
    let mut known = decomposition.run.eval.known.iter();
    let known = known.find(|known| pattern_matches(&known.pattern, site.path()))?;
    let c = site.components;
    let [errors, matched] = match known.solution {
        KnownSolution::Identity { .. } => [identity_error, matched_features]
            .map(|count| TOLERANCES.map(|(within, _)| count(importance, features, c, within))),
        KnownSolution::Dense { k } => [dense_error, columns_in_use]
            .map(|count| TOLERANCES.map(|(within, _)| count(importance, features, c, k, within))),
    };
    Some(Against {
        solution: known.solution,
        errors,
        matched,
    })
}

/// MMCS and ML2R of a site whose input is the features, or the stream that they are embedded in:
/// the columns of `W`, or those of `W W_E^T`, which is what the layer makes of each feature, and
/// the contributions `V` or `W_E V` of the components to them.
fn directions(
    target: &dyn Target,
    store: &Store,
    site: &Site,
    features: usize,
) -> Option<[f64; 2]> {
    let get = |name: &str| Some(store.read(store.slot(name)?));
    let weight = get(&format!("target_model.{}.weight", site.path()))?;
    let (v, u) = (get(&site.v_name())?, get(&site.u_name())?);
    let (mmcs, ml2r) = match target.reads_features(site.path())? {
        FeatureDirections::Elements => mmcs_ml2r(&weight, &v, &u, features),
        FeatureDirections::RowsOf(embedding) => {
            let d = site.layer.d_in;
            let embedding_fd = get(&format!("target_model.{embedding}"))?;
            let weight_fm = product(&embedding_fd, &transposed(&weight, d), d);
            let v_fc = product(&embedding_fd, &v, d);
            mmcs_ml2r(
                &transposed(&weight_fm, site.layer.d_out),
                &v_fc,
                &u,
                features,
            )
        }
    };
    Some([mmcs, ml2r])
}

/// The product of two row-major matrices; `inner` is the length of a row of the first.
fn product(left: &[f32], right: &[f32], inner: usize) -> Vec<f32> {
    let columns = right.len() / inner;
    let row = |row: &[f32]| {
        let mut sums = vec![0.0; columns];
        for (&x, right) in row.iter().zip(right.chunks(columns)) {
            let x = f64::from(x);
            let terms = sums.iter_mut().zip(right);
            terms.for_each(|(sum, &y)| *sum += x * f64::from(y));
        }
        sums
    };
    #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
    left.chunks(inner)
        .flat_map(row)
        .map(|sum| sum as f32)
        .collect()
}

fn transposed(matrix: &[f32], columns: usize) -> Vec<f32> {
    let column = |at: usize| matrix.iter().skip(at).step_by(columns).copied();
    (0..columns).flat_map(column).collect()
}

/// Importances and logits of a site on rows of one feature each.
pub(crate) struct Answer {
    /// Importances for masks, f32 `[features, c]`.
    pub(crate) importance: Vec<f32>,
    /// Logits before the gate, f32 `[features, c]`.
    pub(crate) logits: Vec<f32>,
}

/// The answers of each site of a toy; `None` for other targets.
pub(crate) fn probe(
    task: &mut DecompositionTask,
    store: &mut Store,
) -> Result<Option<Vec<Answer>>, Fault> {
    let Input::Features(features) = task.decomposition.target.input() else {
        return Ok(None);
    };
    let sites = task.decomposition.sites.iter();
    let paths: Vec<String> = sites.map(|site| site.path().to_owned()).collect();
    let (owner, Some(program)) = task.for_probe() else {
        return Ok(None);
    };
    in_arena_of(owner, program, |program| {
        let input = program.input("input");
        input.fill(0.0);
        for (row, values) in input.chunks_mut(features).enumerate() {
            values[row] = PROBE;
        }
        program.run_and_fetch(store)?;
        let answer = |path: &String| {
            let output = |what: &str| program.output(&format!("{what} {path}"), store);
            Answer {
                importance: output("importance").to_vec(),
                logits: output("logits").to_vec(),
            }
        };
        Ok(Some(paths.iter().map(answer).collect()))
    })
}
