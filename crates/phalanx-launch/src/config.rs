//! `--config FILE`: flags from a file.

use std::ffi::OsString;
use std::path::Path;

use clap::{Arg, Command};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::words::dashed;

/// Flags of a run that say where it goes on and where it stops, and not how it trains.
const OF_ONE_RUN: [&str; 4] = ["output-dir", "overwrite", "resume", "stop-after"];

/// A flag's name and its values; a switch has none.
type Flag = (String, Vec<String>);

/// `words`, and after them the flags in the file that `--config` names there, but those that are there already or exclude one
/// that is. What the file may have depends on the command that `words` name in `command`; without a flag `--config` of this
/// command nothing is read.
///
/// # Errors
///
/// Usage, naming the file and the flag.
pub fn with_config(command: &Command, mut words: Vec<OsString>) -> Result<Vec<OsString>> {
    let command = words.iter().fold(command, |command, word| {
        let named = word.to_str().and_then(|name| command.find_subcommand(name));
        named.unwrap_or(command)
    });
    let has_name = |arg: &Arg, name: &str| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long() == Some(name) || aliases.contains(&name)
    };
    let find = |name: &str| command.get_arguments().find(|arg| has_name(arg, name));
    let typed: Vec<Flag> = flags(words.iter().map(|word| word.to_string_lossy().into_owned()));
    let Some((_, path)) = typed.iter().rfind(|(name, _)| name == "config") else {
        return Ok(words);
    };
    let Some(path) = path.first().filter(|_| find("config").is_some()) else {
        return Ok(words);
    };
    let is_typed = |arg: &Arg| typed.iter().any(|(name, _)| has_name(arg, name));
    for (name, values) in read(Path::new(path), 0)? {
        let Some(arg) = find(&name) else {
            return Err(Error::usage(format!(
                "{path}: {} has no flag --{name}",
                command.get_name()
            )));
        };
        let excludes = |one: &Arg, other: &Arg| {
            let all = command.get_arg_conflicts_with(one);
            all.iter().any(|arg| arg.get_id() == other.get_id())
        };
        let mut present = command.get_arguments().filter(|arg| is_typed(arg));
        if is_typed(arg) || present.any(|other| excludes(arg, other) || excludes(other, arg)) {
            continue;
        }
        match (arg.get_action().takes_values(), &values[..]) {
            (true, values) => words
                .extend((values.iter()).map(|value| OsString::from(format!("--{name}={value}")))),
            (false, [no]) if no == "false" => {}
            (false, _) => words.push(format!("--{name}").into()),
        }
    }
    Ok(words)
}

/// The flags among `words`.
fn flags(words: impl Iterator<Item = String>) -> Vec<Flag> {
    let mut flags: Vec<Flag> = Vec::new();
    for word in words {
        match (dashed(word.clone().into()), flags.last_mut()) {
            ((whole, Some(name), attached), _) => {
                let whole = whole.to_string_lossy();
                let value = whole.split_once('=').filter(|_| attached);
                let value = value.map(|(_, value)| value.to_owned());
                flags.push((name, value.into_iter().collect()));
            }
            (_, Some((_, values))) => values.push(word),
            _ => {}
        }
    }
    flags
}

/// The flags in the file `path`, which the `depth`th of them names.
fn read(path: &Path, depth: usize) -> Result<Vec<Flag>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::not_opened("configuration", path, error))?;
    if path.extension().is_some_and(|ending| ending == "json") {
        let run: Value = serde_json::from_str(&text)
            .map_err(|error| Error::usage(format!("{shown} is not JSON")).caused_by(error))?;
        let Some(words) = run["arguments"].as_array() else {
            let what = format!("{shown} has no \"arguments\", as the run.json of a run has");
            return Err(Error::usage(what));
        };
        let words = words.iter().filter_map(Value::as_str);
        let mut all = Vec::new();
        for (name, values) in flags(words.map(ToOwned::to_owned)) {
            match (&*name, values.first()) {
                ("config", Some(_)) if depth > 8 => {
                    let what = format!("{shown} names itself as its --config");
                    return Err(Error::usage(what));
                }
                ("config", Some(other)) => all.extend(read(Path::new(other), depth + 1)?),
                (name, _) if OF_ONE_RUN.contains(&name) => {}
                _ => {
                    // Later ones take precedence.
                    all.retain(|(before, _)| *before != name);
                    all.push((name, values));
                }
            }
        }
        return Ok(all);
    }
    let table: toml::Table = toml::from_str(&text)
        .map_err(|error| Error::usage(format!("{shown} is not TOML: {}", error.message())))?;
    let flag = |(key, value): (String, toml::Value)| {
        let plain = |value: &toml::Value| match value {
            toml::Value::String(text) => Some(text.clone()),
            toml::Value::Integer(number) => Some(number.to_string()),
            toml::Value::Float(number) => Some(number.to_string()),
            toml::Value::Boolean(is) => Some(is.to_string()),
            _ => None,
        };
        let values = match &value {
            toml::Value::Array(all) => all.iter().map(plain).collect(),
            one => plain(one).map(|one| vec![one]),
        };
        let what = || format!("{shown}: {key} is neither a value nor a list of values");
        let values: Vec<String> = values.ok_or_else(|| Error::usage(what()))?;
        Ok((key.replace('_', "-"), values))
    };
    table.into_iter().map(flag).collect()
}

#[cfg(test)]
mod tests {
    use clap::ArgAction;

    use super::*;

    fn command() -> Command {
        let value = |name: &'static str| Arg::new(name).long(name);
        let train = Command::new("train")
            .arg(value("config"))
            .arg(value("lr").visible_alias("learning-rate"))
            .arg(value("batch-size"))
            .arg(value("global-batch-size").conflicts_with("batch-size"))
            .arg(value("tag").action(ArgAction::Append))
            .arg(value("wandb").action(ArgAction::SetTrue))
            .arg(value("resume"));
        let other = Command::new("other").arg(value("lr"));
        Command::new("phalanx").subcommands([train, other])
    }

    /// What is added to the words `typed`, of a configuration that is read from a file with this ending.
    fn added(ending: &str, text: &str, typed: &str) -> Result<String> {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join(format!("config.{ending}"));
        std::fs::write(&path, text).expect("written");
        let path = path.display().to_string();
        let words = typed.replace("FILE", &path);
        let words: Vec<OsString> = words.split(' ').map(Into::into).collect();
        let count = words.len();
        let mut command = command();
        command.build();
        let all = with_config(&command, words)?;
        let added = all[count..].iter().map(|word| word.to_string_lossy());
        Ok(added.collect::<Vec<_>>().join(" ").replace(&path, "FILE"))
    }

    #[test]
    fn a_file_has_flags_that_were_not_typed() {
        let text = "lr = 1e-3\nbatch_size = 32\ntag = [\"a\", \"b=1\"]\nwandb = true\n";
        let of = |typed: &str| added("toml", text, typed).expect("flags");
        let all = "--batch-size=32 --lr=0.001 --tag=a --tag=b=1 --wandb";
        assert_eq!(of("train --config FILE"), all);
        let others = "--batch-size=32 --tag=a --tag=b=1 --wandb";
        assert_eq!(of("train --config=FILE --learning-rate 2"), others);
        let others = "--lr=0.001 --tag=a --tag=b=1";
        let typed = "train --config FILE --global-batch-size=8 --wandb";
        assert_eq!(of(typed), others);
        assert_eq!(of("other --config FILE"), "", "it has no such flag");
        assert_eq!(of("train --lr 1"), "");
        let none = added("toml", "wandb = false\n", "train --config FILE");
        assert_eq!(none.expect("a switch"), "");
    }

    #[test]
    fn a_run_is_a_configuration() {
        let text = r#"{"arguments": ["train", "--lr", "-1", "--lr=2", "--wandb", "--resume", "auto", "--tag", "x"]}"#;
        let all = added("json", text, "train --config FILE").expect("flags");
        assert_eq!(all, "--lr=2 --wandb --tag=x");
        let itself = r#"{"arguments": ["--config", "FILE"]}"#;
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("run.json");
        let text = itself.replace("FILE", &path.display().to_string());
        std::fs::write(&path, text).expect("written");
        let error = read(&path, 0).expect_err("a circle").to_string();
        assert!(error.contains("names itself"), "{error}");
    }

    #[test]
    fn mistakes_name_the_file() {
        for (ending, text, why) in [
            ("toml", "rate = 1\n", "FILE: train has no flag --rate"),
            ("toml", "lr 1\n", "FILE is not TOML"),
            (
                "toml",
                "[lr]\na = 1\n",
                "FILE: lr is neither a value nor a list",
            ),
            ("json", "{}", "FILE has no \"arguments\""),
            ("json", "{", "FILE is not JSON"),
        ] {
            let error = added(ending, text, "train --config FILE").expect_err(text);
            let text = error.to_string();
            let (_, end) = text.split_once("config.").unwrap_or_default();
            let end = end.replacen(ending, "FILE", 1);
            assert!(end.starts_with(why), "{text}");
        }
        let words = ["train", "--config", "/none.toml"].map(OsString::from);
        let error = with_config(&command(), words.to_vec()).expect_err("no file");
        assert!(error.to_string().contains("/none.toml"), "{error}");
    }
}
