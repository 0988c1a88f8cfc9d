//! Types of values: how the value of a key is read, and what is said of a wrong one.

use std::{marker::PhantomData, path::PathBuf};

use toml::de::DeValue;

/// A kind of value.
pub trait Kind {
    /// The type of a value that was read.
    type Value;

    /// How the kind is asked for, as in "expected ...".
    fn expected(&self) -> String;

    /// The value, or what was expected instead.
    fn read(&self, value: &DeValue<'_>) -> Result<Self::Value, String>;
}

/// A whole number from `least` to `most`.
pub struct Bounded<N> {
    least: u64,
    most: u64,
    of: PhantomData<N>,
}

/// A whole number.
pub type Whole = Bounded<u64>;

/// The length of something in memory.
pub type Size = Bounded<usize>;

impl<N> Bounded<N> {
    const fn new(least: u64, most: u64) -> Self {
        Self {
            least,
            most,
            of: PhantomData,
        }
    }
}

impl Whole {
    /// Counts of steps: they key 32-bit counters of the random draws.
    pub const fn at_least(least: u64) -> Self {
        Self::new(least, u32::MAX as u64)
    }

    /// Any that TOML can say.
    pub const ANY: Self = Self::new(0, i64::MAX as u64);
}

impl Size {
    /// No tensor has an axis longer than this.
    pub const MOST: usize = u32::MAX as usize;

    /// From `least` on.
    pub const fn at_least(least: usize) -> Self {
        Self::between(least, Self::MOST)
    }

    /// From `least` to `most`.
    pub const fn between(least: usize, most: usize) -> Self {
        Self::new(least as u64, most as u64)
    }
}

impl<N: TryFrom<u64>> Kind for Bounded<N> {
    type Value = N;

    fn expected(&self) -> String {
        match self.least {
            0 => "a whole number".to_owned(),
            least => format!("a whole number of at least {least}"),
        }
    }

    fn read(&self, value: &DeValue<'_>) -> Result<N, String> {
        let DeValue::Integer(digits) = value else {
            return Err(self.expected());
        };
        let number = i128::from_str_radix(digits.as_str(), digits.radix()).unwrap_or(i128::MAX);
        if number > i128::from(self.most) {
            return Err(format!("a whole number of at most {}", self.most));
        }
        let number = u64::try_from(number).ok().filter(|n| *n >= self.least);
        let number = number.and_then(|number| N::try_from(number).ok());
        number.ok_or_else(|| self.expected())
    }
}

/// A finite number of which something holds.
#[derive(Clone, Copy)]
pub struct Number {
    expected: &'static str,
    holds: fn(f64) -> bool,
}

impl Number {
    /// One of which `holds` holds; `expected` says what.
    pub const fn new(expected: &'static str, holds: fn(f64) -> bool) -> Self {
        Self { expected, holds }
    }

    /// Any number but infinities and NaN.
    pub const FINITE: Self = Self {
        expected: "a finite number",
        holds: |_| true,
    };
    /// Above 0.
    pub const POSITIVE: Self = Self {
        expected: "a number above 0",
        holds: |x| x > 0.0,
    };
    /// 0 or more.
    pub const NOT_NEGATIVE: Self = Self {
        expected: "a number of at least 0",
        holds: |x| x >= 0.0,
    };
    /// In `[0, 1]`.
    pub const FRACTION: Self = Self {
        expected: "a number in [0, 1]",
        holds: |x| (0.0..=1.0).contains(&x),
    };
    /// In `(0, 1]`.
    pub const PROBABILITY: Self = Self {
        expected: "a number in (0, 1]",
        holds: |x| x > 0.0 && x <= 1.0,
    };
    /// In `(0, 1)`.
    pub const PART: Self = Self {
        expected: "a number above 0 and below 1",
        holds: |x| x > 0.0 && x < 1.0,
    };
    /// In `[0, 1)`.
    pub const DECAY: Self = Self {
        expected: "a number in [0, 1)",
        holds: |x| (0.0..1.0).contains(&x),
    };
}

impl Kind for Number {
    type Value = f64;

    fn expected(&self) -> String {
        self.expected.to_owned()
    }

    fn read(&self, value: &DeValue<'_>) -> Result<f64, String> {
        finite(value)
            .filter(|number| (self.holds)(*number))
            .ok_or_else(|| self.expected())
    }
}

/// The finite number that a whole number or a decimal means.
fn finite(value: &DeValue<'_>) -> Option<f64> {
    let number = match value {
        DeValue::Float(float) => float.as_str().parse().ok()?,
        DeValue::Integer(digits) => {
            i64::from_str_radix(digits.as_str(), digits.radix()).ok()? as f64
        }
        _ => return None,
    };
    f64::is_finite(number).then_some(number)
}

/// The largest norm of a gradient; `false` does not clip.
pub struct Clip;

impl Kind for Clip {
    type Value = Option<f64>;

    fn expected(&self) -> String {
        "a number above 0, or false".to_owned()
    }

    fn read(&self, value: &DeValue<'_>) -> Result<Option<f64>, String> {
        match value {
            DeValue::Boolean(false) => Ok(None),
            _ => Number::POSITIVE
                .read(value)
                .map(Some)
                .map_err(|_| self.expected()),
        }
    }
}

/// A kind in whose place something else would do too, which the caller reads.
pub struct Or<K>(pub K, pub &'static str);

impl<K: Kind> Kind for Or<K> {
    type Value = K::Value;

    fn expected(&self) -> String {
        format!("{}, or {}", self.0.expected(), self.1)
    }

    fn read(&self, value: &DeValue<'_>) -> Result<K::Value, String> {
        self.0.read(value).map_err(|_| self.expected())
    }
}

/// `true` or `false`.
pub struct Flag;

impl Kind for Flag {
    type Value = bool;

    fn expected(&self) -> String {
        "true or false".to_owned()
    }

    fn read(&self, value: &DeValue<'_>) -> Result<bool, String> {
        value.as_bool().ok_or_else(|| self.expected())
    }
}

/// A string of which something holds.
pub struct Text {
    expected: &'static str,
    holds: fn(&str) -> bool,
}

impl Text {
    /// Any string that is not empty.
    pub const ANY: Self = Self {
        expected: "a string that is not empty",
        holds: |text| !text.is_empty(),
    };
    /// A hash of Git.
    pub const COMMIT: Self = Self {
        expected: "a commit of 40 hexadecimal digits",
        holds: |text| {
            let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
            text.len() == 40 && text.bytes().all(is_digit)
        },
    };
    /// It becomes the name of a directory.
    pub const RUN_NAME: Self = Self {
        expected: "a string of letters, digits, `.`, `_` and `-` that starts with a letter or a digit",
        holds: |text| {
            text.starts_with(|first: char| first.is_ascii_alphanumeric())
                && text
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        },
    };
}

impl Kind for Text {
    type Value = String;

    fn expected(&self) -> String {
        self.expected.to_owned()
    }

    fn read(&self, value: &DeValue<'_>) -> Result<String, String> {
        let text = value.as_str().filter(|text| (self.holds)(text));
        text.map(str::to_owned).ok_or_else(|| self.expected())
    }
}

/// A path, kept as it is written.
pub struct Location;

impl Kind for Location {
    type Value = PathBuf;

    fn expected(&self) -> String {
        "a path".to_owned()
    }

    fn read(&self, value: &DeValue<'_>) -> Result<PathBuf, String> {
        Text::ANY
            .read(value)
            .map(PathBuf::from)
            .map_err(|_| self.expected())
    }
}

/// One of several words.
pub struct OneOf<'w, T>(pub &'w [(&'static str, T)]);

impl<T: PartialEq> OneOf<'_, T> {
    /// The word for `choice`; empty when there is none.
    pub fn word(&self, choice: T) -> &'static str {
        self.0
            .iter()
            .find(|(_, other)| *other == choice)
            .map_or("", |(word, _)| word)
    }
}

impl<T: Copy> OneOf<'_, T> {
    /// The choice of a word.
    pub fn of(&self, word: &str) -> Option<T> {
        let (_, choice) = self.0.iter().find(|(known, _)| *known == word)?;
        Some(*choice)
    }
}

impl<T: Copy> Kind for OneOf<'_, T> {
    type Value = T;

    fn expected(&self) -> String {
        let words: Vec<_> = self
            .0
            .iter()
            .map(|(word, _)| format!("\"{word}\""))
            .collect();
        match words.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, others)) => format!("{} or {last}", others.join(", ")),
            None => "nothing".to_owned(),
        }
    }

    fn read(&self, value: &DeValue<'_>) -> Result<T, String> {
        let choice = value.as_str().and_then(|word| self.of(word));
        choice.ok_or_else(|| self.expected())
    }
}

/// Declares an enum of words, `Variant = "word"`. It serialises as its word, and `WORDS` reads it.
#[macro_export]
macro_rules! words {
    ($(#[$of_enum:meta])* $vis:vis enum $Name:ident {
        $($(#[$of_variant:meta])* $Variant:ident = $word:literal,)+
    }) => {
        $(#[$of_enum])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        $vis enum $Name { $($(#[$of_variant])* $Variant,)+ }

        impl $Name {
            /// Its words in run files.
            $vis const WORDS: $crate::values::OneOf<'static, Self> =
                $crate::values::OneOf(&[$(($word, Self::$Variant),)+]);

            /// Its word.
            $vis fn word(self) -> &'static str {
                Self::WORDS.word(self)
            }
        }

        impl ::serde::Serialize for $Name {
            fn serialize<S: ::serde::Serializer>(
                &self,
                to: S,
            ) -> ::std::result::Result<S::Ok, S::Error> {
                to.serialize_str(self.word())
            }
        }
    };
}

/// A list of values of one kind.
pub struct List<K> {
    of: K,
    least: usize,
    expected: &'static str,
}

impl<K> List<K> {
    /// At least `least` values, each of the kind `of`; `expected` says what.
    pub const fn new(of: K, least: usize, expected: &'static str) -> Self {
        Self {
            of,
            least,
            expected,
        }
    }
}

impl<K: Kind> Kind for List<K> {
    type Value = Vec<K::Value>;

    fn expected(&self) -> String {
        self.expected.to_owned()
    }

    fn read(&self, value: &DeValue<'_>) -> Result<Self::Value, String> {
        let items = value.as_array().filter(|items| items.len() >= self.least);
        let read = |item: &toml::Spanned<DeValue<'_>>| self.of.read(item.get_ref()).ok();
        items
            .and_then(|items| items.iter().map(read).collect())
            .ok_or_else(|| self.expected())
    }
}

/// Widths of layers, at least one.
pub const WIDTHS: List<Size> = List::new(
    Size::at_least(1),
    1,
    "a list of widths of at least 1, such as [16]",
);

/// Widths of layers, or none.
pub const WIDTHS_OR_NONE: List<Size> = List::new(
    Size::at_least(1),
    0,
    "a list of widths of at least 1, such as [16], or []",
);

/// Patterns of module paths, at least one.
pub const PATTERNS: List<Text> = List::new(
    Text::ANY,
    1,
    "a list of patterns of sites, such as [\"h.*.mlp.*\"]",
);

/// Words, or none.
pub const WORDS: List<Text> = List::new(Text::ANY, 0, "a list of strings that are not empty");

/// Things that are numbered from 0, or none.
pub const NUMBERED: List<Size> = List::new(
    Size::at_least(0),
    0,
    "a list of numbers from 0, such as [1, 3]",
);

/// Groups of things that are numbered from 0, none of them empty.
pub const GROUPS: List<List<Size>> = List::new(
    List::new(Size::at_least(0), 1, ""),
    0,
    "a list of groups of features, such as [[0, 1], [2, 3]]",
);

/// A value as a message names it, in one line.
pub fn found(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) if text.chars().count() > 60 => {
            format!("a string of {} characters", text.chars().count())
        }
        DeValue::String(text) => format!("the string {text:?}"),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Float(number) => number.to_string(),
        DeValue::Boolean(flag) => flag.to_string(),
        DeValue::Datetime(_) => "a date".to_owned(),
        DeValue::Array(items) if items.len() <= 8 => {
            let items: Vec<_> = items.iter().map(|item| found(item.get_ref())).collect();
            format!("[{}]", items.join(", "))
        }
        DeValue::Array(items) => format!("a list of {}", items.len()),
        DeValue::Table(_) => "a table".to_owned(),
    }
}

/// Whether a value is its default, which a file leaves out.
pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A number as people write it: with an exponent where it would have many zeros.
pub fn brief(number: f64) -> String {
    if number == 0.0 || (1e-5..1e15).contains(&number.abs()) {
        number.to_string()
    } else {
        format!("{number:e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_brief() {
        for (number, expected) in [
            (0.0, "0"),
            (0.25, "0.25"),
            (100_000.0, "100000"),
            (-3e-5, "-0.00003"),
            (1e-300, "1e-300"),
            (-2.5e300, "-2.5e300"),
        ] {
            assert_eq!(brief(number), expected);
        }
    }
}
