//! Text of others: of a server, of a peer. It is shown on one line, without secrets, and with escapes for letters that a terminal obeys.

use std::collections::BTreeSet;
use std::fmt;

/// Letters of a text that are looked at.
const LOOKED_AT: usize = 1 << 16;

/// Letters from which on a secret is so long that no name holds it by accident.
const LONG: usize = 16;

/// Keys and passwords that a server was sent, in all forms that it has them in. They are shown nowhere.
#[derive(Clone, Default)]
pub struct Secrets(Vec<String>);

impl fmt::Debug for Secrets {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secrets")
    }
}

impl Secrets {
    /// Adds one: as it is, and as JSON and addresses have it.
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

    /// Whether a text holds a long one of them, whole.
    pub fn are_in(&self, text: &str) -> bool {
        let mut long = self.0.iter().filter(|secret| secret.len() >= LONG);
        long.any(|secret| text.contains(secret.as_str()))
    }

    /// The beginning of a text, as it may be shown: on one line, in so many letters, without these secrets and without parts of them.
    ///
    /// A part is half of a secret, and never more than eight letters: a server may have cut what it quotes. The case of letters does
    /// not count.
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

/// A text as addresses have it, where these signs are kept.
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

/// Whether a terminal does something else with a letter than to show it: it moves the cursor, turns the direction of text, or shows
/// nothing.
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
    fn a_secret_is_hidden_in_whatever_form_and_wherever_it_was_cut() {
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
    fn what_is_cut_is_cut_behind_what_is_hidden() {
        let secrets = secrets(&["0123456789abcdef"]);
        let text = format!("{}0123456789abcdef", "x".repeat(196));
        assert_eq!(secrets.line(&text, 200), format!("{}...", "x".repeat(196)));
        // Short ones are hidden whole.
        let short = super::Secrets(vec!["pw".to_owned()]);
        assert_eq!(short.line("pw for p w", 200), "... for p w");
        assert_eq!(Secrets::default().line("a", 200), "a");
    }

    #[test]
    fn no_letter_moves_anything() {
        let text = "a\u{1b}[2J\n\tb\u{202e}c\u{85}d\u{2028}e \u{7}é\u{200b}";
        assert_eq!(
            Secrets::default().line(text, 200),
            "a\\u{1b}[2J b\\u{202e}c d e \\u{7}é\\u{200b}"
        );
    }
}
