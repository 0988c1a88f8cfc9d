//! JSON as W&B reads it, with bare words for numbers that JSON lacks.

/// An object of encoded values.
pub(super) fn object<'a>(values: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut json = String::from("{");
    for (name, value) in values {
        if json.len() > 1 {
            json.push(',');
        }
        json.push_str(&string(name));
        json.push(':');
        json.push_str(value);
    }
    json.push('}');
    json
}

/// A number in its shortest form; NaN and infinities are bare, as in W&B's own client.
pub(super) fn number(value: f64) -> String {
    if value.is_nan() {
        return "NaN".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let text = format!("{value:?}");
    match text.strip_suffix(".0") {
        Some(whole) if whole != "-0" => whole.into(),
        _ => text,
    }
}

/// A string, in quotes.
pub(super) fn string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_keep_their_bits() {
        for (value, text) in [
            (f64::NAN, "NaN"),
            (f64::INFINITY, "Infinity"),
            (f64::NEG_INFINITY, "-Infinity"),
            (5120.0, "5120"),
            (-0.0, "-0.0"),
            (1.5e-8, "1.5e-8"),
            (0.1, "0.1"),
            (1e300, "1e300"),
        ] {
            assert_eq!(number(value), text);
            let read: f64 = text.parse().unwrap();
            assert!(read.to_bits() == value.to_bits() || value.is_nan());
        }
    }
}
