//! A server has each row once in the end, whatever it answers.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::super::media::tests::SMALL;
use super::*;

/// Sends twelve steps in three parts; returns the state of the server, and the refusals.
fn after(faults: &Json) -> Option<(Json, Vec<Refusal>)> {
    let server = Recorder::with(faults, &[])?;
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    let mut driver = Driver::new(server.sink());
    on_runtime(async {
        driver.open(&run).await;
        for from in [0, 4, 8] {
            driver.metrics(&run, &rows(from..from + 4)).await;
        }
        driver.close(&run, 0).await;
    });
    let mut found = server.run("abcd1234");
    // The number of upserts does not matter.
    found["upserts"] = Json::Null;
    Some((found, driver.refusals))
}

#[test]
fn each_row_arrives_once_for_any_answers() {
    let Some((straight, _)) = after(&json!([])) else {
        return;
    };
    assert_eq!(steps(&straight), (0..12).collect::<Vec<u64>>());
    let status =
        |matches: &str, status: u16| json!({"match": matches, "nth": [1, 3], "status": status});
    let mut faults = vec![
        (
            json!({"match": "file_stream", "nth": [2], "status": 502, "after_apply": true}),
            "Later",
        ),
        (
            json!({"match": "file_stream", "nth": [2], "drop": true}),
            "Later",
        ),
        (
            json!({"match": "file_stream", "nth": [2], "drop": true, "after_apply": true}),
            "Later",
        ),
        (
            json!({"match": "UpsertBucket", "nth": [1], "status": 502, "after_apply": true}),
            "Later",
        ),
        (
            json!({"match": "UpsertBucket", "nth": [1, 2], "drop": true}),
            "Later",
        ),
        (status("UpsertBucket", 500), "Later"),
        (status("UpsertBucket", 401), "Unauthorized"),
        (status("UpsertBucket", 404), "Unauthorized"),
    ];
    for answer in [408, 409, 425, 429, 500, 502, 503, 504] {
        faults.push((status("file_stream", answer), "Later"));
    }
    for (answer, means) in [
        (401, "Unauthorized"),
        (403, "Unauthorized"),
        (404, "Gone"),
        (410, "Gone"),
        (413, "TooLarge"),
        (400, "Invalid"),
        (422, "Invalid"),
    ] {
        faults.push((status("file_stream", answer), means));
    }
    for (fault, means) in faults {
        let (found, refusals) = after(&json!([fault])).unwrap();
        assert_eq!(found, straight, "{fault}");
        let refusal = format!("{:?}", refusals[0]);
        assert!(refusal.starts_with(means), "{fault}: {refusal}");
    }
}

#[test]
fn a_server_says_when_to_come_back() {
    let fault = json!([{"match": "file_stream", "nth": [1], "status": 429, "headers": {"Retry-After": "7"}}]);
    let Some((_, refusals)) = after(&fault) else {
        return;
    };
    let [Refusal::Later { after, .. }] = &refusals[..] else {
        panic!("{refusals:?}");
    };
    assert_eq!(*after, Some(Duration::from_secs(7)));
}

#[test]
fn a_line_that_is_not_taken_leaves_its_number() {
    // Of twelve steps, those from 4 on are halved down to step 6: 4-7 no, 4-5 yes, 6-7 no, 6 no,
    // its placeholder yes.
    let fault = json!([{"match": "file_stream", "nth": [2, 4, 5], "status": 400}]);
    let Some((found, _)) = after(&fault) else {
        return;
    };
    assert_eq!(steps(&found), (0..12).collect::<Vec<u64>>());
    let history = lines(&found, "history");
    assert_eq!(
        history[6],
        json!({"_step": 6, "_timestamp": 1006, "_runtime": 6})
    );
    assert_eq!(history[7]["loss/total"], 0.125);
    assert_eq!(found["rejected"], json!([]));
}

#[test]
fn a_line_that_is_too_long_is_refused_before_it_is_sent() {
    let Some(server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    let mut sent = rows(0..4);
    let text = spd_tracker::Value::Text("x".repeat(11 << 20));
    sent[2].row = sent[2].row.clone().with("said", text);
    let mut driver = Driver::new(server.sink());
    on_runtime(async {
        driver.open(&run).await;
        driver.metrics(&run, &sent).await;
    });
    let found = server.run("abcd1234");
    assert_eq!(steps(&found), [0, 1, 2, 3]);
    assert_eq!(lines(&found, "history")[2].get("loss/total"), None);
    assert_eq!(lines(&found, "history")[3]["loss/total"], 0.25);
}

#[test]
fn a_send_is_cut_into_requests_that_count_together() {
    let fault = json!([{"match": "file_stream", "nth": [2], "status": 503}]);
    let Some(server) = Recorder::with(&fault, &[]) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    let mut sent = rows(0..3);
    for stamped in &mut sent {
        let text = spd_tracker::Value::Text("x".repeat(5 << 20));
        stamped.row = stamped.row.clone().with("said", text);
    }
    let mut driver = Driver::new(server.sink());
    on_runtime(async {
        driver.open(&run).await;
        driver.metrics(&run, &sent).await;
    });
    assert_eq!(driver.refusals.len(), 1);
    assert_eq!(steps(&server.run("abcd1234")), [0, 1, 2]);
}

#[test]
fn a_key_is_asked_for_and_found_later() {
    let Some(server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    let address = server.address();
    let variables = [("WANDB_BASE_URL", address.as_str())];
    let mut sink = Wandb::of(
        Environment::of(&variables, Some(folder.path())),
        Arc::default(),
    );
    let mut state = State::default();
    on_runtime(async {
        let Err(Refusal::Unauthorized { why }) = sink.open(&run, &mut state).await else {
            panic!("there is no key");
        };
        let netrc = folder.path().join(".netrc");
        let places = format!(
            "{} or {}",
            netrc.display(),
            folder.path().join("_netrc").display()
        );
        assert_eq!(
            why,
            format!(
                "no key for 127.0.0.1: WANDB_API_KEY is not set, and no `machine 127.0.0.1` is in {places}"
            )
        );
        crate::wandb::tests::put(
            netrc,
            format!("machine 127.0.0.1 login user password {KEY}\n"),
        )
        .unwrap();
        sink.open(&run, &mut state).await.unwrap();
    });
}

#[test]
fn offline_mode_sends_nothing() {
    for mode in ["offline", "disabled", "dryrun"] {
        let environment = Environment::of(&[("WANDB_MODE", mode), ("WANDB_API_KEY", KEY)], None);
        let mut sink = Wandb::of(environment, Arc::default());
        let run = a_run(Path::new("/nowhere"));
        let refused = on_runtime(sink.open(&run, &mut State::default()));
        let why = format!("WANDB_MODE is {mode}: nothing is sent");
        assert_eq!(sink.off(), Some(why.clone()));
        assert_eq!(refused, Err(Refusal::Unauthorized { why }));
    }
    let online = Environment::of(&[("WANDB_MODE", "online")], None);
    assert_eq!(Wandb::of(online, Arc::default()).off(), None);
}

#[test]
fn a_server_that_repeats_the_key_does_not_have_us_repeat_it() {
    // The secret as sent, as decoded, and a part of each, behind so much text that it is cut.
    let sent = STANDARD.encode(format!("api:{KEY}"));
    let quoted = [KEY, &sent, &KEY[7..], &sent[..sent.len() - 9]];
    for (form, before) in quoted
        .iter()
        .flat_map(|form| [(form, 0), (form, 150), (form, 290)])
    {
        let text = format!("{}{form} is wrong", "x ".repeat(before / 2));
        let fault = json!([
            {"match": "UpsertBucket", "nth": [1], "status": 401, "body": {"error": text}},
            {"match": "UpsertBucket", "nth": [2], "status": 200, "body": {"errors": [{"message": text}]}},
            {"match": "UpsertBucket", "nth": [3], "status": 200, "body": {"data": {"you": text}}},
            {"match": "file_stream", "nth": [1], "status": 503, "body": {"error": text}},
            {"match": "file_stream", "nth": [2], "status": 200, "body": {"errors": text}},
        ]);
        let Some((_, refusals)) = after(&fault) else {
            return;
        };
        assert_eq!(refusals.len(), 5);
        let refusals = format!("{refusals:?}");
        for form in [KEY, &sent] {
            let hint = |at: usize| {
                form.get(at..at + 8)
                    .is_some_and(|part| refusals.contains(part))
            };
            assert!(!(0..form.len()).any(hint), "{refusals}");
        }
        assert!(
            before > 0 || refusals.contains("... is wrong"),
            "{refusals}"
        );
    }
}

#[test]
fn a_good_status_with_nonsense_takes_nothing() {
    let Some((straight, _)) = after(&json!([])) else {
        return;
    };
    let page = "<html>please log in</html>";
    for nonsense in [
        json!(page),
        json!([]),
        json!(null),
        json!(7),
        json!({"error": "no"}),
    ] {
        let answer = |matches: &str, nth: u32| json!({"match": matches, "nth": [nth], "status": 200, "body": nonsense});
        let faults = json!([
            answer("UpsertBucket", 1),
            answer("file_stream", 2),
            // The last request, with the end of the run.
            answer("file_stream", 5),
        ]);
        let (found, refusals) = after(&faults).unwrap();
        assert_eq!(found, straight, "{nonsense}");
        assert_eq!(refusals.len(), 3, "{nonsense}: {refusals:?}");
        let all = refusals
            .iter()
            .zip([json!({"error": "no"}) == nonsense, false, false]);
        for (refusal, is_said) in all {
            let Refusal::Later { why, .. } = refusal else {
                assert!(is_said, "{nonsense}: {refusal:?}");
                continue;
            };
            let advice = "; is WANDB_BASE_URL the address of a W&B server?";
            assert!(why.ends_with(advice), "{why}");
        }
    }
    // Answers of the recorded server, and of others.
    for good in [
        json!("<empty>"),
        json!({}),
        json!({"exitcode": null, "limits": {}, "error": null}),
    ] {
        let fault = json!([{"match": "file_stream", "nth": "all", "status": 200, "body": good, "after_apply": true}]);
        let (found, refusals) = after(&fault).unwrap();
        assert_eq!((found, refusals), (straight.clone(), Vec::new()), "{good}");
    }
}

#[test]
fn a_run_has_no_name_that_is_a_key_or_moves_the_cursor() {
    for name in [KEY, "a\u{1b}[2Jb", "", &"x".repeat(1000)] {
        let bucket =
            json!({"name": name, "id": name, "project": {"name": name, "entity": {"name": name}}});
        let body = json!({"data": {"upsertBucket": {"bucket": bucket, "inserted": true}}});
        let fault = json!([{"match": "UpsertBucket", "nth": "all", "status": 200, "body": body}]);
        let Some(server) = Recorder::with(&fault, &[]) else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        let run = a_run(folder.path());
        let mut driver = Driver::new(server.sink());
        on_runtime(driver.open(&run));
        let page = driver.sink.page(&driver.state).unwrap();
        let state = serde_json::to_string(&driver.state).unwrap();
        assert!(
            !page.contains(KEY) && !state.contains(KEY),
            "{page} {state}"
        );
        assert!(
            page.len() < 200 && !page.contains(char::is_control),
            "{page}"
        );
    }
}

#[test]
fn a_deleted_run_is_made_again_under_another_name() {
    let words = "run abcd1234 was previously created and deleted; try a new run name";
    let body = json!({"errors": [{"message": words}]});
    for status in [409, 200] {
        let fault = json!([{"match": "UpsertBucket", "nth": [2], "status": status, "body": body}]);
        let Some(server) = Recorder::with(&fault, &[]) else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        let run = a_run(folder.path());
        let mut driver = Driver::new(server.sink());
        on_runtime(async {
            assert!(!driver.open(&run).await);
            driver.metrics(&run, &rows(0..3)).await;
            assert!(driver.open(&run).await);
            driver.metrics(&run, &rows(0..5)).await;
        });
        assert_eq!(steps(&server.run("abcd1234-2")), [0, 1, 2, 3, 4]);
        assert_eq!(server.run("abcd1234-2")["group"], "sweep");
    }
}

#[test]
fn a_server_that_lost_the_run_gets_all_rows_again() {
    let Some(mut server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    let mut driver = Driver::new(server.sink());
    on_runtime(async {
        driver.open(&run).await;
        driver.metrics(&run, &rows(0..3)).await;
    });
    server.forget();
    on_runtime(async {
        let refused = driver
            .sink
            .send_metrics(&run, &mut driver.state, &rows(3..4))
            .await;
        // The connection is to the stopped server.
        let refused = match refused {
            Err(Refusal::Later { .. }) => {
                driver
                    .sink
                    .send_metrics(&run, &mut driver.state, &rows(3..4))
                    .await
            }
            other => other,
        };
        assert!(matches!(refused, Err(Refusal::Gone { .. })), "{refused:?}");
        assert!(driver.open(&run).await);
        driver.metrics(&run, &rows(0..4)).await;
    });
    let found = server.run("abcd1234");
    assert_eq!(steps(&found), [0, 1, 2, 3]);
    assert_eq!(found["tags"], json!(["a", "b"]));
}

#[test]
fn files_follow_rows_and_do_not_hold_them_up() {
    for (fault, arrives) in [
        (json!({"match": "PUT", "nth": [1, 2], "status": 403}), true),
        (json!({"match": "PUT", "nth": "all", "status": 403}), false),
        (json!({"match": "PUT", "nth": [1], "status": 500}), true),
        (json!({"match": "PUT", "nth": [1], "status": 400}), false),
        (
            json!({"match": "CreateRunFiles", "nth": [1], "status": 500}),
            true,
        ),
        (
            json!({"match": "CreateRunFiles", "nth": [1], "status": 200, "body": {"errors": [{"message": "no"}]}}),
            true,
        ),
    ] {
        let Some(server) = Recorder::with(&json!([fault]), &[]) else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        crate::wandb::tests::put(folder.path().join("a.png"), SMALL).unwrap();
        let run = a_run(folder.path());
        let mut sent = rows(0..2);
        let file = spd_tracker::Value::File("a.png".into());
        sent[0].row = sent[0].row.clone().with("a", file);
        let mut driver = Driver::new(server.sink());
        on_runtime(async {
            driver.open(&run).await;
            driver.metrics(&run, &sent).await;
            assert_eq!(driver.refusals, [], "{fault}");
            driver.close(&run, 0).await;
        });
        assert_eq!(driver.refusals, [], "{fault}");
        let found = server.run("abcd1234");
        assert_eq!(found["exitcode"], 0);
        assert_eq!(steps(&found), [0, 1]);
        let name = lines(&found, "history")[0]["a"]["path"].clone();
        let uploaded = if arrives { json!([name]) } else { json!([]) };
        assert_eq!(found["uploaded"], uploaded, "{fault}");
        assert_eq!(driver.state.owed, [], "{fault}");
        assert_eq!(driver.state.lost, u64::from(!arrives), "{fault}");
        // The address is signed, and belongs to another server.
        for put in server.exchanges().iter().filter(|one| one["kind"] == "PUT") {
            assert_eq!(put["request"]["headers"].get("authorization"), None);
        }
    }
}

#[test]
fn files_that_have_no_place_at_the_end_are_asked_for_again() {
    for (refused, is_there) in [(json!([1, 2, 3]), true), (json!("all"), false)] {
        let fault = json!([{"match": "CreateRunFiles", "nth": refused, "status": 500}]);
        let Some(server) = Recorder::with(&fault, &[]) else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        crate::wandb::tests::put(folder.path().join("config.toml"), "seed = 0").unwrap();
        let run = a_run(folder.path());
        let mut driver = Driver::new(server.sink());
        on_runtime(async {
            driver.open(&run).await;
            driver.metrics(&run, &rows(0..2)).await;
            driver.close(&run, 0).await;
        });
        let found = server.run("abcd1234");
        assert_eq!((&found["exitcode"], steps(&found)), (&json!(0), vec![0, 1]));
        assert_eq!(
            found["uploaded"] == json!(["config.toml"]),
            is_there,
            "{found}"
        );
        // A server that never accepts them does not stop the end of the run.
        assert_eq!(driver.state.owed.is_empty(), is_there);
        assert_eq!(driver.refusals.len(), if is_there { 1 } else { 4 });
    }
}
