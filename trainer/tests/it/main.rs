//! Stories of the trainer: what it computes, and what it does with a run.

mod golden;
