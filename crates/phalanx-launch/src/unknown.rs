//! Flags that a command does not have: `--allow-unknown`, and ModelArts, which appends its own to a boot command.

use std::ffi::{OsStr, OsString};

use clap::{Arg, Command};
use phalanx_base::say;

use crate::place::{Env, is_on_modelarts, rank_place};
use crate::words::{dashed, find, flags};

/// Flags of ModelArts about nodes, each of which has one process in the document's code.
const OF_NODES: [&str; 3] = ["init-method", "rank", "world-size"];

/// The value of the flag `long` of `command` in `words`, by whatever name; empty without one.
fn value_of(command: &Command, words: &[OsString], long: &str) -> Option<String> {
    let typed = flags(words.iter().map(|word| word.to_string_lossy().into_owned()));
    let is_it = |name: &str| find(command, name).and_then(Arg::get_long) == Some(long);
    let found = typed.into_iter().rfind(|(name, _)| is_it(name));
    found.map(|(_, value)| value.unwrap_or_default())
}

/// Whether `name` is that of a flag of `command`, or misspelt.
fn is_near(command: &Command, name: &str) -> bool {
    let most = if name.len() < 5 { 1 } else { 2 };
    let is_near = |own: &str| strsim::damerau_levenshtein(own, name) <= most;
    command.get_arguments().any(|arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long().into_iter().chain(aliases).any(is_near)
    })
}

/// Takes flags that `command` does not have, and their values, out of `words`, which follow its name, where
/// `--allow-unknown` is among them or ModelArts has started this process. A misspelt flag stays, and is refused later. A folder of
/// ModelArts becomes the flag of ours, unless that is there; the other flags are named in a line. Whether any were taken.
pub fn take_unknown(command: &Command, words: &mut Vec<OsString>, env: &Env) -> bool {
    let value = |long: &str| value_of(command, words, long);
    let is_on_modelarts = is_on_modelarts(env);
    let is_allowed = is_on_modelarts || value("allow-unknown").is_some();
    if find(command, "allow-unknown").is_none() || !is_allowed {
        return false;
    }
    let ours = |name: &str| {
        let ours = match name {
            "data-url" => find(command, "data")?,
            "train-url" => find(command, "output-dir")?,
            _ => return None,
        };
        let own = find(command, name).unwrap_or(ours);
        ours.get_long().filter(|_| own.get_id() == ours.get_id())
    };
    // Where ranks have numbers, or the nodes have, and start several ranks each.
    let rank = rank_place(env).ok().flatten().map(|place| place.rank);
    let number = rank.or_else(|| value("rank")?.parse().ok());
    let has_ranks = value("nproc-per-node").is_some_and(|ranks| ranks != "1");
    let has_ranks = has_ranks || value("nnodes").is_some();
    let are_numbered = rank.is_some() || is_on_modelarts && has_ranks;
    let is_taken = |name: &String| {
        let is_of_nodes = are_numbered && OF_NODES.contains(&&**name);
        is_of_nodes || ours(name).is_some() || !is_near(command, name)
    };
    let shorts: Vec<char> = command.get_arguments().filter_map(Arg::get_short).collect();
    // A value may begin with a dash.
    let is_value = |word: &OsString| {
        let text = word.to_string_lossy();
        let name = text.strip_prefix('-').unwrap_or_default();
        !name.starts_with('-') && !name.starts_with(&shorts[..])
    };
    let end = words.iter().position(|word| word == "--");
    let after = words.split_off(end.unwrap_or(words.len()));
    let mut rest = std::mem::take(words).into_iter().peekable();
    let mut taken = Vec::new();
    while let Some(word) = rest.next() {
        let (whole, name, _) = dashed(word.clone());
        let Some(name) = name.filter(is_taken) else {
            words.push(word);
            continue;
        };
        let whole = whole.to_string_lossy();
        let attached = whole.split_once('=').map(|(_, value)| value.into());
        let value: OsString = attached
            .or_else(|| rest.next_if(is_value))
            .unwrap_or_default();
        // The last one holds.
        taken.retain(|(other, _)| *other != name);
        taken.push((name, value));
    }
    let is_changed = !taken.is_empty();
    let mut ignored = Vec::new();
    for (name, value) in taken {
        // The address of a bucket is no folder.
        let is_folder = !value.is_empty() && !value.to_string_lossy().contains("://");
        match ours(&name) {
            Some(ours) if is_folder && value_of(command, words, ours).is_none() => {
                words.push([format!("--{ours}=").into(), value].join(OsStr::new("")));
            }
            _ => ignored.push(format!("--{name}")),
        }
    }
    words.extend(after);
    if !ignored.is_empty() && number.unwrap_or(0) == 0 {
        let names = ignored.join(", ");
        say::note(format!(
            "warning: flags are ignored (--allow-unknown): {names}"
        ));
    }
    is_changed
}

#[cfg(test)]
mod tests {
    use clap::ArgAction;

    use super::*;
    use crate::place::tests::env;

    fn command() -> Command {
        let value = |name: &'static str| Arg::new(name).long(name);
        let switch = |name: &'static str| value(name).action(ArgAction::SetTrue);
        let names = ["output-dir", "epochs", "lr", "rank", "world-size"];
        let more = ["init-method", "nproc-per-node", "nnodes"];
        Command::new("train")
            .args(names.into_iter().chain(more).map(value))
            .arg(value("data").short('d').visible_alias("dataset"))
            .args([switch("allow-unknown"), switch("overwrite")])
    }

    const MODELARTS: &str = "VC_TASK_INDEX=0 VC_WORKER_NUM=2 VC_WORKER_HOSTS=a,b";

    /// What is left of the words `typed`.
    fn left(command: &Command, typed: &str, variables: &str) -> String {
        let mut words: Vec<OsString> = typed.split(' ').map(OsString::from).collect();
        let is_changed = take_unknown(command, &mut words, &env(variables));
        let left: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
        let left = left.join(" ");
        assert_eq!(is_changed, left != typed, "{typed}");
        left
    }

    #[test]
    fn unknown_flags_go_with_their_values_and_misspelt_ones_stay() {
        for (typed, want) in [
            ("--epochs 2 --num_gpus 8", "--epochs 2"),
            ("--num_gpus=8 --epochs 2", "--epochs 2"),
            ("--foo --epochs 2 --bar", "--epochs 2"),
            // Values that begin with a dash, and a flag of ours which does.
            ("--foo -1 --bar -x=y --baz=--lr", ""),
            ("--foo -d x", "-d x"),
            // What stands for a flag of ours.
            ("--train_url /o --data_url /d", "--output-dir=/o --data=/d"),
            ("--data_url=/a --data-url -b", "--data=-b"),
            ("--train_url /o --output_dir /p", "--output_dir /p"),
            ("--dataset /p --data_url /d", "--dataset /p"),
            ("--train_url obs://b/o --data_url", ""),
            // A letter too few, too many, another one, two that are exchanged.
            ("--epoch 2 --num_gpus 8", "--epoch 2"),
            ("--epochss 2", "--epochss 2"),
            ("--outptu-dir x --foo", "--outptu-dir x"),
            ("--lf 1", "--lf 1"),
            ("--lamb 1 --run 2", ""),
            // After that nothing is a flag.
            ("--foo 1 -- --foo 1", "-- --foo 1"),
            // They number this process, which is a rank.
            (
                "--rank 0 --world_size 2 --init_method tcp://h:1",
                "--rank 0 --world_size 2 --init_method tcp://h:1",
            ),
        ] {
            let typed = format!("{typed} --allow-unknown");
            let want = format!("{want} --allow-unknown");
            let mut want: Vec<&str> = want.split_whitespace().collect();
            let got = left(&command(), &typed, "");
            let mut got: Vec<&str> = got.split_whitespace().collect();
            got.sort_unstable();
            want.sort_unstable();
            assert_eq!(got, want, "{typed}");
        }
        assert_eq!(left(&command(), "--foo 1", ""), "--foo 1");
        let other = Command::new("other").arg(Arg::new("lr").long("lr"));
        assert_eq!(left(&other, "--foo 1", MODELARTS), "--foo 1");
    }

    #[test]
    fn on_modelarts_numbers_of_nodes_are_no_numbers_of_ranks() {
        let of_nodes = "--rank 1 --world_size 2 --init_method tcp://a:1";
        let launched = format!("{MODELARTS} RANK=1 WORLD_SIZE=4 LOCAL_RANK=1");
        for (more, variables, is_left) in [
            // One process a node.
            ("--epochs 2", MODELARTS, true),
            ("--nproc-per-node 1", MODELARTS, true),
            ("--nproc-per-node 2", MODELARTS, false),
            ("--nnodes 2", MODELARTS, false),
            ("--epochs 2", &launched, false),
            // Elsewhere nothing else numbers the nodes.
            ("--allow-unknown --nproc-per-node 2", "", true),
        ] {
            let typed = format!("{more} {of_nodes}");
            let want = if is_left { &typed } else { more };
            let got = left(&command(), &format!("{typed} --num_gpus 8"), variables);
            assert_eq!(got, *want, "{variables}");
        }
        for variable in ["MA_NUM_HOSTS=1", "VC_TASK_INDEX=0", "VC_WORKER_NUM=1"] {
            assert_eq!(left(&command(), "--lr 1 --foo 2", variable), "--lr 1");
        }
    }
}
