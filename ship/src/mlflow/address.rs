//! Address and credentials of the server, from the variables of MLflow's own client.

use std::path::Path;

use reqwest::{Certificate, RequestBuilder, Url};

use crate::credentials::Environment;
use crate::http::Trust;

/// Advice if there is no address.
const ADVICE: &str = "set it to the address of an MLflow server, such as http://127.0.0.1:5000";

/// Address and credentials of the server. They are not shown.
pub(super) struct Address {
    /// It may hold user and password, which reqwest moves into a header.
    url: Url,
    who: Who,
    /// The certificates that the server may have.
    pub(super) trust: Trust,
}

enum Who {
    /// None, or those in the address.
    Nobody,
    User {
        name: String,
        password: String,
    },
    Token(String),
}

impl Address {
    /// Reads `MLFLOW_TRACKING_URI`, and then `MLFLOW_TRACKING_USERNAME` and
    /// `MLFLOW_TRACKING_PASSWORD`, `MLFLOW_TRACKING_TOKEN` or `~/.mlflow/credentials`.
    /// `MLFLOW_TRACKING_INSECURE_TLS` and `MLFLOW_TRACKING_SERVER_CERT_PATH` choose the trusted
    /// certificates.
    ///
    /// # Errors
    ///
    /// The variable to set, without any value.
    pub(super) fn of(environment: &Environment) -> Result<Self, String> {
        let Some(text) = environment.get("MLFLOW_TRACKING_URI") else {
            return Err(format!("MLFLOW_TRACKING_URI is not set; {ADVICE}"));
        };
        let url = Url::parse(text.trim()).ok();
        let url = url.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        let Some(mut url) = url else {
            return Err(format!(
                "MLFLOW_TRACKING_URI is not an http address; {ADVICE} (`mlflow server` serves files and databases)"
            ));
        };
        let who = who(environment, url.username().is_empty());
        if !matches!(who, Who::Nobody) {
            // Both setters work for an address with a host.
            let _ = (url.set_username(""), url.set_password(None));
        }
        url.set_query(None);
        url.set_fragment(None);
        let trust = trust(environment)?;
        Ok(Self { url, who, trust })
    }

    /// The address of a path below it.
    pub(super) fn at<'t>(&self, path: impl IntoIterator<Item = &'t str>) -> Url {
        let mut url = self.url.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        url
    }

    /// The request with credentials.
    pub(super) fn signed(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.who {
            Who::Nobody => request,
            Who::User { name, password } => request.basic_auth(name, Some(password)),
            Who::Token(token) => request.bearer_auth(token),
        }
    }
}

/// The trusted certificates: those of a file, any, or those of this machine.
fn trust(environment: &Environment) -> Result<Trust, String> {
    let insecure = environment.get("MLFLOW_TRACKING_INSECURE_TLS");
    let is_insecure = match insecure
        .map(|word| word.trim().to_ascii_lowercase())
        .as_deref()
    {
        Some("true" | "1") => true,
        None | Some("false" | "0") => false,
        Some(_) => return Err("MLFLOW_TRACKING_INSECURE_TLS is neither true nor false".into()),
    };
    let Some(path) = environment.get("MLFLOW_TRACKING_SERVER_CERT_PATH") else {
        return Ok(if is_insecure {
            Trust::Anybody
        } else {
            Trust::Machine
        });
    };
    if is_insecure {
        return Err(
            "MLFLOW_TRACKING_INSECURE_TLS trusts any certificate, MLFLOW_TRACKING_SERVER_CERT_PATH one file; unset one of them".into(),
        );
    }
    let refused = |why: &dyn std::fmt::Display| {
        format!(
            "MLFLOW_TRACKING_SERVER_CERT_PATH: {path}: {why}; give a file of certificates in PEM"
        )
    };
    let bytes = spd_files::read(Path::new(path)).map_err(|found| refused(&found))?;
    match Certificate::from_pem_bundle(&bytes) {
        Ok(certificates) if !certificates.is_empty() => Ok(Trust::Only(certificates)),
        _ => Err(refused(&"it has no certificate")),
    }
}

fn who(environment: &Environment, address_says_nothing: bool) -> Who {
    let get = |name| environment.get(name).map(|value| value.trim().to_owned());
    if let Some(name) = get("MLFLOW_TRACKING_USERNAME") {
        let password = get("MLFLOW_TRACKING_PASSWORD").unwrap_or_default();
        return Who::User { name, password };
    }
    if let Some(token) = get("MLFLOW_TRACKING_TOKEN") {
        return Who::Token(token);
    }
    let of_file = environment.home.as_deref().and_then(of_file);
    match of_file.filter(|_| address_says_nothing) {
        Some((name, password)) => Who::User { name, password },
        None => Who::Nobody,
    }
}

/// Name and password in `~/.mlflow/credentials`, whose only section is `[mlflow]`.
fn of_file(home: &Path) -> Option<(String, String)> {
    let text = spd_files::read_to_string(&home.join(".mlflow").join("credentials")).ok()?;
    let find = |wanted: &str| {
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        let mut values = pairs.filter(|(key, _)| key.trim() == wanted);
        values.next().map(|(_, value)| value.trim().to_owned())
    };
    let name = find("mlflow_tracking_username")?;
    Some((name, find("mlflow_tracking_password")?))
}

#[cfg(test)]
mod tests {
    use spd_files::atomic;

    use super::*;

    const URI: (&str, &str) = ("MLFLOW_TRACKING_URI", "http://h:5000/prefix/");

    /// The address and credentials of a request.
    fn asked(variables: &[(&str, &str)], home: Option<&Path>) -> (String, Option<String>) {
        let address = Address::of(&Environment::of(variables, home));
        let address = address.unwrap_or_else(|why| panic!("{why}"));
        let client = crate::http::client().unwrap();
        let request = address.signed(client.get(address.at(["x"]))).build();
        let request = request.unwrap();
        let found = request.headers().get("authorization");
        assert!(found.is_none_or(|value| value.is_sensitive()));
        let found = found.map(|value| value.to_str().unwrap().to_owned());
        (request.url().to_string(), found)
    }

    #[test]
    fn credentials_come_from_the_official_clients_places() {
        let user = ("MLFLOW_TRACKING_USERNAME", "ada");
        let password = ("MLFLOW_TRACKING_PASSWORD", "love");
        let token = ("MLFLOW_TRACKING_TOKEN", "abc");
        let in_address = ("MLFLOW_TRACKING_URI", "https://bob:b%40b@h/?q=1");
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join(".mlflow");
        std::fs::create_dir(&file).unwrap();
        let text = b"[mlflow]\nmlflow_tracking_username = eve\nmlflow_tracking_password = x=y\n";
        atomic::write_file(&file.join("credentials"), &[text]).unwrap();
        let at = "http://h:5000/prefix/x".to_owned();
        let basic = |text: &str| Some(format!("Basic {text}"));
        let home = Some(home.path());
        assert_eq!(asked(&[URI], None), (at.clone(), None));
        let found = asked(&[URI, user, password, token], home);
        assert_eq!(found, (at.clone(), basic("YWRhOmxvdmU=")));
        let bearer = Some("Bearer abc".to_owned());
        assert_eq!(asked(&[URI, token], home), (at.clone(), bearer));
        assert_eq!(asked(&[URI], home), (at, basic("ZXZlOng9eQ==")));
        let at = "https://h/x".to_owned();
        let found = asked(&[in_address], home);
        assert_eq!(found, (at.clone(), basic("Ym9iOmJAYg==")));
        let found = asked(&[in_address, user, password], home);
        assert_eq!(found, (at, basic("YWRhOmxvdmU=")));
    }

    #[test]
    fn trust_comes_from_the_official_clients_variables() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("ca.pem");
        let path = file.to_str().unwrap();
        let trust = |variables: &[(&str, &str)]| {
            let variables = [&[URI], variables].concat();
            Address::of(&Environment::of(&variables, None)).map(|address| address.trust)
        };
        let insecure = |word| ("MLFLOW_TRACKING_INSECURE_TLS", word);
        let only = ("MLFLOW_TRACKING_SERVER_CERT_PATH", path);
        assert!(matches!(trust(&[]), Ok(Trust::Machine)));
        assert!(matches!(trust(&[insecure("false")]), Ok(Trust::Machine)));
        assert!(matches!(trust(&[insecure("True")]), Ok(Trust::Anybody)));
        let why = |variables: &[(&str, &str)]| trust(variables).err().unwrap();
        assert_eq!(
            why(&[insecure("maybe")]),
            "MLFLOW_TRACKING_INSECURE_TLS is neither true nor false"
        );
        assert_eq!(
            why(&[insecure("1"), only]),
            "MLFLOW_TRACKING_INSECURE_TLS trusts any certificate, MLFLOW_TRACKING_SERVER_CERT_PATH one file; unset one of them"
        );
        let named = format!("MLFLOW_TRACKING_SERVER_CERT_PATH: {path}: ");
        let advice = "; give a file of certificates in PEM";
        assert_eq!(
            why(&[only]),
            format!("{named}No such file or directory (os error 2){advice}")
        );
        atomic::write_file(&file, &[b"no certificate"]).unwrap();
        assert_eq!(
            why(&[only]),
            format!("{named}it has no certificate{advice}")
        );
        let pem = crate::http::tests::CERTIFICATE.as_bytes();
        atomic::write_file(&file, &[pem, pem]).unwrap();
        assert!(matches!(trust(&[only]), Ok(Trust::Only(found)) if found.len() == 2));
    }

    #[test]
    fn invalid_addresses_are_refused_without_being_shown() {
        let why = |variables: &[(&str, &str)]| {
            Address::of(&Environment::of(variables, None))
                .err()
                .unwrap()
        };
        assert_eq!(
            why(&[]),
            "MLFLOW_TRACKING_URI is not set; set it to the address of an MLflow server, such as http://127.0.0.1:5000"
        );
        for uri in [
            "sqlite:///secret.db",
            "file:/secret",
            "secret",
            "databricks",
            "http://",
        ] {
            assert_eq!(
                why(&[("MLFLOW_TRACKING_URI", uri)]),
                "MLFLOW_TRACKING_URI is not an http address; set it to the address of an MLflow server, such as http://127.0.0.1:5000 \
                 (`mlflow server` serves files and databases)"
            );
        }
    }
}
