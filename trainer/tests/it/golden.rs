//! Against the reference: the same numbers in, the same numbers out.
//!
//! Another program (PyTorch) wrote down its parameters, batches, random draws and results; ours is fed the first three
//! and must arrive at the fourth. The files lie in `$SPD_SHARED/golden` and `$SPD_SHARED/targets`, or else in `shared/` beside the
//! workspace; without them these tests say so and pass. Sizes are read from the files, so other numbers of the same form will do.

mod ascent;
mod ce_kl;
mod compare;
mod numbers;
mod one_step;
mod replica;
mod scalars;
mod target_file;
mod terms;
mod tied;
mod trained_targets;
mod trajectory;
