//! Finds the first value of a step that is not finite: the clean pass first, then each site in the
//! order of the model, then gradients.

use spd_dataloader::Batch;
use spd_engine::{Alone, Arena, Builder, DType, Store};

use crate::component_model::DataStream;
use crate::data;
use crate::decomposition::{BatchShape, Draws};
use crate::decomposition_task::DecompositionTask;
use crate::fault::Fault;
use crate::parameters::{Group, set_scalars};
use crate::refused_step::{LOOK_AT_TARGET, TRAIN_MORE_GENTLY};
use crate::task::{NonFinite, Task};

/// The first thing of a step that is not finite. The step has just been run, and is not run again
/// afterwards: its arena is given up.
pub(crate) fn first_not_finite(
    task: &mut DecompositionTask,
    store: &mut Store,
    batches: &[Batch],
    step: u64,
) -> Result<NonFinite, Fault> {
    let gradients = task.site_norms(store);
    let scalars = task.scalars(step);
    task.arena = Arena::default();

    let decomposition = &task.decomposition;
    let run = &decomposition.run;
    let mut b = Builder::new();
    let streams = || DataStream::ALL.into_iter().zip(batches);
    for (stream, batch) in streams() {
        let shape = BatchShape {
            stream,
            ..decomposition.shape(batch.rows)
        };
        let clean_pass = decomposition.clean_pass(&mut b, store, shape, &Draws::Counters)?;
        b.output(stream.name("output"), clean_pass.output);
        for (site, values) in decomposition.sites.iter().zip(&clean_pass.sites) {
            let name = |of: &str| stream.name(&format!("{of} {}", site.path()));
            if b.ty(values.input).dtype == DType::F32 {
                b.output(name("input"), values.input);
            }
            b.output(name("logits"), values.logits);
        }
    }
    let mut program = Alone::new(&b, &task.processor)?;
    program.parameters.seed = run.seed;
    program.parameters.step = u32::try_from(step).unwrap_or(u32::MAX);
    set_scalars(&mut program, scalars);
    data::fill_block(&mut program, batches, 0, 1);
    program.run_and_fetch(store)?;
    store.fetch()?;

    let layers = decomposition.target.layers();
    let place = |path: &str| layers.iter().position(|layer| layer.path == path);
    let mut sites: Vec<usize> = (0..decomposition.sites.len()).collect();
    sites.sort_by_key(|&index| place(decomposition.sites[index].path()));
    let path = |index: usize| decomposition.sites[index].path();
    let computed = |name: &str| {
        let mut names = streams().map(|(stream, _)| stream.name(name));
        names.all(|name| {
            !program.output_names().any(|output| output == name)
                || is_finite(program.output(&name, store))
        })
    };
    let stored = |name: &str| {
        store
            .slot(name)
            .is_none_or(|slot| is_finite(&store.read(slot)))
    };

    let target = |what: String| NonFinite {
        what: Some(what),
        advice: LOOK_AT_TARGET,
    };
    let ours = |what: Option<String>| NonFinite {
        what,
        advice: TRAIN_MORE_GENTLY,
    };
    for &index in &sites {
        if !computed(&format!("input {}", path(index))) {
            let what = format!("what the target feeds to site `{}`", path(index));
            return Ok(target(what));
        }
    }
    if !computed("output") {
        return Ok(target("the output of the target itself".into()));
    }
    for &index in &sites {
        let site = &decomposition.sites[index];
        if !stored(&site.v_name()) || !stored(&site.u_name()) {
            return Ok(ours(Some(format!(
                "the components of site `{}`",
                site.path()
            ))));
        }
        if !computed(&format!("logits {}", site.path())) {
            return Ok(ours(Some(format!(
                "the importances of site `{}`",
                site.path()
            ))));
        }
    }
    for &index in &sites {
        let of_site = gradients.iter().filter(|(_, site, _)| *site == index);
        for (group, _, norm) in of_site {
            if !norm.is_finite() {
                let whose = match group {
                    Group::Importance => "the importance function",
                    _ => "the components",
                };
                return Ok(ours(Some(format!(
                    "the gradient of {whose} of site `{}`",
                    path(index)
                ))));
            }
        }
    }
    Ok(ours(None))
}

fn is_finite(values: &[f32]) -> bool {
    values.iter().all(|value| value.is_finite())
}
