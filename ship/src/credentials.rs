//! The environment variables with keys and addresses of servers. They are read again at each
//! `open`, and stored nowhere.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// The environment of this process, or of a test.
#[derive(Clone, Default)]
pub(crate) struct Environment {
    variables: BTreeMap<String, String>,
    /// The directory of `.netrc`.
    pub(crate) home: Option<PathBuf>,
}

impl Environment {
    /// The environment of this process.
    pub(crate) fn of_process() -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        let variables: BTreeMap<_, _> = std::env::vars_os().filter_map(text).collect();
        let home = variables.get("HOME").map(PathBuf::from);
        Self { variables, home }
    }

    /// A variable that is set and not empty.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let value = self.variables.get(name)?;
        Some(value.as_str()).filter(|value| !value.is_empty())
    }

    /// The environment of a test.
    #[cfg(test)]
    pub(crate) fn of(variables: &[(&str, &str)], home: Option<&std::path::Path>) -> Self {
        let variables = variables.iter();
        Self {
            variables: variables
                .map(|(name, value)| ((*name).to_string(), (*value).to_string()))
                .collect(),
            home: home.map(PathBuf::from),
        }
    }
}

/// Shows nothing: the variables hold keys.
impl fmt::Debug for Environment {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Environment { .. }")
    }
}
