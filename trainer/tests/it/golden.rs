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

use std::path::Path;
use std::sync::{Arc, OnceLock};

use spd_engine::cuda::Device;
use spd_engine::{Pool, Processor};

/// Where the programs of these tests run: on the GPU whose number is `$SPD_TEST_GPU`, if that is set, or on so many threads. Tests
/// on a GPU run one at a time, best in a process each.
fn processor(threads: usize) -> Processor {
    static GPU: OnceLock<Arc<Device>> = OnceLock::new();
    let Ok(ordinal) = std::env::var("SPD_TEST_GPU") else {
        return Arc::new(Pool::new(threads).expect("threads that start")).into();
    };
    let open = || {
        let number = ordinal
            .parse()
            .expect("SPD_TEST_GPU is the number of a GPU");
        let cache = std::env::var_os("SPD_CACHE");
        let cache = cache.map(|cache| Path::new(&cache).join("kernels"));
        Device::open(number, cache)
            .unwrap_or_else(|fault| panic!("SPD_TEST_GPU={ordinal}: {fault}"))
    };
    Processor::Gpu(Some(Arc::clone(GPU.get_or_init(open))))
}
