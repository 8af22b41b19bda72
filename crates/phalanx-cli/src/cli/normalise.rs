//! Normalizes the command line for clap.
//!
//! Flags may be written with dashes or underscores (`--nproc_per_node`, as
//! torchrun's users do). For `launch` the program's own arguments begin at
//! the first word that is no flag of ours, and from there on nothing may be
//! touched: a `--` is put in front of them. A `--` that was typed says that the
//! program is run as it is, also if it is a Python script: `--no-python` is put in front of it.

use std::ffi::OsString;

use phalanx_base::address::Address;
use phalanx_launch::words::dashed;

/// The kind of a flag of `launch`.
pub(super) enum Flag {
    /// Takes the next word as its value (unless written `--flag=value`).
    TakesValue,
    /// Takes the next word if that is an address.
    MayTakeAddress,
    /// Stands alone.
    Switch,
}

/// Rewrites `args` (without the program's own name). `flag` says what kind
/// of flag a name of `launch` is (a long one, or a letter); unknown names are left
/// for clap to complain about.
pub(super) fn normalise(
    args: impl IntoIterator<Item = OsString>,
    flag: impl Fn(&str) -> Option<Flag>,
) -> Vec<OsString> {
    let mut out = Vec::new();
    let mut args = args.into_iter().peekable();
    let mut command: Option<OsString> = None;
    // A flag says how Python runs the program.
    let mut is_python = false;
    while let Some(arg) = args.next() {
        if arg == "--" {
            if command.as_ref().is_some_and(|c| c == "launch") && !is_python {
                out.push("--no-python".into());
            }
            out.push(arg);
            break;
        }
        if !arg.as_encoded_bytes().starts_with(b"-") || arg == "-" {
            if command.is_none() {
                command = Some(arg.clone());
                out.push(arg);
                continue;
            }
            if command.as_ref().is_some_and(|c| c == "launch") {
                out.push("--".into());
                out.push(arg);
                break;
            }
            out.push(arg);
            continue;
        }
        let (arg, name, has_value) = dashed(arg);
        let letter = arg.to_str().and_then(|arg| arg.strip_prefix('-'));
        let letter = letter.filter(|letter| letter.len() == 1).map(str::to_owned);
        let name = name.or(letter);
        out.push(arg);
        let in_launch = command.as_ref().is_some_and(|c| c == "launch");
        if !in_launch || has_value {
            continue;
        }
        is_python |= matches!(
            name.as_deref(),
            Some("m" | "module" | "run-path" | "no-python")
        );
        match name.as_deref().and_then(&flag) {
            Some(Flag::TakesValue) => out.extend(args.next()),
            // Another word is the program.
            Some(Flag::MayTakeAddress) => {
                out.extend(args.next_if(|word| word.to_str().is_some_and(Address::is_meant)));
            }
            _ => {}
        }
    }
    out.extend(args);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(args: &[&str]) -> Vec<String> {
        normalise(args.iter().map(OsString::from), |name| match name {
            "nproc-per-node" | "master-port" | "r" => Some(Flag::TakesValue),
            "standalone" | "m" | "module" | "no-python" => Some(Flag::Switch),
            "live" => Some(Flag::MayTakeAddress),
            _ => None,
        })
        .into_iter()
        .map(|a| a.into_string().unwrap())
        .collect()
    }

    #[test]
    fn underscores_become_dashes_in_names_only() {
        assert_eq!(
            run(&[
                "train",
                "mnist",
                "--batch_size=a_b",
                "--data_dir",
                "my_data"
            ]),
            [
                "train",
                "mnist",
                "--batch-size=a_b",
                "--data-dir",
                "my_data"
            ]
        );
    }

    #[test]
    fn the_program_and_its_arguments_stay_as_they_are() {
        assert_eq!(
            run(&[
                "launch",
                "--nproc_per_node",
                "2",
                "--standalone",
                "prog_a",
                "--x_y",
                "--",
                "z"
            ]),
            [
                "launch",
                "--nproc-per-node",
                "2",
                "--standalone",
                "--",
                "prog_a",
                "--x_y",
                "--",
                "z"
            ]
        );
        assert_eq!(
            run(&["launch", "--nproc_per_node=2", "sh", "-c", "exit 3"]),
            ["launch", "--nproc-per-node=2", "--", "sh", "-c", "exit 3"]
        );
        assert_eq!(
            run(&["launch", "--standalone", "--", "a_b", "--c_d"]),
            [
                "launch",
                "--standalone",
                "--no-python",
                "--",
                "a_b",
                "--c_d"
            ]
        );
        assert_eq!(
            run(&["train", "linear", "--", "x"]),
            ["train", "linear", "--", "x"]
        );
    }

    #[test]
    fn torchruns_short_flags_and_ways_to_start_python() {
        for (typed, want) in [
            ("launch -r 3 train.py -r 1", "launch -r 3 -- train.py -r 1"),
            ("launch -r3 train.py", "launch -r3 -- train.py"),
            ("launch -m pkg.train -m", "launch -m -- pkg.train -m"),
            ("launch -m -- pkg.train", "launch -m -- pkg.train"),
            ("launch --no_python -- a.py", "launch --no-python -- a.py"),
            ("launch -- a.py --", "launch --no-python -- a.py --"),
            ("launch - x", "launch -- - x"),
        ] {
            let typed: Vec<&str> = typed.split(' ').collect();
            assert_eq!(run(&typed).join(" "), want);
        }
    }

    #[test]
    fn an_address_may_follow_live_and_a_program_is_none() {
        for (args, want) in [
            (
                &["launch", "--live", "python3", "x"][..],
                "launch --live -- python3 x",
            ),
            (
                &["launch", "--live", "8080", "sh"],
                "launch --live 8080 -- sh",
            ),
            (
                &["launch", "--live", "[::1]:0", "sh"],
                "launch --live [::1]:0 -- sh",
            ),
            (
                &["launch", "--live=h:1", "sh", "9"],
                "launch --live=h:1 -- sh 9",
            ),
            (
                &["launch", "--live", "--", "80"],
                "launch --live --no-python -- 80",
            ),
            (&["launch", "--live"], "launch --live"),
        ] {
            assert_eq!(run(args).join(" "), want);
        }
    }

    #[test]
    fn an_unknown_flag_of_launch_is_left_for_the_parser() {
        assert_eq!(
            run(&["launch", "--nproc_per_nod", "2", "sh"]),
            ["launch", "--nproc-per-nod", "--", "2", "sh"]
        );
    }

    #[test]
    fn flags_of_other_commands_do_not_end_at_words() {
        assert_eq!(
            run(&["bench", "all-reduce", "--world", "2", "--warm_up", "3"]),
            ["bench", "all-reduce", "--world", "2", "--warm-up", "3"]
        );
    }

    #[test]
    fn a_flag_without_its_value_is_no_crash() {
        assert_eq!(
            run(&["launch", "--master_port"]),
            ["launch", "--master-port"]
        );
        assert_eq!(run(&[]), Vec::<String>::new());
    }
}
