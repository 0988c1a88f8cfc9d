//! Weights in every format, each written here, whole and broken.

use std::fmt::Write as _;
use std::io::{Cursor, Write as _};
use std::path::Path;

use ::safetensors::Dtype;
use ::safetensors::tensor::TensorView;
use spd_testing::mutation::{Dice, rounds};
use zip::write::{SimpleFileOptions, ZipWriter};

use super::*;
use crate::networks::{TargetTensor, Tms};

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

/// The pickle of `(name, dims, strides)`, each a storage of its own, as `torch.save` writes a dict
/// of tensors.
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
        "PATH: `linear1.weight` shows numbers of its storage more than once; save it with .contiguous()"
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

/// Names a test's own process, which has to do with little memory.
const LIMITED: &str = "SPD_TEST_LIMITED";

/// Runs a test of this file again in a process that may take so many bytes of memory beside what it
/// takes to start.
fn within(bytes: usize, test: &str) {
    let kibibytes = (bytes + (384 << 20)) >> 10;
    let name = format!("networks::weights::tests::{test}");
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &format!("ulimit -v {kibibytes}; exec \"$@\""), "sh"]);
    command.arg(std::env::current_exe().unwrap());
    command.args([&name, "--exact", "--test-threads=1"]);
    command.env(LIMITED, "1").env("MALLOC_ARENA_MAX", "1");
    let ended = command.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{test}: {} {said}", ended.status);
}

// A megabyte of a storage's name, which was copied for each of a hundred thousand tensors, took
// more than 4 GB.
#[test]
fn a_pickle_takes_at_most_a_hundred_times_its_length_of_memory() {
    const BYTES: usize = 4 << 20;
    if std::env::var_os(LIMITED).is_none() {
        return within(
            100 * BYTES,
            "a_pickle_takes_at_most_a_hundred_times_its_length_of_memory",
        );
    }
    let said = |pickle: &[u8]| loaded("w.bin", &archive(pickle, &[vec![0; 8]])).unwrap_err();
    // A function and its arguments in the memo.
    let begin = |key: &[u8]| {
        let mut bytes = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX".to_vec();
        bytes.extend(u32::try_from(key.len()).unwrap().to_le_bytes());
        bytes.extend(key);
        bytes.extend(b"X\x03\x00\x00\x00cpuK\x01tQK\x00))tq\x01}(");
        bytes
    };
    let told = said(&begin(&vec![b'k'; 1 << 20]));
    let due = "a storage whose key has 1048576 bytes, expected at most 256";
    assert!(told.ends_with(due), "{told}");
    let mut calls = begin(b"0");
    // Tensors under names, of eleven bytes each.
    let mut number = 0_u32;
    while calls.len() < BYTES {
        calls.extend(b"\x8c\x04");
        calls.extend(format!("{number:04x}").bytes().rev().take(4));
        calls.extend(b"h\x00h\x01R");
        number = (number + 1) & 0xffff;
    }
    calls.extend(b"u.");
    let told = said(&calls);
    assert!(
        told.starts_with("PATH: no tensor `linear1.weight`"),
        "{told}"
    );
    // Marks, empty dicts, tuples, and things to remember, of one byte each.
    for one in *b"(})\x85\x94N" {
        let mut pickle = b"\x80\x02)".to_vec();
        pickle.resize(BYTES, one);
        pickle.extend(b"N.");
        assert_eq!(
            said(&pickle),
            "PATH: its pickle holds no dict of tensors",
            "{one}"
        );
    }
    let told = said(&vec![b'N'; (16 << 20) + 1]);
    assert!(
        told.contains("its pickle has 16777217 bytes, expected at most 16777216"),
        "{told}"
    );
}

// What an archive says of its lengths is there in a sparse file, as holes.
#[test]
fn a_sparse_archive_is_refused_without_reading_it() {
    if std::env::var_os(LIMITED).is_none() {
        return within(64 << 20, "a_sparse_archive_is_refused_without_reading_it");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.bin");
    let long = 1_u64 << 40;
    let sparse = |parts: &[(u64, Vec<u8>)]| {
        _ = std::fs::remove_file(&path);
        let file = std::fs::File::create_new(&path).unwrap();
        for (at, bytes) in parts {
            std::os::unix::fs::FileExt::write_all_at(&file, bytes, *at).unwrap();
        }
        loaded_from(&path).unwrap_err()
    };
    let begin = (0, b"PK\x03\x04".to_vec());
    assert_eq!(
        sparse(&[begin.clone(), (long, vec![0])]),
        "PATH: not a zip archive: it has no list of entries at its end; was it copied whole?"
    );
    // The end of a large archive, and what says where it is.
    let end = |list: u64, at: u64| {
        let mut bytes = b"PK\x06\x06".to_vec();
        bytes.resize(40, 0);
        bytes.extend([list, at].map(u64::to_le_bytes).concat());
        bytes.extend(b"PK\x06\x07\0\0\0\0");
        bytes.extend((long).to_le_bytes());
        bytes.extend([1, 0, 0, 0]);
        bytes.extend(b"PK\x05\x06");
        bytes.extend([0xff; 16]);
        bytes.extend([0; 2]);
        (long, bytes)
    };
    assert_eq!(
        sparse(&[begin.clone(), end(1 << 39, 0)]),
        "PATH: its list of entries has 549755813888 bytes, expected at most 67108864"
    );
    let mut listed = b"PK\x01\x02".to_vec();
    listed.resize(20, 0);
    listed.extend([0xff; 8]);
    listed.extend([10, 0, 20, 0]);
    listed.resize(46, 0);
    listed.extend(b"a/data.pkl");
    listed.extend([1, 0, 16, 0]);
    listed.extend([1_u64 << 39; 2].map(u64::to_le_bytes).concat());
    let bytes = listed.len() as u64;
    assert_eq!(
        sparse(&[begin, (long - 1000, listed), end(bytes, long - 1000)]),
        "PATH: its pickle has 549755813888 bytes, expected at most 16777216; are tensors saved in it rather than beside it?"
    );
}

#[test]
fn other_archives_and_old_files_are_refused_by_format() {
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
        pickle::read(bytes, |_, _| Ok(()))
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
