//! From a run directory to a checkpoint of the reference.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use safetensors::tensor::TensorView;
use spd_checkpoint::{Dtype, Tensor};
use spd_files::atomic::{make_dirs, write_file};

use super::names::{self, MOMENTS, TARGET};
use super::torch_save::{self, Saved};
use crate::again::{Newest, newest};
use crate::fault::Fault;
use crate::networks::{LayerKind, Target, pre_identity, shipped};
use crate::run_file::{Run, WeightsFile, Written};
use crate::sites::{Site, resolve};

/// The files that [`export`] wrote.
#[derive(Debug)]
pub struct Exported {
    /// The step of the checkpoint.
    pub step: u64,
    /// The file of tensors, `model_<step>.pth`.
    pub file: PathBuf,
    /// Tensors in it.
    pub tensors: usize,
    /// Notes on `final_config.yaml`, a line each.
    pub notes: Vec<String>,
}

/// The directory of the target, beside the file of tensors.
const TARGET_DIR: &str = "target";

/// Writes the newest good checkpoint of a run directory (`config.toml` is there) into the directory
/// `out` as the reference would have it: `model_<step>.pth`, the `final_config.yaml` that its
/// `ComponentModel.from_pretrained` reads beside it, and the target that this one names in the
/// directory `target`. The run's `config.toml` is there too. The run is left as it is.
///
/// # Errors
///
/// Bad input, when there is no good checkpoint; failures when the disk refuses.
pub fn export(run_dir: &Path, out: &Path) -> Result<Exported, Fault> {
    let config = run_dir.join("config.toml");
    let run = Run::load_resolved(&config)?;
    let Newest { step, snapshot, .. } = newest(run_dir, "export")?;
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
    let file = out.join(format!("model_{step}.pth"));
    make_dirs(out).with_context(|| format!("{}: cannot be made", out.display()))?;
    write_torch(&file, &saved, &storages)?;
    written(&out.join("config.toml"), &[run.to_toml().as_bytes()])?;
    let tensors = saved.len();
    let notes = open_there(&run, &sites, out, saved, &storages)?;
    Ok(Exported {
        step,
        file,
        tensors,
        notes,
    })
}

fn written(path: &Path, parts: &[&[u8]]) -> Result<(), Fault> {
    write_file(path, parts).with_context(|| format!("{}: cannot be written", path.display()))?;
    Ok(())
}

/// Writes a file of `torch.save`; names in it begin with its own.
fn write_torch(path: &Path, saved: &[Saved<'_>], storages: &[&[u8]]) -> Result<(), Fault> {
    let top = path.file_stem().unwrap_or_default().to_string_lossy();
    let bytes = torch_save::bytes(&top, saved, storages).map_err(|why| anyhow!(why))?;
    written(path, &[&bytes])
}

/// Writes `final_config.yaml`, and the target that it names, and returns what there is to say of
/// them.
fn open_there(
    run: &Run,
    sites: &[Site],
    out: &Path,
    saved: Vec<Saved<'_>>,
    storages: &[&[u8]],
) -> Result<Vec<String>, Fault> {
    let dir = std::path::absolute(out.join(TARGET_DIR));
    let dir = dir.with_context(|| format!("{}: has no absolute path", out.display()))?;
    let (mut own, mut identity) = (Vec::new(), Vec::new());
    for site in sites {
        match site.layer.kind {
            LayerKind::Identity => {
                let before = site.path().strip_suffix(&pre_identity(""));
                identity.push((before.unwrap_or(site.path()), site.components));
            }
            _ => own.push((site.path(), site.components)),
        }
    }
    let Written {
        config,
        target,
        left_out,
    } = match run.for_reference(&own, &identity, &dir) {
        Ok(written) => written,
        Err(why) => {
            return Ok(vec![format!(
                "no final_config.yaml is written, since the reference has no class to open this target with: {why}"
            )]);
        }
    };
    let make =
        |dir: &Path| make_dirs(dir).with_context(|| format!("{}: cannot be made", dir.display()));
    make(&dir)?;
    for (name, text) in &target.texts {
        written(&dir.join(name), &[text.as_bytes()])?;
    }
    let bare: Vec<Saved<'_>> = saved
        .into_iter()
        .filter_map(|saved| {
            let name = saved.name.strip_prefix(TARGET)?.to_owned();
            Some(Saved { name, ..saved })
        })
        .collect();
    match &target.weights {
        WeightsFile::Torch(path) => {
            let path = dir.join(path);
            make(path.parent().unwrap_or(&dir))?;
            write_torch(&path, &bare, storages)?;
        }
        WeightsFile::Safetensors => {
            let path = dir.join("model.safetensors");
            written(&path, &[&safetensors_of(&bare, storages)?])?;
        }
    }
    written(&out.join("final_config.yaml"), &[config.as_bytes()])?;
    let mut notes = Vec::new();
    if !left_out.is_empty() {
        notes.push(format!(
            "final_config.yaml is without what the reference has no word for: {}",
            left_out.join(", ")
        ));
    }
    if run.importance.kind.kind().is_over_all_sites() {
        notes.push(
            "one importance function over all sites is of the reference's branch `dev`: its `main` does not open the checkpoint"
                .to_owned(),
        );
    }
    Ok(notes)
}

/// The tensors as Hugging Face's library takes them.
fn safetensors_of(saved: &[Saved<'_>], storages: &[&[u8]]) -> Result<Vec<u8>, Fault> {
    let views = saved.iter().map(|saved| {
        let dtype = match saved.dtype {
            Dtype::F64 => safetensors::Dtype::F64,
            Dtype::F16 => safetensors::Dtype::F16,
            Dtype::Bf16 => safetensors::Dtype::BF16,
            _ => safetensors::Dtype::F32,
        };
        let view = TensorView::new(dtype, saved.dims.to_vec(), storages[saved.storage])?;
        Ok((&*saved.name, view))
    });
    let views: Result<Vec<_>, safetensors::SafeTensorError> = views.collect();
    // Some of its versions refuse a file that does not say who wrote it.
    let said = [("format".to_owned(), "pt".to_owned())];
    let bytes = views.and_then(|views| safetensors::serialize(views, Some(said.into())));
    Ok(bytes.context("the target's weights")?)
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
