//! The training programs of `phalanx train`, one file each.
//!
//! Each is a program of the crate `phalanx`, as users write theirs: flags, a `train` function, and a `program` that says
//! what it is called. The command `train` takes them from [`programs`], and `predict` and `bench train` their networks
//! from [`NETWORKS`].
#![forbid(unsafe_code)]
// They panic where an output cannot be written; `say` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod download;
mod flyte;
mod gpt;
mod gpt_mesh;
mod linear;
mod mnist;
mod mobilenetv2;
mod modelarts;
mod oneflow;
mod resnet18;
mod resnet50;
mod resnet9;
mod shared;
mod table;

use phalanx::Subcommand;
use phalanx_base::{error, format, say};

pub use shared::device::{Classifier, Engine, EngineArgs, OnCpu};
pub use shared::net::{Loss, Net, Network, Pixels};
pub use shared::photos;
pub use shared::text::scores;
pub use shared::views::Views;

/// What `phalanx train` can run, in the order of its help.
pub fn programs() -> [Subcommand; 8] {
    let [mnist, resnet18, resnet50, resnet9, mobilenetv2] = on_engine::<OnCpu>();
    [
        linear::program(),
        mnist,
        resnet18,
        resnet50,
        resnet9,
        mobilenetv2,
        gpt::program(),
        table::program(),
    ]
}

/// The programs that classify images, with the flags `E` for their engine.
pub fn on_engine<E: EngineArgs>() -> [Subcommand; 5] {
    [
        mnist::program::<E>(),
        resnet18::program::<E>(),
        resnet50::program::<E>(),
        resnet9::program::<E>(),
        mobilenetv2::program::<E>(),
    ]
}

/// The networks of the programs that classify images, with the names of these.
pub const NETWORKS: [(&str, Network); 5] = [
    ("mnist", mnist::NETWORK),
    ("resnet18", resnet18::NETWORK),
    ("resnet50", resnet50::NETWORK),
    ("resnet9", resnet9::NETWORK),
    ("mobilenetv2", mobilenetv2::NETWORK),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_program_is_one_file_of_150_lines_at_most() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        for program in programs() {
            let file = folder.join(program.name()).with_extension("rs");
            let text = std::fs::read_to_string(&file).expect("a file of its name");
            let lines = text.lines().count();
            assert!(lines <= 150, "{}: {lines} lines", file.display());
        }
    }

    #[test]
    fn help_names_the_defaults_that_hold() {
        for program in programs() {
            let mut command = program.command();
            let matches = command.clone().get_matches_from([program.name()]);
            let training = program.training(&matches).expect("all flags have defaults");
            let settings = training.settings;
            let text = command.render_help().to_string();
            // As if no line were too long.
            let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            for value in [
                settings.epochs().to_string(),
                settings.batch_size().to_string(),
                settings.lr().to_string(),
            ] {
                assert!(
                    text.contains(&format!("[default: {value}")),
                    "{value}: {text}"
                );
            }
        }
    }
}
