//! The records of a `.wandb` file: the needed part of W&B's `wandb_internal.proto`.

use prost::Message;

/// A file is sent when it is named.
pub(super) const NOW: i32 = 0;
/// A file is sent at the end.
pub(super) const END: i32 = 1;

/// A file of unknown kind.
pub(super) const OTHER: i32 = 0;
/// A file of a history row.
pub(super) const MEDIA: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Record {
    /// From 1.
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
    #[prost(oneof = "Held", tags = "2, 3, 6, 7, 10, 12, 13, 17, 18, 21")]
    pub(super) held: Option<Held>,
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

/// A value with its name: of the history, the summary, the config, the machine.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Item {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    /// JSON that may hold bare `NaN`, `Infinity` and `-Infinity`.
    #[prost(string, tag = "16")]
    pub(super) value: String,
}

/// Values of the summary, or of the config.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Items {
    #[prost(message, repeated, tag = "1")]
    pub(super) update: Vec<Item>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct History {
    #[prost(message, repeated, tag = "1")]
    pub(super) items: Vec<Item>,
    #[prost(message, optional, tag = "2")]
    pub(super) step: Option<Step>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Step {
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Files {
    #[prost(message, repeated, tag = "1")]
    pub(super) files: Vec<Named>,
}

/// A file by its path below `files/`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Named {
    #[prost(string, tag = "1")]
    pub(super) path: String,
    /// [`NOW`] or [`END`].
    #[prost(int32, tag = "2")]
    pub(super) policy: i32,
    /// [`OTHER`] or [`MEDIA`].
    #[prost(int32, tag = "3")]
    pub(super) kind: i32,
}

/// Values of the machine. W&B prefixes their names with `system.`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Stats {
    #[prost(message, optional, tag = "2")]
    pub(super) time: Option<Time>,
    #[prost(message, repeated, tag = "3")]
    pub(super) items: Vec<Item>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Alert {
    #[prost(string, tag = "1")]
    pub(super) title: String,
    #[prost(string, tag = "2")]
    pub(super) text: String,
    #[prost(string, tag = "3")]
    pub(super) level: String,
}

/// The definition of values by name, or by a pattern of names.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Metric {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) pattern: String,
    /// The x axis.
    #[prost(string, tag = "4")]
    pub(super) axis: String,
    #[prost(message, optional, tag = "6")]
    pub(super) options: Option<Options>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Options {
    /// The value of the axis is added to rows that lack it.
    #[prost(bool, tag = "1")]
    pub(super) is_synced: bool,
    /// Explicitly requested.
    #[prost(bool, tag = "3")]
    pub(super) is_defined: bool,
}

/// A line of the console.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Output {
    /// 0 stderr, 1 stdout.
    #[prost(int32, tag = "1")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) time: Option<Time>,
    /// With its end.
    #[prost(string, tag = "3")]
    pub(super) line: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Run {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    /// Empty means the key's own.
    #[prost(string, tag = "2")]
    pub(super) entity: String,
    #[prost(string, tag = "3")]
    pub(super) project: String,
    #[prost(message, optional, tag = "4")]
    pub(super) config: Option<Items>,
    #[prost(string, tag = "6")]
    pub(super) group: String,
    #[prost(string, tag = "7")]
    pub(super) job_type: String,
    #[prost(string, tag = "8")]
    pub(super) name: String,
    #[prost(string, tag = "9")]
    pub(super) notes: String,
    #[prost(string, repeated, tag = "10")]
    pub(super) tags: Vec<String>,
    #[prost(string, tag = "13")]
    pub(super) host: String,
    #[prost(message, optional, tag = "17")]
    pub(super) started: Option<Time>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Exit {
    #[prost(int32, tag = "1")]
    pub(super) code: i32,
    /// Seconds.
    #[prost(int32, tag = "2")]
    pub(super) runtime: i32,
    /// The run goes on elsewhere, and its exit code is unknown.
    #[prost(bool, tag = "3")]
    pub(super) is_open: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(message, optional, tag = "1")]
    pub(super) version: Option<Version>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Version {
    #[prost(string, tag = "1")]
    pub(super) producer: String,
    /// The oldest client that can read it.
    #[prost(string, tag = "2")]
    pub(super) oldest: String,
}

/// A time since 1970.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Time {
    #[prost(int64, tag = "1")]
    pub(super) seconds: i64,
    #[prost(int32, tag = "2")]
    pub(super) nanoseconds: i32,
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
