//! `[eval]`: what is measured on held-out batches, and the solutions that are known.

use serde::Serialize;

use spd_configs::{
    reader::Table,
    values::{Flag, Number, Patterns, Size, Text, Whole},
};

use crate::run_file::{
    decomposition::surely_meant,
    losses::{self, SAMPLES},
    pattern::is_literal,
    run::{Decomposition, Eval, KnownImportance, KnownSolution, Subset, Train},
    target::Facts,
};

pub(crate) fn read(
    table: &mut Table<'_>,
    target: &Facts,
    decomposition: Option<&Decomposition>,
    train: Option<&Train>,
) -> Option<Eval> {
    let tenth = train.map_or(0, |train| (train.steps + 5) / 10);
    let every = table.or("every", Whole::at_least(0), tenth);
    let batches = table.or("batches", Whole::at_least(1), 10);
    let train_rows = train.map_or(1, |train| train.batch_size);
    let batch_size = table.or("batch_size", Size::at_least(1), train_rows);
    if let (
        Some(Train {
            shards: Some(shards),
            ..
        }),
        Some(rows),
    ) = (train, batch_size)
        && !rows.is_multiple_of(*shards)
    {
        let message = format!("expected a multiple of shards = {shards} in [train], found {rows}");
        table.refuse::<()>("batch_size", message);
    }
    let slow_every = table.or("slow_every", Whole::at_least(0), 0);
    let components = read_components(table, target);
    let alive_threshold = table.or("alive_threshold", Number::FRACTION, 0.0);
    let rounding_threshold = table.or("rounding_threshold", Number::FRACTION, 0.0);
    let known = table.rows_or_none("known", |known| read_known(known, target, decomposition));
    let mut seen = Vec::new();
    let losses = table.rows_or_none("loss", |loss| losses::read_measure(loss, &mut seen));
    if let (Some(losses), Some(train)) = (&losses, train)
        && losses.len() * train.mask_samples > SAMPLES
    {
        let message = format!(
            "expected at most {} with mask_samples = {}, found {}",
            SAMPLES / train.mask_samples,
            train.mask_samples,
            losses.len()
        );
        table.refuse::<()>("loss", message);
    }
    let mut names = Vec::new();
    let subsets = table.rows_or_none("subset", |subset| read_subset(subset, target, &mut names));
    if let (Some(name), Some([_, ..])) = (target.of_tokens(), known.as_deref()) {
        let message =
            format!("expected a tms or resid_mlp target, whose features are known, found {name}");
        table.refuse::<()>("known", message);
    }
    Some(Eval {
        every: every?,
        batches: batches?,
        batch_size: batch_size?,
        slow_every: slow_every?,
        components: components?,
        alive_threshold: alive_threshold?,
        rounding_threshold: rounding_threshold?,
        known: known?,
        losses: losses?,
        subsets: subsets?,
    })
}

/// Components of a site that are shown in contexts, unless a run says how many.
const SHOWN: usize = 24;

/// The most of them: more are not looked at, and each takes time and memory.
const MOST_SHOWN: usize = 1024;

fn read_components(table: &mut Table<'_>, target: &Facts) -> Option<usize> {
    let shown = if target.of_tokens().is_some() {
        SHOWN
    } else {
        0
    };
    let components = table.or("components", Size::between(0, MOST_SHOWN), shown);
    if let (Some(1..), Some(name)) = (components, target.of_features()) {
        let message = format!("expected 0 for a {name} target, found {}", components?);
        table.refuse::<()>("components", message);
    }
    components
}

/// - `names`: of the subsets before it
fn read_subset(table: &mut Table<'_>, target: &Facts, names: &mut Vec<String>) -> Option<Subset> {
    let name = table.need("name", Text::RUN_NAME);
    if let Some(name) = &name {
        if names.contains(name) {
            table.refuse::<()>("name", format!("found {name:?} twice"));
        }
        names.push(name.clone());
    }
    let sites = table.maybe("sites", Patterns);
    let all_but = table.maybe("all_but", Patterns);
    match (table.has("sites"), table.has("all_but")) {
        (true, true) => table.refuse(
            "all_but",
            "expected either `sites` or `all_but`, found both",
        ),
        (false, false) => table.refuse_table(
            "expected `sites = [PATTERN, ..]` or `all_but = [PATTERN, ..]`, found neither",
        ),
        _ => Some(()),
    };
    let masked = table.or("masked", Flag, target.of_tokens().is_some());
    if let (Some(true), Some(name)) = (masked, target.of_features()) {
        let message = format!("expected false for a {name} target, found true");
        table.refuse::<()>("masked", message);
    }
    Some(Subset {
        name: name?,
        sites: sites?.unwrap_or_default(),
        all_but: all_but?.unwrap_or_default(),
        masked: masked?,
    })
}

fn read_known(
    table: &mut Table<'_>,
    target: &Facts,
    decomposition: Option<&Decomposition>,
) -> Option<KnownImportance> {
    let pattern = table.need("pattern", Text::ANY);
    let identity = table.maybe("identity", Size::at_least(1));
    let dense = table.maybe("dense", Size::at_least(1));
    let solution = match (table.has("identity"), table.has("dense")) {
        (true, false) => identity?.map(|n| KnownSolution::Identity { n }),
        (false, true) => dense?.map(|k| KnownSolution::Dense { k }),
        (true, true) => table.refuse("dense", "expected either `identity` or `dense`, found both"),
        (false, false) => {
            table.refuse_table("expected `identity = FEATURES` or `dense = COLUMNS`, found neither")
        }
    };
    let known = KnownImportance {
        pattern: pattern?,
        solution: solution?,
    };
    if let (KnownSolution::Identity { n }, Some(n_features)) = (known.solution, target.n_features())
        && n != n_features
    {
        let message = format!("expected the target's {n_features} features, found {n}");
        table.refuse::<()>("identity", message);
    } else if let Some(decomposition) = decomposition {
        check_known(table, &known, decomposition);
    }
    Some(known)
}

/// A solution cannot use more components than its site has, nor be one of no site.
fn check_known(table: &mut Table<'_>, known: &KnownImportance, decomposition: &Decomposition) {
    let (key, in_use) = match known.solution {
        KnownSolution::Identity { n } => ("identity", n),
        KnownSolution::Dense { k } => ("dense", k),
    };
    let sites = decomposition.all_sites();
    let mut meant = surely_meant(&sites, &known.pattern).peekable();
    if meant.peek().is_none() && sites.iter().all(|site| is_literal(&site.pattern)) {
        let sites: Vec<_> = sites
            .iter()
            .map(|site| format!("{:?}", site.pattern))
            .collect();
        let message = format!(
            "expected one of the sites {}, found {:?}",
            sites.join(", "),
            known.pattern
        );
        table.refuse::<()>("pattern", message);
    }
    if let Some(site) = meant.find(|site| site.components < in_use) {
        let message = format!(
            "expected at most C = {} of {:?}, found {in_use}",
            site.components, site.pattern
        );
        table.refuse::<()>(key, message);
    }
}

/// A row of `known` as it is written.
#[derive(Serialize)]
pub(crate) struct KnownRow {
    pattern: String,
    identity: Option<usize>,
    dense: Option<usize>,
}

impl From<KnownImportance> for KnownRow {
    fn from(KnownImportance { pattern, solution }: KnownImportance) -> Self {
        match solution {
            KnownSolution::Identity { n } => Self {
                pattern,
                identity: Some(n),
                dense: None,
            },
            KnownSolution::Dense { k } => Self {
                pattern,
                identity: None,
                dense: Some(k),
            },
        }
    }
}
