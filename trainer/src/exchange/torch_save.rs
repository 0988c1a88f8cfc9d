//! A file as `torch.save` writes a dict of tensors: a zip archive of a pickle, which describes
//! them, and of their bytes. The pickle has what `torch.load` takes with `weights_only=True`, and
//! nothing else.

use std::io::{Cursor, Write};

use spd_checkpoint::Dtype;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// A tensor of the file.
pub(super) struct Saved<'a> {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) dims: &'a [usize],
    /// Which storage it fills.
    pub(super) storage: usize,
}

/// Bytes of a file with these tensors.
///
/// - `top`: what all names in the archive begin with
/// - `storages`: numbers in row-major order, little-endian; several tensors may have one
///
/// # Errors
///
/// An obstacle, such as a dtype that PyTorch's files do not have.
pub(super) fn bytes(
    top: &str,
    tensors: &[Saved<'_>],
    storages: &[&[u8]],
) -> Result<Vec<u8>, String> {
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .large_file(true)
        // As PyTorch has it, for files that are mapped.
        .with_alignment(64);
    let mut add = |name: &str, bytes: &[u8]| {
        let path = format!("{top}/{name}");
        archive
            .start_file(path, options)
            .map_err(|err| err.to_string())?;
        archive.write_all(bytes).map_err(|err| err.to_string())
    };
    add("data.pkl", &pickle(tensors, storages)?)?;
    add("byteorder", b"little")?;
    for (key, bytes) in storages.iter().enumerate() {
        add(&format!("data/{key}"), bytes)?;
    }
    add("version", b"3\n")?;
    let done = archive.finish().map_err(|err| err.to_string())?;
    Ok(done.into_inner())
}

/// The class of a storage of such numbers.
fn storage_class(dtype: Dtype) -> Result<&'static str, String> {
    match dtype {
        Dtype::F64 => Ok("DoubleStorage"),
        Dtype::F32 => Ok("FloatStorage"),
        Dtype::F16 => Ok("HalfStorage"),
        Dtype::Bf16 => Ok("BFloat16Storage"),
        other => Err(format!("PyTorch's files have no numbers of {other:?}")),
    }
}

/// The instructions, of protocol 2, that make an ordered dict of tensors.
fn pickle(tensors: &[Saved<'_>], storages: &[&[u8]]) -> Result<Vec<u8>, String> {
    let mut out = Pickle(vec![0x80, 2]);
    out.global("collections", "OrderedDict");
    out.code(b")R(");
    for tensor in tensors {
        out.text(&tensor.name)?;
        out.global("torch._utils", "_rebuild_tensor_v2");
        // The storage is referred to by its name.
        out.code(b"((");
        out.text("storage")?;
        out.global("torch", storage_class(tensor.dtype)?);
        out.text(&tensor.storage.to_string())?;
        out.text("cpu")?;
        out.number(storages[tensor.storage].len() / tensor.dtype.bytes());
        out.code(b"tQ");
        out.number(0);
        out.numbers(tensor.dims);
        let mut strides = vec![1; tensor.dims.len()];
        for at in (1..tensor.dims.len()).rev() {
            strides[at - 1] = strides[at] * tensor.dims[at];
        }
        out.numbers(&strides);
        // It needs no gradient, and has no hooks.
        out.code(b"\x89");
        out.global("collections", "OrderedDict");
        out.code(b")RtR");
    }
    out.code(b"u.");
    Ok(out.0)
}

struct Pickle(Vec<u8>);

impl Pickle {
    fn code(&mut self, code: &[u8]) {
        self.0.extend_from_slice(code);
    }

    fn global(&mut self, module: &str, name: &str) {
        self.code(format!("c{module}\n{name}\n").as_bytes());
    }

    fn text(&mut self, text: &str) -> Result<(), String> {
        let length = u32::try_from(text.len()).map_err(|err| err.to_string())?;
        self.code(b"X");
        self.code(&length.to_le_bytes());
        self.code(text.as_bytes());
        Ok(())
    }

    fn number(&mut self, number: usize) {
        if let Ok(small) = i32::try_from(number) {
            self.code(b"J");
            self.code(&small.to_le_bytes());
        } else {
            // A long of nine bytes, the last one for its sign.
            self.code(&[0x8a, 9]);
            self.code(&(number as u64).to_le_bytes());
            self.code(&[0]);
        }
    }

    fn numbers(&mut self, numbers: &[usize]) {
        self.code(b"(");
        numbers.iter().for_each(|number| self.number(*number));
        self.code(b"t");
    }
}
