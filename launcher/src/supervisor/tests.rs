use proptest::prelude::*;
use signal_hook::consts::{SIGABRT, SIGKILL, SIGTERM};
use spd_trainer::FaultKind;

use super::hang::{KILL, KILL_FIRST};
use super::*;
use crate::failure::Failure;

const TIMEOUTS: Timeouts = Timeouts {
    grace: Duration::from_secs(25),
    hang: HangLimit::Learned,
};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn beat(rank: usize, phase: &str, ticks: u64) -> Event {
    waiting(rank, phase, ticks, None)
}

fn waiting(rank: usize, phase: &str, ticks: u64, waits_for: Option<usize>) -> Event {
    let phase = phase.to_owned();
    Event::Said(
        rank,
        Message::Beat {
            phase,
            step: ticks,
            ticks,
            waits_for,
            waited_ms: 0,
            waits_for_disk: false,
        },
    )
}

/// A supervisor of `ranks` ranks, all of which have sent a heartbeat.
fn up(ranks: usize) -> Supervisor {
    let mut supervisor = Supervisor::new(ranks, TIMEOUTS, ms(0));
    for rank in 0..ranks {
        supervisor.on(ms(0), beat(rank, "", 0));
    }
    supervisor
}

fn failure(kind: FaultKind, time: Duration, because_of: Option<usize>) -> Failure {
    Failure {
        kind,
        phase: "train".to_owned(),
        step: 3,
        time_ns: u64::try_from(time.as_nanos()).unwrap(),
        message: "it broke".to_owned(),
        because_of,
    }
}

fn code(rank: usize, code: i32) -> Event {
    Event::Ended(rank, ProcessEnd::Code(code))
}

fn signal(rank: usize, signal: i32) -> Event {
    Event::Ended(rank, ProcessEnd::Signal(signal))
}

fn failed(rank: usize, cause: Cause, consequences: &[usize]) -> Verdict {
    Verdict::Failed {
        rank,
        cause,
        consequences: consequences.to_vec(),
    }
}

/// All killed ranks die.
fn buried(supervisor: &mut Supervisor, now: Duration) -> Verdict {
    for rank in 0..supervisor.ranks.len() {
        if supervisor.ranks[rank].killed.is_some() {
            supervisor.on(now, signal(rank, SIGKILL));
        }
    }
    assert!(supervisor.is_over());
    supervisor.verdict()
}

#[test]
fn all_ranks_exit_with_code_0() {
    let mut s = Supervisor::new(2, TIMEOUTS, ms(0));
    assert_eq!(s.on(ms(1), code(1, 0)), []);
    assert!(!s.is_over());
    assert_eq!(s.on(ms(2), code(0, 0)), []);
    assert_eq!((s.is_over(), s.verdict()), (true, Verdict::Done));
}

#[test]
fn a_death_kills_the_others_and_is_the_cause() {
    let mut s = Supervisor::new(4, TIMEOUTS, ms(0));
    let kills = [0, 1, 3].map(Action::Kill);
    assert_eq!(s.on(ms(5), signal(2, SIGABRT)), kills);
    assert_eq!(
        buried(&mut s, ms(6)),
        failed(2, Cause::Signal(SIGABRT), &[])
    );
}

#[test]
fn the_cause_is_found_even_if_its_victim_reports_first() {
    for guilty_is_heard in [true, false] {
        let mut s = Supervisor::new(3, TIMEOUTS, ms(0));
        let lost = failure(FaultKind::PeerLost, ms(4), Some(1));
        // The victim reports and exits before the failing rank does.
        assert_eq!(
            s.on(ms(5), Event::Said(0, Message::Failure(lost.clone()))),
            []
        );
        assert_eq!(s.on(ms(6), code(0, 1)), []);
        let cause = if guilty_is_heard {
            let guilty = failure(FaultKind::Bug, ms(3), None);
            s.on(ms(7), Event::Said(1, Message::Failure(guilty.clone())));
            Cause::Failure(guilty)
        } else {
            Cause::Signal(SIGKILL)
        };
        let end = if guilty_is_heard {
            code(1, 101)
        } else {
            signal(1, SIGKILL)
        };
        assert_eq!(s.on(ms(8), end), [Action::Kill(2)]);
        assert_eq!(buried(&mut s, ms(9)), failed(1, cause, &[0]));
    }
}

// The launcher of another node may be slow to report the end of its rank.
#[test]
fn a_cause_that_is_reported_late_is_waited_for() {
    let mut s = Supervisor::new(3, TIMEOUTS, ms(0));
    let lost = failure(FaultKind::PeerLost, ms(4), Some(1));
    s.on(ms(5), Event::Said(0, Message::Failure(lost.clone())));
    assert_eq!(s.on(ms(6), code(0, 1)), []);
    s.on(ms(7), Event::Said(2, Message::Failure(lost)));
    assert_eq!(waits(&mut s, 200, 4800), []);
    assert_eq!(s.on(ms(4900), signal(1, SIGKILL)), [Action::Kill(2)]);
    assert_eq!(
        buried(&mut s, ms(4901)),
        failed(1, Cause::Signal(SIGKILL), &[0, 2])
    );
}

#[test]
fn the_earlier_of_two_failures_is_the_cause() {
    let mut s = Supervisor::new(2, TIMEOUTS, ms(0));
    let [late, early] = [9, 8].map(|time| failure(FaultKind::Failed, ms(time), None));
    s.on(ms(10), Event::Said(0, Message::Failure(late)));
    s.on(ms(11), Event::Said(1, Message::Failure(early.clone())));
    s.on(ms(12), code(0, 1));
    assert_eq!(
        buried(&mut s, ms(13)),
        failed(1, Cause::Failure(early), &[0])
    );
}

#[test]
fn a_failure_common_to_all_is_reported_by_the_first() {
    let mut s = Supervisor::new(3, TIMEOUTS, ms(0));
    let refused = [9, 8].map(|time| failure(FaultKind::NotFinite, ms(time), None));
    let lost = failure(FaultKind::PeerLost, ms(7), Some(1));
    for (rank, failure) in [&lost, &refused[0], &refused[1]].into_iter().enumerate() {
        s.on(ms(10), Event::Said(rank, Message::Failure(failure.clone())));
    }
    s.on(ms(11), code(0, 1));
    s.on(ms(11), code(1, 1));
    assert_eq!(
        buried(&mut s, ms(13)),
        failed(1, Cause::Failure(refused[0].clone()), &[0])
    );
}

#[test]
fn a_failed_rank_that_does_not_exit_is_killed_soon() {
    let mut s = Supervisor::new(2, TIMEOUTS, ms(0));
    let held = failure(FaultKind::Held, ms(1), None);
    assert_eq!(s.on(ms(1), Event::Said(0, Message::Failure(held))), []);
    assert_eq!(s.on(ms(300), Event::Tick), []);
    assert_eq!(s.on(ms(501), Event::Tick), [0, 1].map(Action::Kill));
    let Verdict::Failed { rank, cause, .. } = buried(&mut s, ms(502)) else {
        panic!("it failed");
    };
    assert_eq!((rank, cause.kind()), (0, FaultKind::Held));
}

#[test]
fn a_request_to_stop_goes_to_all_with_the_grace_period() {
    let mut s = up(2);
    assert_eq!(s.on(ms(1), Event::Leave), [0, 1].map(Action::Ask));
    assert_eq!(s.on(ms(2), Event::Leave), []);
    s.on(ms(3), Event::Said(0, Message::Stopped("saved".to_owned())));
    assert_eq!(s.on(ms(4), code(0, 3)), []);
    let mut other = up(2);
    other.on(ms(1), Event::Leave);
    other.on(ms(4), code(0, 3));
    assert_eq!(s.on(ms(5), code(1, 3)), []);
    assert_eq!(s.verdict(), Verdict::Stopped(Some("saved".to_owned())));
    for time in (1000..25_000).step_by(1000) {
        assert_eq!(other.on(ms(time), Event::Tick), []);
    }
    assert_eq!(other.on(ms(25_001), Event::Tick), [Action::Kill(1)]);
    assert_eq!(
        buried(&mut other, ms(25_002)),
        failed(1, Cause::GraceExpired, &[])
    );
}

#[test]
fn a_rank_is_asked_once_it_handles_signals() {
    let mut s = Supervisor::new(3, TIMEOUTS, ms(0));
    s.on(ms(0), beat(1, "", 0));
    assert_eq!(s.on(ms(1), Event::Leave), [Action::Ask(1)]);
    assert_eq!(s.on(ms(2), beat(0, "", 0)), [Action::Ask(0)]);
    assert_eq!(s.on(ms(999), beat(0, "data", 1)), []);
    assert_eq!(s.on(ms(1000), Event::Tick), [Action::Ask(2)]);
    assert_eq!(s.on(ms(2000), beat(2, "", 0)), []);
}

#[test]
fn a_rank_asked_before_it_handles_signals_has_stopped() {
    let mut s = Supervisor::new(1, TIMEOUTS, ms(0));
    s.on(ms(1), Event::Leave);
    assert_eq!(s.on(ms(2), signal(0, SIGTERM)), []);
    assert_eq!(s.verdict(), Verdict::Stopped(None));
    let mut unasked = Supervisor::new(1, TIMEOUTS, ms(0));
    unasked.on(ms(2), signal(0, SIGTERM));
    assert!(matches!(unasked.verdict(), Verdict::Failed { .. }));
}

#[test]
fn a_rank_stopped_from_outside_stops_all() {
    let mut s = up(3);
    s.on(ms(1), Event::Said(1, Message::Stopped("saved".to_owned())));
    assert_eq!(s.on(ms(1), code(1, 3)), [0, 2].map(Action::Ask));
}

// A rank that is asked while it connects leaves; one that had reached it already waits in vain, or
// saves and leaves too.
#[test]
fn a_rank_that_loses_one_that_was_asked_to_leave_has_not_failed_and_is_killed_if_it_waits_for_it() {
    for ended in [code(0, STOPPED), signal(0, SIGTERM)] {
        let mut s = up(4);
        s.on(ms(1), Event::Leave);
        for rank in [1, 2] {
            let lost = failure(FaultKind::PeerLost, ms(2), Some(0));
            assert_eq!(s.on(ms(2), Event::Said(rank, Message::Failure(lost))), []);
        }
        assert_eq!(s.on(ms(3), ended), []);
        assert_eq!(s.on(ms(4), waiting(2, "data", 1, Some(3))), []);
        assert_eq!(
            s.on(ms(5), waiting(1, "data", 1, Some(0))),
            [Action::Kill(1)]
        );
        assert_eq!(s.on(ms(6), signal(1, SIGKILL)), []);
        for rank in [2, 3] {
            assert_eq!(s.on(ms(7), code(rank, STOPPED)), []);
        }
        assert_eq!((s.is_over(), s.verdict()), (true, Verdict::Stopped(None)));
    }
    // A signal to one of them alone: the others are asked first.
    let mut s = up(2);
    let lost = failure(FaultKind::PeerLost, ms(2), Some(0));
    s.on(ms(2), Event::Said(1, Message::Failure(lost)));
    s.on(ms(2), Event::Said(0, Message::Stopped("early".to_owned())));
    assert_eq!(s.on(ms(3), code(0, STOPPED)), [Action::Ask(1)]);
    s.on(ms(4), code(1, STOPPED));
    let words = Some("early".to_owned());
    assert_eq!(s.verdict(), Verdict::Stopped(words));
    // Nobody has asked.
    let mut s = up(2);
    let lost = failure(FaultKind::PeerLost, ms(2), Some(0));
    s.on(ms(2), Event::Said(1, Message::Failure(lost)));
    s.on(ms(3), signal(0, SIGTERM));
    let verdict = buried(&mut s, ms(4));
    let cause = Cause::Signal(SIGTERM);
    assert!(matches!(verdict, Verdict::Failed { rank: 0, cause: c, .. } if c == cause));
}

#[test]
fn ranks_that_join_are_killed_when_asked_and_have_not_failed() {
    let mut s = up(3);
    s.on(ms(1), beat(0, "connecting", 1));
    assert_eq!(s.on(ms(2), Event::Leave), [0, 1, 2].map(Action::Ask));
    let kills = [0, 1, 2].map(Action::Kill);
    assert_eq!(s.on(ms(3), beat(1, "joining", 1)), kills);
    let lost = failure(FaultKind::PeerLost, ms(4), None);
    s.on(ms(4), Event::Said(2, Message::Failure(lost)));
    assert_eq!(buried(&mut s, ms(5)), Verdict::Stopped(None));
    // One that has joined may have something to save.
    let mut s = up(2);
    s.on(ms(1), beat(0, "target", 1));
    s.on(ms(1), beat(1, "joining", 1));
    assert_eq!(s.on(ms(2), Event::Leave), [0, 1].map(Action::Ask));
    // A failure of its own counts.
    let mut s = up(1);
    s.on(ms(1), beat(0, "joining", 1));
    s.on(ms(2), Event::Leave);
    let refused = failure(FaultKind::Failed, ms(3), None);
    s.on(ms(3), Event::Said(0, Message::Failure(refused.clone())));
    assert_eq!(
        buried(&mut s, ms(4)),
        failed(0, Cause::Failure(refused), &[])
    );
}

#[test]
fn ranks_of_a_lost_node_are_the_cause_not_their_peers() {
    let mut s = up(4);
    let lost = failure(FaultKind::PeerLost, ms(5), Some(2));
    s.on(ms(5), Event::Said(0, Message::Failure(lost)));
    s.on(ms(6), Event::Ended(2, ProcessEnd::Lost));
    s.on(ms(6), Event::Ended(3, ProcessEnd::Lost));
    assert_eq!(buried(&mut s, ms(7)), failed(2, Cause::Lost, &[0]));
}

#[test]
fn silent_ranks_do_not_count_as_hung() {
    let mut s = up(2);
    // In the last heartbeats, each waited for the other.
    s.on(ms(100), waiting(1, "train", 1, Some(0)));
    s.on(ms(200), waiting(0, "train", 1, Some(1)));
    s.on(ms(4000), Event::Silent(1, true));
    assert_eq!(waits(&mut s, 4200, 64_000), []);
    let lost = failure(FaultKind::PeerLost, ms(64_000), Some(1));
    s.on(ms(64_000), Event::Said(0, Message::Failure(lost.clone())));
    // Nothing caused it that is known.
    let kills = [0, 1].map(|rank| (69_000, Action::Kill(rank)));
    assert_eq!(waits(&mut s, 64_200, 69_100), kills);
    s.on(ms(69_100), signal(0, SIGKILL));
    waits(&mut s, 69_300, 74_300);
    assert!(s.is_over());
    assert_eq!(s.verdict(), failed(0, Cause::Failure(lost), &[]));
}

#[test]
fn a_second_signal_kills_at_once() {
    let mut s = Supervisor::new(2, TIMEOUTS, ms(0));
    s.on(ms(1), Event::Leave);
    assert_eq!(s.on(ms(2), Event::LeaveNow(2)), [0, 1].map(Action::Kill));
    assert_eq!(buried(&mut s, ms(3)), Verdict::Interrupted(2));
}

/// Sends ticks at the interval of the real loop; returns the actions with their times.
fn waits(s: &mut Supervisor, from: u64, until: u64) -> Vec<(u64, Action)> {
    let looks = (from..until).step_by(200);
    let mut done = Vec::new();
    for look in looks {
        done.extend(s.on(ms(look), Event::Tick).into_iter().map(|a| (look, a)));
    }
    done
}

#[test]
fn hang_limits_are_learned_from_the_run() {
    let mut s = Supervisor::new(2, TIMEOUTS, ms(0));
    // Steps take 4 s on rank 0 and 100 ms on rank 1; heartbeats without news are not progress.
    let mut ticks = 0;
    for step in 0..80 {
        ticks += 1;
        s.on(ms(step * 100), beat(1, "train", ticks));
        if step % 40 == 0 {
            s.on(ms(step * 100), beat(0, "train", ticks));
        }
    }
    s.on(ms(8000), beat(0, "train", 1000));
    s.on(ms(8000), beat(1, "train", ticks));
    let done = waits(&mut s, 8200, 69_000);
    let tell = |rank, silent: Duration, longest, limit| Action::Tell {
        rank,
        silent,
        longest: Some(longest),
        limit: Some(limit),
        waits_for_disk: false,
    };
    // The last step of rank 1 was at 7.9 s.
    let slow = tell(1, ms(10_100), ms(100), KILL);
    let slower = tell(0, ms(20_000), ms(4000), ms(80_000));
    let kills = [(68_000, Action::Kill(1)), (68_600, Action::Kill(0))];
    let mut expected = vec![(18_000, slow), (28_000, slower)];
    expected.extend(kills);
    assert_eq!(done, expected);
    assert_eq!(
        buried(&mut s, ms(68_800)),
        failed(1, Cause::Hung(KILL), &[])
    );
}

#[test]
fn a_rank_that_waits_for_a_disk_has_ten_minutes() {
    let mut s = Supervisor::new(1, TIMEOUTS, ms(0));
    s.on(ms(0), beat(0, "saving", 1));
    s.on(ms(100), beat(0, "saving", 2));
    let Event::Said(rank, mut said) = beat(0, "saving", 2) else {
        unreachable!("a beat is said")
    };
    if let Message::Beat { waits_for_disk, .. } = &mut said {
        *waits_for_disk = true;
    }
    s.on(ms(1100), Event::Said(rank, said));
    let tell = Action::Tell {
        rank: 0,
        silent: ms(10_100),
        longest: Some(ms(100)),
        limit: Some(KILL_FIRST),
        waits_for_disk: true,
    };
    let expected = [(10_200, tell), (600_200, Action::Kill(0))];
    assert_eq!(waits(&mut s, 1200, 600_400), expected);
}

#[test]
fn a_reported_rank_that_makes_progress_is_not_killed() {
    let mut s = Supervisor::new(1, TIMEOUTS, ms(0));
    s.on(ms(0), beat(0, "train", 1));
    s.on(ms(100), beat(0, "train", 2));
    let done = waits(&mut s, 200, 12_000);
    assert!(
        matches!(done[..], [(10_200, Action::Tell { .. })]),
        "{done:?}"
    );
    assert_eq!(
        s.on(ms(12_000), beat(0, "train", 3)),
        [Action::Recovered(0)]
    );
    // The limit has grown with that pause.
    assert_eq!(waits(&mut s, 12_200, 12_000 + 5 * 11_900), []);
}

#[test]
fn waiting_ranks_do_not_count_as_hung_and_the_awaited_one_is_reported_sooner() {
    let mut s = Supervisor::new(3, TIMEOUTS, ms(0));
    for (time, ticks) in [(0, 1), (100, 2)] {
        for rank in 0..3 {
            s.on(ms(time), beat(rank, "train", ticks));
        }
    }
    for rank in [0, 2] {
        s.on(ms(300), waiting(rank, "train", 2, Some(1)));
    }
    let done = waits(&mut s, 400, 60_000);
    assert!(
        matches!(done[..], [(5200, Action::Tell { rank: 1, .. })]),
        "{done:?}"
    );
    // The pauses of its peers restart when it makes progress.
    assert_eq!(
        s.on(ms(60_000), beat(1, "train", 3)),
        [Action::Recovered(1)]
    );
    for rank in [0, 2] {
        assert_eq!(s.on(ms(60_100), beat(rank, "train", 2)), []);
    }
    assert_eq!(waits(&mut s, 60_200, 70_000), []);
    // If all wait for each other, each counts as hung.
    for rank in 0..3 {
        s.on(ms(70_000), waiting(rank, "train", 3, Some((rank + 1) % 3)));
    }
    let done = waits(&mut s, 70_200, 2_000_000);
    let killed = done.iter().any(|(_, done)| matches!(done, Action::Kill(_)));
    assert!(killed, "{done:?}");
}

#[test]
fn ranks_that_wait_for_a_dead_one_get_no_grace_period() {
    let mut s = Supervisor::new(3, TIMEOUTS, ms(0));
    s.on(ms(1), Event::Leave);
    // A finished rank waits for none, whatever its last heartbeat says.
    s.on(ms(2), waiting(2, "train", 1, Some(0)));
    assert_eq!(s.on(ms(3), code(0, 0)), []);
    assert_eq!(s.on(ms(4), signal(1, SIGKILL)), []);
    let forsaken = waiting(2, "train", 1, Some(1));
    assert_eq!(s.on(ms(5), forsaken), [Action::Kill(2)]);
    assert_eq!(
        buried(&mut s, ms(6)),
        failed(1, Cause::Signal(SIGKILL), &[])
    );
}

#[test]
fn the_start_of_a_phase_may_take_long() {
    let mut s = Supervisor::new(1, TIMEOUTS, ms(0));
    s.on(ms(0), beat(0, "train", 1));
    s.on(ms(100), beat(0, "train", 2));
    s.on(ms(200), beat(0, "saving", 3));
    let done = waits(&mut s, 400, 599_000);
    assert!(
        matches!(done[..], [(60_200, Action::Tell { .. })]),
        "{done:?}"
    );
    assert_eq!(
        waits(&mut s, 599_200, 700_000)[0],
        (600_200, Action::Kill(0))
    );
}

#[test]
fn a_stopped_launcher_reports_no_rank() {
    let mut s = Supervisor::new(1, TIMEOUTS, ms(0));
    s.on(ms(0), beat(0, "train", 1));
    s.on(ms(100), beat(0, "train", 2));
    assert_eq!(s.on(ms(3_600_000), Event::Tick), []);
    let mut leaving = up(1);
    leaving.on(ms(100), Event::Leave);
    assert_eq!(leaving.on(ms(3_600_000), Event::Tick), []);
}

#[test]
fn a_rank_that_survives_a_kill_is_given_up() {
    let mut s = Supervisor::new(1, TIMEOUTS, ms(0));
    s.on(ms(1), Event::Leave);
    s.on(ms(2), Event::LeaveNow(15));
    waits(&mut s, 200, 5400);
    assert!(s.is_over());
    assert_eq!(s.verdict(), Verdict::Interrupted(15));
}

fn event() -> impl Strategy<Value = Event> {
    let rank = 0..4usize;
    let kind = prop_oneof![
        Just(FaultKind::BadInput),
        Just(FaultKind::PeerLost),
        Just(FaultKind::Bug)
    ];
    let phase = prop_oneof![Just("train"), Just("eval"), Just("saving")];
    prop_oneof![
        8 => (rank.clone(), phase, 0..50u64, prop::option::of(0..5usize))
            .prop_map(|(r, p, t, w)| waiting(r, p, t, w)),
        1 => (rank.clone(), kind, 0..90_000u64, prop::option::of(0..4usize))
            .prop_map(|(r, k, t, b)| Event::Said(r, Message::Failure(failure(k, ms(t), b)))),
        1 => rank.clone().prop_map(|r| Event::Said(r, Message::Stopped("saved".to_owned()))),
        1 => (rank.clone(), prop_oneof![Just(0), Just(1), Just(2), Just(3), Just(101)])
            .prop_map(|(r, c)| code(r, c)),
        1 => (rank.clone(), prop_oneof![Just(SIGKILL), Just(SIGTERM), Just(SIGABRT)])
            .prop_map(|(r, n)| signal(r, n)),
        1 => rank.prop_map(|r| Event::Ended(r, ProcessEnd::Lost)),
        1 => Just(Event::Leave),
        1 => Just(Event::LeaveNow(SIGTERM)),
        8 => Just(Event::Tick),
    ]
}

proptest! {
    /// For any events, after which nothing more happens, every rank is killed or given up within a
    /// bounded time, no action is on a rank that has exited, and there is a verdict.
    #[test]
    fn no_rank_lives_unwatched(
        events in prop::collection::vec((event(), 0..1500u64), 0..60),
        hang in prop_oneof![Just(HangLimit::Learned), Just(HangLimit::After(ms(7000)))],
    ) {
        let mut s = Supervisor::new(4, Timeouts { hang, ..TIMEOUTS }, ms(0));
        let (mut now, mut gone) = (0, [false; 4]);
        for (event, pause) in events {
            now += pause;
            if let Event::Said(rank, _) | Event::Ended(rank, _) = &event {
                if gone[*rank] {
                    continue;
                }
                gone[*rank] = matches!(event, Event::Ended(..));
            }
            for action in s.on(ms(now), event) {
                if let Action::Ask(rank) | Action::Kill(rank) = action {
                    prop_assert!(!gone[rank], "{action:?} of a rank that is gone");
                }
            }
            prop_assert_eq!(s.is_over(), s.ranks.iter().all(|rank| rank.ended.is_some()));
        }
        let failed = s.failed.is_some() && s.asked.is_none();
        let limit = if failed { 11_000 } else { 700_000 };
        waits(&mut s, now, now + limit);
        prop_assert!(s.is_over(), "{s:?}");
        let verdict = s.verdict();
        if let Verdict::Failed { rank, consequences, .. } = &verdict {
            prop_assert!(!consequences.contains(rank));
        }
        // Ranks that exited with code 0 or 3 are never the failed one.
        if s.ranks.iter().all(|r| matches!(r.ended, Some((_, End::Process(ProcessEnd::Code(0)))))
            && r.failure.is_none())
        {
            prop_assert!(matches!(verdict, Verdict::Done | Verdict::Interrupted(_)));
        }
    }
}
