//! How another rank writes the run's files when rank 0 is lost or leaves, and what it reports of a change of the ranks.

use std::time::Instant;

use phalanx_base::env::real_env;
use phalanx_comm::ReduceOp;
use phalanx_data::progress::Progress;
use serde_json::{Value, json};

use super::{Purpose, Trainer};
use crate::batch::StepContext;
use crate::deliveries::Deliveries;
use crate::error::{Error, ErrorKind, Result};
use crate::folder::Output;
use crate::log::RUN_FILE;
use crate::say;
use crate::strategy::Strategy;

/// Records of `metrics.jsonl` that each rank keeps, in case rank 0 was lost before it wrote them.
const KEPT_RECORDS: usize = 8;

/// A change of the ranks.
pub(super) struct Change {
    pub before: usize,
    pub after: usize,
    pub noticed: Instant,
    pub agreed: Instant,
    pub state: Instant,
}

impl<M, S: Strategy> Trainer<'_, M, S> {
    /// Has the new rank 0 write the run's files, if the one before was lost. Where it cannot, nothing is written until the end.
    pub(super) fn take_over_reports(&mut self) -> Result<()> {
        let opened = match self.open_reports() {
            Err(error) if !is_of_peer(&error) => {
                let (dir, why) = (self.reports.output.dir().display(), error.chain());
                say::note(format_args!(
                    "warning: nothing is written into {dir} from now on, and no checkpoint is saved: {why}"
                ));
                false
            }
            opened => opened.map(|()| true)?,
        };
        // Saving is the work of all ranks.
        let mut off = [u8::from(!opened)];
        self.ctx.group().all_reduce(&mut off, ReduceOp::Max)?;
        self.saving.is_off = off != [0];
        Ok(())
    }

    /// Begins to write the run's files on rank 0, if it could not before: now something must be saved. If it still cannot, it
    /// leaves, and another rank does it.
    pub(super) fn must_open_reports(&mut self) -> Result<()> {
        match self.open_reports() {
            Err(error) if self.ctx.world() > 1 && !is_of_peer(&error) => {
                self.elastic.is_lost = true;
                Err(self.leave_by(&format!(
                    "this rank leaves the training, as it cannot save its result: {}",
                    error.chain()
                ))?)
            }
            opened => opened,
        }
    }

    /// Begins to write the run's files on rank 0, as the one that was lost has done.
    fn open_reports(&mut self) -> Result<()> {
        let (ctx, settings) = (self.ctx, self.settings);
        if !ctx.is_main() || self.reports.output.is_opened() || self.purpose != Purpose::Train {
            return Ok(());
        }
        let lost = self.agreed()?.map(|(writer, _)| writer);
        let _phase = self.ctx.phase("reporting");
        let dir = self.reports.output.dir().to_owned();
        let files = self.reports.files.clone();
        if !dir.join(RUN_FILE).exists() {
            // On another disk, where the copy has what the lost rank had written.
            // Before the first checkpoint there is none. The training is worth more than its log so far.
            let copied = (settings.track.prepare(&dir, true, false))
                .unwrap_or_else(|e| Some(format!("warning: the copy begins anew: {}", e.chain())));
            copied.into_iter().for_each(|text| ctx.note(&text));
        }
        let output = Output::open(ctx, dir, files, &settings.saving, lost.as_ref())?;
        let records = self.elastic.records.make_contiguous();
        let log = output.log_of_lost(ctx, self.course.place, &self.reports.info, records)?;
        self.elastic.records.clear();
        let mut trackers = std::mem::take(&mut self.reports.trackers);
        match settings.track.of_run(&real_env()) {
            Ok(own) => trackers.extend(own),
            // What the host of the lost rank 0 had need not be here.
            Err(error) => say::note(format_args!(
                "warning: trackers get nothing from now on: {}",
                error.chain()
            )),
        }
        self.saving
            .take_over(output.checkpoints(settings.saving.keep()));
        let mut progress = Progress::for_rank(ctx.rank()).with_unit(self.sources.unit.0);
        if let Some(running) = &self.course.running {
            let epochs = self.course.extent.epochs() as u64;
            let end = self.course.extent.epoch_end(self.course.place);
            progress.begin(running.epoch as u64, epochs, end);
            progress.skip(self.course.place.step_in_epoch as usize);
        }
        let reports = &mut self.reports;
        reports.log = log;
        reports.deliveries = Deliveries::start(output.dir(), trackers);
        reports.output = output;
        reports.progress = progress;
        self.set_agreed()
    }

    /// Completes the run's files as far as they are, for the rank that becomes rank 0.
    pub(super) fn hand_over_reports(&mut self) -> Result<()> {
        let _phase = self.ctx.phase("reporting");
        self.saving.finish()?;
        let reports = &mut self.reports;
        reports.progress.end();
        reports.log.stop();
        reports.deliveries.finish();
        reports.output = Output::nowhere(reports.output.dir().to_owned());
        Ok(())
    }

    /// Keeps a record of metrics, in case rank 0 is lost before it writes it.
    pub(super) fn keep_record(&mut self, record: &Value) {
        if self.ctx.elastic.is_some() && !self.ctx.is_main() {
            let records = &mut self.elastic.records;
            if records.len() == KEPT_RECORDS {
                records.pop_front();
            }
            records.push_back(record.clone());
        }
    }

    /// After a step: reports a change of the ranks before it.
    pub(super) fn report_change(&mut self, taken: &StepContext) -> Result<()> {
        if std::mem::take(&mut self.elastic.is_candidate) {
            self.announce_joined(true)?;
        }
        let changes = std::mem::take(&mut self.elastic.changes);
        (changes.iter()).for_each(|change| self.report_one(taken, change));
        Ok(())
    }

    fn report_one(&mut self, taken: &StepContext, change: &Change) {
        let ctx = self.ctx;
        let redone = Instant::now();
        let ms =
            |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
        let at = |time: Instant| time.saturating_duration_since(ctx.started()).as_secs_f64();
        let world = change.after;
        let text = format!(
            "elastic  {}: world size {} -> {world} (regroup {:.0} ms, state {:.0} ms, step {:.0} ms)",
            taken.name(),
            change.before,
            ms(change.noticed, change.agreed),
            ms(change.noticed, change.state),
            ms(change.noticed, redone),
        );
        let reports = &mut self.reports;
        reports.progress.suspend(|| ctx.note(&text));
        let step = ((taken.epoch - 1) * self.sources.steps + taken.index) as u64;
        reports.log.notice(step, &text);
        let change = json!({
            "before": change.before, "after": world, "noticed_s": at(change.noticed), "agreed_s": at(change.agreed),
            "state_s": at(change.state), "redone_s": at(redone),
        });
        reports.log.say("ranks", Some(step), change);
    }
}

/// Whether another process is the cause, and not this rank's folder.
fn is_of_peer(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Timeout)
}
