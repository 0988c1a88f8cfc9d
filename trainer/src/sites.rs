//! Which matrices are decomposed: the run file's patterns against the model's linear layers, and the identity matrices
//! that it puts before some of them.

use spd_configs::{Decomposition, Model, SitePattern, pattern_matches, pre_identity};

use crate::fault::Fault;
use crate::target_models::{Linear, Orientation, linears};

/// A weight matrix that is decomposed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// The layer.
    pub linear: Linear,
    /// Number of components.
    pub components: usize,
}

impl Site {
    /// Module path.
    pub fn path(&self) -> &str {
        &self.linear.path
    }

    /// Module path as the reference writes it in the names of tensors: `.` becomes `-`.
    pub fn dashed(&self) -> String {
        self.linear.path.replace('.', "-")
    }

    /// Name of `V`, `[d_in, c]`.
    pub fn v_name(&self) -> String {
        format!("_components.{}.V", self.dashed())
    }

    /// Name of `U`, `[c, d_out]`.
    pub fn u_name(&self) -> String {
        format!("_components.{}.U", self.dashed())
    }
}

/// The sites of a run: in the order of the patterns, then of the model's modules; identity matrices come last.
///
/// # Errors
///
/// When a pattern matches no layer, or a layer matches two patterns.
pub fn resolve(said: &Decomposition, model: &Model) -> Result<Vec<Site>, Fault> {
    let mut sites = matches("sites", &said.sites, model)?;
    for Site { linear, components } in matches("identity", &said.identity, model)? {
        let linear = Linear {
            path: pre_identity(&linear.path),
            d_out: linear.d_in,
            orientation: Orientation::Identity,
            bias: false,
            ..linear
        };
        sites.push(Site { linear, components });
    }
    Ok(sites)
}

/// The layers that the patterns of one key of `[decomposition]` mean.
fn matches(key: &str, patterns: &[SitePattern], model: &Model) -> Result<Vec<Site>, Fault> {
    let layers = linears(model);
    let mut sites: Vec<(Site, &str)> = Vec::new();
    for SitePattern {
        pattern,
        components,
    } in patterns
    {
        let matches: Vec<&Linear> = layers
            .iter()
            .filter(|layer| pattern_matches(pattern, &layer.path))
            .collect();
        if matches.is_empty() {
            let known: Vec<&str> = layers
                .iter()
                .map(|layer| layer.path.as_str())
                .take(6)
                .collect();
            let more = if layers.len() > 6 { ", ..." } else { "" };
            return Err(Fault::BadInput(format!(
                "[decomposition] {key}: pattern `{pattern}` matches no layer of the target; its layers are {}{more}",
                known.join(", ")
            )));
        }
        for layer in matches {
            if let Some((_, other)) = sites.iter().find(|(site, _)| site.linear == *layer) {
                return Err(Fault::BadInput(format!(
                    "[decomposition] {key}: `{}` matches two patterns, `{other}` and `{pattern}`; a matrix is decomposed once",
                    layer.path
                )));
            }
            sites.push((
                Site {
                    linear: layer.clone(),
                    components: *components,
                },
                pattern,
            ));
        }
    }
    Ok(sites.into_iter().map(|(site, _)| site).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        Model::Gpt2 {
            vocab: 50,
            n_ctx: 16,
            d_model: 16,
            n_layer: 2,
            n_head: 2,
            d_mlp: 64,
        }
    }

    fn said(sites: &[&str], identity: &[&str]) -> Decomposition {
        let patterns = |patterns: &[&str], components| {
            let pattern = |pattern: &&str| SitePattern {
                pattern: (*pattern).into(),
                components,
            };
            patterns.iter().map(pattern).collect()
        };
        Decomposition {
            sites: patterns(sites, 3),
            identity: patterns(identity, 4),
            delta: true,
            tied: false,
            tied_update: spd_configs::TiedUpdate::Summed,
        }
    }

    #[test]
    fn sites_follow_patterns_then_modules() {
        let sites = resolve(
            &said(&["*.c_fc", "transformer.h.*.attn.c_attn"], &[]),
            &model(),
        )
        .unwrap();
        let paths: Vec<&str> = sites.iter().map(Site::path).collect();
        assert_eq!(
            paths,
            [
                "transformer.h.0.mlp.c_fc",
                "transformer.h.1.mlp.c_fc",
                "transformer.h.0.attn.c_attn",
                "transformer.h.1.attn.c_attn"
            ]
        );
        assert_eq!(sites[0].v_name(), "_components.transformer-h-0-mlp-c_fc.V");
    }

    #[test]
    fn identity_matrices_are_square_sites_after_the_others() {
        let sites = resolve(&said(&["*.1.*c_proj"], &["*.1.mlp.*"]), &model()).unwrap();
        let seen: Vec<_> = sites
            .iter()
            .map(|site| {
                (
                    site.path(),
                    site.linear.d_in,
                    site.linear.d_out,
                    site.components,
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("transformer.h.1.attn.c_proj", 16, 16, 3),
                ("transformer.h.1.mlp.c_proj", 64, 16, 3),
                ("transformer.h.1.mlp.c_fc.pre_identity", 16, 16, 4),
                ("transformer.h.1.mlp.c_proj.pre_identity", 64, 64, 4),
            ]
        );
        let before = &sites[3].linear;
        assert_eq!(
            (before.orientation, before.bias),
            (Orientation::Identity, false)
        );
    }

    #[test]
    fn a_pattern_without_a_layer_names_the_layers() {
        let err = resolve(&said(&["h.*.q_proj"], &[]), &model()).unwrap_err();
        assert_eq!(
            err.to_string(),
            "[decomposition] sites: pattern `h.*.q_proj` matches no layer of the target; its layers are \
             transformer.h.0.attn.c_attn, transformer.h.0.attn.c_proj, transformer.h.0.mlp.c_fc, \
             transformer.h.0.mlp.c_proj, transformer.h.1.attn.c_attn, transformer.h.1.attn.c_proj, ..."
        );
    }

    #[test]
    fn a_layer_in_two_patterns_names_both() {
        let err = resolve(&said(&["*.c_fc", "transformer.h.1.*"], &[]), &model()).unwrap_err();
        assert_eq!(
            err.to_string(),
            "[decomposition] sites: `transformer.h.1.mlp.c_fc` matches two patterns, `*.c_fc` and \
             `transformer.h.1.*`; a matrix is decomposed once"
        );
        let err = resolve(&said(&["*.c_fc"], &["*", "*.1.mlp.c_fc"]), &model()).unwrap_err();
        assert_eq!(
            err.to_string(),
            "[decomposition] identity: `transformer.h.1.mlp.c_fc` matches two patterns, `*` and `*.1.mlp.c_fc`; a matrix \
             is decomposed once"
        );
    }
}
