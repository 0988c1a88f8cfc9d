//! Destinations of kernels.

/// A destination that is overwritten or added to: an output of an op, a part of it, or a partial
/// result in scratch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Output<T> {
    /// Its values, undefined unless they are added to.
    pub values: T,
    /// Whether it is added to.
    pub add: bool,
}

impl<T> Output<T> {
    /// A destination that is overwritten, or added to if `add`.
    pub(crate) fn new(values: T, add: bool) -> Self {
        Self { values, add }
    }

    /// A destination that is overwritten.
    pub(crate) fn overwrite(values: T) -> Self {
        Self::new(values, false)
    }

    /// A destination that is added to.
    pub(crate) fn add_to(values: T) -> Self {
        Self::new(values, true)
    }
}

impl Output<&mut [f32]> {
    /// Writes the values in order, or adds them.
    #[inline(always)]
    pub(crate) fn put(self, values: impl Iterator<Item = f32>) {
        if self.add {
            for (out, value) in self.values.iter_mut().zip(values) {
                *out += value;
            }
        } else {
            for (out, value) in self.values.iter_mut().zip(values) {
                *out = value;
            }
        }
    }

    /// The same destination, for a shorter time.
    pub(crate) fn reborrow(&mut self) -> Output<&mut [f32]> {
        Output::new(self.values, self.add)
    }
}
