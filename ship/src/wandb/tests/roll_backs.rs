//! Void rows under each policy.

use spd_configs::OnRollback;

use super::*;
use crate::sink::{After, RollBack};

const BACK: RollBack = RollBack {
    generation: 2,
    rows: 3,
    step: 3,
};

/// Sends steps 0 to 5, rolls back to 3 by `policy`, and sends the rest.
fn after(policy: OnRollback, faults: &Json) -> Option<(Recorder, Driver, After)> {
    let server = Recorder::with(faults, &[])?;
    let folder = tempfile::tempdir().unwrap();
    let mut run = a_run(folder.path());
    run.tracker.on_rollback = policy;
    let saved = Stamped {
        row: Row::new(2, Kind::Event).with_note("saved"),
        time: 1002.5,
    };
    let (driver, after) = on_runtime(async {
        let mut driver = Driver::new(server.sink());
        driver.open(&run).await;
        driver.metrics(&run, &rows(0..6)).await;
        driver.system(&run, &[saved]).await;
        let mut driver = driver.again(server.sink());
        driver.open(&run).await;
        let after = loop {
            match driver.sink.roll_back(&run, &mut driver.state, BACK).await {
                Ok(after) => break after,
                Err(refusal) => driver.refused(refusal),
            }
        };
        let from = match after {
            After::GoOn => 3,
            After::FromStart => 0,
        };
        driver.metrics(&run, &rows(from..8)).await;
        driver.close(&run, 0).await;
        (driver, after)
    });
    Some((server, driver, after))
}

#[test]
fn a_new_run_has_all_rows_that_hold() {
    for fault in [
        json!([]),
        json!([{"match": "UpsertBucket", "nth": [3, 5], "status": 502, "after_apply": true}]),
    ] {
        let Some((server, driver, after)) = after(OnRollback::NewRun, &fault) else {
            return;
        };
        assert_eq!(after, After::FromStart);
        let (old, new) = (server.run("abcd1234"), server.run("abcd1234-r2"));
        assert_eq!(steps(&new), (0..8).collect::<Vec<u64>>());
        assert_eq!(new["tags"], json!(["a", "b", "resumed-from:abcd1234"]));
        assert_eq!(new["group"], "sweep");
        assert_eq!(new["exitcode"], 0);
        assert_eq!(steps(&old), (0..6).collect::<Vec<u64>>());
        assert_eq!(old["tags"], json!(["a", "b", "superseded-by:abcd1234-r2"]));
        assert_eq!(old["exitcode"], 1);
        assert!(driver.refusals.len() <= 2);
    }
}

#[test]
fn a_rewound_run_has_each_step_once() {
    let Some((server, _, after)) = after(OnRollback::Rewind, &json!([])) else {
        return;
    };
    assert_eq!(after, After::GoOn);
    let found = server.run("abcd1234");
    assert_eq!(steps(&found), (0..8).collect::<Vec<u64>>());
    assert_eq!(found["log"].as_array().unwrap().len(), 1);
    assert_eq!(found["rejected"], json!([]));
    assert_eq!(server.runs().as_object().unwrap().len(), 1);
}

#[test]
fn refused_rewind_makes_a_new_run() {
    for fault in [
        json!({"match": "RewindRun", "nth": [1], "status": 400, "body": {"error": "not in a terminal state"}}),
        json!({"match": "RewindRun", "nth": [1], "status": 200, "body": {"errors": [{"message": "no such field"}]}}),
        json!({"match": "RewindRun", "nth": [1], "status": 200, "body": {"data": {"rewindRun": null}}}),
    ] {
        let Some((server, _, after)) = after(OnRollback::Rewind, &json!([fault])) else {
            return;
        };
        assert_eq!(after, After::FromStart);
        assert_eq!(
            steps(&server.run("abcd1234-r2")),
            (0..8).collect::<Vec<u64>>()
        );
    }
}

#[test]
fn kept_run_continues_after_void_rows() {
    let Some((server, _, after)) = after(OnRollback::Keep, &json!([])) else {
        return;
    };
    assert_eq!(after, After::GoOn);
    let found = server.run("abcd1234");
    assert_eq!(steps(&found), (0..11).collect::<Vec<u64>>());
    let history = lines(&found, "history");
    let trained: Vec<u64> = history
        .iter()
        .map(|line| line["trainer/step"].as_u64().unwrap())
        .collect();
    assert_eq!(trained, [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]);
    let axes = &found["config"]["_wandb"]["value"]["m"];
    assert_eq!(axes[0]["1"], "trainer/step");
    assert_eq!((&axes[1]["2"], &axes[1]["5"]), (&json!("*"), &json!(1)));
}
