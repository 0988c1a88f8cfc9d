//! W&B's own client on a run made by ours. `SPD_WANDB` names a folder that `wandb` is installed in, with `pillow`.

use std::ffi::OsString;

use super::*;

const RESUME: &str = "
import wandb
run = wandb.init(project='spd', id='abcd1234', resume='must', settings=wandb.Settings(console='off'))
assert run.resumed, 'it takes the run for one that never began'
assert run.starting_step == 5, run.starting_step
run.log({'loss/total': 0.125})
run.finish()
";

/// Python with W&B's own client.
pub(super) struct Python(OsString);

impl Python {
    /// Where it is; that there is none is said.
    pub(super) fn found(test: &str) -> Option<Self> {
        let packages = std::env::var_os("SPD_WANDB");
        let has = |packages: &OsString, name| Path::new(packages).join(name).is_dir();
        let found = packages.filter(|packages| has(packages, "wandb") && has(packages, "PIL"));
        if found.is_none() {
            eprintln!("skipped: {test}: SPD_WANDB names no folder with wandb and pillow");
        }
        found.map(Self)
    }

    /// Runs in `folder` against a server, and returns the exit code.
    pub(super) fn run(&self, server: &Recorder, folder: &Path, arguments: &[&str]) -> Option<i32> {
        let ended = Command::new("python3")
            .args(arguments)
            .current_dir(folder)
            .env("PYTHONPATH", &self.0)
            .env("HOME", folder)
            .env("WANDB_BASE_URL", server.address())
            .env("WANDB_API_KEY", KEY)
            .env("WANDB_SILENT", "true")
            .status();
        ended.unwrap().code()
    }
}

#[test]
fn the_official_client_goes_on_with_a_run_of_ours() {
    let test = "the_official_client_goes_on_with_a_run_of_ours";
    let Some(python) = Python::found(test) else {
        return;
    };
    let Some(server) = Recorder::start(test) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    on_runtime(async {
        let mut driver = Driver::new(server.sink());
        driver.open(&run).await;
        driver.metrics(&run, &rows(0..5)).await;
        driver.close(&run, 0).await;
    });
    let ended = python.run(&server, folder.path(), &["-c", RESUME]);
    assert_eq!(ended, Some(0));
    let found = server.run("abcd1234");
    assert_eq!(steps(&found), [0, 1, 2, 3, 4, 5]);
    assert_eq!(lines(&found, "history")[5]["loss/total"], 0.125);
    assert_eq!(found["config"]["lr"], json!({"value": 3e-4}));
    assert_eq!(found["tags"], json!(["a", "b"]));
}
