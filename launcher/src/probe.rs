//! `spd-launch probe RUN`: importances of the components on a prompt, and the smallest set that
//! keeps the prediction.

use anyhow::Context;
use indicatif::HumanCount;
use spd_files::atomic::{make_dir, write_shared};
use spd_report::PROBES;
use spd_trainer::Fault;
use spd_trainer::metrics::number;
use spd_trainer::probe::{Probe, Probed, ProbedComponent, ProbedSite, Smallest, probe as measure};

use crate::again::{existing, fits, tell_damaged};
use crate::bench::unwritable;
use crate::cli::{self, ProbeArgs};
use crate::exit::Exit;
use crate::progress::Lines;
use crate::prompt::{prompt, shown};
use crate::table::{Align, Table};
use crate::{memory, screen};

/// Tokens or features of which a table has a column each, at most.
const COLUMNS: usize = 16;

/// Probes a run, and prints tables or a JSON object.
///
/// # Errors
///
/// Bad input: no run, no checkpoint, a prompt that the target cannot read, too little memory, a
/// directory that cannot be written.
pub(crate) fn probe(asked: &ProbeArgs) -> Result<Exit, Fault> {
    existing(&asked.run)?;
    let mut file = Vec::new();
    let Some(prompt) = prompt(&asked.prompt, &mut file)? else {
        return Err(Fault::BadInput(
            "expected a prompt, found none; give a text, --file, --ids or --feature".to_owned(),
        ));
    };
    let lines = Lines::default();
    let saved = asked.save.as_ref().map(|name| {
        let dir = asked.run.join(PROBES);
        (dir.join(format!("{name}.json")), dir)
    });
    if let Some((_, dir)) = &saved {
        spd_files::try_dir(dir).map_err(|line| Fault::BadInput(format!("--save: {line}")))?;
    }
    let found = measure(&Probe {
        run_dir: &asked.run,
        prompt,
        within: asked.kl,
        last: asked.last,
        delta: asked.delta,
        set: &asked.look.set,
        threads: cli::threads(asked.look.threads),
        fits: &|need| fits("probe", need, memory::available()),
        told: &|passes| {
            lines.say(|| format!("the smallest set: {passes} runs of the prompt made"));
        },
    })?;
    tell_damaged(&found.state.damaged, found.state.step);
    if let Some((path, dir)) = saved {
        let line = serde_json::to_string(&found).context("the probe")?;
        let made = make_dir(&dir).and_then(|()| write_shared(&path, &[line.as_bytes(), b"\n"]));
        made.map_err(|error| unwritable("--save", &path, &error))?;
        screen::note(&format!("the page of the run shows {}", path.display()));
    }
    if asked.look.json {
        screen::object(&found)?;
    } else {
        screen::result(&text(&found, asked.top));
    }
    Ok(Exit::Done)
}

/// The numbers for people.
///
/// - `top`: components of a site that are shown, at most
fn text(found: &Probed, top: usize) -> String {
    let rows = match found.features.len() {
        0 => format!("{} tokens", HumanCount(found.tokens.len() as u64)),
        1 => "1 feature".to_owned(),
        features => format!("{features} features"),
    };
    let (run, step) = (found.state.run.display(), found.state.step);
    format!(
        "{run}, step {step}: {rows}\n\n{}\n{}\n{}",
        sites(found),
        components(found, top),
        smallest(found)
    )
}

/// Components of a site that are active somewhere.
fn active<'f>(
    found: &'f Probed,
    site: &'f ProbedSite,
) -> impl Iterator<Item = &'f ProbedComponent> + Clone {
    let components = site.components.iter();
    components.filter(move |component| f64::from(component.largest) > found.alive_threshold)
}

/// Of each site how many components are active, and in how many rows.
fn sites(found: &Probed) -> String {
    use Align::{Left, Right};
    let rows = found.tokens.len().max(found.features.len());
    let mut table = Table::new(&[Left, Right, Right, Right]);
    table.row(["site", "C", "active", "mean L0"]);
    for site in &found.sites {
        let is_active = |g: &&f32| f64::from(**g) > found.alive_threshold;
        let all = active(found, site);
        let places = all
            .clone()
            .map(|of| of.importances.iter().filter(is_active).count());
        let places: usize = places.sum();
        table.row([
            site.site.clone(),
            site.c.to_string(),
            all.count().to_string(),
            format!("{:.2}", places as f64 / rows as f64),
        ]);
    }
    table.text()
}

/// The importance of each component at each token, if there are few, or where it is largest.
fn components(found: &Probed, top: usize) -> String {
    // There are only one or the other.
    let tokens = found.tokens.iter().map(|token| shown(&token.text));
    let features = found.features.iter().map(|n| format!("feature {n}"));
    let names: Vec<String> = tokens.chain(features).collect();
    let is_short = names.len() <= COLUMNS;
    let mut alignments = vec![Align::Left, Align::Right];
    alignments.resize(2 + names.len().max(3), Align::Right);
    if !is_short {
        alignments[4] = Align::Left;
    }
    let mut table = Table::new(&alignments);
    let head = ["site", "component"].map(str::to_owned).into_iter();
    if is_short {
        table.row(head.chain(names.iter().cloned()));
    } else {
        table.row(head.chain(["largest", "active at", "largest at"].map(str::to_owned)));
    }
    let mut left_out = 0;
    for site in &found.sites {
        let all = active(found, site);
        left_out += all.clone().count().saturating_sub(top);
        for of in all.take(top) {
            let cells = [site.site.clone(), of.component.to_string()].into_iter();
            if is_short {
                table.row(cells.chain(of.importances.iter().map(|&g| importance(g))));
                continue;
            }
            let places = of.importances.iter().enumerate();
            let active = places
                .clone()
                .filter(|(_, g)| f64::from(**g) > found.alive_threshold);
            let at = places
                .rev()
                .max_by(|a, b| a.1.total_cmp(b.1))
                .map_or(0, |(at, _)| at);
            table.row(cells.chain([
                importance(of.largest),
                format!("{} tokens", active.count()),
                format!("{at}: {}", names[at]),
            ]));
        }
    }
    let more = match left_out {
        0 => String::new(),
        left_out => {
            format!("  {left_out} more are active; --top shows more of each site, --json all\n")
        }
    };
    format!("{}{more}", table.text())
}

fn importance(g: f32) -> String {
    match f64::from(g) {
        // It would be 0.00.
        small if small < 0.005 => ".".to_owned(),
        g => format!("{g:.2}"),
    }
}

fn smallest(found: &Probed) -> String {
    let Smallest {
        within,
        all,
        distance,
        components,
        tried,
        passes,
    } = &found.smallest;
    let (what, unit) = match found.features.len() {
        0 => ("the KL divergence", " nats"),
        _ => ("the lost part of the output", ""),
    };
    let of: usize = found.sites.iter().map(|site| site.c).sum();
    let (Some(sets), Some(distance)) = (components, distance) else {
        return format!(
            "no set of components keeps the prediction: with all {of} of them {what} is {}{unit}, above {within}; try --delta, or a \
             larger --kl\n",
            number(*all)
        );
    };
    let count: usize = sets.iter().map(|set| set.components.len()).sum();
    let each = if *tried { "" } else { ", not tried one by one" };
    let mut table = Table::new(&[Align::Left, Align::Right]);
    for set in sets {
        let count = set.components.len().to_string();
        table.row([set.site.clone(), count, set.ranges()]);
    }
    format!(
        "smallest set: {count} of {of} components keep {what} at {}{unit}, within {within}; all of them, at {} ({passes} runs of the \
         prompt{each})\n{}",
        number(*distance),
        number(*all),
        table.text()
    )
}

#[cfg(test)]
mod tests {
    use spd_trainer::RunState;
    use spd_trainer::component_set::SiteSet;
    use spd_trainer::prompt::Token;

    use super::*;

    fn of(component: usize, importances: &[f32]) -> ProbedComponent {
        ProbedComponent {
            component,
            largest: importances.iter().copied().fold(0.0, f32::max),
            importances: importances.to_vec(),
        }
    }

    fn probed() -> Probed {
        let token = |id: u32, text: &str| Token {
            id,
            text: text.into(),
        };
        let site = |site: &str, components| ProbedSite {
            site: site.into(),
            c: 20,
            components,
        };
        Probed {
            state: RunState {
                run: "runs/x".into(),
                step: 12,
                damaged: Vec::new(),
            },
            alive_threshold: 0.1,
            tokens: vec![token(1, " the"), token(10, "\n"), token(2, "cat")],
            features: Vec::new(),
            sites: vec![
                site(
                    "h.0",
                    vec![of(3, &[1.0, 0.0, 0.5]), of(8, &[0.2, 0.25, 0.001])],
                ),
                site("h.1", vec![of(4, &[0.05, 0.0, 0.0])]),
            ],
            smallest: Smallest {
                within: 0.1,
                all: 0.0102,
                distance: Some(0.0931),
                components: Some(vec![SiteSet {
                    site: "h.0".into(),
                    components: vec![3, 8, 9],
                }]),
                tried: true,
                passes: 12,
            },
        }
    }

    #[test]
    fn a_short_prompt_has_a_column_for_each_token() {
        assert_eq!(
            text(&probed(), 10),
            "runs/x, step 12: 3 tokens

  site   C  active  mean L0
  h.0   20       2     1.33
  h.1   20       0     0.00

  site  component   the    \\n   cat
  h.0           3  1.00     .  0.50
  h.0           8  0.20  0.25     .

smallest set: 3 of 40 components keep the KL divergence at 0.0931 nats, within 0.1; all of them, at 0.0102 (12 runs of the prompt)
  h.0  3  3,8-9
"
        );
    }

    #[test]
    fn a_long_prompt_names_where_a_component_is_most_important() {
        let mut found = probed();
        found.tokens = (0..17)
            .map(|id| Token {
                id,
                text: format!("t{id}"),
            })
            .collect();
        let mut importances = vec![0.0; 17];
        (importances[5], importances[9]) = (0.9, 0.3);
        found.sites[0].components = vec![of(3, &importances), of(8, &importances)];
        assert_eq!(
            components(&found, 1),
            "  site  component  largest  active at  largest at
  h.0           3     0.90   2 tokens  5: t5
  1 more are active; --top shows more of each site, --json all
"
        );
    }

    #[test]
    fn a_set_that_does_not_exist_is_said_to_be_none() {
        let mut found = probed();
        (found.smallest.components, found.smallest.distance) = (None, None);
        found.smallest.all = 0.31;
        assert_eq!(
            smallest(&found),
            "no set of components keeps the prediction: with all 40 of them the KL divergence is 0.3100 nats, above 0.1; try \
             --delta, or a larger --kl\n"
        );
    }
}
