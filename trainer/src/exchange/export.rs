//! From a run directory to a checkpoint of the reference.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use spd_checkpoint::{Dtype, Tensor, load, look, step_path};
use spd_configs::Run;
use spd_files::atomic::{make_dir, write_file};

use super::names::{self, MOMENTS, TARGET};
use super::torch_save::{self, Saved};
use crate::fault::Fault;
use crate::resume::CHECKPOINTS;
use crate::sites::{Site, resolve};
use crate::target_models::{Target, shipped};

/// What [`export`] wrote.
#[derive(Debug)]
pub struct Exported {
    /// The step of the checkpoint.
    pub step: u64,
    /// The file of tensors, `model_<step>.pth`.
    pub file: PathBuf,
    /// Tensors in it.
    pub tensors: usize,
}

/// Writes the newest good checkpoint of a run directory (`config.toml` is there) into the directory `out` as the reference would
/// have it, and the run's `config.toml` beside it. The run is left as it is.
///
/// # Errors
///
/// Bad input, when there is no good checkpoint; failures when the disk refuses.
pub fn export(run_dir: &Path, out: &Path) -> Result<Exported, Fault> {
    let config = run_dir.join("config.toml");
    let run = Run::load_resolved(&config).map_err(|faults| Fault::BadInput(faults.to_string()))?;
    let root = run_dir.join(CHECKPOINTS);
    let found = look(&root)?;
    let Some((step, _)) = found.newest else {
        let bad = found.damaged.first();
        let bad = bad.map(|(path, reason)| format!(" that holds ({}: {reason})", path.display()));
        return Err(Fault::BadInput(format!(
            "{}: has no checkpoint{} to export; run it first",
            root.display(),
            bad.unwrap_or_default()
        )));
    };
    let snapshot = load(&step_path(&root, step))?;
    let target = shipped(&run.target.model)?;
    let sites = resolve(&run.decomposition, &target.layers())?;
    let tensors: Vec<Tensor> = snapshot.tensors;
    let transposed = transposed(&run, &*target, &sites, &tensors)?;
    let own = tensors
        .iter()
        .filter(|tensor| !tensor.name.starts_with(MOMENTS));
    let all: Vec<&Tensor> = own.chain(&transposed).collect();
    let mut saved: Vec<Saved<'_>> = (0..)
        .zip(&all)
        .map(|(storage, tensor)| of(tensor, names::theirs(&tensor.name), storage))
        .collect();
    for (name, of_name) in again(&*target, &sites) {
        let at = all.iter().position(|tensor| tensor.name == of_name);
        let at = at.with_context(|| format!("the checkpoint has no tensor `{of_name}`"))?;
        saved.push(of(all[at], name, at));
    }
    let storages: Vec<&[u8]> = all.iter().map(|tensor| &*tensor.bytes).collect();
    let top = format!("model_{step}");
    let bytes = torch_save::bytes(&top, &saved, &storages).map_err(|why| anyhow!(why))?;
    let file = out.join(format!("{top}.pth"));
    let written = |path: &Path, bytes: &[u8]| {
        write_file(path, &[bytes]).with_context(|| format!("{}: cannot be written", path.display()))
    };
    make_dir(out).with_context(|| format!("{}: cannot be made", out.display()))?;
    written(&file, &bytes)?;
    written(&out.join("config.toml"), run.to_toml().as_bytes())?;
    Ok(Exported {
        step,
        file,
        tensors: saved.len(),
    })
}

fn of<'a>(tensor: &'a Tensor, name: String, storage: usize) -> Saved<'a> {
    Saved {
        name,
        dtype: tensor.dtype,
        dims: &tensor.shape,
        storage,
    }
}

/// Tensors that the reference has under a second name: that name, and ours.
fn again(target: &dyn Target, sites: &[Site]) -> Vec<(String, String)> {
    let biases = sites.iter().filter(|site| site.layer.bias).map(|site| {
        let bias = format!("_components.{}.bias", site.dashed());
        (bias, format!("{TARGET}{}.bias", site.path()))
    });
    names::shared(target).chain(biases).collect()
}

/// The components of a site that shares those of another one, its transposes.
fn transposed(
    run: &Run,
    target: &dyn Target,
    sites: &[Site],
    tensors: &[Tensor],
) -> Result<Vec<Tensor>, Fault> {
    let Some([first, second]) = tied(run, target, sites) else {
        return Ok(Vec::new());
    };
    let pairs = [
        (second.v_name(), first.u_name()),
        (second.u_name(), first.v_name()),
    ];
    let made = pairs.into_iter().map(|(name, of)| {
        let tensor = tensors.iter().find(|tensor| tensor.name == of);
        let tensor = tensor.with_context(|| format!("the checkpoint has no tensor `{of}`"))?;
        Ok(transpose(tensor, name))
    });
    made.collect()
}

/// The two sites that share their components, if there are.
pub(super) fn tied<'s>(run: &Run, target: &dyn Target, sites: &'s [Site]) -> Option<[&'s Site; 2]> {
    let pair = target.tied().filter(|_| run.decomposition.tied)?;
    let [first, second] = pair.map(|path| sites.iter().find(|site| site.path() == path));
    Some([first?, second?])
}

/// The transpose of a matrix, under a name.
pub(super) fn transpose(of: &Tensor, name: String) -> Tensor {
    let size = Dtype::bytes(of.dtype);
    let (rows, columns) = match of.shape[..] {
        [rows, columns] => (rows, columns),
        _ => (of.bytes.len() / size, 1),
    };
    let mut bytes = Vec::with_capacity(of.bytes.len());
    for column in 0..columns {
        for row in 0..rows {
            let at = (row * columns + column) * size;
            bytes.extend_from_slice(&of.bytes[at..at + size]);
        }
    }
    Tensor {
        name,
        dtype: of.dtype,
        shape: vec![columns, rows],
        bytes,
        is_frozen: of.is_frozen,
    }
}
