//! `--tag` and `--note`: what a user says about a run.

use serde_json::{Map, Value};

/// In characters.
const MOST_OF_A_TAG: usize = 250;
const MOST_OF_A_NOTE: usize = 5000;

/// Flags that describe a run for people.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct LabelArgs {
    /// Tag the run, in run.json, the report, MLflow and wandb; may be given several times
    #[arg(long = "tag", value_name = "NAME[=VALUE]", value_parser = read_tag)]
    tags: Vec<(String, Option<String>)>,
    /// Note about the run, in run.json, the report, MLflow and wandb; replaces an earlier one
    #[arg(long, value_name = "TEXT", value_parser = read_note)]
    note: Option<String>,
}

fn read_tag(text: &str) -> std::result::Result<(String, Option<String>), String> {
    if text.chars().any(char::is_control) {
        return Err("the tag has control characters".to_owned());
    }
    if text.chars().count() > MOST_OF_A_TAG {
        return Err(format!("a tag has at most {MOST_OF_A_TAG} characters"));
    }
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name.trim(), Some(value.trim().to_owned())),
        None => (text.trim(), None),
    };
    match name {
        "" => Err("the tag has no name".to_owned()),
        name => Ok((name.to_owned(), value)),
    }
}

fn read_note(text: &str) -> std::result::Result<String, String> {
    if text
        .chars()
        .any(|c| c.is_control() && c != '\n' && c != '\t')
    {
        return Err("the note has control characters other than line feeds and tabs".to_owned());
    }
    if text.chars().count() > MOST_OF_A_NOTE {
        return Err(format!("a note has at most {MOST_OF_A_NOTE} characters"));
    }
    Ok(text.to_owned())
}

impl LabelArgs {
    /// Whether no flag was given.
    pub fn is_empty(&self) -> bool {
        self.tags.is_empty() && self.note.is_none()
    }

    /// Adds them to `run`, the object of `run.json`.
    pub(crate) fn add_to(&self, run: &mut Map<String, Value>) {
        let tags = run.entry("tags").or_insert_with(|| Map::new().into());
        if !tags.is_object() {
            *tags = Map::new().into();
        }
        for (name, value) in &self.tags {
            tags[name] = value.as_deref().into();
        }
        let note = run.entry("note").or_insert(Value::Null);
        if let Some(text) = &self.note {
            *note = text.as_str().into();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_have_a_name_and_perhaps_a_value() {
        let some = |name: &str, value: Option<&str>| Ok((name.into(), value.map(str::to_owned)));
        assert_eq!(read_tag("baseline"), some("baseline", None));
        assert_eq!(read_tag(" a b = x=y "), some("a b", Some("x=y")));
        assert_eq!(read_tag("a="), some("a", Some("")));
        assert!(read_tag(&"\u{fc}".repeat(250)).is_ok());
        for bad in ["", "=x", "  ", "a\nb", "a=\u{1b}[0m", &"a".repeat(251)] {
            assert!(read_tag(bad).is_err(), "{bad:?}");
        }
        assert!(read_note("two\n\tlines").is_ok() && read_note("a\u{7}").is_err());
        assert!(read_note(&"a".repeat(5001)).is_err());
    }
}
