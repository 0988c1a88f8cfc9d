//! The CUDA side.
//!
//! Nothing of CUDA is linked: [`libraries`] are found when the program runs, and where there are none it says so.

pub mod libraries;
