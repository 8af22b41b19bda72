//! `--config FILE`: flags from a file.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use clap::builder::ValueRange;
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, Command};
use phalanx_base::error::{malformed, system};
use phalanx_base::say;
use phalanx_comm::open_inherited;
use phalanx_process::error_file::ERRORS_VARIABLE;
use serde_json::Value;

use crate::contract::ARGUMENTS_FILE_VARIABLE;
use crate::error::{Error, Result};
use crate::words::dashed;

/// Flags of a run that say where its ranks meet, what it writes, where it goes on and where it stops, and not how it trains.
const OF_ONE_RUN: [&str; 14] = [
    "bind",
    "find-lr",
    "init-method",
    "log-samples",
    "master-addr",
    "master-port",
    "node-rank",
    "output-dir",
    "overwrite",
    "profile",
    "rank",
    "resume",
    "stop-after",
    "token-file",
];

/// A flag's name and what follows it; nothing after a switch.
type Flag = (String, Vec<String>);

/// What stands for a secret in a `run.json`.
const HIDDEN: &str = "***";

/// How deep files may name others.
const DEPTH: usize = 8;

/// The arguments of this process, without the program's name. A rank that a launcher of this program has started gets that
/// launcher's, with what it has read from a configuration.
///
/// # Errors
///
/// System, where the launcher's cannot be read.
pub fn own_arguments() -> Result<Vec<OsString>> {
    // What the rank starts has inherited the variable.
    let rank = std::env::var(ERRORS_VARIABLE).unwrap_or_default();
    let file = std::env::var_os(ARGUMENTS_FILE_VARIABLE);
    if let Some(path) = file.filter(|_| rank == std::process::id().to_string()) {
        let text = open_inherited(Path::new(&path), |path| std::fs::read(path))
            .map_err(system("cannot read the arguments from the launcher"))?;
        let words = text.split(|byte| *byte == 0);
        let words = words.map(|word| OsStr::from_bytes(word).to_owned());
        say::set_arguments(words.collect());
    }
    Ok(say::words())
}

/// `words` with the flags in the file that `--config` names there in its place: those that are not there already, and that no
/// flag there excludes. What the file may have depends on the command that `words` name in `command`; without a flag
/// `--config` of this command nothing is read.
///
/// # Errors
///
/// Usage, naming the file and the flag.
pub fn with_config(command: &Command, mut words: Vec<OsString>) -> Result<Vec<OsString>> {
    let whole = command;
    let command = words.iter().fold(command, |command, word| {
        let named = word.to_str().and_then(|name| command.find_subcommand(name));
        named.unwrap_or(command)
    });
    check_text(whole, command, &words)?;
    let typed = flags(words.iter().map(|word| word.to_string_lossy().into_owned()));
    let config = typed.iter().rfind(|(name, _)| name == "config");
    let Some(path) = config.and_then(|(_, values)| values.first()) else {
        return Ok(words);
    };
    if find(command, "config").is_none() {
        return Ok(words);
    }
    let typed = typed.iter().filter_map(|(name, _)| find(command, name));
    let mut present: Vec<&Arg> = typed.collect();
    let mut layers = Vec::new();
    read(command, Path::new(path), &mut layers)?;
    let mut more = Vec::new();
    for (path, layer) in layers {
        for (arg, values) in merged(command, &path, layer)? {
            let excludes = |one: &Arg, other: &Arg| {
                let all = command.get_arg_conflicts_with(one);
                all.iter().any(|arg| arg.get_id() == other.get_id())
            };
            let is_there = |other: &&Arg| {
                arg.get_id() == other.get_id() || excludes(arg, other) || excludes(other, arg)
            };
            if present.iter().any(is_there) || values.iter().any(|value| value == HIDDEN) {
                continue;
            }
            more.extend(said(arg, &values).into_iter().map(|word| (arg, word)));
        }
        present.extend(more.iter().map(|(arg, _)| *arg));
    }
    // The file is not named where the words are told or recorded.
    while let Some(at) = words.iter().position(is_config) {
        let is_attached = words[at].to_string_lossy().contains('=');
        let end = (at + 1 + usize::from(!is_attached)).min(words.len());
        words.drain(at..end);
    }
    words.extend(more.into_iter().map(|(_, word)| OsString::from(word)));
    say::set_arguments(words.clone());
    Ok(words)
}

/// Names the flag of `command` whose value has to be text and is not, where `whole` refuses `words` for that: clap's own error
/// does not name it.
fn check_text(whole: &Command, command: &Command, words: &[OsString]) -> Result<()> {
    let is_refused = |command: &Command, words: &[OsString]| {
        let words = std::iter::once(OsStr::new("")).chain(words.iter().map(|word| &**word));
        let parsed = command.clone().try_get_matches_from(words);
        parsed.is_err_and(|error| error.kind() == ErrorKind::InvalidUtf8)
    };
    if words.iter().all(|word| word.to_str().is_some()) || !is_refused(whole, words) {
        return Ok(());
    }
    let name = |at: usize| dashed(words[at].to_string_lossy().into_owned().into()).1;
    for at in (0..words.len()).filter(|at| words[*at].to_str().is_none()) {
        let flag_at = at.saturating_sub(usize::from(name(at).is_none()));
        if is_refused(command, &words[flag_at..=at]) {
            let shown = words[flag_at..=at].join(OsStr::new(" "));
            return Err(Error::usage(format!("{} is not UTF-8", shown.display())));
        }
    }
    Ok(())
}

fn is_config(word: &OsString) -> bool {
    let (_, name, _) = dashed(word.clone());
    name.as_deref() == Some("config")
}

/// The flag `name` of `command`.
fn find<'c>(command: &'c Command, name: &str) -> Option<&'c Arg> {
    command.get_arguments().find(|arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long() == Some(name) || aliases.contains(&name)
    })
}

/// The flags of one file, each once: of one that is there again the last, or all values where the command takes several.
fn merged<'c>(
    command: &'c Command,
    path: &Path,
    layer: Vec<Flag>,
) -> Result<Vec<(&'c Arg, Vec<String>)>> {
    let mut all: Vec<(&Arg, Vec<String>)> = Vec::new();
    for (name, mut values) in layer {
        let Some(arg) = find(command, &name) else {
            let (path, command) = (path.display(), command.get_name());
            let what = format!("{path}: {command} has no flag --{name}");
            return Err(Error::usage(what));
        };
        let before = all
            .iter_mut()
            .find(|(other, _)| other.get_id() == arg.get_id());
        match (before, arg.get_action()) {
            (Some((_, before)), ArgAction::Append) => before.append(&mut values),
            (Some((_, before)), _) => *before = values,
            (None, _) => all.push((arg, values)),
        }
    }
    Ok(all)
}

/// The words of a flag with these values.
fn said(arg: &Arg, values: &[String]) -> Vec<String> {
    let name = arg.get_long().unwrap_or_default();
    let bare = || vec![format!("--{name}")];
    let counts = arg.get_num_args().unwrap_or(ValueRange::SINGLE);
    match values.first().map(String::as_str) {
        Some("false") if counts.min_values() == 0 || !arg.get_action().takes_values() => Vec::new(),
        _ if !arg.get_action().takes_values() => bare(),
        None => bare(),
        Some("true") if counts.min_values() == 0 => bare(),
        Some(_) => values
            .iter()
            .map(|value| format!("--{name}={value}"))
            .collect(),
    }
}

/// The flags among `words`, each with the words up to the next.
fn flags(words: impl Iterator<Item = String>) -> Vec<Flag> {
    let mut flags: Vec<Flag> = Vec::new();
    for word in words {
        let (whole, name, is_attached) = dashed(word.clone().into());
        match (name, flags.last_mut()) {
            (Some(name), _) => {
                let whole = whole.to_string_lossy();
                let value = whole.split_once('=').filter(|_| is_attached);
                flags.push((
                    name,
                    value
                        .map(|(_, value)| value.to_owned())
                        .into_iter()
                        .collect(),
                ));
            }
            // Further words are no values of a flag that has one.
            (None, Some((_, values))) if values.is_empty() => values.push(word),
            _ => {}
        }
    }
    flags
}

/// Adds the flags in the file `path` to `layers`, and after them those of the file that these name.
fn read(command: &Command, path: &Path, layers: &mut Vec<(PathBuf, Vec<Flag>)>) -> Result<()> {
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
        let mut all = flags(words.map(ToOwned::to_owned));
        let other = all.iter().rfind(|(name, _)| name == "config");
        let other = other.and_then(|(_, values)| values.first().map(PathBuf::from));
        all.retain(|(name, _)| {
            let name = find(command, name).and_then(Arg::get_long).unwrap_or(name);
            name != "config" && !OF_ONE_RUN.contains(&name)
        });
        layers.push((path.to_owned(), all));
        return match other {
            Some(_) if layers.len() > DEPTH => Err(Error::usage(format!(
                "{shown} names itself as its --config"
            ))),
            Some(other) => read(command, &other, layers),
            None => Ok(()),
        };
    }
    let table: toml::Table = toml::from_str(&text).map_err(|error: toml::de::Error| {
        malformed(&shown.to_string(), &text, error.span(), error.message())
    })?;
    let flag = |(key, value): (String, toml::Value)| {
        let name = key.replace('_', "-");
        let action = find(command, &name).map(Arg::get_action);
        let wrong = match (action, &value) {
            (Some(action), value) if !action.takes_values() && !value.is_bool() => {
                Some("is a switch: its value is true or false")
            }
            (Some(ArgAction::Append) | None, _) => None,
            (Some(_), value) => value.is_array().then_some("has one value, not a list"),
        };
        if let Some(wrong) = wrong {
            return Err(Error::usage(format!("{shown}: {key} {wrong}")));
        }
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
        Ok((name, values))
    };
    let flags = table.into_iter().map(flag).collect::<Result<_>>()?;
    layers.push((path.to_owned(), flags));
    Ok(())
}

#[cfg(test)]
mod tests {
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
            .arg(value("mlflow").num_args(0..=1))
            .arg(value("nnodes"))
            .arg(value("resume"));
        let other = Command::new("other").arg(value("lr"));
        Command::new("phalanx").subcommands([train, other])
    }

    /// What is added to the words `typed`, which name the configuration last, when it is read from a file with this ending.
    fn added(ending: &str, text: &str, typed: &str) -> Result<String> {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join(format!("config.{ending}"));
        std::fs::write(&path, text).expect("written");
        let path = path.display().to_string();
        let words = typed.replace("FILE", &path);
        let words: Vec<OsString> = words.split(' ').map(Into::into).collect();
        let count = words.iter().filter(|word| !is_config(word));
        let count = count.filter(|word| word.to_string_lossy() != path).count();
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
        let other = "other --config x.toml"
            .split(' ')
            .map(Into::into)
            .collect::<Vec<_>>();
        let same = with_config(&command(), other.clone()).expect("it has no such flag");
        assert_eq!(same, other);
        assert_eq!(of("train --lr 1"), "");
        let optional = added("toml", "mlflow = true\n", "train --config FILE");
        assert_eq!(optional.expect("a flag"), "--mlflow");
        let none = added("toml", "wandb = false\n", "train --config FILE");
        assert_eq!(none.expect("a switch"), "");
    }

    #[test]
    fn text_that_is_not_utf8_is_refused_with_its_flag() {
        let read = |typed: &[&[u8]]| {
            let words = typed.iter().map(|word| OsStr::from_bytes(word).to_owned());
            let path = Arg::new("path").long("path");
            let path = path.value_parser(clap::value_parser!(PathBuf));
            let mut command = command().mut_subcommand("train", |train| train.arg(path));
            command.build();
            with_config(&command, words.collect())
        };
        let refused = |typed: &[&[u8]], shown: &str| {
            let error = read(typed).expect_err(shown).to_string();
            assert_eq!(error, format!("{shown} is not UTF-8"));
        };
        refused(&[b"train", b"--lr", b"\xff"], "--lr \u{fffd}");
        refused(&[b"train", b"--tag=a", b"--tag=b\xff"], "--tag=b\u{fffd}");
        let both: &[&[u8]] = &[b"train", b"--path", b"a\xff", b"--lr", b"\xff"];
        refused(both, "--lr \u{fffd}");
        let fine: [&[&[u8]]; 2] = [
            &[b"train", b"--path", b"a\xff"],
            &[b"train", b"--path=\xff"],
        ];
        // The words after a program are its own, whatever they are called here.
        let program = Arg::new("program").num_args(1..).trailing_var_arg(true);
        let program = program.value_parser(clap::value_parser!(OsString));
        let launch = Command::new("launch").arg(Arg::new("lr").long("lr"));
        let command =
            Command::new("phalanx").subcommand(launch.arg(program.allow_hyphen_values(true)));
        let words = [&b"launch"[..], b"program", b"--lr", b"\xff"];
        let words = words.map(|word| OsStr::from_bytes(word).to_owned());
        assert!(with_config(&command, words.to_vec()).is_ok());
        for fine in fine {
            assert_eq!(read(fine).expect("a path").len(), fine.len());
        }
    }

    #[test]
    fn a_run_is_a_configuration() {
        let dir = tempfile::tempdir().expect("a folder");
        let table = dir.path().join("a.toml").display().to_string();
        std::fs::write(&table, "lr = 0.05\nbatch-size = 4\nwandb = true\n").expect("written");
        let words = r#"["train", "--lr", "-1", "--lr=2", "--resume", "auto", "--find-lr", "--tag", "a", "--tag", "b", "--mlflow",
            "--config", "TABLE", "--global-batch-size", "8", "word"]"#;
        let text = format!(r#"{{"arguments": {}}}"#, words.replace("TABLE", &table));
        let all = added("json", &text, "train --config FILE").expect("flags");
        let typed = "--lr=2 --tag=a --tag=b --mlflow --global-batch-size=8 --wandb";
        assert_eq!(all, typed);
        // What belonged to that run.
        let text = r#"{"arguments": ["train", "--node_rank", "0", "--master-addr=a", "--init-method", "tcp://a:1", "--lr", "1",
            "--rank=1", "--token-file", "t", "--log-samples=s", "--profile", "p", "--bind", "127.0.0.1", "--nnodes=2"]}"#;
        let all = added("json", text, "train --config FILE").expect("flags");
        assert_eq!(all, "--lr=1 --nnodes=2");
        let secret = r#"{"arguments": ["--lr", "***", "--tag", "x"]}"#;
        let all = added("json", secret, "train --config FILE").expect("flags");
        assert_eq!(all, "--tag=x");
        let path = dir.path().join("run.json");
        let itself = format!(r#"{{"arguments": ["--config", "{}"]}}"#, path.display());
        std::fs::write(&path, itself).expect("written");
        let error = read(&command(), &path, &mut Vec::new())
            .expect_err("a circle")
            .to_string();
        assert!(error.contains("names itself"), "{error}");
    }

    #[test]
    fn mistakes_name_the_file() {
        for (ending, text, why) in [
            ("toml", "rate = 1\n", "FILE: train has no flag --rate"),
            ("toml", "lr 1\n", "FILE:1: "),
            (
                "toml",
                "lr = 1\n\ntag=[\"a\"]\nlr = 2\n",
                "FILE:4: duplicate key lr",
            ),
            (
                "toml",
                "lr = 1\n\"lr\" = 2\n",
                "FILE:2: duplicate key \"lr\"",
            ),
            ("toml", "[a]\n[a]\n", "FILE:2: duplicate key"),
            (
                "toml",
                "wandb = 0\n",
                "FILE: wandb is a switch: its value is true or false",
            ),
            ("toml", "wandb = \"no\"\n", "FILE: wandb is a switch"),
            ("toml", "wandb = []\n", "FILE: wandb is a switch"),
            (
                "toml",
                "lr = [1, 2]\n",
                "FILE: lr has one value, not a list",
            ),
            (
                "toml",
                "learning_rate = [1]\n",
                "FILE: learning_rate has one value",
            ),
            ("toml", "mlflow = []\n", "FILE: mlflow has one value"),
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
