//! The plan of a run: a table of its settings and memory, printed before the start.

use std::path::Path;

use indicatif::{HumanBytes, HumanCount};
use spd_configs::Shipped;
use spd_trainer::{Memory, RunPlan, SitePlan};

use crate::screen::plain;
use crate::table::{Align, Table};

/// Above this number of sites, those of one shape whose paths differ only in numbers share a row.
const SITES_SHOWN_SINGLY: usize = 12;

/// The plan of a run.
///
/// - `title`: the name of the run
/// - `directory`: its run directory, and whether that exists
pub(crate) fn text(title: &str, directory: &str, run_plan: &RunPlan) -> String {
    let mut facts = Table::default();
    for (label, value) in &run_plan.rows {
        facts.row([plain(label), plain(value)]);
    }
    facts.row(["memory", &memory(&run_plan.memory)]);
    if let Some(gpu) = &run_plan.gpu_memory {
        facts.row(["GPU memory", &memory(gpu)]);
    }
    facts.row(["directory", directory]);
    let mut text = format!("{title}\n{}", facts.text());
    if !run_plan.sites.is_empty() {
        text.push('\n');
        text.push_str(&sites(&run_plan.sites, run_plan.shared_importance).text());
    }
    text.push('\n');
    text
}

/// The row with the run file.
pub(crate) fn run_file(path: &Path) -> (String, String) {
    let place = path.display();
    let value = match Shipped::at(path) {
        Some(_) => format!("{place}, which is part of this program"),
        None => place.to_string(),
    };
    ("run file".to_owned(), value)
}

/// Planned memory: the total and its main parts.
pub(crate) fn memory(memory: &Memory) -> String {
    let total = memory.total();
    let parts = memory.parts.iter();
    let parts: Vec<String> = parts
        .filter(|(_, part)| part.saturating_mul(PARTS_SHOWN_FROM) >= total)
        .map(|(what, part)| format!("{what} {}", bytes(*part)))
        .collect();
    format!("{} ({})", bytes(total), parts.join(", "))
}

/// A part is shown if it is at least the total divided by this.
const PARTS_SHOWN_FROM: usize = 20;

/// Bytes with a binary unit.
pub(crate) fn bytes(count: usize) -> String {
    HumanBytes(count as u64).to_string()
}

fn count(number: usize) -> String {
    HumanCount(number as u64).to_string()
}

fn sites(sites: &[SitePlan], shared_importance: usize) -> Table {
    use Align::{Left, Right};
    let mut table = Table::new(&[Left, Right, Right, Right, Right]);
    table.row(["site", "d_in", "d_out", "C", "parameters"]);
    let groups = if sites.len() > SITES_SHOWN_SINGLY {
        grouped(sites)
    } else {
        alone(sites)
    };
    for (name, site) in groups {
        table.row([
            name,
            count(site.d_in),
            count(site.d_out),
            count(site.components),
            count(site.parameters),
        ]);
    }
    let none = String::new;
    if shared_importance > 0 {
        let name = "importances of all".to_owned();
        table.row([name, none(), none(), none(), count(shared_importance)]);
    }
    let total = |of: fn(&SitePlan) -> usize| sites.iter().map(of).fold(0, usize::saturating_add);
    let parameters = total(|site| site.parameters).saturating_add(shared_importance);
    table.row([
        format!("total of {}", count(sites.len())),
        none(),
        none(),
        count(total(|site| site.components)),
        count(parameters),
    ]);
    table
}

fn alone(sites: &[SitePlan]) -> Vec<(String, &SitePlan)> {
    sites.iter().map(|site| (plain(&site.path), site)).collect()
}

/// One row for all sites of one shape whose paths differ only in numbers, in the order of their
/// first.
fn grouped(sites: &[SitePlan]) -> Vec<(String, &SitePlan)> {
    // The sites of a group have equal plans except for the numbers in their paths.
    let mut groups: Vec<(SitePlan, Vec<&SitePlan>)> = Vec::new();
    for site in sites {
        let path = starred(&site.path);
        let of_all = SitePlan {
            path,
            ..site.clone()
        };
        match groups.iter_mut().find(|(known, _)| *known == of_all) {
            Some((_, members)) => members.push(site),
            None => groups.push((of_all, vec![site])),
        }
    }
    let name = |of_all: &SitePlan, members: &[&SitePlan]| match members {
        [one] => plain(&one.path),
        _ => format!("{} x{}", plain(&of_all.path), members.len()),
    };
    groups
        .iter()
        .map(|(of_all, members)| (name(of_all, members), members[0]))
        .collect()
}

/// A path with `*` for each numeric part.
fn starred(path: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let parts: Vec<&str> = path
        .split('.')
        .map(|part| if is_number(part) { "*" } else { part })
        .collect();
    parts.join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(path: &str, sides: [usize; 2], components: usize, parameters: usize) -> SitePlan {
        SitePlan {
            path: path.into(),
            d_in: sides[0],
            d_out: sides[1],
            components,
            parameters,
        }
    }

    fn run_plan(sites: Vec<SitePlan>) -> RunPlan {
        RunPlan {
            rows: vec![
                ("target".into(), "tms 5-2".into()),
                ("precision".into(), "f32".into()),
            ],
            sites,
            shared_importance: 0,
            state_bytes: 3 << 20,
            frozen_bytes: 0,
            memory: Memory {
                parts: vec![("state", 3 << 20), ("programs", 1 << 20), ("batches", 7)],
            },
            gpu_memory: None,
        }
    }

    #[test]
    fn few_sites_have_one_row_each() {
        let sites = vec![
            site("linear1", [5, 2], 20, 1234),
            site("linear2", [2, 5], 20, 1000),
        ];
        assert_eq!(
            text("tms_5-2", "runs/tms_5-2 (new)", &run_plan(sites)),
            "\
tms_5-2
  target     tms 5-2
  precision  f32
  memory     4.00 MiB (state 3.00 MiB, programs 1.00 MiB)
  directory  runs/tms_5-2 (new)

  site        d_in  d_out   C  parameters
  linear1        5      2  20       1,234
  linear2        2      5  20       1,000
  total of 2               40       2,234

"
        );
    }

    #[test]
    fn many_sites_of_one_shape_share_a_row() {
        let mut sites = Vec::new();
        for layer in 0..7 {
            // The last layer has another size, so it has its own row.
            let components = if layer == 6 { 8 } else { 4 };
            sites.push(site(&format!("h.{layer}.attn"), [2, 3], components, 10));
            sites.push(site(&format!("h.{layer}.mlp2"), [3, 2], 4, 20));
        }
        assert_eq!(
            super::sites(&sites, 7).text(),
            "
  site                d_in  d_out   C  parameters
  h.*.attn x6            2      3   4          10
  h.*.mlp2 x7            3      2   4          20
  h.6.attn               2      3   8          10
  importances of all                            7
  total of 14                      60         217
"
            .trim_start_matches('\n')
        );
    }
}
