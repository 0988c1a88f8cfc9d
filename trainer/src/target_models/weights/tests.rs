//! Weights in every format, each written here, whole and broken.

use std::fmt::Write as _;
use std::io::{Cursor, Write as _};
use std::path::Path;

use ::safetensors::Dtype;
use ::safetensors::tensor::TensorView;
use spd_configs::Tms;
use spd_files::mutation::{Dice, rounds};
use zip::write::{SimpleFileOptions, ZipWriter};

use super::*;
use crate::target_models::TargetTensor;

const TARGET: Tms = Tms {
    n_features: 2,
    n_hidden: 1,
    n_hidden_layers: 0,
    zero_bias: true,
};

/// The numbers of a tensor: 1, -0.5, 0.25 and so on, each exact in every dtype.
fn numbers(tensor: &TargetTensor) -> impl Iterator<Item = f64> {
    let elements: usize = tensor.dims.iter().product();
    (0..elements).map(|at| (-0.5_f64).powi(at.try_into().unwrap()))
}

#[expect(clippy::cast_possible_truncation, reason = "the numbers are exact")]
fn f32_bytes(x: f64) -> Vec<u8> {
    (x as f32).to_le_bytes().to_vec()
}

#[expect(
    clippy::disallowed_methods,
    reason = "a test file is written once, and read by nobody else"
)]
fn put(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}

/// A safetensors file of some tensors of that network.
fn safetensors_of(
    which: impl Fn(&str) -> bool,
    dtype: Dtype,
    number: impl Fn(f64) -> Vec<u8>,
) -> Vec<u8> {
    let tensors = TARGET
        .tensors()
        .into_iter()
        .filter(|tensor| which(&tensor.name));
    let bytes: Vec<_> = tensors
        .map(|tensor| {
            let bytes: Vec<u8> = numbers(&tensor).flat_map(&number).collect();
            (tensor, bytes)
        })
        .collect();
    let views = bytes.iter().map(|(tensor, bytes)| {
        let view = TensorView::new(dtype, tensor.dims.clone(), bytes).unwrap();
        (tensor.name.clone(), view)
    });
    ::safetensors::serialize(views, None).unwrap()
}

fn short_string(text: &str) -> Vec<u8> {
    let mut bytes = vec![b'X'];
    bytes.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
    bytes.extend(text.bytes());
    bytes
}

/// The pickle of `(name, dims, strides)`, each a storage of its own, as `torch.save` writes a dict of tensors.
fn pickle_of(tensors: &[(String, Vec<usize>, Vec<usize>)]) -> Vec<u8> {
    let ints = |numbers: &[usize]| {
        let mut bytes = vec![b'('];
        for number in numbers {
            bytes.extend([b'K', u8::try_from(*number).unwrap()]);
        }
        bytes.push(b't');
        bytes
    };
    let mut bytes = b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01(".to_vec();
    for (number, (name, dims, strides)) in tensors.iter().enumerate() {
        bytes.extend(short_string(name));
        bytes.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        bytes.extend(short_string("storage"));
        bytes.extend(b"ctorch\nFloatStorage\n");
        bytes.extend(short_string(&number.to_string()));
        bytes.extend(short_string("cpu"));
        bytes.extend(b"M\x10\x00tQK\x00");
        bytes.extend(ints(dims));
        bytes.extend(ints(strides));
        bytes.extend(b"\x89h\x00)RtR");
    }
    bytes.extend(b"u}");
    bytes.extend(short_string("_metadata"));
    bytes.extend(b"h\x00)Rsb.");
    bytes
}

/// An archive as `torch.save` writes it.
fn archive(pickle: &[u8], storages: &[Vec<u8>]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let plain = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let mut add = |name: &str, bytes: &[u8]| {
        zip.start_file(format!("archive/{name}"), plain).unwrap();
        zip.write_all(bytes).unwrap();
    };
    add("data.pkl", pickle);
    add("byteorder", b"little");
    for (number, storage) in storages.iter().enumerate() {
        add(&format!("data/{number}"), storage);
    }
    zip.finish().unwrap().into_inner()
}

/// A file of that network by `torch.save`; matrices are views, transposed of what is stored.
fn torch_file() -> Vec<u8> {
    let (mut views, mut storages) = (Vec::new(), Vec::new());
    for tensor in TARGET.tensors() {
        let all: Vec<f64> = numbers(&tensor).collect();
        let (strides, stored) = match tensor.dims[..] {
            [rows, columns] => {
                let transposed = (0..all.len()).map(|at| all[at % rows * columns + at / rows]);
                (vec![1, rows], transposed.collect())
            }
            _ => (vec![1], all),
        };
        storages.push(stored.into_iter().flat_map(f32_bytes).collect());
        views.push((tensor.name, tensor.dims, strides));
    }
    archive(&pickle_of(&views), &storages)
}

/// What is loaded from a file or directory, or the fault, its path as `PATH`.
fn loaded_from(path: &Path) -> Result<Weights, String> {
    load(path, &TARGET).map_err(|fault| {
        fault
            .to_string()
            .replace(&path.display().to_string(), "PATH")
    })
}

/// What is loaded from the bytes of a file of a name.
fn loaded(name: &str, bytes: &[u8]) -> Result<Weights, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    put(&path, bytes);
    loaded_from(&path)
}

fn whole_file(dtype: Dtype, number: impl Fn(f64) -> Vec<u8>) -> Result<Weights, String> {
    loaded("w.safetensors", &safetensors_of(|_| true, dtype, number))
}

#[test]
fn weights_of_every_floating_dtype_are_read() {
    let expected = whole_file(Dtype::F32, f32_bytes).unwrap();
    assert_eq!(expected[0].2[..2], [1.0, -0.5]);
    let half = |x: f64| half::f16::from_f64(x).to_le_bytes().to_vec();
    let bf16 = |x: f64| half::bf16::from_f64(x).to_le_bytes().to_vec();
    assert_eq!(whole_file(Dtype::F16, half).unwrap(), expected);
    assert_eq!(whole_file(Dtype::BF16, bf16).unwrap(), expected);
    let double = |x: f64| x.to_le_bytes().to_vec();
    assert_eq!(whole_file(Dtype::F64, double).unwrap(), expected);
}

#[test]
fn weights_of_another_dtype_are_refused_by_it() {
    assert_eq!(
        whole_file(Dtype::I32, |_| vec![0; 4]).unwrap_err(),
        "PATH: `linear1.weight` is of I32; weights are read from F64, F32, F16 and BF16, so save it as one of them"
    );
}

#[test]
fn a_file_of_pytorch_and_a_directory_of_parts_give_the_same() {
    let expected = whole_file(Dtype::F32, f32_bytes).unwrap();
    assert_eq!(
        loaded("pytorch_model.bin", &torch_file()).unwrap(),
        expected
    );

    let dir = tempfile::tempdir().unwrap();
    let none = loaded_from(dir.path()).unwrap_err();
    assert_eq!(
        none,
        "PATH: no weights in it; expected model.safetensors, model.safetensors.index.json, pytorch_model.bin or \
         pytorch_model.bin.index.json"
    );
    put(&dir.path().join("pytorch_model.bin"), &torch_file());
    assert_eq!(loaded_from(dir.path()).unwrap(), expected);
    let is_matrix = |name: &str| name.ends_with("weight");
    let part = |name: &str, which: &dyn Fn(&str) -> bool| {
        put(
            &dir.path().join(name),
            &safetensors_of(which, Dtype::F32, f32_bytes),
        );
    };
    part("a.safetensors", &is_matrix);
    part("b.safetensors", &|name| !is_matrix(name));
    let index = dir.path().join("model.safetensors.index.json");
    let say = |biases: &str| {
        let text = format!(
            r#"{{"metadata": {{}}, "weight_map": {{"linear1.weight": "a.safetensors", "linear2.weight": "a.safetensors", {biases}}}}}"#
        );
        put(&index, text.as_bytes());
    };
    // Parts go before the file of PyTorch, which is broken here.
    put(&dir.path().join("pytorch_model.bin"), b"PK\x03\x04");
    say(r#""linear2.bias": "b.safetensors""#);
    assert_eq!(loaded_from(dir.path()).unwrap(), expected);
    for (biases, fault) in [
        (
            r#""linear2.bias": "a.safetensors""#,
            "PATH/model.safetensors.index.json: `linear2.bias` is said to be in a.safetensors, which has no such tensor",
        ),
        (
            r#""linear2.bias": "../b.safetensors""#,
            "PATH/model.safetensors.index.json: `linear2.bias` is said to be in \"../b.safetensors\", which is no name of a \
             file beside it",
        ),
        (
            r#""linear2.bias": 3"#,
            "PATH/model.safetensors.index.json: expected {\"weight_map\": {tensor: file, ...}}: invalid type: integer `3`",
        ),
        (
            r#""linear2.bias": "c.safetensors""#,
            "PATH/c.safetensors: the target's weights cannot be read: No such file or directory",
        ),
    ] {
        say(biases);
        let found = loaded_from(dir.path()).unwrap_err();
        assert!(found.starts_with(fault), "{found}");
    }
    say(r#""linear2.bias": "b.safetensors""#);
    let mut short = safetensors_of(|name| !is_matrix(name), Dtype::F32, f32_bytes);
    let bytes = short.len();
    short.pop();
    put(&dir.path().join("b.safetensors"), &short);
    assert_eq!(
        loaded_from(dir.path()).unwrap_err(),
        format!(
            "PATH/b.safetensors: not a safetensors file: its header says {bytes} bytes, it has {}",
            bytes - 1
        )
    );
}

#[test]
fn a_hostile_pickle_is_refused_and_nothing_of_it_is_run() {
    let said = |pickle: &[u8]| loaded("w.bin", &archive(pickle, &[])).unwrap_err();
    assert_eq!(
        said(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."),
        "PATH: its pickle, byte 2: `os.system`, which no dict of tensors needs; nothing was run"
    );
    assert_eq!(
        said(b"\x80\x02i__builtin__\neval\n."),
        "PATH: its pickle, byte 2: instruction 0x69, which no dict of tensors needs"
    );
    assert_eq!(
        said(b"\x80\x02N."),
        "PATH: its pickle holds no dict of tensors"
    );
    assert_eq!(
        said(b"\x80\x02}"),
        "PATH: its pickle, byte 3: it ends in the middle"
    );
    assert_eq!(
        said(b"\x80\x02X\xff\xff\xff\xff."),
        "PATH: its pickle, byte 2: it ends in the middle"
    );
    // A million tuples, one in the other, are as many numbers.
    let mut deep = b"\x80\x02)".to_vec();
    deep.extend([0x85; 1_000_000]);
    deep.push(b'.');
    assert_eq!(said(&deep), "PATH: its pickle holds no dict of tensors");
    let many = |dims: Vec<usize>, strides: Vec<usize>| {
        let view = [("linear1.weight".to_owned(), dims, strides)];
        loaded("w.bin", &archive(&pickle_of(&view), &[vec![0; 8]])).unwrap_err()
    };
    assert_eq!(
        many(vec![255; 8], vec![0; 8]),
        "PATH: `linear1.weight` has shape [255, 255, 255, 255, 255, 255, 255, 255], the run file's [target] says [1, 2]"
    );
    assert_eq!(
        many(vec![1, 2], vec![2, 2]),
        "PATH: `linear1.weight` reaches beyond its 8 bytes"
    );
    assert_eq!(
        many(vec![1; 9], vec![1; 9]),
        "PATH: its pickle, byte 187: a tensor of 9 dimensions and 9 strides"
    );
}

#[test]
fn other_archives_and_old_files_are_refused_by_what_they_are() {
    let said = |name: &str, bytes: &[u8]| loaded(name, bytes).unwrap_err();
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    zip.start_file(
        "readme",
        SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored),
    )
    .unwrap();
    let other = zip.finish().unwrap().into_inner();
    assert_eq!(
        said("w.bin", &other),
        "PATH: a zip archive without a data.pkl, which PyTorch's have"
    );
    assert_eq!(
        said("w.pth", b"\x80\x02\x8a\x0al\xfc"),
        "PATH: a file of PyTorch before 1.6; load it with PyTorch and save it again"
    );
    assert_eq!(
        said("w.safetensors", b"abc"),
        "PATH: not a safetensors file: 3 bytes are no header"
    );
    assert_eq!(
        said("w.safetensors", &[0xff; 40]),
        "PATH: not a safetensors file: a header of 18446744073709551615 bytes is said to be in its 40"
    );
}

/// Reads bytes that are changed again and again.
fn change(name: &str, in_suite: u64, whole: &[u8], read: impl Fn(&[u8]) -> Result<(), String>) {
    let mut dice = Dice::new(3);
    let (mut done, mut refused) = (0, 0);
    for _ in rounds(in_suite) {
        match read(&dice.mutated(whole)) {
            Ok(()) => done += 1,
            Err(line) => {
                assert!(!line.contains('\n') && !line.is_empty(), "{name}: {line:?}");
                refused += 1;
            }
        }
    }
    println!("{name}: {done} read, {refused} refused");
    assert!(
        refused > in_suite / 2 && done > 0,
        "{name}: {done} read, {refused} refused"
    );
}

#[test]
fn a_changed_pickle_is_refused_in_one_line_or_read() {
    let pickle = pickle_of(&[
        ("linear1.weight".to_owned(), vec![1, 2], vec![2, 1]),
        ("linear2.bias".to_owned(), vec![2], vec![1]),
    ]);
    change("pickle", 20_000, &pickle, |bytes| {
        pickle::read(bytes).map(drop)
    });
}

#[test]
fn a_changed_file_of_safetensors_is_refused_in_one_line_or_read() {
    let whole = safetensors_of(|_| true, Dtype::F32, f32_bytes);
    change("safetensors", 1_000, &whole, |bytes| {
        loaded("w.safetensors", bytes).map(drop)
    });
}

#[test]
fn a_changed_file_of_pytorch_is_refused_in_one_line_or_read() {
    change("torch", 1_000, &torch_file(), |bytes| {
        loaded("w.bin", bytes).map(drop)
    });
}

#[test]
fn a_changed_index_is_refused_in_one_line_or_read() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = safetensors_of(|_| true, Dtype::F32, f32_bytes);
    put(&dir.path().join("a.safetensors"), &tensors);
    let mut index = r#"{"weight_map": {"#.to_owned();
    for tensor in TARGET.tensors() {
        write!(index, "{:?}: \"a.safetensors\",", tensor.name).unwrap();
    }
    let index = index.trim_end_matches(',').to_owned() + "}}";
    change("index", 1_000, index.as_bytes(), |bytes| {
        put(&dir.path().join("model.safetensors.index.json"), bytes);
        loaded_from(dir.path()).map(drop)
    });
}

#[test]
fn weights_cut_anywhere_or_with_something_else_in_their_place_are_named() {
    let tensors = safetensors_of(|_| true, Dtype::F32, f32_bytes);
    for (name, whole) in [
        ("model.safetensors", tensors),
        ("pytorch_model.bin", torch_file()),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        let refused = |what: &str| {
            for place in [dir.path(), path.as_path()] {
                let line = load(place, &TARGET).unwrap_err().to_string();
                let of_dir = format!("{}: ", dir.path().display());
                let is_named = line.starts_with(&format!("{}: ", path.display()));
                assert!(is_named || line.starts_with(&of_dir), "{what}: {line}");
                assert!(!line.contains('\n'), "{what}: {line}");
            }
        };
        for end in 0..whole.len() {
            put(&path, &whole[..end]);
            refused(&format!("{name} of {end}"));
        }
        std::fs::remove_file(&path).unwrap();
        refused("nothing");
        std::fs::create_dir(&path).unwrap();
        refused("a directory");
        std::fs::remove_dir(&path).unwrap();
        std::os::unix::fs::symlink(&path, &path).unwrap();
        refused("a link to itself");
    }
}
