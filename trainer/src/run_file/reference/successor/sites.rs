//! `decomposition.sites`: sites by name, or a number of components for each kind of matrix, in all
//! blocks or some of them.

use toml::de::DeValue;

use spd_configs::{
    reader::Table,
    values::{NUMBERED, OneOf, Size, Text},
    yaml::{Node, Value},
};

use super::super::made::{ByName, Made};

/// The path of a matrix, with a star for its block, by its name there.
type Matrices = &'static [(&'static str, &'static str)];

const SIMPLE_MLP: Matrices = &[
    ("q_proj", "h.*.attn.q_proj"),
    ("k_proj", "h.*.attn.k_proj"),
    ("v_proj", "h.*.attn.v_proj"),
    ("o_proj", "h.*.attn.o_proj"),
    ("c_fc", "h.*.mlp.c_fc"),
    ("down_proj", "h.*.mlp.down_proj"),
];

const GATED: Matrices = &[
    ("q", "model.layers.*.self_attn.q_proj"),
    ("k", "model.layers.*.self_attn.k_proj"),
    ("v", "model.layers.*.self_attn.v_proj"),
    ("o", "model.layers.*.self_attn.o_proj"),
    ("gate", "model.layers.*.mlp.gate_proj"),
    ("up", "model.layers.*.mlp.up_proj"),
    ("down", "model.layers.*.mlp.down_proj"),
];

const KINDS: OneOf<Option<Matrices>> = OneOf(&[
    ("explicit", None),
    ("simple_mlp", Some(SIMPLE_MLP)),
    ("glu_transformer", Some(GATED)),
]);

/// Makes `[decomposition]`.
pub(super) fn read(said: &mut Table<'_>) -> Made {
    let mut made = Made::default();
    let place = said.place("sites");
    said.table("sites", |of| {
        let rows = match of.need_kind("kind", KINDS)? {
            None => {
                let rows = of.rows("sites", |row| {
                    let mut site = Made::default();
                    site.need(row, ("name", "a module"), "pattern");
                    site.need(row, ("C", "a whole number"), "C");
                    let name = row.need("name", Text::ANY)?;
                    Some((name, site))
                })?;
                // Of a TMS, whose sites could share their components, each has its own there.
                if rows.iter().any(|(name, _)| name == "linear1") {
                    made.put("tied", place, Value::Flag(false));
                }
                rows.into_iter().map(|(_, site)| site).collect()
            }
            Some(matrices) => of_kinds(of, matrices)?,
        };
        made.carry(of, "initialization", "start");
        made.rows("sites", place, rows);
        Some(())
    });
    made
}

/// The sites of some kinds of matrices in some blocks.
fn of_kinds(of: &mut Table<'_>, matrices: Matrices) -> Option<Vec<Made>> {
    let blocks = of.table("layers", blocks);
    let names: Vec<&str> = matrices.iter().map(|(name, _)| *name).collect();
    let expected = format!("numbers of components of {}", names.join(", "));
    let components = ByName {
        least: 1,
        expected,
        holds: |name: &str, _: &DeValue<'_>| names.contains(&name),
    };
    let components = of.need("cs", components);
    let place = of.place("cs");
    let mut rows = Vec::new();
    let (blocks, components) = (blocks?, components?);
    for (matrix, path) in matrices {
        let Some((_, components)) = components.iter().find(|(name, _)| name == matrix) else {
            continue;
        };
        let mut add = |pattern: String| {
            let mut site = Made::default();
            let Node { offset, value } = components.clone();
            site.text("pattern", place, &pattern);
            site.put("C", offset, value);
            rows.push(site);
        };
        match &blocks[..] {
            [] => add((*path).to_owned()),
            blocks => blocks
                .iter()
                .for_each(|block| add(path.replacen('*', &block.to_string(), 1))),
        }
    }
    Some(rows)
}

/// The numbers of blocks; there are none where it is all of them.
fn blocks(of: &mut Table<'_>) -> Option<Vec<usize>> {
    match of.need_kind(
        "kind",
        OneOf(&[("all", 'a'), ("range", 'r'), ("list", 'l')]),
    )? {
        'a' => Some(Vec::new()),
        'r' => {
            let [start, end] =
                ["start", "end"].map(|key| of.need(key, Size::between(0, MOST_BLOCKS)));
            let (start, end) = (start?, end?);
            if start >= end {
                let message = format!("expected a number above start = {start}, found {end}");
                return of.refuse("end", message);
            }
            Some((start..end).collect())
        }
        _ => match of.need("indices", NUMBERED)? {
            none if none.is_empty() => {
                of.refuse("indices", "expected at least one block, found []")
            }
            blocks => Some(blocks),
        },
    }
}

/// More are no network's.
const MOST_BLOCKS: usize = 10_000;
