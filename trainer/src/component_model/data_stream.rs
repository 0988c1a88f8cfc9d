//! The streams of data of a step.

/// A stream of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataStream {
    /// The data that components are to explain.
    Target,
    /// Other data, on which the target is to stay as it is: all of the delta takes part.
    Nontarget,
}

impl DataStream {
    /// Both, in the order in which a step has them.
    pub const ALL: [Self; 2] = [Self::Target, Self::Nontarget];

    /// The name of something of this stream, by that of the target stream.
    pub fn name(self, name: &str) -> String {
        match self {
            Self::Target => name.to_owned(),
            Self::Nontarget => format!("nontarget/{name}"),
        }
    }
}
