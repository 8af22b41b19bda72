//! `--config FILE`: flags from a file.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use clap::error::ErrorKind;
use clap::{Arg, Command};
use phalanx_base::error::system;
use phalanx_base::say;
use phalanx_comm::open_inherited;
use phalanx_process::error_file::ERRORS_VARIABLE;
use serde_json::Value;

use crate::contract::ARGUMENTS_FILE_VARIABLE;
use crate::error::{Error, Result, refuse};
use crate::place::real_env;
use crate::unknown::take_unknown;
use crate::words::{Flag, dashed, find, flags};

/// Flags about ranks that say where they meet, and not how they train.
const OF_ONE_JOB: [&str; 7] = [
    "bind",
    "init-method",
    "master-addr",
    "master-port",
    "node-rank",
    "rank",
    "token-file",
];

/// What stands for a secret in a `run.json`.
const HIDDEN: &str = "***";

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
/// `--config` of this command nothing is read. Of a run, the program's flags `of_one_run` are left out, too. Without the flags
/// that this command does not have, where these are allowed.
///
/// # Errors
///
/// Usage, naming the file and the flag.
pub fn with_config(
    command: &Command,
    of_one_run: &[&str],
    mut words: Vec<OsString>,
) -> Result<Vec<OsString>> {
    let (whole, mut command, mut start) = (command, command, 0);
    for (at, word) in words.iter().enumerate() {
        let named = word.to_str().and_then(|name| command.find_subcommand(name));
        if let Some(named) = named {
            (command, start) = (named, at + 1);
        }
    }
    let mut is_changed = configure(command, of_one_run, &mut words)?;
    let mut own = words.split_off(start.min(words.len()));
    is_changed |= take_unknown(command, &mut own, &real_env());
    words.extend(own);
    check_text(whole, command, &words)?;
    if is_changed {
        say::set_arguments(words.clone());
    }
    Ok(words)
}

/// Puts the flags of `--config FILE` in its place; whether there is one.
fn configure(command: &Command, of_one_run: &[&str], words: &mut Vec<OsString>) -> Result<bool> {
    let typed = flags(words.iter().map(|word| word.to_string_lossy().into_owned()));
    let config = typed.iter().rfind(|(name, _)| name == "config");
    let Some(path) = config.and_then(|(_, value)| value.as_ref()) else {
        return Ok(false);
    };
    if find(command, "config").is_none() {
        return Ok(false);
    }
    let typed = typed.iter().filter_map(|(name, _)| find(command, name));
    let typed: Vec<&Arg> = typed.collect();
    let mut more = Vec::new();
    for (name, value) in read(command, of_one_run, Path::new(path))? {
        let Some(arg) = find(command, &name) else {
            refuse!("{path}: {} has no flag --{name}", command.get_name());
        };
        let excludes = |one: &Arg, other: &Arg| {
            let all = command.get_arg_conflicts_with(one);
            all.iter().any(|arg| arg.get_id() == other.get_id())
        };
        let is_there = |other: &&Arg| {
            arg.get_id() == other.get_id() || excludes(arg, other) || excludes(other, arg)
        };
        if typed.iter().any(is_there) {
            continue;
        }
        let value = value.filter(|_| arg.get_action().takes_values());
        let value = value.map_or(String::new(), |value| format!("={value}"));
        more.push(OsString::from(format!("--{name}{value}")));
    }
    // The name of the file is not printed or recorded.
    while let Some(at) = words.iter().position(is_config) {
        let is_attached = words[at].to_string_lossy().contains('=');
        let end = (at + 1 + usize::from(!is_attached)).min(words.len());
        words.drain(at..end);
    }
    words.extend(more);
    Ok(true)
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
            refuse!("{} is not UTF-8", shown.display());
        }
    }
    Ok(())
}

fn is_config(word: &OsString) -> bool {
    let (_, name, _) = dashed(word.clone());
    name.as_deref() == Some("config")
}

/// The flags in the file `path`: of a run, those that say how it trained, and of another file those of its lines.
fn read(command: &Command, of_one_run: &[&str], path: &Path) -> Result<Vec<Flag>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::not_opened("configuration", path, error))?;
    if path.extension().is_some_and(|ending| ending == "json") {
        let run: Value = serde_json::from_str(&text)
            .map_err(|error| Error::usage(format!("{shown} is not JSON")).caused_by(error))?;
        let Some(words) = run["arguments"].as_array() else {
            refuse!("{shown} has no \"arguments\", as the run.json of a run has");
        };
        let words = words.iter().filter_map(Value::as_str);
        let mut all = flags(words.map(ToOwned::to_owned));
        all.retain(|(name, value)| {
            let name = find(command, name).and_then(Arg::get_long).unwrap_or(name);
            let is_of_one = OF_ONE_JOB.contains(&name) || of_one_run.contains(&name);
            !is_of_one && value.as_deref() != Some(HIDDEN)
        });
        return Ok(all);
    }
    let mut all = Vec::new();
    for (at, line) in text.lines().map(str::trim).enumerate() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (flag, value) = line.split_once(['=', ' ']).unwrap_or((line, ""));
        let (_, name, _) = dashed(flag.into());
        let Some(name) = name else {
            refuse!(
                "{shown}:{}: a line is a flag: --FLAG or --FLAG VALUE",
                at + 1
            );
        };
        let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
        if value.is_some()
            && find(command, &name).is_some_and(|arg| !arg.get_action().takes_values())
        {
            refuse!("{shown}:{}: --{name} has no value", at + 1);
        }
        all.push((name, value));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ArgAction;
    use std::path::PathBuf;

    const OF_ONE_RUN: [&str; 4] = ["find-lr", "log-samples", "profile", "resume"];

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
        let all = with_config(&command, &OF_ONE_RUN, words)?;
        let added = all[count..].iter().map(|word| word.to_string_lossy());
        Ok(added.collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn a_file_has_flags_that_were_not_typed() {
        let text = "# tuned\n--lr=1e-3\n  --batch_size 32\n\n--tag a b\n--tag=b=1\n--wandb\n";
        let of = |typed: &str| added("txt", text, typed).expect("flags");
        let all = "--lr=1e-3 --batch-size=32 --tag=a b --tag=b=1 --wandb";
        assert_eq!(of("train --config FILE"), all);
        let others = "--batch-size=32 --tag=a b --tag=b=1 --wandb";
        assert_eq!(of("train --config=FILE --learning-rate 2"), others);
        let others = "--lr=1e-3 --tag=a b --tag=b=1";
        let typed = "train --config FILE --global-batch-size=8 --wandb";
        assert_eq!(of(typed), others);
        assert_eq!(of("train --lr 1"), "");
        // clap refuses that later.
        assert_eq!(of("--config FILE train"), all);
        let optional = added("txt", "--mlflow\n", "train --config FILE");
        assert_eq!(optional.expect("a flag"), "--mlflow");
        let other = ["other", "--config", "x"].map(OsString::from).to_vec();
        let same =
            with_config(&command(), &OF_ONE_RUN, other.clone()).expect("it has no such flag");
        assert_eq!(same, other);
    }

    #[test]
    fn text_that_is_not_utf8_is_refused_with_its_flag() {
        let read = |typed: &[&[u8]]| {
            let words = typed.iter().map(|word| OsStr::from_bytes(word).to_owned());
            let path = Arg::new("path").long("path");
            let path = path.value_parser(clap::value_parser!(PathBuf));
            let mut command = command().mut_subcommand("train", |train| train.arg(path));
            command.build();
            with_config(&command, &OF_ONE_RUN, words.collect())
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
        assert!(with_config(&command, &OF_ONE_RUN, words.to_vec()).is_ok());
        for fine in fine {
            assert_eq!(read(fine).expect("a path").len(), fine.len());
        }
    }

    #[test]
    fn a_run_is_a_configuration() {
        let of = |words: &str| {
            let text = format!(r#"{{"arguments": {words}}}"#);
            added("json", &text, "train --config FILE").expect("flags")
        };
        let words = r#"["train", "--lr", "-1", "--lr=2", "--resume", "auto", "--find-lr", "--tag", "a", "--tag", "b", "--mlflow",
            "--global-batch-size", "8", "word", "--wandb", "word"]"#;
        let typed = "--lr=-1 --lr=2 --tag=a --tag=b --mlflow --global-batch-size=8 --wandb";
        assert_eq!(of(words), typed);
        // What belonged to that run.
        let words = r#"["train", "--node_rank", "0", "--master-addr=a", "--init-method", "tcp://a:1", "--lr", "1",
            "--rank=1", "--token-file", "t", "--log-samples=s", "--profile", "p", "--bind", "127.0.0.1", "--nnodes=2"]"#;
        assert_eq!(of(words), "--lr=1 --nnodes=2");
        assert_eq!(of(r#"["--lr", "***", "--tag", "x"]"#), "--tag=x");
    }

    #[test]
    fn mistakes_name_the_file() {
        for (ending, text, why) in [
            ("txt", "--rate 1\n", "FILE: train has no flag --rate"),
            ("txt", "\n# x\nlr = 1\n", "FILE:3: a line is a flag"),
            ("txt", "--wandb 0\n", "FILE:1: --wandb has no value"),
            ("json", "{}", "FILE has no \"arguments\""),
            ("json", "{", "FILE is not JSON"),
        ] {
            let error = added(ending, text, "train --config FILE").expect_err(text);
            let text = error.to_string();
            let (_, end) = text.split_once("config.").unwrap_or_default();
            let end = end.replacen(ending, "FILE", 1);
            assert!(end.starts_with(why), "{text}");
        }
        let words = ["train", "--config", "/none"].map(OsString::from);
        let error = with_config(&command(), &OF_ONE_RUN, words.to_vec()).expect_err("no file");
        assert!(error.to_string().contains("/none"), "{error}");
    }
}
