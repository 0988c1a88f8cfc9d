//! The stored form of ids.

use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

/// The stored form of an id; little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// Two bytes an id.
    U16,
    /// Four bytes an id.
    U32,
}

impl Display for Dtype {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U16 => "u16",
            Self::U32 => "u32",
        })
    }
}

impl Dtype {
    /// Bytes of one id.
    pub const fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// The smallest dtype that holds all ids below `vocab`.
    pub const fn holding(vocab: u32) -> Self {
        if vocab <= 1 << 16 {
            Self::U16
        } else {
            Self::U32
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixty_five_thousand_five_hundred_and_thirty_six_ids_fit_two_bytes() {
        assert_eq!(Dtype::holding(65_536), Dtype::U16);
        assert_eq!(Dtype::holding(65_537), Dtype::U32);
    }
}
