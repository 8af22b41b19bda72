//! `phalanx new`: writes a project with a training program.

use std::path::{Path, PathBuf};
use std::process::Command;

use phalanx_base::files::as_typed;

use crate::error::{Error, ErrorKind, Result, refuse};
use crate::say;

/// Arguments of `phalanx new`.
#[derive(Debug, clap::Args)]
pub struct NewArgs {
    /// Folder to create; its last part is the package's name
    #[arg(value_name = "NAME")]
    folder: PathBuf,
    /// What the program trains on: its model and data set are a beginning to change
    #[arg(long, value_enum, default_value_t = Template::Points)]
    template: Template,
    /// Folder of Phalanx's sources to depend on [default: the sources of this program]
    #[arg(long, value_name = "DIR")]
    path: Option<PathBuf>,
    /// Address of Phalanx's git repository to depend on, for a project that is built on other machines
    #[arg(long, value_name = "URL", conflicts_with = "path")]
    git: Option<String>,
}

/// The sources of the crate `phalanx` that this command was built with.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../phalanx");

/// Programs that are also examples of this repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Template {
    /// Points in a plane, a small network
    Points,
    /// Images: MNIST, downloaded or generated digits
    Image,
    /// Images of your own: a folder with a subfolder for each class
    Folder,
    /// Text: a GPT that predicts the next character
    Text,
    /// A table: a regression on a CSV file, with early stopping and predictions
    Table,
}

impl Template {
    /// The program, and the flags with which its test trains.
    fn program(self) -> (&'static str, &'static str) {
        match self {
            Template::Points => (include_str!("../../../recipes/spirals.rs"), "--epochs=10"),
            Template::Image => (
                include_str!("../../phalanx/examples/own_model.rs"),
                "--limit-train=2000",
            ),
            Template::Folder => (
                include_str!("../../phalanx/examples/own_images.rs"),
                "--epochs=1\", \"--data\", &photos(&folder), \"--image-size=32",
            ),
            Template::Text => (
                include_str!("../../phalanx/examples/nanogpt.rs"),
                "--max-steps=4",
            ),
            Template::Table => (
                include_str!("../../phalanx/examples/own_table.rs"),
                "--epochs=10",
            ),
        }
    }

    /// The project's `main.rs`.
    fn main(self) -> String {
        let text = self.program().0;
        let lines = text
            .split_inclusive('\n')
            .map(|line| match line.split_once(" --example ") {
                // How to run an example of this repository.
                Some((_, rest)) => {
                    let flags = rest.split_once(" -- ").map_or("", |(_, flags)| flags);
                    let flags = flags.trim_end().trim_end_matches('`');
                    format!("//! `cargo run --release -- {flags}`\n")
                }
                None => line.to_owned(),
            });
        lines.collect()
    }
}

/// The project's test.
const TEST: &str = r#"//! Trains a little on two ranks, as a user does: `cargo test --release`, which uses what
//! `cargo build --release` has built.

use std::process::Command;

#[test]
fn it_trains_on_two_ranks() {
    let folder = std::env::temp_dir().join(format!("PROGRAM-test-{}", std::process::id()));
    let output = Command::new(env!("CARGO_BIN_EXE_PROGRAM"))
        .args(["--nproc-per-node", "2", "FLAGS", "--output-dir"])
        .arg(folder.join("run"))
        .output()
        .expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(lines.contains("test loss"), "{lines}");
    assert!(folder.join("run/summary.json").is_file());
    std::fs::remove_dir_all(&folder).expect("removed");
}
"#;

/// What the test of [`Template::Folder`] trains on.
const PHOTOS: &str = r#"
/// Pictures of two colors, in a folder each.
fn photos(folder: &std::path::Path) -> String {
    let folder = folder.join("photos");
    for (class, color) in [("blue", [0.0, 0.0, 1.0]), ("red", [1.0, 0.0, 0.0])] {
        std::fs::create_dir_all(folder.join(class)).expect("a folder");
        let picture = phalanx::image::sheet(&color.repeat(40 * 30), [30, 40, 3]).expect("a picture");
        for i in 0..20 {
            let file = folder.join(class).join(format!("{i}.png"));
            std::fs::write(file, &picture).expect("written");
        }
    }
    folder.display().to_string()
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
        refuse!(
            "\"{name}\" cannot be a package's name: use letters, digits, - and _, a letter first"
        );
    }
    let dependency = match (&args.path, &args.git) {
        (Some(path), _) => on_path(path)?,
        (None, Some(url)) => Dependency {
            place: format!("git = {url:?}"),
            note: "# `cargo update` takes the newest version of its default branch; Cargo.lock keeps the one that was built.\n".to_owned(),
            is_here: false,
        },
        (None, None) => on_path(Path::new(SOURCES)).map_err(|_| {
            Error::usage(format!(
                "the sources of Phalanx are not in {SOURCES} any more"
            ))
            .note("try", "--path DIR, or --git URL")
        })?,
    };
    let Dependency { place, note, .. } = &dependency;
    let (features, data) = match args.template {
        Template::Folder => (", features = [\"images\"]", " --data PHOTOS"),
        _ => ("", ""),
    };
    let manifest = format!(
        "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[dependencies]\n\
         {note}phalanx = {{ {place}{features} }}\n\n\
         # For builds without --release: not optimized, the engine is slow.\n[profile.dev.package.\"*\"]\nopt-level = 3\n\n\
         # The launcher and its live page mostly wait: not optimized, they compile in a third of the time.\n[profile.release.package]\n\
         phalanx-launch.opt-level = 0\nphalanx-live.opt-level = 0\nphalanx-process.opt-level = 0\n\n\
         # Not a member of a workspace above this folder.\n[workspace]\n"
    );
    let flags = args.template.program().1;
    let test = match args.template {
        Template::Folder => [TEST, PHOTOS].concat(),
        _ => TEST.to_owned(),
    };
    let test = test.replace("PROGRAM", name).replace("FLAGS", flags);
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
        ("src/main.rs", &args.template.main()),
        ("tests/train.rs", &test),
    ] {
        let path = folder.join(file);
        let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        made.and_then(|()| std::fs::write(&path, text))
            .map_err(failed)?;
    }
    say::note(format_args!(
        "created {}\n  train   cd {} && cargo run --release -- --nproc-per-node 2{data}\n  test    cargo test --release",
        folder.display(),
        as_typed(folder)
    ));
    if dependency.is_here {
        say::note(format_args!(
            "  note    it builds on this machine only: Cargo.toml names the folder of Phalanx's sources, and says what to change"
        ));
    }
    Ok(())
}

/// The manifest's dependency on Phalanx.
struct Dependency {
    place: String,
    /// Comments above it.
    note: String,
    /// It is a folder of this machine.
    is_here: bool,
}

/// The dependency on the sources in `path`, which is the repository or the crate `phalanx`.
fn on_path(path: &Path) -> Result<Dependency> {
    let candidates = [path.join("crates/phalanx"), path.to_owned()];
    let found = candidates.iter().find(|at| {
        let manifest = std::fs::read_to_string(at.join("Cargo.toml"));
        manifest.is_ok_and(|text| text.starts_with("[package]\nname = \"phalanx\"\n"))
    });
    let Some(found) = found else {
        refuse!(
            "--path {} does not contain the sources of Phalanx",
            path.display()
        );
    };
    let found = std::fs::canonicalize(found)?;
    let elsewhere = match repository(&found) {
        Some((url, revision)) => format!("git = {url:?}, rev = {revision:?}"),
        None => "git = \"ADDRESS OF THE REPOSITORY\"".to_owned(),
    };
    Ok(Dependency {
        place: format!("path = {:?}", found.display().to_string()),
        note: format!(
            "# Phalanx is in no registry, and this path is one of this machine. On another one, name a copy of the\n\
             # sources there, or their repository:\n\
             # phalanx = {{ {elsewhere} }}\n"
        ),
        is_here: true,
    })
}

/// Address and revision of the git repository that the sources in `dir` come from, if other machines can reach it.
fn repository(dir: &Path) -> Option<(String, String)> {
    let git = |args: &[&str]| {
        let output = Command::new("git").arg("-C").arg(dir).args(args).output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
    };
    let url = address(&git(&["remote", "get-url", "origin"])?)?;
    Some((url, git(&["rev-parse", "HEAD"])?))
}

/// A remote's address as Cargo takes it, without a password; `None` for a folder of this machine.
fn address(remote: &str) -> Option<String> {
    let (scheme, rest) = match remote.split_once("://") {
        Some(("file", _)) => return None,
        Some(parts) => parts,
        // As git abbreviates it: `git@host:team/phalanx.git`.
        None => {
            let (host, path) = remote
                .split_once(':')
                .filter(|(host, _)| !host.contains('/'))?;
            return Some(format!("ssh://{host}/{}", path.trim_start_matches('/')));
        }
    };
    let (host, path) = rest.split_once('/')?;
    let host = match (scheme, host.rsplit_once('@')) {
        ("http" | "https", Some((_, host))) => host,
        _ => host,
    };
    Some(format!("{scheme}://{host}/{path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_says_how_its_own_program_is_run() {
        for template in [
            Template::Points,
            Template::Image,
            Template::Folder,
            Template::Text,
            Template::Table,
        ] {
            let main = template.main();
            let commands = main.lines().filter(|line| line.contains("cargo run"));
            assert!(commands.clone().next().is_some() || template == Template::Points);
            for line in commands {
                assert!(line.starts_with("//! `cargo run --release -- "), "{line}");
                assert_eq!(line.matches('`').count(), 2, "{line}");
            }
        }
    }

    #[test]
    fn remotes_are_addresses_for_other_machines() {
        for (remote, is) in [
            (
                "https://a.org/x/phalanx.git",
                Some("https://a.org/x/phalanx.git"),
            ),
            ("https://me:s3cret@a.org/x", Some("https://a.org/x")),
            (
                "git@a.org:x/phalanx.git",
                Some("ssh://git@a.org/x/phalanx.git"),
            ),
            ("ssh://git@a.org:22/x", Some("ssh://git@a.org:22/x")),
            ("file:///srv/phalanx", None),
            ("/srv/phalanx", None),
            ("../phalanx", None),
        ] {
            assert_eq!(address(remote).as_deref(), is, "{remote}");
        }
    }

    #[test]
    fn the_manifest_names_the_repository_of_the_sources() {
        let dir = tempfile::tempdir().expect("folder");
        let path = dir.path();
        let manifest = "[package]\nname = \"phalanx\"\n";
        std::fs::write(path.join("Cargo.toml"), manifest).expect("written");
        let git = |args: &[&str]| {
            let mut command = Command::new("git");
            command
                .current_dir(path)
                .args(["-c", "user.name=a", "-c", "user.email=a@b"]);
            let status = command
                .args(args)
                .stdout(std::process::Stdio::null())
                .status();
            assert!(status.expect("git").success(), "{args:?}");
        };
        let note = || on_path(path).expect("sources").note;
        git(&["init", "-q"]);
        assert!(note().contains("# phalanx = { git = \"ADDRESS OF THE REPOSITORY\" }"));
        git(&["commit", "-q", "--allow-empty", "-m", "a"]);
        git(&["remote", "add", "origin", "https://a.org/x/phalanx"]);
        let (url, revision) = repository(path).expect("known");
        assert_eq!((&*url, revision.len()), ("https://a.org/x/phalanx", 40));
        let line = format!("# phalanx = {{ git = \"{url}\", rev = \"{revision}\" }}\n");
        assert!(note().contains(&line), "{}", note());
    }
}
