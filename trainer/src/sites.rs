//! Which matrices are decomposed: the run file's patterns against the target's layers, and the
//! identity matrices that it puts before some of them.

use crate::fault::Fault;
use crate::networks::{Layer, LayerKind, pre_identity};
use crate::run_file::decomposition::Decomposition;
use crate::run_file::{SitePattern, pattern_matches};

/// A weight matrix that is decomposed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// The layer.
    pub layer: Layer,
    /// Number of components.
    pub components: usize,
}

impl Site {
    /// Module path.
    pub fn path(&self) -> &str {
        &self.layer.path
    }

    /// Module path as the reference writes it in the names of tensors: `.` becomes `-`.
    pub fn dashed(&self) -> String {
        self.layer.path.replace('.', "-")
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

/// The sites of a run: in the order of the patterns, then of the model's modules; identity matrices
/// come last.
///
/// # Errors
///
/// When a pattern matches no layer, or a layer matches two patterns.
pub fn resolve(said: &Decomposition, layers: &[Layer]) -> Result<Vec<Site>, Fault> {
    let mut sites = matches("sites", &said.sites, layers)?;
    for Site { layer, components } in matches("identity", &said.identity, layers)? {
        let other = match layer.kind {
            LayerKind::Embedding => Some("an embedding, which reads tokens"),
            LayerKind::Filters => Some("a layer of filters, which mixes positions"),
            LayerKind::OutIn | LayerKind::InOut | LayerKind::Identity => None,
        };
        if let Some(other) = other {
            return Err(Fault::BadInput(format!(
                "[decomposition] identity: `{}` is {other}; an identity matrix stands before a linear layer",
                layer.path
            )));
        }
        let layer = Layer {
            path: pre_identity(&layer.path),
            d_out: layer.d_in,
            kind: LayerKind::Identity,
            bias: false,
            tied_to: None,
            aligned: None,
            ..layer
        };
        sites.push(Site { layer, components });
    }
    Ok(sites)
}

/// The layers that the patterns of one key of `[decomposition]` mean.
fn matches(key: &str, patterns: &[SitePattern], layers: &[Layer]) -> Result<Vec<Site>, Fault> {
    let mut sites: Vec<(Site, &str)> = Vec::new();
    for SitePattern {
        pattern,
        components,
    } in patterns
    {
        let matches: Vec<&Layer> = layers
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
            if let Some((_, other)) = sites.iter().find(|(site, _)| site.layer == *layer) {
                return Err(Fault::BadInput(format!(
                    "[decomposition] {key}: `{}` matches two patterns, `{other}` and `{pattern}`; a matrix is decomposed once",
                    layer.path
                )));
            }
            sites.push((
                Site {
                    layer: layer.clone(),
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
    use crate::networks::{Model, shipped};

    use super::*;

    fn layers() -> Vec<Layer> {
        let sizes = crate::networks::Gpt2 {
            vocab: 50,
            n_ctx: 16,
            d_model: 16,
            n_layer: 2,
            n_head: 2,
            d_mlp: 64,
            activation: crate::networks::Nonlinearity::GeluTanh,
            norm_eps: 1e-5,
            tied_head: true,
        };
        shipped(&Model::Gpt2(sizes)).unwrap().layers()
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
            start: crate::run_file::ComponentStart::Random,
            tied: false,
            tied_update: crate::run_file::TiedUpdate::Summed,
        }
    }

    #[test]
    fn sites_follow_patterns_then_modules() {
        let sites = resolve(
            &said(&["*.c_fc", "transformer.h.*.attn.c_attn"], &[]),
            &layers(),
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
        let sites = resolve(&said(&["*.1.*c_proj"], &["*.1.mlp.*"]), &layers()).unwrap();
        let seen: Vec<_> = sites
            .iter()
            .map(|site| {
                (
                    site.path(),
                    site.layer.d_in,
                    site.layer.d_out,
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
        let before = &sites[3].layer;
        assert_eq!((before.kind, before.bias), (LayerKind::Identity, false));
    }

    #[test]
    fn an_embedding_may_be_a_site_and_has_no_identity_before_it() {
        let sites = resolve(&said(&["*wte"], &[]), &layers()).unwrap();
        let wte = &sites[0].layer;
        assert_eq!(
            (wte.kind, wte.d_in, wte.d_out),
            (LayerKind::Embedding, 50, 16)
        );
        let err = resolve(&said(&["*.c_fc"], &["*wte"]), &layers()).unwrap_err();
        assert_eq!(
            err.to_string(),
            "[decomposition] identity: `transformer.wte` is an embedding, which reads tokens; an identity matrix stands before a \
             linear layer"
        );
    }

    #[test]
    fn a_pattern_without_a_layer_names_the_layers() {
        let err = resolve(&said(&["h.*.q_proj"], &[]), &layers()).unwrap_err();
        assert_eq!(
            err.to_string(),
            "[decomposition] sites: pattern `h.*.q_proj` matches no layer of the target; its layers are \
             transformer.wte, transformer.h.0.attn.c_attn, transformer.h.0.attn.c_proj, transformer.h.0.mlp.c_fc, \
             transformer.h.0.mlp.c_proj, transformer.h.1.attn.c_attn, ..."
        );
    }

    /// Layers of a network on bytes, and what is said of patterns that mean filters.
    #[test]
    fn filters_are_layers_by_a_key_and_have_no_identity_before_them() {
        let layers = |decompose_filters| {
            let sizes = crate::networks::ByteSpectral {
                n_ctx: 8,
                d_model: 6,
                n_layer: 2,
                encoder: crate::networks::Encoder::Embedding,
                mixing: crate::networks::Mixing::Causal,
                window: 4,
                decompose_filters,
            };
            shipped(&Model::ByteSpectral(sizes)).unwrap().layers()
        };
        let filters = said(&["*.spectral_mix"], &[]);
        let err = resolve(&filters, &layers(false)).unwrap_err();
        assert_eq!(
            err.to_string(),
            "[decomposition] sites: pattern `*.spectral_mix` matches no layer of the target; its layers are byte_proj, \
             layers.0.mlp.0, layers.0.mlp.3, layers.1.mlp.0, layers.1.mlp.3, output"
        );
        let sites = resolve(&filters, &layers(true)).unwrap();
        let seen = sites
            .iter()
            .map(|site| (site.path(), site.layer.weight_dims()));
        let expected = [0, 1].map(|layer| (format!("layers.{layer}.spectral_mix"), [6, 6]));
        assert!(seen.eq(expected.iter().map(|(path, dims)| (path.as_str(), *dims))));
        let before = said(&["*.mlp.0"], &["*.0.spectral_mix"]);
        assert_eq!(
            resolve(&before, &layers(true)).unwrap_err().to_string(),
            "[decomposition] identity: `layers.0.spectral_mix` is a layer of filters, which mixes positions; an identity matrix \
             stands before a linear layer"
        );
    }

    #[test]
    fn a_layer_in_two_patterns_names_both() {
        let err = resolve(&said(&["*.c_fc", "transformer.h.1.*"], &[]), &layers()).unwrap_err();
        assert_eq!(
            err.to_string(),
            "[decomposition] sites: `transformer.h.1.mlp.c_fc` matches two patterns, `*.c_fc` and \
             `transformer.h.1.*`; a matrix is decomposed once"
        );
        let err = resolve(&said(&["*.c_fc"], &["*", "*.1.mlp.c_fc"]), &layers()).unwrap_err();
        assert_eq!(
            err.to_string(),
            "[decomposition] identity: `transformer.h.1.mlp.c_fc` matches two patterns, `*` and `*.1.mlp.c_fc`; a matrix \
             is decomposed once"
        );
    }
}
