//! The layout of `tensors.safetensors` and of the file of frozen tensors: the header's length, the
//! header, the tensors' bytes end to end.
//!
//! It is implemented here, not by the safetensors crate, so that bytes are hashed and written from
//! the snapshot without a copy.

use std::cmp::Reverse;

use serde_json::{Map, Value, json};

use crate::manifest::TensorEntry;

/// The order of tensors in a file: wide elements first, so that each tensor begins at a multiple of
/// its element's size and can be viewed in place. Equal widths keep the order of the snapshot.
///
/// - `is_frozen`: selects the file of frozen tensors
pub(crate) fn order(entries: &[TensorEntry], is_frozen: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.retain(|&index| entries[index].is_frozen == is_frozen);
    order.sort_by_key(|&index| Reverse(entries[index].dtype.bytes()));
    order
}

/// The bytes before the first tensor. They depend on the entries only, so a reader compares them
/// for equality.
pub(crate) fn header(entries: &[TensorEntry], is_frozen: bool) -> Vec<u8> {
    let mut header = Map::new();
    let mut begin = 0u64;
    for index in order(entries, is_frozen) {
        let TensorEntry {
            name,
            dtype,
            shape,
            bytes,
            ..
        } = &entries[index];
        let end = begin.saturating_add(*bytes);
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, end] });
        header.insert(name.clone(), entry);
        begin = end;
    }
    let mut text = Value::Object(header).to_string();
    // The first tensor begins at a multiple of eight.
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;
    use crate::manifest::entries;
    use crate::{Dtype, Snapshot, Tensor};

    fn tensor(name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Tensor {
        Tensor {
            name: name.into(),
            dtype,
            shape: shape.into(),
            bytes: bytes.into(),
            is_frozen: false,
        }
    }

    #[test]
    fn the_safetensors_library_reads_the_file() {
        let tensors = vec![
            tensor("mask", Dtype::U8, &[3], &[1, 2, 3]),
            tensor("h.0 \"V\" \u{e9}", Dtype::F32, &[1, 2], &[4; 8]),
            tensor("b", Dtype::Bf16, &[], &[5; 2]),
            tensor("empty", Dtype::F64, &[0, 4], &[]),
            tensor("count", Dtype::U64, &[1], &[6; 8]),
        ];
        let snapshot = Snapshot {
            tensors,
            ..Snapshot::default()
        };
        let entries = entries(&snapshot).unwrap();
        let mut file = header(&entries, false);
        for index in order(&entries, false) {
            let begin = file.len();
            assert_eq!(
                begin % snapshot.tensors[index].dtype.bytes(),
                0,
                "tensor {index} at {begin}"
            );
            file.extend(&snapshot.tensors[index].bytes);
        }

        let read = SafeTensors::deserialize(&file).unwrap();
        assert_eq!(read.len(), snapshot.tensors.len());
        for tensor in &snapshot.tensors {
            let view = read.tensor(&tensor.name).unwrap();
            assert_eq!(view.data(), tensor.bytes);
            assert_eq!(view.shape(), tensor.shape);
            assert_eq!(json!(view.dtype()), json!(tensor.dtype));
        }
    }
}
