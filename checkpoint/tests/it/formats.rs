//! Compatibility of the files with Python and the safetensors library.

use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::json;
use spd_checkpoint::{Dtype, FORMAT, Snapshot, Tensor, load, newest, write};

use crate::sample;

fn floats(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// The checkpoint written by `fixtures/make_fixtures.py`.
fn step_7() -> Snapshot {
    let tensor = |name: &str, dtype, shape: &[usize], bytes: Vec<u8>| Tensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        bytes,
        is_frozen: false,
    };
    let meta = json!({
        "phase": "train",
        "data": { "position": 9_007_199_254_740_993_u64, "seed": 3 },
        "rate": 0.1,
    });
    Snapshot {
        step: 7,
        meta: serde_json::from_value(meta).unwrap(),
        tensors: vec![
            tensor("routing", Dtype::U8, &[3], vec![1, 0, 1]),
            tensor(
                "components.fc.V",
                Dtype::F32,
                &[2, 2],
                floats(&[0.5, -2.0, 1e-30, 3.0]),
            ),
            tensor(
                "moments.fc.V",
                Dtype::Bf16,
                &[2],
                vec![0x80, 0x3f, 0x40, 0xc0],
            ),
            tensor("importance \u{e9} \"x\"", Dtype::F32, &[], floats(&[0.25])),
            tensor(
                "seen",
                Dtype::U64,
                &[1],
                ((1u64 << 63) + 1).to_le_bytes().to_vec(),
            ),
        ],
    }
}

#[test]
fn a_checkpoint_written_by_python_opens() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    assert_eq!(load(&fixtures.join("v1/step-00000007")).unwrap(), step_7());
    let mut step_7 = step_7();
    step_7.tensors[1].is_frozen = true;
    assert_eq!(load(&fixtures.join("v2/step-00000007")).unwrap(), step_7);
    assert_eq!(FORMAT, 2, "a new format needs a fixture of its own");
}

// The header is a function of the tensors alone, so all bytes are equal.
#[test]
fn rust_and_python_write_the_same_tensors_file() {
    let root = tempfile::tempdir().unwrap();
    let ours = write(root.path(), &step_7())
        .unwrap()
        .join("tensors.safetensors");
    let theirs = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/v1/step-00000007/tensors.safetensors");
    assert_eq!(fs::read(ours).unwrap(), fs::read(theirs).unwrap());
}

#[test]
fn load_returns_the_bits_that_were_written() {
    let root = tempfile::tempdir().unwrap();
    for snapshot in [Snapshot::default(), sample(1200), step_7()] {
        let path = write(root.path(), &snapshot).unwrap();
        assert_eq!(load(&path).unwrap(), snapshot);
        fs::remove_dir_all(path).unwrap();
    }
    let odd_numbers =
        json!({ "n": [0.1, -0.0, 5e-324, u64::MAX, i64::MIN, null], "z": { "b": 1, "a": 2 } });
    let snapshot = Snapshot {
        meta: serde_json::from_value(odd_numbers).unwrap(),
        ..sample(3)
    };
    write(root.path(), &snapshot).unwrap();
    let read = newest(root.path()).unwrap().snapshot.unwrap();
    assert_eq!(
        json!(read.meta).to_string(),
        json!(snapshot.meta).to_string()
    );
}

#[test]
fn the_safetensors_library_reads_the_file_by_itself() {
    let root = tempfile::tempdir().unwrap();
    let path = write(root.path(), &sample(1200)).unwrap();
    let bytes = fs::read(path.join("tensors.safetensors")).unwrap();
    let read = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(read.len(), 4);
    let tensor = &sample(1200).tensors[1];
    let view = read.tensor(&tensor.name).unwrap();
    assert_eq!(
        (view.dtype(), view.shape()),
        (safetensors::Dtype::F32, &[3, 2][..])
    );
    assert_eq!(view.data(), tensor.bytes);
}
