//! The results of a sweep: one table, and `sweep.json` for programs.

use serde_json::{Map, Value, json};
use spd_trainer::metrics::number;
use spd_trainer::networks::LEAKY;

use super::member::Member;
use crate::screen::plain;
use crate::table::{Align, Table};

/// Values of summaries that have a column if any run has them: comparison with the known solution,
/// then the quality of the masked network.
const COLUMNS: [(&str, &str); 11] = [
    ("CI error", "ci_error"),
    ("at 0.2", "ci_error_0p2"),
    ("matched", "matched"),
    ("MMCS", "mmcs"),
    ("ML2R", "ml2r"),
    ("CE target", "eval/ce/target"),
    ("CE CI-masked", "eval/ce/ci_masked"),
    ("CE stochastic", "eval/ce/stochastic"),
    ("KL CI-masked", "eval/kl/ci_masked"),
    ("KL stochastic", "eval/kl/stochastic"),
    ("MSE stochastic", "eval/mse/stochastic"),
];

/// The table of all runs, and the number that found the known solution.
pub(crate) fn text(name: &str, members: &[Member]) -> String {
    let table = table(members).text();
    let mut text = format!("{name}: {} runs\n\n{table}", members.len());
    if let Some(line) = solved(members) {
        text.push_str(&format!("\n  {line}\n"));
    }
    text
}

/// The table in Markdown, without a title.
pub(crate) fn markdown(members: &[Member]) -> String {
    let table = table(members).markdown();
    solved(members).map_or(table.clone(), |line| format!("{table}\n{line}\n"))
}

/// The table as a page.
pub(crate) fn html(name: &str, members: &[Member]) -> String {
    let table = table(members).html();
    let solved = solved(members).map_or_else(String::new, |line| format!("<p>{line}</p>\n"));
    format!(
        "<!doctype html>\n<meta charset=\"utf-8\">\n<title>{name}</title>\n<style>body {{ font: 14px sans-serif }} th, td {{ padding: 3px 9px }}</style>\n{table}{solved}"
    )
}

fn table(members: &[Member]) -> Table {
    let Some(first) = members.first() else {
        return Table::default();
    };
    let columns: Vec<&(&str, &str)> = COLUMNS
        .iter()
        .filter(|(_, key)| {
            members
                .iter()
                .any(|member| member.results.contains_key(*key))
        })
        .collect();
    let has_known = members.iter().any(|member| member.solved.is_some());
    let mut alignments = vec![Align::Right; first.values.len() + columns.len() + 2];
    alignments.extend(vec![Align::Left; 1 + usize::from(has_known)]);
    let mut table = Table::new(&alignments);
    let keys = first.values.iter().map(|(key, _)| key.as_str());
    let titles = columns.iter().map(|(title, _)| *title);
    let solved = has_known.then_some("solved");
    let last = ["L0", "time"].into_iter().chain(solved).chain(["state"]);
    table.row(keys.chain(titles).chain(last));
    for member in members {
        let value = |key: &str| member.results.get(key).and_then(Value::as_f64);
        let of_key = |(_, key): &&(&str, &str)| value(key).map_or("-".to_owned(), number);
        let mut row: Vec<String> = member
            .values
            .iter()
            .map(|(_, value)| plain(value))
            .collect();
        row.extend(columns.iter().map(of_key));
        row.push(member.l0().map_or("-".to_owned(), |l0| format!("{l0:.2}")));
        row.push(value("seconds").map_or("-".to_owned(), |seconds| format!("{seconds:.0} s")));
        row.extend(has_known.then(|| match &member.solved {
            Some((found, _)) => if *found { "yes" } else { "no" }.to_owned(),
            None => "-".to_owned(),
        }));
        let leaky = match member.run.target.allow_leak {
            true => format!(", {LEAKY}"),
            false => String::new(),
        };
        row.push(match &member.failure {
            Some(cause) => format!("failed: {}", plain(cause)),
            None => member.state.name().to_owned() + &leaky,
        });
        table.row(row);
    }
    table
}

/// How many of the finished runs found the known solution, and what that means.
fn solved(members: &[Member]) -> Option<String> {
    let known: Vec<&(bool, String)> = members.iter().filter_map(|m| m.solved.as_ref()).collect();
    let (_, means) = known.first()?;
    let found = known.iter().filter(|(found, _)| *found).count();
    Some(format!("solved {found} of {} ({means})", known.len()))
}

/// The text of `sweep.json`:
/// `{"name", "runs": [{"values": {key: value}, "directory", "state", "cause", "solved",
/// "results": {name: number}}], "solved"}`.
pub(crate) fn json(name: &str, members: &[Member]) -> String {
    let runs: Vec<Value> = members
        .iter()
        .map(|member| {
            let values: Map<String, Value> = member
                .values
                .iter()
                .map(|(key, value)| (key.clone(), parsed(value)))
                .collect();
            json!({
                "values": values,
                "directory": member.name,
                "state": member.state.name(),
                "cause": member.failure,
                "solved": member.solved.as_ref().map(|(found, _)| found),
                "results": member.results,
            })
        })
        .collect();
    let whole = json!({"name": name, "runs": runs, "solved": solved(members)});
    format!("{whole:#}\n")
}

/// A number if the value is one, else its text.
pub(super) fn parsed(value: &str) -> Value {
    match serde_json::from_str(value) {
        Ok(number @ (Value::Number(_) | Value::Bool(_))) => number,
        _ => Value::String(value.to_owned()),
    }
}
