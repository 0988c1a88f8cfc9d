//! W&B's own client on a run made by ours. `SPD_WANDB` names a folder that `wandb` is installed in.

use super::*;

const RESUME: &str = "
import wandb
run = wandb.init(project='spd', id='abcd1234', resume='must', settings=wandb.Settings(console='off'))
assert run.resumed, 'it takes the run for one that never began'
assert run.starting_step == 5, run.starting_step
run.log({'loss/total': 0.125})
run.finish()
";

#[test]
fn the_official_client_goes_on_with_a_run_of_ours() {
    let test = "the_official_client_goes_on_with_a_run_of_ours";
    let Some(packages) = std::env::var_os("SPD_WANDB") else {
        eprintln!("skipped: {test}: SPD_WANDB names no folder with wandb");
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
    let ended = Command::new("python3")
        .args(["-c", RESUME])
        .current_dir(folder.path())
        .env("PYTHONPATH", packages)
        .env("WANDB_BASE_URL", server.address())
        .env("WANDB_API_KEY", KEY)
        .env("WANDB_SILENT", "true")
        .status();
    assert!(ended.unwrap().success());
    let found = server.run("abcd1234");
    assert_eq!(steps(&found), [0, 1, 2, 3, 4, 5]);
    assert_eq!(lines(&found, "history")[5]["loss/total"], 0.125);
    assert_eq!(found["config"]["lr"], json!({"value": 3e-4}));
    assert_eq!(found["tags"], json!(["a", "b"]));
}
