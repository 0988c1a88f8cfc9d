//! A verdict on a run from its last evaluation: one sentence, what it is measured by, and what to
//! turn when it is not good.
//!
//! A toy with a known solution is good when it is solved. Any other run is good when masking with
//! the importances loses little of the output ([`LOST`]) and few components are active at a
//! position ([`ACTIVE`]). The two pull against each other, and the coefficient of the penalty on
//! importances moves both: it is what to turn first.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

/// Most of the loss of ablating everything that a good run loses with importances as masks.
const LOST: f64 = 0.05;

/// Most of its components that a good run has active at a position.
const ACTIVE: f64 = 0.1;

/// Penalties on importances, of which a run has one.
const PENALTIES: [&str; 2] = ["importance_minimality", "smooth_l0"];

/// One step of a search for a coefficient: about half a power of ten.
const TURN: f64 = 3.0;

/// A verdict.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Verdict {
    /// Whether it is good; `None` for a toy that is not finished.
    is_good: Option<bool>,
    /// The verdict as a sentence.
    text: String,
    gauges: Vec<Gauge>,
    /// Settings to change, the most promising first; empty for a good run.
    turn: Vec<String>,
}

/// A measure of a verdict, on a scale from 0 to 1.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Gauge {
    name: &'static str,
    /// Its value in words.
    said: String,
    value: f64,
    /// The values that are good.
    good: [f64; 2],
}

/// The numbers behind a verdict.
#[derive(Debug, Default)]
pub(crate) struct Facts<'a> {
    /// The settings of the run.
    pub(crate) settings: &'a [(String, String)],
    /// The last value of each metric.
    pub(crate) values: BTreeMap<&'a str, f64>,
    /// Whether the known solution was found, by its summary.
    pub(crate) is_solved: Option<bool>,
    pub(crate) counts: Option<Counts>,
}

/// Numbers of components of all sites.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Counts {
    all: usize,
    /// Components that were active in no row.
    never: usize,
}

impl Counts {
    /// The counts of `activation_frequency.json`.
    pub(crate) fn of(text: &str) -> Option<Self> {
        let sites: Value = serde_json::from_str(text).ok()?;
        let mut counts = Self { all: 0, never: 0 };
        for site in sites.as_array()? {
            let frequencies = site.get("frequencies")?.as_array()?;
            counts.all += frequencies.len();
            let is_never = |part: &&Value| part.as_f64() == Some(0.0);
            counts.never += frequencies.iter().filter(is_never).count();
        }
        Some(counts)
    }
}

impl Verdict {
    /// The verdict on a run; `None` before its first evaluation.
    pub(crate) fn of(facts: &Facts<'_>) -> Option<Self> {
        match facts.value("eval/ci_error") {
            Some(errors) => Some(facts.of_toy(errors)),
            None => facts.of_masks(),
        }
    }
}

impl Facts<'_> {
    fn value(&self, name: &str) -> Option<f64> {
        let found = self.values.get(name).copied();
        found.filter(|value| value.is_finite())
    }

    fn setting(&self, key: &str) -> Option<&str> {
        let found = self.settings.iter().find(|(known, _)| known == key);
        found.map(|(_, value)| value.as_str())
    }

    /// Against a known solution.
    fn of_toy(&self, errors: f64) -> Verdict {
        let features = self.setting("target.n_features");
        let features: Option<f64> = features.and_then(|count| count.parse().ok());
        let matched = self.value("eval/matched").zip(features);
        let mut parts = Vec::new();
        let mut gauges = Vec::new();
        if let Some((matched, features)) = matched {
            parts.push(format!(
                "{} of {} features",
                short(matched),
                short(features)
            ));
            gauges.push(Gauge {
                name: "features with a component of their own",
                said: format!("{} of {}", short(matched), short(features)),
                value: matched / features,
                good: [0.98, 1.0],
            });
        }
        parts.push(format!("importance error {}", short(errors)));
        if let Some(similarity) = self.value("eval/mmcs") {
            gauges.push(Gauge {
                name: "similarity of components and weights (MMCS)",
                said: short(similarity),
                value: similarity,
                good: [0.999, 1.0],
            });
        }
        let begin = match self.is_solved {
            Some(true) => "Solved:",
            Some(false) => "Not solved:",
            None => "So far:",
        };
        let turn = match self.is_solved {
            Some(false) if errors == 0.0 => vec![self.longer()],
            // Nothing is lost, so there are more importances than are needed.
            Some(false) => {
                let is_lossy = self.lost("mse").is_some_and(|lost| lost > LOST);
                vec![self.penalty(!is_lossy), self.longer()]
            }
            _ => Vec::new(),
        };
        Verdict {
            is_good: self.is_solved,
            text: format!("{begin} {}", parts.join(", ")),
            gauges,
            turn,
        }
    }

    /// By the output with importances as masks, and by the active components.
    fn of_masks(&self) -> Option<Verdict> {
        let masked = |kind| Some((kind, self.value(&format!("eval/{kind}/ci_masked"))?));
        let (kind, loss) = ["ce", "mse", "kl"].into_iter().find_map(masked)?;
        let mut text = format!("Importance-masked {} {}", kind.to_uppercase(), short(loss));
        if let Some(target) = self.value(&format!("eval/{kind}/target")) {
            text += &format!(", target {}", short(target));
        }
        let mut gauges = Vec::new();
        let lost = self.lost(kind);
        if let Some(lost) = lost {
            gauges.push(Gauge {
                name: "kept of the output, with importances as masks",
                said: percent(1.0 - lost),
                value: 1.0 - lost,
                good: [1.0 - LOST, 1.0],
            });
        }
        let active = self.active().zip(self.counts);
        if let Some((active, counts)) = active {
            let (all, never) = (counts.all as f64, counts.never as f64);
            text += &format!("; {} of {} active", short(active), short(all));
            if never > 0.0 {
                text += &format!(", {} never", short(never));
            }
            gauges.push(Gauge {
                name: "components active at a position",
                said: format!("{} of {}", short(active), short(all)),
                value: active / all,
                good: [0.0, ACTIVE],
            });
        } else if let Some(active) = self.active() {
            text += &format!("; {} active", short(active));
        }
        let is_lossy = lost.is_some_and(|lost| lost > LOST);
        let is_dense = active.is_some_and(|(active, counts)| active > ACTIVE * counts.all as f64);
        let turn = match (is_lossy, is_dense) {
            (false, false) => Vec::new(),
            (true, true) => vec![self.longer(), self.penalty(false)],
            _ => vec![self.penalty(is_dense), self.longer()],
        };
        Some(Verdict {
            is_good: lost.map(|_| turn.is_empty()),
            text,
            gauges,
            turn,
        })
    }

    /// The part of the output that importances as masks lose: 1 for as much as ablating everything.
    fn lost(&self, kind: &str) -> Option<f64> {
        let measured = self.value(&format!("eval/{kind}_unrecovered/ci_masked"));
        let ratio = || {
            let loss = |masks| self.value(&format!("eval/{kind}/{masks}"));
            let all = loss("zero").filter(|all| *all > 0.0)?;
            Some(loss("ci_masked")? / all)
        };
        measured.or_else(|| ratio().filter(|_| kind != "ce"))
    }

    /// Active components at a position, in all sites. Groups of sites (`[[eval.subset]]`) are named
    /// like sites.
    fn active(&self) -> Option<f64> {
        let is_group = |site: &str| {
            let is_name = |key: &str| key.starts_with("eval.subset[") && key.ends_with("].name");
            let mut settings = self.settings.iter();
            settings.any(|(key, group)| is_name(key) && group == site)
        };
        let sites = self.values.iter().filter_map(|(name, value)| {
            let site = name.strip_prefix("eval/l0/")?;
            (value.is_finite() && !is_group(site)).then_some(*value)
        });
        sites.reduce(|sum, value| sum + value)
    }

    /// Advice to turn the coefficient of the penalty on importances.
    fn penalty(&self, is_up: bool) -> String {
        let kind = |at: usize| self.setting(&format!("loss[{at}].kind"));
        let found = (0..self.settings.len()).map_while(|at| Some((at, kind(at)?)));
        let mut found = found.filter(|(_, kind)| PENALTIES.contains(kind));
        let (word, why) = match is_up {
            true => ("raise", "more components are important than are needed"),
            false => ("lower", "too few are important to make the output"),
        };
        let Some((at, kind)) = found.next() else {
            return format!("{word} the coefficient of the penalty on importances: {why}");
        };
        let now = self.setting(&format!("loss[{at}].coeff"));
        match now.and_then(|now| now.parse::<f64>().ok()) {
            Some(now) => format!(
                "{word} the importance coefficient, as in --set loss.{kind}.coeff={} (now {}): {why}",
                short(if is_up { now * TURN } else { now / TURN }),
                short(now)
            ),
            None => format!("{word} the importance coefficient, loss.{kind}.coeff: {why}"),
        }
    }

    /// Advice to train longer.
    fn longer(&self) -> String {
        let steps = self
            .setting("train.steps")
            .and_then(|steps| steps.parse().ok());
        let now = steps.map_or(String::new(), |steps| format!(" (now {})", short(steps)));
        format!("train longer, train.steps{now}, if its curves still move at the end")
    }
}

/// A number in three digits, and all digits of a count.
fn short(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 {
        return "0".to_owned();
    }
    if size >= 100.0 {
        let digits = format!("{size:.0}");
        let mut grouped = String::new();
        for (at, digit) in digits.chars().enumerate() {
            if at > 0 && (digits.len() - at).is_multiple_of(3) {
                grouped.push(',');
            }
            grouped.push(digit);
        }
        return if value < 0.0 {
            format!("-{grouped}")
        } else {
            grouped
        };
    }
    if size < 9.995e-4 {
        let text = format!("{value:.2e}");
        let (number, power) = text.split_once('e').unwrap_or((text.as_str(), "0"));
        return format!("{}e{power}", plain(number));
    }
    let digits = 1 + [10.0, 1.0, 0.1, 0.01]
        .iter()
        .filter(|one| size < **one)
        .count();
    plain(&format!("{value:.digits$}")).to_owned()
}

/// A decimal number without zeros at its end.
fn plain(number: &str) -> &str {
    match number.contains('.') {
        true => number.trim_end_matches('0').trim_end_matches('.'),
        false => number,
    }
}

fn percent(part: f64) -> String {
    let text = format!("{:.1}", 100.0 * part);
    format!("{} %", plain(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(all: &[(&str, &str)]) -> Vec<(String, String)> {
        let pair = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        all.iter().map(pair).collect()
    }

    #[test]
    fn a_toy_is_good_when_it_is_solved() {
        let settings = settings(&[
            ("loss[0].kind", "stochastic_recon"),
            ("loss[0].coeff", "1.0"),
            ("loss[1].kind", "importance_minimality"),
            ("loss[1].coeff", "0.003"),
            ("target.n_features", "10"),
            ("train.steps", "300"),
        ]);
        let of = |is_solved, values: &[(&'static str, f64)]| {
            let facts = Facts {
                settings: &settings,
                values: values.iter().copied().collect(),
                is_solved,
                counts: None,
            };
            let verdict = Verdict::of(&facts).unwrap();
            (verdict.is_good, verdict.text, verdict.turn)
        };
        let perfect = [("eval/ci_error", 0.0), ("eval/matched", 10.0)];
        let (is_good, text, turn) = of(Some(true), &perfect);
        assert_eq!(text, "Solved: 10 of 10 features, importance error 0");
        assert!(is_good == Some(true) && turn.is_empty());
        let (is_good, text, turn) = of(None, &[("eval/ci_error", 59.0)]);
        assert_eq!(text, "So far: importance error 59");
        assert!(is_good.is_none() && turn.is_empty());
        let spread = [
            ("eval/ci_error", 7.0),
            ("eval/mse_unrecovered/ci_masked", 0.01),
        ];
        let longer = "train longer, train.steps (now 300), if its curves still move at the end";
        let up = "raise the importance coefficient, as in --set loss.importance_minimality.coeff=0.009 (now 0.003): more components are important than are needed";
        assert_eq!(of(Some(false), &spread).2, [up, longer]);
        let lossy = [
            ("eval/ci_error", 7.0),
            ("eval/mse_unrecovered/ci_masked", 0.4),
        ];
        let down = "lower the importance coefficient, as in --set loss.importance_minimality.coeff=0.001 (now 0.003): too few are important to make the output";
        assert_eq!(of(Some(false), &lossy).2[0], down);
        assert_eq!(of(Some(false), &perfect).2, [longer]);
    }

    #[test]
    fn a_language_model_is_judged_by_what_it_loses_and_how_many_are_active() {
        let settings = settings(&[
            ("eval.subset[0].name", "mlps"),
            ("loss[0].kind", "smooth_l0"),
            ("loss[0].coeff.start", "1"),
        ]);
        let mut facts = Facts {
            settings: &settings,
            values: BTreeMap::from([
                ("eval/ce/ci_masked", 1.966),
                ("eval/ce/target", 1.83),
                ("eval/ce_unrecovered/ci_masked", 0.031),
                ("eval/l0/a", 140.0),
                ("eval/l0/b", 3.2),
                ("eval/l0/mlps", 140.0),
            ]),
            is_solved: None,
            counts: Some(Counts {
                all: 1792,
                never: 59,
            }),
        };
        let verdict = Verdict::of(&facts).unwrap();
        let text = "Importance-masked CE 1.97, target 1.83; 143 of 1,792 active, 59 never";
        assert_eq!(verdict.text, text);
        assert_eq!((verdict.is_good, &*verdict.turn), (Some(true), &[][..]));
        let said: Vec<&str> = verdict.gauges.iter().map(|gauge| &*gauge.said).collect();
        assert_eq!(said, ["96.9 %", "143 of 1,792"]);
        facts.values.insert("eval/ce_unrecovered/ci_masked", 0.3);
        let turn = Verdict::of(&facts).unwrap().turn;
        let down = "lower the importance coefficient, loss.smooth_l0.coeff: too few are important to make the output";
        assert_eq!(turn[0], down);
        facts.values.insert("eval/l0/b", 200.0);
        assert!(Verdict::of(&facts).unwrap().turn[0].starts_with("train longer, train.steps, if"));
        facts.values.insert("eval/ce_unrecovered/ci_masked", 0.01);
        assert!(Verdict::of(&facts).unwrap().turn[0].starts_with("raise "));
        // Without what it is measured by there is no judgement.
        facts.values.remove("eval/ce_unrecovered/ci_masked");
        facts.values.insert("eval/ce/target", f64::NAN);
        facts.counts = None;
        let verdict = Verdict::of(&facts).unwrap();
        assert_eq!(verdict.text, "Importance-masked CE 1.97; 340 active");
        assert_eq!((verdict.is_good, verdict.turn.len()), (None, 0));
        assert_eq!(Verdict::of(&Facts::default()), None);
    }

    #[test]
    fn components_are_counted_where_they_were_measured() {
        let text = r#"[{"site":"a","order":[1,0],"frequencies":[0.5,0.0]},{"site":"b","frequencies":[0.0]}]"#;
        assert_eq!(Counts::of(text), Some(Counts { all: 3, never: 2 }));
        assert_eq!(Counts::of("{}"), None);
        assert_eq!(Counts::of("[{\"frequencies\":7}]"), None);
    }

    #[test]
    fn a_number_has_three_digits() {
        let cases = [
            (0.0, "0"),
            (5.0, "5"),
            (1792.0, "1,792"),
            (1_234_567.0, "1,234,567"),
            (-140.4, "-140"),
            (55.88, "55.9"),
            (1.966, "1.97"),
            (0.197, "0.197"),
            (0.003, "0.003"),
            (2.648e-4, "2.65e-4"),
            (1e-6, "1e-6"),
        ];
        for (value, said) in cases {
            assert_eq!(short(value), said);
        }
    }
}
