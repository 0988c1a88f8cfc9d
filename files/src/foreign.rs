//! Text from other programs (servers, peers), made safe to show: on one line, without secrets,
//! control characters escaped.

use std::collections::BTreeSet;
use std::fmt;

/// Characters of a text that are read.
const LOOKED_AT: usize = 1 << 16;

/// Characters from which on a secret is too long to occur in a name by accident.
const LONG: usize = 16;

/// Keys and passwords that were sent to a server, in every form in which it may quote them. They
/// are never shown.
#[derive(Clone, Default)]
pub struct Secrets(Vec<String>);

impl fmt::Debug for Secrets {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secrets")
    }
}

impl Secrets {
    /// Adds a secret: as it is, and as escaped in JSON and in URLs.
    pub fn add(&mut self, secret: &str) {
        let escaped = secret.replace('\\', "\\\\").replace('"', "\\\"");
        let [of_address, whole] = ["-._~", ""].map(|kept| encoded(secret, kept));
        let of_form = of_address.replace("%20", "+");
        for form in [
            secret,
            &escaped,
            &escaped.replace('/', "\\/"),
            &of_address,
            &whole,
            &of_form,
        ] {
            if !form.is_empty() && !self.0.iter().any(|known| known == form) {
                self.0.push(form.to_owned());
            }
        }
    }

    /// Whether a text contains a long secret, whole.
    pub fn are_in(&self, text: &str) -> bool {
        let mut long = self.0.iter().filter(|secret| secret.len() >= LONG);
        long.any(|secret| text.contains(secret.as_str()))
    }

    /// The first `most` characters of a text on one line, with secrets and parts of them hidden.
    ///
    /// Half of a secret counts as a part, and so do eight characters of it, since a server may have
    /// cut its quote. Case is ignored.
    pub fn line(&self, text: &str, most: usize) -> String {
        let text: String = text.chars().take(LOOKED_AT).collect();
        let hidden = self.hide(&text);
        let words: Vec<&str> = hidden.split_whitespace().collect();
        let mut line = String::new();
        for letter in words.join(" ").chars().take(most) {
            if is_obeyed(letter) {
                line.extend(letter.escape_unicode());
            } else {
                line.push(letter);
            }
        }
        line
    }

    fn hide(&self, text: &str) -> String {
        let lower = text.to_ascii_lowercase();
        let mut is_hidden = vec![false; lower.len()];
        for secret in &self.0 {
            let secret = secret.to_ascii_lowercase();
            let part = (secret.len() / 2).clamp(4, 8).min(secret.len());
            let parts: BTreeSet<&[u8]> = secret.as_bytes().windows(part).collect();
            for (at, window) in lower.as_bytes().windows(part).enumerate() {
                if parts.contains(window) {
                    is_hidden[at..at + part].fill(true);
                }
            }
        }
        let (mut shown, mut was_hidden) = (String::new(), false);
        for (at, letter) in text.char_indices() {
            let is_hidden = is_hidden[at..at + letter.len_utf8()].contains(&true);
            match (is_hidden, was_hidden) {
                (true, false) => shown.push_str("..."),
                (true, true) => {}
                (false, _) => shown.push(letter),
            }
            was_hidden = is_hidden;
        }
        shown
    }
}

/// The first `most` characters of a text, and dots in place of the others.
pub fn cut(text: String, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Percent-encodes a text except letters, digits and `kept`.
fn encoded(text: &str, kept: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        let letter = char::from(byte);
        if letter.is_ascii_alphanumeric() || kept.contains(letter) {
            encoded.push(letter);
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Whether a terminal interprets a character instead of showing it: control characters, changes of
/// text direction, invisible characters.
pub fn is_obeyed(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(all: &[&str]) -> Secrets {
        let mut secrets = Secrets::default();
        all.iter().for_each(|secret| secrets.add(secret));
        secrets
    }

    #[test]
    fn a_secret_is_hidden_in_every_form_and_when_cut() {
        let secret = "Zq/7\"a b\\Xy9-token";
        let secrets = secrets(&[secret]);
        for text in [
            secret.to_owned(),
            secret.to_uppercase(),
            format!("{secret:?}"),
            format!("{secret:?}").replace('/', "\\/"),
            "Zq%2F7%22a%20b%5CXy9-token".to_owned(),
            "Zq%2F7%22a%20b%5CXy9%2Dtoken".to_owned(),
            "zq%2f7%22a+b%5cxy9-token".to_owned(),
            secret[..8].to_owned(),
            secret[5..].to_owned(),
        ] {
            let line = secrets.line(&format!("no {text}"), 200);
            let line = line.trim_matches('"');
            assert!(["no ...", "no \"..."].contains(&line), "{text}: {line}");
        }
        assert_eq!(secrets.line("a token, or none", 200), "a token, or none");
        assert_eq!(format!("{secrets:?}"), "Secrets");
    }

    #[test]
    fn secrets_are_hidden_before_the_text_is_cut() {
        let secrets = secrets(&["0123456789abcdef"]);
        let text = format!("{}0123456789abcdef", "x".repeat(196));
        assert_eq!(secrets.line(&text, 200), format!("{}...", "x".repeat(196)));
        // Short secrets are hidden only whole.
        let short = super::Secrets(vec!["pw".to_owned()]);
        assert_eq!(short.line("pw for p w", 200), "... for p w");
        assert_eq!(Secrets::default().line("a", 200), "a");
    }

    #[test]
    fn control_characters_are_escaped() {
        let text = "a\u{1b}[2J\n\tb\u{202e}c\u{85}d\u{2028}e \u{7}é\u{200b}";
        assert_eq!(
            Secrets::default().line(text, 200),
            "a\\u{1b}[2J b\\u{202e}c d e \\u{7}é\\u{200b}"
        );
    }
}
