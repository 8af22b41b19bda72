//! `phalanx download`: data sets from where their authors publish them.
//!
//! | file | does |
//! |---|---|
//! | `sets` | names, addresses, sizes, checksums |
//! | `fetch` | one file: attempts, checksum, progress |

mod fetch;
mod sets;

use std::path::{Path, PathBuf};

use phalanx_base::files::as_typed;
use phalanx_http::ureq::http::Uri;

use crate::error::{Error, Result};
use crate::say;
use fetch::Got;
use phalanx::train::{FolderArgs, RunDir};
use sets::{DataSet, File, SETS};

/// `phalanx download`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:\n  \
    phalanx download mnist                     into data/mnist\n  \
    phalanx download cifar10 --to /datasets    into /datasets\n  \
    phalanx download mnist cifar10             into data/mnist and data/cifar10\n\n\
    A download that fails starts again, up to four times. A file appears under its name only when\n\
    it is complete and has the published checksum. https_proxy and SSL_CERT_FILE (root\n\
    certificates) are respected.")]
pub struct DownloadArgs {
    /// Data sets to download: mnist, fashion-mnist, cifar10.
    #[arg(value_name = "SET", required = true)]
    sets: Vec<String>,
    /// Folder for the files; with several sets, each gets a subfolder [default: data/SET].
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
    /// Download from this mirror URL instead of the authors' site.
    #[arg(long, value_name = "URL")]
    from: Option<String>,
    /// Replace existing files that differ from the published ones.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    folder: FolderArgs,
}

/// Runs `phalanx download`.
///
/// # Errors
///
/// Usage; those of the network and of writing, naming address and file.
pub fn run(args: &DownloadArgs) -> Result<()> {
    let sets: Vec<&DataSet> = args.sets.iter().map(|n| named(n)).collect::<Result<_>>()?;
    args.from
        .as_deref()
        .map_or(Ok(()), |url| check_mirror("--from", url))?;
    for set in &sets {
        let folder = match (&args.to, sets.len()) {
            (None, _) => Path::new("data").join(set.name),
            (Some(to), 1) => to.clone(),
            (Some(to), _) => to.join(set.name),
        };
        let (name, mb) = (set.name, set.bytes() as f64 / 1e6);
        say::print(&format!("{name}: {} ({mb:.1} MB)\n", set.title))?;
        let from = args.from.as_deref();
        get(set, &folder, from, args.force, args.folder, |file, got| {
            let how = match got {
                Got::Already => "is there".to_owned(),
                Got::From(url) => format!("from {url}"),
            };
            say::print(&format!("  {}  {how}\n", file.name))
        })?;
        say::print(&format!("next: {} {}\n", set.next, as_typed(&folder)))?;
    }
    Ok(())
}

/// Downloads those files of the set `name` that are not in `folder` yet, from their
/// authors or from `mirror`, with the progress on standard error.
///
/// # Errors
///
/// As `phalanx download`.
pub(crate) fn ensure(
    name: &str,
    folder: &Path,
    mirror: Option<&str>,
    args: FolderArgs,
) -> Result<()> {
    get(named(name)?, folder, mirror, false, args, |_, _| Ok(()))
}

/// Gets the files of `set` into `folder`, and calls `ended` after each.
fn get(
    set: &DataSet,
    folder: &Path,
    mirror: Option<&str>,
    force: bool,
    args: FolderArgs,
    mut ended: impl FnMut(&File, Got) -> Result<()>,
) -> Result<()> {
    let mut made = RunDir::at(folder.to_owned());
    let dir = made.make(args)?;
    let sources: Vec<String> = match mirror {
        Some(url) => vec![url.to_owned()],
        None => set.sources.iter().map(|&s| s.to_owned()).collect(),
    };
    let agent = phalanx_http::agent(fetch::SILENCE, false)?;
    for file in set.files {
        ended(file, fetch::fetch(&agent, &sources, &dir, file, force)?)?;
    }
    Ok(())
}

/// Checks that `url`, the value of `flag`, is an http or https URL.
///
/// # Errors
///
/// Usage, when it is not.
pub(crate) fn check_mirror(flag: &str, url: &str) -> Result<()> {
    let parsed = url.parse::<Uri>().ok();
    let scheme = parsed.as_ref().and_then(Uri::scheme_str);
    let host = parsed.as_ref().and_then(Uri::host);
    match (scheme, host) {
        (Some("http" | "https"), Some(host)) if !host.is_empty() => Ok(()),
        _ => Err(Error::usage(format!(
            "{flag} \"{url}\" is not a web address; give one as http://HOST/FOLDER or https://HOST/FOLDER"
        ))),
    }
}

fn named(name: &str) -> Result<&'static DataSet> {
    let wanted = name.to_lowercase().replace('_', "-");
    let alias = match wanted.as_str() {
        "cifar-10" => "cifar10",
        "fashionmnist" => "fashion-mnist",
        other => other,
    };
    if let Some(set) = SETS.iter().find(|set| set.name == alias) {
        return Ok(set);
    }
    let names: Vec<&str> = SETS.iter().map(|set| set.name).collect();
    let near = names
        .iter()
        .map(|known| (strsim::jaro_winkler(alias, known), known))
        .filter(|(likeness, _)| *likeness > 0.7)
        .max_by(|a, b| a.0.total_cmp(&b.0));
    let hint = near.map_or(String::new(), |(_, known)| {
        format!("; did you mean \"{known}\"?")
    });
    Err(Error::usage(format!(
        "no data set \"{name}\"{hint}   ({})",
        names.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_are_on_the_web() {
        for url in ["http://127.0.0.1:8000", "https://h/x/", "http://[::1]:80/a"] {
            check_mirror("--from", url).expect(url);
        }
        for url in ["nonsense", "", "ftp://h/x", "/data", "http://", "h:80"] {
            let error = check_mirror("--from", url).expect_err(url);
            assert_eq!(error.exit_code(), 2);
            assert!(error.chain().contains("https://HOST/FOLDER"), "{url}");
        }
    }

    #[test]
    fn names_are_found_and_mistakes_explained() {
        assert_eq!(named("mnist").unwrap().name, "mnist");
        assert_eq!(named("CIFAR-10").unwrap().name, "cifar10");
        assert_eq!(named("fashion_mnist").unwrap().name, "fashion-mnist");
        let text = named("minst").unwrap_err().chain();
        assert_eq!(
            text,
            "no data set \"minst\"; did you mean \"mnist\"?   (mnist, fashion-mnist, cifar10)"
        );
        assert!(!named("imagenet").unwrap_err().chain().contains("did you"));
    }
}
