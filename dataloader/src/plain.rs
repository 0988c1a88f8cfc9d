//! Files that other trainers wrote: nanoGPT's bare ids, llm.c's ids behind 256 words.

use std::path::Path;

use crate::DataError;
use crate::tokens::{Dtype, Mapped, TokenFile};

/// Bytes of llm.c's header: 256 i32, of which the magic, the version and the token count are used.
const HEADER_BYTES: usize = 1024;
/// llm.c's magic numbers, each with its version and dtype. As ids they would be 20 million in u32, and
/// in u16 lie beyond the 50,257 of the GPT-2 vocabulary: no nanoGPT file begins so.
const MAGICS: [(u32, u32, Dtype); 2] = [(20_240_520, 1, Dtype::U16), (20_240_801, 7, Dtype::U32)];
/// How many ids tell that u32 is being read as u16.
const SAMPLE: usize = 1024;

/// Maps a plain file; `dtype` is never guessed, but an obvious mistake is refused.
pub(crate) fn open(path: &Path, dtype: Dtype) -> Result<TokenFile, DataError> {
    let mapped = Mapped::open(path)?;
    let start =
        token_start(mapped.bytes()?, dtype).map_err(|fault| DataError::damaged(path, fault))?;
    let token_bytes = start..mapped.len();
    Ok(TokenFile {
        mapped,
        dtype,
        token_bytes,
        end_bytes: None,
    })
}

/// Where the ids begin, in bytes.
fn token_start(file: &[u8], dtype: Dtype) -> Result<usize, String> {
    let word = |index: usize| {
        file.get(4 * index..)
            .and_then(|bytes| bytes.first_chunk())
            .map(|&bytes| u32::from_le_bytes(bytes))
    };
    if let Some(&(magic, version, stored)) =
        MAGICS.iter().find(|(magic, ..)| word(0) == Some(*magic))
    {
        let (Some(found), Some(tokens)) = (word(1), word(2)) else {
            return Err(format!(
                "begins like llm.c's files, but has only {} bytes",
                file.len()
            ));
        };
        if found != version {
            return Err(format!(
                "llm.c header {magic} of version {found}; version {version} is the one we read"
            ));
        }
        if stored != dtype {
            return Err(format!(
                "llm.c header {magic} promises {stored:?} ids, the dtype given is {dtype:?}"
            ));
        }
        let promised = HEADER_BYTES as u64 + u64::from(tokens) * dtype.bytes() as u64;
        if promised != file.len() as u64 {
            return Err(format!(
                "header promises {tokens} tokens ({promised} bytes), file has {} bytes; was it still \
                 being written?",
                file.len()
            ));
        }
        return Ok(HEADER_BYTES);
    }
    if !file.len().is_multiple_of(dtype.bytes()) {
        return Err(format!(
            "has {} bytes, which is no multiple of {} ({dtype:?}); was it copied whole?",
            file.len(),
            dtype.bytes()
        ));
    }
    if dtype == Dtype::U16 && looks_like_u32(file) {
        return Err(format!(
            "every second one of its first {SAMPLE} ids is 0: was u16 the right dtype, or is it u32?"
        ));
    }
    Ok(0)
}

/// Ids below 65,536 stored as u32 and read as u16 are valid ids with a 0 after each.
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
        file.resize(HEADER_BYTES, 0);
        file.extend_from_slice(data);
        file
    }

    #[test]
    fn both_headers_of_llm_c_are_skipped() {
        assert_eq!(
            token_start(&llm_c(20_240_520, 1, 3, &[0; 6]), Dtype::U16),
            Ok(1024)
        );
        assert_eq!(
            token_start(&llm_c(20_240_801, 7, 3, &[0; 12]), Dtype::U32),
            Ok(1024)
        );
    }

    #[test]
    fn a_header_that_promises_more_than_the_file_has_is_refused() {
        assert_eq!(
            token_start(&llm_c(20_240_520, 1, 1000, &[0; 476]), Dtype::U16).unwrap_err(),
            "header promises 1000 tokens (3024 bytes), file has 1500 bytes; was it still being written?"
        );
        assert_eq!(
            token_start(&20_240_520_u32.to_le_bytes(), Dtype::U16).unwrap_err(),
            "begins like llm.c's files, but has only 4 bytes"
        );
    }

    #[test]
    fn the_dtype_given_must_be_the_one_of_the_header() {
        assert_eq!(
            token_start(&llm_c(20_240_520, 1, 2, &[0; 4]), Dtype::U32).unwrap_err(),
            "llm.c header 20240520 promises U16 ids, the dtype given is U32"
        );
        assert_eq!(
            token_start(&llm_c(20_240_520, 2, 2, &[0; 4]), Dtype::U16).unwrap_err(),
            "llm.c header 20240520 of version 2; version 1 is the one we read"
        );
    }

    #[test]
    fn bare_ids_begin_at_once_in_the_dtype_given() {
        let ids: Vec<u8> = (0..2000_u32).flat_map(u32::to_le_bytes).collect();
        assert_eq!(token_start(&ids, Dtype::U32), Ok(0));
        assert_eq!(
            token_start(&ids, Dtype::U16).unwrap_err(),
            "every second one of its first 1024 ids is 0: was u16 the right dtype, or is it u32?"
        );
        assert_eq!(
            token_start(&ids[..20], Dtype::U16),
            Ok(0),
            "too few to tell"
        );
        assert_eq!(
            token_start(&ids[..7], Dtype::U16).unwrap_err(),
            "has 7 bytes, which is no multiple of 2 (U16); was it copied whole?"
        );
    }
}
