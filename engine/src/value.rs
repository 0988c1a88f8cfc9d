//! Values that flow between ops, and their types.

use std::fmt;

/// Values start at multiples of this many bytes: a cache line, and the widest vector.
pub(crate) const ALIGN: usize = 64;

/// A result of a program's op, or one of its inputs. Cheap to copy; belongs to one [`Builder`].
///
/// [`Builder`]: crate::Builder
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value(pub(crate) u32);

impl Value {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A scalar that changes from step to step without rebuilding the program: a learning rate, an
/// exponent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepScalar(pub(crate) u32);

/// Element types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// 32-bit floats.
    F32,
    /// bf16: upper halves of 32-bit floats.
    Bf16,
    /// Token ids.
    U32,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Element type and dimensions, row-major. `[]` is a scalar.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Type {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, slowest first.
    pub dims: Vec<usize>,
}

impl Type {
    /// Elements of the largest tensor: 256 TiB of f32.
    pub const MOST: usize = 1 << 46;

    /// An f32 tensor.
    pub fn f32(dims: &[usize]) -> Self {
        Self {
            dtype: DType::F32,
            dims: dims.to_vec(),
        }
    }

    /// A tensor of token ids.
    pub fn u32(dims: &[usize]) -> Self {
        Self {
            dtype: DType::U32,
            dims: dims.to_vec(),
        }
    }

    /// An f32 scalar.
    pub fn scalar() -> Self {
        Self::f32(&[])
    }

    /// Number of elements, at most [`Type::MOST`], so that sums of sizes do not overflow.
    pub fn len(&self) -> usize {
        // Checked first: a product with a zero is zero, whatever its other factors.
        if self.dims.contains(&0) {
            return 0;
        }
        let dims = self.dims.iter();
        dims.fold(1, |len: usize, &dim| {
            len.saturating_mul(dim).min(Self::MOST)
        })
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size in memory.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.bytes()
    }

    /// Last dimension; 1 for a scalar.
    pub fn columns(&self) -> usize {
        self.dims.last().copied().unwrap_or(1)
    }

    /// f32 of the same rows with so many columns.
    pub(crate) fn with_columns(&self, columns: usize) -> Self {
        let rows = self.dims.split_last().map_or(&[][..], |(_, rows)| rows);
        Self::f32(&[rows, &[columns]].concat())
    }

    /// Product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.dims
            .split_last()
            .map_or(1, |(_, rows)| rows.iter().product())
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.dtype {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::U32 => "u32",
        };
        write!(f, "{name} {:?}", self.dims)
    }
}
