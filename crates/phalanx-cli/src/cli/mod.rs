//! The command line: its commands, and the module that runs each.

mod explain;
mod normalise;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::error::Result;
use crate::{
    bench, compare, doctor, export, index, inspect, launch, live, new, pack, plan, predict, report,
    training,
};
use normalise::{Flag, normalise};
use phalanx_launch::config::{own_arguments, with_config};
use phalanx_launch::words::{find, taking_negative_numbers};
use phalanx_recipes::download;

/// Distributed data-parallel training.
#[derive(Parser, Debug)]
#[command(
    name = "phalanx",
    version,
    disable_help_subcommand = true,
    args_override_self = true,
    after_help = "Exit codes: 0 success, 1 training failed, 2 usage error, 3 lost peer, 4 timeout, 130 interrupted.\n\
                  Flags may be written with dashes or underscores."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
enum Command {
    /// Train a model on N ranks.
    Train(Box<training::TrainArgs>),
    /// Create a project with a training program of your own.
    New(new::NewArgs),
    /// Compare training with one worker and with several: duration and accuracy.
    Compare(compare::CompareArgs),
    /// Classify images with a trained network.
    Predict(predict::PredictArgs),
    /// Export a checkpoint's weights for PyTorch or safetensors.
    Export(export::ExportArgs),
    /// Write runs as one HTML page: curves, settings, confusion matrix, predictions.
    Report(report::ReportArgs),
    /// Show all runs below a folder on a web page, while they run.
    Live(live::LiveArgs),
    /// Pack text files into one file of tokens, for `train gpt`.
    Pack(pack::PackArgs),
    /// Measure collectives and training steps.
    Bench(Box<bench::BenchArgs>),
    /// Start N ranks of any program; if one fails, stop all.
    #[command(
        args_override_self = true,
        override_usage = "phalanx launch [OPTIONS] [--] PROGRAM [ARGS]..."
    )]
    Launch(Box<launch::LaunchCli>),
    /// Check this host, or, started as the ranks of a job, all its hosts: limits, network, clocks, data.
    Doctor(Box<doctor::DoctorArgs>),
    /// Show the chosen algorithm and predicted time of each collective, and the best bucket size.
    Plan(plan::PlanArgs),
    /// Download a data set from its authors' site.
    Download(download::DownloadArgs),
    /// Make the index of shards (.tar, .jsonl, .parquet), by which trainings read data larger than memory.
    Index(index::IndexArgs),
    /// Find where a job hangs or why it failed, from its flight recorder dumps.
    Inspect(inspect::InspectArgs),
    /// Run workflows: tasks with retries, cache and resource limits.
    #[cfg(feature = "flow")]
    Flow(phalanx_flow::FlowCli),
    /// Run workflows (not in this build: build it with `cargo build --release --all-features`).
    #[cfg(not(feature = "flow"))]
    #[command(disable_help_flag = true)]
    Flow {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
        _args: Vec<OsString>,
    },
    /// Create a job token, the secret that the launchers of one job share.
    Token(TokenCli),
}

/// `phalanx token`.
#[derive(clap::Args, Debug)]
struct TokenCli {
    /// The file to create (readable by you only; an existing file is kept).
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Parses the process's command line, runs the command, and returns the exit code. Errors have
/// been printed.
pub(crate) fn main() -> ExitCode {
    let parsed = own_arguments().and_then(parse);
    launch::exit_code(parsed.and_then(|cli| cli.map_or(Ok(()), |cli| run(cli.command))))
}

fn run(command: Command) -> Result<()> {
    launch::log::warn_of_nonsense();
    match command {
        Command::Train(args) => args.0.run(),
        Command::New(args) => new::run(&args),
        Command::Compare(args) => compare::run(&args, parse_training),
        Command::Predict(args) => predict::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Live(args) => live::run(&args),
        Command::Pack(args) => pack::run(&args),
        Command::Bench(args) => bench::run(*args),
        Command::Launch(cli) => launch::run(&cli, phalanx::watch::run),
        Command::Doctor(args) => doctor::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Download(args) => download::run(&args),
        Command::Index(args) => index::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        #[cfg(feature = "flow")]
        Command::Flow(cli) => phalanx_flow::run(&cli),
        #[cfg(not(feature = "flow"))]
        Command::Flow { .. } => Err(crate::error::Error::usage(
            "this build of phalanx has no workflows",
        )
        .note("try", "cargo build --release --all-features")),
        Command::Token(cli) => launch::write_token(&cli.out),
    }
}

/// Parses and does nothing.
#[cfg(any(test, fuzzing))]
pub(crate) fn parse_only<'a>(words: impl Iterator<Item = &'a str>) {
    let _ = parse(words.map(OsString::from));
}

/// Parses `words` as arguments of `phalanx train`. `Ok(None)`: help was asked for and printed.
fn parse_training(words: &[OsString]) -> Result<Option<Box<training::TrainArgs>>> {
    let typed = ["train".into()].into_iter();
    Ok(match parse(typed.chain(words.iter().cloned()))? {
        Some(Cli {
            command: Command::Train(args),
        }) => Some(args),
        _ => None,
    })
}

/// `Ok(None)`: help or the version was asked for and printed.
fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Option<Cli>> {
    let mut parser = taking_negative_numbers(Cli::command());
    parser.build();
    // Messages call the program phalanx, whatever its file is called.
    let name = OsString::from("phalanx");
    let args = normalise(args, |flag| launch_flag(&parser, flag));
    let args = with_config(&parser, &phalanx_train::OF_ONE_RUN, args)?;
    let path = commands(&parser, &args);
    let parsed = parser
        .try_get_matches_from_mut(std::iter::once(name).chain(args))
        .and_then(|matches| Cli::from_arg_matches(&matches));
    match parsed {
        Ok(cli) => Ok(Some(cli)),
        Err(error) => explain::explain(&error, &parser, &path).map_or(Ok(None), Err),
    }
}

/// The commands that `args` begin with, for messages about the rest.
fn commands(parser: &clap::Command, args: &[OsString]) -> Vec<String> {
    let mut path = Vec::new();
    let mut command = parser;
    for arg in args {
        if arg.as_encoded_bytes().starts_with(b"-") {
            continue;
        }
        match arg.to_str().and_then(|name| command.find_subcommand(name)) {
            Some(found) => {
                path.push(found.get_name().to_owned());
                command = found;
            }
            None => break,
        }
    }
    path
}

/// What kind of flag `name` is for `launch`, read from the parser itself, so
/// that no second list can go stale.
fn launch_flag(parser: &clap::Command, name: &str) -> Option<Flag> {
    let launch = parser.find_subcommand("launch")?;
    let mut all = launch.get_arguments();
    let is_short = |letter: char| name == letter.to_string();
    let short = all.find(|arg| arg.get_short().is_some_and(is_short));
    let arg = find(launch, name).or(short)?;
    if arg
        .get_num_args()
        .is_some_and(|n| n.min_values() == 0 && n.takes_values())
    {
        Some(Flag::MayTakeAddress)
    } else if arg.get_action().takes_values() {
        Some(Flag::TakesValue)
    } else {
        Some(Flag::Switch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(args: &[&str]) -> String {
        parse(args.iter().map(OsString::from)).unwrap_err().render()
    }

    #[test]
    fn the_parser_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn unknown_words_get_a_suggestion() {
        let text = error_of(&["lunch", "sh"]);
        assert!(
            text.starts_with("error: unknown command \"lunch\"; did you mean \"launch\"?   ("),
            "{text}"
        );
        let text = error_of(&["launch", "--nproc_per_nod", "2", "sh"]);
        assert!(
            text.starts_with(
                "error: unknown flag \"--nproc-per-nod\"; did you mean \"--nproc-per-node\"?\n"
            ),
            "{text}"
        );
        assert!(
            text.ends_with("  see     phalanx launch --help\n"),
            "{text}"
        );
    }

    /// Whatever flags a recipe gets, none looks like one of ModelArts'.
    #[test]
    fn recipes_ignore_what_modelarts_appends_but_no_misspelling() {
        let appended = "--allow-unknown --data_url=synthetic --train_url o --num_gpus 8 --local_rank=0 \
                        --init_method tcp://h:1 --rank 0 --world_size 1 --job_name worker --task_index -1";
        for program in phalanx_recipes::programs() {
            let words = ["train", program.name()]
                .into_iter()
                .chain(appended.split_whitespace());
            let words = words.map(OsString::from);
            let Ok(Some(Cli {
                command: Command::Train(train),
            })) = parse(words.clone())
            else {
                panic!("{}", program.name())
            };
            let folder = train.0.settings.output_dir.as_deref();
            assert_eq!(folder, Some("o".as_ref()), "{}", program.name());
            for (typed, ours) in [("--epoch", "--epochs"), ("--outputdir", "--output-dir")] {
                let words = words.clone().chain([typed.into(), "1".into()]);
                let text = parse(words).expect_err(typed).render();
                let said = format!("error: unknown flag {typed:?}; did you mean {ours:?}?\n");
                assert!(text.starts_with(&said), "{text}");
            }
        }
    }

    #[test]
    fn both_spellings_reach_the_same_field() {
        for flag in ["--nproc_per_node", "--nproc-per-node"] {
            let args = ["launch", flag, "3", "prog", "--a_b", "--nnodes", "x"];
            let cli = parse(args.map(OsString::from)).unwrap().unwrap();
            let Command::Launch(launch) = cli.command else {
                panic!("not launch")
            };
            assert_eq!(launch.nproc_per_node.as_deref(), Some("3"));
            assert_eq!(launch.program, ["prog", "--a_b", "--nnodes", "x"]);
        }
    }

    #[test]
    fn values_that_are_no_numbers_are_said_to_be() {
        for (flag, value, why) in [
            ("--epochs", "two", "a whole number is expected"),
            ("--epochs", "1.5", "a whole number is expected"),
            ("--epochs", "99999999999999999999", "too large a number"),
            ("--epochs", "-1", "a whole number from 0 up is expected"),
            ("--batch-size", "-5", "a whole number from 0 up is expected"),
            ("--seed", "-1.5", "a whole number from 0 up is expected"),
            ("--save-every", "-3", "a whole number from 0 up is expected"),
            ("--momentum", "much", "a number is expected"),
        ] {
            let text = error_of(&["train", "mnist", flag, value]);
            let said = format!("error: {flag} cannot be \"{value}\"\n");
            assert!(text.starts_with(&said), "{text}");
            assert!(text.contains(why), "{text}");
        }
    }

    /// Numbers below zero reach the checks of their flags everywhere.
    #[test]
    fn negative_numbers_are_values() {
        for args in [
            &["plan", "--world", "-1"][..],
            &["bench", "all-reduce", "--nproc-per-node", "-2"],
            &["predict", "x", "--data", "synthetic", "--limit", "-3"],
            &["compare", "--workers", "-4", "mnist"],
        ] {
            let text = error_of(args);
            let (flag, value) = match args.iter().rposition(|word| word.starts_with("--")) {
                Some(at) => (args[at], args[at + 1]),
                None => panic!("{args:?}"),
            };
            assert!(
                text.starts_with(&format!("error: {flag} cannot be \"{value}\"\n")),
                "{text}"
            );
        }
    }

    #[test]
    fn a_recipe_that_is_not_timed_is_no_misspelling() {
        let text = error_of(&["bench", "train", "resnet9"]);
        assert!(
            text.contains("bench train does not time resnet9\n"),
            "{text}"
        );
        assert!(
            text.contains("one of  mnist, resnet18, mobilenetv2"),
            "{text}"
        );
        assert!(!text.contains("did you mean"), "{text}");
        let text = error_of(&["bench", "train", "mnst"]);
        assert!(
            text.contains("RECIPE cannot be \"mnst\"; did you mean \"mnist\"?"),
            "{text}"
        );
    }

    #[test]
    fn torchruns_lines_are_parsed() {
        let launch = |line: &str| {
            let words = line.split(' ').skip(1).map(OsString::from);
            match parse(words).unwrap().unwrap().command {
                Command::Launch(launch) => launch,
                _ => panic!("not launch"),
            }
        };
        for line in [
            "phalanx launch --nnodes 2 --nproc_per_node 2 --rdzv_id 7 --rdzv_backend c10d --rdzv_endpoint h:29400 --rdzv_conf is_host=1,timeout=9 train.py --x",
            "phalanx launch -r 3 -t=0:1 --log_dir d --local_ranks_filter 0 train.py --x",
            "phalanx launch -t3 --signals_to_handle SIGTERM --shutdown_timeout 9 --virtual_local_rank train.py --x",
            "phalanx launch --numa_binding node --event_log_handler null --logs_specs default train.py --x",
            "phalanx launch --duplicate_stdout_filters a,b --duplicate_stderr_filters c --log_line_prefix_template ${rank} train.py --x",
            "phalanx launch --standalone --max_restarts 1 --monitor_interval 1 --start_method fork --role r train.py --x",
            "phalanx launch --run_path train.py --x",
        ] {
            assert_eq!(launch(line).program, ["train.py", "--x"], "{line}");
        }
        assert_eq!(
            launch("phalanx launch -m pkg.train -m").program,
            ["pkg.train", "-m"]
        );
        let text = error_of(&[
            "launch",
            "--stop-grace-s",
            "1",
            "--shutdown-timeout",
            "2",
            "x",
        ]);
        assert!(text.contains("cannot be combined with"), "{text}");
        // Elsewhere no command takes them.
        let text = error_of(&["train", "mnist", "--no-python"]);
        assert!(
            text.starts_with("error: unknown flag \"--no-python\""),
            "{text}"
        );
    }

    #[test]
    fn launch_without_a_program_says_so() {
        let text = error_of(&["launch", "--nproc-per-node", "2"]);
        assert!(text.starts_with("error: missing "), "{text}");
        assert!(text.contains("PROGRAM"), "{text}");
    }

    #[test]
    fn nothing_typed_is_a_usage_error_with_the_commands() {
        let text = error_of(&[]);
        assert!(text.starts_with("error: no command given\n"), "{text}");
        assert!(text.contains("launch"), "{text}");
    }
}
