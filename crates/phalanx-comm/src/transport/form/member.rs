//! What each rank publishes about itself while a group forms.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::Transport;
use super::host::Host;
use crate::wait::Share;
use phalanx_base::host_name;

pub(crate) const TITLE: &str = "phalanx-comm member 6";
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Member {
    /// Random: two processes that claim one rank differ in it.
    pub(crate) instance: u64,
    /// The process, for messages: "process 4711 on node7".
    pub(crate) process: String,
    pub(crate) world: usize,
    pub(crate) prefer: Transport,
    pub(crate) host: Host,
    /// The cores it computes on.
    pub(crate) share: Share,
    /// Where it listens, unless it wants shared memory only.
    pub(crate) address: Option<SocketAddr>,
}

impl Member {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut record = format!("{TITLE}\n").into_bytes();
        // Writing to memory cannot fail.
        let _ = serde_json::to_writer(&mut record, self);
        record
    }

    /// The error says what is wrong with the record.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Member, String> {
        if bytes.len() > MAX_BYTES {
            return Err(format!("its record has {} bytes", bytes.len()));
        }
        let record = bytes.strip_prefix(TITLE.as_bytes()).ok_or_else(|| {
            format!("its record is not a {TITLE:?}: run the same version everywhere")
        })?;
        serde_json::from_slice(record).map_err(|e| format!("its record is garbled: {e}"))
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
            prefer: Transport::Auto,
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
            prefer: Transport::Shm,
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
        for end in 0..good.len() {
            assert!(Member::decode(&good[..end]).is_err(), "{end}");
        }
        assert!(Member::decode(b"\xff\xfe").is_err());
        assert!(Member::decode(&vec![b'a'; 5000]).is_err());
        let text = String::from_utf8(good).unwrap();
        assert!(Member::decode(text.replace("\"auto\"", "\"x\"").as_bytes()).is_err());
        assert!(Member::decode(text.replace("\"world\":4", "\"world\":-4").as_bytes()).is_err());
        assert!(Member::decode(text.replace("2 threads", "0 threads").as_bytes()).is_err());
    }
}
