//! All attacks, by name.

mod crowd;
mod foreign;
mod handshake;
mod member;
mod memory;

use std::cell::RefCell;

use phalanx_garble::Dice;
use phalanx_wire::handshake::RejectReason;

use crate::line::{Answer, Line};
use crate::scene::{Recorded, Scene, Tallies, Target};

/// One short exchange with one port.
pub struct Shot<'a> {
    /// Whom it hits.
    pub target: &'a Target,
    /// A member's session to replay, once one could be recorded.
    pub recorded: Option<Recorded>,
    /// Which of our addresses it comes from.
    pub source: u8,
    /// Rises with every shot of this attack: every length, every field.
    pub turn: u64,
    /// For noise.
    pub dice: &'a RefCell<Dice>,
}

impl Shot<'_> {
    /// What comes of `act` on a new connection.
    fn at(&self, act: impl FnOnce(Line) -> Answer) -> Option<Answer> {
        let line = self.target.open(self.source);
        Some(line.map_or(Answer::Unreachable, act))
    }

    /// Says this, and no more if it `ends`, and listens.
    fn say(&self, bytes: &[u8], ends: bool) -> Option<Answer> {
        self.at(|mut line| {
            line.say(bytes);
            if ends {
                line.end();
            }
            line.judge()
        })
    }
}

/// Who the attacker is, hence what it may be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// Holds no token: learns nothing, is told nothing.
    Stranger,
    /// Speaks another version: may be told so.
    OtherVersion,
    /// Holds the token but is wrong here: is told why, and not let in. The
    /// reason is the one that a rank gives; a store only says that it is none.
    Misplaced(RejectReason),
    /// A member of the store gone mad: meets its limits.
    Mad,
}

impl Who {
    /// Whether an attacker of this kind may be answered so.
    pub fn may_hear(self, answer: &Answer) -> bool {
        match answer {
            Answer::Welcomed | Answer::Odd(_) => false,
            Answer::Notice => self == Who::OtherVersion,
            Answer::Rejected(_) => matches!(self, Who::Misplaced(_)),
            Answer::Refused(_) => self == Who::Mad,
            Answer::Unreachable | Answer::Closed | Answer::Challenged | Answer::Silent => true,
        }
    }
}

impl Attack {
    /// What the `answers` do not show of what this attack is for: that it came
    /// to somebody at all; of one with the token, that a rank turned it away
    /// for what is wrong with it.
    pub fn not_met<'a>(&self, answers: impl Iterator<Item = &'a Answer>) -> Option<String> {
        let mut heard = answers.filter(|answer| **answer != Answer::Unreachable);
        let Who::Misplaced(reason) = self.who else {
            return heard
                .next()
                .is_none()
                .then(|| "nobody took its connections".to_owned());
        };
        let reason = Answer::rejected(&reason.to_string());
        (!heard.any(|answer| *answer == reason))
            .then(|| format!("no rank's door was reached: none answered \"{reason}\""))
    }
}

/// How it goes about it.
pub enum How {
    /// Again and again, one port after the other.
    Shots(fn(&Shot<'_>) -> Option<Answer>),
    /// Once per job, for as long as that runs.
    Siege(fn(&Scene, &Tallies, usize)),
}

/// One attack.
pub struct Attack {
    /// For `--only` and the report.
    pub name: &'static str,
    /// What it does, in a few words.
    pub what: &'static str,
    /// Who does it.
    pub who: Who,
    /// How.
    pub how: How,
}

/// Attacks at what is open for moments only, so that a short run may miss it.
pub const SELDOM: [&str; 1] = ["memory-door"];

/// The attacks, each with its name, who does it, how, and what it does in a few words.
macro_rules! attacks {
    ($($name:literal: $who:ident $(($reason:ident))? $how:ident($act:path), $what:literal;)*) => {
        [$(Attack {
            name: $name,
            what: $what,
            who: Who::$who $((RejectReason::$reason))?,
            how: How::$how($act),
        }),*]
    };
}

/// Every attack there is.
pub const ALL: [Attack; 33] = attacks! {
    "port-scan": Stranger Shots(foreign::scan), "connects and closes";
    "port-scan-reset": Stranger Shots(foreign::scan_reset), "connects and resets";
    "half-closed": Stranger Shots(foreign::half_closed), "connects, ends its side, listens";
    "http": Stranger Shots(foreign::http), "GET, POST and HTTP/2 prefaces";
    "tls": Stranger Shots(foreign::tls), "a ClientHello";
    "other-protocols": Stranger Shots(foreign::other), "ssh, redis, smtp, Gloo, NCCL, torch";
    "random": Stranger Shots(foreign::random), "1 to 4096 random bytes";
    "frames": Stranger Shots(foreign::frames), "frames and store requests without a handshake";
    "truncated-hello": Stranger Shots(handshake::truncated), "a hello cut at every length";
    "garbled-hello": Stranger Shots(handshake::garbled), "a hello with changed bytes";
    "oversize": Stranger Shots(handshake::oversize), "every length field at its edges";
    "wrong-version": OtherVersion Shots(handshake::version), "versions 0, 2 and 255";
    "wrong-token": Stranger Shots(handshake::wrong_token), "proves another token";
    "guessed-proof": Stranger Shots(handshake::guessed), "a proof with one bit wrong";
    "replayed": Stranger Shots(handshake::replayed), "a member's hello and proof, recorded";
    "replayed-hello": Stranger Shots(handshake::replayed_challenge), "a member's hello, then its challenge";
    "reflected": Stranger Shots(handshake::reflected), "the other side's own messages, sent back";
    "crossed": Stranger Shots(handshake::crossed), "the challenge of one connection as proof on another";
    "wrong-job": Misplaced(WrongJob) Shots(member::wrong_job), "the right token, another job";
    "stale-epoch": Misplaced(WrongGeneration) Shots(member::stale_epoch), "a member of another epoch";
    "wrong-group": Misplaced(WrongGroup) Shots(member::wrong_group), "a member of another group";
    "wrong-world": Misplaced(WrongWorld) Shots(member::wrong_world), "a member of a larger world";
    "wrong-rank": Misplaced(WrongRank) Shots(member::wrong_rank), "a rank that does not exist, or rank 0 itself";
    "wrong-stream": Misplaced(WrongStream) Shots(member::wrong_stream), "a stream that does not exist";
    "slow-loris": Stranger Siege(crowd::loris), "hellos at one byte a second";
    "half-a-handshake": Stranger Siege(crowd::half_a_handshake), "hellos whose proof never comes";
    "half-open": Stranger Siege(crowd::half_open), "a thousand unproven hellos at a time, again at once when closed";
    "crowd": Stranger Siege(crowd::crowd), "--connections at once, held, then reset";
    "reset-flood": Stranger Siege(crowd::resets), "connects and resets as fast as it can";
    "door": Stranger Siege(crowd::door), "fills each fresh port's backlog before the members come";
    "memory-door": Stranger Siege(memory::door), "hands descriptors to the Unix socket that hands out memory";
    "duplicate-rank": Mad Siege(member::duplicate_rank), "claims both ranks' places in the store while they meet";
    "mad-member": Mad Siege(member::mad), "oversize requests, waits and answers not taken (a job of its own)";
};

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique() {
        let names: BTreeSet<_> = ALL.iter().map(|a| a.name).collect();
        assert!(SELDOM.iter().all(|name| names.contains(name)));
        assert_eq!(names.len(), ALL.len());
    }

    #[test]
    fn nobody_may_be_let_in() {
        let misplaced = Who::Misplaced(RejectReason::WrongGeneration);
        for who in [Who::Stranger, Who::OtherVersion, misplaced, Who::Mad] {
            assert!(!who.may_hear(&Answer::Welcomed));
            assert!(who.may_hear(&Answer::Closed));
        }
        assert!(!Who::Stranger.may_hear(&Answer::Rejected("wrong generation".into())));
        assert!(!misplaced.may_hear(&Answer::Notice));
    }

    #[test]
    fn a_store_that_turns_a_member_away_is_no_rank() {
        let attack = |name| ALL.iter().find(|attack| attack.name == name).unwrap();
        let store = Answer::rejected(&RejectReason::WrongRole.to_string());
        let rank = Answer::rejected(&RejectReason::WrongGeneration.to_string());
        let is_met =
            |name, answers: &[&Answer]| attack(name).not_met(answers.iter().copied()).is_none();
        for unmet in [
            &[][..],
            &[&Answer::Unreachable],
            &[&store],
            &[&Answer::Closed],
        ] {
            assert!(!is_met("stale-epoch", unmet));
        }
        assert!(is_met("stale-epoch", &[&store, &rank]));
        assert!(!is_met("wrong-group", &[&rank]));
        assert!(!is_met("http", &[&Answer::Unreachable]));
        assert!(is_met("http", &[&Answer::Unreachable, &Answer::Closed]));
    }
}
