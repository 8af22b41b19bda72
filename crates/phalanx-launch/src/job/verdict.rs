//! Why an attempt has ended, and what follows from it.

use std::time::{Duration, Instant};

use phalanx_base::format::rank_list;
use phalanx_member::Log;
use phalanx_process::error_file::{reported_code, reported_signal};
use phalanx_process::signals::interrupted;
use rustix::process::Signal;

use super::{ECHO_WAIT, Job, Leaving, Outcome, Supervision, is_over, numbers};
use crate::error::{Error, ErrorKind};
use crate::machine::{ExitStatus, StopCause};
use crate::nodes::Nodes;
use crate::ranks::{POLL, Rank};
use crate::report::{self, JobFailure, RankName};
use crate::{flight, stop};

/// How long to wait for the sign that a node is lost, from when ranks are stopped because they have lost others.
const LOST_NODE_WAIT: Duration = Duration::from_secs(1);

/// How long the report waits for the last output of the rank that failed.
const LAST_OUTPUT: Duration = Duration::from_millis(100);

/// The exit of a Phalanx rank whose deadline passed.
const TIMED_OUT: ExitStatus = ExitStatus::Code(4);

/// How many ranks a headline names.
const MOST_NAMED: usize = 4;

impl Job<'_> {
    /// Once a stop has begun: makes the verdict and publishes it to the other nodes.
    pub(super) fn decide(&self, watch: &mut Supervision<'_>) {
        let Some(why) = watch.machine.why() else {
            return;
        };
        let is_first = watch.halted.is_none();
        if watch.was_lost {
            return;
        }
        if is_first {
            // Later they will have been killed.
            watch.halted = Some(watch.halted_now());
            if self.plan.args.elastic {
                // Ranks that do not hear it are killed after the grace.
                let why = "a rank has failed, or the job was interrupted";
                let _ = self.log_of(watch).map(|log| log.end(why));
            }
        }
        let verdict = match (why, &watch.verdict) {
            (StopCause::Elsewhere, Some(theirs)) if is_first && theirs.echo => {
                // Another node's ranks have waited for ours.
                let late = theirs.is_unexplained_timeout();
                let late = late.then(|| self.stopped_or_late(watch, None)).flatten();
                let better = match late {
                    Some(message) => JobFailure {
                        echo: false,
                        node: self.shared.node_rank,
                        message: format!("{message}; {}", theirs.message),
                        ..theirs.clone()
                    },
                    None => self.naming_a_lost_node(theirs.clone(), None),
                };
                if better.echo {
                    return;
                }
                better
            }
            (StopCause::Elsewhere, _) | (_, Some(_)) => return,
            (StopCause::Interrupt(signal), None) => {
                watch.is_final = true;
                self.interrupt_verdict(signal)
            }
            (StopCause::Rank(local), None) => {
                let verdict = self.rank_verdict(watch, local);
                // Another attempt would fail the same way.
                watch.is_final |= verdict.mistake || watch.is_usage_error(local);
                self.naming_a_lost_node(verdict, None)
            }
        };
        watch.verdict = Some(self.publish(verdict, watch.is_final));
    }

    /// A verdict that only says that ranks were lost, as one that names the node which is.
    /// Waits for the sign of that until `until`, if given: a rank may notice the lost node before the store does.
    fn naming_a_lost_node(&self, verdict: JobFailure, until: Option<Instant>) -> JobFailure {
        let codes = [ErrorKind::PeerLost, ErrorKind::Timeout].map(ErrorKind::exit_code);
        if !verdict.echo || !codes.contains(&verdict.code) {
            return verdict;
        }
        let Some(nodes) = &self.nodes else {
            return verdict;
        };
        let message = loop {
            match nodes.lost() {
                Some(message) => break message,
                None if until.is_none_or(|until| Instant::now() >= until) => return verdict,
                None => std::thread::sleep(POLL),
            }
        };
        let so = ("so".to_owned(), verdict.message);
        JobFailure {
            echo: false,
            node: self.shared.node_rank,
            message,
            notes: std::iter::once(so).chain(verdict.notes).collect(),
            ..verdict
        }
    }

    pub(super) fn rank_verdict(&self, watch: &Supervision<'_>, local: usize) -> JobFailure {
        let (Some(rank), Some(end)) = (watch.ranks.get(local), watch.machine.end(local)) else {
            return self.plain_verdict(1, "a rank failed");
        };
        rank.output_ended(Instant::now() + LAST_OUTPUT);
        let mut notes = Vec::new();
        if let Some(text) = flight::last_known(&watch.ranks, rank, end, watch.halted()) {
            notes.push((report::WHILE.to_owned(), text));
        }
        // The rank, or a program that it has started as a shell.
        let killed = matches!(end, ExitStatus::Signal(9) | ExitStatus::Code(137));
        let hint = || self.oom.hint(rank.pid, self.plan.args.node.local_ranks);
        if let Some(hint) = killed.then(hint).flatten() {
            notes.push(("perhaps".to_owned(), hint));
        }
        let error_json = rank.error_json();
        let reported = error_json.as_deref().and_then(reported_code);
        let written = error_json.as_deref().and_then(report::error_file_message);
        if let (ExitStatus::Code(2), Some(2), Some(text)) = (end, reported, &written) {
            let (message, notes) = report::taken_apart(text);
            return JobFailure {
                mistake: true,
                notes,
                ..self.plain_verdict(ErrorKind::Usage.exit_code(), &message)
            };
        }
        // The rank has printed why, as `phalanx doctor` does, and that is all there is to say.
        if let (true, ExitStatus::Code(code @ 1..), None) = (self.plan.ranks_report, end, &written)
            && reported == Some(code)
            && end.job_code(true) != ErrorKind::Interrupted.exit_code()
        {
            // For the other nodes.
            let message = format!("{} {}", self.who(rank), report::ended(end, true));
            return JobFailure {
                mistake: true,
                ..self.plain_verdict(end.job_code(true), &message)
            };
        }
        let lines = rank.last_lines();
        if let Some(text) = written {
            notes.push(("said".to_owned(), text));
        } else if let Some(text) = report::said(&lines) {
            notes.push(("stderr".to_owned(), text));
        }
        if let Some(json) = error_json {
            hand_up(&json);
        }
        let ours = rank.reported(end);
        let code = end.job_code(ours);
        let own = format!("{} {}", self.who(rank), report::ended(end, ours));
        let is_timeout = end == TIMED_OUT;
        let cause = match end {
            TIMED_OUT => self
                .stopped_or_late(watch, Some(local))
                .map(|late| format!("{late}; {own}")),
            _ if code == ErrorKind::Interrupted.exit_code() => self.sent_a_signal(watch),
            _ => None,
        };
        JobFailure {
            // Another node may know more.
            echo: cause.is_none() && (end.is_secondary() || ours && is_timeout),
            notes,
            ..self.plain_verdict(code, &cause.unwrap_or(own))
        }
    }

    /// `rank 2 (pid 4711, host node-a) is stopped by a signal or a debugger`: the ranks that others may have
    /// waited for. If none is stopped: the ranks that have not reached an operation in which others
    /// wait. `but`, a local rank, is left out.
    fn stopped_or_late(&self, watch: &Supervision<'_>, but: Option<usize>) -> Option<String> {
        let late = flight::late(&watch.ranks);
        let but = but.map(|local| watch.ranks[local].rank);
        let names = |wanted: &[usize]| -> Vec<String> {
            let others = watch.running().filter(|rank| Some(rank.rank) != but);
            let wanted = others.filter(|rank| wanted.contains(&rank.rank));
            wanted.map(|rank| self.who(rank).to_string()).collect()
        };
        let (names, what) = match names(watch.halted()) {
            stopped if stopped.is_empty() => (names(&late), "late"),
            stopped => (stopped, "stopped by a signal or a debugger"),
        };
        let verb = match names.len() {
            0 => return None,
            1 => "is",
            _ => "are",
        };
        let more = names.len().saturating_sub(MOST_NAMED);
        let mut named = names[..names.len().min(MOST_NAMED)].join(", ");
        if more > 0 {
            named.push_str(&format!(" and {more} more"));
        }
        Some(format!("{named} {verb} {what}"))
    }

    /// The rank that got the signal which stopped the job.
    fn sent_a_signal(&self, watch: &Supervision<'_>) -> Option<String> {
        let asked = watch.ranks.iter().find_map(|rank| {
            let signal = reported_signal(&rank.error_json()?)?;
            Some((rank, signal))
        });
        let (rank, signal) = asked?;
        let name = stop::signal_name(signal);
        Some(format!("{} was sent {name}", self.who(rank)))
    }

    pub(super) fn who(&self, rank: &Rank) -> RankName<'_> {
        RankName {
            rank: rank.rank,
            pid: rank.pid.as_raw_nonzero().get(),
            host: &self.host,
            node: self.node(),
        }
    }

    /// The verdict of this launcher, which got `signal`.
    pub(super) fn interrupt_verdict(&self, signal: i32) -> JobFailure {
        let error = interrupted(signal);
        let message = match self.node() {
            None => error.chain(),
            Some(node) => format!("node {node} (host {}) was {}", self.host, error.chain()),
        };
        self.plain_verdict(error.exit_code(), &message)
    }

    pub(super) fn plain_verdict(&self, code: u8, message: &str) -> JobFailure {
        JobFailure::new(code, self.shared.node_rank, message)
    }

    /// Publishes the verdict to the other nodes, and returns the one that holds.
    pub(super) fn publish(&self, verdict: JobFailure, is_final: bool) -> JobFailure {
        match &self.nodes {
            None => verdict,
            Some(nodes) => nodes.publish(&verdict, is_final),
        }
    }

    /// Our node's number, when there are several.
    pub(super) fn node(&self) -> Option<usize> {
        let are_several = self.shared.nodes > 1 || self.continues_in_place();
        are_several.then_some(self.shared.node_rank)
    }

    /// The verdict that holds once all ranks here have ended.
    fn last_verdict(&self, watch: &mut Supervision<'_>, why: StopCause) -> JobFailure {
        // Another rank may have written its error file since, and a node's connection may have ended.
        if let Some(own) = watch.verdict.clone().filter(|own| own.echo) {
            let again = match why {
                StopCause::Rank(local) => self.rank_verdict(watch, local),
                _ => own,
            };
            let until = watch.stopping_since.map(|since| since + LOST_NODE_WAIT);
            let again = self.naming_a_lost_node(again, until);
            if !again.echo {
                watch.verdict = Some(self.publish(again, watch.is_final));
            }
        }
        // Another node's verdict may explain more than ours.
        let until = Instant::now() + ECHO_WAIT;
        let mut shared = self.nodes.as_ref().and_then(Nodes::verdict);
        while shared
            .as_ref()
            .is_some_and(JobFailure::is_unexplained_timeout)
            && Instant::now() < until
        {
            std::thread::sleep(POLL);
            shared = self.nodes.as_ref().and_then(Nodes::verdict);
        }
        match (shared, watch.verdict.take()) {
            (Some(shared), Some(own)) if shared.echo && !own.echo => own,
            (Some(shared), _) => shared,
            (None, Some(own)) => own,
            (None, None) => self.plain_verdict(3, "another node failed and gave no reason"),
        }
    }

    /// Which ranks were stopped, or could not be.
    pub(super) fn stopped(&self, watch: &Supervision<'_>) -> Option<String> {
        let immortal = numbers(watch.running());
        if !immortal.is_empty() {
            return Some(format!(
                "{} did not end after SIGKILL: blocked in the kernel",
                rank_list(&immortal)
            ));
        }
        let stopped = watch.machine.stopped();
        let stopped = numbers(stopped.iter().map(|local| &watch.ranks[*local]));
        let since = watch.stopping_since;
        let took = since.map_or(Duration::ZERO, |since| since.elapsed());
        report::stopped(&stopped, took)
    }

    pub(super) fn outcome(&self, mut watch: Supervision<'_>) -> Outcome {
        let Some(why) = watch.machine.why().filter(|_| !watch.was_lost) else {
            return self.outcome_without_failure(&watch);
        };
        let verdict = self.last_verdict(&mut watch, why);
        let so = self.stopped(&watch);
        if self.plan.ranks_report && watch.all_stopped_themselves() {
            return Outcome::Final(verdict.into_error(so).printed());
        }
        // The signal came after all work was done.
        let alone = self.plan.ranks_report && self.nodes.is_none();
        if alone && watch.is_interrupt() && watch.all_ended_well() {
            return Outcome::Success;
        }
        let (verdict, culprit) = match (watch.failed_to_stop(), why) {
            (Some(local), _) => {
                let mut own = self.rank_verdict(&watch, local);
                own.mistake = false;
                own.notes.push(("asked".to_owned(), verdict.message));
                (own, Some(local))
            }
            (None, StopCause::Rank(local)) => (verdict, Some(local)),
            (None, _) => (verdict, None),
        };
        if verdict.mistake {
            // This node's terminal has more than the message.
            let is_here = verdict.node == self.shared.node_rank;
            let is_printed = is_here && verdict.code != ErrorKind::Usage.exit_code();
            let error = verdict.into_error(None);
            return Outcome::Final(if is_printed { error.printed() } else { error });
        }
        let interrupted = ErrorKind::Interrupted.exit_code();
        let is_interrupt = verdict.code == interrupted;
        let mut error = verdict.into_error(so);
        let also = watch.machine.also_failed(culprit);
        // They stopped together with the rank that got the signal.
        let stopped_too = |end: &ExitStatus| is_interrupt && end.job_code(true) == interrupted;
        let mut also: Vec<String> = also
            .iter()
            .filter(|(_, end)| !stopped_too(end))
            .map(|(local, end)| {
                let ended = report::ended(*end, watch.ranks[*local].reported(*end));
                format!("rank {} {ended}", watch.ranks[*local].rank)
            })
            .collect();
        let more = also.len().saturating_sub(MOST_NAMED);
        if more > 0 {
            also.truncate(MOST_NAMED);
            also.push(format!("and {more} more"));
        }
        if !also.is_empty() {
            error = error.note("also", also.join(", "));
        }
        // What a rank failed by on its own, as a file that cannot be read, is not found between the ranks.
        let fails_alone = culprit.is_some_and(|local| watch.has_failed_alone(local));
        if let Some(text) = self.keep_flight(&watch).filter(|_| !fails_alone) {
            error = error.note("inspect", text);
        }
        let can_restart = self.nodes.as_ref().is_none_or(Nodes::can_restart);
        let leaving = watch.leaving.map(|leaving| leaving.signal);
        match watch.asked_to_end.or(leaving) {
            _ if watch.is_final || !can_restart => Outcome::Final(error),
            Some(signal) if self.may_follow(&watch) => {
                let verdict = self.publish(self.interrupt_verdict(signal), true);
                Outcome::Final(verdict.into_error(None))
            }
            _ => Outcome::Failed(error),
        }
    }

    /// The job has not ended for a failure of these ranks.
    fn outcome_without_failure(&self, watch: &Supervision<'_>) -> Outcome {
        let node = match self.node() {
            Some(node) => format!("node {node} (host {})", self.host),
            None => format!("host {}", self.host),
        };
        let left = |kind, what: String| Outcome::Left(Error::new(kind, format!("{node} {what}")));
        if watch.was_lost {
            let what = "was cut off from the others for too long".to_owned();
            return left(ErrorKind::PeerLost, what);
        }
        let mut ends = (0..watch.ranks.len()).map(|local| watch.machine.end(local));
        let any_good = ends.any(|end| end.is_some_and(ExitStatus::is_ok));
        let joined_late = self.nodes.as_ref().is_some_and(Nodes::has_joined_late);
        let nodes = self.nodes.as_ref();
        let is_over = || nodes.is_some_and(|nodes| is_over(&mut Log::new(nodes.store())));
        match watch.leaving {
            // It had ended before they could leave.
            Some(_) if watch.all_ended_well() && is_over() => Outcome::Success,
            Some(Leaving { signal, .. }) => {
                let name = stop::signal_name(signal);
                match watch.give_up {
                    Some(_) => {
                        let what = format!("has left after {name}, and its ranks were killed");
                        left(ErrorKind::PeerLost, what)
                    }
                    None if signal == Signal::TERM.as_raw() => {
                        left(ErrorKind::Stopped, format!("has left after {name}"))
                    }
                    None => left(ErrorKind::Interrupted, format!("has left after {name}")),
                }
            }
            None if any_good => Outcome::Success,
            None if joined_late && let Some(why) = &watch.refused => {
                let message = format!("{node} cannot take part: {}", why.message);
                let why = JobFailure {
                    message,
                    ..why.clone()
                };
                Outcome::Left(why.into_error(None))
            }
            None if self.nodes.as_ref().is_none_or(Nodes::hosts_store) => Outcome::HostLeft,
            None => left(ErrorKind::PeerLost, "has lost all its ranks".to_owned()),
        }
    }

    /// Whether another attempt may follow this one.
    fn may_follow(&self, watch: &Supervision<'_>) -> bool {
        let most = self.plan.args.max_restarts;
        match &self.nodes {
            None => watch.restarts < most,
            Some(nodes) => nodes.is_elastic() || watch.attempt < most,
        }
    }

    /// Writes the flight recorders of the ranks, all of which have ended, and returns how to look at them.
    fn keep_flight(&self, watch: &Supervision<'_>) -> Option<String> {
        let by_itself = |local: &usize| !watch.machine.stopped().contains(local);
        let ends: Vec<Option<ExitStatus>> = (0..watch.ranks.len())
            .map(|local| watch.machine.end(local).filter(|_| by_itself(&local)))
            .collect();
        let dir = self.plan.flight_dir.as_deref();
        flight::keep(&watch.ranks, &ends, watch.halted(), dir)
    }
}

/// Copies the root cause's error file to our own TORCHELASTIC_ERROR_FILE, as torchrun does.
fn hand_up(json: &str) {
    if let Some(path) = std::env::var_os("TORCHELASTIC_ERROR_FILE") {
        // The launch has failed anyway.
        let _ = std::fs::write(path, json);
    }
}
