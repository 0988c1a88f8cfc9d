//! Names of tensors: ours are those of the reference's branch `main`; others are those of `dev` and
//! of older files.

use crate::networks::Target;

/// Begins the names of importance functions.
const IMPORTANCE: &str = "_ci_fns.";

/// Follows it where one function is over all sites, which `main` has not.
const GLOBAL: &str = "_global_ci_fn.";

/// Prefix of all of them on `dev`; a function over all sites has no other.
const OF_DEV: &str = "ci_fn.";

/// Begins the names of the target's tensors.
pub(super) const TARGET: &str = "target_model.";

/// Begins the names of AdamW's moments, which the reference does not save.
pub(super) const MOMENTS: &str = "adamw.";

/// The reference's name for a tensor of ours.
pub(super) fn theirs(name: &str) -> String {
    match name.strip_prefix(IMPORTANCE) {
        Some(rest) if rest.starts_with(GLOBAL) => format!("{OF_DEV}{rest}"),
        _ => name.to_owned(),
    }
}

/// Our name for a tensor of the reference, of whatever age.
pub(super) fn ours(name: &str) -> String {
    let name = name.strip_prefix(OF_DEV).unwrap_or(name);
    if let Some(rest) = name.strip_prefix("_gates.") {
        return format!("{IMPORTANCE}{rest}");
    }
    if name.starts_with(GLOBAL) {
        return format!("{IMPORTANCE}{name}");
    }
    let name = match name.strip_prefix("patched_model.") {
        Some(rest) => format!("{TARGET}{rest}"),
        None => name.to_owned(),
    };
    let Some(rest) = name.strip_prefix(TARGET) else {
        return name;
    };
    // Components once lay inside of the layers that they stand for.
    for part in ["V", "U"] {
        if let Some(path) = rest.strip_suffix(&format!(".components.{part}")) {
            return format!("_components.{}.{part}", path.replace('.', "-"));
        }
    }
    match rest.rsplit_once(".original.") {
        Some((path, part)) if !part.contains('.') => format!("{TARGET}{path}.{part}"),
        _ => name,
    }
}

/// Tensors of the target that a file of the reference has under a second name, the matrices of tied
/// heads: that name, and the first.
pub(super) fn shared(target: &dyn Target) -> impl Iterator<Item = (String, String)> {
    let layers = target.layers().into_iter();
    layers.filter_map(|layer| {
        layer.tied_to.as_ref()?;
        let own = format!("{TARGET}{}.weight", layer.path);
        Some((own, format!("{TARGET}{}", layer.weight_name())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_any_age_become_ours() {
        for (name, expected) in [
            ("_gates.linear1.layers.0.W", "_ci_fns.linear1.layers.0.W"),
            (
                "ci_fn._ci_fns.h-0-mlp.layers.2.b",
                "_ci_fns.h-0-mlp.layers.2.b",
            ),
            (
                "ci_fn._global_ci_fn.layers.0.W",
                "_ci_fns._global_ci_fn.layers.0.W",
            ),
            ("patched_model.h.0.q.weight", "target_model.h.0.q.weight"),
            (
                "patched_model.h.0.q.original.weight",
                "target_model.h.0.q.weight",
            ),
            ("patched_model.h.0.q.components.V", "_components.h-0-q.V"),
            ("target_model.linear1.weight", "target_model.linear1.weight"),
            ("_components.linear1.U", "_components.linear1.U"),
        ] {
            assert_eq!(ours(name), expected);
        }
        for name in [
            "_ci_fns._global_ci_fn.layers.0.W",
            "_ci_fns.a.layers.0.W",
            "_components.a.V",
        ] {
            assert_eq!(ours(&theirs(name)), name);
        }
    }
}
