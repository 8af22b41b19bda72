//! Batch statistics of the whole global batch under
//! [`Deterministic::Shards`](crate::Deterministic::Shards).
//!
//! A single shard has only the statistics of its own few samples. For those of the
//! global batch, every shard must be at the same layer at the same time. So the shards
//! of a rank run concurrently, each with its own thread and tape, and meet in each
//! batch normalisation (`meeting.rs`). Each keeps its own gradient, and those are added
//! in the same tree as otherwise: no bit depends on the number of ranks.

use std::ops::Range;
use std::sync::Arc;

use phalanx_nn::{GradSink, GradView, Grads, Params, Tape, Threads};

use super::meeting::{Meeting, Seat, with_causes};
use super::step::GlobalStep;
use crate::error::{Error, Result};

/// The error of a user's shard.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Tapes and gradients of shards that run concurrently; made once, used for every step
/// ([`GlobalStep::run_joined`]). Each shard has its own memory for activations and
/// gradients.
pub struct JoinedShards {
    threads: Threads,
    lanes: Vec<Lane>,
}

struct Lane {
    tape: Tape,
    grads: Grads,
}

impl JoinedShards {
    /// For shards that compute on `threads` threads each. Tapes are created as needed.
    pub fn new(threads: Threads) -> JoinedShards {
        JoinedShards {
            threads,
            lanes: Vec::new(),
        }
    }
}

/// One shard of a step, on its thread.
pub struct JoinedShard<'a> {
    /// Its number; its samples are `shard, shard + S, shard + 2S, …` of the
    /// global batch cut into `S` shards. A rank that has no samples in a short batch gets a
    /// number that no shard has: it runs the model on an empty batch.
    pub shard: usize,
    /// The number of its samples.
    pub samples: usize,
    /// The tape on which to record the step.
    pub tape: &'a mut Tape,
    /// The parameters of the model.
    pub params: &'a Params,
    /// The gradient with which backward of the *mean* loss over the shard's samples
    /// starts ([`Tensor::backward_with`](phalanx_nn::Tensor::backward_with)).
    pub weight: [f32; 1],
    /// The sink for its gradient.
    pub sink: &'a mut dyn GradSink,
}

impl GlobalStep<'_> {
    /// Runs all micro-batches of this rank at once with `run`, each on its own thread; batch normalisations take the
    /// statistics of the global batch, the same bits on all ranks and for any number of them.
    /// [`sync_buffers`](crate::DistributedDataParallel::sync_buffers) puts running statistics, joined likewise, into the
    /// model. Replaces [`micro_batch`](Self::micro_batch) and [`update_buffers`](Self::update_buffers); all steps of a
    /// training must use the same way.
    ///
    /// *Blocks* until all ranks of the group run it, if the model has batch
    /// normalisations.
    ///
    /// # Errors
    ///
    /// `Usage` without [`Deterministic::Shards`](crate::Deterministic::Shards), after a
    /// [`micro_batch`](Self::micro_batch), or when `run` fails or panics in a shard; `Comm` when a
    /// peer is lost or late. The group is aborted then.
    pub fn run_joined(
        &mut self,
        team: &mut JoinedShards,
        params: &mut Params,
        run: impl Fn(JoinedShard<'_>) -> std::result::Result<(), Failure> + Sync,
    ) -> Result<()> {
        if self.given > 0 {
            return Err(Error::usage(
                "a step of joined shards runs all of them at once; leave out micro_batch",
            ));
        }
        let Some((tree, samples)) = self.ddp.shards_in_step() else {
            return Err(Error::usage(
                "shards are joined under Deterministic::Shards, in a step with samples; use sync_batch_norm otherwise",
            ));
        };
        let group = self.ddp.group().clone();
        let (world, rank) = (group.world_size(), group.rank());
        let present = tree.present(samples);
        let of_rank = |r: usize| {
            let range = tree.range(world, r);
            range.start..range.end.min(present).max(range.start)
        };
        let mine: Range<usize> = of_rank(rank);
        let first = if mine.is_empty() {
            tree.shards()
        } else {
            mine.start
        };
        let meeting = Meeting::new(group, (0..world).map(|r| of_rank(r).len()).collect(), first);
        while team.lanes.len() < mine.len().max(1) {
            team.lanes.push(Lane {
                tape: Tape::new(team.threads),
                grads: Grads::like(params),
            });
        }
        let lanes = &mut team.lanes[..mine.len().max(1)];
        let weights: Vec<f32> = (0..mine.len()).map(|i| self.ddp.weigh_at_loss(i)).collect();
        let mut outcome: Vec<Result<()>> = std::thread::scope(|scope| {
            let (run, params, weights) = (&run, &*params, &weights);
            let start = |(member, lane): (usize, &mut Lane)| {
                let Lane { tape, grads } = lane;
                grads.zero();
                let seat = Seat {
                    meeting: Arc::clone(&meeting),
                    member,
                };
                tape.join_statistics(Some(Arc::new(seat)));
                let shard = first + member;
                let guard = Guard {
                    meeting: &meeting,
                    member,
                    shard,
                };
                let given = JoinedShard {
                    shard,
                    samples: if member < mine.len() {
                        tree.size(samples, shard)
                    } else {
                        0
                    },
                    tape,
                    params,
                    weight: [weights.get(member).copied().unwrap_or(0.0)],
                    sink: grads,
                };
                let done = run(given).map_err(|e| failed(shard, &*e));
                match &done {
                    Ok(()) => meeting.end(member),
                    Err(error) => meeting.fail(member, &with_causes(error)),
                }
                std::mem::forget(guard);
                done
            };
            let threads: Vec<_> = lanes
                .iter_mut()
                .enumerate()
                .map(|lane| scope.spawn(move || start(lane)))
                .collect();
            let ended = threads.into_iter().enumerate().map(|(member, t)| {
                t.join().unwrap_or_else(|_| {
                    let shard = first + member;
                    Err(Error::usage(format!("{}: it panicked", did_not_end(shard))))
                })
            });
            ended.collect()
        });
        // The errors of the others only report that this one failed.
        if let Some(culprit) = meeting.culprit() {
            outcome.swap(0, culprit);
        }
        for done in outcome {
            done?;
        }
        let before = params.buffers_flat().to_vec();
        for lane in lanes.iter_mut() {
            // All have the same statistics; each tape must drop its own.
            params.buffers_flat_mut().copy_from_slice(&before);
            lane.tape
                .update_buffers(params)
                .map_err(|e| Error::usage(e.to_string()))?;
        }
        self.ddp.keep_joined_buffers(params, &before);
        for lane in lanes.iter().take(mine.len()) {
            // The weight was taken, and applied, above.
            let (_, sink) = self.weighed_micro_batch()?;
            hand_on(&lane.grads, params, sink).map_err(|e| Error::usage(e.to_string()))?;
        }
        Ok(())
    }
}

/// Passes the gradients to `sink`, the last parameter's first.
fn hand_on(grads: &Grads, params: &Params, sink: &mut dyn GradSink) -> phalanx_base::Result<()> {
    for param in params.ids().rev() {
        if grads.untouched(param) {
            sink.unused(param)?;
            continue;
        }
        let (values, slot) = (grads.grad(param), sink.slot(param));
        if slot.len() == values.len() {
            slot.copy_from_slice(values);
        }
        sink.ready(param)?;
    }
    Ok(())
}

/// The error of a shard; a failure of a collective keeps its kind.
fn failed(shard: usize, cause: &(dyn std::error::Error + 'static)) -> Error {
    let mut next = Some(cause);
    while let Some(error) = next {
        if let Some(comm) = error.downcast_ref::<phalanx_comm::Error>() {
            return Error::comm_while(format!("shard {shard} failed: {cause}"), comm.clone());
        }
        next = error.source();
    }
    Error::usage(format!("shard {shard} failed: {}", with_causes(cause)))
}

fn did_not_end(shard: usize) -> String {
    format!("shard {shard} did not end its step")
}

/// Reports that a shard has panicked.
struct Guard<'a> {
    meeting: &'a Meeting,
    member: usize,
    shard: usize,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.meeting.fail(self.member, &did_not_end(self.shard));
    }
}
