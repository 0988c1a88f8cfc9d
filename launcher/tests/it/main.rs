//! The launcher from outside, with a shell script in a rank's place.
#![cfg(test)]

mod ends;
mod house;
mod refusals;
mod resume;
mod signals;
