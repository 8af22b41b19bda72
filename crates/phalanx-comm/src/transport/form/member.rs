//! What each rank publishes about itself while a group forms.

use std::net::SocketAddr;

use super::Prefer;
use super::host::Host;
use crate::wait::Share;
use phalanx_base::host_name;

pub(crate) const TITLE: &str = "phalanx-comm member 5";
/// Longest record that is read; ours have about 300 bytes, up to 3000 more when
/// a rank may use every other core of a thousand.
const MAX_BYTES: usize = 4096;

/// This process as [`Member::process`] names it.
pub(crate) fn this_process() -> String {
    let id = std::process::id();
    // The name is written on its own line, and the kernel allows any bytes in it.
    let host = host_name().replace(char::is_control, "");
    format!("process {id} on {host}")
}

/// One rank's record, as lines `name=value`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Random: two processes that claim one rank differ in it.
    pub(crate) instance: u64,
    /// The process, for messages: "process 4711 on node7".
    pub(crate) process: String,
    pub(crate) world: usize,
    pub(crate) prefer: Prefer,
    pub(crate) host: Host,
    /// The cores it computes on.
    pub(crate) share: Share,
    /// Where it listens, unless it wants shared memory only.
    pub(crate) address: Option<SocketAddr>,
}

impl Member {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let address = self.address.map(|a| a.to_string()).unwrap_or_default();
        format!(
            "{TITLE}\ninstance={:016x}\nprocess={}\nworld={}\nprefer={}\nmachine={}\nhint={}\nshare={}\naddress={address}\n",
            self.instance,
            self.process,
            self.world,
            self.prefer.name(),
            self.host.machine,
            self.host.hint,
            self.share.encode(),
        )
        .into_bytes()
    }

    /// Parses a record; the error describes what is wrong with it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Member, String> {
        if bytes.len() > MAX_BYTES {
            return Err(format!("its record has {} bytes", bytes.len()));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| "its record is not text")?;
        let mut lines = text.lines();
        if lines.next() != Some(TITLE) {
            return Err(format!(
                "its record is not a {TITLE:?}: run the same version everywhere"
            ));
        }
        let mut field = |name: &str| {
            lines
                .next()
                .and_then(|line| line.strip_prefix(name)?.strip_prefix('='))
                .map(str::to_owned)
                .ok_or_else(|| format!("its record has no {name} where one belongs"))
        };
        let instance = u64::from_str_radix(&field("instance")?, 16);
        let process = field("process")?;
        let world = field("world")?.parse();
        let prefer = Prefer::parse(&field("prefer")?);
        let host = Host {
            machine: field("machine")?,
            hint: field("hint")?,
        };
        let share = Share::decode(&field("share")?);
        let address = Some(field("address")?)
            .filter(|a| !a.is_empty())
            .map(|a| a.parse());
        Ok(Member {
            instance: instance.map_err(|e| format!("instance: {e}"))?,
            process,
            world: world.map_err(|e| format!("world: {e}"))?,
            prefer: prefer.ok_or("it prefers an unknown transport")?,
            host,
            share: share?,
            address: address.transpose().map_err(|e| format!("address: {e}"))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member() -> Member {
        Member {
            instance: 0xfeed,
            process: this_process(),
            world: 4,
            prefer: Prefer::Auto,
            host: Host {
                machine: "b/1".to_owned(),
                hint: "b/1/0".to_owned(),
            },
            share: Share::here(2),
            address: Some("127.0.0.1:4000".parse().unwrap()),
        }
    }

    #[test]
    fn records_round_trip() {
        let with = member();
        assert_eq!(Member::decode(&with.encode()), Ok(with.clone()));
        let without = Member {
            address: None,
            prefer: Prefer::Shm,
            ..with
        };
        assert_eq!(Member::decode(&without.encode()), Ok(without));
    }

    #[test]
    fn the_fuzz_target_starts_from_records() {
        for seed in crate::transport::fuzzing::member_seeds() {
            assert!(Member::decode(&seed).is_ok());
        }
    }

    #[test]
    fn garbage_is_refused() {
        let good = member().encode();
        for end in 0..good.len() - 1 {
            // Cuts inside the last line may leave a shorter valid address.
            let cut = Member::decode(&good[..end]);
            assert!(
                cut.is_err() || cut.unwrap().address != member().address,
                "{end}"
            );
        }
        assert!(Member::decode(b"\xff\xfe").is_err());
        assert!(Member::decode(&vec![b'a'; 5000]).is_err());
        let text = String::from_utf8(good).unwrap();
        assert!(Member::decode(text.replace("prefer=auto", "prefer=x").as_bytes()).is_err());
        assert!(Member::decode(text.replace("world=4", "world=-4").as_bytes()).is_err());
        assert!(Member::decode(text.replace("2 threads", "0 threads").as_bytes()).is_err());
    }
}
