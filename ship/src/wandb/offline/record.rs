//! The records of a `.wandb` file: the needed part of W&B's `wandb_internal.proto`.

use crate::messages::messages;

/// A file is sent when it is named.
pub(super) const NOW: i32 = 0;
/// A file is sent at the end.
pub(super) const END: i32 = 1;

/// A file of unknown kind.
pub(super) const OTHER: i32 = 0;
/// A file of a history row.
pub(super) const MEDIA: i32 = 2;

messages! {
    Record {
        /// From 1.
        num: i64 = [int64, tag = "1"],
        held: Option<Held> = [oneof = "Held", tags = "2, 3, 6, 7, 10, 12, 13, 17, 18, 21"],
    }

    /// A value with its name: of the history, the summary, the config, the machine.
    Item {
        key: String = [string, tag = "1"],
        /// JSON that may hold bare `NaN`, `Infinity` and `-Infinity`.
        value: String = [string, tag = "16"],
    }

    /// Values of the summary, or of the config.
    Items {
        update: Vec<Item> = [message, repeated, tag = "1"],
    }

    History {
        items: Vec<Item> = [message, repeated, tag = "1"],
        step: Option<Step> = [message, optional, tag = "2"],
    }

    Step {
        num: i64 = [int64, tag = "1"],
    }

    Files {
        files: Vec<Named> = [message, repeated, tag = "1"],
    }

    /// A file by its path below `files/`.
    Named {
        path: String = [string, tag = "1"],
        /// [`NOW`] or [`END`].
        policy: i32 = [int32, tag = "2"],
        /// [`OTHER`] or [`MEDIA`].
        kind: i32 = [int32, tag = "3"],
    }

    /// Values of the machine. W&B prefixes their names with `system.`.
    Stats {
        time: Option<Time> = [message, optional, tag = "2"],
        items: Vec<Item> = [message, repeated, tag = "3"],
    }

    Alert {
        title: String = [string, tag = "1"],
        text: String = [string, tag = "2"],
        level: String = [string, tag = "3"],
    }

    /// The definition of values by name, or by a pattern of names.
    Metric {
        name: String = [string, tag = "1"],
        pattern: String = [string, tag = "2"],
        /// The x axis.
        axis: String = [string, tag = "4"],
        options: Option<Options> = [message, optional, tag = "6"],
    }

    Options {
        /// The value of the axis is added to rows that lack it.
        is_synced: bool = [bool, tag = "1"],
        /// Explicitly requested.
        is_defined: bool = [bool, tag = "3"],
    }

    /// A line of the console.
    Output {
        /// 0 stderr, 1 stdout.
        kind: i32 = [int32, tag = "1"],
        time: Option<Time> = [message, optional, tag = "2"],
        /// With its end.
        line: String = [string, tag = "3"],
    }

    Run {
        id: String = [string, tag = "1"],
        /// Empty means the key's own.
        entity: String = [string, tag = "2"],
        project: String = [string, tag = "3"],
        config: Option<Items> = [message, optional, tag = "4"],
        group: String = [string, tag = "6"],
        job_type: String = [string, tag = "7"],
        name: String = [string, tag = "8"],
        notes: String = [string, tag = "9"],
        tags: Vec<String> = [string, repeated, tag = "10"],
        host: String = [string, tag = "13"],
        started: Option<Time> = [message, optional, tag = "17"],
    }

    Exit {
        code: i32 = [int32, tag = "1"],
        /// Seconds.
        runtime: i32 = [int32, tag = "2"],
        /// The run goes on elsewhere, and its exit code is unknown.
        is_open: bool = [bool, tag = "3"],
    }

    Header {
        version: Option<Version> = [message, optional, tag = "1"],
    }

    Version {
        producer: String = [string, tag = "1"],
        /// The oldest client that can read it.
        oldest: String = [string, tag = "2"],
    }

    /// A time since 1970.
    Time {
        seconds: i64 = [int64, tag = "1"],
        nanoseconds: i32 = [int32, tag = "2"],
    }
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Held {
    #[prost(message, tag = "2")]
    History(History),
    #[prost(message, tag = "3")]
    Summary(Items),
    #[prost(message, tag = "6")]
    Files(Files),
    #[prost(message, tag = "7")]
    Stats(Stats),
    #[prost(message, tag = "10")]
    Alert(Alert),
    #[prost(message, tag = "12")]
    Metric(Metric),
    #[prost(message, tag = "13")]
    Output(Output),
    #[prost(message, tag = "17")]
    Run(Run),
    #[prost(message, tag = "18")]
    Exit(Exit),
    #[prost(message, tag = "21")]
    Header(Header),
}

impl Time {
    /// From seconds since 1970, to a microsecond.
    pub(super) fn of(seconds: f64) -> Self {
        let since = jiff::SignedDuration::try_from_secs_f64(seconds).unwrap_or_default();
        let since = since.round(jiff::Unit::Microsecond).unwrap_or(since);
        Self {
            seconds: since.as_secs(),
            nanoseconds: since.subsec_nanos(),
        }
    }
}
