//! Our sink beside recordings of the official client in twelve scenarios, with the server's final
//! state: `wandb_capture/*.json` of `$SPD_SHARED/reference`. Without them, the tests are skipped.
//!
//! These requests of the official client have no counterpart in ours: the owner of the key, the
//! features of the server, code and tables as artifacts, and a second `UpsertBucket` that adds the
//! client's own measurements to the config.

mod stories;

use spd_tracker::{Histogram, Value};

use super::meaning::meaning;
use super::*;

const PLACE: &str = "fixture-entity/fixture-project/fixtrun1";

/// A scenario.
struct Captured {
    exchanges: Vec<Json>,
    /// The final state of the run at the server.
    state: Json,
}

impl Captured {
    /// A scenario by its name; the test is skipped without it.
    fn read(name: &str) -> Option<Self> {
        let path = shared().map(|shared| shared.join(format!("wandb_capture/{name}.json")));
        let text = path.and_then(|path| spd_files::read_to_string(&path).ok());
        let Some(text) = text else {
            spd_testing::skip(&format!("shared/reference/wandb_capture/{name}.json"));
            return None;
        };
        let mut read = plain(&text);
        let exchanges = read["exchanges"].as_array().unwrap().clone();
        let state = read["server_state_after"][PLACE].take();
        Some(Self { exchanges, state })
    }

    /// A server with the faults of the recording.
    fn server(&self) -> Option<Recorder> {
        let faults = self.exchanges.iter().filter_map(|one| one.get("fault"));
        Recorder::with(&json!(faults.collect::<Vec<_>>()), &[])
    }

    /// The same run for our sink.
    fn run(&self, dir: &Path) -> RunInfo {
        put(dir.join("a.png"), a_picture()).unwrap();
        put(dir.join("a.html"), "<b>hello</b>\n").unwrap();
        let text = |name: &str| self.state[name].as_str().map(String::from);
        let tags = self.state["tags"].as_array().unwrap().iter();
        let config = self.state["config"].as_object().unwrap().iter();
        let config = config.filter(|(name, _)| *name != "_wandb");
        let config: BTreeMap<_, _> = config.map(|(name, of)| (name, &of["value"])).collect();
        RunInfo {
            id: "fixtrun1".into(),
            tracker: Tracker {
                project: Some("fixture-project".into()),
                group: text("group"),
                notes: text("notes"),
                tags: tags.map(|tag| tag.as_str().unwrap().into()).collect(),
                ..Tracker::default()
            },
            name: text("displayName").unwrap(),
            config: json!(config),
            started: self.rows().first().map_or(1000.0, |row| row.time),
            ..a_run(dir)
        }
    }

    /// The rows that make the lines of the history.
    fn rows(&self) -> Vec<Stamped> {
        lines(&self.state, "history").iter().map(row_of).collect()
    }

    /// The rows of each accepted request.
    fn pieces(&self) -> Vec<Vec<Stamped>> {
        let (mut rows, mut pieces) = (self.rows(), Vec::new());
        for (offset, lines) in chunks(&self.exchanges, HISTORY_LINES).into_iter().rev() {
            let piece = rows.split_off(offset);
            assert_eq!(piece.len(), lines);
            pieces.insert(0, piece);
        }
        pieces
    }
}

const HISTORY_LINES: &str = "wandb-history.jsonl";

fn row_of(line: &Json) -> Stamped {
    let values = line.as_object().unwrap().iter();
    let values = values.filter(|(name, _)| !name.starts_with('_'));
    let list = |list: &Json| -> Vec<f64> {
        let list = list.as_array().unwrap().iter();
        list.map(|number| number.as_f64().unwrap()).collect()
    };
    let value = |of: &Json| match of["_type"].as_str() {
        Some("histogram") => Value::Histogram(Histogram {
            edges: list(&of["bins"]),
            counts: list(&of["values"]),
        }),
        Some("image-file") => Value::File("a.png".into()),
        Some("html-file") => Value::File("a.html".into()),
        _ => match of.as_str() {
            Some(word) => Value::Number(word.parse().unwrap()),
            None => Value::Number(of.as_f64().unwrap_or(0.0)),
        },
    };
    let row = Row::new(line["_step"].as_u64().unwrap(), Kind::Train);
    Stamped {
        row: values.fold(row, |row, (name, of)| row.with(name, value(of))),
        time: line["_timestamp"].as_f64().unwrap(),
    }
}

/// The bodies of the requests of a kind.
fn requests<'e>(exchanges: &'e [Json], kind: &str) -> Vec<&'e Json> {
    let of_kind = exchanges.iter().filter(|one| one["kind"] == kind);
    of_kind.map(|one| &one["request"]["json"]).collect()
}

/// Offset and number of the lines of a file in each accepted stream request. All requests must have
/// the known form, and a refused one must be repeated unchanged.
fn chunks(exchanges: &[Json], file: &str) -> Vec<(usize, usize)> {
    let (mut chunks, mut next, mut refused) = (Vec::new(), BTreeMap::new(), None);
    for one in exchanges.iter().filter(|one| one["kind"] == "file_stream") {
        let body = &one["request"]["json"];
        if let Some(refused) = refused.take() {
            assert_eq!(body, refused, "what was refused comes again");
        }
        let fields = body.as_object().unwrap();
        let known = ["files", "uploaded", "complete", "exitcode"];
        assert!(
            fields.keys().all(|field| known.contains(&field.as_str())),
            "{body}"
        );
        assert_eq!(
            body.get("complete").is_some(),
            body.get("exitcode").is_some()
        );
        if one["reply"]["status"] != 200 {
            refused = Some(body);
            continue;
        }
        for (name, chunk) in body["files"].as_object().into_iter().flatten() {
            let offset = usize::try_from(chunk["offset"].as_u64().unwrap()).unwrap();
            let lines = chunk["content"].as_array().unwrap();
            assert!(lines.iter().all(Json::is_string), "{body}");
            if name == "wandb-summary.json" {
                assert_eq!((offset, lines.len()), (0, 1));
                continue;
            }
            let known = ["wandb-history.jsonl", "wandb-events.jsonl", "output.log"];
            assert!(known.contains(&name.as_str()), "{name}");
            let begins = next.insert(name, offset + lines.len());
            assert!(
                begins.is_none_or(|begins| begins == offset),
                "{name}: {body}"
            );
            if name == file {
                chunks.push((offset, lines.len()));
            }
        }
    }
    chunks
}

/// Removes the bytes of pictures, which differ from theirs, and keeps their form.
fn without_bytes(meaning: &mut Json) {
    for part in ["files", "uploaded"] {
        let count = match &meaning[part] {
            Json::Object(files) => files.len(),
            files => files.as_array().unwrap().len(),
        };
        meaning[part] = json!(count);
    }
    let mut of = vec![meaning["summary"].take()];
    of.extend(meaning["history"].as_array().unwrap().clone());
    for value in of.iter_mut().filter_map(|values| values.get_mut("sample")) {
        let path = value["path"].as_str().unwrap();
        let hash = value["sha256"].as_str().unwrap();
        assert!(path.starts_with("media/images/sample_"), "{path}");
        assert!(path.ends_with(&format!("_{}.png", &hash[..20])), "{path}");
        for own in ["path", "sha256", "size", "caption"] {
            value.as_object_mut().unwrap().remove(own);
        }
    }
    meaning["summary"] = of.remove(0);
    meaning["history"] = json!(of);
}

/// Asserts that ours made what theirs made. `own`: values of the summary that theirs has from
/// elsewhere, or loses.
fn compare(theirs: &Captured, server: &Recorder, own: &[&str]) {
    let ours = server.runs()[PLACE].take();
    let [mut theirs, mut ours] = [&theirs.state, &ours].map(meaning);
    for meaning in [&mut theirs, &mut ours] {
        without_bytes(meaning);
        for name in own {
            meaning["summary"].as_object_mut().unwrap().remove(*name);
        }
    }
    // The official client sends none unless it is set.
    if theirs["jobType"].is_null() {
        theirs["jobType"] = json!("train");
    }
    for (part, value) in theirs.as_object().unwrap() {
        assert_eq!(&ours[part], value, "{part}");
    }
}

/// Plays a whole run in the same requests.
fn play(theirs: &Captured, server: &Recorder, run: &RunInfo, code: Option<u8>) -> Vec<Refusal> {
    let mut driver = Driver::new(server.sink());
    on_runtime(async {
        driver.open(run).await;
        for rows in theirs.pieces() {
            driver.metrics(run, &rows).await;
        }
        if let Some(code) = code {
            driver.close(run, code).await;
        }
    });
    let ours = server.exchanges();
    assert_eq!(
        chunks(&ours, HISTORY_LINES),
        chunks(&theirs.exchanges, HISTORY_LINES)
    );
    driver.refusals
}
