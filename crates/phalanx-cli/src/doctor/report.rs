//! The report as text and as JSON.

use std::fmt::Write as _;

use phalanx_comm::format_ranks;
use serde::Serialize;
use serde_json::{Value, json};

use super::check::{Check, Status};
use super::pairs::Pair;
use crate::format::plural;
use crate::units::time;

/// The most pairs that are listed; more are a matrix, and still more only the slowest.
const LISTED_PAIRS: usize = 10;
const MATRIX: usize = 12;
/// The first column of a check's text.
const INDENT: usize = 27;

/// What was found on one host.
#[derive(Clone, Debug, Serialize)]
pub struct HostReport {
    pub name: String,
    pub address: Option<String>,
    pub ranks: Vec<usize>,
    pub checks: Vec<Check>,
}

/// All that was found.
#[derive(Clone, Debug)]
pub struct Report {
    pub world: usize,
    /// That of rank 0 first.
    pub hosts: Vec<HostReport>,
    pub job: Vec<Check>,
    pub pairs: Vec<Pair>,
}

impl Report {
    /// The number of checks that ended so.
    pub fn count(&self, status: Status) -> usize {
        let hosts = self.hosts.iter().flat_map(|host| &host.checks);
        let all = hosts.chain(&self.job);
        all.filter(|check| check.status == status).count()
    }

    pub fn json(&self) -> Value {
        json!({
            "format": 1,
            "phalanx": env!("CARGO_PKG_VERSION"),
            "ranks": self.world,
            "problems": self.count(Status::Problem),
            "warnings": self.count(Status::Warning),
            "hosts": self.hosts,
            "job": self.job,
            "pairs": self.pairs,
        })
    }

    /// All lines of the first host; of the others, what is not ok.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (index, host) in self.hosts.iter().enumerate() {
            let address = host.address.as_ref().filter(|a| **a != host.name);
            let address = address.map_or(String::new(), |address| format!(" ({address})"));
            let ranks = match self.world {
                1 => String::new(),
                _ => format!(", {}", format_ranks(&host.ranks)),
            };
            let _ = writeln!(text, "Host {}{address}{ranks}", host.name);
            let is_shown = |check: &&Check| index == 0 || check.status > Status::Ok;
            for check in host.checks.iter().filter(is_shown) {
                line(&mut text, check);
            }
            if index > 0 {
                let fine = host.checks.iter().filter(|c| c.status == Status::Ok);
                let others = plural(fine.count(), "check");
                let _ = writeln!(text, "  ok       {others}");
            }
            text.push('\n');
        }
        if !self.job.is_empty() {
            text.push_str("Job\n");
            self.job.iter().for_each(|check| line(&mut text, check));
            text.push('\n');
        }
        self.pairs_text(&mut text);
        let count = |status, what| match self.count(status) {
            0 => format!("no {what}s"),
            n => plural(n, what),
        };
        let _ = writeln!(
            text,
            "{}, {}",
            count(Status::Problem, "problem"),
            count(Status::Warning, "warning")
        );
        text
    }

    /// The rank, with its host where there are several.
    fn label(&self, rank: usize) -> String {
        let host = self.hosts.iter().find(|host| host.ranks.contains(&rank));
        match host {
            Some(host) if self.hosts.len() > 1 => format!("{rank} on {}", host.name),
            _ => rank.to_string(),
        }
    }

    fn pairs_text(&self, text: &mut String) {
        let mut members: Vec<usize> = self.pairs.iter().flat_map(|p| [p.from, p.to]).collect();
        members.sort_unstable();
        members.dedup();
        if self.pairs.is_empty() {
            return;
        }
        if self.pairs.len() > LISTED_PAIRS && members.len() <= MATRIX {
            self.matrix(text, &members);
            return;
        }
        let mut shown: Vec<&Pair> = self.pairs.iter().collect();
        let mut title = "Ranks".to_owned();
        if shown.len() > LISTED_PAIRS {
            shown.sort_by(|a, b| a.gb_per_s.total_cmp(&b.gb_per_s));
            shown.truncate(LISTED_PAIRS);
            title = format!("Slowest of {}", plural(self.pairs.len(), "pair"));
        }
        let labels: Vec<String> = shown
            .iter()
            .map(|pair| format!("{} and {}", self.label(pair.from), self.label(pair.to)))
            .collect();
        let widest = labels.iter().map(|label| label.chars().count() + 2);
        let width = widest.max().unwrap_or(0).max(title.chars().count());
        let _ = writeln!(
            text,
            "{title:<width$}  {:<9} {:>11} {:>12}",
            "transport", "latency", "bandwidth"
        );
        for (label, pair) in labels.iter().zip(shown) {
            let label = format!("  {label}");
            let _ = writeln!(
                text,
                "{label:<width$}  {:<9} {:>11} {:>12}",
                pair.transport,
                time(pair.latency_us),
                format!("{:.2} GB/s", pair.gb_per_s)
            );
        }
        text.push('\n');
    }

    /// Bandwidth above the diagonal, latency below it.
    fn matrix(&self, text: &mut String, members: &[usize]) {
        text.push_str("Ranks: GB/s above the diagonal, latency in µs below it\n");
        let _ = write!(text, "{:>6}", "");
        for rank in members {
            let _ = write!(text, " {rank:>7}");
        }
        text.push('\n');
        for row in members {
            let _ = write!(text, "{row:>6}");
            for column in members {
                let ends = (*row.min(column), *row.max(column));
                let pair = self.pairs.iter().find(|p| (p.from, p.to) == ends);
                let cell = match pair {
                    None => "-".to_owned(),
                    Some(pair) if row < column => format!("{:.2}", pair.gb_per_s),
                    Some(pair) => format!("{:.1}", pair.latency_us),
                };
                let _ = write!(text, " {cell:>7}");
            }
            text.push('\n');
        }
        text.push('\n');
    }
}

fn line(text: &mut String, check: &Check) {
    let status = match check.status {
        Status::Ok => "ok",
        Status::Warning => "warning",
        Status::Problem => "PROBLEM",
    };
    let name = check.name.replace('_', " ");
    let _ = writeln!(text, "  {status:<8} {name:<15} {}", check.found);
    if let Some(fix) = &check.fix {
        let _ = writeln!(text, "{:INDENT$}fix: {fix}", "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(world: usize) -> Report {
        let pairs = (0..world).flat_map(|from| (from + 1..world).map(move |to| (from, to)));
        Report {
            world,
            hosts: vec![
                HostReport {
                    name: "a".into(),
                    address: None,
                    ranks: vec![0],
                    checks: vec![Check::ok("open_files", "1024")],
                },
                HostReport {
                    name: "b".into(),
                    address: Some("10.0.0.2".into()),
                    ranks: (1..world).collect(),
                    checks: vec![
                        Check::problem("open_files", "9", "ulimit"),
                        Check::ok("gpu", "none"),
                    ],
                },
            ],
            job: Vec::new(),
            pairs: pairs
                .map(|(from, to)| Pair {
                    from,
                    to,
                    transport: "tcp".into(),
                    latency_us: 12.34,
                    gb_per_s: 1.0 + from as f64,
                })
                .collect(),
        }
    }

    #[test]
    fn columns_line_up() {
        let text = report(2).text();
        let expected = "\
Host a, rank 0
  ok       open files      1024

Host b (10.0.0.2), rank 1
  PROBLEM  open files      9
                           fix: ulimit
  ok       1 check

Ranks                transport     latency    bandwidth
  0 on a and 1 on b  tcp           12.3 µs    1.00 GB/s

1 problem, no warnings
";
        assert_eq!(text, expected, "{text}");
        let json = report(2).json();
        assert_eq!(
            (&json["problems"], &json["warnings"]),
            (&json!(1), &json!(0))
        );
        assert_eq!(json["hosts"][1]["checks"][0]["status"], "problem");
        assert_eq!(json["hosts"][0]["checks"][0].get("fix"), None);
    }

    #[test]
    fn many_pairs_become_a_matrix_and_then_the_slowest() {
        let text = report(6).text();
        assert!(text.contains("diagonal"), "{text}");
        let row = text.lines().find(|line| line.starts_with("     1 "));
        let cells: Vec<&str> = row.unwrap().split_whitespace().collect();
        assert_eq!(cells, ["1", "12.3", "-", "2.00", "2.00", "2.00", "2.00"]);
        let text = report(13).text();
        assert!(text.contains("Slowest of 78 pairs"), "{text}");
        assert_eq!(text.matches("1.00 GB/s").count(), 10, "{text}");
    }

    #[test]
    fn lists_of_ranks() {
        assert_eq!(format_ranks(&[3]), "rank 3");
        assert_eq!(format_ranks(&[0, 1]), "ranks 0, 1");
        assert_eq!(format_ranks(&[0, 1, 2, 5]), "ranks 0-2, 5");
    }
}
