//! `global_reverse_residual`: a residual stream that visits groups of sites, usually from the last
//! block of the target to its first, and reads the logits of each group as it passes.
//!
//! ```text
//! r = 0; each group:  r = r + W_in concat(inputs of its sites) + b_in
//!                     r = r + attention(norm(r))          if there is one, not in the last group
//!                     r = r + transition(norm(r))         not in the last group
//!                     z of its sites = reader(norm(r))
//! ```
//!
//! The sites of a group are in the order of its patterns, and for each pattern in that of the run;
//! an embedding shows its activations `V[x]`. Norms bring the mean square to 1 and have learned
//! scales. The attention is not causal. A row of features is one of one position; the SPD reference
//! attends over the rows of the batch there.
//!
//! # Keys of `[importance]`
//!
//! - global_reverse_residual: `d_model` | | `d_resid_ci_fn` | width of the residual stream
//! - global_reverse_residual: `groups` | | `block_groups` | rows `{ name, patterns }` of sites, in
//!   the order of the visit; each site is in one
//! - global_reverse_residual: `reader_hidden` | `[]` | `reader_hidden_dims` | widths inside each
//!   group's reader
//! - global_reverse_residual: `transition_hidden` | none | `transition_hidden_dim` | width inside
//!   each transition, which is one linear layer without it
//! - global_reverse_residual: `n_head` | none | `transition_attn_config`: `n_heads` | heads of an
//!   attention after each group, of an even width

use serde::Serialize;
use serde_json::{Value as Json, json};
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{PATTERNS, Size, Text, WIDTHS_OR_NONE};
use spd_engine::{Builder, Result, Value};

use super::all_sites::{all, on_positions, one_each, share_out, side_by_side, width};
use super::layers::{
    AT_END, BEFORE_GELU, ImportanceTensor, Linear, SelfAttention, Tensors, Weights, mlp,
    mlp_layers, norm, scale_name,
};
use super::{ImportanceFunction, Seen};
use crate::run_file::pattern_matches;
use crate::run_file::reference::Made;
use crate::sites::Site;

/// A residual stream that visits groups of sites.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GlobalReverseResidual {
    /// Width of the residual stream.
    pub d_model: usize,
    /// Widths inside each reader.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reader_hidden: Vec<usize>,
    /// Width inside each transition; `None` for one linear layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transition_hidden: Option<usize>,
    /// The attention before each transition.
    #[serde(flatten)]
    pub attention: Option<SelfAttention>,
    /// Groups, in the order of the visit.
    pub groups: Vec<SiteGroup>,
}

/// Sites that are visited together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SiteGroup {
    /// Its name.
    pub name: String,
    /// Patterns of its sites, in order.
    pub patterns: Vec<String>,
}

impl SiteGroup {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let name = table.need("name", Text::ANY);
        let patterns = table.need("patterns", PATTERNS);
        all_read! { Self: name, patterns }
    }

    /// The tensors of one of its parts: `<part>.<name>`, without dots in the name.
    fn of(&self, part: &str) -> String {
        format!("_global_ci_fn.{part}.{}", self.name.replace('.', "-"))
    }

    /// Numbers of its sites.
    fn members(&self, sites: &[&Site]) -> Vec<usize> {
        let mut members = Vec::new();
        for pattern in &self.patterns {
            let of_pattern = |(_, site): &(usize, &&Site)| pattern_matches(pattern, site.path());
            let found = sites.iter().enumerate().filter(of_pattern);
            members.extend(found.map(|(index, _)| index));
        }
        members
    }
}

/// A group in the visit, with its layers.
struct Visit<'g> {
    group: &'g SiteGroup,
    members: Vec<usize>,
    first: Linear,
    /// The layers that change the stream for the next group; empty in the last.
    transition: Vec<Linear>,
    reader: Vec<Linear>,
}

impl GlobalReverseResidual {
    fn visits<'g, 's>(&'g self, sites: impl Iterator<Item = &'s Site>) -> Vec<Visit<'g>> {
        let sites: Vec<&Site> = sites.collect();
        let last = self.groups.len() - 1;
        let visit = |(number, group): (usize, &'g SiteGroup)| {
            let members = group.members(&sites);
            let seen = members.iter().map(|&index| width(sites[index])).sum();
            let components = members.iter().map(|&index| sites[index].components).sum();
            let d = self.d_model;
            Visit {
                first: Linear::new(&group.of("_inp_projectors"), seen, d),
                transition: match self.transition_hidden {
                    _ if number == last => Vec::new(),
                    None => vec![Linear::new(&group.of("_transitions"), d, d)],
                    Some(hidden) => mlp_layers(&group.of("_transitions"), d, &[hidden], d),
                },
                reader: mlp_layers(&group.of("_readers"), d, &self.reader_hidden, components),
                group,
                members,
            }
        };
        self.groups.iter().enumerate().map(visit).collect()
    }
}

fn normed(b: &mut Builder, weights: Weights<'_>, of: &str, x: Value) -> Result<Value> {
    let scale = weights(b, &scale_name(of));
    norm(b, x, Some(scale))
}

impl ImportanceFunction for GlobalReverseResidual {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let d_model = table.need("d_model", Size::at_least(1));
        let n_head = table.maybe("n_head", Size::at_least(1));
        if n_head == Some(None) && table.has("rope_base") {
            table.refuse::<()>("rope_base", "there is no attention without n_head");
        }
        let attention = SelfAttention::read(table, d_model, n_head.flatten());
        let attention = match n_head? {
            Some(_) => attention.map(Some),
            None => Some(None),
        };
        let reader_hidden = table.or("reader_hidden", WIDTHS_OR_NONE, Vec::new());
        let transition_hidden = table.maybe("transition_hidden", Size::at_least(1));
        let groups = table.rows("groups", SiteGroup::read);
        all_read! { Self: d_model, reader_hidden, transition_hidden, attention, groups }
    }

    fn sees_later(&self) -> bool {
        self.attention.is_some()
    }

    fn details(&self) -> String {
        let attention = self
            .attention
            .map_or("no".to_owned(), |a| a.n_head.to_string());
        format!(
            "{} groups, width {}, {attention} heads, reader {:?}",
            self.groups.len(),
            self.d_model,
            self.reader_hidden
        )
    }

    fn takes_muon() -> bool {
        true
    }

    fn from_reference(of: &mut Table<'_>, made: &mut Made) {
        made.need(of, ("d_resid_ci_fn", "a width"), "d_model");
        made.need(
            of,
            ("block_groups", "rows of `name` and `patterns`"),
            "groups",
        );
        made.carry(of, "reader_hidden_dims", "reader_hidden");
        made.carry(of, "transition_hidden_dim", "transition_hidden");
        if of.has_table("transition_attn_config") {
            of.table("transition_attn_config", |of| {
                SelfAttention::from_reference(of, made)
            });
        }
    }

    fn to_reference(&self) -> Json {
        json!({ "ci_config": {
            "mode": "global",
            "fn_type": "global_reverse_residual",
            "d_resid_ci_fn": self.d_model,
            "block_groups": self.groups,
            "reader_hidden_dims": self.reader_hidden,
            "transition_hidden_dim": self.transition_hidden,
            "transition_attn_config": self.attention.map(SelfAttention::to_reference),
        } })
    }

    fn refuses(&self, sites: &[Site]) -> Option<String> {
        let sites: Vec<&Site> = sites.iter().collect();
        let mut groups = Vec::new();
        for group in &self.groups {
            let members = group.members(&sites);
            if members.is_empty() {
                let patterns = group.patterns.join("\", \"");
                return Some(format!(
                    "no site is in the group `{}`: \"{patterns}\"",
                    group.name
                ));
            }
            groups.push((group.name.clone(), members));
        }
        one_each("group", &sites, &groups).err()
    }

    fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor> {
        let mut tensors = Tensors::new(sites.len(), None);
        for visit in self.visits(sites.iter()) {
            let group = visit.group;
            tensors.linear(visit.first, BEFORE_GELU);
            if !visit.transition.is_empty() {
                if self.attention.is_some() {
                    tensors.scale(&group.of("_attn_norms"), self.d_model);
                    tensors.attention(&group.of("_attn_transitions"), [self.d_model; 2]);
                }
                tensors.scale(&group.of("_transition_norms"), self.d_model);
                tensors.mlp(visit.transition, BEFORE_GELU);
            }
            tensors.scale(&group.of("_reader_norms"), self.d_model);
            tensors.mlp(visit.reader, AT_END);
        }
        tensors.list
    }

    fn logits(&self, b: &mut Builder, weights: Weights<'_>, seen: &Seen<'_>) -> Result<Vec<Value>> {
        let mut logits = vec![None; seen.len()];
        let mut stream = None;
        for visit in self.visits(seen.iter().map(|seen| seen.site)) {
            b.begin_region();
            let inputs = side_by_side(b, seen, &visit.members)?;
            let mut r = visit.first.apply(b, weights, inputs)?;
            if let Some(before) = stream {
                r = b.add(before, r)?;
            }
            let of = |part| visit.group.of(part);
            if !visit.transition.is_empty() {
                if let Some(attention) = self.attention {
                    let normed = normed(b, weights, &of("_attn_norms"), r)?;
                    let mixed = on_positions(b, normed, |b, x| {
                        attention.apply(b, weights, &of("_attn_transitions"), x)
                    })?;
                    r = b.add(r, mixed)?;
                }
                let normed = normed(b, weights, &of("_transition_norms"), r)?;
                let changed = mlp(b, weights, &visit.transition, normed)?;
                r = b.add(r, changed)?;
            }
            let normed = normed(b, weights, &of("_reader_norms"), r)?;
            let z = mlp(b, weights, &visit.reader, normed)?;
            share_out(b, z, seen, &visit.members, &mut logits)?;
            stream = Some(r);
        }
        Ok(all(logits))
    }
}

#[cfg(test)]
mod tests {
    use spd_engine::Store;

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::component_model::ImportanceKind;
    use crate::decomposition::Decomposition;

    /// The refusal of groups of these patterns, for a TMS of two sites.
    fn refusal(groups: &[&[&str]]) -> String {
        let mut run = preset("tiny-tms", &Overrides::default()).unwrap().run;
        let group = |(number, patterns): (usize, &&[&str])| SiteGroup {
            name: format!("group.{number}"),
            patterns: patterns.iter().map(|&pattern| pattern.to_owned()).collect(),
        };
        run.importance.kind = ImportanceKind::GlobalReverseResidual(GlobalReverseResidual {
            d_model: 4,
            reader_hidden: Vec::new(),
            transition_hidden: None,
            attention: None,
            groups: groups.iter().enumerate().map(group).collect(),
        });
        let made = Decomposition::new(&run, &mut Store::new());
        made.err()
            .map_or_else(String::new, |fault| fault.to_string())
    }

    #[test]
    fn each_site_is_in_one_group() {
        assert_eq!(refusal(&[&["linear2"], &["linear1"]]), "");
        let starts = "[importance] kind: ";
        assert_eq!(
            refusal(&[&["linear1"]]),
            format!("{starts}each site is in one group, and `linear2` is in no group")
        );
        assert_eq!(
            refusal(&[&["linear1"], &["linear*"]]),
            format!("{starts}each site is in one group, and `linear1` is in group.0 and group.1")
        );
        assert_eq!(
            refusal(&[&["linear*"], &["h.*", "x"]]),
            format!("{starts}no site is in the group `group.1`: \"h.*\", \"x\"")
        );
    }
}
