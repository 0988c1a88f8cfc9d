//! `.netrc`: the user and password of a host, as curl, git and the trackers' own clients keep them.

use std::fmt;
use std::path::PathBuf;

use crate::credentials::Environment;

/// Most bytes of the file.
const LONGEST: u64 = 1 << 20;

/// A user and a password. They are never shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: String,
    pub(crate) password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Login { .. }")
    }
}

/// The candidate files in order: the one that `NETRC` names, or `.netrc` and `_netrc` in the home
/// directory.
pub(crate) fn places(environment: &Environment) -> Vec<PathBuf> {
    match environment.get("NETRC") {
        Some(path) => vec![PathBuf::from(path)],
        None => {
            let home = environment.home.iter();
            home.flat_map(|home| [".netrc", "_netrc"].map(|name| home.join(name)))
                .collect()
        }
    }
}

/// The entry of a host in the first file that exists. A file that cannot be read has no entry.
pub(crate) fn login(environment: &Environment, host: &str) -> Option<Login> {
    let places = places(environment).into_iter();
    let mut texts = places.filter_map(|path| spd_files::read_at_most(&path, LONGEST).ok());
    let text = texts.next()?;
    find(&String::from_utf8_lossy(&text), host)
}

/// The entry of a host, otherwise the default entry.
fn find(text: &str, host: &str) -> Option<Login> {
    let (mut of_host, mut of_all) = (None, None);
    let words = words(text);
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        let slot = match *word {
            "machine"
                if rest
                    .next()
                    .is_some_and(|name| name.eq_ignore_ascii_case(host)) =>
            {
                &mut of_host
            }
            "default" => &mut of_all,
            _ => continue,
        };
        let (mut user, mut password) = (None, None);
        let mut entry = rest.clone();
        while let Some(key) = entry.next() {
            match *key {
                "login" => user = entry.next(),
                "password" => password = entry.next(),
                "account" => _ = entry.next(),
                _ => break,
            }
            rest = entry.clone();
        }
        if let (None, Some(password)) = (&slot, password) {
            *slot = Some(Login {
                user: user.map(|user| user.to_string()).unwrap_or_default(),
                password: password.to_string(),
            });
        }
    }
    of_host.or(of_all)
}

/// All words outside of comments and macros; a macro ends at an empty line.
fn words(text: &str) -> Vec<&str> {
    let (mut words, mut in_macro) = (Vec::new(), false);
    for line in text.lines() {
        let line = line.trim();
        in_macro &= !line.is_empty();
        if in_macro || line.starts_with('#') {
            continue;
        }
        for word in line.split_whitespace() {
            if word == "macdef" {
                in_macro = true;
                break;
            }
            words.push(unquoted(word));
        }
    }
    words
}

fn unquoted(word: &str) -> &str {
    let inner = word
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'));
    inner.unwrap_or(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn password(text: &str, host: &str) -> Option<String> {
        Some(find(text, host)?.password)
    }

    #[test]
    fn the_password_is_that_of_the_host() {
        let text = "# keys\nmachine api.wandb.ai\n  login user\n  password aaa\n\n\
                    machine other.example login me account x password bbb machine third password \"ccc\"\n";
        assert_eq!(password(text, "api.wandb.ai"), Some("aaa".into()));
        assert_eq!(password(text, "OTHER.example"), Some("bbb".into()));
        assert_eq!(find(text, "other.example").unwrap().user, "me");
        assert_eq!(password(text, "third"), Some("ccc".into()));
        assert_eq!(password(text, "fourth"), None);
    }

    #[test]
    fn the_default_entry_is_for_hosts_without_one() {
        let text = "default login u password ddd\nmachine a login u password aaa";
        assert_eq!(password(text, "a"), Some("aaa".into()));
        assert_eq!(password(text, "b"), Some("ddd".into()));
    }

    #[test]
    fn words_of_a_macro_and_a_cut_entry_are_no_password() {
        let text = "macdef init\nmachine a password no\n\nmachine a login u password";
        assert_eq!(password(text, "a"), None);
        assert_eq!(password("machine", "a"), None);
    }

    #[test]
    fn netrc_variable_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        crate::wandb::tests::put(&path, "machine h login u password fromfile").unwrap();
        let variables = [("NETRC", path.to_str().unwrap())];
        let named = Environment::of(&variables, None);
        assert_eq!(login(&named, "h").unwrap().password, "fromfile");
        let at_home = Environment::of(&[], Some(folder.path()));
        assert_eq!(login(&at_home, "h"), None);
        std::fs::rename(&path, folder.path().join(".netrc")).unwrap();
        let found = login(&at_home, "h").unwrap();
        assert_eq!(found.password, "fromfile");
        assert_eq!(format!("{found:?}"), "Login { .. }");
    }
}
