//! `spd-launch profile`: where the time of a run's step goes, as tables and as a trace.

use spd_checkpoint::atomic::write_file;
use spd_configs::Run;
use spd_trainer::Fault;
use spd_trainer::bench::{Preset, Settings, time};

use crate::cli::{self, ProfileArgs};
use crate::exit::Exit;
use crate::run::gpu;
use crate::{bench, plan, screen};

/// Steps that are profiled where none are asked for.
const STEPS: usize = 20;

/// Profiles the step of a run, on random weights and data of its shapes: nothing of the run is read but its file.
///
/// # Errors
///
/// When the run cannot be read or its programs not built, before anything is written; when the trace cannot be written.
pub(crate) fn profile(asked: &ProfileArgs) -> Result<Exit, Fault> {
    let bad = |faults: spd_configs::Faults| Fault::BadInput(faults.to_string());
    let path = spd_configs::locate(&asked.config).map_err(bad)?;
    let run = Run::load(&path, &asked.set).map_err(bad)?;
    spd_trainer::check_precision(&run, asked.gpus > 0)?;
    let name = run.name.clone();
    let settings = Settings {
        steps: asked.steps.unwrap_or(STEPS),
        warmup: 3,
        threads: cli::threads(asked.threads),
        gpu: gpu(asked.gpus)?,
        phases: true,
    };
    let report = time(&Preset::of(run), &settings)?;
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
