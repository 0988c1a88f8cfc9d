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
    /// A destination that is overwritten.
    pub(crate) fn overwrite(values: T) -> Self {
        Self { values, add: false }
    }

    /// A destination that is added to.
    pub(crate) fn add_to(values: T) -> Self {
        Self { values, add: true }
    }
}

impl Output<&mut [f32]> {
    /// The same destination, for a shorter time.
    pub(crate) fn reborrow(&mut self) -> Output<&mut [f32]> {
        Output {
            values: self.values,
            add: self.add,
        }
    }
}
