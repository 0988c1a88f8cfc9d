//! Sizes of a network that is cut down.

/// Largest sizes of a network that is [cut down](super::Target::cut_to); its own stay where they
/// are smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Most {
    /// Vocabulary size.
    pub vocab: usize,
    /// Number of positions.
    pub positions: usize,
    /// Width of the residual stream, a power of two.
    pub width: usize,
    /// Blocks.
    pub layers: usize,
}

impl Most {
    /// Heads of a network whose width is cut.
    const HEADS: usize = 4;

    /// Number of query heads, and of key heads, of a network of this width and these heads: they
    /// divide its new width and each other, and share keys if they did.
    ///
    /// - `width`, `heads`, `kv_heads`: its own sizes
    pub fn heads(&self, width: usize, heads: usize, kv_heads: usize) -> [usize; 2] {
        if width <= self.width {
            return [heads, kv_heads];
        }
        // Of a power of two, all powers of two up to it are divisors.
        let few = 1 << heads.min(Self::HEADS).ilog2();
        let kv = match kv_heads {
            all if all == heads => few,
            1 => 1,
            _ => (few / 2).max(1),
        };
        [few, kv]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_divide_the_new_width_and_each_other() {
        let most = Most {
            vocab: 8,
            positions: 32,
            width: 64,
            layers: 2,
        };
        for (width, heads, kv_heads, expected) in [
            (768, 12, 12, [4, 4]),
            (4096, 32, 8, [4, 2]),
            (2048, 8, 1, [4, 1]),
            (96, 3, 3, [2, 2]),
            (65, 1, 1, [1, 1]),
            (48, 6, 3, [6, 3]),
        ] {
            assert_eq!(most.heads(width, heads, kv_heads), expected, "{width}");
        }
    }
}
