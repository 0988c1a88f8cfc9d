//! The figures of a run that has been, drawn from its newest checkpoint.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use spd_checkpoint::{Lock, newest};
use spd_configs::{Precision, Run};
use spd_engine::{Pool, Processor, Store};

use crate::data;
use crate::decomposition::Decomposition;
use crate::decomposition_task::DecompositionTask;
use crate::fault::Fault;
use crate::figures;
use crate::resume;
use crate::state;
use crate::world::World;

/// What [`redraw`] did.
#[derive(Debug)]
pub struct Redrawn {
    /// The step of the checkpoint.
    pub step: u64,
    /// Where the figures are.
    pub directory: PathBuf,
    /// Newer checkpoints that do not hold: where each lies now, and what is wrong with it.
    pub set_aside: Vec<(PathBuf, String)>,
}

/// Draws the figures of the newest good checkpoint of a run directory (`config.toml` is there), on the processor. A run that
/// ended draws the same.
///
/// # Errors
///
/// When the directory is in use, has no checkpoint, or the run's data are not there any more; when the disk refuses.
pub fn redraw(run_dir: &Path, threads: usize) -> Result<Redrawn, Fault> {
    let config = run_dir.join("config.toml");
    let text = spd_files::read_to_string(&config).with_context(|| config.display().to_string())?;
    let run = Run::from_resolved(&text)
        .map_err(|faults| Fault::BadInput(format!("{}: {faults}", config.display())))?;
    // Importances are computed in f32 whatever a step is.
    let run = Run {
        precision: Precision::F32,
        ..run
    };
    let _lock = Lock::take(run_dir)?;
    let root = run_dir.join(resume::CHECKPOINTS);
    let found = newest(&root)?;
    let Some(snapshot) = &found.snapshot else {
        let bad = found.set_aside.first();
        let bad = bad.map(|(path, reason)| format!(" that holds ({}: {reason})", path.display()));
        return Err(Fault::BadInput(format!(
            "{}: has no checkpoint{} to draw from; run it first",
            root.display(),
            bad.unwrap_or_default()
        )));
    };
    let sources = data::open(&run)?;
    let pool = Arc::new(Pool::new(threads)?);
    let processor = Processor::Cpu(Arc::clone(&pool));
    pool.enter(|| {
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run, &mut store)?;
        let mut task = DecompositionTask::new(
            decomposition,
            sources,
            &mut store,
            &processor,
            &World::default(),
        )?;
        task.make_room()?;
        // The target is that of the checkpoint; the data may have been replaced.
        let made_of = resume::data(&run.data);
        let (step, _) = state::restore(snapshot, &mut store, &text, &made_of)?;
        figures::write(&mut task, &mut store, run_dir, step, &mut || true)?;
        Ok(Redrawn {
            step,
            directory: figures::directory(run_dir, step),
            set_aside: found.set_aside.clone(),
        })
    })
}
