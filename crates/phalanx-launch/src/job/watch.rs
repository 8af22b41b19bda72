//! Watches the ranks of an attempt to their end.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use phalanx_base::format::rank_list;
use phalanx_comm::recorder::Failure;
use phalanx_process::reap;
use phalanx_process::signals::{Caught, can_be_continued, suspend_self};
use rustix::process::{Signal, kill_process};

use super::{Job, Supervision, numbers};
use crate::error::ErrorKind;
use crate::job_files::RankFacts;
use crate::machine::{Action, ExitStatus, StopCause};
use crate::nodes::Nodes;
use crate::ranks::{POLL, Rank, catches};
use crate::report::{self, JobFailure};
use crate::{Event, flight, say, stop};

/// How often the states and the output of the ranks are written for the live page.
const LIVE_EVERY: Duration = Duration::from_millis(500);

/// How many times in a row a rank is found late before the page says so: in a collective, one rank
/// is always the last.
const LATE_LOOKS: usize = 6;

/// When the store is asked again that did not answer.
const REPORT_AGAIN: Duration = Duration::from_millis(100);

/// How long to wait for processes after SIGKILL; one that is blocked in the kernel for
/// longer is reported.
const REAP_LIMIT: Duration = Duration::from_secs(5);

/// How long a rank that is stopped by a signal (SIGSTOP) may stay so after it was asked to end.
const STOPPED_GRACE: Duration = Duration::from_secs(1);

/// How often to look for ended orphans while nothing else happens.
const SWEEP: Duration = Duration::from_secs(30);

/// How long after the first successful exit the ranks that still run are reported, once:
/// they may be waiting for it.
const LONE_AFTER: Duration = Duration::from_secs(10);

impl Job<'_> {
    /// Writes the states of the ranks into the job's files.
    pub(super) fn show(&self, watch: &mut Supervision<'_>) {
        let Some(files) = &self.files else { return };
        let late = flight::late(&watch.ranks);
        watch.late.retain(|rank, _| late.contains(rank));
        for rank in late {
            *watch.late.entry(rank).or_default() += 1;
        }
        let state = |local: usize, rank: &Rank| match watch.machine.end(local) {
            Some(end) if end.is_ok() => "done",
            Some(_) if watch.machine.stopped().contains(&local) => "ended",
            Some(_) => "failed",
            None if rank.is_stopped() => "stopped",
            None if watch.late.get(&rank.rank) >= Some(&LATE_LOOKS) => "late",
            None => "running",
        };
        let here = watch.ranks.iter().enumerate().map(|(local, rank)| {
            let end = watch.machine.end(local);
            RankFacts {
                rank: rank.rank,
                host: self.host.clone(),
                pid: Some(rank.pid.as_raw_nonzero().get()),
                state: state(local, rank),
                end: end.map(|end| report::ended(end, rank.reported(end))),
            }
        });
        let nodes = self.nodes.iter().flat_map(|nodes| nodes.infos());
        let hosts = nodes.flat_map(|node| std::iter::repeat_n(&node.host, node.local_ranks));
        let own = self.shared.first_rank..self.shared.first_rank + self.shared.local_ranks;
        let others = hosts.enumerate().filter(|(rank, _)| !own.contains(rank));
        let others = others.map(|(rank, host)| RankFacts {
            rank,
            host: host.clone(),
            pid: None,
            state: "elsewhere",
            end: None,
        });
        let mut all: Vec<_> = here.chain(others).collect();
        all.sort_by_key(|rank| rank.rank);
        files.set_ranks(all);
    }

    /// Watches the ranks until all have ended and were reaped. There is no deadline
    /// while nothing is wrong.
    pub(super) fn watch_to_the_end(&mut self, watch: &mut Supervision<'_>) {
        let mut shown = None;
        loop {
            let now = Instant::now();
            if self.files.is_some() && shown.is_none_or(|at| now >= at + LIVE_EVERY) {
                self.show(watch);
                shown = Some(now);
            }
            let all_reported = watch.unreported.is_empty() || watch.machine.why().is_some();
            let over = watch.machine.finished() && watch.reaped == watch.started && all_reported;
            if over || watch.give_up.is_some_and(|at| now >= at) {
                return;
            }
            self.evict(watch, now);
            let wake = watch.wake(now).min(shown.map_or(SWEEP, |_| LIVE_EVERY));
            let action = match self.events.recv_timeout(wake) {
                Ok(event) => self.handle(watch, event),
                // Never disconnected: this process holds a sender.
                Err(_) => {
                    for local in std::mem::take(&mut watch.unreported) {
                        self.lose(watch, local);
                    }
                    reap::reap_strangers(&watch.children);
                    Action::None
                }
            };
            match action {
                Action::Lose(local) => self.lose(watch, local),
                action => watch.act(action),
            }
            let action = watch.machine.tick(Instant::now());
            watch.act(action);
            watch.kill_stopped(Instant::now());
            self.decide(watch);
            if let Some(leaving) = watch.leaving
                && watch.give_up.is_none()
                && Instant::now() >= leaving.until
            {
                let name = stop::signal_name(leaving.signal);
                self.note(format!(
                    "warning: the ranks have not left within the grace after {name} and are killed"
                ));
                watch.kill();
            }
            if watch.lone_at.is_some_and(|at| Instant::now() >= at) {
                watch.lone_at = Some(Instant::now() + LONE_AFTER);
                if !std::mem::replace(&mut watch.lone_reported, true) {
                    self.say_who_still_runs(watch);
                }
                self.end_if_all_are_stopped(watch);
            }
        }
    }

    /// What follows from `event`, while ranks run.
    fn handle(&mut self, watch: &mut Supervision<'_>, event: Event) -> Action {
        match event {
            Event::Signal(Caught::Dump) => self.show_flight(watch),
            Event::NodeLost(node) => {
                return self.end_by(watch, |nodes| nodes.verdict_of_lost(node));
            }
            Event::Parted => {
                self.may_continue_elsewhere = true;
                let is_first = watch.machine.why().is_none();
                let action = self.end_by(watch, Nodes::verdict_of_parted);
                if is_first {
                    // What the ranks could still do is done elsewhere.
                    watch.kill();
                }
                return action;
            }
            Event::StoreMoved(moved) => {
                if let Err(error) = self.store_moved(moved) {
                    self.note(format!("warning: {}", error.chain()));
                    // The others elect another one. This process holds the receiver.
                    let _ = self.sender.send(Event::Parted);
                }
            }
            Event::Admit(attempt) => {
                if let Err(error) = self.admit(&attempt) {
                    self.note(format!("warning: {}", error.chain()));
                }
            }
            Event::Signal(Caught::End(signal, at)) if self.leave(watch, signal, at) => {}
            Event::WasLost => {
                watch.was_lost = true;
                return watch.machine.failed_elsewhere(Instant::now());
            }
            event => {
                if let Event::Ended(local, end, _) = &event
                    && self.plan.args.elastic
                {
                    match end.is_ok() {
                        true => self.is_done(watch, *local),
                        false => self.judge(watch, *local),
                    }
                }
                return watch.take(event, Instant::now());
            }
        }
        Action::None
    }

    /// Ends processes that the ranks of a failed or interrupted job have left in sessions of
    /// their own; those with a handler for SIGTERM get `grace`, unless another signal comes.
    pub(super) fn end_strangers(&self, watch: &Supervision<'_>, grace: Duration) {
        if !self.alone {
            return;
        }
        let until = Instant::now() + grace;
        let mut asked = HashSet::new();
        let mut later = Vec::new();
        loop {
            let left = reap::reap_strangers(&watch.children);
            let answering = left.iter().filter(|pid| catches(**pid, Signal::TERM));
            if answering.count() == 0 || Instant::now() >= until {
                break;
            }
            for pid in left {
                if asked.insert(pid) {
                    let _ = kill_process(pid, Signal::TERM);
                }
            }
            match self.events.recv_timeout(POLL) {
                Ok(Event::Signal(Caught::End(..))) => break,
                Ok(Event::Signal(Caught::Suspend)) => suspend_self(),
                Ok(
                    event @ (Event::Abort(_)
                    | Event::StoreLost(_)
                    | Event::NodeLost(_)
                    | Event::WasLost
                    | Event::StoreMoved(..)
                    | Event::Parted
                    | Event::Admit(_)),
                ) => {
                    later.push(event);
                }
                _ => {}
            }
        }
        reap::kill_strangers(&watch.children);
        // Where another attempt would follow, they end the job.
        for event in later {
            // This process holds the receiver.
            let _ = self.sender.send(event);
        }
    }

    /// Writes the flight recorders of the running ranks and prints where they are.
    fn show_flight(&self, watch: &Supervision<'_>) {
        let none = vec![None; watch.ranks.len()];
        let dir = self.plan.flight_dir.as_deref();
        match flight::keep(&watch.ranks, &none, &watch.halted_now(), dir) {
            Some(text) => say::note(format_args!("flight recorders: {text}")),
            None => say::note(format_args!("flight recorders: no rank has one yet")),
        }
    }

    /// Prints which ranks have succeeded and which still run.
    fn say_who_still_runs(&self, watch: &Supervision<'_>) {
        let running = numbers(watch.running());
        if running.is_empty() || watch.machine.why().is_some() {
            return;
        }
        let ended = watch.ranks.iter();
        let ended = numbers(ended.filter(|rank| !running.contains(&rank.rank)));
        let verb = if running.len() == 1 { "is" } else { "are" };
        self.note(format!(
            "{} ended {} s ago with code 0; {} {verb} still running and may be waiting for it",
            rank_list(&ended),
            LONE_AFTER.as_secs(),
            rank_list(&running),
        ));
    }

    /// Ends the job if all ranks that still run are stopped by a signal: they will not end by
    /// themselves, and no other rank waits for them.
    fn end_if_all_are_stopped(&self, watch: &mut Supervision<'_>) {
        let running: Vec<&Rank> = watch.running().collect();
        let stopped = !running.is_empty() && running.iter().all(|rank| rank.is_stopped_by_signal());
        if !stopped || watch.machine.why().is_some() {
            return;
        }
        let name = |rank: &&Rank| {
            let pid = rank.pid.as_raw_nonzero();
            format!("rank {} (pid {pid}) is stopped by a signal", rank.rank)
        };
        let names: Vec<String> = running.iter().map(name).collect();
        let message = format!("{}, and all other ranks have ended well", names.join(", "));
        let verdict = self.plain_verdict(ErrorKind::Timeout.exit_code(), &message);
        watch.is_final = true;
        watch.verdict = Some(self.publish(verdict, true));
        let action = watch.machine.failed_elsewhere(Instant::now());
        watch.act(action);
    }

    /// A node is lost, and with it the job, for the reason in `verdict`.
    fn end_by(
        &self,
        watch: &mut Supervision<'_>,
        verdict: impl FnOnce(&Nodes) -> JobFailure,
    ) -> Action {
        watch.is_final = true;
        let is_first = watch.machine.why().is_none();
        // The others would wait for the lost node before they start again.
        let nodes = self.nodes.as_ref();
        if let Some(nodes) = nodes.filter(|nodes| is_first || nodes.can_restart()) {
            let verdict = nodes.publish(&verdict(nodes), true);
            if is_first {
                watch.verdict = Some(verdict);
            }
        }
        watch.machine.failed_elsewhere(Instant::now())
    }
}

impl Supervision<'_> {
    /// The ranks that have not ended.
    pub(super) fn running(&self) -> impl Iterator<Item = &Rank> {
        let ranks = self.ranks.iter().enumerate();
        let running = ranks.filter(|(local, _)| self.machine.end(*local).is_none());
        running.map(|(_, rank)| rank)
    }

    /// The ranks that are stopped (SIGSTOP, a debugger).
    pub(super) fn halted_now(&self) -> Vec<usize> {
        numbers(self.ranks.iter().filter(|rank| rank.is_stopped()))
    }

    pub(super) fn halted(&self) -> &[usize] {
        self.halted.as_deref().unwrap_or_default()
    }

    pub(super) fn take(&mut self, event: Event, now: Instant) -> Action {
        match event {
            Event::Ended(local, end, at) => {
                if end.is_ok() {
                    self.lone_at.get_or_insert(at + LONE_AFTER);
                }
                return self.machine.ended(local, end, at);
            }
            Event::Reaped => self.reaped += 1,
            // Two signals at once count as one, even if handling the first took long.
            Event::Signal(Caught::End(signal, at)) => {
                if self.machine.why().is_some() {
                    self.asked_to_end.get_or_insert(signal);
                }
                return self.machine.interrupted(signal, at);
            }
            Event::Signal(Caught::Suspend) => self.suspend(),
            Event::Signal(Caught::Checkpoint) => {
                let notified = self.ranks.iter().filter(|r| r.notify(Signal::USR1));
                if notified.count() == 0 {
                    say::note(
                        "warning: SIGUSR1 is not forwarded: no rank has a handler for it (yet), and it would end them",
                    );
                }
            }
            // Not of the attempt before, and not our own end.
            Event::Over(attempt, verdict) if attempt == self.attempt && verdict.code != 0 => {
                return self.end_elsewhere(*verdict, now);
            }
            Event::Abort(verdict) => {
                self.is_final = true;
                return self.end_elsewhere(*verdict, now);
            }
            Event::StoreLost(why) => {
                self.is_final = true;
                let code = ErrorKind::PeerLost.exit_code();
                return self.end_elsewhere(JobFailure::new(code, 0, why), now);
            }
            // Of the attempt before, or our own end; the others are handled by the caller.
            Event::Over(..)
            | Event::Signal(Caught::Dump)
            | Event::NodeLost(_)
            | Event::WasLost
            | Event::StoreMoved(..)
            | Event::Parted
            | Event::Admit(_) => {}
        }
        Action::None
    }

    fn end_elsewhere(&mut self, verdict: JobFailure, now: Instant) -> Action {
        if self.machine.why().is_none() {
            self.verdict = Some(verdict);
        }
        self.machine.failed_elsewhere(now)
    }

    /// Stops the ranks with the launcher at a Ctrl-Z, which reaches only the launcher as ranks
    /// have process groups of their own, and continues them with it. A deadline that passes
    /// meanwhile counts only if nothing has arrived when they continue.
    fn suspend(&self) {
        if !can_be_continued() {
            say::note("Ctrl-Z is ignored: no shell could continue the job");
            return;
        }
        for rank in &self.ranks {
            rank.signal(Signal::STOP);
        }
        suspend_self();
        for rank in &self.ranks {
            rank.signal(Signal::CONT);
        }
    }

    /// Whether the job was interrupted, here or on another node, and did not fail.
    pub(super) fn is_interrupt(&self) -> bool {
        match self.machine.why() {
            Some(StopCause::Interrupt(_)) => true,
            Some(StopCause::Elsewhere) => {
                let code = ErrorKind::Interrupted.exit_code();
                self.verdict.as_ref().is_some_and(|v| v.code == code)
            }
            _ => false,
        }
    }

    /// Whether all ranks ended by themselves with the code of an interrupt: they have reported
    /// it then.
    pub(super) fn all_stopped_themselves(&self) -> bool {
        let end = ExitStatus::Code(ErrorKind::Interrupted.exit_code().into());
        let mut ranks = self.ranks.iter().enumerate();
        ranks.all(|(local, rank)| rank.is_lost || self.machine.end(local) == Some(end))
    }

    /// Whether the rank is a Phalanx program that reported a usage error.
    pub(super) fn is_usage_error(&self, local: usize) -> bool {
        let end = ExitStatus::Code(ErrorKind::Usage.exit_code().into());
        self.machine.end(local) == Some(end) && self.ranks[local].reported(end)
    }

    /// Whether the rank is a Phalanx program that reported an error of its own, and no operation between ranks has failed on it.
    pub(super) fn has_failed_alone(&self, local: usize) -> bool {
        let rank = &self.ranks[local];
        let own = ExitStatus::Code(ErrorKind::Failed.exit_code().into());
        // It aborts its group itself, so that the others need not wait.
        let alone = [None, Some(Failure::Aborted), Some(Failure::Panicked)];
        let is_alone = || {
            rank.flight()
                .is_none_or(|dump| alone.contains(&dump.failure))
        };
        self.machine.end(local) == Some(own) && rank.reported(own) && is_alone()
    }

    pub(super) fn all_ended_well(&self) -> bool {
        (0..self.ranks.len()).all(|local| self.machine.end(local).is_some_and(ExitStatus::is_ok))
    }

    /// A rank that reported an error while it was stopping: it could not save a checkpoint, for
    /// example.
    pub(super) fn failed_to_stop(&self) -> Option<usize> {
        // Those that the job did without.
        let is_others =
            |local: &usize| self.ranks[*local].is_lost || self.machine.is_candidate(*local);
        let failed = |local: &usize| {
            let end = self.machine.end(*local);
            end.is_some_and(|end| {
                let rank = &self.ranks[*local];
                matches!(end, ExitStatus::Code(1 | 2)) && rank.reported(end) && !is_others(local)
            })
        };
        (0..self.ranks.len()).find(|local| self.is_interrupt() && failed(local))
    }

    /// From SIGTERM to SIGKILL where a rank's group has a handler for SIGTERM: the default, or what the ranks
    /// have asked for.
    pub(super) fn handler_grace(&self) -> Duration {
        const LONGEST: Duration = Duration::from_secs(86_400);
        let least = self.args.handler_grace;
        let ranks = self.ranks.iter().filter(|_| !self.args.grace_is_typed);
        let asked = ranks.filter_map(|rank| rank.flight()?.stop_grace).max();
        asked.map_or(least, |asked| asked.min(LONGEST).max(least))
    }

    /// What asks the ranks to end: SIGTERM, or the SIGUSR1 or SIGUSR2 that ended the job, which a program may
    /// handle apart.
    fn stop_signal(&self) -> Signal {
        match self.machine.why() {
            Some(StopCause::Interrupt(signal)) if signal == Signal::USR1.as_raw() => Signal::USR1,
            Some(StopCause::Interrupt(signal)) if signal == Signal::USR2.as_raw() => Signal::USR2,
            _ => Signal::TERM,
        }
    }

    pub(super) fn act(&mut self, action: Action) {
        match action {
            Action::None | Action::Lose(_) => {}
            Action::Terminate => {
                let now = Instant::now();
                self.stopping_since = Some(now);
                let signal = self.stop_signal();
                if self.is_interrupt() && self.ranks.iter().any(|rank| rank.answers(signal)) {
                    let grace = self.handler_grace();
                    self.machine.allow(grace, now);
                    for rank in &self.ranks {
                        rank.spare_group_until(now + grace);
                    }
                }
                for rank in &self.ranks {
                    rank.signal(signal);
                }
            }
            Action::Kill => self.kill(),
        }
    }

    /// How long to wait for the next event at most.
    fn wake(&self, now: Instant) -> Duration {
        let evictions = self.evictions.as_ref();
        let evictions = evictions.filter(|_| self.machine.why().is_none());
        let leaving = self.leaving.filter(|_| self.give_up.is_none());
        let first = [
            evictions.map(|evictions| evictions.next_check(now)),
            self.machine.next_tick(),
            self.give_up,
            self.lone_at,
            leaving.map(|leaving| leaving.until),
            self.next_stop_check(now),
            (!self.unreported.is_empty()).then(|| now + REPORT_AGAIN),
        ]
        .into_iter()
        .flatten()
        .min();
        first.map_or(SWEEP, |at| at.saturating_duration_since(now))
    }

    /// When to look for ranks that [are stopped](Self::kill_stopped).
    fn next_stop_check(&self, now: Instant) -> Option<Instant> {
        let first = self.stopping_since? + STOPPED_GRACE;
        self.give_up
            .is_none()
            .then(|| first.max(now + STOPPED_GRACE / 2))
    }

    /// Kills the ranks that were asked to end and are stopped by a signal: they can neither save nor end. Not where somebody
    /// has asked for another grace than the usual one.
    fn kill_stopped(&self, now: Instant) {
        let is_usual =
            || !self.args.grace_is_typed && self.handler_grace() <= self.args.handler_grace;
        let since = self
            .stopping_since
            .filter(|since| now >= *since + STOPPED_GRACE);
        if since.is_some() && is_usual() {
            self.running().for_each(Rank::kill_if_stopped);
        }
    }

    pub(super) fn kill(&mut self) {
        self.give_up = Some(Instant::now() + REAP_LIMIT);
        for rank in &self.ranks {
            rank.signal(Signal::KILL);
        }
    }
}
