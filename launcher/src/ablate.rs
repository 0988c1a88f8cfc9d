//! `spd-launch ablate RUN`: the output without some components, or with some alone.

use indicatif::HumanCount;
use spd_trainer::Fault;
use spd_trainer::ablate::{
    Ablate, Ablated, Change, Edit, OnFeature, OnHeldOut, OnPrompt, ablate as measure,
};
use spd_trainer::metrics::number;

use crate::again::{existing, fits, tell_damaged};
use crate::cli::{self, AblateArgs};
use crate::exit::Exit;
use crate::progress::Lines;
use crate::prompt::{prompt, shown};
use crate::table::{Align, Table};
use crate::{memory, screen};

/// Ablates components of a run, and prints tables or a JSON object.
///
/// # Errors
///
/// Bad input: no run, no checkpoint, no such component, a prompt that the target cannot read, too
/// little memory.
pub(crate) fn ablate(asked: &AblateArgs) -> Result<Exit, Fault> {
    existing(&asked.run)?;
    let mut file = Vec::new();
    let prompt = prompt(&asked.prompt, &mut file)?;
    let lines = Lines::default();
    let edit = if asked.keep.is_empty() {
        Edit::Remove(&asked.remove)
    } else {
        Edit::Keep {
            components: &asked.keep,
            delta: asked.delta,
        }
    };
    let found = measure(&Ablate {
        run_dir: &asked.run,
        edit,
        prompt,
        generate: asked.generate,
        data: asked.data.as_deref(),
        set: &asked.look.set,
        threads: cli::threads(asked.look.threads),
        fits: &|need| fits("ablation", need, memory::available()),
        told: &|made, all| lines.say(|| format!("the ablation: run {made} of {all}")),
    })?;
    tell_damaged(&found.state.damaged, found.state.step);
    if asked.look.json {
        screen::object(&found)?;
    } else {
        screen::result(&text(&found));
    }
    Ok(Exit::Done)
}

/// The numbers for people.
fn text(found: &Ablated) -> String {
    let mut sets = Table::default();
    for set in &found.components {
        sets.row([found.edit.to_owned(), set.site.clone(), set.ranges()]);
    }
    let (run, step) = (found.state.run.display(), found.state.step);
    let change = match &found.change {
        Change::Prompt(found) => on_prompt(found),
        Change::HeldOut(found) => on_held_out(found),
        Change::Features(found) => on_features(found),
    };
    format!("{run}, step {step}\n{}\n{change}", sets.text())
}

fn on_features(found: &[OnFeature]) -> String {
    let mut table = Table::new(&[Align::Right; 4]);
    table.row([
        "feature",
        "its output",
        "after",
        "largest change of another",
    ]);
    for of in found {
        let [before, after] = of.output.map(|output| number(output.into()));
        let others = number(of.others.into());
        table.row([of.feature.to_string(), before, after, others]);
    }
    table.text()
}

fn on_held_out(found: &OnHeldOut) -> String {
    let rows = HumanCount(found.rows as u64);
    format!(
        "{rows} held-out rows of {} positions, means in nats\n{}",
        found.positions,
        means(found.kl, Some(found.ce))
    )
}

fn means(kl: f64, ce: Option<[f64; 2]>) -> String {
    use Align::{Left, Right};
    let mut table = Table::new(&[Left, Right, Right, Right]);
    table.row(["", "before", "after", "change"]);
    if let Some([before, after]) = ce {
        let change = number(after - before);
        table.row([
            "CE of the next token".to_owned(),
            number(before),
            number(after),
            change,
        ]);
    }
    table.row(["KL(before || after)", "", "", &number(kl)]);
    table.text()
}

fn on_prompt(found: &OnPrompt) -> String {
    use Align::{Left, Right};
    let mut positions = Table::new(&[Right, Left, Right, Right, Right]);
    positions.row(["", "token", "KL", "CE of the next before", "after"]);
    for (at, of) in found.positions.iter().enumerate() {
        let [before, after] = [0, 1].map(|which| {
            let ce = of.ce.map(|ce| number(ce[which]));
            ce.unwrap_or("-".to_owned())
        });
        let token = shown(&of.token.text);
        positions.row([at.to_string(), token, number(of.kl), before, after]);
    }
    let mut next = Table::new(&[Left, Right, Left, Right]);
    next.row(["next before", "", "after", ""]);
    let [before, after] = &found.next;
    for both in before.iter().zip(after) {
        let [before, after] = [both.0, both.1].map(|next| {
            let probability = format!("{:.1} %", 100.0 * next.probability);
            [shown(&next.token.text), probability]
        });
        next.row(before.into_iter().chain(after));
    }
    let mut text = format!(
        "{} tokens, means over positions in nats\n{}\n{}\n{}",
        HumanCount(found.positions.len() as u64),
        means(found.kl, found.ce),
        positions.text(),
        next.text()
    );
    for (tokens, when) in found.generated.iter().flatten().zip(["before", "after"]) {
        let made: String = tokens.iter().map(|token| token.text.as_str()).collect();
        text += &format!("\n{} tokens {when}: {}\n", tokens.len(), shown(&made));
    }
    text
}

#[cfg(test)]
mod tests {
    use spd_trainer::RunState;
    use spd_trainer::ablate::{Next, OnToken};
    use spd_trainer::component_set::SiteSet;
    use spd_trainer::prompt::Token;

    use super::*;

    fn ablated(change: Change) -> Ablated {
        Ablated {
            state: RunState {
                run: "runs/x".into(),
                step: 12,
                damaged: Vec::new(),
            },
            edit: "removed",
            components: vec![SiteSet {
                site: "linear1".into(),
                components: vec![3, 4, 5],
            }],
            change,
        }
    }

    #[test]
    fn a_toy_has_a_row_for_each_feature() {
        let of = |feature, output, others| OnFeature {
            feature,
            output,
            others,
        };
        let features = vec![of(0, [0.75, 0.0], 0.0), of(1, [0.5, 0.5], 0.125)];
        assert_eq!(
            text(&ablated(Change::Features(features))),
            "runs/x, step 12
  removed  linear1  3-5

  feature  its output   after  largest change of another
        0      0.7500       0                          0
        1      0.5000  0.5000                     0.1250
"
        );
    }

    #[test]
    fn a_prompt_has_means_a_row_for_each_token_and_what_comes_next() {
        let token = |id: u32, text: &str| Token {
            id,
            text: text.into(),
        };
        let at = |id, text, kl, ce| OnToken {
            token: token(id, text),
            kl,
            ce,
        };
        let next = |text, probability| Next {
            token: token(7, text),
            probability,
        };
        let found = OnPrompt {
            kl: 0.25,
            ce: Some([1.5, 1.75]),
            positions: vec![at(1, "a", 0.25, Some([1.5, 1.75])), at(2, "\n", 0.25, None)],
            next: [vec![next("x", 0.5)], vec![next("y", 0.25)]],
            generated: Some([
                vec![token(3, "l"), token(4, "o")],
                vec![token(3, "l"), token(5, "\n")],
            ]),
        };
        assert_eq!(
            text(&ablated(Change::Prompt(found))),
            "runs/x, step 12
  removed  linear1  3-5

2 tokens, means over positions in nats
                        before   after  change
  CE of the next token  1.5000  1.7500  0.2500
  KL(before || after)                   0.2500

     token      KL  CE of the next before   after
  0  a      0.2500                 1.5000  1.7500
  1  \\n     0.2500                      -       -

  next before          after        
  x            50.0 %  y      25.0 %

2 tokens before: lo

2 tokens after: l\\n
"
            .replace("after        \n", "after\n")
        );
    }

    #[test]
    fn held_out_rows_have_means() {
        let found = OnHeldOut {
            rows: 1600,
            positions: 128,
            kl: 0.5,
            ce: [2.0, 2.5],
        };
        assert_eq!(
            text(&ablated(Change::HeldOut(found))),
            "runs/x, step 12
  removed  linear1  3-5

1,600 held-out rows of 128 positions, means in nats
                        before   after  change
  CE of the next token       2  2.5000  0.5000
  KL(before || after)                   0.5000
"
        );
    }
}
