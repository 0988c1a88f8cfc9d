//! The settings of the hub: the environment variables of Hugging Face's own tools.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use crate::repository::Repository;

/// The hub and its cache.
#[derive(Debug, Clone)]
pub struct Hub {
    /// Address of the server, without a trailing slash.
    pub(crate) endpoint: String,
    pub(crate) cache: Cache,
    pub(crate) token: Option<Token>,
    /// Whether no request is sent.
    pub(crate) is_offline: bool,
    /// Longest silence of a server.
    pub(crate) patience: Duration,
    /// Time before the second try; the third waits twice as long.
    pub(crate) pause: Duration,
}

/// Gives access to private repositories. It is shown nowhere.
#[derive(Clone)]
pub(crate) struct Token(pub(crate) String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Hub {
    /// Reads `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_TOKEN_PATH`,
    /// `HF_HUB_OFFLINE` and `HF_HUB_DOWNLOAD_TIMEOUT`.
    ///
    /// # Errors
    ///
    /// One line that names an invalid variable.
    pub fn from_env() -> Result<Self, String> {
        Self::from(|name| std::env::var_os(name).map(PathBuf::from))
    }

    /// - `variable`: the value of a variable, if it is set
    pub(crate) fn from(variable: impl Fn(&str) -> Option<PathBuf>) -> Result<Self, String> {
        let path = |name: &str| variable(name).filter(|value| !value.as_os_str().is_empty());
        let word = |name: &str| {
            path(name)
                .map(|value| value.into_os_string().into_string())
                .transpose()
                .map_err(|_| format!("{name}: expected text, found other bytes"))
        };
        let endpoint = word("HF_ENDPOINT")?.unwrap_or_else(|| "https://huggingface.co".to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let is_address = ["http://", "https://"]
            .iter()
            .any(|scheme| endpoint.starts_with(scheme));
        // The value is not shown: it may hold a password.
        if !is_address || endpoint.contains(char::is_whitespace) || endpoint.contains('@') {
            return Err(
                "HF_ENDPOINT: expected http://HOST or https://HOST, found something else".into(),
            );
        }
        let home = path("HF_HOME")
            .or_else(|| Some(path("XDG_CACHE_HOME")?.join("huggingface")))
            .or_else(|| Some(path("HOME")?.join(".cache").join("huggingface")));
        let home = home.ok_or("HF_HOME: it is not set, and HOME is not; set one of them")?;
        let cache = path("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub"));
        let token = match word("HF_TOKEN")? {
            Some(token) => Some(token),
            None => {
                let file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
                spd_files::read_to_string(&file).ok()
            }
        };
        let token = token
            .map(|token| token.trim().to_owned())
            .filter(|token| !token.is_empty());
        if token
            .as_ref()
            .is_some_and(|token| !token.bytes().all(|byte| byte.is_ascii_graphic()))
        {
            return Err(
                "HF_TOKEN: expected letters, digits and signs, found something else".into(),
            );
        }
        let seconds = match word("HF_HUB_DOWNLOAD_TIMEOUT")? {
            None => 30,
            Some(seconds) => match seconds.parse() {
                Ok(seconds @ 1..=86_400) => seconds,
                _ => {
                    return Err(format!(
                        "HF_HUB_DOWNLOAD_TIMEOUT: expected a number of seconds from 1 on, found {seconds:?}"
                    ));
                }
            },
        };
        let offline = word("HF_HUB_OFFLINE")?.unwrap_or_default().to_uppercase();
        Ok(Self {
            endpoint,
            cache: Cache::new(cache),
            token: token.map(Token),
            is_offline: ["1", "ON", "YES", "TRUE"].contains(&&*offline),
            patience: Duration::from_secs(seconds),
            pause: Duration::from_secs(1),
        })
    }

    /// The directory of a commit in the cache, which need not exist.
    pub fn dir(&self, repository: &Repository, commit: &str) -> PathBuf {
        self.layout(repository).pointer_path(commit)
    }

    /// The directory of a repository in the cache.
    pub(crate) fn root(&self, repository: &Repository) -> PathBuf {
        self.cache.path().join(Self::repo(repository).folder_name())
    }

    pub(crate) fn layout(&self, repository: &Repository) -> CacheRepo {
        self.cache.repo(Self::repo(repository))
    }

    fn repo(repository: &Repository) -> Repo {
        let Repository { id, revision } = repository.clone();
        Repo::with_revision(id, RepoType::Model, revision)
    }

    /// The server, for messages.
    pub(crate) fn host(&self) -> &str {
        let address = self.endpoint.split_once("://");
        address.map_or(&self.endpoint, |(_, host)| host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(variables: &[(&str, &str)]) -> Result<Hub, String> {
        Hub::from(|name| {
            let found = variables.iter().find(|(known, _)| *known == name)?;
            Some(PathBuf::from(found.1))
        })
    }

    #[test]
    fn variables_are_those_of_hugging_face() {
        let house = tempfile::tempdir().unwrap();
        let home = house.path().to_str().unwrap();
        let of_home = hub(&[("HF_HOME", home)]).unwrap();
        assert_eq!(of_home.cache.path(), &house.path().join("hub"));
        assert_eq!(
            (of_home.endpoint.as_str(), of_home.is_offline),
            ("https://huggingface.co", false)
        );
        assert!(of_home.token.is_none());
        spd_files::atomic::write_file(&house.path().join("token"), &[b"hf_file\n"]).unwrap();
        let token = |variables: &[_]| hub(variables).unwrap().token.map(|token| token.0);
        assert_eq!(token(&[("HF_HOME", home)]).as_deref(), Some("hf_file"));
        let said = [("HF_HOME", home), ("HF_TOKEN", "hf_said")];
        assert_eq!(token(&said).as_deref(), Some("hf_said"));
        let other = hub(&[
            ("HOME", "/h"),
            ("HF_HUB_CACHE", "/c"),
            ("HF_HUB_OFFLINE", "true"),
            ("HF_ENDPOINT", "http://127.0.0.1:1/"),
        ]);
        let other = other.unwrap();
        assert_eq!(other.cache.path(), &PathBuf::from("/c"));
        assert!(other.is_offline);
        assert_eq!(other.host(), "127.0.0.1:1");
        let plain = hub(&[("HOME", "/h")]).unwrap();
        assert_eq!(
            plain.cache.path(),
            &PathBuf::from("/h/.cache/huggingface/hub")
        );
        let repository = Repository::parse("hf://a/b").unwrap();
        assert_eq!(
            plain.dir(&repository, "c0ffee"),
            PathBuf::from("/h/.cache/huggingface/hub/models--a--b/snapshots/c0ffee")
        );
    }

    #[test]
    fn an_unknown_variable_is_named_and_no_secret_is_shown() {
        for (name, value, line) in [
            (
                "HF_ENDPOINT",
                "https://me:secret@host",
                "HF_ENDPOINT: expected http://HOST or https://HOST, found something else",
            ),
            (
                "HF_TOKEN",
                "sec\nret",
                "HF_TOKEN: expected letters, digits and signs, found something else",
            ),
            (
                "HF_HUB_DOWNLOAD_TIMEOUT",
                "soon",
                "HF_HUB_DOWNLOAD_TIMEOUT: expected a number of seconds from 1 on, found \"soon\"",
            ),
        ] {
            assert_eq!(hub(&[("HOME", "/h"), (name, value)]).unwrap_err(), line);
        }
        assert_eq!(
            hub(&[]).unwrap_err(),
            "HF_HOME: it is not set, and HOME is not; set one of them"
        );
        let shown = format!("{:?}", hub(&[("HOME", "/h"), ("HF_TOKEN", "hf_secret")]));
        assert!(!shown.contains("hf_secret"), "{shown}");
    }
}
