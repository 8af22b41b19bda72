//! Gradients of which each rank gets only its part.

use std::ops::Range;
use std::time::{Duration, Instant};

use phalanx_comm::{Bucket, Call, ReduceOp};

use super::memory::Memory;
use super::{Exchange, Reducer, not_averaged};
use crate::error::{Error, Result};

impl Reducer {
    pub(super) fn is_scattered(&self) -> bool {
        self.options.exchange.is_scattered()
    }

    /// Whether buckets are not sent before the optimizer's step.
    pub(super) fn is_late(&self) -> bool {
        self.options.exchange == Exchange::AtStep && self.group.world_size() > 1
    }

    /// Exchanges late gradients, so that [`piece`](Self::piece) returns them.
    pub(crate) fn exchange_late(&mut self) -> Result<()> {
        self.check_usable()?;
        if self.exchanged || !self.committed {
            return Ok(());
        }
        let began = Instant::now();
        for bucket in 0..self.memory.len() {
            let mut chunk = self.chunk(bucket);
            let Memory::Reduced(memory) = &mut self.memory[bucket] else {
                continue;
            };
            self.group
                .reduce_scatter(memory, &mut chunk, ReduceOp::Mean)
                .map_err(|e| not_averaged(&mut self.failed, &self.labels[bucket], e))?;
            self.chunks[bucket] = Some(chunk);
        }
        self.exchanged = true;
        if self.late_scale != 1.0 {
            self.multiply(self.late_scale);
        }
        self.times.in_step += began.elapsed();
        Ok(())
    }

    /// Passes this rank's part of the exchanged gradients on to rank `to`, and takes the part of rank `from`, which
    /// [`visit_pieces`](Self::visit_pieces) shows after this rank's own.
    #[cfg(feature = "nn")]
    pub(crate) fn pass_copies(&mut self, to: usize, from: usize) -> Result<()> {
        use phalanx_comm::P2POp;
        self.check_usable()?;
        let began = Instant::now();
        let (own, copies) = (&self.chunks, &mut self.copies);
        copies.0 = from;
        copies.1.resize(own.len(), Vec::new());
        let mut messages = Vec::with_capacity(2 * own.len());
        for (own, copy) in own.iter().zip(&mut copies.1) {
            let own: &[f32] = own.as_deref().unwrap_or_default();
            copy.resize(own.len(), 0.0);
            messages.push(P2POp::send(own, to));
            messages.push(P2POp::recv(copy, from));
        }
        self.group.batch_send_recv(messages).map_err(|e| {
            self.failed = true;
            Error::comm_while(
                "gradients could not be passed on to the rank with the copy",
                e,
            )
        })?;
        self.times.in_step += began.elapsed();
        Ok(())
    }

    /// Memory for this rank's part of a bucket.
    pub(super) fn chunk(&mut self, bucket: usize) -> Bucket<f32> {
        self.chunks[bucket].take().unwrap_or_else(|| {
            let world = self.group.world_size();
            self.group.bucket(self.plan.chunk_elems(bucket, world))
        })
    }

    /// Checks that there are gradients for a step.
    pub(crate) fn check_pieces(&self) -> Result<()> {
        self.check_scattered()?;
        self.check_usable()?;
        if !self.committed || self.in_backward {
            return Err(Error::usage(
                "there are no gradients to take a step with: none were finished, or the ranks voted the step down",
            ));
        }
        Ok(())
    }

    fn check_scattered(&self) -> Result<()> {
        if self.is_scattered() {
            return Ok(());
        }
        Err(Error::usage(
            "every rank has whole gradients; read them with Reducer::grad, or make the reducer with \
             Exchange::ReduceScatter or AtStep",
        ))
    }

    /// Calls `visit(param, elements, gradient)` for each piece of the averaged gradients that this rank gets with
    /// [`Exchange::ReduceScatter`] or [`Exchange::AtStep`], so that the rank updates these elements of its parameters.
    /// Parameters that [no rank used](Self::is_untouched) are left out. The gradients are dropped
    /// afterwards. [`BucketPlan::scattered`](crate::BucketPlan::scattered) has the same pieces without
    /// the gradients.
    ///
    /// *Blocks* with [`Exchange::AtStep`] until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Usage` with [`Exchange::AllReduce`], and when there are no gradients: none were finished, or the ranks voted
    /// against the step; `Comm` when a peer is lost or late.
    pub fn visit_pieces(
        &mut self,
        mut visit: impl FnMut(usize, Range<usize>, &[f32]),
    ) -> Result<()> {
        self.check_pieces()?;
        self.committed = false;
        let (began, mut updates) = (Instant::now(), Duration::ZERO);
        let (world, rank) = (self.group.world_size(), self.group.rank());
        for bucket in 0..self.memory.len() {
            let (plan, untouched) = (&self.plan, &self.untouched);
            let mut show = |rank: usize, at: usize, values: &[f32]| {
                let began = Instant::now();
                let first = match world {
                    1 => 0,
                    _ => rank * plan.chunk_elems(bucket, world),
                };
                let run = first + at..first + at + values.len();
                for (param, elems) in plan.within(bucket, run.clone()) {
                    let from = plan.place(param).1.start + elems.start - run.start;
                    if !untouched[param] {
                        let gradient = &values[from..from + elems.len()];
                        visit(param, elems, gradient);
                    }
                }
                updates += began.elapsed();
            };
            match (&self.chunks[bucket], &mut self.memory[bucket]) {
                (Some(chunk), _) if self.exchanged => show(rank, 0, chunk),
                (_, Memory::Reduced(memory)) if self.exchanged => show(rank, 0, memory),
                (_, Memory::Reduced(memory)) => {
                    let mut room = self.chunks[bucket]
                        .take()
                        .unwrap_or_else(|| self.group.bucket(plan.chunk_elems(bucket, world)));
                    let call = Call {
                        label: Some(self.labels[bucket].clone()),
                        ..Call::default()
                    };
                    let scale = self.late_scale;
                    let shown = self.group.reduce_scatter_visited(
                        memory,
                        &mut room,
                        ReduceOp::Mean,
                        &call,
                        &mut |at, values| {
                            if scale != 1.0 {
                                values.iter_mut().for_each(|g| *g *= scale);
                            }
                            show(rank, at, values);
                        },
                    );
                    shown.map_err(|e| not_averaged(&mut self.failed, &self.labels[bucket], e))?;
                    self.chunks[bucket] = Some(room);
                }
                _ => {}
            }
            if let Some(copy) = self.copies.1.get(bucket) {
                show(self.copies.0, 0, copy);
            }
        }
        self.times.in_step += began.elapsed().saturating_sub(updates);
        Ok(())
    }

    /// Gives every rank the pieces of parameters that the ranks have updated after [`visit_pieces`](Self::visit_pieces).
    /// `flat` has all parameters; number `p` begins at `starts[p]`. Gradients are dropped.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Usage` with [`Exchange::AllReduce`], or naming a parameter that is not inside `flat`; `Comm` when a peer is
    /// lost or late. `flat` is undefined then.
    pub fn gather_pieces(&mut self, flat: &mut [f32], starts: &[usize]) -> Result<()> {
        self.check_scattered()?;
        self.check_usable()?;
        for (p, spec) in self.params.iter().enumerate() {
            let end = starts.get(p).and_then(|s| s.checked_add(spec.len));
            if end.is_none_or(|end| end > flat.len()) {
                return Err(Error::usage(format!(
                    "{} does not lie in the parameters to be gathered; give the start of each parameter in them",
                    spec.name
                )));
            }
        }
        // In place if a bucket's parameters have the same layout as the bucket, else in the bucket's memory.
        self.committed = false; // no memory may be read as a gradient any more
        let began = Instant::now();
        let (world, rank) = (self.group.world_size(), self.group.rank());
        for bucket in 0..self.memory.len() * usize::from(world > 1) {
            let (plan, part) = (&self.plan, self.plan.chunk_elems(bucket, world));
            let params = &plan.buckets()[bucket];
            let begin = params.first().map_or(0, |&p| starts[p]);
            let as_in_bucket = |&p: &usize| starts[p] == begin + plan.place(p).1.start;
            let run = begin..begin + plan.bucket_elems(bucket);
            let gathered = if params.iter().all(as_in_bucket) && run.end <= flat.len() {
                self.group.all_gather_in_place(&mut flat[run], part)
            } else if let Memory::Reduced(memory) = &mut self.memory[bucket] {
                for (param, elems) in plan.within(bucket, rank * part..(rank + 1) * part) {
                    let (to, from) = (plan.place(param).1.start, starts[param]);
                    memory[to + elems.start..to + elems.end]
                        .copy_from_slice(&flat[from + elems.start..from + elems.end]);
                }
                let gathered = self.group.all_gather_in_place(memory, part);
                for &param in params {
                    let place = plan.place(param).1;
                    let to = starts[param]..starts[param] + place.len();
                    flat[to].copy_from_slice(&memory[place]);
                }
                gathered
            } else {
                Ok(())
            };
            gathered.map_err(|e| {
                self.failed = true;
                let label = &self.labels[bucket];
                Error::comm_while(
                    format!("updated parameters could not be gathered ({label})"),
                    e,
                )
            })?;
        }
        self.times.in_step += began.elapsed();
        Ok(())
    }
}
