//! The scenarios, played by our sink.

use spd_configs::OnRollback;

use super::*;

#[test]
fn an_ordinary_run_is_sent_as_by_the_official_client() {
    let Some(theirs) = Captured::read("first") else {
        return;
    };
    let Some(server) = theirs.server() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let refusals = play(&theirs, &server, &theirs.run(folder.path()), Some(0));
    assert_eq!(refusals, []);
    // `best` was set by hand.
    compare(&theirs, &server, &["best"]);
    let ours = server.exchanges();
    let [a, b] = [&theirs.exchanges, &ours].map(|all| requests(all, "UpsertBucket")[0]);
    let said = a["variables"].as_object().unwrap().iter();
    for (name, value) in said.filter(|(_, value)| !value.is_null()) {
        let ours = &b["variables"][name];
        match name.as_str() {
            "host" | "program" => assert!(ours.is_string(), "{name}"),
            "config" => {
                let [a, b] = [value, ours].map(|config| plain(config.as_str().unwrap()));
                assert!(a["_wandb"]["value"]["t"].is_object());
                assert!(b["_wandb"]["value"]["t"].is_object());
                assert!(b["_wandb"]["value"]["m"].is_array());
            }
            _ => assert_eq!(ours, value, "{name}"),
        }
    }
    let [a, b] = [&theirs.exchanges, &ours].map(|all| requests(all, "CreateRunFiles")[0]);
    for name in ["entity", "project", "run"] {
        assert_eq!(b["variables"][name], a["variables"][name]);
    }
    let [a, b] =
        [&theirs.exchanges, &ours].map(|all| *requests(all, "file_stream").last().unwrap());
    assert_eq!(
        (&b["complete"], &b["exitcode"]),
        (&a["complete"], &a["exitcode"])
    );
    for exchanges in [&theirs.exchanges, &ours] {
        let put = exchanges.iter().filter(|one| one["kind"] == "PUT");
        for headers in put.map(|one| one["request"]["headers"].as_object().unwrap()) {
            let mut names = headers.keys();
            assert!(names.all(|name| !name.eq_ignore_ascii_case("authorization")));
        }
    }
}

#[test]
fn lines_have_the_official_clients_offsets() {
    // The second server supports gzip, and also accepts uncompressed requests.
    for (name, features) in [("chunks", ""), ("gzip", "FILESTREAM_GZIP")] {
        let Some(theirs) = Captured::read(name) else {
            return;
        };
        let Some(server) = Recorder::with(&json!([]), &["--features", features]) else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        play(&theirs, &server, &theirs.run(folder.path()), Some(0));
        compare(&theirs, &server, &[]);
    }
}

#[test]
fn a_lost_answer_has_the_same_request_come_again() {
    let Some(theirs) = Captured::read("ack_lost") else {
        return;
    };
    let Some(server) = theirs.server() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let refusals = play(&theirs, &server, &theirs.run(folder.path()), Some(0));
    assert_eq!(refusals.len(), 1);
    compare(&theirs, &server, &[]);
}

#[test]
fn a_server_that_names_a_time_is_heeded_as_the_official_client_heeds_it() {
    let Some(theirs) = Captured::read("retry_after") else {
        return;
    };
    let Some(server) = theirs.server() else {
        return;
    };
    let times: Vec<f64> = theirs
        .exchanges
        .iter()
        .filter(|one| one["kind"] == "file_stream")
        .map(|one| one["t"].as_f64().unwrap())
        .collect();
    assert!(times[1] - times[0] >= 4.0, "{times:?}");
    let folder = tempfile::tempdir().unwrap();
    let refusals = play(&theirs, &server, &theirs.run(folder.path()), Some(0));
    let after = Some(Duration::from_secs(4));
    assert!(
        matches!(&refusals[..], [Refusal::Later { after: found, .. }] if *found == after),
        "{refusals:?}"
    );
    compare(&theirs, &server, &[]);
}

#[test]
fn a_run_that_fails_or_dies_looks_the_same_as_one_of_the_official_client() {
    let (Some(mut failed), Some(killed)) = (Captured::read("fail"), Captured::read("kill")) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let Some(server) = failed.server() else {
        return;
    };
    play(&failed, &server, &failed.run(folder.path()), Some(1));
    // Its script exits with 3, which is our code for a stopped run.
    assert_eq!(failed.state["exitcode"], 3);
    failed.state["exitcode"] = json!(1);
    // With a single row sent, its summary is of the moment before.
    compare(&failed, &server, &[]);
    let Some(server) = killed.server() else {
        return;
    };
    play(&killed, &server, &killed.run(folder.path()), None);
    compare(&killed, &server, &[]);
    for exchanges in [&killed.exchanges, &server.exchanges()] {
        let streams = requests(exchanges, "file_stream");
        assert!(streams.iter().all(|body| body.get("complete").is_none()));
    }
}

#[test]
fn heartbeat_equals_the_official_clients() {
    let Some(theirs) = Captured::read("idle") else {
        return;
    };
    let Some(server) = theirs.server() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = theirs.run(folder.path());
    let mut driver = Driver::new(server.sink());
    driver.sink.silence = Duration::ZERO;
    on_runtime(async {
        driver.open(&run).await;
        for _ in 0..2 {
            driver.sink.idle(&run, &mut driver.state).await.unwrap();
        }
        driver.metrics(&run, &theirs.rows()).await;
        driver.close(&run, 0).await;
    });
    compare(&theirs, &server, &[]);
    let heartbeats = [&theirs.exchanges, &server.exchanges()].map(|all| {
        let streams = requests(all, "file_stream");
        streams.iter().filter(|body| **body == &json!({})).count()
    });
    assert_eq!(heartbeats, [2, 2]);
}

#[test]
fn resumed_run_continues_at_the_official_clients_offset() {
    let (Some(first), Some(theirs)) = (Captured::read("first"), Captured::read("resume")) else {
        return;
    };
    let Some(server) = theirs.server() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let (run, again) = (first.run(folder.path()), theirs.run(folder.path()));
    let rows = theirs.rows();
    let (before, after) = rows.split_at(first.rows().len());
    on_runtime(async {
        let mut driver = Driver::new(server.sink());
        driver.open(&run).await;
        driver.metrics(&run, before).await;
        driver.close(&run, 0).await;
        // Its counts are lost: earlier lines are made again, and not sent.
        let mut driver = Driver::new(server.sink());
        driver.open(&again).await;
        driver.metrics(&again, before).await;
        driver.metrics(&again, after).await;
        driver.close(&again, 0).await;
    });
    let ours = server.exchanges();
    let [a, b] = [&theirs.exchanges, &ours].map(|all| *chunks(all, HISTORY_LINES).last().unwrap());
    assert_eq!(a, b);
    let [a, b] = [&theirs.exchanges, &ours].map(|all| {
        let asked = requests(all, "RunResumeStatus")[0]["variables"].as_object();
        asked.unwrap().keys().cloned().collect::<Vec<_>>()
    });
    assert_eq!(a, b);
    // Theirs drops values that are not numbers; `best` was set by hand.
    compare(&theirs, &server, &["odd", "best"]);
}

#[test]
fn a_run_is_rewound_as_the_official_client_rewinds_it() {
    let (Some(resumed), Some(theirs)) = (Captured::read("resume"), Captured::read("rewind")) else {
        return;
    };
    let Some(server) = theirs.server() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let mut run = theirs.run(folder.path());
    run.tracker.on_rollback = OnRollback::Rewind;
    let rows = theirs.rows();
    let to = crate::sink::RollBack {
        generation: 1,
        rows: 3,
        step: 3,
    };
    on_runtime(async {
        let mut driver = Driver::new(server.sink());
        driver.open(&run).await;
        driver.metrics(&run, &resumed.rows()).await;
        driver.close(&run, 0).await;
        driver.open(&run).await;
        let told = driver.sink.roll_back(&run, &mut driver.state, to).await;
        assert_eq!(told, Ok(crate::sink::After::GoOn));
        driver.metrics(&run, &rows[3..]).await;
        driver.close(&run, 0).await;
    });
    let ours = server.exchanges();
    let [a, b] = [&theirs.exchanges, &ours].map(|all| &requests(all, "RewindRun")[0]["variables"]);
    let value = |of: &Json| of["metricValue"].as_f64();
    assert_eq!(value(a), value(b));
    for name in ["runName", "project", "metricName"] {
        assert_eq!(a[name], b[name]);
    }
    let last = |all: &[Json]| {
        let streams = requests(all, "file_stream").into_iter();
        let mut chunks = streams.filter_map(|body| body["files"].get(HISTORY_LINES));
        chunks.next_back().map(|chunk| chunk["offset"].clone())
    };
    assert_eq!(last(&theirs.exchanges), last(&ours));
    // Theirs has the summary of its last two rows only.
    let own = [
        "grads",
        "inf",
        "lr",
        "odd",
        "sample",
        "train/tokens",
        "best",
    ];
    compare(&theirs, &server, &own);
}

#[test]
fn the_page_is_announced_as_by_the_official_client() {
    let Some(theirs) = Captured::read("media") else {
        return;
    };
    let Some(server) = theirs.server() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = theirs.run(folder.path());
    // Lists of images and tables have no counterpart in ours.
    let page = lines(&theirs.state, "history")[0]["html"].clone();
    let row = row_of(&json!({"_step": 0, "_timestamp": 1000.0, "html": page}));
    on_runtime(async {
        let mut driver = Driver::new(server.sink());
        driver.open(&run).await;
        driver.metrics(&run, &[row]).await;
    });
    let ours = server.runs()[PLACE].take();
    let ours = lines(&ours, "history")[0]["html"].take();
    let form = |value: &Json| {
        let path = value["path"].as_str().unwrap();
        let hash = value["sha256"].as_str().unwrap();
        let mut names: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
        names.sort_unstable();
        (
            names,
            path.replace(&hash[..20], "HASH"),
            value["_type"].clone(),
        )
    };
    assert_eq!(form(&ours), form(&page));
}

#[test]
fn an_axis_is_declared_as_the_official_client_declares_it() {
    let Some(theirs) = Captured::read("metrics") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let mut run = theirs.run(folder.path());
    run.tracker.on_rollback = OnRollback::Keep;
    let ours = crate::wandb::labels::config(&run);
    let [theirs, ours] =
        [&theirs.state["config"], &ours].map(|config| &config["_wandb"]["value"]["m"]);
    // Theirs has the axis, a value by its name, and a pattern; ours the axis and a pattern.
    let renamed = json!([{"1": "trainer/step", "6": theirs[0]["6"], "7": theirs[0]["7"]}, {
        "2": "*", "5": theirs[2]["5"], "6": theirs[2]["6"], "7": theirs[2]["7"],
    }]);
    assert_eq!(theirs[0]["1"], "tokens");
    assert_eq!(ours, &renamed);
}
