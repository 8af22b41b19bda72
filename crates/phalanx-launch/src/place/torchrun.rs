//! torchrun's settings of nodes: flags, and the `PET_*` variables that stand for them.

use std::time::Duration;

use phalanx_comm::{MAX_LOCAL_RANKS, PortRange};

use super::{Address, Env, RANKS_PER_NODE, text};
use crate::contract::PORTS_VARIABLE;
use crate::error::{Error, Result};
use crate::flags::{NodeFlags, count_with};
use crate::gpus;

/// The most launchers in one job (the store serves 4096 clients).
const MAX_NODES: usize = 1024;

/// The least bound of a silence that is a loss, in seconds: some heartbeats may be late.
const SHORTEST_LOSS: Duration = Duration::from_secs(1);

/// The text of a setting, and the flag or variable that it comes from, for messages.
pub struct Setting<'a> {
    pub text: &'a str,
    pub name: String,
}

/// The flag's text, else that of its `PET_*` variable.
pub fn setting<'a>(env: &'a Env, flag: &str, typed: &'a Option<String>) -> Option<Setting<'a>> {
    if let Some(text) = typed {
        let name = format!("--{flag}");
        return Some(Setting { text, name });
    }
    let name = format!("PET_{}", flag.replace('-', "_").to_uppercase());
    variable(env, &name)
}

/// A variable's text.
pub fn variable<'a>(env: &'a Env, name: &str) -> Option<Setting<'a>> {
    let name = name.to_owned();
    text(env, &name).map(|text| Setting { text, name })
}

/// Whether a flag without a value is typed, or its variable is set and not 0 or false.
pub fn switch(env: &Env, flag: &str, typed: bool) -> bool {
    typed || setting(env, flag, &None).is_some_and(|s| !matches!(s.text, "0" | "false"))
}

impl Setting<'_> {
    pub fn wrong(&self, why: &str) -> Error {
        Error::usage(format!("{} cannot be \"{}\": {why}", self.name, self.text))
    }

    pub fn number<T: std::str::FromStr>(&self, what: &str) -> Result<T> {
        self.text.trim().parse().map_err(|_| self.wrong(what))
    }

    pub fn seconds(&self, most: f64) -> Result<Duration> {
        let seconds: f64 = self.number("not a number of seconds")?;
        match (0.0..=most).contains(&seconds) {
            true => Ok(Duration::from_secs_f64(seconds)),
            false => Err(self.wrong(&format!("not between 0 and {most} seconds"))),
        }
    }

    /// Seconds from [`SHORTEST_LOSS`].
    pub fn lost_after(&self) -> Result<Duration> {
        let seconds = self.seconds(86_400.0)?;
        match seconds >= SHORTEST_LOSS {
            true => Ok(seconds),
            false => Err(self.wrong("not from 1 to 86400 seconds")),
        }
    }

    /// A port; on one node 0 stands for any free one.
    pub fn port(&self, is_one_node: bool) -> Result<Option<u16>> {
        match self.number("not a port (1 to 65535)")? {
            0 if is_one_node => Ok(None),
            0 => Err(self.wrong("not a port (1 to 65535)")),
            port => Ok(Some(port)),
        }
    }

    /// The number of ranks of `--nproc-per-node`; `cores` is what `auto` means.
    pub fn ranks(&self, cores: usize) -> Result<usize> {
        let count = count_with(self.text, cores, || gpus().len()).map_err(|why| self.wrong(why))?;
        match (1..=MAX_LOCAL_RANKS).contains(&count) {
            true => Ok(count),
            false => Err(self.wrong(&format!("not between 1 and {MAX_LOCAL_RANKS}"))),
        }
    }

    /// The number of nodes of `--nnodes`, or the fewest and the most: `MIN:MAX`.
    pub fn nodes(&self) -> Result<(usize, usize)> {
        let what = "not a number of nodes";
        let (low, high) = match self.text.split_once(':') {
            None => {
                let count: usize = self.number(what)?;
                (count, count)
            }
            Some((low, high)) => match (low.trim().parse(), high.trim().parse()) {
                (Ok(low), Ok(high)) => (low, high),
                _ => return Err(self.wrong(what)),
            },
        };
        if low > high || low == 0 || high > MAX_NODES {
            return Err(self.wrong(&format!(
                "not between 1 and {MAX_NODES}, the smaller one first"
            )));
        }
        Ok((low, high))
    }
}

/// The number of ranks on this node: typed, else `PET_NPROC_PER_NODE`, else what an engine's variable says (0 on a node without
/// GPUs), else one. `cores` is what `auto` means.
pub fn local_ranks(env: &Env, typed: &Option<String>, cores: usize) -> Result<usize> {
    let of_engines = [RANKS_PER_NODE, "DSTACK_GPUS_PER_NODE"];
    let mut by_engine = of_engines.iter().filter_map(|name| variable(env, name));
    setting(env, "nproc-per-node", typed)
        .or_else(|| by_engine.find(|setting| setting.text != "0"))
        .map_or(Ok(1), |setting| setting.ranks(cores))
}

impl NodeFlags {
    /// The ports for other hosts, if they are limited.
    ///
    /// # Errors
    /// `Usage`, naming the flag or variable.
    pub fn port_range(&self, env: &Env) -> Result<Option<PortRange>> {
        let setting = setting(env, "port-range", &self.port_range);
        let setting = setting.or_else(|| variable(env, PORTS_VARIABLE));
        let range = setting.map(|setting| {
            let range = setting.text.parse();
            range.map_err(|_| setting.wrong("not FIRST-LAST, as in 20000-20031"))
        });
        range.transpose()
    }

    /// Host and port of `--master-addr`, `--master-port` and `--rdzv-endpoint`. On one node port 0 is a free one.
    pub fn address(
        &self,
        endpoint: &Option<String>,
        env: &Env,
        is_one_node: bool,
    ) -> Result<Address> {
        // An IPv6 address may be in brackets.
        let bare = |host: &str| host.trim_matches(['[', ']']).to_owned();
        let port = |setting: Setting<'_>| setting.port(is_one_node);
        let mut found = Address {
            host: setting(env, "master-addr", &self.master_addr).map(|s| bare(s.text)),
            port: setting(env, "master-port", &self.master_port).map_or(Ok(None), port)?,
            ports: None,
        };
        if let Some(given) = setting(env, "rdzv-endpoint", endpoint) {
            let (name, number) = match given.text.rsplit_once(':') {
                // A bare IPv6 address is full of colons.
                Some((name, _)) if name.contains(':') && !name.ends_with(']') => (given.text, None),
                Some((name, number)) => (name, Some(number)),
                None => (given.text, None),
            };
            let contradicts = |flag: &str, typed: &str| {
                Error::usage(format!(
                    "{flag} {typed} and --rdzv-endpoint {} contradict each other; give one of them",
                    given.text
                ))
            };
            let is_typed = endpoint.is_some();
            if let Some(text) = number {
                let name = given.name.clone();
                let number = port(Setting { text, name })?;
                found.port = found.port.or(number);
                if let Some(typed) = self.master_port.as_deref()
                    && is_typed
                    && typed != text
                {
                    return Err(contradicts("--master-port", typed));
                }
            }
            let name = bare(name);
            if let Some(typed) = self.master_addr.as_deref()
                && is_typed
                && bare(typed) != name
            {
                return Err(contradicts("--master-addr", typed));
            }
            found.host.get_or_insert(name);
        }
        let is_no_name = |host: &String| host.is_empty() || host.contains(char::is_whitespace);
        match found.host.as_ref().is_some_and(is_no_name) {
            true => Err(Error::usage("--master-addr is not a host name")),
            false => Ok(found),
        }
    }
}

/// The value of `--rdzv-conf`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RendezvousConf {
    /// How long to wait for the other nodes.
    pub timeout: Option<Duration>,
    /// How long to wait for more nodes than the fewest.
    pub last_call: Option<Duration>,
    /// Whether this launcher hosts the store.
    pub is_host: Option<bool>,
}

/// The keys that change nothing here: the store has limits of its own.
const WITHOUT_EFFECT: [&str; 5] = [
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "read_timeout",
];

/// Parses `--rdzv-conf`.
///
/// # Errors
/// Why it is none.
pub fn rendezvous_conf(text: &str) -> std::result::Result<RendezvousConf, String> {
    let mut conf = RendezvousConf::default();
    for item in text.split(',').map(str::trim).filter(|i| !i.is_empty()) {
        let (key, value) = item
            .split_once('=')
            .map(|(key, value)| (key.trim(), value.trim()))
            .filter(|(_, value)| !value.is_empty())
            .ok_or_else(|| format!("{item} has no value; KEY=VALUE is expected"))?;
        let seconds = || {
            let number = value.parse::<u32>().ok();
            number.ok_or_else(|| format!("{key} is a whole number of seconds"))
        };
        match key {
            // torchrun reads one of them with static, the other with c10d.
            "timeout" | "join_timeout" => {
                conf.timeout = Some(Duration::from_secs(seconds()?.into()));
            }
            "last_call_timeout" => {
                conf.last_call = Some(Duration::from_secs(seconds()?.into()));
            }
            "is_host" => conf.is_host = Some(yes_or_no(value).ok_or("is_host is true or false")?),
            "store_type" if value.eq_ignore_ascii_case("tcp") => {}
            "store_type" => return Err("store_type can only be tcp".to_owned()),
            key if WITHOUT_EFFECT.contains(&key) => {
                seconds()?;
            }
            key => {
                return Err(format!(
                    "there is no key {key}; known are timeout, join_timeout, last_call_timeout and is_host, and without effect {} and store_type",
                    WITHOUT_EFFECT.join(", ")
                ));
            }
        }
    }
    Ok(conf)
}

fn yes_or_no(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" => Some(true),
        "0" | "false" | "f" | "no" | "n" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rendezvous_conf_acts_or_names_the_known_keys() {
        let conf = rendezvous_conf("last_call_timeout=0").unwrap();
        assert_eq!(conf.last_call, Some(Duration::ZERO));
        let conf = rendezvous_conf("join_timeout=9, is_host=True,read_timeout=60").unwrap();
        assert_eq!(conf.timeout, Some(Duration::from_secs(9)));
        assert_eq!(conf.is_host, Some(true));
        let conf = rendezvous_conf("timeout=900,is_host=0,store_type=TCP").unwrap();
        assert_eq!(conf.timeout, Some(Duration::from_secs(900)));
        assert_eq!(conf.is_host, Some(false));
        assert_eq!(rendezvous_conf("").unwrap(), RendezvousConf::default());
        for (text, want) in [
            ("tiemout=9", "known are timeout, join_timeout, "),
            ("timeout", "timeout has no value"),
            ("timeout=", "timeout= has no value"),
            ("timeout=soon", "whole number of seconds"),
            ("read_timeout=x", "whole number of seconds"),
            ("is_host=perhaps", "true or false"),
            ("store_type=file", "only be tcp"),
        ] {
            let error = rendezvous_conf(text).unwrap_err();
            assert!(error.contains(want), "{text}: {error}");
        }
    }
}
