//! When to stop the ranks, and which failure is the cause: a state machine without
//! processes.
//!
//! | phase    | event                             | next     | action    |
//! |----------|-----------------------------------|----------|-----------|
//! | Running  | a rank ends with 0                | Running  |           |
//! | Running  | a rank fails by itself            | Stopping | terminate |
//! | Running  | a rank fails as a consequence     | Deciding |           |
//! | Deciding | a rank fails by itself            | Stopping | terminate |
//! | Deciding | 400 ms pass                       | Stopping | terminate |
//! | either   | interrupt, or another node failed | Stopping | terminate |
//! | Stopping | grace over, or a second interrupt | Stopping | kill      |
//! | Stopping | the first interrupt, sent twice   | Stopping |           |
//! | Stopping | our first, after another node's   | Stopping |           |
//!
//! In an elastic job, a rank that was killed by a signal or that lost a peer (exit code 3) is lost instead, as long as
//! another rank is left, here or with other launchers: no rank is stopped. So is a rank that has joined the others and has
//! taken no step yet, however it ends.
//!
//! The grace counts from the first failure, so that deciding does not lengthen the stop.

use std::time::{Duration, Instant};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// It returned this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

/// SIGHUP, SIGINT and SIGTERM, which are sent to all processes of a job at once.
const STOP_SIGNALS: [i32; 3] = [1, 2, 15];

/// A second interrupt that comes sooner is the same one, sent twice: to us
/// and to our process group, as `timeout` and some job systems do.
pub const TWIN: Duration = Duration::from_millis(200);

/// Exit code of a rank that lost a peer: the peer is to blame.
const PEER_LOST: i32 = 3;

/// Exit code of a rank that was asked to end, or whose job was.
const INTERRUPTED: i32 = 130;

impl ExitStatus {
    /// Whether the process succeeded.
    pub fn is_ok(self) -> bool {
        self == ExitStatus::Code(0)
    }

    /// How little this end explains: 0 is a failure of its own, 1 was asked
    /// to end (this launcher may be asked next), 2 is the consequence of
    /// another rank's failure.
    fn echo(self) -> u8 {
        match self {
            ExitStatus::Code(PEER_LOST) => 2,
            ExitStatus::Code(INTERRUPTED) => 1,
            ExitStatus::Signal(signal) if STOP_SIGNALS.contains(&signal) => 1,
            _ => 0,
        }
    }

    /// Whether the failure is probably the consequence of another one.
    pub fn is_secondary(self) -> bool {
        self.echo() > 0
    }

    /// The exit code of a job whose root cause is this; 3 and 4 mean something only where
    /// it is a program of `ours`.
    pub fn job_code(self, ours: bool) -> u8 {
        match self {
            ExitStatus::Signal(_) => 3,
            ExitStatus::Code(3 | 4) if !ours => 1,
            ExitStatus::Code(code @ (1..=4 | 130)) => code as u8,
            ExitStatus::Code(_) => 1,
        }
    }
}

/// What started the stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// This local rank failed.
    Rank(usize),
    /// We got this signal.
    Interrupt(i32),
    /// Another node failed, or was lost.
    Elsewhere,
}

/// What the caller must do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Action {
    /// Nothing.
    None,
    /// SIGTERM to every process group.
    Terminate,
    /// SIGKILL to every process group.
    Kill,
    /// The job continues without this local rank.
    Lose(usize),
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Running,
    Deciding {
        since: Instant,
    },
    Stopping {
        why: StopCause,
        kill_at: Instant,
        killed: bool,
    },
}

/// The ranks of one launcher during one attempt.
#[derive(Debug)]
pub struct ShutdownState {
    ends: Vec<Option<(ExitStatus, Instant)>>,
    /// Which ranks ended before the stop began.
    ended_alone: Vec<bool>,
    phase: Phase,
    last_interrupt: Option<Instant>,
    grace: Duration,
    echo_wait: Duration,
    elastic: bool,
    has_others: bool,
    /// The ranks whose failure does not affect the others.
    candidates: Vec<bool>,
}

impl ShutdownState {
    /// `ranks` processes, all running.
    pub fn new(ranks: usize, grace: Duration, echo_wait: Duration) -> Self {
        ShutdownState {
            ends: vec![None; ranks],
            ended_alone: vec![false; ranks],
            phase: Phase::Running,
            last_interrupt: None,
            grace,
            echo_wait,
            elastic: false,
            has_others: false,
            candidates: vec![false; ranks],
        }
    }

    /// Whether local rank `rank` has failed as a candidate.
    pub fn is_candidate(&self, rank: usize) -> bool {
        self.candidates.get(rank) == Some(&true)
    }

    /// Sets whether a failure of local rank `rank` of an elastic job does not affect the others.
    pub fn set_candidate(&mut self, rank: usize, is_candidate: bool) {
        if let Some(slot) = self.candidates.get_mut(rank) {
            *slot = is_candidate;
        }
    }

    /// Sets whether the job is elastic.
    pub fn elastic(self, elastic: bool) -> Self {
        ShutdownState { elastic, ..self }
    }

    /// Sets whether other launchers have ranks of the job too, so that the job can continue without any rank of this one.
    pub fn with_others(self, has_others: bool) -> Self {
        ShutdownState { has_others, ..self }
    }

    /// A process was started in place of the lost local rank `rank`.
    pub fn restarted(&mut self, rank: usize) {
        if let Some(slot) = self.ends.get_mut(rank) {
            *slot = None;
            self.ended_alone[rank] = false;
        }
    }

    /// The job cannot continue without the lost local rank `rank`.
    pub fn fail(&mut self, rank: usize, now: Instant) -> Action {
        match self.phase {
            Phase::Stopping { .. } => Action::None,
            _ => self.stop(StopCause::Rank(rank), now),
        }
    }

    /// The local ranks that have not failed.
    pub fn alive(&self) -> impl Iterator<Item = usize> + '_ {
        let alive = |(_, end): &(usize, &Option<(ExitStatus, Instant)>)| {
            end.is_none_or(|(end, _)| end.is_ok())
        };
        self.ends
            .iter()
            .enumerate()
            .filter(alive)
            .map(|(rank, _)| rank)
    }

    /// Local rank `rank` ended.
    pub fn ended(&mut self, rank: usize, end: ExitStatus, now: Instant) -> Action {
        let Some(slot) = self.ends.get_mut(rank) else {
            return Action::None;
        };
        *slot = Some((end, now));
        if matches!(self.phase, Phase::Stopping { .. }) {
            return Action::None;
        }
        self.ended_alone[rank] = true;
        let is_loss = matches!(end, ExitStatus::Signal(_) | ExitStatus::Code(PEER_LOST))
            || self.candidates[rank] && !end.is_ok();
        let is_left = self.has_others || self.alive().next().is_some();
        if self.elastic && is_loss && is_left {
            return Action::Lose(rank);
        }
        if !end.is_ok() && !end.is_secondary() {
            return self.stop(StopCause::Rank(rank), now);
        }
        if !end.is_ok() && matches!(self.phase, Phase::Running) {
            self.phase = Phase::Deciding { since: now };
        }
        Action::None
    }

    /// This launcher got a signal to stop.
    pub fn interrupted(&mut self, signal: i32, now: Instant) -> Action {
        if self.last_interrupt.is_some_and(|last| now < last + TWIN) {
            return Action::None;
        }
        let first = self.last_interrupt.replace(now).is_none();
        match &mut self.phase {
            // Job systems signal all nodes, one after the other; another node was first.
            Phase::Stopping {
                why: StopCause::Elsewhere,
                ..
            } if first => Action::None,
            Phase::Stopping { killed, .. } => {
                *killed = true;
                Action::Kill
            }
            _ => self.stop(StopCause::Interrupt(signal), now),
        }
    }

    /// The job failed on another node.
    pub fn failed_elsewhere(&mut self, now: Instant) -> Action {
        match self.phase {
            Phase::Stopping { .. } => Action::None,
            _ => self.stop(StopCause::Elsewhere, now),
        }
    }

    /// The ranks may take `grace` from `now` to end, if that is more than they have.
    pub fn allow(&mut self, grace: Duration, now: Instant) {
        if let Phase::Stopping { kill_at, .. } = &mut self.phase {
            *kill_at = (*kill_at).max(now + grace);
        }
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) -> Action {
        match &mut self.phase {
            Phase::Deciding { since } if now >= *since + self.echo_wait => {
                match self.root_cause() {
                    Some(rank) => self.stop(StopCause::Rank(rank), now),
                    None => Action::None,
                }
            }
            Phase::Stopping {
                kill_at, killed, ..
            } if now >= *kill_at && !*killed => {
                *killed = true;
                Action::Kill
            }
            _ => Action::None,
        }
    }

    /// When [`tick`](Self::tick) has something to do.
    pub fn next_tick(&self) -> Option<Instant> {
        match self.phase {
            Phase::Deciding { since } => Some(since + self.echo_wait),
            Phase::Stopping {
                kill_at,
                killed: false,
                ..
            } => Some(kill_at),
            _ => None,
        }
    }

    /// Every rank has ended and the verdict is clear.
    pub fn finished(&self) -> bool {
        !matches!(self.phase, Phase::Deciding { .. }) && self.ends.iter().all(Option::is_some)
    }

    /// Why the ranks were stopped; `None` while nothing is wrong.
    pub fn why(&self) -> Option<StopCause> {
        match self.phase {
            Phase::Stopping { why, .. } => Some(why),
            _ => None,
        }
    }

    /// How local rank `rank` ended.
    pub fn end(&self, rank: usize) -> Option<ExitStatus> {
        self.ends.get(rank).copied().flatten().map(|(end, _)| end)
    }

    /// Ranks that failed before the stop began, without `but`.
    pub fn also_failed(&self, but: Option<usize>) -> Vec<(usize, ExitStatus)> {
        self.failures()
            .filter(|(rank, ..)| Some(*rank) != but)
            .map(|(rank, end, _)| (rank, end))
            .collect()
    }

    /// Ranks that were still running when the stop began.
    pub fn stopped(&self) -> Vec<usize> {
        (0..self.ends.len())
            .filter(|rank| !self.ended_alone[*rank])
            .collect()
    }

    fn stop(&mut self, why: StopCause, now: Instant) -> Action {
        let first = match self.phase {
            Phase::Deciding { since } => since,
            _ => now,
        };
        self.phase = Phase::Stopping {
            why,
            kill_at: first + self.grace,
            killed: false,
        };
        Action::Terminate
    }

    fn failures(&self) -> impl Iterator<Item = (usize, ExitStatus, Instant)> {
        self.ends.iter().enumerate().filter_map(|(rank, end)| {
            let (end, at) = (*end)?;
            (self.ended_alone[rank] && !end.is_ok()).then_some((rank, end, at))
        })
    }

    /// The failure that explains most, the earliest of those.
    fn root_cause(&self) -> Option<usize> {
        self.failures()
            .min_by_key(|(rank, end, at)| (end.echo(), *at, *rank))
            .map(|(rank, ..)| rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn machine(ranks: usize) -> (ShutdownState, Instant) {
        (
            ShutdownState::new(ranks, 1500 * MS, 200 * MS),
            Instant::now(),
        )
    }

    #[test]
    fn all_zero_is_success() {
        let (mut m, t) = machine(2);
        assert_eq!(m.ended(1, ExitStatus::Code(0), t), Action::None);
        assert!(!m.finished());
        assert_eq!(m.ended(0, ExitStatus::Code(0), t + MS), Action::None);
        assert!(m.finished());
        assert_eq!(m.why(), None);
        assert_eq!(m.next_tick(), None);
    }

    #[test]
    fn the_first_failure_stops_all_at_once() {
        let (mut m, t) = machine(3);
        assert_eq!(m.ended(1, ExitStatus::Signal(9), t), Action::Terminate);
        assert_eq!(m.why(), Some(StopCause::Rank(1)));
        assert_eq!(m.stopped(), [0, 2]);
        // how the others end when asked to stop changes nothing
        assert_eq!(m.ended(0, ExitStatus::Signal(11), t + MS), Action::None);
        assert_eq!(m.next_tick(), Some(t + 1500 * MS));
        assert_eq!(m.tick(t + 1499 * MS), Action::None);
        assert_eq!(m.tick(t + 1500 * MS), Action::Kill);
        assert_eq!(m.tick(t + 1600 * MS), Action::None);
        assert_eq!(
            m.ended(2, ExitStatus::Signal(9), t + 1600 * MS),
            Action::None
        );
        assert!(m.finished());
        assert_eq!(m.why(), Some(StopCause::Rank(1)));
        assert_eq!(m.also_failed(Some(1)), []);
    }

    #[test]
    fn an_echo_waits_for_the_cause() {
        for cause in [
            ExitStatus::Signal(9),
            ExitStatus::Code(1),
            ExitStatus::Code(4),
            ExitStatus::Code(77),
        ] {
            let (mut m, t) = machine(3);
            assert_eq!(m.ended(0, ExitStatus::Code(3), t), Action::None);
            assert_eq!(m.ended(2, ExitStatus::Code(3), t + MS), Action::None);
            assert!(!m.finished());
            assert_eq!(m.ended(1, cause, t + 100 * MS), Action::Terminate);
            assert_eq!(m.why(), Some(StopCause::Rank(1)));
            // the grace counts from the first sign of trouble
            assert_eq!(m.tick(t + 1500 * MS), Action::Kill);
            assert_eq!(
                m.also_failed(Some(1)),
                [(0, ExitStatus::Code(3)), (2, ExitStatus::Code(3))]
            );
        }
    }

    #[test]
    fn without_another_cause_the_first_echo_is_it() {
        let (mut m, t) = machine(2);
        assert_eq!(m.ended(1, ExitStatus::Code(3), t), Action::None);
        assert_eq!(m.ended(0, ExitStatus::Code(3), t + MS), Action::None);
        assert!(!m.finished());
        assert_eq!(m.next_tick(), Some(t + 200 * MS));
        assert_eq!(m.tick(t + 200 * MS), Action::Terminate);
        assert_eq!(m.why(), Some(StopCause::Rank(1)));
        assert!(m.finished());
    }

    #[test]
    fn a_told_rank_explains_more_than_an_echo_and_less_than_an_interrupt() {
        let (mut m, t) = machine(2);
        assert_eq!(m.ended(0, ExitStatus::Code(3), t), Action::None);
        assert_eq!(m.ended(1, ExitStatus::Signal(15), t + MS), Action::None);
        assert_eq!(m.tick(t + 200 * MS), Action::Terminate);
        assert_eq!(m.why(), Some(StopCause::Rank(1)));

        for asked in [ExitStatus::Signal(15), ExitStatus::Code(130)] {
            let (mut m, t) = machine(2);
            assert_eq!(m.ended(1, asked, t), Action::None);
            assert_eq!(m.interrupted(15, t + MS), Action::Terminate);
            assert_eq!(m.why(), Some(StopCause::Interrupt(15)));
        }
    }

    #[test]
    fn a_second_interrupt_kills() {
        let (mut m, t) = machine(2);
        assert_eq!(m.interrupted(2, t), Action::Terminate);
        assert_eq!(m.interrupted(2, t + 199 * MS), Action::None, "a twin");
        assert_eq!(m.interrupted(2, t + 200 * MS), Action::Kill);
        assert_eq!(m.next_tick(), None);
        assert_eq!(m.why(), Some(StopCause::Interrupt(2)));
        // and the first one, when a stop is under way
        let (mut m, t) = machine(2);
        assert_eq!(m.ended(0, ExitStatus::Code(1), t), Action::Terminate);
        assert_eq!(m.interrupted(2, t + MS), Action::Kill);
        assert_eq!(m.why(), Some(StopCause::Rank(0)));
    }

    #[test]
    fn an_elastic_job_loses_ranks_and_goes_on_until_the_last() {
        let t = Instant::now();
        let elastic = || ShutdownState::new(3, 1500 * MS, 200 * MS).elastic(true);
        let mut m = elastic();
        assert_eq!(m.ended(1, ExitStatus::Signal(9), t), Action::Lose(1));
        assert_eq!(m.ended(0, ExitStatus::Code(3), t + MS), Action::Lose(0));
        assert_eq!((m.why(), m.next_tick()), (None, None));
        m.restarted(1);
        assert!(!m.finished());
        assert_eq!(m.ended(2, ExitStatus::Code(0), t + MS), Action::None);
        assert_eq!(m.ended(1, ExitStatus::Signal(9), t + MS), Action::Lose(1));
        assert!(m.finished() && m.why().is_none());
        // The last one.
        let mut m = elastic();
        assert_eq!(m.ended(1, ExitStatus::Signal(9), t), Action::Lose(1));
        assert_eq!(m.ended(0, ExitStatus::Signal(9), t), Action::Lose(0));
        assert_eq!(m.ended(2, ExitStatus::Signal(6), t), Action::Terminate);
        assert_eq!(m.why(), Some(StopCause::Rank(2)));
        // A program that reports an error would report it again.
        let mut m = elastic();
        assert_eq!(m.ended(1, ExitStatus::Code(1), t), Action::Terminate);
        assert_eq!(m.ended(0, ExitStatus::Signal(15), t), Action::None);
    }

    #[test]
    fn more_grace_puts_the_kill_off_but_never_forward() {
        let (mut m, t) = machine(1);
        m.allow(5000 * MS, t);
        assert_eq!(m.next_tick(), None, "nothing is stopped yet");
        assert_eq!(m.interrupted(15, t), Action::Terminate);
        m.allow(1000 * MS, t);
        assert_eq!(m.next_tick(), Some(t + 1500 * MS));
        m.allow(5000 * MS, t);
        assert_eq!(m.tick(t + 4999 * MS), Action::None);
        assert_eq!(
            m.interrupted(15, t + 4999 * MS),
            Action::Kill,
            "asked again"
        );
    }

    #[test]
    fn another_node_stops_us_once() {
        let (mut m, t) = machine(2);
        assert_eq!(m.ended(0, ExitStatus::Code(3), t), Action::None);
        assert_eq!(m.failed_elsewhere(t + MS), Action::Terminate);
        assert_eq!(m.failed_elsewhere(t + 2 * MS), Action::None);
        assert_eq!(m.why(), Some(StopCause::Elsewhere));
    }

    #[test]
    fn a_signal_to_all_nodes_may_come_after_the_news_of_it() {
        let (mut m, t) = machine(2);
        assert_eq!(m.failed_elsewhere(t), Action::Terminate);
        m.allow(5000 * MS, t);
        assert_eq!(m.interrupted(15, t + 20 * MS), Action::None);
        assert_eq!(m.next_tick(), Some(t + 5000 * MS));
        assert_eq!(m.interrupted(15, t + 900 * MS), Action::Kill, "asked again");
        assert_eq!(m.why(), Some(StopCause::Elsewhere));
    }

    #[test]
    fn job_codes() {
        for (end, code) in [
            (ExitStatus::Signal(9), 3),
            (ExitStatus::Signal(11), 3),
            (ExitStatus::Code(1), 1),
            (ExitStatus::Code(2), 2),
            (ExitStatus::Code(3), 3),
            (ExitStatus::Code(4), 4),
            (ExitStatus::Code(130), 130),
            (ExitStatus::Code(7), 1),
            (ExitStatus::Code(137), 1),
            (ExitStatus::Code(255), 1),
        ] {
            assert_eq!(end.job_code(true), code, "{end:?}");
            let others = if matches!(code, 3 | 4) && !matches!(end, ExitStatus::Signal(_)) {
                1
            } else {
                code
            };
            assert_eq!(end.job_code(false), others, "{end:?}");
        }
    }
}
