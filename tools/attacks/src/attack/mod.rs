//! All attacks, by name.

mod crowd;
mod foreign;
mod handshake;
mod member;
mod memory;

use std::cell::RefCell;

use phalanx_garble::Dice;
use phalanx_wire::handshake::RejectReason;

use crate::line::Answer;
use crate::scene::{Recorded, Scene, Tallies, Target};

/// One short exchange with one port.
pub struct Shot<'a> {
    /// Whom it hits.
    pub target: &'a Target,
    /// A member's session to replay, once one could be recorded.
    pub recorded: Option<&'a Recorded>,
    /// Which of our addresses it comes from.
    pub source: u8,
    /// Rises with every shot of this attack: every length, every field.
    pub turn: u64,
    /// For noise.
    pub dice: &'a RefCell<Dice>,
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

const fn shots(
    name: &'static str,
    who: Who,
    what: &'static str,
    act: fn(&Shot<'_>) -> Option<Answer>,
) -> Attack {
    Attack {
        name,
        what,
        who,
        how: How::Shots(act),
    }
}

const fn siege(
    name: &'static str,
    who: Who,
    what: &'static str,
    act: fn(&Scene, &Tallies, usize),
) -> Attack {
    Attack {
        name,
        what,
        who,
        how: How::Siege(act),
    }
}

/// Attacks at what is open for moments only, so that a short run may miss it.
pub const SELDOM: [&str; 1] = ["memory-door"];

/// Every attack there is.
pub const ALL: [Attack; 33] = [
    shots(
        "port-scan",
        Who::Stranger,
        "connects and closes",
        foreign::scan,
    ),
    shots(
        "port-scan-reset",
        Who::Stranger,
        "connects and resets",
        foreign::scan_reset,
    ),
    shots(
        "half-closed",
        Who::Stranger,
        "connects, ends its side, listens",
        foreign::half_closed,
    ),
    shots(
        "http",
        Who::Stranger,
        "GET, POST and HTTP/2 prefaces",
        foreign::http,
    ),
    shots("tls", Who::Stranger, "a ClientHello", foreign::tls),
    shots(
        "other-protocols",
        Who::Stranger,
        "ssh, redis, smtp, Gloo, NCCL, torch",
        foreign::other,
    ),
    shots(
        "random",
        Who::Stranger,
        "1 to 4096 random bytes",
        foreign::random,
    ),
    shots(
        "frames",
        Who::Stranger,
        "frames and store requests without a handshake",
        foreign::frames,
    ),
    shots(
        "truncated-hello",
        Who::Stranger,
        "a hello cut at every length",
        handshake::truncated,
    ),
    shots(
        "garbled-hello",
        Who::Stranger,
        "a hello with changed bytes",
        handshake::garbled,
    ),
    shots(
        "oversize",
        Who::Stranger,
        "every length field at its edges",
        handshake::oversize,
    ),
    shots(
        "wrong-version",
        Who::OtherVersion,
        "versions 0, 2 and 255",
        handshake::version,
    ),
    shots(
        "wrong-token",
        Who::Stranger,
        "proves another token",
        handshake::wrong_token,
    ),
    shots(
        "guessed-proof",
        Who::Stranger,
        "a proof with one bit wrong",
        handshake::guessed,
    ),
    shots(
        "replayed",
        Who::Stranger,
        "a member's hello and proof, recorded",
        handshake::replayed,
    ),
    shots(
        "replayed-hello",
        Who::Stranger,
        "a member's hello, then its challenge",
        handshake::replayed_challenge,
    ),
    shots(
        "reflected",
        Who::Stranger,
        "the other side's own messages, sent back",
        handshake::reflected,
    ),
    shots(
        "crossed",
        Who::Stranger,
        "the challenge of one connection as proof on another",
        handshake::crossed,
    ),
    shots(
        "wrong-job",
        Who::Misplaced(RejectReason::WrongJob),
        "the right token, another job",
        member::wrong_job,
    ),
    shots(
        "stale-epoch",
        Who::Misplaced(RejectReason::WrongGeneration),
        "a member of another epoch",
        member::stale_epoch,
    ),
    shots(
        "wrong-group",
        Who::Misplaced(RejectReason::WrongGroup),
        "a member of another group",
        member::wrong_group,
    ),
    shots(
        "wrong-world",
        Who::Misplaced(RejectReason::WrongWorld),
        "a member of a larger world",
        member::wrong_world,
    ),
    shots(
        "wrong-rank",
        Who::Misplaced(RejectReason::WrongRank),
        "a rank that does not exist, or rank 0 itself",
        member::wrong_rank,
    ),
    shots(
        "wrong-stream",
        Who::Misplaced(RejectReason::WrongStream),
        "a stream that does not exist",
        member::wrong_stream,
    ),
    siege(
        "slow-loris",
        Who::Stranger,
        "hellos at one byte a second",
        crowd::loris,
    ),
    siege(
        "half-a-handshake",
        Who::Stranger,
        "hellos whose proof never comes",
        crowd::half_a_handshake,
    ),
    siege(
        "half-open",
        Who::Stranger,
        "a thousand unproven hellos at a time, again at once when closed",
        crowd::half_open,
    ),
    siege(
        "crowd",
        Who::Stranger,
        "--connections at once, held, then reset",
        crowd::crowd,
    ),
    siege(
        "reset-flood",
        Who::Stranger,
        "connects and resets as fast as it can",
        crowd::resets,
    ),
    siege(
        "door",
        Who::Stranger,
        "fills each fresh port's backlog before the members come",
        crowd::door,
    ),
    siege(
        "memory-door",
        Who::Stranger,
        "hands descriptors to the Unix socket that hands out memory",
        memory::door,
    ),
    siege(
        "duplicate-rank",
        Who::Mad,
        "claims both ranks' places in the store while they meet",
        member::duplicate_rank,
    ),
    siege(
        "mad-member",
        Who::Mad,
        "oversize requests, waits and answers not taken (a job of its own)",
        member::mad,
    ),
];

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
