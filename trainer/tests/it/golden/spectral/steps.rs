//! One step of the decomposition of a spectral network.
//!
//! A step is recorded in fewer tensors than those of the reference, and its metadata says the same
//! in other words; both are brought into the other form, and [`one_step`] compares them. Rows of
//! the layers that every head meets are in the order (row, head, position) there, and (row,
//! position, head) here. Routes are recorded for each position, and hold for all heads.

use serde_json::{Value as Json, json};

use super::target;
use super::toys::beside;
use crate::golden::numbers::{Numbers, Tensor};
use crate::golden::one_step;
use crate::golden::run_file::{list, size, text};
use crate::harness::Outcome;

pub(super) const CASES: [&str; 4] = ["sd", "kaufmann", "nmgpt", "byte"];

/// Losses, gradients, and updated parameters, which are of order 1. In f32, PyTorch is off by up to
/// 6e-7, 4e-6 and 2e-7.
const TOLERANCE: f64 = 1e-5;

pub(super) fn check(name: &str) -> Outcome {
    let mut case = Numbers::open(&format!("spectral/{name}.spd"))?;
    lay_out(&mut case);
    say(&mut case.info);
    let mut comparison = one_step::compare(&case, &format!("{name}.spd"), TOLERANCE);
    one_step::update(&case, &mut comparison);
    Ok(comparison.finish())
}

/// Brings the tensors into the form of a step of the reference.
fn lay_out(case: &mut Numbers) {
    for site in list(&case.info, "sites") {
        let path = text(site, "path");
        let of_site = format!(".{path}");
        let shape = list(site, "row_shape").iter().map(|size| {
            let size = size.as_u64().and_then(|size| usize::try_from(size).ok());
            size.expect("a size")
        });
        if let Ok(shape) = <[usize; 3]>::try_from(shape.collect::<Vec<_>>()) {
            for (name, tensor) in &mut case.tensors {
                if name.ends_with(&of_site) && tensor.dims.starts_with(&shape) {
                    *tensor = by_position(tensor, shape);
                }
            }
        }
        // A linear layer on bytes as 256 zeros and ones is an embedding.
        let weight = case.tensors.get_mut(&format!("target.{path}.weight"));
        let weight = weight.expect("a site has a weight");
        if text(site, "kind") == "embedding" && weight.dims[0] == size(site, "d_out") {
            *weight = weight.transposed();
        }
    }
    let parts = ["batch.x", "batch.c"].map(|name| case.tensors.remove(name));
    let parts: Vec<Tensor> = parts.into_iter().flatten().collect();
    let batch = match case.find("batch") {
        None => Some(beside(&parts.iter().collect::<Vec<_>>())),
        Some(vectors) if vectors.dims.len() == 3 => Some(beside(&[vectors])),
        Some(_) => None,
    };
    case.tensors
        .extend(batch.map(|batch| ("batch".to_owned(), batch)));
    let first = case.tensors.remove("out.stoch.m0").expect("a first pass");
    case.tensors.insert("out.stoch.f0".to_owned(), first);
    // A run draws as many samples for each loss. Twice the same sample is as good as one.
    let most = samples(&case.info);
    for term in list(&case.info, "terms") {
        for k in term["samples"].as_u64().unwrap_or(0)..most {
            let name = text(term, "name");
            for kind in ["rng", "route"] {
                let first = format!("{kind}.{name}.m0.");
                let copies = case
                    .under(&first)
                    .map(|(rest, tensor)| (format!("{kind}.{name}.m{k}.{rest}"), tensor.clone()));
                let copies: Vec<_> = copies.collect();
                case.tensors.extend(copies);
            }
        }
    }
}

/// The most samples of a term.
fn samples(info: &Json) -> u64 {
    let terms = list(info, "terms").iter();
    let most = terms.filter_map(|term| term["samples"].as_u64()).max();
    most.expect("a stochastic term")
}

/// Rows in the order (row, head, position) as rows in the order (row, position, head).
fn by_position(tensor: &Tensor, [rows, heads, positions]: [usize; 3]) -> Tensor {
    let width = tensor.values.len() / (rows * heads * positions);
    let mut values = Vec::with_capacity(tensor.values.len());
    for row in 0..rows {
        for position in 0..positions {
            for head in 0..heads {
                let at = ((row * heads + head) * positions + position) * width;
                values.extend_from_slice(&tensor.values[at..at + width]);
            }
        }
    }
    let mut dims = tensor.dims.clone();
    dims.swap(1, 2);
    Tensor { dims, values }
}

/// Says of a step what the metadata of the reference say.
fn say(info: &mut Json) {
    let most = samples(info);
    let mut terms = json!({});
    let mut weights = Vec::new();
    for term in list(info, "terms") {
        let class = match (text(term, "kind"), term["routing"].as_str()) {
            ("faith", _) => "FaithfulnessLoss",
            ("imp_min", _) => "ImportanceMinimalityLoss",
            ("unmasked", _) => "UnmaskedReconLoss",
            ("ci_masked", _) => "CIMaskedReconLoss",
            ("stoch", Some("all")) => "StochasticReconLoss",
            ("stoch", Some("layerwise")) => "StochasticReconLayerwiseLoss",
            ("stoch", Some("uniform_k")) => "StochasticReconSubsetLoss",
            other => panic!("no loss is {other:?}"),
        };
        terms[text(term, "name")] = json!({
            "cfg": {"classname": class, "pnorm": term["p"], "beta": term["beta"]},
            "n_mask_samples": if term["samples"].is_null() { 1 } else { most },
            "use_delta": true,
            "frac": 0.0,
        });
        weights.push(json!([term["name"], term["coeff"]]));
    }
    let sites = list(info, "sites").iter().map(|site| site["path"].clone());
    let sites: Vec<Json> = sites.collect();
    let mut network = json!({"keys": target(info)});
    if info["divergence"] == "mse" {
        network["n_features"] = json!("as the keys say");
    }
    for (key, value) in [
        ("losses", terms.clone()),
        ("terms", terms),
        ("total_terms", json!(weights)),
        ("total_frac_of_training", json!(0.0)),
        ("draw_order_sites", json!(sites)),
        ("sites", json!(sites)),
        ("output_loss_type", info["divergence"].clone()),
        ("target_config", network),
        (
            "left_out",
            json!(["all that the clean pass and single terms can be asked for"]),
        ),
    ] {
        info[key] = value;
    }
}
