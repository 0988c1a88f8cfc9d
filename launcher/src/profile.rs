//! `spd-launch profile`: shows where the time of a run's step goes, as tables and as a trace.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use spd_checkpoint::atomic::write_file;
use spd_trainer::bench::{Preset, Settings, time};
use spd_trainer::{Fault, World};

use crate::cli::{self, ProfileArgs};
use crate::exit::Exit;
use crate::gpus::gpu;
use crate::hub::RunFiles;
use crate::{bench, plan, screen};

/// Default number of profiled steps.
const STEPS: usize = 20;

/// Profiles the step of a run on random weights and data of its shapes; only the run file is read.
///
/// # Errors
///
/// When the run file is invalid or its programs cannot be built, before anything is written; when
/// the trace cannot be written, or would replace the run file.
pub(crate) fn profile(asked: &ProfileArgs) -> Result<Exit, Fault> {
    let path = spd_configs::locate(&asked.config)?;
    let run = RunFiles::default().load(&path, &asked.set)?;
    spd_trainer::check_precision(&run, asked.gpus > 0)?;
    if let Some(trace) = &asked.trace {
        check_trace(trace, &path)?;
    }
    let name = run.name.clone();
    let settings = Settings {
        steps: asked.steps.unwrap_or(STEPS),
        warmup: 3,
        threads: cli::threads(asked.threads),
        gpu: gpu(asked.gpus)?,
        phases: true,
    };
    let report = time(&Preset::of(run), &settings, &World::default())?;
    let Some(phases) = &report.phases else {
        return Ok(Exit::Done);
    };
    screen::result(&bench::text(&name, &settings, phases));
    let (planned, held) = report.memory;
    let held = held.map_or_else(|| "unknown".to_owned(), plan::bytes);
    screen::result(&format!(
        "\nmemory: {} planned for the step, {held} held\n",
        plan::bytes(planned)
    ));
    if let Some(trace) = &asked.trace {
        write_file(trace, phases.trace.as_bytes())?;
        screen::note(&format!(
            "{}: the step as a trace; ui.perfetto.dev shows it",
            trace.display()
        ));
    }
    Ok(Exit::Done)
}

fn check_trace(trace: &Path, run_file: &Path) -> Result<(), Fault> {
    let of_run = fs::canonicalize(run_file).ok();
    if of_run.is_some() && fs::canonicalize(trace).ok() == of_run {
        return Err(Fault::BadInput(format!(
            "--trace {}: is the run file, which the trace would replace; give another name, like trace.json",
            trace.display()
        )));
    }
    try_to_write(trace).map_err(|error| bench::unwritable("--trace", trace, &error))
}

/// Checks that a file can be written, so that no time is spent on results that cannot be kept; does
/// not leave a new file behind.
pub(crate) fn try_to_write(path: &Path) -> io::Result<()> {
    let is_new = !path.try_exists()?;
    spd_files::open_with(OpenOptions::new().append(true).create(true), path)?;
    if is_new {
        fs::remove_file(path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_does_not_replace_the_run_file() {
        let dir = tempfile::tempdir().unwrap();
        let [run, link, other] =
            ["run.toml", "link.toml", "trace.json"].map(|n| dir.path().join(n));
        spd_checkpoint::atomic::write_file(&run, b"steps = 5").unwrap();
        std::os::unix::fs::symlink(&run, &link).unwrap();
        for trace in [&run, &link] {
            let refused = check_trace(trace, &run).unwrap_err().to_string();
            let expected = "is the run file, which the trace would replace; give another name";
            assert!(refused.contains(expected), "{refused}");
        }
        check_trace(&other, &run).unwrap();
        check_trace(&other, &dir.path().join("not there.toml")).unwrap();
        assert_eq!(fs::read_to_string(&run).unwrap(), "steps = 5");
    }

    #[test]
    fn try_to_write_leaves_no_trace() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.json");
        try_to_write(&path).unwrap();
        assert!(!path.try_exists().unwrap());
        spd_checkpoint::atomic::write_file(&path, b"old").unwrap();
        try_to_write(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        for bad in ["", "none/trace.json", "new/", "trace.json/x"] {
            assert!(try_to_write(&dir.path().join(bad)).is_err(), "{bad}");
        }
        assert!(try_to_write(&dir.path().join("x".repeat(300))).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
