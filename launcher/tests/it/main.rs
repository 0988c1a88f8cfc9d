//! The launcher from outside, with a shell script in a rank's place.
#![cfg(test)]

mod bad_input;
mod bench;
mod changed;
mod doctor;
mod ends;
mod figures;
mod gpu;
mod house;
mod memory;
mod places;
mod refusals;
mod resume;
mod rows;
mod signals;
mod stuck;
mod sweep;
mod target;
mod toys;
mod troubles;
