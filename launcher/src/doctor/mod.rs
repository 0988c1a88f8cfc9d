//! `spd-launch doctor`: shows resources of this machine for runs and GPUs, what is missing, and
//! whether a GPU works.

mod machine;
mod probes;

use std::path::Path;

use spd_trainer::cuda::{self, DIRECTORIES, Library};

use crate::cli::DoctorArgs;
use crate::exit::Exit;
use crate::screen;
use crate::table::Table;

pub(crate) use probes::probe;

use machine::{Finding, Resources};

/// Prints the findings. A missing GPU or library is no failure, since runs on the CPU need none,
/// unless a GPU was to be probed. It is a failure if no run can start.
pub(crate) fn doctor(asked: &DoctorArgs) -> Exit {
    let dir = std::env::current_dir().unwrap_or_else(|_| Path::new(".").to_owned());
    let findings = Resources::of(&dir).findings();
    screen::result(&text(&findings));
    if asked.deep {
        return probes::deep(asked.gpu);
    }
    if findings.iter().any(|finding| finding.is_fatal) {
        return Exit::Failed;
    }
    Exit::Done
}

fn text(findings: &[Finding]) -> String {
    let mut table = Table::new(&[]);
    for Finding { what, found, .. } in findings {
        table.row([what, found]);
    }
    let troubles = findings.iter().filter_map(|finding| {
        let trouble = finding.trouble?;
        Some(format!(
            "{} ({}): {trouble}.\n",
            finding.what, finding.found
        ))
    });
    let troubles: String = troubles.collect();
    format!("{}{troubles}\n{}", table.text(), gpus_text())
}

fn gpus_text() -> String {
    let mut table = Table::new(&[]);
    for library in Library::ALL {
        let name = library.files()[0];
        match library.found() {
            Some(found) => {
                let version = found.version.as_deref().unwrap_or("no version");
                let path = found.path.to_string_lossy();
                table.row([name, version, &screen::plain(&path)]);
            }
            None => table.row([
                name,
                "not found",
                &format!("needed for {}; {}", library.needed_for(), library.remedy()),
            ]),
        }
    }
    let gpus = match cuda::gpus() {
        Ok(gpus) => gpus,
        Err(reason) => {
            table.row(["GPUs", "none", &reason]);
            Vec::new()
        }
    };
    for (ordinal, gpu) in gpus.iter().enumerate() {
        let (major, minor) = gpu.capability;
        table.row([
            format!("GPU {ordinal}"),
            format!("sm_{major}{minor}"),
            format!("{}, {} MiB", screen::plain(&gpu.name), gpu.bytes >> 20),
        ]);
    }
    format!(
        "{}Searched: the directories in {DIRECTORIES}, the loader's, the CUDA toolkit, the Python environment.\n\
         {}\n",
        table.text(),
        match cuda::lacks(1, false) {
            None => "Runs go to the CPU, or with --gpus 1 to GPU 0.".to_owned(),
            Some(lacks) => format!("Runs go to the CPU; --gpus 1 is refused here: {lacks}."),
        }
    )
}
