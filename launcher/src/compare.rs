//! `spd-launch compare RUN RUN...`: matches the components of runs one to one.

use spd_trainer::Fault;
use spd_trainer::compare::{Compare, Comparison, Pair, Score, compare as measure, letter};

use crate::again::{existing, fits, tell_damaged};
use crate::cli::{self, CompareArgs};
use crate::exit::Exit;
use crate::table::{Align, Table};
use crate::{memory, screen};

/// Components alone that a line names, at most.
const NAMED: usize = 16;

/// Compares runs, and prints tables or a JSON object.
///
/// # Errors
///
/// Bad input: no run, no checkpoint, other sites, shapes or another target, too little memory.
pub(crate) fn compare(asked: &CompareArgs) -> Result<Exit, Fault> {
    for run in &asked.runs {
        existing(run)?;
    }
    let found = measure(&Compare {
        runs: &asked.runs,
        above: asked.above,
        any_target: asked.any_target,
        set: &asked.look.set,
        out: asked.out.as_deref(),
        threads: cli::threads(asked.look.threads),
        fits: &|need| fits("comparison", need, memory::available()),
    })?;
    for run in &found.runs {
        tell_damaged(&run.damaged, run.step);
    }
    if asked.look.json {
        screen::object(&found)?;
        return Ok(Exit::Done);
    }
    let place = asked.out.iter();
    let place =
        place.map(|out| format!("\nthe picture is {}\n", out.join("compare.svg").display()));
    screen::result(&format!("{}{}", text(&found), place.collect::<String>()));
    Ok(Exit::Done)
}

/// The numbers for people.
fn text(found: &Comparison) -> String {
    let mut runs = Table::default();
    for (run, state) in found.runs.iter().enumerate() {
        let name = state.run.display().to_string();
        runs.row([letter(run), name, format!("step {}", state.step)]);
    }
    let mut text = runs.text();
    for pair in &found.pairs {
        text += &format!("\n{}", pair_text(found.above, pair));
    }
    if found.pairs.len() > 1 {
        let mut table = Table::new(&[Align::Left, Align::Right, Align::Right]);
        table.row(["site", "shared", "mean cosine"]);
        for mean in &found.means {
            let site = mean.site.as_deref().unwrap_or("all sites");
            table.row([site.to_owned(), percent(mean.fraction), cosine(mean.mean)]);
        }
        let pairs = found.pairs.len();
        text += &format!("\nmeans over {pairs} pairs\n{}", table.text());
    }
    text
}

fn pair_text(above: f64, pair: &Pair) -> String {
    use Align::{Left, Right};
    let [one, other] = pair.runs.map(letter);
    let mut table = Table::new(&[Left, Right, Right, Right, Right, Right, Right, Right, Right]);
    table.row([
        "site".to_owned(),
        format!("alive in {one}"),
        format!("in {other}"),
        format!("shared at {above}"),
        String::new(),
        "mean cosine".to_owned(),
        "median".to_owned(),
        format!("alone in {one}"),
        format!("in {other}"),
    ]);
    let mut row = |site: &str, score: &Score| {
        let [here, there] = score.alive;
        table.row([
            site.to_owned(),
            here.to_string(),
            there.to_string(),
            score.shared.to_string(),
            percent(score.fraction),
            cosine(score.mean),
            cosine(score.median),
            (here - score.shared).to_string(),
            (there - score.shared).to_string(),
        ]);
    };
    for site in &pair.sites {
        row(&site.site, &site.score);
    }
    row("all sites", &pair.all);
    let mut alone = Table::default();
    for site in &pair.sites {
        for (run, components) in pair.runs.into_iter().zip(&site.alone) {
            if !components.is_empty() {
                let where_to = format!("alone in {}", letter(run));
                alone.row([where_to, site.site.clone(), named(components)]);
            }
        }
    }
    let space = if alone.is_empty() { "" } else { "\n" };
    format!("{one} and {other}\n{}{space}{}", table.text(), alone.text())
}

/// Numbers of components, as far as a line has them.
fn named(components: &[usize]) -> String {
    let first = components.iter().take(NAMED).map(usize::to_string);
    let mut named = first.collect::<Vec<_>>().join(" ");
    if components.len() > NAMED {
        named += &format!(" and {} more", components.len() - NAMED);
    }
    named
}

fn percent(part: Option<f64>) -> String {
    part.map_or("-".to_owned(), |part| format!("{:.1} %", 100.0 * part))
}

fn cosine(cosine: Option<f64>) -> String {
    cosine.map_or("-".to_owned(), |cosine| format!("{cosine:.4}"))
}

#[cfg(test)]
mod tests {
    use spd_trainer::RunState;
    use spd_trainer::compare::{Match, Mean, SitePair};

    use super::*;

    fn score(alive: [usize; 2], shared: usize, mean: Option<f64>) -> Score {
        let both: usize = alive.iter().sum();
        Score {
            alive,
            shared,
            fraction: (both > 0).then(|| 2.0 * shared as f64 / both as f64),
            mean,
            median: mean,
        }
    }

    fn pair(runs: [usize; 2]) -> Pair {
        let matched = Match {
            components: [3, 7],
            cosine: 0.99951,
        };
        Pair {
            runs,
            sites: vec![
                SitePair {
                    site: "linear1".into(),
                    score: score([2, 18], 1, Some(0.99951)),
                    matches: vec![matched],
                    alone: [vec![5], (0..17).collect()],
                },
                SitePair {
                    site: "linear2".into(),
                    score: score([0, 0], 0, None),
                    matches: Vec::new(),
                    alone: [Vec::new(), Vec::new()],
                },
            ],
            all: score([2, 18], 1, Some(0.99951)),
        }
    }

    fn found(pairs: Vec<Pair>) -> Comparison {
        let runs = (0..=pairs.len()).map(|run| RunState {
            run: format!("runs/{run}").into(),
            step: 12,
            damaged: Vec::new(),
        });
        let mean = |site: Option<&str>| Mean {
            site: site.map(str::to_owned),
            fraction: Some(0.25),
            mean: None,
        };
        Comparison {
            above: 0.9,
            runs: runs.collect(),
            pairs,
            means: vec![mean(Some("linear1")), mean(None)],
        }
    }

    #[test]
    fn a_site_is_a_row_and_what_is_alone_is_named() {
        assert_eq!(
            text(&found(vec![pair([0, 1])])),
            "  A  runs/0  step 12
  B  runs/1  step 12

A and B
  site       alive in A  in B  shared at 0.9          mean cosine  median  alone in A  in B
  linear1             2    18              1  10.0 %       0.9995  0.9995           1    17
  linear2             0     0              0       -            -       -           0     0
  all sites           2    18              1  10.0 %       0.9995  0.9995           1    17

  alone in A  linear1  5
  alone in B  linear1  0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 and 1 more
"
        );
    }

    #[test]
    fn more_than_two_runs_have_means() {
        let text = text(&found(vec![pair([0, 1]), pair([0, 2])]));
        assert!(text.contains("\nA and C\n"), "{text}");
        let means = "\nmeans over 2 pairs
  site       shared  mean cosine
  linear1    25.0 %            -
  all sites  25.0 %            -
";
        assert!(text.ends_with(means), "{text}");
    }
}
