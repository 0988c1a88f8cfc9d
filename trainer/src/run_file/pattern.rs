//! Which module paths a pattern means.

/// Whether `pattern` means the module `path`, by the rules of Python's `fnmatch`.
///
/// `*` is any run of characters, dots included, `?` any one character, `[abc]` and `[a-z]` one of a
/// set, `[!abc]` one outside of it. A bracket that is never closed is a bracket.
pub fn pattern_matches(pattern: &str, path: &str) -> bool {
    let pieces = pieces(pattern);
    let path: Vec<char> = path.chars().collect();
    let (mut piece, mut at) = (0, 0);
    // State to retry from when the last `*` has to take one more character.
    let mut retry = None;
    loop {
        match (pieces.get(piece), path.get(at)) {
            (None, None) => return true,
            (Some(Piece::Run), _) => {
                retry = Some((piece + 1, at));
                piece += 1;
            }
            (Some(Piece::One(set)), Some(c)) if set.holds(*c) => {
                piece += 1;
                at += 1;
            }
            _ => match retry {
                Some((after_run, taken_to)) if taken_to < path.len() => {
                    retry = Some((after_run, taken_to + 1));
                    (piece, at) = (after_run, taken_to + 1);
                }
                _ => return false,
            },
        }
    }
}

/// Whether `pattern` can mean no path but itself.
pub(crate) fn is_literal(pattern: &str) -> bool {
    !pattern.contains(['*', '?', '['])
}

enum Piece {
    Run,
    One(Set),
}

/// Characters inside any of `ranges`, ends included; with `outside`, all the others.
struct Set {
    outside: bool,
    ranges: Vec<(char, char)>,
}

impl Set {
    fn holds(&self, c: char) -> bool {
        self.ranges
            .iter()
            .any(|(first, last)| (*first..=*last).contains(&c))
            != self.outside
    }
}

fn pieces(pattern: &str) -> Vec<Piece> {
    let pattern: Vec<char> = pattern.chars().collect();
    let mut pieces = Vec::new();
    let mut rest = pattern.as_slice();
    while let [first, after @ ..] = rest {
        rest = after;
        pieces.push(match first {
            '*' => Piece::Run,
            '?' => Piece::One(Set {
                outside: true,
                ranges: Vec::new(),
            }),
            '[' if let Some((set, after_set)) = set(after) => {
                rest = after_set;
                Piece::One(set)
            }
            c => Piece::One(Set {
                outside: false,
                ranges: vec![(*c, *c)],
            }),
        });
    }
    pieces
}

/// The set that opens before `text`, and what follows its `]`; `None` when nothing closes it.
fn set(text: &[char]) -> Option<(Set, &[char])> {
    let (outside, members) = match text {
        ['!', members @ ..] => (true, members),
        members => (false, members),
    };
    // A `]` in the first place is a member.
    let end = members.iter().skip(1).position(|c| *c == ']')? + 1;
    let (mut members, after) = (&members[..end], &members[end + 1..]);
    let mut ranges = Vec::new();
    while let [first, rest @ ..] = members {
        let (last, rest) = match rest {
            ['-', last, rest @ ..] => (last, rest),
            rest => (first, rest),
        };
        ranges.push((*first, *last));
        members = rest;
    }
    Some((Set { outside, ranges }, after))
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
