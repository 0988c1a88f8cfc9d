//! A driver with a server that follows a script.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;

use serde::{Deserialize, Serialize};
use spd_tracker::{Kind, Mark, Row, Spool};

use super::*;
use crate::run;
use crate::sink::Taken;

/// A server that keeps lines by number, as W&B does, and answers as scripted.
#[derive(Default)]
struct Server {
    lines: Vec<String>,
    answers: Vec<Refusal>,
    /// A step that is refused.
    bad: Option<u64>,
    takes_no_system_rows: bool,
    most: usize,
    takes_before_it_refuses: bool,
    opened: u32,
    /// It loses the run at this many calls from now, of any kind.
    loses: Option<u32>,
    went_back: Vec<RollBack>,
    closed: Option<End>,
}

#[derive(Clone, Default, Serialize, Deserialize)]
struct Sent {
    lines: usize,
}

struct Fake(Rc<RefCell<Server>>);

impl Fake {
    fn lose(&self) -> Taken {
        let mut server = self.0.borrow_mut();
        if let Some(calls) = server.loses {
            if calls == 0 {
                server.lines.clear();
                let why = "lost".to_owned();
                return Err(Refusal::Gone { why });
            }
            server.loses = Some(calls - 1);
        }
        Ok(())
    }

    fn put(&self, state: &mut Sent, rows: &[Stamped], bad: Option<u64>) -> Taken {
        self.lose()?;
        let mut server = self.0.borrow_mut();
        let why = || "no".to_owned();
        if server.most > 0 && rows.len() > server.most {
            return Err(Refusal::TooLarge { why: why() });
        }
        if rows.iter().any(|stamped| Some(stamped.row.step) == bad) {
            return Err(Refusal::Invalid { why: why() });
        }
        let refusal = server.answers.pop();
        if refusal.is_none() || server.takes_before_it_refuses {
            let first = state.lines;
            server.lines.truncate(first);
            let lines = rows.iter().map(|stamped| stamped.row.step.to_string());
            server.lines.extend(lines);
        }
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        state.lines += rows.len();
        Ok(())
    }
}

impl Sink for Fake {
    type State = Sent;
    const NAME: &'static str = "fake";
    const EVERY: Duration = Duration::from_millis(10);
    const ROWS: usize = 5;

    async fn open(&mut self, _: &RunInfo, state: &mut Sent) -> Result<bool, Refusal> {
        let mut server = self.0.borrow_mut();
        server.opened += 1;
        let is_anew = server.loses == Some(0) && server.lines.is_empty();
        if is_anew {
            (server.loses, *state) = (None, Sent::default());
        }
        Ok(is_anew)
    }

    async fn send_metrics(&mut self, _: &RunInfo, state: &mut Sent, rows: &[Stamped]) -> Taken {
        let bad = self.0.borrow().bad;
        self.put(state, rows, bad)
    }

    async fn send_system(&mut self, _: &RunInfo, _: &mut Sent, _: &[Stamped]) -> Taken {
        let why = "no".to_owned();
        if self.0.borrow().takes_no_system_rows {
            return Err(Refusal::Invalid { why });
        }
        Ok(())
    }

    async fn skip(&mut self, _: &RunInfo, state: &mut Sent, rows: &[Stamped]) -> Taken {
        self.put(state, rows, None)
    }

    async fn roll_back(
        &mut self,
        _: &RunInfo,
        state: &mut Sent,
        to: RollBack,
    ) -> Result<After, Refusal> {
        let mut server = self.0.borrow_mut();
        server.went_back.push(to);
        state.lines = usize::try_from(to.rows).unwrap();
        server.lines.truncate(state.lines);
        Ok(After::GoOn)
    }

    async fn idle(&mut self, _: &RunInfo, _: &mut Sent) -> Taken {
        Ok(())
    }

    async fn close(&mut self, _: &RunInfo, _: &mut Sent, end: End) -> Taken {
        self.lose()?;
        self.0.borrow_mut().closed = Some(end);
        Ok(())
    }
}

fn write(dir: &Path, behind: u64, steps: impl IntoIterator<Item = u64>) -> Mark {
    let mut reader = Reader::of_metrics(dir, &Cursor::default()).unwrap();
    while reader.mark().lines < behind {
        reader.next().unwrap().unwrap();
    }
    let spool = Spool::start(dir, &reader.mark(), behind).unwrap();
    for step in steps {
        spool.append(Row::new(step, Kind::Train).with("loss/total", step as f64));
    }
    spool.mark().wait().unwrap()
}

/// Ships a finished run on a clock that does not wait; returns the lines for the user.
fn ship(dir: &Path, server: &Rc<RefCell<Server>>) -> (Status, Vec<String>) {
    let (status, said, _) = ship_beside(dir, server, async |over| {
        let _ = over.send(Some(End { code: 0 }));
        std::future::pending().await
    });
    (status, said)
}

/// Ships a run during `beside`; returns the lines for the user, and the time that it took.
fn ship_beside(
    dir: &Path,
    server: &Rc<RefCell<Server>>,
    events: impl AsyncFnOnce(watch::Sender<Option<End>>),
) -> (Status, Vec<String>, Duration) {
    let (over, is_over) = watch::channel(None);
    let said: Arc<Mutex<Vec<String>>> = Arc::default();
    let lines = Arc::clone(&said);
    let link = Link {
        over: is_over,
        status: Arc::default(),
        say: Arc::new(move |line| lines.lock().unwrap().push(line.to_owned())),
    };
    let status = Arc::clone(&link.status);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    let run = run::tests::run(dir);
    let took = runtime.block_on(async {
        let begun = Instant::now();
        let driven = drive(Fake(Rc::clone(server)), &run, link);
        let (mut driven, mut events) = (pin!(driven), pin!(events(over)));
        let mut are_over = false;
        poll_fn(|context| {
            are_over = are_over || events.as_mut().poll(context).is_ready();
            driven.as_mut().poll(context)
        })
        .await;
        begun.elapsed()
    });
    let status = status.lock().unwrap().clone();
    let said = said.lock().unwrap().clone();
    (status, said, took)
}

fn numbers(steps: std::ops::RangeInclusive<u64>) -> Vec<String> {
    steps.map(|step| step.to_string()).collect()
}

#[test]
fn every_row_arrives_once_for_any_answers() {
    let later = || Refusal::Later {
        why: "busy".into(),
        after: None,
    };
    let gone = || Refusal::Gone { why: "gone".into() };
    for takes_before_it_refuses in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), 0, 1..=23);
        let server = Rc::new(RefCell::new(Server {
            answers: vec![later(), gone(), later(), later(), gone(), gone()],
            takes_before_it_refuses,
            ..Server::default()
        }));
        let (status, said) = ship(dir.path(), &server);
        let server = server.borrow();
        assert_eq!(server.lines, numbers(1..=23));
        assert_eq!(server.closed, Some(End { code: 0 }));
        assert!(status.is_closed && status.sent == 23 && status.trouble.is_none());
        let warning = "fake: gone; the run goes on, and rows wait in metrics.jsonl";
        assert!(said.contains(&warning.to_owned()), "{said:?}");
        assert_eq!(said.last().unwrap(), "fake: rows are sent again");
    }
}

#[test]
fn a_server_that_lost_the_run_has_all_of_it_again() {
    // At any call: sends of rows, of a refused step and its gap, the end.
    for loses in 0..16 {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), 0, 1..=12);
        let server = Rc::new(RefCell::new(Server {
            bad: Some(7),
            loses: Some(loses),
            ..Server::default()
        }));
        let (status, _) = ship(dir.path(), &server);
        let server = server.borrow();
        assert_eq!(server.lines, numbers(1..=12), "lost at call {loses}");
        assert!(status.is_closed && status.sent == 12);
    }
}

#[test]
fn a_person_is_not_waited_for_once_the_run_is_over() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 0, 1..=3);
    let server = Rc::new(RefCell::new(Server {
        answers: vec![Refusal::Unauthorized {
            why: "no key".into(),
        }],
        ..Server::default()
    }));
    let (status, _) = ship(dir.path(), &server);
    assert_eq!(status.trouble.as_deref(), Some("no key"));
    let (status, _) = ship(dir.path(), &server);
    assert!(status.is_closed);
    assert_eq!(server.borrow().lines, numbers(1..=3));
}

#[test]
fn large_sends_are_halved_and_refused_rows_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 0, 1..=9);
    let server = Rc::new(RefCell::new(Server {
        bad: Some(4),
        most: 2,
        ..Server::default()
    }));
    let (status, _) = ship(dir.path(), &server);
    // Its place is kept, so later lines keep their numbers.
    assert_eq!(server.borrow().lines, numbers(1..=9));
    assert_eq!((status.sent, status.refused), (9, 1));
    let refused = dir.path().join("sinks/fake.refused.jsonl");
    let refused = spd_files::read_to_string(&refused).unwrap();
    let row = "{\"step\":4,\"kind\":\"train\",\"loss/total\":4.0}\n";
    assert_eq!(refused, row);
}

#[test]
fn refused_rows_of_the_system_are_counted_apart() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 0, 1..=3);
    let spool = Spool::system(dir.path()).unwrap();
    for note in ["resumed", "saved"] {
        spool.append(Row::new(1, Kind::Event).with_note(note));
    }
    spool.sync().unwrap();
    let server = Rc::new(RefCell::new(Server {
        takes_no_system_rows: true,
        ..Server::default()
    }));
    for _ in 0..2 {
        let (status, _) = ship(dir.path(), &server);
        let counts = (status.sent, status.refused, status.refused_system);
        assert_eq!((counts, status.is_closed), ((3, 0, 2), true));
    }
}

#[test]
fn rows_that_are_made_again_to_the_same_bytes_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 0, 1..=9);
    let server = Rc::default();
    ship(dir.path(), &server);
    write(dir.path(), 4, 5..=12);
    ship(dir.path(), &server);
    let server = server.borrow();
    assert_eq!(server.lines, numbers(1..=12));
    assert!(server.went_back.is_empty());
}

#[test]
fn new_rows_replace_rolled_back_rows() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 0, 1..=9);
    let server = Rc::default();
    ship(dir.path(), &server);
    write(dir.path(), 4, 15..=25);
    ship(dir.path(), &server);
    let server = server.borrow();
    let expected = [numbers(1..=4), numbers(15..=25)].concat();
    assert_eq!(server.lines, expected);
    let to = RollBack {
        generation: 1,
        rows: 4,
        step: 4,
    };
    assert_eq!(server.went_back, [to]);
}

#[test]
fn the_directory_of_a_run_that_is_gone_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let gone = dir.path().join("gone");
    let line = Files::hold(&gone, "fake").unwrap_err();
    assert!(line.contains("gone/sinks: No such file"), "{line}");
    assert!(!gone.try_exists().unwrap());
}

#[test]
fn one_process_ships_for_a_sink_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 0, 1..=3);
    let _held = Files::hold(dir.path(), "fake").unwrap();
    let server = Rc::default();
    let (status, _) = ship(dir.path(), &server);
    let trouble = status.trouble.unwrap();
    assert!(
        trouble.ends_with("another process ships this run"),
        "{trouble}"
    );
    assert!(server.borrow().lines.is_empty());
}

#[test]
fn a_server_is_named_once_in_five_minutes() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 0, 1..=23);
    let minute = || Refusal::Later {
        why: "busy".into(),
        after: Some(Duration::from_secs(60)),
    };
    let server = Rc::new(RefCell::new(Server {
        answers: (0..12).map(|_| minute()).collect(),
        ..Server::default()
    }));
    let (status, said) = ship(dir.path(), &server);
    assert!(status.is_closed);
    let busy = "fake: busy; the run goes on, and rows wait in metrics.jsonl";
    assert_eq!(said, [busy, busy, busy, "fake: rows are sent again"]);
}

#[test]
fn one_that_works_now_and_then_is_no_news_each_time() {
    let dir = tempfile::tempdir().unwrap();
    let server = Rc::new(RefCell::new(Server::default()));
    write(dir.path(), 0, 1..=1);
    let (status, said, _) = ship_beside(dir.path(), &server, async |over| {
        for minute in 1..=11 {
            let mark = Reader::of_metrics(dir.path(), &Cursor::default()).map(all);
            write(dir.path(), mark.unwrap(), minute * 10..=minute * 10 + 1);
            server.borrow_mut().answers.push(Refusal::Later {
                why: "busy".into(),
                after: None,
            });
            tokio::time::sleep(Duration::from_secs(61)).await;
        }
        let _ = over.send(Some(End { code: 0 }));
    });
    assert!(status.is_closed);
    assert_eq!(server.borrow().lines.len(), 23);
    let busy = "fake: busy; the run goes on, and rows wait in metrics.jsonl";
    let again = "fake: rows are sent again";
    assert_eq!(said, [busy, again, busy, again, busy, again]);
}

/// Number of rows.
fn all(mut reader: Reader) -> u64 {
    while let Ok(Some(_)) = reader.next() {}
    reader.mark().lines
}

#[test]
fn no_server_is_waited_for_longer_than_an_hour() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 0, 1..=3);
    let server = Rc::new(RefCell::new(Server {
        answers: vec![Refusal::Later {
            why: "come back in another age".into(),
            after: Some(Duration::MAX),
        }],
        ..Server::default()
    }));
    let (status, _, took) = ship_beside(dir.path(), &server, async |over| {
        tokio::time::sleep(Duration::from_secs(3660)).await;
        let _ = over.send(Some(End { code: 0 }));
    });
    assert!(status.is_closed && took < Duration::from_secs(3700));
    assert_eq!(server.borrow().lines, numbers(1..=3));
    // Nor at the end of a run, where `ship` waits.
    write(dir.path(), 3, 4..=6);
    server.borrow_mut().answers.push(Refusal::Later {
        why: "come back in another age".into(),
        after: Some(Duration::MAX),
    });
    let (_, _, took) = ship_beside(dir.path(), &server, async |over| {
        let _ = over.send(Some(End { code: 0 }));
        std::future::pending().await
    });
    assert!(took <= Duration::from_secs(3660), "{took:?}");
    assert_eq!(server.borrow().lines, numbers(1..=6));
}

#[test]
fn a_disk_without_room_is_waited_for_while_the_run_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 0, 1..=9);
    let in_the_way = dir.path().join("sinks/fake.json");
    std::fs::create_dir_all(in_the_way.join("x")).unwrap();
    let server = Rc::default();
    // Not once the run is over: `ship` sends the rest.
    let (status, _) = ship(dir.path(), &server);
    assert!(status.trouble.unwrap().contains("fake.json"));
    assert!(server.borrow().lines.is_empty());
    let (status, said, _) = ship_beside(dir.path(), &server, async |over| {
        tokio::time::sleep(Duration::from_secs(100)).await;
        std::fs::remove_dir_all(&in_the_way).unwrap();
        tokio::time::sleep(Duration::from_secs(100)).await;
        let _ = over.send(Some(End { code: 0 }));
    });
    assert!(status.is_closed, "{said:?}");
    assert_eq!(server.borrow().lines, numbers(1..=9));
    assert!(said[0].contains("fake.json") && said[0].ends_with("rows wait in metrics.jsonl"));
    assert_eq!(said[1..], ["fake: rows are sent again"]);
}

#[test]
fn files_that_another_process_has_are_waited_for_while_the_run_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 0, 1..=3);
    let held = Files::hold(dir.path(), "fake").unwrap();
    let server = Rc::default();
    let (status, said, _) = ship_beside(dir.path(), &server, async |over| {
        tokio::time::sleep(Duration::from_secs(30)).await;
        drop(held);
        tokio::time::sleep(Duration::from_secs(100)).await;
        let _ = over.send(Some(End { code: 0 }));
    });
    assert!(status.is_closed, "{said:?}");
    assert_eq!(server.borrow().lines, numbers(1..=3));
    assert_eq!(said.len(), 1);
}
