//! The pickle of a PyTorch file, read as what `torch.save` writes for a dict of tensors, and
//! nothing else.
//!
//! A pickle is a program for a stack machine that can call anything Python has. This machine knows
//! the few instructions and the few names that a dict of tensors needs, calls nothing, and refuses
//! the rest by name. Values are numbers into pools, so that nothing here is nested however deep the
//! pickle is, each instruction makes a bounded number of them, and no bytes are copied: reading a
//! pickle takes at most a hundred times its length. The instructions are those of Python's
//! `pickletools`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use safetensors::Dtype;

/// A tensor of a pickle: a view of a storage.
#[derive(Debug, PartialEq)]
pub(super) struct View<'p> {
    /// Key of the storage.
    pub(super) storage: &'p str,
    pub(super) dtype: Dtype,
    /// Elements before its first.
    pub(super) offset: u64,
    pub(super) dims: Vec<usize>,
    /// Elements from one index of each dimension to the next.
    pub(super) strides: Vec<usize>,
}

/// A value on the stack.
#[derive(Debug, Clone, Copy)]
enum Item {
    Int(i64),
    /// Bytes of the pickle, which are UTF-8.
    Text(usize, usize),
    Global(Global),
    /// Items of the pool.
    Tuple(usize, usize),
    /// A number of a dict.
    Dict(usize),
    Storage(usize),
    Tensor(usize),
    /// Something that no tensor is made of: None, flags, fractions, lists.
    Other,
}

/// A name that a dict of tensors needs.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(Dtype),
}

const GLOBALS: &[(&str, &str, Global)] = &[
    ("collections", "OrderedDict", Global::OrderedDict),
    ("torch._utils", "_rebuild_tensor_v2", Global::RebuildTensor),
    (
        "torch._utils",
        "_rebuild_parameter",
        Global::RebuildParameter,
    ),
];

/// The storages of `torch`, and the dtypes of their numbers.
const STORAGES: &[(&str, Dtype)] = &[
    ("FloatStorage", Dtype::F32),
    ("HalfStorage", Dtype::F16),
    ("BFloat16Storage", Dtype::BF16),
    ("DoubleStorage", Dtype::F64),
    ("LongStorage", Dtype::I64),
    ("IntStorage", Dtype::I32),
    ("ShortStorage", Dtype::I16),
    ("CharStorage", Dtype::I8),
    ("ByteStorage", Dtype::U8),
    ("BoolStorage", Dtype::BOOL),
];

#[derive(Default)]
struct Machine<'p> {
    bytes: &'p [u8],
    at: usize,
    stack: Vec<Item>,
    marks: Vec<usize>,
    memo: BTreeMap<u32, Item>,
    pool: Vec<Item>,
    dicts: Vec<Vec<(Item, Item)>>,
    storages: Vec<(Dtype, (usize, usize))>,
    tensors: Vec<Tensor>,
}

/// A tensor as it was described, and checked.
#[derive(Clone, Copy)]
struct Tensor {
    storage: usize,
    offset: u64,
    /// Tuples of whole numbers: items of the pool.
    dims: (usize, usize),
    strides: (usize, usize),
}

/// Calls `each` with the name and the view of each tensor of the dict that a pickle holds, in the
/// order of names; of a name that is there twice, with the last one.
///
/// # Errors
///
/// Anything else that it holds, and where; the fault that `each` returns.
pub(super) fn read<'p>(
    bytes: &'p [u8],
    mut each: impl FnMut(&'p str, View<'p>) -> Result<(), String>,
) -> Result<(), String> {
    let mut machine = Machine {
        bytes,
        ..Machine::default()
    };
    let dict = loop {
        let at = machine.at;
        match machine.step() {
            Ok(None) => {}
            Ok(Some(item)) => break item,
            Err(reason) => return Err(format!("its pickle, byte {at}: {reason}")),
        }
    };
    let Item::Dict(dict) = dict else {
        return Err("its pickle holds no dict of tensors".to_owned());
    };
    // A name that is recalled from the memo is the same bytes, which are compared once.
    let (mut all, mut seen) = (BTreeMap::new(), BTreeSet::new());
    for (key, value) in machine.dicts[dict].iter().rev() {
        if let (Item::Text(start, end), Item::Tensor(tensor)) = (key, value)
            && seen.insert((*start, *end))
        {
            all.entry(machine.text(*start..*end)?).or_insert(*tensor);
        }
    }
    all.into_iter()
        .try_for_each(|(name, tensor)| each(name, machine.view(machine.tensors[tensor])?))
}

impl<'p> Machine<'p> {
    /// Does one instruction; the value that the pickle is of, at its end.
    fn step(&mut self) -> Result<Option<Item>, String> {
        match self.byte()? {
            0x80 => _ = self.byte()?,
            // A frame says how many bytes follow, which are there or not.
            0x95 => _ = self.take(8)?,
            b'(' => self.marks.push(self.stack.len()),
            b'.' => return self.pop().map(Some),
            b'N' | 0x88 | 0x89 | b']' => self.stack.push(Item::Other),
            b'G' => {
                self.take(8)?;
                self.stack.push(Item::Other);
            }
            b'K' => self.whole(1, false)?,
            b'M' => self.whole(2, false)?,
            b'J' => self.whole(4, true)?,
            0x8a => self.byte().and_then(|len| self.whole(len.into(), true))?,
            b'X' => {
                let length = self.word()?;
                self.string(usize::try_from(length).map_err(|_| TOO_LONG)?)?;
            }
            0x8c => self.byte().and_then(|len| self.string(len.into()))?,
            b'}' => self.dict(),
            b')' => self.tuple(self.stack.len())?,
            0x85 => self.tuple(self.below(1)?)?,
            0x86 => self.tuple(self.below(2)?)?,
            0x87 => self.tuple(self.below(3)?)?,
            b't' => self.mark().and_then(|mark| self.tuple(mark))?,
            // A list's items are no part of a tensor.
            b'a' => _ = self.pop()?,
            b'e' => self.mark().map(|mark| self.stack.truncate(mark))?,
            b'q' => self.byte().and_then(|key| self.remember(key.into()))?,
            b'r' => self.word().and_then(|key| self.remember(key))?,
            0x94 => {
                let key = u32::try_from(self.memo.len()).map_err(|_| TOO_LONG)?;
                self.remember(key)?;
            }
            b'h' => self.byte().and_then(|key| self.recall(key.into()))?,
            b'j' => self.word().and_then(|key| self.recall(key))?,
            b'c' => {
                let [module, name] = [self.line()?, self.line()?];
                self.global(module, name)?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let (Item::Text(a, b), Item::Text(c, d)) = (module, name) else {
                    return Err("a name that is no string".to_owned());
                };
                self.global(a..b, c..d)?;
            }
            b's' => self.set_items(self.below(2)?)?,
            b'u' => self.mark().and_then(|mark| self.set_items(mark))?,
            b'Q' => self.storage()?,
            b'R' => self.call()?,
            // The state of an ordered dict, which PyTorch gives versions of modules.
            b'b' => {
                self.pop()?;
                if !matches!(self.stack.last(), Some(Item::Dict(_))) {
                    return Err("a state of something that is no dict".to_owned());
                }
            }
            other => {
                return Err(format!(
                    "instruction 0x{other:02x}, which no dict of tensors needs"
                ));
            }
        }
        Ok(None)
    }

    fn take(&mut self, count: usize) -> Result<Range<usize>, String> {
        let end = self
            .at
            .checked_add(count)
            .filter(|end| *end <= self.bytes.len());
        let end = end.ok_or("it ends in the middle")?;
        let range = self.at..end;
        self.at = end;
        Ok(range)
    }

    fn byte(&mut self) -> Result<u8, String> {
        Ok(self.array::<1>()?[0])
    }

    fn word(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let range = self.take(N)?;
        self.bytes[range]
            .try_into()
            .map_err(|_| TOO_LONG.to_owned())
    }

    fn text(&self, range: Range<usize>) -> Result<&'p str, String> {
        std::str::from_utf8(&self.bytes[range]).map_err(|_| "a string that is not UTF-8".to_owned())
    }

    fn line(&mut self) -> Result<Range<usize>, String> {
        let length = self.bytes[self.at..].iter().position(|byte| *byte == b'\n');
        let range = self.take(length.ok_or("it ends in the middle")?)?;
        self.at += 1;
        Ok(range)
    }

    fn string(&mut self, length: usize) -> Result<(), String> {
        let range = self.take(length)?;
        self.text(range.clone())?;
        self.stack.push(Item::Text(range.start, range.end));
        Ok(())
    }

    /// A whole number of up to eight bytes; if it is signed, the last one has the sign.
    fn whole(&mut self, length: usize, signed: bool) -> Result<(), String> {
        let range = self.take(length)?;
        let bytes = &self.bytes[range];
        if length > 8 {
            return Err("a number beyond 64 bits".to_owned());
        }
        let sign = signed && bytes.last().is_some_and(|last| *last >= 0x80);
        let mut whole = [if sign { 0xff } else { 0 }; 8];
        whole[..length].copy_from_slice(bytes);
        self.stack.push(Item::Int(i64::from_le_bytes(whole)));
        Ok(())
    }

    fn pop(&mut self) -> Result<Item, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len() > floor {
            true => self.stack.pop().ok_or_else(|| EMPTY.to_owned()),
            false => Err(EMPTY.to_owned()),
        }
    }

    /// Start of the topmost items.
    fn below(&self, count: usize) -> Result<usize, String> {
        self.stack
            .len()
            .checked_sub(count)
            .ok_or_else(|| EMPTY.to_owned())
    }

    fn mark(&mut self) -> Result<usize, String> {
        let mark = self.marks.pop();
        mark.filter(|mark| *mark <= self.stack.len())
            .ok_or_else(|| "no mark on the stack".to_owned())
    }

    fn tuple(&mut self, start: usize) -> Result<(), String> {
        let first = self.pool.len();
        self.pool.extend(self.stack.drain(start..));
        self.stack.push(Item::Tuple(first, self.pool.len()));
        Ok(())
    }

    fn dict(&mut self) {
        self.stack.push(Item::Dict(self.dicts.len()));
        self.dicts.push(Vec::new());
    }

    fn set_items(&mut self, start: usize) -> Result<(), String> {
        let Some(Item::Dict(dict)) = start.checked_sub(1).and_then(|at| self.stack.get(at)) else {
            return Err("items of something that is no dict".to_owned());
        };
        let dict = *dict;
        let items: Vec<Item> = self.stack.drain(start..).collect();
        let (pairs, []) = items.as_chunks() else {
            return Err("a key without a value".to_owned());
        };
        self.dicts[dict].extend(pairs.iter().map(|[key, value]| (*key, *value)));
        Ok(())
    }

    fn remember(&mut self, key: u32) -> Result<(), String> {
        let item = *self.stack.last().ok_or(EMPTY)?;
        self.memo.insert(key, item);
        Ok(())
    }

    fn recall(&mut self, key: u32) -> Result<(), String> {
        let item = self.memo.get(&key).copied();
        self.stack
            .push(item.ok_or("something that was not remembered")?);
        Ok(())
    }

    fn global(&mut self, module: Range<usize>, name: Range<usize>) -> Result<(), String> {
        let (module, name) = (self.text(module)?, self.text(name)?);
        let mut globals = GLOBALS.iter();
        let known = globals.find(|(of, known, _)| (*of, *known) == (module, name));
        let mut storages = STORAGES.iter().filter(|_| module == "torch");
        let storage = storages.find(|(known, _)| *known == name);
        let storage = storage.map(|(_, dtype)| Global::Storage(*dtype));
        let Some(global) = known.map(|(.., global)| *global).or(storage) else {
            let shown: String = format!("{module}.{name}").chars().take(80).collect();
            return Err(format!(
                "`{}`, which no dict of tensors needs; nothing was run",
                shown.escape_debug()
            ));
        };
        self.stack.push(Item::Global(global));
        Ok(())
    }

    fn items(&self, item: Item) -> Result<&[Item], String> {
        match item {
            Item::Tuple(start, end) => Ok(&self.pool[start..end]),
            _ => Err("no tuple where one is due".to_owned()),
        }
    }

    /// `("storage", type, key, device, elements)`: bytes that lie beside the pickle.
    fn storage(&mut self) -> Result<(), String> {
        let id = self.pop()?;
        let [
            _,
            Item::Global(Global::Storage(dtype)),
            Item::Text(start, end),
            ..,
        ] = self.items(id)?
        else {
            return Err("a reference to something that is no storage".to_owned());
        };
        /// PyTorch's are numbers.
        const MOST: usize = 256;
        if end - start > MOST {
            let bytes = end - start;
            return Err(format!(
                "a storage whose key has {bytes} bytes, expected at most {MOST}"
            ));
        }
        let storage = (*dtype, (*start, *end));
        self.stack.push(Item::Storage(self.storages.len()));
        self.storages.push(storage);
        Ok(())
    }

    fn call(&mut self) -> Result<(), String> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let Item::Global(function) = function else {
            return Err("a call of something that is no function".to_owned());
        };
        match function {
            Global::OrderedDict => match self.items(arguments)? {
                [] => self.dict(),
                _ => return Err("an ordered dict of something".to_owned()),
            },
            Global::RebuildParameter => match self.items(arguments)? {
                [tensor @ Item::Tensor(_), ..] => {
                    let tensor = *tensor;
                    self.stack.push(tensor);
                }
                _ => return Err("a parameter of something that is no tensor".to_owned()),
            },
            Global::RebuildTensor => {
                let tensor = self.tensor(arguments)?;
                self.stack.push(Item::Tensor(self.tensors.len()));
                self.tensors.push(tensor);
            }
            Global::Storage(_) => return Err("a call of a storage".to_owned()),
        }
        Ok(())
    }

    /// `(storage, offset, dims, strides, ...)`.
    fn tensor(&self, arguments: Item) -> Result<Tensor, String> {
        let [Item::Storage(storage), Item::Int(offset), dims, strides, ..] =
            self.items(arguments)?
        else {
            return Err("a tensor without a storage, an offset, a shape and strides".to_owned());
        };
        /// More dimensions than any weight has.
        const MOST: usize = 8;
        let (&dims, &strides) = (dims, strides);
        if self.items(dims)?.len() != self.items(strides)?.len() || self.items(dims)?.len() > MOST {
            let (dims, strides) = (self.items(dims)?.len(), self.items(strides)?.len());
            return Err(format!(
                "a tensor of {dims} dimensions and {strides} strides"
            ));
        }
        let (Item::Tuple(a, b), Item::Tuple(c, d)) = (dims, strides) else {
            return Err("no tuple where one is due".to_owned());
        };
        let tensor = Tensor {
            storage: *storage,
            offset: u64::try_from(*offset).map_err(|_| "a negative offset")?,
            dims: (a, b),
            strides: (c, d),
        };
        self.view(tensor).map(|_| tensor)
    }

    /// A tensor with its numbers.
    fn view(&self, tensor: Tensor) -> Result<View<'p>, String> {
        let numbers = |(start, end): (usize, usize)| {
            let whole = |item: &Item| match item {
                Item::Int(number) => usize::try_from(*number).ok(),
                _ => None,
            };
            let numbers: Option<Vec<usize>> = self.pool[start..end].iter().map(whole).collect();
            numbers.ok_or("a shape or stride that is no whole number")
        };
        let (dtype, (start, end)) = self.storages[tensor.storage];
        Ok(View {
            storage: self.text(start..end)?,
            dtype,
            offset: tensor.offset,
            dims: numbers(tensor.dims)?,
            strides: numbers(tensor.strides)?,
        })
    }
}

const EMPTY: &str = "nothing on the stack where something is due";
const TOO_LONG: &str = "a length that does not fit";
