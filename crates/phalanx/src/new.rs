//! `phalanx new`: writes a project with a training program.

use std::path::{Path, PathBuf};

use phalanx_data::files::as_typed;

use crate::error::{Error, ErrorKind, Result};
use crate::say;

/// Arguments of `phalanx new`.
#[derive(Debug, clap::Args)]
pub struct NewArgs {
    /// Folder to create; its last part is the package's name
    #[arg(value_name = "NAME")]
    folder: PathBuf,
    /// Folder of Phalanx's sources to depend on [default: the sources of this program, if they exist; else its version]
    #[arg(long, value_name = "DIR")]
    path: Option<PathBuf>,
}

/// The program, which is also an example of this repository.
const MAIN: &str = include_str!("../../../recipes/spirals.rs");

/// Its test.
const TEST: &str = r#"//! Trains for a few epochs on two ranks, as a user does.

use std::process::Command;

#[test]
fn it_learns_on_two_ranks() {
    let folder = std::env::temp_dir().join(format!("PROGRAM-test-{}", std::process::id()));
    let output = Command::new(env!("CARGO_BIN_EXE_PROGRAM"))
        .args(["--nproc-per-node", "2", "--epochs", "10", "--output-dir"])
        .arg(&folder)
        .output()
        .expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    let last = lines.lines().last().unwrap_or_default();
    let accuracy = last.rsplit(' ').next().and_then(|text| text.parse::<f64>().ok());
    assert!(accuracy.is_some_and(|accuracy| accuracy > 0.9), "{lines}");
    assert!(folder.join("summary.json").is_file());
    std::fs::remove_dir_all(&folder).expect("removed");
}
"#;

/// Runs `phalanx new`.
///
/// # Errors
///
/// Usage, when the name is not valid for a package or the folder exists; `System`, when it cannot be written.
pub fn run(args: &NewArgs) -> Result<()> {
    let name = args.folder.file_name().and_then(|name| name.to_str());
    let name = name.unwrap_or_default();
    let is_name = |name: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.chars().all(known)
    };
    if !is_name(name) || ["phalanx", "test", "clap"].contains(&name) {
        return Err(Error::usage(format!(
            "\"{name}\" cannot be a package's name: use letters, digits, - and _, a letter first"
        )));
    }
    let dependency = match &args.path {
        Some(path) => on_path(path)?,
        None => {
            let own = Path::new(env!("CARGO_MANIFEST_DIR"));
            match own.join("Cargo.toml").is_file() {
                true => format!("path = {:?}", own.display().to_string()),
                false => format!("version = {:?}", env!("CARGO_PKG_VERSION")),
            }
        }
    };
    let manifest = format!(
        "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[dependencies]\n\
         # Without the command `phalanx` and what only that needs.\n\
         phalanx = {{ {dependency}, default-features = false }}\n\n\
         # Not optimized, the engine is slow.\n[profile.dev.package.\"*\"]\nopt-level = 3\n\n\
         # A project of its own, wherever it lies.\n[workspace]\n"
    );
    let folder = &args.folder;
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => {
            Error::usage(format!("{} exists already", folder.display()))
        }
        _ => Error::new(
            ErrorKind::System,
            format!("cannot write into {}", folder.display()),
        )
        .caused_by(error),
    };
    std::fs::create_dir(folder).map_err(failed)?;
    for (file, text) in [
        ("Cargo.toml", manifest.as_str()),
        (".gitignore", "/target\n/runs\n"),
        ("src/main.rs", MAIN),
        ("tests/train.rs", &TEST.replace("PROGRAM", name)),
    ] {
        let path = folder.join(file);
        let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        made.and_then(|()| std::fs::write(&path, text))
            .map_err(failed)?;
    }
    say::note(format_args!(
        "created {}\n  train   cd {} && cargo run --release -- --nproc-per-node 2\n  test    cargo test",
        folder.display(),
        as_typed(folder)
    ));
    Ok(())
}

/// The dependency on the sources in `path`, which is the repository or the crate `phalanx`.
fn on_path(path: &Path) -> Result<String> {
    let candidates = [path.join("crates/phalanx"), path.to_owned()];
    let found = candidates.iter().find(|at| {
        let manifest = std::fs::read_to_string(at.join("Cargo.toml"));
        manifest.is_ok_and(|text| text.contains("name = \"phalanx\"\n"))
    });
    let Some(found) = found else {
        return Err(Error::usage(format!(
            "--path {} does not contain the sources of Phalanx",
            path.display()
        )));
    };
    let found = std::path::absolute(found)?;
    Ok(format!("path = {:?}", found.display().to_string()))
}
