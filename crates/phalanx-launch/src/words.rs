//! Spellings of flags.

use std::ffi::OsString;

use clap::{Arg, Command};

/// A flag's name and value.
pub type Flag = (String, Option<String>);

/// `--a_b=c_d` becomes `--a-b=c_d`; also returns the name and whether a
/// value is attached. Words that are not long flags come back unchanged.
pub fn dashed(arg: OsString) -> (OsString, Option<String>, bool) {
    let Some(text) = arg.to_str() else {
        // A flag's name is ASCII, but its attached value may be any bytes.
        let bytes = arg.as_encoded_bytes();
        let attached = bytes.contains(&b'=');
        return (arg, None, attached);
    };
    let Some(body) = text.strip_prefix("--") else {
        return (arg, None, false);
    };
    let (name, value) = match body.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (body, None),
    };
    let name = name.replace('_', "-");
    let whole = match value {
        Some(value) => format!("--{name}={value}"),
        None => format!("--{name}"),
    };
    (whole.into(), Some(name), value.is_some())
}

/// `--epochs -1` is a wrong value of `--epochs`, not a flag `-1`: no flag of ours is a number.
pub fn taking_negative_numbers(command: Command) -> Command {
    let command = command.mut_args(|arg| match arg.get_long() {
        Some(_) if arg.get_action().takes_values() => arg.allow_negative_numbers(true),
        _ => arg,
    });
    command.mut_subcommands(taking_negative_numbers)
}

/// The flag `name` of `command`.
pub fn find<'c>(command: &'c Command, name: &str) -> Option<&'c Arg> {
    command.get_arguments().find(|arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long() == Some(name) || aliases.contains(&name)
    })
}

/// The flags among `words`. A word that is no flag is the value of the flag before it, if that has none.
pub fn flags(words: impl Iterator<Item = String>) -> Vec<Flag> {
    let mut flags: Vec<Flag> = Vec::new();
    for word in words {
        let (whole, name, _) = dashed(word.clone().into());
        match (name, flags.last_mut()) {
            (Some(name), _) => {
                let whole = whole.to_string_lossy();
                let value = whole.split_once('=').map(|(_, value)| value.to_owned());
                flags.push((name, value));
            }
            (None, Some((_, value @ None))) => *value = Some(word),
            _ => {}
        }
    }
    flags
}
