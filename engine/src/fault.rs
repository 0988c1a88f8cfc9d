//! What went wrong.

/// What a device made of it.
pub type Result<T> = std::result::Result<T, Fault>;

/// What went wrong with a GPU or its libraries, in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Fault(String);

impl Fault {
    /// Told in this line.
    pub fn new(line: impl Into<String>) -> Self {
        Self(line.into())
    }
}
