//! What went wrong.

/// What a device made of it.
pub type Result<T> = std::result::Result<T, Fault>;

/// What went wrong with a GPU or its libraries, in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{line}")]
pub struct Fault {
    line: String,
    of_peer: bool,
}

impl Fault {
    /// Told in this line.
    pub fn new(line: impl Into<String>) -> Self {
        Self {
            line: line.into(),
            of_peer: false,
        }
    }

    /// Another rank is not there any more, or never came; told in this line.
    pub fn peer_lost(line: impl Into<String>) -> Self {
        Self {
            line: line.into(),
            of_peer: true,
        }
    }

    /// Whether another rank is at fault.
    pub fn is_peer_lost(&self) -> bool {
        self.of_peer
    }
}
