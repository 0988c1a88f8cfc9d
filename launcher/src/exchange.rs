//! `spd-launch export RUN --out DIR` and `spd-launch import CHECKPOINT --out DIR`: exchange
//! checkpoints with the SPD reference; `export --wandb` writes a run for `wandb sync`.

use std::path::{Path, PathBuf};

use spd_checkpoint::{atomic, write};
use spd_configs::Faults;
use spd_ship::{About, ExportError};
use spd_trainer::run_file::{Run, Target};
use spd_trainer::{Fault, exchange};

use crate::again::existing;
use crate::cli::{ExportArgs, ImportArgs};
use crate::exit::Exit;
use crate::hub::RunFiles;
use crate::launched::ended;
use crate::run_dir::RunDir;
use crate::screen;

/// Writes the newest good checkpoint of a run in the reference's format.
///
/// # Errors
///
/// Bad input when there is no run or no checkpoint.
pub(crate) fn export(asked: &ExportArgs) -> Result<Exit, Fault> {
    let run_dir = existing(&asked.run)?;
    if asked.wandb {
        return export_wandb(&run_dir, &asked.out);
    }
    let exported = exchange::export(run_dir.path(), &asked.out)?;
    screen::result(&format!(
        "{} tensors of step {} are in {}\n",
        exported.tensors,
        exported.step,
        exported.file.display()
    ));
    exported.notes.iter().for_each(|note| screen::note(note));
    Ok(Exit::Done)
}

/// Writes a run, which may go on, as W&B's client stores an offline run.
fn export_wandb(run_dir: &RunDir, out: &Path) -> Result<Exit, Fault> {
    let run = Run::load_resolved(&run_dir.config())?;
    let end = ended(run_dir.path());
    let code = end.map(Exit::code);
    let about = About::run(run_dir.path(), &run.name, &run.tracker, &run);
    let exported = spd_ship::export(run_dir.path(), about, out, code);
    let exported = exported.map_err(|found| match found {
        ExportError::Disk { .. } => Fault::Failed(found.into()),
        _ => Fault::BadInput(found.to_string()),
    })?;
    let (steps, place) = (exported.steps, exported.dir.display());
    let plural = if steps == 1 { "" } else { "s" };
    screen::result(&format!(
        "the rows of {steps} step{plural} are in {place}; `wandb sync {place}` sends them\n"
    ));
    if end.is_none() {
        screen::note(
            "the run goes on: W&B appends what is synced to what it has, so sync a later export with `wandb sync --id OTHER`",
        );
    }
    Ok(Exit::Done)
}

/// Makes a run directory from a checkpoint of the reference.
///
/// # Errors
///
/// Bad input when the checkpoint or its run file is invalid, or `--out` exists.
pub(crate) fn import(asked: &ImportArgs) -> Result<Exit, Fault> {
    let checkpoint = &asked.checkpoint;
    let step = asked.step.or_else(|| step_of(checkpoint)).ok_or_else(|| {
        Fault::BadInput(format!(
            "{}: no step in its name, as in model_1000.pth; give it with --step",
            checkpoint.display()
        ))
    })?;
    let run_dir = RunDir::at(asked.out.clone());
    let taken = std::fs::read_dir(run_dir.path()).is_ok_and(|mut entries| entries.next().is_some());
    if taken {
        let place = run_dir.path().display();
        return Err(Fault::BadInput(format!(
            "{place}: already exists; name a new directory with --out"
        )));
    }
    let (config, chosen) = match &asked.config {
        Some(config) => (config.clone(), None),
        None => beside(checkpoint)?,
    };
    let ends = ["yaml", "yml"];
    let is_theirs = config
        .extension()
        .is_some_and(|end| ends.iter().any(|known| end == *known));
    let has_target = asked.set.iter().any(|set| {
        let key = set.split('=').next().unwrap_or_default().trim();
        ["target", "target.weights", "target.train"].contains(&key)
    });
    let mut set = asked.set.clone();
    // The checkpoint contains the target, so nothing is fetched and no target is trained.
    let target = match has_target {
        true => None,
        false => Some(exchange::target_of(checkpoint)?),
    };
    let weights = run_dir.path().join("target.safetensors");
    if let Some(target) = target.as_ref().filter(|_| is_theirs) {
        if target.sizes.is_empty() {
            return Err(Fault::BadInput(format!(
                "{}: its tensors do not determine all sizes of the target; name its directory, with its config.json, by --set \
                 target.weights=DIR, or its name by --set target.weights=hf://OWNER/NAME",
                checkpoint.display()
            )));
        }
        let said = target
            .sizes
            .iter()
            .map(|(key, value)| (*key, value.clone()));
        let path = ("weights", format!("{:?}", weights.display().to_string()));
        for (key, value) in said.chain([path]) {
            let key = format!("target.{key}");
            let is_given = asked
                .set
                .iter()
                .any(|set| set.split('=').next() == Some(&key));
            if !is_given {
                set.push(format!("{key}={value}"));
            }
        }
    }
    // A run file that describes the whole network needs no other file of the target.
    let said = (!is_theirs && !has_target).then(|| Run::load_whole(&config, &set));
    let mut run = match said {
        Some(Ok(run)) => run,
        _ => RunFiles::new(&asked.out)
            .load(&config, &set)
            .map_err(|faults| unsaid(checkpoint, faults))?,
    };
    if target.is_some() {
        run.target = Target {
            weights: Some(weights.clone()),
            commit: None,
            train: None,
            ..run.target
        };
    }
    let snapshot = exchange::import(checkpoint, &run, step)?;
    let _hold = run_dir.prepare(&run).map_err(Fault::BadInput)?;
    if let Some(target) = &target {
        atomic::write_file(&weights, &target.file)?;
    }
    write(&run_dir.path().join("checkpoints"), &snapshot)?;
    chosen.iter().for_each(|line| screen::note(line));
    let place = run_dir.path().display();
    screen::result(&format!(
        "the state after step {step} is in {place}; `spd-launch {place}/config.toml --out {place}` goes on from there, \
         `spd-launch figures {place}` draws it\n"
    ));
    Ok(Exit::Done)
}

/// The step in a file name like `model_1000.pth`.
fn step_of(path: &Path) -> Option<u64> {
    let stem = path.file_stem()?.to_str()?;
    stem.strip_prefix("model_")?.parse().ok()
}

/// The faults of a run file whose target is the checkpoint's. Missing sizes become one line that
/// explains how to give them all.
fn unsaid(checkpoint: &Path, faults: Faults) -> Fault {
    let missing: Option<Vec<&str>> = faults
        .iter()
        .map(|fault| {
            let (key, rest) = fault
                .message
                .strip_prefix("missing key `")?
                .split_once('`')?;
            rest.starts_with(" in [target]").then_some(key)
        })
        .collect();
    let Some(missing) = missing.filter(|missing| !missing.is_empty()) else {
        return faults.into();
    };
    Fault::BadInput(format!(
        "{}: its tensors do not determine `{}` of the target; name its directory, with the file of its sizes, by --set \
         target.weights=DIR, or each by itself, as in --set target.{}=4",
        checkpoint.display(),
        missing.join("`, `"),
        missing[0]
    ))
}

/// The run file beside a checkpoint, and a note if there are two.
fn beside(checkpoint: &Path) -> Result<(PathBuf, Option<String>), Fault> {
    let names = ["config.toml", "final_config.yaml"];
    let places = names.map(|name| checkpoint.with_file_name(name));
    let mut there = places.into_iter().filter(|place| place.is_file());
    let found = there.next();
    let chosen = found.as_ref().zip(there.next()).map(|(found, other)| {
        format!(
            "the run file is {}, which is more complete than {} beside it; --config selects another one",
            found.display(),
            other.display()
        )
    });
    let found = found.ok_or_else(|| {
        Fault::BadInput(format!(
            "{}: no {} beside it; name its run file with --config",
            checkpoint.display(),
            names.join(" or ")
        ))
    });
    Ok((found?, chosen))
}
