//! Errors of GPUs, their libraries, and sums over ranks.

/// Result of a call on a device, whose error is a [`Fault`] unless another is named.
pub type Result<T, E = Fault> = std::result::Result<T, E>;

/// A failure of a GPU or its libraries, or of another rank, in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{line}")]
pub struct Fault {
    line: String,
    of_peer: bool,
}

impl Fault {
    /// A fault with this message.
    pub fn new(line: impl Into<String>) -> Self {
        Self {
            line: line.into(),
            of_peer: false,
        }
    }

    /// The loss of another rank (it left, or never came), with this message.
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
