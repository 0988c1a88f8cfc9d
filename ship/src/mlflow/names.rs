//! Names that MLflow accepts: letters, digits, `_`, `-`, `.`, `:`, space and `/`, at most 250, as a
//! normalised path.

/// Longest name that all servers accept.
const LONGEST: usize = 250;

/// Letters of the checksum that keeps changed names apart.
const CHECKSUM: usize = 9;

/// The name as MLflow accepts it. A changed name ends in a checksum of the original, so names stay
/// distinct.
pub(super) fn taken(name: &str) -> String {
    if is_taken(name) {
        return name.to_owned();
    }
    let parts = name.split('/').map(|part| {
        let letters = part.chars();
        let letters = letters.map(|letter| if is_letter(letter) { letter } else { '_' });
        letters.collect::<String>()
    });
    let parts: Vec<String> = parts
        .filter(|part| !["", ".", ".."].contains(&&**part))
        .collect();
    let mut changed = parts.join("/");
    changed.truncate(LONGEST - CHECKSUM);
    let sum = crc32c::crc32c(name.as_bytes());
    format!("{}-{sum:08x}", changed.trim_end_matches('/'))
}

fn is_taken(name: &str) -> bool {
    let tidy = |part: &str| !["", ".", ".."].contains(&part);
    name.len() <= LONGEST && name.chars().all(is_letter) && name.split('/').all(tidy)
}

fn is_letter(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "_-.: /".contains(letter)
}

/// The beginning of a value that is too long.
pub(super) fn cut(text: &str, longest: usize) -> String {
    let whole = text
        .char_indices()
        .all(|(at, letter)| at + letter.len_utf8() <= longest);
    if whole {
        return text.to_owned();
    }
    let mark = "...";
    let letters = text.char_indices();
    let kept = letters.take_while(|(at, letter)| at + letter.len_utf8() + mark.len() <= longest);
    let kept: String = kept.map(|(_, letter)| letter).collect();
    kept + mark
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepted_names_are_kept() {
        for name in ["loss", "ci_l0/h.0.attn.q_proj", "a b:c-d", &"k".repeat(250)] {
            assert_eq!(taken(name), name);
        }
    }

    #[test]
    fn changed_names_stay_apart() {
        let long = "k".repeat(251);
        let names = [
            "a@b", "a#b", "a_b", "ΔW", "a//b", "/a/b", "a/b/", "../a", ".", "", &long,
        ];
        let mut found: Vec<String> = names.iter().map(|name| taken(name)).collect();
        assert!(found[0].starts_with("a_b-"), "{found:?}");
        assert!(found.iter().all(|name| is_taken(name)), "{found:?}");
        found.sort();
        found.dedup();
        assert_eq!(found.len(), names.len());
    }

    #[test]
    fn long_values_are_cut_between_letters() {
        assert_eq!(cut("abcdef", 6), "abcdef");
        assert_eq!(cut("abcdefg", 6), "abc...");
        assert_eq!(cut("ΔΔΔΔ", 6), "Δ...");
    }
}
