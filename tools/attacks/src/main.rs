//! `phalanx-attacks`: every way we know to disturb a training job from
//! outside, tried against a live one.
//!
//! ```text
//! undisturbed jobs ─▶ losses, weights, memory
//! the same jobs under attack, again and again until the time is up ─▶ the same, to the bit
//! ```
//!
//! Attackers are threads of this process. They look for listening ports in
//! `/proc`, so a port that somebody adds is attacked without being asked.
#![forbid(unsafe_code)]

mod attack;
mod check;
mod job;
mod line;
mod proc;
mod run;
mod scene;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Attacks a live training job and checks that nothing of it changes.
#[derive(Parser, Debug)]
#[command(version)]
struct Cli {
    /// The program to attack.
    #[arg(long, default_value = "target/release/phalanx", value_name = "FILE")]
    phalanx: PathBuf,
    /// How long to attack, in seconds; whole jobs, so it takes a little longer.
    #[arg(long, default_value_t = 60, value_name = "S")]
    seconds: u64,
    /// Only this attack (may be repeated).
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Connections of the crowd.
    #[arg(long, default_value_t = 10_000, value_name = "N")]
    connections: usize,
    /// Training samples of the job.
    #[arg(long, default_value_t = 2_400, value_name = "N")]
    samples: usize,
    /// List the attacks and end.
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if cli.list {
        for attack in &attack::ALL {
            println!("{:<18} {}", attack.name, attack.what);
        }
        return ExitCode::SUCCESS;
    }
    if let Some(unknown) = cli
        .only
        .iter()
        .find(|name| attack::ALL.iter().all(|a| a.name != name.as_str()))
    {
        eprintln!("error: no attack is called {unknown:?}; --list shows them");
        return ExitCode::from(2);
    }
    match run::run(&cli) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
