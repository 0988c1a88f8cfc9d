//! Which module paths a pattern means.

use glob::{MatchOptions, Pattern};

/// Whether `pattern` means the module `path`, by the rules of Python's `fnmatch`.
///
/// `*` is any run of characters, dots included, `?` any one character, `[abc]` and `[a-z]` one of a
/// set, `[!abc]` one outside of it. A bracket that is never closed is a bracket.
pub fn pattern_matches(pattern: &str, path: &str) -> bool {
    const AS_FNMATCH: MatchOptions = MatchOptions {
        case_sensitive: true,
        require_literal_separator: false,
        require_literal_leading_dot: false,
    };
    // `**` is no other than `*` here.
    let mut text: Vec<char> = pattern.chars().collect();
    text.dedup_by(|a, b| [*a, *b] == ['*'; 2]);
    loop {
        match Pattern::new(&String::from_iter(&text)) {
            Ok(pattern) => return pattern.matches_with(path, AS_FNMATCH),
            // A bracket that is never closed: all that may be wrong.
            Err(fault) => drop(text.splice(fault.pos..=fault.pos, ['[', '[', ']'])),
        }
    }
}

/// Whether `pattern` can mean no path but itself.
pub(crate) fn is_literal(pattern: &str) -> bool {
    !pattern.contains(['*', '?', '['])
}

#[cfg(test)]
mod tests {
    use super::*;

    // Each line holds in Python: `fnmatch.fnmatchcase(path, pattern)`.
    #[test]
    fn patterns_match_as_in_fnmatch() {
        for (pattern, path) in [
            ("linear1", "linear1"),
            ("*", ""),
            ("*", "transformer.h.0"),
            (
                "transformer.h.*.attn.c_attn",
                "transformer.h.11.attn.c_attn",
            ),
            ("transformer.*c_proj", "transformer.h.0.mlp.c_proj"),
            ("*a*b", "aXbaYb"),
            ("linear?", "linear2"),
            ("h.[0-3].mlp", "h.2.mlp"),
            ("h.[02].mlp", "h.2.mlp"),
            ("h.[!0-3].mlp", "h.4.mlp"),
            ("a[]]b", "a]b"),
            ("a[!]]b", "axb"),
            ("a[x-]", "a-"),
            ("a[b", "a[b"),
            ("[]", "[]"),
            ("[!]", "[!]"),
        ] {
            assert!(pattern_matches(pattern, path), "{pattern} {path}");
        }
    }

    #[test]
    fn patterns_mean_the_whole_path_and_no_other() {
        for (pattern, path) in [
            ("linear1", "linear12"),
            ("linear1", "xlinear1"),
            ("linear1", "Linear1"),
            ("", "x"),
            ("?", ""),
            ("*.mlp", "h.0.mlp.c_fc"),
            ("h.[0-3].mlp", "h.4.mlp"),
            ("h.[!0-3].mlp", "h.2.mlp"),
            ("[z-a]", "m"),
            ("a[b]", "a"),
        ] {
            assert!(!pattern_matches(pattern, path), "{pattern} {path}");
        }
    }

    // Exponential backtracking would never return.
    #[test]
    fn many_stars_are_quick() {
        assert!(!pattern_matches(&"*a".repeat(40), &"a".repeat(39)));
        assert!(!pattern_matches(
            &format!("{}b", "*a".repeat(40)),
            &"a".repeat(2000)
        ));
    }
}
