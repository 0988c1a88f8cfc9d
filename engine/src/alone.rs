//! A program that has an arena for itself.

use std::ops::{Deref, DerefMut};

/// A program with an arena for itself.
#[derive(Debug)]
pub struct Alone<P, A> {
    pub(crate) program: P,
    pub(crate) arena: A,
}

impl<P, A> Deref for Alone<P, A> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.program
    }
}

impl<P, A> DerefMut for Alone<P, A> {
    fn deref_mut(&mut self) -> &mut P {
        &mut self.program
    }
}
