//! Metrics of toys: importances against the known solution, and the directions of `V` and `U`
//! against those of the weight, two numbers of table 1 of the SPD paper.

use spd_engine::Store;

use super::known_importance::{Against, KnownSolution, TOLERANCES};
use crate::component_model::transposed;
use crate::decomposition_task::DecompositionTask;
use crate::fault::Fault;
use crate::networks::{FeatureDirections, Input, Target};
use crate::rounded::rounded;
use crate::sites::Site;

/// Magnitude of the single feature in each probing row.
pub(crate) const MAGNITUDE: f32 = 0.75;

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
    let solutions = &decomposition.run.eval.metrics.known;
    let sites = decomposition.sites.iter().zip(&answers);
    let known = sites.map(|(site, answer)| KnownSite {
        path: site.path().to_owned(),
        importance: solutions.against(site, &answer.importance, features),
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
            .filter(|(_, known)| matches!(known.solution, KnownSolution::Identity(_)));
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
    let [w_hf, v_fc] = match target.reads_features(site.path())? {
        FeatureDirections::Elements => [weight, v],
        FeatureDirections::RowsOf(embedding) => {
            let (d, d_out) = (site.layer.d_in, site.layer.d_out);
            let embedding_fd = get(&format!("target_model.{embedding}"))?;
            let w_fh = product(&embedding_fd, &transposed(&weight, d_out, d), d);
            let v_fc = product(&embedding_fd, &v, d);
            [transposed(&w_fh, features, d_out).into(), v_fc.into()]
        }
    };
    Some(mmcs_ml2r(&w_hf, &v_fc, &u, features).into())
}

/// Do the components of a matrix point where its columns do, and how long are they? Mean max cosine
/// similarity and mean L2 ratio, both 1 for a perfect decomposition of an embedding.
///
/// Component `c` contributes `v[j, c] u[c, :]` to column `j` of `w`. For each column the component
/// of largest cosine with it is taken: the means are of that cosine, and of the contribution's
/// length over the column's. A contribution or a column of length 0 counts as cosine 0, ratio 0.
///
/// - `w_hf`: `[hidden, features]`; `v_fc`: `[features, c]`; `u_ch`: `[c, hidden]`, all row-major
fn mmcs_ml2r(w_hf: &[f32], v_fc: &[f32], u_ch: &[f32], features: usize) -> (f64, f64) {
    let (hidden, c) = (w_hf.len() / features, v_fc.len() / features);
    assert_eq!(
        (w_hf.len(), v_fc.len(), u_ch.len()),
        (hidden * features, features * c, c * hidden),
        "w is [hidden, features], v [features, c], u [c, hidden]"
    );
    let length = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let u_ch: Vec<Vec<f64>> = u_ch
        .chunks(hidden)
        .map(|row| row.iter().map(|&x| x.into()).collect())
        .collect();
    let (mut cosines, mut ratios) = (0.0, 0.0);
    for (feature, v_c) in v_fc.chunks(c).enumerate() {
        let w_h: Vec<f64> = w_hf
            .iter()
            .skip(feature)
            .step_by(features)
            .map(|&x| x.into())
            .collect();
        let of_w = length(&w_h);
        let (mut best, mut ratio) = (f64::NEG_INFINITY, 0.0);
        for (&v, u_h) in v_c.iter().zip(&u_ch) {
            let v = f64::from(v);
            let dot: f64 = u_h.iter().zip(&w_h).map(|(u, w)| v * u * w).sum();
            let of_component = v.abs() * length(u_h);
            let both = of_component * of_w;
            let cosine = if both > 0.0 { dot / both } else { 0.0 };
            if cosine > best {
                best = cosine;
                ratio = if both > 0.0 { of_component / of_w } else { 0.0 };
            }
        }
        cosines += best;
        ratios += ratio;
    }
    (cosines / features as f64, ratios / features as f64)
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
    left.chunks(inner).flat_map(row).map(rounded).collect()
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
    let (Some(program), arena) = (&mut task.probe, &mut task.arena) else {
        return Ok(None);
    };
    let input = program.input("input");
    input.fill(0.0);
    for (row, values) in input.chunks_mut(features).enumerate() {
        values[row] = MAGNITUDE;
    }
    program.run_and_fetch(store, arena)?;
    let answers = task.decomposition.sites.iter().map(|site| {
        let output = |what: &str| {
            let name = format!("{what} {}", site.path());
            program.output(&name, store, arena).to_vec()
        };
        Answer {
            importance: output("importance"),
            logits: output("logits"),
        }
    });
    Ok(Some(answers.collect()))
}

#[cfg(test)]
mod tests {
    use super::mmcs_ml2r;

    // Column 0 is (3, 4), column 1 (0, 2). The first component is half of column 0, the second is
    // column 1 itself or, with the other sign, its opposite; then the first, which does not reach
    // column 1, has the larger cosine: 0.
    #[test]
    fn directions_and_lengths_are_those_of_the_best_component() {
        let w_hf = [3., 0., 4., 2.];
        let (v_fc, u_ch) = ([0.5, 0., 0., -1.], [3., 4., 0., -2.]);
        assert_eq!(mmcs_ml2r(&w_hf, &v_fc, &u_ch, 2), (1.0, 0.75));
        let (v_fc, u_ch) = ([0.5, 0., 0., 1.], [3., 4., 0., -2.]);
        assert_eq!(mmcs_ml2r(&w_hf, &v_fc, &u_ch, 2), (0.5, 0.25));
    }
}
