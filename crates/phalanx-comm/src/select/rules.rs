//! User rules: a method for an operation and a range of sizes.

use crate::plan::{Collective, Method};
use crate::{Error, Result};

/// The environment variable with rules for a job.
pub(crate) const VARIABLE: &str = "PHALANX_ALGORITHM";

/// What may be prescribed, by the names used in rules and options.
const NAMES: [(&str, Method); 16] = [
    ("direct", Method::AllReduceDirect),
    ("one-round", Method::AllReduceOneRound),
    ("ring", Method::AllReduceRing),
    ("rails", Method::AllReduceRails),
    ("hierarchical", Method::AllReduceRails),
    ("chain", Method::AllReduceChain),
    ("tree", Method::BroadcastTree),
    ("scatter", Method::BroadcastScatter),
    ("hosts", Method::BroadcastHosts),
    ("direct", Method::AllGather),
    ("hosts", Method::AllGatherHosts),
    ("root", Method::ReduceRoot),
    ("owners", Method::ReduceOwners),
    ("hosts", Method::ReduceHosts),
    ("direct", Method::ReduceScatter),
    ("hosts", Method::ReduceScatterHosts),
];

/// One rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    method: Method,
    /// Inclusive.
    from_bytes: usize,
    /// Inclusive.
    to_bytes: usize,
}

/// Which method carries out which operation in which range of sizes, e.g.
/// `all_reduce=ring:1MiB-,broadcast=tree`. If several rules apply, the last one counts.
/// All ranks must have the same rules.
///
/// ```
/// use phalanx_comm::Rules;
/// let rules: Rules = "all_reduce=one-round:-4KiB, all_reduce=ring:1MiB-".parse().unwrap();
/// assert_eq!(rules.to_string(), "all_reduce=one-round:-4096,all_reduce=ring:1048576-");
/// assert!("all_reduce=rings".parse::<Rules>().is_err());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    rules: Vec<Rule>,
}

impl Rules {
    /// The method prescribed, if one is.
    pub fn method(&self, collective: Collective, bytes: usize) -> Option<Method> {
        self.rules
            .iter()
            .rev()
            .find(|rule| {
                rule.method.collective() == collective
                    && (rule.from_bytes..=rule.to_bytes).contains(&bytes)
            })
            .map(|rule| rule.method)
    }

    /// Whether nothing is prescribed.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// What the environment prescribes.
    pub(crate) fn from_env() -> Result<Rules> {
        match std::env::var(VARIABLE) {
            Ok(text) => text
                .parse()
                .map_err(|e: Error| Error::usage(format!("{VARIABLE}: {}", e.message()))),
            Err(std::env::VarError::NotPresent) => Ok(Rules::default()),
            Err(e) => Err(Error::usage(format!("{VARIABLE}: {e}"))),
        }
    }

    /// These rules followed by `others`, which take precedence.
    #[must_use]
    pub(crate) fn then(mut self, others: Rules) -> Rules {
        self.rules.extend(others.rules);
        self
    }
}

impl std::str::FromStr for Rules {
    type Err = Error;

    fn from_str(text: &str) -> Result<Rules> {
        let parts = text.split(',').map(str::trim).filter(|t| !t.is_empty());
        let rules = parts.map(parse_rule).collect::<Result<_>>()?;
        Ok(Rules { rules })
    }
}

impl std::fmt::Display for Rules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, rule) in self.rules.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            let name = NAMES.iter().find(|(_, method)| *method == rule.method);
            let name = name.map_or("", |(name, _)| name);
            write!(f, "{comma}{}={name}", rule.method.collective().name())?;
            match (rule.from_bytes, rule.to_bytes) {
                (0, usize::MAX) => {}
                (0, to) => write!(f, ":-{to}")?,
                (from, usize::MAX) => write!(f, ":{from}-")?,
                (from, to) => write!(f, ":{from}-{to}")?,
            }
        }
        Ok(())
    }
}

fn parse_rule(text: &str) -> Result<Rule> {
    let wrong = |what: String| {
        Error::usage(format!(
            "{text:?} is not a rule: {what}; examples: all_reduce=ring:1MiB-, broadcast=tree:-64KiB"
        ))
    };
    let (operation, rest) = text
        .split_once('=')
        .ok_or_else(|| wrong("it has no \"=\"".into()))?;
    let (name, range) = rest.split_once(':').unwrap_or((rest, "-"));
    let operation = operation.trim().replace('-', "_");
    let name = name.trim().replace('_', "-");
    let methods = || {
        NAMES
            .iter()
            .filter(|(_, method)| method.collective().name() == operation)
    };
    let method = methods().find(|(n, _)| *n == name);
    let Some((_, method)) = method else {
        let known: Vec<&str> = methods().map(|(n, _)| *n).collect();
        return Err(wrong(if known.is_empty() {
            format!(
                "there is no choice for {operation:?}, only for all_reduce, broadcast, all_gather, \
                 reduce and reduce_scatter"
            )
        } else {
            format!("{operation} is done by {}, not {name:?}", known.join(", "))
        }));
    };
    let (from, to) = range
        .split_once('-')
        .ok_or_else(|| wrong(format!("{range:?} is not a range of sizes")))?;
    let size = |text: &str, open: usize| match text.trim() {
        "" => Ok(open),
        text => parse_bytes(text).ok_or_else(|| wrong(format!("{text:?} is not a size"))),
    };
    let rule = Rule {
        method: *method,
        from_bytes: size(from, 0)?,
        to_bytes: size(to, usize::MAX)?,
    };
    if rule.from_bytes > rule.to_bytes {
        return Err(wrong(format!("{range:?} is empty")));
    }
    Ok(rule)
}

/// `4096`, `64KiB`, `1MiB`, `1GiB`; units may be cut to one letter.
fn parse_bytes(text: &str) -> Option<usize> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return None,
    };
    number.parse::<usize>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_rule_that_applies_counts() {
        let rules: Rules = "all-reduce=direct,all_reduce=ring:1MiB-,reduce=owners:-64k"
            .parse()
            .unwrap();
        let all_reduce = |bytes| rules.method(Collective::AllReduce, bytes);
        assert_eq!(all_reduce(4), Some(Method::AllReduceDirect));
        assert_eq!(all_reduce(1 << 20), Some(Method::AllReduceRing));
        assert_eq!(all_reduce((1 << 20) - 1), Some(Method::AllReduceDirect));
        assert_eq!(
            rules.method(Collective::Reduce, 64 << 10),
            Some(Method::ReduceOwners)
        );
        assert_eq!(rules.method(Collective::Reduce, (64 << 10) + 1), None);
        assert_eq!(rules.method(Collective::Broadcast, 0), None);
        let again: Rules = rules.to_string().parse().unwrap();
        assert_eq!(again, rules);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, expected) in [
            ("ring", "no \"=\""),
            ("all_reduce=circle", "ring"),
            ("barrier=ring", "only for all_reduce"),
            ("all_reduce=ring:1MiB", "not a range"),
            ("all_reduce=ring:1x-", "not a size"),
            ("all_reduce=ring:2k-1k", "empty"),
            ("all_reduce=ring:99999999999999999999-", "not a size"),
        ] {
            let error = text.parse::<Rules>().unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Usage);
            assert!(error.to_string().contains(expected), "{error}");
        }
        assert!("".parse::<Rules>().unwrap().is_empty());
    }
}
