//! What torchrun's flags mean where their value is more than a number or a word: `--signals-to-handle`,
//! `--local-ranks-filter`, the template of the lines' prefix, the filters of duplicated lines, and
//! `--virtual-local-rank`.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};

use signal_hook::consts::{FORBIDDEN, SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::place::{Env, text};
use crate::error::{Result, refuse};
use crate::stop::signal_name;

/// The signals that end the job by default.
const SIGNALS: [i32; 4] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT];

/// The settings that only torchrun's flags give.
#[derive(Clone, Debug, PartialEq)]
pub struct TorchrunOptions {
    /// Signals that end the job.
    pub signals: Vec<i32>,
    /// Local ranks whose output reaches the terminal; `None`: all.
    pub shown: Option<BTreeSet<usize>>,
    /// Begins each line, with `${rank}` and the like.
    pub prefix_template: Option<String>,
    /// Lines of stdout with one of these are copied to a file of the attempt.
    pub out_filters: Vec<String>,
    /// The same for stderr.
    pub err_filters: Vec<String>,
    /// Bind each rank to the processors of a NUMA node.
    pub numa: bool,
    /// Each rank is its own local rank 0, with a device of its own.
    pub devices: Option<VisibleDevices>,
}

impl Default for TorchrunOptions {
    fn default() -> Self {
        TorchrunOptions {
            signals: SIGNALS.to_vec(),
            shown: None,
            prefix_template: None,
            out_filters: Vec::new(),
            err_filters: Vec::new(),
            numa: false,
            devices: None,
        }
    }
}

impl TorchrunOptions {
    /// Whether the rank's output reaches the terminal.
    pub fn shows(&self, local_rank: usize) -> bool {
        self.shown
            .as_ref()
            .is_none_or(|shown| shown.contains(&local_rank))
    }

    /// The value of `TORCHELASTIC_SIGNALS_TO_HANDLE`.
    pub fn signal_names(&self) -> String {
        let names: Vec<String> = self.signals.iter().map(|s| signal_name(*s)).collect();
        names.join(",")
    }
}

/// Parses `--signals-to-handle`.
///
/// # Errors
/// Why it is none.
pub fn signals(text: &str) -> std::result::Result<Vec<i32>, String> {
    let mut signals = Vec::new();
    for name in text.split(',').map(str::trim).filter(|n| !n.is_empty()) {
        let signal = (1..=31)
            .find(|signal| signal_name(*signal) == name)
            .ok_or_else(|| format!("there is no signal {name}; names look like SIGTERM"))?;
        if FORBIDDEN.contains(&signal) {
            return Err(format!("no program can handle {name}"));
        }
        if !signals.contains(&signal) {
            signals.push(signal);
        }
    }
    match signals.is_empty() {
        true => Err("it names no signal".to_owned()),
        false => Ok(signals),
    }
}

/// Parses `--local-ranks-filter`.
///
/// # Errors
/// Why it is none.
pub fn ranks_filter(
    text: &str,
    local_ranks: usize,
) -> std::result::Result<BTreeSet<usize>, String> {
    let ranks = text.split(',').map(|rank| rank.trim().parse());
    let ranks: BTreeSet<usize> = ranks
        .collect::<std::result::Result<_, _>>()
        .map_err(|_| "local ranks are expected, as in 0,1".to_owned())?;
    match ranks.range(..local_ranks).next() {
        Some(_) => Ok(ranks),
        None => Err(format!(
            "none of the {local_ranks} ranks on this node is in it; they count from 0"
        )),
    }
}

/// The texts of `--duplicate-stdout-filters`: a comma separates, two are one comma of a text.
pub fn line_filters(text: &str) -> Vec<String> {
    let mut filters = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let is_separator = c == ',' && chars.next_if_eq(&',').is_none();
        match filters.last_mut() {
            Some(last) if !is_separator => last.push(c),
            _ => filters.push(String::new()),
        }
    }
    // An empty text is in every line.
    filters.retain(|filter| !filter.is_empty());
    filters
}

/// Fills `${name}` and `$name` in; `$$` is a dollar sign, and other names stay, as with Python's
/// `Template.safe_substitute`.
pub fn fill_in(template: &str, value: impl Fn(&str) -> Option<String>) -> String {
    let is_name = |c: char| c == '_' || c.is_ascii_alphanumeric();
    let mut out = String::new();
    let mut rest = template;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if let Some(later) = after.strip_prefix('$') {
            out.push('$');
            rest = later;
            continue;
        }
        let braced = after.strip_prefix('{').and_then(|a| a.split_once('}'));
        let (name, later) = braced
            .unwrap_or_else(|| after.split_at(after.find(|c| !is_name(c)).unwrap_or(after.len())));
        match value(name) {
            Some(value) => {
                out.push_str(&value);
                rest = later;
            }
            None => {
                out.push('$');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

/// The device that each local rank sees as its first with `--virtual-local-rank`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VisibleDevices {
    devices: Vec<String>,
    is_hip: bool,
}

impl VisibleDevices {
    /// One device for each of the ranks: of those that the environment shows, else by number.
    ///
    /// # Errors
    /// Usage, when the environment shows fewer devices than there are ranks.
    pub fn new(env: &Env, local_ranks: usize) -> Result<Self> {
        let hip = text(env, "HIP_VISIBLE_DEVICES");
        let (name, shown) = match hip {
            Some(shown) => ("HIP_VISIBLE_DEVICES", Some(shown)),
            None => (
                "CUDA_VISIBLE_DEVICES",
                env.get("CUDA_VISIBLE_DEVICES").map(String::as_str),
            ),
        };
        let devices: Vec<String> = match shown {
            Some(shown) => shown.split(',').map(|d| d.trim().to_owned()).collect(),
            None => (0..local_ranks).map(|rank| rank.to_string()).collect(),
        };
        if devices.len() < local_ranks {
            refuse!(
                "--virtual-local-rank needs a device for each of the {local_ranks} ranks, and {name} has {}",
                devices.len()
            );
        }
        Ok(VisibleDevices {
            devices,
            is_hip: hip.is_some(),
        })
    }

    /// The variables of one rank.
    pub fn variables(&self, local_rank: usize) -> Vec<(OsString, OsString)> {
        let device = self.devices.get(local_rank).map_or("", String::as_str);
        let mut variables = vec![("LOCAL_RANK", "0"), ("CUDA_VISIBLE_DEVICES", device)];
        if self.is_hip {
            variables.push(("HIP_VISIBLE_DEVICES", device));
        }
        let owned = |text: &str| OsStr::new(text).to_owned();
        let variables = variables.into_iter();
        variables
            .map(|(name, value)| (owned(name), owned(value)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::tests::env_of as env;

    #[test]
    fn signals_by_name() {
        assert_eq!(signals("SIGTERM, SIGUSR1,SIGTERM").unwrap(), [15, 10]);
        let default = TorchrunOptions::default();
        assert_eq!(default.signal_names(), "SIGTERM,SIGINT,SIGHUP,SIGQUIT");
        for (text, want) in [
            ("SIGNONE", "no signal SIGNONE"),
            ("TERM", "no signal TERM"),
            ("SIGKILL", "no program can handle SIGKILL"),
            ("", "names no signal"),
        ] {
            assert!(signals(text).unwrap_err().contains(want), "{text}");
        }
    }

    #[test]
    fn ranks_that_are_shown() {
        assert_eq!(ranks_filter("0, 2", 3).unwrap(), BTreeSet::from([0, 2]));
        // Nodes may have different numbers of ranks.
        assert!(ranks_filter("0,7", 2).is_ok());
        for text in ["", "x", "0,", "2", "-1"] {
            assert!(ranks_filter(text, 2).is_err(), "{text}");
        }
        let options = TorchrunOptions {
            shown: Some(BTreeSet::from([1])),
            ..TorchrunOptions::default()
        };
        assert!(!options.shows(0) && options.shows(1));
    }

    #[test]
    fn two_commas_are_one_of_the_text() {
        assert_eq!(line_filters("apple,orange"), ["apple", "orange"]);
        assert_eq!(line_filters("a,,b,c"), ["a,b", "c"]);
        assert_eq!(line_filters(",a,"), ["a"]);
        assert!(line_filters("").is_empty());
    }

    #[test]
    fn templates_are_filled_as_by_python() {
        let value = |name: &str| match name {
            "rank" => Some("3".to_owned()),
            "role_name" => Some("r".to_owned()),
            _ => None,
        };
        for (template, want) in [
            ("[${role_name}${rank}]: ", "[r3]: "),
            ("$rank|$role_name", "3|r"),
            ("$$rank ${none} $none ${rank", "$rank ${none} $none ${rank"),
            ("5$", "5$"),
            ("", ""),
        ] {
            assert_eq!(fill_in(template, value), want, "{template}");
        }
    }

    #[test]
    fn each_rank_sees_one_device() {
        let of = |pairs: &[(&str, &str)], ranks, local: usize| {
            let devices = VisibleDevices::new(&env(pairs), ranks)?;
            let variables = devices.variables(local).into_iter();
            let variables = variables.map(|(n, v)| format!("{}={}", n.display(), v.display()));
            Ok::<_, crate::error::Error>(variables.collect::<Vec<_>>().join(" "))
        };
        assert_eq!(
            of(&[], 2, 1).unwrap(),
            "LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=1"
        );
        let cuda = [("CUDA_VISIBLE_DEVICES", "4,6")];
        assert_eq!(
            of(&cuda, 2, 1).unwrap(),
            "LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=6"
        );
        let error = of(&cuda, 3, 0).unwrap_err();
        assert!(error.chain().contains("CUDA_VISIBLE_DEVICES has 2"));
        let hip = [("HIP_VISIBLE_DEVICES", "7"), ("CUDA_VISIBLE_DEVICES", "4")];
        assert_eq!(
            of(&hip, 1, 0).unwrap(),
            "LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=7 HIP_VISIBLE_DEVICES=7"
        );
    }
}
