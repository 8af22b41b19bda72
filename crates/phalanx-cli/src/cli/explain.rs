//! Converts clap's errors to ours: one line, then the fix.

use clap::error::{ContextKind, ContextValue, ErrorKind as ClapKind};

use crate::error::Error;

/// Turns a parser error into ours. `path` are the commands that were
/// understood (`["train", "mnist"]`), innermost last. `None` means that it was
/// a request for help or the version, which has been answered on stdout.
pub(super) fn explain(
    error: &clap::Error,
    parser: &clap::Command,
    path: &[String],
) -> Option<Error> {
    let text = |kind| context(error, kind);
    let innermost = path.iter().fold(parser, |command, name| {
        command.find_subcommand(name).unwrap_or(command)
    });
    let choices: Vec<&str> = innermost
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
        .map(clap::Command::get_name)
        .collect();
    let choices = choices.join(", ");
    // The meaning of the next word after these commands.
    let (no_such, kind) = match path.last().map(String::as_str) {
        Some("train") => ("no", "recipe"),
        Some("bench") => ("no", "benchmark"),
        _ => ("unknown", "command"),
    };
    let help = format!(
        "{} --help",
        std::iter::once("phalanx")
            .chain(path.iter().map(String::as_str))
            .collect::<Vec<_>>()
            .join(" ")
    );
    let named = |word: &str, what: &str, suggested: Option<String>| {
        let mut line = format!("{what} \"{word}\"");
        if let Some(best) = suggested {
            line.push_str(&format!("; did you mean \"{best}\"?"));
        }
        line
    };
    let ours = match error.kind() {
        ClapKind::DisplayHelp | ClapKind::DisplayVersion => {
            // A closed stdout (`phalanx --help | head`) is success.
            let _ = error.print();
            return None;
        }
        ClapKind::DisplayHelpOnMissingArgumentOrSubcommand | ClapKind::MissingSubcommand => {
            Error::usage(format!("no {kind} given")).note("one of", choices)
        }
        ClapKind::UnknownArgument => {
            let word = text(ContextKind::InvalidArg).unwrap_or_default();
            if word.starts_with('-') {
                Error::usage(named(
                    &word,
                    "unknown flag",
                    best(error, ContextKind::SuggestedArg, &word),
                ))
            } else {
                Error::usage(format!("unexpected argument \"{word}\""))
            }
        }
        ClapKind::InvalidSubcommand => {
            let word = text(ContextKind::InvalidSubcommand).unwrap_or_default();
            let line = named(
                &word,
                &format!("{no_such} {kind}"),
                best(error, ContextKind::SuggestedSubcommand, &word),
            );
            Error::usage(format!("{line}   ({choices})"))
        }
        ClapKind::InvalidValue | ClapKind::ValueValidation => invalid_value(error, parser, path),
        ClapKind::MissingRequiredArgument => {
            let what = text(ContextKind::InvalidArg).unwrap_or_else(|| "an argument".into());
            let what = typed_name(&what);
            let ours = Error::usage(format!("missing {what}"));
            match path.last().map(String::as_str) {
                Some("predict") if what == "CHECKPOINT" => {
                    ours.note("so", "put it first: --data takes all words after it")
                }
                _ => ours,
            }
        }
        ClapKind::ArgumentConflict => Error::usage(format!(
            "{} cannot be combined with {}",
            typed_name(&text(ContextKind::InvalidArg).unwrap_or_default()),
            typed_name(&text(ContextKind::PriorArg).unwrap_or_default())
        )),
        _ => {
            let rendered = error.render().to_string();
            let first = rendered.lines().next().unwrap_or_default();
            Error::usage(first.strip_prefix("error: ").unwrap_or(first))
        }
    };
    Some(ours.note("see", help))
}

/// The error of a flag's value.
fn invalid_value(error: &clap::Error, parser: &clap::Command, path: &[String]) -> Error {
    let text = |kind| context(error, kind);
    let flag = typed_name(&text(ContextKind::InvalidArg).unwrap_or_default());
    let value = text(ContextKind::InvalidValue).unwrap_or_default();
    let mut ours = if value.is_empty() {
        Error::usage(format!("{flag} needs a value"))
    } else if path == ["bench", "train"] && is_recipe(parser, &value) {
        // Nothing was misspelt.
        Error::usage(format!("phalanx bench train does not time {value}"))
    } else {
        let mut line = format!("{flag} cannot be \"{value}\"");
        if let Some(best) = best(error, ContextKind::SuggestedValue, &value) {
            line.push_str(&format!("; did you mean \"{best}\"?"));
        }
        Error::usage(line)
    };
    if let Some(cause) = std::error::Error::source(error) {
        ours = ours.note("since", plain(cause, &value));
    }
    if let Some(valid) = text(ContextKind::ValidValue) {
        ours = ours.note("one of", valid);
    }
    ours
}

/// The name of an argument: clap writes `--epochs <N>` and `<PROGRAM>...`.
fn typed_name(shown: &str) -> String {
    let name = shown.split(' ').next().unwrap_or(shown);
    name.trim_matches(['<', '>', '.']).to_owned()
}

/// Whether `phalanx train` knows a recipe of that name.
fn is_recipe(parser: &clap::Command, name: &str) -> bool {
    let train = parser.find_subcommand("train");
    train.is_some_and(|train| train.find_subcommand(name).is_some())
}

/// Why `value` is not valid; the standard library's errors are meant for programmers.
fn plain(cause: &(dyn std::error::Error + 'static), value: &str) -> String {
    if let Some(whole) = cause.downcast_ref::<std::num::ParseIntError>() {
        use std::num::IntErrorKind as K;
        let is_negative = value.starts_with('-') && value[1..].parse::<f64>().is_ok();
        return match whole.kind() {
            K::PosOverflow | K::NegOverflow => "it is too large a number",
            _ if is_negative => "a whole number from 0 up is expected",
            _ => "a whole number is expected",
        }
        .to_owned();
    }
    if cause.is::<std::num::ParseFloatError>() {
        return "a number is expected".to_owned();
    }
    cause.to_string()
}

/// The suggestion that is nearest to what was typed.
fn best(error: &clap::Error, kind: ContextKind, word: &str) -> Option<String> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text.clone()),
        ContextValue::Strings(list) => list
            .iter()
            .min_by_key(|candidate| strsim::damerau_levenshtein(candidate, word))
            .cloned(),
        _ => None,
    }
}

/// One piece of context as text; `None` where clap gives nothing.
fn context(error: &clap::Error, kind: ContextKind) -> Option<String> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text.clone()),
        ContextValue::Strings(list) if !list.is_empty() => Some(list.join(", ")),
        ContextValue::StyledStr(text) => Some(text.to_string()),
        ContextValue::Number(number) => Some(number.to_string()),
        _ => None,
    }
}
