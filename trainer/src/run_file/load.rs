//! From the text of a run file to a run: parsed, overridden, read table by table, checked as a
//! whole.
//!
//! # Keys of a run file
//!
//! - `name` | | `wandb_run_name` | the run directory, `runs/<name>`
//! - `seed` | 0 | `seed` | keys every random number
//! - `precision` | `"f32"` | `autocast_bf16` | or `"bf16"`: operands, and on a GPU stored
//!   activations; or on a GPU `"tf32"`: operands

use std::path::Path;

use spd_configs::{
    Faults, Place, Shipped, all_read,
    faults::{Note, Source, about, line_and_column},
    overrides,
    reader::{Table, read_file},
    tracker,
    values::{Size, Text, Whole},
    yaml,
};
use toml::de::DeTable;

use crate::component_model::{self, Importance};
use crate::losses;
use crate::metrics;
use crate::run_file::{
    Run, Target, data,
    decomposition::{self, Decomposition, TiedUpdate},
    huggingface::{self, LookUp},
    nontarget, reference,
    run::{Checkpoint, Log, Precision},
    target::{self, Facts},
    train::{self, Terms},
};

impl Run {
    /// Reads the run file at `path`, with `KEY=VALUE` overrides in their order: `train.steps=100`,
    /// `loss.0.coeff=0.1`.
    ///
    /// # Errors
    ///
    /// Every fault of the file and the overrides at once: keys that are unknown, missing, of the
    /// wrong type or out of range, and those that do not go together. When the file is not TOML, or
    /// the weights' directory does not say what network it has, only that.
    ///
    /// A file whose name ends in `.yaml` or `.yml` is one of the SPD reference; it is translated,
    /// and overrides name keys of ours.
    ///
    /// If `weights` of `[target]` is a directory with a `config.json`, as Hugging Face lays it out,
    /// that gives the network and its sizes; keys that are given too have to agree.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, Faults> {
        Self::load_with(path, overrides, &mut |on_hub| {
            let name = on_hub.name.trim_start_matches("hf://");
            let name = name.split('@').next().unwrap_or(name);
            Err(format!(
                "expected a path, found {:?}; fetch it with `hf download {} --local-dir DIR`, and give DIR",
                on_hub.name,
                name.escape_debug()
            ))
        })
    }

    /// The same; weights that are on the hub are looked up.
    ///
    /// # Errors
    ///
    /// As [`Run::load`], and what `look_up` says.
    pub fn load_with(
        path: &Path,
        overrides: &[String],
        look_up: &mut LookUp<'_>,
    ) -> Result<Self, Faults> {
        Self::read(path, overrides, Some(look_up))
    }

    /// Keys that a run file of the SPD reference gives and that change nothing here, dotted; of a
    /// run file of ours, none.
    ///
    /// # Errors
    ///
    /// When the file cannot be read.
    pub fn unused_keys(path: &Path) -> Result<Vec<String>, Faults> {
        if !reference::is_one(path) {
            return Ok(Vec::new());
        }
        let text = text_of(path)?;
        let source = Source {
            file: path,
            text: &text,
            overrides: &[],
        };
        Ok(translated(&source)?.unused)
    }

    /// Reads a file that [`Run::to_toml`] wrote, which says all of its network: no directory of
    /// weights is asked again.
    ///
    /// # Errors
    ///
    /// As [`Run::load`].
    pub fn load_resolved(path: &Path) -> Result<Self, Faults> {
        Self::load_whole(path, &[])
    }

    /// Reads a file that says all of its network, with overrides; no directory of weights is asked.
    ///
    /// # Errors
    ///
    /// As [`Run::load`], and keys of the network that are missing.
    pub fn load_whole(path: &Path, overrides: &[String]) -> Result<Self, Faults> {
        Self::read(path, overrides, None)
    }

    /// The same with other settings of its evaluation, `KEY=VALUE` as [`Run::load`] has them: with
    /// those it is still the same run.
    ///
    /// # Errors
    ///
    /// As [`Run::load`], and a key that is none of `[eval]`.
    pub fn load_resolved_with(path: &Path, overrides: &[String]) -> Result<Self, Faults> {
        let keys = overrides.iter();
        let mut keys = keys.map(|given| given.split('=').next().unwrap_or_default().trim());
        if let Some(key) = keys.find(|key| key.split('.').next() != Some("eval")) {
            let message = "expected a key of [eval], found one that would make it another run";
            return Err(Faults::one(Place::Override(key.to_owned()), message));
        }
        Self::read(path, overrides, None)
    }

    fn read(
        path: &Path,
        overrides: &[String],
        look_up: Option<&mut LookUp<'_>>,
    ) -> Result<Self, Faults> {
        let text = text_of(path)?;
        let source = Source {
            file: path,
            text: &text,
            overrides,
        };
        Self::parse(&source, look_up)
    }

    /// Reads what [`Run::to_toml`] wrote: `from_resolved(&run.to_toml()) == run`.
    ///
    /// # Errors
    ///
    /// As [`Run::load`]; the file is called `resolved run`.
    pub fn from_resolved(text: &str) -> Result<Self, Faults> {
        Self::from_text(text, &[])
    }

    /// Reads a text that says all of its network, with overrides.
    pub(crate) fn from_text(text: &str, overrides: &[String]) -> Result<Self, Faults> {
        let source = Source {
            file: Path::new("resolved run"),
            text,
            overrides,
        };
        // It says all that was found once.
        Self::parse(&source, None)
    }

    /// - `look_up`: present where a directory of weights is asked for the sizes of its network
    fn parse(source: &Source<'_>, look_up: Option<&mut LookUp<'_>>) -> Result<Self, Faults> {
        if reference::is_one(source.file) {
            return Self::translate(source, look_up);
        }
        let (file, errors) = DeTable::parse_recoverable(source.text);
        if !errors.is_empty() {
            let note = |error: toml::de::Error| Note {
                offset: error.span().map_or(0, |span| span.start),
                message: format!(
                    "not TOML: {}",
                    error.message().replace(char::is_control, " ")
                ),
            };
            let mut notes: Vec<Note> = errors.into_iter().map(note).collect();
            notes.sort_by_key(|note| note.offset);
            // Later faults of the same line often follow from the first.
            let text = source.text.as_bytes();
            notes.dedup_by(|note, before| {
                let between = text.get(before.offset..note.offset);
                between.is_some_and(|between| !between.contains(&b'\n'))
            });
            return Err(source.faults(notes));
        }
        let (file, notes) = overrides::apply(source, file.into_inner());
        Self::of_tables(source, file, notes, look_up)
    }

    /// The run that a file of the reference means.
    fn translate(source: &Source<'_>, look_up: Option<&mut LookUp<'_>>) -> Result<Self, Faults> {
        let mut translated = translated(source)?;
        let file = std::mem::take(&mut translated.file);
        let (file, mut notes) = overrides::apply(source, yaml::table(&file));
        notes.append(&mut translated.notes);
        notes.extend(translated.missing(&file));
        // Refused keys would be reported as missing too.
        if !notes.is_empty() {
            return Err(source.faults(notes));
        }
        Self::of_tables(source, file, notes, look_up)
    }

    fn of_tables<'s>(
        source: &Source<'_>,
        file: DeTable<'s>,
        mut notes: Vec<Note>,
        look_up: Option<&mut LookUp<'_>>,
    ) -> Result<Self, Faults> {
        let keys = match look_up
            .map(|look_up| huggingface::look(&file, look_up))
            .transpose()
        {
            Ok(keys) => keys.flatten(),
            // Without its sizes, the target would be a list of missing keys.
            Err(more) => {
                notes.extend(more);
                return Err(source.faults(notes));
            }
        };
        let mut file = file;
        if let Some(keys) = &keys {
            notes.extend(keys.put(&mut file));
        }
        match read_file(&file, read) {
            Ok(run) if notes.is_empty() => Ok(run),
            Ok(_) => Err(source.faults(notes)),
            Err(mut more) => {
                if let Some(keys) = &keys {
                    more.iter_mut().for_each(|note| keys.explain(note));
                }
                notes.extend(more);
                Err(source.faults(notes))
            }
        }
    }
}

impl Target {
    /// The network of some weights without a run file: a directory with a `config.json`, or a file
    /// in one; or weights of the SPD reference, as for `weights` of a run file.
    ///
    /// # Errors
    ///
    /// Faults of the file that says the sizes, and of a file with none beside it.
    pub fn of_weights(path: &Path) -> Result<Self, Faults> {
        let fault = |message: &str| Faults::one(Place::File(path.to_owned()), message);
        let metadata = path.metadata().map_err(|error| {
            fault(&format!(
                "expected weights, found {error}; try a run file, or a directory with a config.json and its weights"
            ))
        })?;
        let beside = path.parent().filter(|_| metadata.is_file());
        let beside = beside.filter(|dir| dir.join("config.json").is_file());
        let sizes_of = beside.unwrap_or(path).to_str();
        let sizes_of = sizes_of.ok_or_else(|| fault("expected a path of UTF-8, found another"))?;
        let text = format!("[target]\nweights = {}\n", toml::Value::from(sizes_of));
        let file = DeTable::parse(&text).map_err(|error| fault(error.message()))?;
        let mut file = file.into_inner();
        // Places in a text that nobody wrote say nothing.
        let faults = |notes: Vec<Note>| {
            let lines = notes.into_iter().map(|note| note.message);
            let lines: Vec<String> = lines
                .map(|line| line.replacen(&about("target", "weights"), "", 1))
                .collect();
            fault(&lines.join("; "))
        };
        let keys = huggingface::look(&file, &mut |_| Err("expected a path".to_owned()));
        let Some(keys) = keys.map_err(faults)? else {
            return Err(fault(
                "expected weights with a config.json beside them, found none; try a run file that names them and their kind",
            ));
        };
        let notes = keys.put(&mut file);
        if !notes.is_empty() {
            return Err(faults(notes));
        }
        let read = |file: &mut Table<'_>| {
            let mut facts = Facts::default();
            file.table("target", |table| target::read(table, &mut facts))
        };
        let mut target = read_file(&file, read).map_err(faults)?;
        if beside.is_some() {
            target.weights = Some(path.to_owned());
        }
        Ok(target)
    }
}

/// Longer run files are refused.
const MOST_BYTES: u64 = 1 << 20;

/// The text of a run file.
fn text_of(path: &Path) -> Result<String, Faults> {
    if let Some(shipped) = Shipped::at(path) {
        return Ok(shipped.text.to_owned());
    }
    let bytes = spd_files::read_at_most(path, MOST_BYTES).map_err(|error| {
        let message = match error.kind() {
            std::io::ErrorKind::NotFound => "no such run file".to_owned(),
            std::io::ErrorKind::FileTooLarge => {
                format!("expected a run file of at most {MOST_BYTES} bytes, found more; is it one?")
            }
            std::io::ErrorKind::InvalidInput | std::io::ErrorKind::IsADirectory => {
                error.to_string()
            }
            _ => format!("cannot be read: {error}"),
        };
        Faults::one(Place::File(path.to_owned()), message)
    })?;
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let before = String::from_utf8_lossy(&error.as_bytes()[..valid]);
        let (line, column) = line_and_column(&before);
        let place = Place::At {
            file: path.to_owned(),
            line,
            column,
        };
        Faults::one(place, "expected UTF-8, found other bytes")
    })
}

/// The tables of ours that a file of the reference means.
fn translated(source: &Source<'_>) -> Result<reference::Translated, Faults> {
    let theirs = yaml::parse(source.text).map_err(|note| source.faults(vec![note]))?;
    let theirs = yaml::table(&theirs);
    Ok(reference::translate(&theirs, source.file))
}

/// The tables in the order of a run file; each is checked against those before it.
fn read(file: &mut Table<'_>) -> Option<Run> {
    let name = file.need("name", Text::RUN_NAME);
    let seed = file.or("seed", Whole::ANY, 0);
    let precision = file.or("precision", Precision::WORDS, Precision::F32);

    let mut facts = Facts::default();
    let target = file.table("target", |table| target::read(table, &mut facts));
    let data = file.table("data", |table| data::read(table, &facts));
    let decomposition = file.table("decomposition", |table| decomposition::read(table, &facts));
    let importance = file.table("importance", component_model::read_importance);
    let mut seen = Vec::new();
    let losses = file.rows("loss", |table| losses::read(table, &mut seen));
    losses::check(file, losses.as_deref().unwrap_or_default(), &facts);
    let before = nontarget::Before {
        target: &facts,
        decomposition: decomposition.as_ref(),
        losses: losses.as_deref(),
    };
    let nontarget = file.maybe_table("nontarget", |table| nontarget::read(table, &before));
    let train = file.table("train", |table| {
        let second = nontarget.as_ref().and_then(Option::as_ref);
        let terms = losses.as_ref().map(|losses| {
            let more = second.map_or(Vec::new(), |second| second.all_losses(losses));
            let all = || losses.iter().chain(&more);
            Terms {
                count: all().count(),
                samples: all().map(|loss| loss.term.term().samples(1)).sum(),
                are_stochastic: all().any(|loss| loss.term.is_stochastic()),
                nontarget_rows: second.map(|second| second.batch_size),
            }
        });
        let no_muon = no_muon(decomposition.as_ref(), importance.as_ref());
        train::read(table, &facts, terms, no_muon)
    });
    let eval = file.table_or_empty("eval", |table| {
        metrics::read(table, &facts, decomposition.as_ref(), train.as_ref())
    });
    let checkpoint = file.table_or_empty("checkpoint", |table| {
        let every = table.or("every", Whole::at_least(1), 1000);
        let keep = table.or("keep", Size::at_least(1), 2);
        all_read! { Checkpoint: every, keep }
    });
    let log = file.table_or_empty("log", |table| {
        let every = table.or("every", Whole::at_least(1), 100)?;
        Some(Log { every })
    });
    let tracker = file.table_or_empty("tracker", tracker::read);

    all_read! {
        Run: name, seed, precision, target, data, decomposition, importance, losses, nontarget,
            train, eval, checkpoint, log, tracker
    }
}

/// Why Muon cannot move the parameters of these, if so.
fn no_muon(of: Option<&Decomposition>, importance: Option<&Importance>) -> Option<String> {
    let kind = importance.map(|importance| &importance.kind);
    if let Some(kind) = kind.filter(|kind| !kind.takes_muon()) {
        return Some(format!(
            "it does not move the MLPs of \"{}\"; importance functions that it moves: \"global_shared_transformer\", \
             \"global_reverse_residual\", \"global_transformer\", \"chunkwise_transformer\"",
            kind.name()
        ));
    }
    let separate = of.is_some_and(|of| of.tied && of.tied_update == TiedUpdate::Separate);
    separate.then(|| {
        "it moves a tensor once a step, and tied_update = \"separate\" moves it twice".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // A megabyte of rows took 36 s to be refused, by five megabytes.
    #[test]
    fn very_many_rows_are_refused_by_a_hundred_faults() {
        let rows = "[[loss]]\nkind = \"faithfulness\"\n".repeat(20_000);
        let faults = Run::from_resolved(&rows).unwrap_err();
        assert_eq!(faults.iter().count(), 101);
    }

    #[test]
    fn a_line_that_is_not_toml_is_reported_once() {
        let faults = Run::from_resolved("name = 'x\nseed = 0\nprecision = = 2 3\n").unwrap_err();
        let lines: Vec<String> = faults.to_string().lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].starts_with("resolved run:1:"), "{lines:?}");
        assert!(lines[1].starts_with("resolved run:3:"), "{lines:?}");
    }
}
