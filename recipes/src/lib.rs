//! The training programs of `phalanx train`, one file each.
//!
//! A program is its arguments with `shared::image::Program` (or, with a loop of its own, [`AnyRecipe`]) and one
//! [`Recipe`]. The commands `train`, `compare`, `predict` and `bench train` take all they know of it from [`RECIPES`].
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
mod resnet9;
mod shared;

use std::fmt;
use std::path::PathBuf;

use clap::FromArgMatches;
use phalanx_base::{error, format, say};
use phalanx_launch::{RankArgs, Speakers};
use phalanx_train::{Defaults, RankContext, SavingArgs, Settings};

use error::Result;
use shared::image::Program;
pub use shared::image::mirrored;
pub use shared::net::{Loss, Net, Network, Pixels};

/// What `phalanx train` can run, as its help lists it.
pub const RECIPES: [Recipe; 6] = [
    linear::RECIPE,
    mnist::RECIPE,
    resnet18::RECIPE,
    resnet9::RECIPE,
    mobilenetv2::RECIPE,
    gpt::RECIPE,
];

/// A training program: its name, its flags and its network.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    /// `phalanx train NAME`.
    pub name: &'static str,
    /// Its line in `phalanx train --help`.
    pub about: &'static str,
    /// Help texts of common flags: name of the flag's field, text.
    help: &'static [(&'static str, &'static str)],
    /// Help texts that depend on the program's defaults.
    defaults: Option<HelpDefaults>,
    flags: Flags,
    /// Its network, for `predict` and `bench train`.
    pub network: Option<Network>,
}

/// Defaults of a program, for the help.
#[derive(Clone, Copy, Debug)]
struct HelpDefaults {
    usual: Defaults,
    /// Those with another value of a flag.
    other: Option<(&'static str, Defaults)>,
    output_dir: Option<&'static str>,
}

impl HelpDefaults {
    /// Field and text of each flag.
    fn texts(&self) -> Vec<(&'static str, String)> {
        let of = |value: fn(&Defaults) -> String| {
            let other = self.other.as_ref();
            let other = other.map(|(flag, other)| format!("; {flag}: {}", value(other)));
            format!(
                "[default: {}{}]",
                value(&self.usual),
                other.unwrap_or_default()
            )
        };
        let epochs = of(|d| d.epochs.to_string());
        let batch_size = of(|d| d.batch_size.to_string());
        let mut texts = vec![
            ("epochs", format!("Number of epochs {epochs}")),
            (
                "batch_size",
                format!("Samples per rank and step {batch_size}"),
            ),
            ("lr", format!("Learning rate {}", of(|d| d.lr.to_string()))),
        ];
        let folder =
            "Folder for metrics, summary and weights; with --resume PATH, the resumed run's folder";
        let dir = self.output_dir;
        texts.extend(dir.map(|dir| ("output_dir", format!("{folder} [default: {dir}]"))));
        texts
    }
}

/// The flags of a program, with those of its ranks.
#[derive(Clone, Copy, Debug)]
struct Flags {
    add: fn(clap::Command) -> clap::Command,
    parse: fn(&clap::ArgMatches) -> Parsed,
}

/// A program with the values of its flags, and of those of its ranks.
type Parsed = std::result::Result<(Box<dyn AnyRecipe>, RankArgs), clap::Error>;

#[derive(clap::Args)]
struct WithRanks<A: clap::Args> {
    #[command(flatten)]
    program: A,
    #[command(flatten)]
    ranks: RankArgs,
}

impl Flags {
    const fn of<A: AnyRecipe + clap::Args + 'static>() -> Flags {
        Flags {
            add: <WithRanks<A> as clap::Args>::augment_args,
            parse: |matches| {
                let WithRanks { program, ranks } = WithRanks::<A>::from_arg_matches(matches)?;
                Ok((Box::new(program), ranks))
            },
        }
    }
}

impl Recipe {
    /// That of an image program.
    const fn of<P: Program + clap::Args + Send + Sync + fmt::Debug + 'static>(
        about: &'static str,
        help: &'static [(&'static str, &'static str)],
    ) -> Recipe {
        Recipe {
            name: P::NAME,
            about,
            help,
            defaults: Some(HelpDefaults {
                usual: P::DEFAULTS,
                other: P::OTHER_DEFAULTS,
                output_dir: P::DEFAULT_DIR,
            }),
            flags: Flags::of::<P>(),
            network: Some(P::NETWORK),
        }
    }

    /// That of a program with a loop of its own and these defaults.
    const fn with_defaults<A: AnyRecipe + clap::Args + 'static>(
        name: &'static str,
        about: &'static str,
        usual: Defaults,
    ) -> Recipe {
        let (other, output_dir) = (None, None);
        Recipe {
            name,
            about,
            help: &[],
            defaults: Some(HelpDefaults {
                usual,
                other,
                output_dir,
            }),
            flags: Flags::of::<A>(),
            network: None,
        }
    }

    /// The recipe called `name`.
    pub fn find(name: &str) -> Option<&'static Recipe> {
        const { &RECIPES }.iter().find(|recipe| recipe.name == name)
    }

    /// `phalanx train NAME` with its flags.
    pub fn command(&self) -> clap::Command {
        let command = (self.flags.add)(clap::Command::new(self.name));
        let mut command = command.about(self.about).long_about(None);
        for (flag, text) in self.defaults.iter().flat_map(HelpDefaults::texts) {
            command = command.mut_arg(flag, |arg| arg.help(text));
        }
        self.help.iter().fold(command, |command, (flag, text)| {
            command.mut_arg(flag, |arg| arg.help(*text))
        })
    }

    /// What was typed after `phalanx train NAME`.
    ///
    /// # Errors
    ///
    /// Those of clap.
    pub fn parse(&self, matches: &clap::ArgMatches) -> Parsed {
        (self.flags.parse)(matches)
    }
}

/// A recipe's arguments: all that `train` and `compare` need of it.
pub trait AnyRecipe: Send + Sync + fmt::Debug {
    /// What it is called at the command line.
    fn name(&self) -> &'static str;

    /// The training flags, where it has them all.
    fn settings(&mut self) -> Option<&mut Settings>;

    /// `--output-dir`, and the arguments about checkpoints.
    fn folder(&mut self) -> (&mut Option<PathBuf>, &mut SavingArgs);

    /// The folder of a run without `--output-dir`; none for a new one for each run.
    fn default_dir(&self) -> Option<&'static str> {
        None
    }

    /// Sets what was not typed, before [`validate`](Self::validate).
    fn settle(&mut self) {}

    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    fn validate(&self, world: usize) -> Result<()>;

    /// Which ranks print.
    fn speakers(&self) -> Speakers;

    /// Trains as one rank.
    ///
    /// # Errors
    ///
    /// Anything that ends the training; the kind decides the exit code.
    fn run_rank(&self, ctx: &RankContext) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_recipe_is_one_file_of_150_lines_at_most() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        for recipe in RECIPES {
            let file = folder.join(recipe.name).with_extension("rs");
            let text = std::fs::read_to_string(&file).expect("a file of its name");
            let lines = text.lines().count();
            assert!(lines <= 150, "{}: {lines} lines", file.display());
        }
    }

    #[test]
    fn help_names_the_defaults_that_hold() {
        for recipe in RECIPES {
            let typed = recipe.command().get_matches_from([recipe.name]);
            let (mut program, _) = recipe.parse(&typed).expect("all flags have defaults");
            program.settle();
            let Some(settings) = program.settings() else {
                assert_eq!(recipe.name, "linear");
                continue;
            };
            for (flag, value) in [
                ("epochs", settings.epochs().to_string()),
                ("batch_size", settings.batch_size().to_string()),
                ("lr", settings.lr().to_string()),
            ] {
                let command = recipe.command();
                let arg = command.get_arguments().find(|arg| arg.get_id() == flag);
                let help = arg
                    .and_then(clap::Arg::get_help)
                    .expect("its help")
                    .to_string();
                assert!(
                    help.contains(&format!("[default: {value}")),
                    "{flag}: {help}"
                );
            }
        }
    }
}
