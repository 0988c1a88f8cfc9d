//! Parts of importance functions over all sites: their view of each site, and the way their result
//! is shared out among sites.

use spd_engine::{Builder, Result, Value};

use super::{Seen, SeenSite};
use crate::networks::LayerKind;
use crate::sites::Site;

/// Columns that it sees of a site.
pub(super) fn width(site: &Site) -> usize {
    match site.layer.kind {
        LayerKind::Embedding => site.components,
        _ => site.layer.d_in,
    }
}

/// Why it cannot see sites whose rows are no positions, if there are any.
pub(super) fn without_positions(sites: &[Site]) -> Option<String> {
    let is_filter = |site: &&Site| site.layer.kind == LayerKind::Filters;
    let site = sites.iter().find(is_filter)?;
    Some(format!(
        "reads what all sites see at a position, and `{}` sees a whole sequence; \"shared_mlp\" reads each site by itself",
        site.path()
    ))
}

/// Refuses groups that miss a site, share one, or are empty.
///
/// - `what`: the word for a group
/// - `groups`: their names, and the numbers of their sites
///
/// # Errors
///
/// One line.
pub(super) fn one_each(
    what: &str,
    sites: &[&Site],
    groups: &[(String, Vec<usize>)],
) -> Result<(), String> {
    if let Some((name, _)) = groups.iter().find(|(_, members)| members.is_empty()) {
        return Err(format!("no site is in the {what} `{name}`"));
    }
    for (index, site) in sites.iter().enumerate() {
        let of = groups
            .iter()
            .filter(|(_, members)| members.contains(&index));
        let of: Vec<&str> = of.map(|(name, _)| name.as_str()).collect();
        let found = match of[..] {
            [_] => continue,
            [] => format!("no {what}"),
            _ => of.join(" and "),
        };
        return Err(format!(
            "each site is in one {what}, and `{}` is in {found}",
            site.path()
        ));
    }
    Ok(())
}

/// Numbers of the sites in the order of their names.
pub(super) fn by_name<'s>(sites: impl Iterator<Item = &'s Site>) -> Vec<usize> {
    let mut names: Vec<(&str, usize)> = sites.map(Site::path).zip(0..).collect();
    names.sort_unstable();
    names.into_iter().map(|(_, index)| index).collect()
}

impl SeenSite<'_> {
    /// The input of the site, or the activations `V[token]` of an embedding: f32 `[.., width]`.
    pub(super) fn shown(&self, b: &mut Builder) -> Result<Value> {
        match self.site.layer.kind {
            LayerKind::Embedding => self.activations(b),
            _ => Ok(self.input),
        }
    }
}

/// The inputs of the sites of `order`, side by side: f32 `[.., sum of widths]`.
///
/// # Errors
///
/// When they have other rows than each other.
pub(super) fn side_by_side(b: &mut Builder, seen: &Seen<'_>, order: &[usize]) -> Result<Value> {
    let inputs = order.iter().map(|&index| seen[index].shown(b));
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    b.concatenate(&inputs)
}

/// A network's work on positions: what sees features alone sees rows of one position.
///
/// # Errors
///
/// When `work` fails.
pub(super) fn on_positions(
    b: &mut Builder,
    x: Value,
    work: impl FnOnce(&mut Builder, Value) -> Result<Value>,
) -> Result<Value> {
    let dims = b.ty(x).dims.clone();
    let [rows, columns] = dims[..] else {
        return work(b, x);
    };
    let x = b.reshape(x, &[rows, 1, columns])?;
    let y = work(b, x)?;
    let columns = b.ty(y).columns();
    b.reshape(y, &[rows, columns])
}

/// Shares the columns of `x` out among the sites of `order`, a column for each component.
///
/// # Errors
///
/// When `x` has too few columns.
pub(super) fn share_out(
    b: &mut Builder,
    x: Value,
    seen: &Seen<'_>,
    order: &[usize],
    logits: &mut [Option<Value>],
) -> Result<()> {
    let mut first = 0;
    for &index in order {
        let next = first + seen[index].site.components;
        logits[index] = Some(b.slice(x, first..next)?);
        first = next;
    }
    Ok(())
}

/// The logits of all sites, once each has some.
pub(super) fn all(logits: Vec<Option<Value>>) -> Vec<Value> {
    let logits = logits.into_iter();
    logits.map(|logit| logit.expect("each site once")).collect()
}
