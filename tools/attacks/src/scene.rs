//! What attackers know: the ports, and, some of them, the token.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use phalanx_base::lock;
use phalanx_store::TcpStore;
use phalanx_wire::Token;
use phalanx_wire::handshake::{Awaiting, Hello, Initiator, Role};

use crate::line::{Answer, Line, Place};

/// How long an attacker waits for an answer in a quiet hour.
pub const PATIENCE: Duration = Duration::from_millis(1500);
/// And at a rank's own port, which answers when all ranks have come.
pub const LONG_PATIENCE: Duration = Duration::from_secs(8);

/// One victim at one port.
#[derive(Clone)]
pub struct Target {
    /// Where.
    pub place: Place,
    /// The job's secret.
    pub token: Token,
    /// How long to wait for answers there.
    pub patience: Duration,
}

impl Target {
    /// A connection from one of several sources.
    pub fn open(&self, source: u8) -> Option<Line> {
        Line::open(&self.place, source, self.patience)
    }
}

/// A member's session, as a wire tap would have recorded it.
#[derive(Clone)]
pub struct Recorded {
    /// The first message.
    pub hello: Vec<u8>,
    /// What it was answered with.
    pub challenge: Vec<u8>,
    /// The second message.
    pub proof: Vec<u8>,
}

/// Joins a store as a member would, and records what was said.
pub fn record(target: &Target) -> Option<Recorded> {
    let mut line = target.open(0)?;
    let hello = Hello::new(Role::StoreClient, target.token.job_id());
    let (initiator, hello) = Initiator::start(hello, &target.token).ok()?;
    line.say(&hello);
    let challenge = line.message(Awaiting::Challenge)?;
    let (_, proof) = initiator.answer(&challenge).ok()?;
    line.say(&proof);
    line.message(Awaiting::Verdict)?;
    Some(Recorded {
        hello: hello.to_vec(),
        challenge,
        proof: proof.to_vec(),
    })
}

/// What came of one attack.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Connections or messages tried.
    pub attempts: u64,
    /// How often which answer came.
    pub answers: BTreeMap<Answer, u64>,
}

/// Counts of all attacks by name.
#[derive(Default)]
pub struct Tallies(Mutex<BTreeMap<&'static str, Tally>>);

impl Tallies {
    /// One attempt of `attack` was answered so.
    pub fn note(&self, attack: &'static str, answer: Answer) {
        self.note_many(attack, answer, 1);
    }

    /// Several were.
    pub fn note_many(&self, attack: &'static str, answer: Answer, times: u64) {
        if times == 0 {
            return;
        }
        let mut all = lock(&self.0);
        let tally = all.entry(attack).or_default();
        tally.attempts += times;
        *tally.answers.entry(answer).or_default() += times;
    }

    /// What came of `attack`.
    pub fn of(&self, attack: &str) -> Tally {
        let all = lock(&self.0);
        all.get(attack).cloned().unwrap_or_default()
    }
}

/// What all attackers of one job share.
pub struct Scene {
    /// Where the job listens now.
    places: Mutex<BTreeSet<Place>>,
    /// The job's processes.
    family: Mutex<BTreeSet<u32>>,
    /// A member's session, once one could be recorded.
    pub recorded: Mutex<Option<Recorded>>,
    /// The job's secret.
    pub token: Token,
    /// Where its store listens: what members know.
    store: SocketAddr,
    /// Counts the connections, so that their sources take turns.
    turn: AtomicU64,
    over: AtomicBool,
}

impl Scene {
    /// Nothing is known yet.
    pub fn new(token: Token, store: SocketAddr) -> Scene {
        Scene {
            places: Mutex::default(),
            family: Mutex::default(),
            recorded: Mutex::default(),
            token,
            store,
            turn: AtomicU64::new(0),
            over: AtomicBool::new(false),
        }
    }

    /// The job's processes as they were a moment ago.
    pub fn family(&self) -> BTreeSet<u32> {
        lock(&self.family).clone()
    }

    /// Tells the attackers who the job is and where it listens; returns what is
    /// new.
    pub fn update(&self, family: &BTreeSet<u32>, now: BTreeSet<Place>) -> Vec<Place> {
        family.clone_into(&mut lock(&self.family));
        let mut places = lock(&self.places);
        let new = now.difference(&places).cloned().collect();
        *places = now;
        new
    }

    /// All ports at this moment.
    pub fn targets(&self) -> Vec<Target> {
        let target = |place: &Place| self.target(place.clone(), PATIENCE);
        lock(&self.places).iter().map(target).collect()
    }

    /// The store, once it listens.
    pub fn store(&self) -> Option<Target> {
        let place = Place::Tcp(self.store);
        let listens = lock(&self.places).contains(&place);
        listens.then(|| self.target(place, PATIENCE))
    }

    /// A member's client of the store, if it can be reached within `limit`.
    pub fn join(&self, limit: Duration) -> phalanx_store::Result<TcpStore> {
        TcpStore::connect(&self.store.to_string(), self.token.clone(), limit)
    }

    /// One port.
    pub fn target(&self, place: Place, patience: Duration) -> Target {
        Target {
            place,
            token: self.token.clone(),
            patience,
        }
    }

    /// The next source.
    pub fn source(&self) -> u8 {
        (self.turn.fetch_add(1, Ordering::Relaxed) % 251) as u8
    }

    /// The job has ended.
    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Whether it has.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Whether the job ends within `limit`, or has: the store goes a moment
    /// before we hear of it.
    pub fn ends_within(&self, limit: Duration) -> bool {
        let start = std::time::Instant::now();
        while !self.is_over() && self.store().is_some() {
            if start.elapsed() >= limit {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }

    /// Sleeps, but not beyond the end; false at the end.
    pub fn sleep(&self, time: Duration) -> bool {
        let start = std::time::Instant::now();
        while start.elapsed() < time {
            if self.is_over() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        !self.is_over()
    }
}
