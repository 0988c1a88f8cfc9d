//! Repetitions after failures of the server, and the handling of refusals.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::fake::{Fake, Fault, KeptRun};
use super::*;

fn error(code: &str, message: &str) -> String {
    serde_json::json!({"error_code": code, "message": message}).to_string()
}

#[test]
fn refusals_map_to_actions() {
    let fake = Fake::new();
    let mut scratch = Scratch::new(&fake.uri);
    scratch.open().unwrap();
    let invalid = error("INVALID_PARAMETER_VALUE", "no name");
    let inactive = error("INVALID_PARAMETER_VALUE", "must be in the 'active' state");
    let gone = error("RESOURCE_DOES_NOT_EXIST", "no run");
    for (status, text, expected) in [
        (400, invalid.as_str(), "Invalid"),
        (400, &inactive, "Gone"),
        (404, &gone, "Gone"),
        (404, "<html>nginx</html>", "Later"),
        (404, &error("ENDPOINT_NOT_FOUND", ""), "Later"),
        (401, "who?", "Unauthorized"),
        (
            403,
            "Invalid Host header - possible DNS rebinding attack detected",
            "Unauthorized",
        ),
        (403, &error("PERMISSION_DENIED", ""), "Unauthorized"),
        (413, "", "TooLarge"),
        (429, &error("REQUEST_LIMIT_EXCEEDED", ""), "Later"),
        (500, &error("INTERNAL_ERROR", ""), "Later"),
        (302, "", "Later"),
        (200, "<html>please log in</html>", "Later"),
    ] {
        fake.fail("log-batch", Fault::Answer(status, text.to_owned()));
        let found = scratch.send(&losses(0..1)).unwrap_err();
        let found = format!("{found:?}");
        assert!(found.starts_with(expected), "{status} {text}: {found}");
    }
    scratch.send(&losses(0..1)).unwrap();
}

#[test]
fn a_lost_answer_adds_nothing() {
    let fake = Fake::new();
    let mut scratch = Scratch::new(&fake.uri);
    // The existing one is found at once.
    fake.fail("experiments/create", Fault::LostAnswer);
    for call in ["runs/create", "log-batch", "config.json"] {
        fake.fail(call, Fault::LostAnswer);
        let found = scratch.open();
        assert!(
            matches!(found, Err(Refusal::Later { .. })),
            "{call}: {found:?}"
        );
    }
    scratch.open().unwrap();
    for _ in 0..3 {
        fake.fail("log-batch", Fault::LostAnswer);
        let found = scratch.send(&losses(0..5));
        assert!(matches!(found, Err(Refusal::Later { .. })), "{found:?}");
    }
    scratch.send(&losses(0..5)).unwrap();
    let kept = fake.kept();
    assert_eq!((kept.experiments.len(), kept.runs.len()), (1, 1));
    assert_eq!(kept.runs["run0"].history("loss"), counted(0..5));
}

#[test]
fn open_reads_a_corrected_token() {
    let fake = Fake::new();
    fake.kept().wanted = Some("Bearer right-secret".to_owned());
    let mut scratch = Scratch::new(&fake.uri);
    scratch
        .variables
        .push(("MLFLOW_TRACKING_TOKEN", "wrong-secret".to_owned()));
    scratch.restart();
    let Err(Refusal::Unauthorized { why }) = scratch.open() else {
        panic!("the token is wrong");
    };
    assert!(
        why.contains("answers 401") && !why.contains("secret"),
        "{why}"
    );
    scratch.variables[1].1 = "right-secret".to_owned();
    scratch.restart();
    scratch.open().unwrap();
    scratch.send(&losses(0..2)).unwrap();
    let state = serde_json::to_string(&scratch.state).unwrap();
    assert!(!state.contains("secret"), "{state}");
    fake.kept().wanted = Some("Bearer another".to_owned());
    let found = scratch.send(&losses(2..3));
    assert!(
        matches!(found, Err(Refusal::Unauthorized { .. })),
        "{found:?}"
    );
}

#[test]
fn secrets_quoted_by_a_server_are_hidden() {
    let fake = Fake::new();
    let token = "mlflow-Tok3n/of+nobody=at.all";
    let password = "p@ss \"w0rd\"/of+nobody";
    let basic = STANDARD.encode(format!("ada:{password}"));
    let of_address = "p%40ss%20%22w0rd%22%2Fof%2Bnobody";
    let of_token = vec![("MLFLOW_TRACKING_TOKEN", token)];
    let of_user = vec![
        ("MLFLOW_TRACKING_USERNAME", "ada"),
        ("MLFLOW_TRACKING_PASSWORD", password),
    ];
    let lower = of_address.to_lowercase();
    let cases = [
        (of_token, vec![token]),
        (of_user, vec![&*basic, password, of_address, &*lower]),
    ];
    for (variables, forms) in cases {
        let mut scratch = Scratch::new(&fake.uri);
        let variables = variables
            .iter()
            .map(|(key, value)| (*key, (*value).to_owned()));
        scratch.variables.extend(variables);
        scratch.restart();
        scratch.open().unwrap();
        for (form, status) in forms
            .iter()
            .flat_map(|form| [400, 401, 500, 200].map(|s| (form, s)))
        {
            let json = serde_json::json!({"headers": {"Authorization": form}, "error": form});
            for quoted in [
                format!("Authorization: {form}"),
                json.to_string(),
                // Cut by us, or by the server.
                format!("{} {form}", "x".repeat(190)),
                format!("it ends within: {}", &form[..form.len() / 2 + 1]),
                format!("it begins within: {}", &form[form.len() / 2 - 1..]),
            ] {
                fake.fail("log-batch", Fault::Answer(status, quoted.clone()));
                let found = scratch.send(&losses(0..1)).unwrap_err();
                let found = format!("{found:?}");
                let hint = |at: usize| {
                    form.get(at..at + 8)
                        .is_some_and(|part| found.contains(part))
                };
                assert!(!(0..form.len()).any(hint), "{quoted}: {found}");
                assert!(found.contains("..."), "{quoted}: {found}");
            }
        }
    }
    // It is not stored either, under any name.
    let mut scratch = Scratch::new(&fake.uri);
    scratch
        .variables
        .push(("MLFLOW_TRACKING_TOKEN", token.to_owned()));
    scratch.restart();
    let run = serde_json::json!({"run": {"info": {"run_id": token, "artifact_uri": token}}});
    fake.fail("runs/create", Fault::Answer(200, run.to_string()));
    let _ = scratch.open();
    let state = serde_json::to_string(&scratch.state).unwrap();
    assert!(!state.contains(token), "{state}");
}

#[test]
fn control_characters_are_escaped() {
    let fake = Fake::new();
    let mut scratch = Scratch::new(&fake.uri);
    scratch.open().unwrap();
    let said = "a\u{1b}]0;x\u{7}\nerror: b\u{202e}c";
    fake.fail("log-batch", Fault::Answer(500, said.to_owned()));
    let Err(Refusal::Later { why, .. }) = scratch.send(&losses(0..1)) else {
        panic!("it fails");
    };
    let shown = ": a\\u{1b}]0;x\\u{7} error: b\\u{202e}c";
    assert!(why.ends_with(shown), "{why}");
}

#[test]
fn unexpected_bodies_are_no_receipts() {
    let fake = Fake::new();
    let mut scratch = Scratch::new(&fake.uri);
    scratch.open().unwrap();
    for nonsense in [
        "<html>please log in</html>",
        "[]",
        "null",
        "\"ok\"",
        "{",
        "{\"error\": \"no\"}",
    ] {
        for call in ["log-batch", "a.txt"] {
            spd_files::atomic::write_file(&scratch.path().join("a.txt"), &[b"a"]).unwrap();
            let row = row(0).with("file", Value::File("a.txt".to_owned()));
            fake.fail(call, Fault::Answer(200, nonsense.to_owned()));
            let Err(Refusal::Later { why, .. }) = scratch.send(&[stamped(row)]) else {
                panic!("{call}: {nonsense} is taken");
            };
            let advice = "; is MLFLOW_TRACKING_URI the address of an MLflow server?";
            assert!(why.ends_with(advice), "{why}");
        }
    }
    fake.fail("log-batch", Fault::Answer(200, " \n".to_owned()));
    scratch.send(&losses(0..1)).unwrap();
}

#[test]
fn bad_addresses_are_reported_at_once() {
    let mut scratch = Scratch::new("sqlite:///mlflow.db");
    let Err(Refusal::Unauthorized { why }) = scratch.open() else {
        panic!("it is a database");
    };
    assert!(
        why.starts_with("MLFLOW_TRACKING_URI is not an http address; "),
        "{why}"
    );
    // Port 1 refuses connections.
    scratch.variables[0].1 = "http://127.0.0.1:1".to_owned();
    scratch.restart();
    let Err(Refusal::Later { why, .. }) = scratch.open() else {
        panic!("there is no server");
    };
    assert!(why.starts_with("http://127.0.0.1:1: "), "{why}");
}

#[test]
fn deleted_run_is_made_again() {
    let fake = Fake::new();
    let mut scratch = Scratch::new(&fake.uri);
    assert_eq!(scratch.open(), Ok(false));
    scratch.send(&losses(0..5)).unwrap();
    fake.kept().runs.get_mut("run0").unwrap().deleted = true;
    let found = scratch.send(&losses(5..6));
    assert!(matches!(found, Err(Refusal::Gone { .. })), "{found:?}");
    // A lost answer in between changes nothing.
    fake.fail("config.json", Fault::LostAnswer);
    scratch.open().unwrap_err();
    assert_eq!(scratch.open(), Ok(true));
    assert_eq!(scratch.state.run, "run1");
    scratch.send(&losses(0..6)).unwrap();
    assert_eq!(fake.kept().runs["run1"].history("loss"), counted(0..6));
    assert_eq!(scratch.open(), Ok(false));
}

#[test]
fn a_lost_cursor_finds_the_last_run() {
    let fake = Fake::new();
    let mut scratch = Scratch::new(&fake.uri);
    scratch.open().unwrap();
    assert_eq!(scratch.roll_back(2).unwrap(), After::FromStart);
    assert_eq!(scratch.roll_back(10).unwrap(), After::FromStart);
    let state = std::mem::take(&mut scratch.state);
    scratch.restart();
    scratch.open().unwrap();
    assert_eq!(
        (&scratch.state.run, scratch.state.generation),
        (&state.run, 10)
    );
    assert_eq!(fake.kept().runs.len(), 3);
}

#[test]
fn a_roll_back_that_is_made_twice_makes_one_run() {
    let fake = Fake::new();
    let mut scratch = Scratch::new(&fake.uri);
    scratch.open().unwrap();
    fake.fail("runs/create", Fault::LostAnswer);
    scratch.roll_back(1).unwrap_err();
    let state = scratch.state.clone();
    scratch.roll_back(1).unwrap();
    scratch.state = state;
    scratch.roll_back(1).unwrap();
    {
        let kept = fake.kept();
        let of = |run: &str, tag: &str| kept.runs[run].tags.get(tag).cloned();
        assert_eq!(kept.runs.len(), 2);
        assert_eq!(of("run0", "superseded-by").as_deref(), Some("run1"));
        assert_eq!(of("run1", "resumed-from").as_deref(), Some("run0"));
        assert_eq!(kept.runs["run0"].status, "KILLED");
    }
    // The old run may be deleted.
    fake.kept().runs.get_mut("run1").unwrap().deleted = true;
    assert_eq!(scratch.roll_back(2).unwrap(), After::FromStart);
    assert_eq!(scratch.state.run, "run2");
}

#[test]
fn keep_policy_keeps_rows() {
    let fake = Fake::new();
    let mut scratch = Scratch::new(&fake.uri);
    scratch.info.tracker.on_rollback = OnRollback::Keep;
    scratch.open().unwrap();
    assert_eq!(scratch.roll_back(1).unwrap(), After::GoOn);
    assert_eq!(fake.kept().runs.len(), 1);
}

#[test]
fn parameters_that_changed_hold_nothing_up() {
    let fake = Fake::new();
    let mut scratch = Scratch::new(&fake.uri);
    scratch.info.config = serde_json::json!({"a": 1, "steps": 10});
    fake.fail("config.json", Fault::LostAnswer);
    scratch.open().unwrap_err();
    scratch.info.config = serde_json::json!({"steps": 20, "b": 2});
    scratch.open().unwrap();
    let kept = fake.kept();
    let parameters = &kept.runs["run0"].parameters;
    let found: Vec<_> = parameters
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    assert_eq!(found, [("a", "1"), ("b", "2"), ("steps", "10")]);
    let config = String::from_utf8(kept.files["run0/config.json"].clone()).unwrap();
    assert!(config.contains("\"steps\": 20"), "{config}");
}

#[test]
fn a_file_that_is_not_taken_holds_nothing_up() {
    let fake = Fake::new();
    let mut scratch = Scratch::new(&fake.uri);
    scratch.open().unwrap();
    spd_files::atomic::write_file(&scratch.path().join("a.svg"), &[b"<svg/>"]).unwrap();
    let figure = |path: &str| {
        let row = row(0).with("figure", Value::File(path.to_owned()));
        [stamped(row)]
    };
    let told = |fake: &Fake| fake.kept().runs["run0"].tags["spd.not-stored"].clone();
    fake.fail("a.svg", Fault::Answer(413, String::new()));
    scratch.send(&figure("a.svg")).unwrap();
    assert!(told(&fake).starts_with("a.svg: "), "{}", told(&fake));
    scratch.send(&figure("b.svg")).unwrap();
    assert!(told(&fake).starts_with("b.svg: "), "{}", told(&fake));
    scratch.send(&figure("../a.svg")).unwrap();
    assert_eq!(told(&fake), "../a.svg: no file of the run directory");
    fake.fail("a.svg", Fault::Answer(503, String::new()));
    let found = scratch.send(&figure("a.svg"));
    assert!(matches!(found, Err(Refusal::Later { .. })), "{found:?}");
    scratch.send(&figure("a.svg")).unwrap();
    let kept = fake.kept();
    assert_eq!(kept.files["run0/a.svg"], b"<svg/>");
    assert_eq!(kept.runs["run0"].history("loss"), counted(0..1));
}

#[test]
fn a_run_that_was_made_twice_is_there_once() {
    let fake = Fake::new();
    let mut scratch = Scratch::new(&fake.uri);
    scratch.open().unwrap();
    scratch.send(&losses(0..3)).unwrap();
    // An earlier process requested it too, and was killed; the server was slow.
    let ours = fake.kept().runs[&scratch.state.run].clone();
    let empty = KeptRun {
        tags: ours.tags.clone(),
        ..KeptRun::default()
    };
    let other = KeptRun {
        tags: [("client.run_key".to_owned(), "of another".to_owned())].into(),
        ..KeptRun::default()
    };
    for (name, run) in [("late", empty), ("full", ours), ("other", other)] {
        fake.kept().runs.insert(name.to_owned(), run);
    }
    // A busy server is tried again; a key without permission to delete is accepted.
    fake.fail("runs/delete", Fault::Answer(503, String::new()));
    fake.fail("runs/delete", Fault::Answer(403, String::new()));
    assert!(matches!(scratch.close(0), Err(Refusal::Later { .. })));
    scratch.close(0).unwrap();
    assert!(!fake.kept().runs["late"].deleted);
    scratch.close(0).unwrap();
    let kept = fake.kept();
    let deleted: Vec<&String> = kept
        .runs
        .iter()
        .filter(|(_, run)| run.deleted)
        .map(|(name, _)| name)
        .collect();
    assert_eq!(deleted, ["late"]);
}
