//! One line of the report.

use serde::{Deserialize, Serialize};

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    /// The job runs, but slower than it could, or something else will fail.
    Warning,
    /// A job like this one fails, or trains wrongly.
    Problem,
}

/// What was found, and what to change.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Check {
    /// Stable: programs that read `--json` look for it.
    pub name: String,
    pub status: Status,
    pub found: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Check {
    pub fn ok(name: &str, found: impl Into<String>) -> Check {
        Check {
            name: name.to_owned(),
            status: Status::Ok,
            found: found.into(),
            fix: None,
        }
    }

    pub fn warning(name: &str, found: impl Into<String>, fix: impl Into<String>) -> Check {
        Check {
            status: Status::Warning,
            fix: Some(fix.into()),
            ..Check::ok(name, found)
        }
    }

    pub fn problem(name: &str, found: impl Into<String>, fix: impl Into<String>) -> Check {
        Check {
            status: Status::Problem,
            ..Check::warning(name, found, fix)
        }
    }
}
