//! `spd-launch check RUNFILE|WEIGHTS`: measures whether a language model sees the tokens that it is
//! to predict.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::HumanCount;
use serde_json::json;
use spd_trainer::Fault;
use spd_trainer::causality::{
    Causality, Loss, Place, Progress, Settings, Subject, Verdict, check as measure,
};
use spd_trainer::networks::LEAKY;

use crate::cli::{self, CheckArgs};
use crate::exit::Exit;
use crate::hub::RunFiles;
use crate::inspect::is_of_weights;
use crate::table::{Align, Table};
use crate::{memory, screen};

/// Measures, and compares that with what the network says of itself.
///
/// # Errors
///
/// Bad input: no such run file or weights, a network without tokens, too little memory.
pub(crate) fn check(asked: &CheckArgs) -> Result<Exit, Fault> {
    let subject = subject(asked)?;
    let is_live = screen::is_live();
    let often = Duration::from_millis(if is_live { 200 } else { 20_000 });
    let mut told = Instant::now();
    let mut progress = |Progress { doing, step, steps }: Progress| {
        if told.elapsed() < often {
            return;
        }
        told = Instant::now();
        let line = format!("{doing}: {step} of {steps}");
        match is_live {
            true => screen::live(vec![line]),
            false => screen::progress(&line),
        }
    };
    let measured = measure(
        subject,
        Settings {
            steps: asked.steps,
            threads: cli::threads(asked.threads),
            fits: &fits,
            progress: &mut progress,
        },
    );
    if is_live {
        screen::live(Vec::new());
    }
    let found = measured?;
    if asked.json {
        let mut line = serde_json::to_value(&found).context("what was measured")?;
        line["verdict"] = json!(found.verdict());
        screen::object(&line)?;
    } else {
        screen::result(&text(&found));
    }
    match fault(&found) {
        None => Ok(Exit::Done),
        Some(line) => {
            screen::error(&line);
            Ok(Exit::Failed)
        }
    }
}

/// The network that is asked for.
fn subject(asked: &CheckArgs) -> Result<Subject, Fault> {
    let what = &asked.what;
    let path = Path::new(what);
    if path.is_dir() || is_of_weights(path) {
        if let Some(set) = asked.set.first() {
            return Err(Fault::BadInput(format!(
                "--set {set}: expected a run file, found weights, {what}; their config.json says the network"
            )));
        }
        return Subject::of_weights(path, &fits);
    }
    let is_there = path.try_exists().unwrap_or(true);
    let path = spd_configs::locate(what).map_err(|faults| {
        if is_there || !what.contains('/') {
            return Fault::from(faults);
        }
        Fault::BadInput(format!(
            "{what}: expected a run file or weights, found nothing there; `spd-launch configs` lists the run files that are \
             part of this program"
        ))
    })?;
    let run = RunFiles::default().load(&path, &asked.set)?;
    Subject::of_run(&run, &path.display().to_string(), &fits)
}

fn fits(need: usize) -> Result<(), String> {
    let remedy = "a target of fewer layers or tokens needs less";
    memory::fits(("the check needs", remedy), need, memory::available())
}

/// Why a check did not go well, in a line.
fn fault(found: &Causality) -> Option<String> {
    if found.agrees() {
        return None;
    }
    let why = match found.verdict() {
        Verdict::Causal => format!("says that it is {LEAKY}, and no leak was measured"),
        Verdict::Leaky => {
            format!("says that it is causal, and is {LEAKY}: its logits depend on later tokens")
        }
        Verdict::Unknown => {
            "the leak without its mask was not seen either, so nothing is known; try more --steps"
                .to_owned()
        }
    };
    Some(format!("{}: {why}", found.network))
}

/// The numbers for people.
fn text(found: &Causality) -> String {
    let Causality { probe, stream, .. } = found;
    let verdict = match found.verdict() {
        Verdict::Causal => "causal",
        Verdict::Leaky => LEAKY,
        Verdict::Unknown => "not known whether causal",
    };
    let no_mask = || "no mask to remove".to_owned();
    let without = |told: String| format!("control without mask: {told}");
    let mut lines = Table::default();
    let control = probe.control.as_deref();
    let control = control.map_or_else(no_mask, |places| without(counts(places)));
    let places = counts(&probe.places);
    lines.row([
        "suffix probe".to_owned(),
        format!("{places} earlier positions changed; {control}"),
    ]);
    let control = stream.control.as_ref();
    let control = control.map_or_else(no_mask, |loss| without(format!("{:.2}", loss.mean)));
    let Loss {
        mean,
        standard_error,
    } = stream.loss;
    let leaky = match found.verdict() {
        Verdict::Leaky => format!(" {LEAKY}"),
        Verdict::Causal | Verdict::Unknown => String::new(),
    };
    lines.row([
        "random stream".to_owned(),
        format!(
            "{mean:.4} +- {standard_error:.4}{leaky}, floor ln {} = {:.4}; {control}",
            stream.symbols, stream.floor
        ),
    ]);
    let learned = format!("{} steps of {}", HumanCount(stream.steps), stream.network);
    lines.row(["learned in".to_owned(), learned]);
    lines.row(["weights", &found.weights]);
    lines.row(["precision", &found.precision]);
    format!(
        "{}: {verdict}\n{}\n{}",
        found.network,
        lines.text(),
        places_table(found).text()
    )
}

/// How many earlier positions changed, of how many.
fn counts(places: &[Place]) -> String {
    let sum = |of: fn(&Place) -> usize| places.iter().map(of).sum::<usize>() as u64;
    let [changed, earlier] = [sum(|place| place.changed), sum(|place| place.earlier)];
    format!("{} of {}", HumanCount(changed), HumanCount(earlier))
}

/// A row for each changed token.
fn places_table(found: &Causality) -> Table {
    use Align::{Left, Right};
    let mut table = Table::new(&[Right, Left, Right, Right, Right, Right]);
    table.row([
        "changed token",
        "mask",
        "positions before",
        "changed",
        "largest change",
        "at",
    ]);
    let probe = &found.probe;
    let own = probe.places.iter().map(|place| (place, "its own"));
    let control = probe.control.iter().flatten();
    for (place, mask) in own.chain(control.map(|place| (place, "none"))) {
        let none = || "-".to_owned();
        let largest = place.at.map(|_| format!("{:.3e}", place.largest));
        table.row([
            format!("{} of {}", place.token, probe.positions),
            mask.to_owned(),
            HumanCount(place.earlier as u64).to_string(),
            HumanCount(place.changed as u64).to_string(),
            largest.unwrap_or_else(none),
            place.at.map_or_else(none, |at| at.to_string()),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use spd_trainer::causality::{Probe, RandomStream};

    use super::*;

    fn place(token: usize, changed: usize) -> Place {
        Place {
            token,
            earlier: 2 * token,
            changed,
            largest: if changed > 0 { 0.25 } else { 0.0 },
            at: (changed > 0).then_some(3),
        }
    }

    fn causal() -> Causality {
        let loss = |mean, standard_error| Loss {
            mean,
            standard_error,
        };
        Causality {
            network: "gpt2, 3 layers".into(),
            says_leaky: false,
            weights: "from model".into(),
            precision: "f32".into(),
            probe: Probe {
                positions: 421,
                places: vec![place(420, 0), place(210, 0)],
                control: Some(vec![place(420, 840), place(210, 420)]),
            },
            stream: RandomStream {
                network: "gpt2, 2 layers".into(),
                symbols: 8,
                floor: 8f64.ln(),
                steps: 300,
                loss: loss(2.0841, 0.0004),
                control: Some(loss(0.1336, 0.0004)),
            },
        }
    }

    /// A network that sees the next token, and has no mask.
    fn leaky() -> Causality {
        let mut found = causal();
        found.probe.places[0] = place(420, 2);
        (found.probe.control, found.stream.control) = (None, None);
        found.stream.loss.mean = 0.1867;
        found
    }

    #[test]
    fn a_causal_network_is_understood_at_once() {
        let found = causal();
        assert_eq!(
            text(&found),
            "\
gpt2, 3 layers: causal
  suffix probe   0 of 1,260 earlier positions changed; control without mask: 1,260 of 1,260
  random stream  2.0841 +- 0.0004, floor ln 8 = 2.0794; control without mask: 0.13
  learned in     300 steps of gpt2, 2 layers
  weights        from model
  precision      f32

  changed token  mask     positions before  changed  largest change  at
     420 of 421  its own               840        0               -   -
     210 of 421  its own               420        0               -   -
     420 of 421  none                  840      840        2.500e-1   3
     210 of 421  none                  420      420        2.500e-1   3
"
        );
        assert_eq!(fault(&found), None);
    }

    #[test]
    fn a_leak_is_named_beside_its_loss() {
        let mut found = leaky();
        let shown = text(&found);
        for line in [
            "gpt2, 3 layers: LEAKY\n",
            "  suffix probe   2 of 1,260 earlier positions changed; no mask to remove\n",
            "  random stream  0.1867 +- 0.0004 LEAKY, floor ln 8 = 2.0794; no mask to remove\n",
        ] {
            assert!(shown.contains(line), "{shown}");
        }
        assert_eq!(
            fault(&found).unwrap(),
            "gpt2, 3 layers: says that it is causal, and is LEAKY: its logits depend on later tokens"
        );
        found.says_leaky = true;
        assert_eq!(fault(&found), None);
    }

    #[test]
    fn a_causal_network_that_says_leaky_and_a_blind_control_are_faults() {
        let mut found = causal();
        found.says_leaky = true;
        assert_eq!(
            fault(&found).unwrap(),
            "gpt2, 3 layers: says that it is LEAKY, and no leak was measured"
        );
        let mut found = causal();
        found.stream.control = Some(found.stream.loss);
        assert!(text(&found).starts_with("gpt2, 3 layers: not known whether causal\n"));
        assert_eq!(
            fault(&found).unwrap(),
            "gpt2, 3 layers: the leak without its mask was not seen either, so nothing is known; try more --steps"
        );
    }
}
