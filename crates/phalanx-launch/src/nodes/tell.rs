//! Tells the other nodes of a job why this one does not start, as they would wait for it until their deadline. It
//! is done once the error is on the terminal, and only while the nodes have not met.

use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_process::signals;
use phalanx_store::{Store, TcpServer, TcpStore};
use phalanx_wire::Token;

use super::attempts::attempt_key;
use super::{LAST_WORDS, NodeInfo, NodeStore, decode, left_key, meeting_store, node_key};
use crate::error::{Error, ErrorKind, Result};
use crate::flags::{LaunchCli, NodeFlags};
use crate::place::{Env, Meeting, NodeQuery, is_under_launcher, rank_place, real_env};
use crate::report::{JobFailure, taken_apart};
use crate::{lock, say, token};

/// How long this node tries to reach node 0, and node 0 keeps its store for nodes that come later.
const LIMIT: Duration = Duration::from_secs(10);
/// The longest message that is sent, in characters.
const LONGEST: usize = 4000;

/// The launcher of this process has reached the store: the other nodes know of it.
static HAS_JOINED: AtomicBool = AtomicBool::new(false);
/// Node 0's store, which holds the reason why the job does not start.
static KEPT: Mutex<Option<HeldStore>> = Mutex::new(None);

struct HeldStore {
    store: Arc<TcpStore>,
    _server: Option<Arc<TcpServer>>,
    nodes: usize,
}

/// From now on this launcher's errors reach the other nodes through the store.
pub(super) fn has_joined() {
    HAS_JOINED.store(true, Ordering::Relaxed);
}

/// Keeps the store of node 0 until [`tell`] is called.
pub(super) fn keep(store: Arc<TcpStore>, server: Option<Arc<TcpServer>>, nodes: usize) {
    *lock(&KEPT) = Some(HeldStore {
        store,
        _server: server,
        nodes,
    });
}

/// Tells the other nodes of the error that ends this process, if it is the launcher of one of several nodes which
/// have not met. *Blocks* for at most [`LIMIT`].
pub fn tell(error: &Error) {
    let kept = lock(&KEPT).take();
    if let Some(kept) = kept {
        let _ = signals::end_on_signals();
        return until_all_have_left(&kept.store, 0, kept.nodes);
    }
    let env = real_env();
    let is_late = HAS_JOINED.load(Ordering::Relaxed) || is_under_launcher(&env);
    if error.kind() != ErrorKind::Usage || is_late {
        return;
    }
    let words = say::words().into_iter();
    let words: Vec<String> = words.filter_map(|word| word.into_string().ok()).collect();
    let Some(others) = OtherNodes::of(&words, env) else {
        return;
    };
    let _ = signals::end_on_signals();
    if let Err(why) = others.send(error) {
        say::note(format_args!(
            "cannot inform the other nodes: {}; they wait for this node until their --init-timeout (of `phalanx launch`: --rdzv-timeout)",
            why.chain()
        ));
    }
}

/// Keeps the store of node 0, which this is and cannot start for `error`, with that error for the other nodes. Of
/// another node it does nothing: [`tell`] does.
pub fn refuse(at: &mut NodeStore, nodes: usize, token: &Token, error: &Error) {
    let Some(server) = at.server.take() else {
        return;
    };
    let Ok(store) = TcpStore::connect(&at.dial, token.clone(), LAST_WORDS) else {
        return;
    };
    let _ = leave_word(&store, Some(0), &phalanx_base::host_name(), error);
    keep(Arc::new(store), Some(Arc::new(server)), nodes);
}

/// Leaves `error` of node `me` in the store, unless the nodes have met.
pub(super) fn leave_word(
    store: &TcpStore,
    me: Option<usize>,
    host: &str,
    error: &Error,
) -> phalanx_store::Result<()> {
    // Nodes that come and go: it runs without this one.
    if store.try_get(&attempt_key(0))?.is_some() {
        return Ok(());
    }
    let first = store.try_get(&node_key(0))?;
    if let Some(first) = first.and_then(|bytes| decode::<NodeInfo>(&bytes)) {
        let keys: Vec<String> = (0..first.nodes).map(node_key).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        if store.wait(&keys, Duration::ZERO).is_ok() {
            return Ok(());
        }
    }
    let text: String = error.render().chars().take(LONGEST).collect();
    let (message, notes) = taken_apart(text.strip_prefix("error: ").unwrap_or(&text).trim_end());
    let node = me.map_or("a node".to_owned(), |node| format!("node {node}"));
    let address = store
        .local_ip()
        .map_or(String::new(), |ip| format!(", {ip}"));
    let verdict = JobFailure {
        mistake: true,
        notes,
        ..JobFailure::new(
            error.exit_code(),
            me.unwrap_or(usize::MAX),
            format!("{node} (host {host}{address}): {message}"),
        )
    };
    verdict.publish(store)?;
    match me {
        Some(me) => store.set(&left_key(me), b""),
        None => Ok(()),
    }
}

/// Waits until all nodes but `me` of `nodes` (0: unknown) have read why the job does not start.
fn until_all_have_left(store: &TcpStore, me: usize, nodes: usize) {
    let others = (0..nodes).filter(|node| *node != me).map(left_key);
    let mut keys: Vec<String> = others.collect();
    if keys.is_empty() {
        // Nobody sets it.
        keys.push(left_key(me + 1));
    }
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    if store.wait(&keys, Duration::ZERO).is_err() {
        say::note(format_args!(
            "informing the other nodes (for up to {} s)",
            LIMIT.as_secs()
        ));
        let _ = store.wait(&keys, LIMIT);
    }
}

/// Where the other nodes meet, as far as the command line and the environment say it. The rest of the command line
/// may be wrong.
struct OtherNodes {
    meeting: Result<Meeting>,
    bind: Option<IpAddr>,
    token_file: Option<String>,
    env: Env,
}

impl OtherNodes {
    /// `None`: this is not one of several nodes.
    fn of(words: &[String], env: Env) -> Option<OtherNodes> {
        let command = words.first().map(String::as_str);
        // `phalanx plan` computes for other nodes.
        if command == Some("plan") {
            return None;
        }
        let is_launch = command == Some("launch");
        let typed = |flag: &str| typed(words, flag, is_launch);
        let cli = LaunchCli {
            nodes: NodeFlags {
                nnodes: typed("nnodes"),
                node_rank: typed("node-rank"),
                master_addr: typed("master-addr"),
                master_port: typed("master-port"),
                port_range: typed("port-range"),
                lost_after: None,
            },
            rdzv_endpoint: typed("rdzv-endpoint"),
            rdzv_backend: typed("rdzv-backend"),
            ..LaunchCli::default()
        };
        let flags = &cli.nodes;
        let query = NodeQuery {
            env: &env,
            cli: &cli,
            command: (!is_launch).then_some(""),
        };
        // Ranks that an engine started are no nodes.
        let has_flags = flags.nnodes.is_some() || flags.node_rank.is_some();
        if !is_launch && !has_flags && !matches!(rank_place(&env), Ok(None)) {
            return None;
        }
        let meeting = match query.node(1).map(|node| node.meeting) {
            Ok(Some(meeting)) => Ok(meeting),
            _ if has_flags && flags.nnodes.as_deref() != Some("1") => query.address_alone(),
            _ => return None,
        };
        Some(OtherNodes {
            meeting,
            bind: typed("bind").and_then(|text| text.parse().ok()),
            token_file: typed("token-file"),
            env,
        })
    }

    fn send(self, error: &Error) -> Result<()> {
        let meeting = self.meeting?;
        if meeting.host.is_empty() {
            let engine = meeting.engine.unwrap_or("the cluster engine");
            return Err(Error::usage(format!(
                "{engine} carries address and token once all nodes have started"
            )));
        }
        let token = token::given(self.token_file.as_deref().map(Path::new), &self.env, true)?;
        let token = token.ok_or_else(|| Error::usage("there is no job token (--token-file)"))?;
        let deadline = Instant::now() + LIMIT;
        let at = meeting_store(&meeting, self.bind, &token, deadline, &mut || None)?;
        let failed = |_| {
            let seconds = LIMIT.as_secs();
            let message = format!("node 0 did not answer at {} within {seconds} s", at.dial);
            Error::new(ErrorKind::PeerLost, message)
        };
        let mut is_said = false;
        let store = TcpStore::connect_with(&at.dial, token, LIMIT, |_| {
            if !std::mem::replace(&mut is_said, true) {
                say::note(format_args!(
                    "informing the other nodes (for up to {} s)",
                    LIMIT.as_secs()
                ));
            }
        });
        let store = store.map_err(failed)?;
        let host = phalanx_base::host_name();
        leave_word(&store, meeting.node_rank, &host, error).map_err(failed)?;
        if at.server.is_some() {
            until_all_have_left(&store, meeting.node_rank.unwrap_or(0), meeting.nodes);
        }
        Ok(())
    }
}

/// The value of `--flag`, as torchrun's users type it too (`--node_rank`): the first one before a program's own
/// arguments, or else the last one.
fn typed(words: &[String], flag: &str, first: bool) -> Option<String> {
    let own = words.split(|word| word == "--").next()?;
    let mut found = own.iter().enumerate().filter_map(|(at, word)| {
        let word = word.strip_prefix("--")?;
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, own.get(at + 1).map(String::as_str)),
        };
        value.filter(|_| name.replace('_', "-") == flag)
    });
    let value = if first {
        found.next()
    } else {
        found.next_back()
    };
    value.map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::tests::env;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn the_way_is_found_beside_mistakes() {
        let at = |host: &str, port, rank, nodes| Some((host.to_owned(), port, rank, nodes));
        for (line, variables, want) in [
            // The mistake is another flag.
            (
                "train mnist --epchs 1 --nnodes 2 --node-rank 1 --master-addr h",
                "",
                at("h", 29500, Some(1), 2),
            ),
            (
                "launch --nnodes=2 --node_rank=0 --master-addr h --master-port 7 --typo -- x --node-rank 9",
                "",
                at("h", 7, Some(0), 2),
            ),
            // It is one of these.
            (
                "train mnist --nnodse 2 --node-rank 1 --master-addr h",
                "",
                at("h", 29500, Some(1), 0),
            ),
            (
                "train mnist --nnodes 2 --node-rnk 1 --master-addr h",
                "MASTER_PORT=8",
                at("h", 8, None, 2),
            ),
            (
                "train mnist --nnodes 2 --node-rank 2 --master-addr h",
                "",
                at("h", 29500, Some(2), 2),
            ),
            (
                "launch --nnodes 2 --node-rank 1 --master-addr h --master-port 7 --port-range 9-1",
                "",
                at("h", 7, Some(1), 2),
            ),
            (
                "launch --bogus true",
                "PET_NNODES=3 PET_NODE_RANK=2 PET_MASTER_ADDR=h",
                at("h", 29500, Some(2), 3),
            ),
            (
                "launch --bogus true",
                "PET_NNODES=2 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=h",
                at("h", 29400, None, 2),
            ),
            (
                "launch --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:9 --bogus true",
                "",
                at("h", 9, None, 2),
            ),
            // One node, or a rank.
            ("train mnist --epchs 1", "MASTER_ADDR=h", None),
            ("train mnist --nnodes 1 --node-rank 0 --epchs 1", "", None),
            ("plan --nnodes 4 --bogus", "MASTER_ADDR=h", None),
            (
                "train mnist --epchs 1",
                "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=h",
                None,
            ),
        ] {
            let others = OtherNodes::of(&words(line), env(variables));
            let found = others.map(|others| others.meeting.unwrap());
            let found = found.map(|m| (m.host, m.port, m.node_rank, m.nodes));
            assert_eq!(found, want, "{line}");
        }
        let others = OtherNodes::of(&words("train mnist --nnodes 2 --node-rank 1"), Env::new());
        let error = others.unwrap().meeting.unwrap_err();
        assert!(error.chain().contains("--master-addr"), "{}", error.chain());
    }
}
