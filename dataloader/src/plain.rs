//! Files of other trainers: nanoGPT's bare ids, and llm.c's ids behind a header of 256 words.

use std::path::Path;

use crate::DataError;
use crate::Dtype;
use crate::opened::Opened;
use crate::tokens::{Ends, TokenFile};

/// Bytes of llm.c's header: 256 i32. The magic, the version and the token count are used.
const HEADER_BYTES: u64 = 1024;
/// llm.c's magic numbers, each with its version and dtype. No nanoGPT file begins with one: as u32
/// it would be an id of 20 million, as u16 an id beyond the 50,257 of GPT-2.
const MAGICS: [(u32, u32, Dtype); 2] = [(20_240_520, 1, Dtype::U16), (20_240_801, 7, Dtype::U32)];
/// Ids that are examined for u32 read as u16.
const SAMPLE: usize = 1024;

/// Opens a plain file. `dtype` is never guessed, but an obvious mistake is refused.
pub(crate) fn open(path: &Path, dtype: Option<Dtype>) -> Result<TokenFile, DataError> {
    let opened = Opened::open(path)?;
    let bytes = opened.bytes;
    #[expect(clippy::cast_possible_truncation, reason = "at most the sample")]
    let mut head = vec![0; bytes.min(2 * SAMPLE as u64) as usize];
    opened.read(0, &mut head)?;
    let (dtype, start) =
        layout(&head, bytes, dtype).map_err(|fault| DataError::damaged(path, fault))?;
    Ok(TokenFile {
        opened,
        dtype,
        token_bytes: start..bytes,
        ends: Ends::Unknown,
    })
}

/// The dtype of the ids, and the offset of the first one, in bytes.
///
/// - `head`: the first bytes of a file of `bytes`
fn layout(head: &[u8], bytes: u64, dtype: Option<Dtype>) -> Result<(Dtype, u64), String> {
    let word = |index: usize| {
        head.get(4 * index..)
            .and_then(|bytes| bytes.first_chunk())
            .map(|&bytes| u32::from_le_bytes(bytes))
    };
    if let Some(&(magic, version, stored)) =
        MAGICS.iter().find(|(magic, ..)| word(0) == Some(*magic))
    {
        let (Some(found), Some(tokens)) = (word(1), word(2)) else {
            return Err(format!(
                "begins like llm.c's files, but has only {bytes} bytes"
            ));
        };
        if found != version {
            return Err(format!(
                "llm.c header {magic} of version {found}; this program reads version {version}"
            ));
        }
        if let Some(dtype) = dtype.filter(|&dtype| dtype != stored) {
            return Err(format!(
                "llm.c header {magic} promises {stored} ids, the dtype given is {dtype}; leave it out"
            ));
        }
        let promised = HEADER_BYTES + u64::from(tokens) * stored.bytes() as u64;
        if promised != bytes {
            return Err(format!(
                "header promises {tokens} tokens ({promised} bytes), file has {bytes} bytes; was it still \
                 being written?"
            ));
        }
        if tokens == 0 {
            return Err("header promises 0 tokens; was it still being written?".to_owned());
        }
        return Ok((stored, HEADER_BYTES));
    }
    let Some(dtype) = dtype else {
        return Err(
            "bare ids do not say how they are stored; set [data] dtype = \"u16\", as nanoGPT writes them, or \
             \"u32\""
                .to_owned(),
        );
    };
    if !bytes.is_multiple_of(dtype.bytes() as u64) {
        return Err(format!(
            "has {bytes} bytes, which is no multiple of {} ({dtype}); was it copied whole?",
            dtype.bytes()
        ));
    }
    if dtype == Dtype::U16 && looks_like_u32(head) {
        return Err(format!(
            "every second one of its first {SAMPLE} ids is 0: was u16 the right dtype, or is it u32?"
        ));
    }
    Ok((dtype, 0))
}

/// Ids below 65,536 stored as u32 and read as u16 have a 0 after each id.
fn looks_like_u32(file: &[u8]) -> bool {
    let pairs = &file.as_chunks::<4>().0;
    let sample = &pairs[..pairs.len().min(SAMPLE / 2)];
    sample.len() == SAMPLE / 2
        && sample.iter().all(|pair| pair[2..] == [0, 0])
        && sample.iter().any(|pair| pair[..2] != [0, 0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llm_c(magic: u32, version: u32, tokens: u32, data: &[u8]) -> Vec<u8> {
        let mut file: Vec<u8> = [magic, version, tokens]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        file.resize(1024, 0);
        file.extend_from_slice(data);
        file
    }

    fn of(file: &[u8], dtype: Option<Dtype>) -> Result<(Dtype, u64), String> {
        layout(
            &file[..file.len().min(2 * SAMPLE)],
            file.len() as u64,
            dtype,
        )
    }

    #[test]
    fn both_headers_of_llm_c_are_skipped_and_say_their_dtype() {
        for dtype in [None, Some(Dtype::U16)] {
            let file = llm_c(20_240_520, 1, 3, &[0; 6]);
            assert_eq!(of(&file, dtype), Ok((Dtype::U16, 1024)));
        }
        for dtype in [None, Some(Dtype::U32)] {
            let file = llm_c(20_240_801, 7, 3, &[0; 12]);
            assert_eq!(of(&file, dtype), Ok((Dtype::U32, 1024)));
        }
    }

    #[test]
    fn a_header_that_promises_more_than_the_file_has_is_refused() {
        assert_eq!(
            of(&llm_c(20_240_520, 1, 1000, &[0; 476]), None).unwrap_err(),
            "header promises 1000 tokens (3024 bytes), file has 1500 bytes; was it still being written?"
        );
        assert_eq!(
            of(&llm_c(20_240_520, 1, 0, &[]), None).unwrap_err(),
            "header promises 0 tokens; was it still being written?"
        );
        assert_eq!(
            of(&20_240_520_u32.to_le_bytes(), None).unwrap_err(),
            "begins like llm.c's files, but has only 4 bytes"
        );
    }

    #[test]
    fn the_dtype_given_must_be_the_one_of_the_header() {
        assert_eq!(
            of(&llm_c(20_240_520, 1, 2, &[0; 4]), Some(Dtype::U32)).unwrap_err(),
            "llm.c header 20240520 promises u16 ids, the dtype given is u32; leave it out"
        );
        assert_eq!(
            of(&llm_c(20_240_520, 2, 2, &[0; 4]), None).unwrap_err(),
            "llm.c header 20240520 of version 2; this program reads version 1"
        );
    }

    #[test]
    fn bare_ids_begin_at_once_in_the_dtype_given() {
        let ids: Vec<u8> = (0..2000_u32).flat_map(u32::to_le_bytes).collect();
        let (u16, u32) = (Some(Dtype::U16), Some(Dtype::U32));
        assert_eq!(of(&ids, u32), Ok((Dtype::U32, 0)));
        assert_eq!(
            of(&ids, u16).unwrap_err(),
            "every second one of its first 1024 ids is 0: was u16 the right dtype, or is it u32?"
        );
        assert_eq!(of(&ids[..20], u16), Ok((Dtype::U16, 0)), "too few to tell");
        assert_eq!(
            of(&ids[..7], u16).unwrap_err(),
            "has 7 bytes, which is no multiple of 2 (u16); was it copied whole?"
        );
        assert_eq!(
            of(&ids, None).unwrap_err(),
            "bare ids do not say how they are stored; set [data] dtype = \"u16\", as nanoGPT writes them, or \
             \"u32\""
        );
    }
}
