//! `[[eval.known]]`: solutions that are known.
//!
//! # Keys of `[eval]`
//!
//! - `known` | none | `IdentityCIError`: `identity_ci`, `dense_ci` | rows `{ pattern, identity =
//!   FEATURES }` or `{ pattern, dense = COLUMNS }`; toys only

use serde::Serialize;
use spd_configs::{
    reader::Table,
    values::{Size, Text},
};

use crate::run_file::{
    decomposition::{Decomposition, surely_meant},
    pattern::is_literal,
    target::Facts,
};

/// The known importances of a site on single-feature inputs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(into = "KnownRow")]
pub struct KnownImportance {
    /// Sites, as in `SitePattern`.
    pub pattern: String,
    /// The known solution.
    pub solution: KnownSolution,
}

/// A known pattern of importances, rows are features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KnownSolution {
    /// One component a feature, up to a permutation.
    Identity {
        /// Features.
        n: usize,
    },
    /// The `k` largest columns are in use, the others are off.
    Dense {
        /// Columns in use.
        k: usize,
    },
}

pub(super) fn read(
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
struct KnownRow {
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
