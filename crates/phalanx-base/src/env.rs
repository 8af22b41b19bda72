//! The environment's variables.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

/// The environment as text; variables that are not UTF-8 are left out.
pub type Env = BTreeMap<String, String>;

/// Names the file in which rank 0 leaves the path of the run's folder, for a launcher that shows the
/// run while it goes on.
pub const RUN_POINTER_VARIABLE: &str = "PHALANX_RUN_POINTER";

/// Has the job token, where no file can be shared.
pub const TOKEN_VARIABLE: &str = "PHALANX_TOKEN";

/// The real environment.
pub fn real_env() -> Env {
    std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
        .collect()
}

/// A whole number in a variable; an empty variable counts as unset.
pub fn number(env: &Env, name: &str) -> Result<Option<usize>> {
    match env.get(name).map(|text| text.trim()) {
        None | Some("") => Ok(None),
        Some(text) => match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(not_a_number(name, text)),
        },
    }
}

/// The error for a variable that must be a number and is not.
pub fn not_a_number(name: &str, text: &str) -> Error {
    Error::usage(format!("{name}={text} is not a number"))
}
