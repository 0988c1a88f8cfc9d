//! Checkpoints across processes, other programs and damaged disks.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod damage;
mod formats;
mod frozen;
mod killed;

use spd_checkpoint::{Dtype, Snapshot, Tensor};

/// A small checkpoint, every byte of which depends on the step.
fn sample(step: u64) -> Snapshot {
    let tensor = |name: &str, dtype: Dtype, shape: &[usize]| {
        let bytes = dtype.bytes() * shape.iter().product::<usize>();
        let mix = |index: usize| {
            (index as u64)
                .wrapping_add(step)
                .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        };
        Tensor {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
            bytes: (0..bytes)
                .map(|index| mix(index).to_le_bytes()[7])
                .collect(),
            is_frozen: false,
        }
    };
    let meta = serde_json::json!({ "phase": "train", "data": { "position": step * 32 } });
    Snapshot {
        step,
        meta: serde_json::from_value(meta).unwrap(),
        tensors: vec![
            tensor("routing", Dtype::U8, &[5]),
            tensor("components.fc.V", Dtype::F32, &[3, 2]),
            tensor("moments.fc.V", Dtype::Bf16, &[2]),
            tensor("empty", Dtype::F64, &[0]),
        ],
    }
}

/// A directory in memory where possible: these tests write a thousand checkpoints.
fn quick_dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}
