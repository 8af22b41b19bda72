//! Data parallelism in one process, as PyTorch's `DataParallel` does it: in each step a
//! master copies its parameters to the replicas, gives each a part of the
//! batch, and gathers their gradients, while it alone takes the optimizer's
//! step. For comparison: what the master moves grows with the number of
//! replicas ([`Traffic`]), where [`DistributedDataParallel`](crate::DistributedDataParallel) moves
//! at most twice the gradients on any rank.

use std::ops::Range;

use phalanx_nn::{GradSink, GradView, Grads, ParamId, Params, Tape, Threads};

use super::own_grads::OwnGrads;
use super::step::{Average, GlobalBatch, weigh};
use crate::error::{Error, Result};

/// What a replica may fail with.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Bytes that the master moved so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Parameters and buffers to the replicas.
    pub parameters_bytes: u64,
    /// Samples to the replicas, as the caller counts them.
    pub samples_bytes: u64,
    /// Gradients from the replicas.
    pub gradients_bytes: u64,
}

/// A model and its replicas, each on a thread of one process.
pub struct DataParallel {
    replicas: Vec<Lane>,
    /// Mean gradients of the last step.
    mean: Grads,
    used: Vec<bool>,
    traffic: Traffic,
}

struct Lane {
    params: Params,
    tape: Tape,
    sink: OwnGrads,
}

/// One replica in a step, on its thread.
pub struct Replica<'a> {
    /// Its number; 0 is the master's own.
    pub index: usize,
    /// Its samples of the batch.
    pub samples: Range<usize>,
    /// Its copy of the parameters.
    pub params: &'a Params,
    /// To record the step on.
    pub tape: &'a mut Tape,
    /// For backward of the mean loss over its samples.
    pub sink: &'a mut dyn GradSink,
}

impl DataParallel {
    /// `replicas` of the model with `params`, each with `threads` compute threads.
    ///
    /// # Errors
    ///
    /// `Usage` for none.
    pub fn new(params: &Params, replicas: usize, threads: Threads) -> Result<DataParallel> {
        if replicas == 0 {
            return Err(Error::usage(
                "a model needs at least one replica to train with",
            ));
        }
        let lane = |_| Lane {
            params: params.clone(),
            tape: Tape::new(threads),
            sink: OwnGrads::like(params),
        };
        Ok(DataParallel {
            replicas: (0..replicas).map(lane).collect(),
            mean: Grads::like(params),
            used: vec![false; params.len()],
            traffic: Traffic::default(),
        })
    }

    /// Forward and backward of a batch of `samples`, `sample_bytes` each: `run` does it for
    /// one replica's samples and returns their mean loss, all replicas at once.
    /// Gives the mean loss of the batch. `self` has the gradients then
    /// ([`GradView`]): the same bits as those of as many ranks with these
    /// parts. Replica 0's batch statistics are put into `params`.
    ///
    /// # Errors
    ///
    /// `Usage` when `params` are another model's, or `run` fails or panics in a replica.
    pub fn step(
        &mut self,
        params: &mut Params,
        samples: usize,
        sample_bytes: usize,
        run: impl Fn(Replica<'_>) -> std::result::Result<f32, Failure> + Sync,
    ) -> Result<f64> {
        let count = self.replicas.len();
        if params.flat().len() != self.mean.flat().len() {
            return Err(Error::usage("these parameters are another model's"));
        }
        // Rounded up, so that the master, whose statistics are kept, has samples wherever any has.
        let border = |r: usize| (r * samples).div_ceil(count);
        let part = |r: usize| border(r)..border(r + 1);
        let copied = size_of_val(params.flat()) + size_of_val(params.buffers_flat());
        for (r, lane) in self.replicas.iter_mut().enumerate() {
            lane.params.flat_mut().copy_from_slice(params.flat());
            let buffers = lane.params.buffers_flat_mut();
            buffers.copy_from_slice(params.buffers_flat());
            lane.sink.begin();
            if r > 0 {
                self.traffic.parameters_bytes += copied as u64;
                self.traffic.samples_bytes += (part(r).len() * sample_bytes) as u64;
            }
        }
        let losses: Vec<Result<f32>> = std::thread::scope(|scope| {
            let run = &run;
            let start = |(index, lane): (usize, &mut Lane)| {
                let samples = part(index);
                if samples.is_empty() {
                    return Ok(0.0);
                }
                run(Replica {
                    index,
                    samples,
                    params: &lane.params,
                    tape: &mut lane.tape,
                    sink: &mut lane.sink,
                })
                .map_err(|e| Error::usage(format!("replica {index} failed: {e}")))
            };
            let threads: Vec<_> = self
                .replicas
                .iter_mut()
                .enumerate()
                .map(|lane| scope.spawn(move || start(lane)))
                .collect();
            let ended = threads.into_iter().map(|t| {
                t.join()
                    .unwrap_or_else(|_| Err(Error::usage("a replica panicked")))
            });
            ended.collect()
        });
        let mut loss = 0.0;
        for (r, one) in losses.into_iter().enumerate() {
            loss += f64::from(one?) * part(r).len() as f64;
        }
        let busy = (0..count).filter(|r| !part(*r).is_empty()).count();
        self.gather(&part, samples, busy);
        for (r, lane) in self.replicas.iter_mut().enumerate() {
            let own = if r == 0 {
                &mut *params
            } else {
                &mut lane.params
            };
            lane.tape
                .update_buffers(own)
                .map_err(|e| Error::usage(e.to_string()))?;
        }
        Ok(loss / samples.max(1) as f64)
    }

    /// Adds the replicas' gradients in their order, weighted by samples.
    fn gather(&mut self, part: &dyn Fn(usize) -> Range<usize>, samples: usize, busy: usize) {
        let count = self.replicas.len();
        let global = GlobalBatch {
            samples,
            micro_batches: busy,
            active_ranks: busy,
        };
        self.used.fill(false);
        let mean = self.mean.flat_mut();
        let mut scale = 1.0;
        for (r, lane) in self.replicas.iter().enumerate() {
            let (weights, of_mean) = weigh(Average::Samples, &[part(r).len()], global, count);
            scale = of_mean;
            let weight = weights[0];
            let grads = lane.sink.flat();
            if r > 0 {
                self.traffic.gradients_bytes += size_of_val(grads) as u64;
            }
            // As the reducer does it: no sample, zeros; first overwrites.
            let weighed = |g: f32| if weight == 0.0 { 0.0 } else { g * weight };
            for (m, g) in mean.iter_mut().zip(grads) {
                *m = if r == 0 {
                    weighed(*g)
                } else {
                    *m + weighed(*g)
                };
            }
            for (any, used) in self.used.iter_mut().zip(lane.sink.used()) {
                *any |= used;
            }
        }
        let share = 1.0 / count as f32;
        for m in mean {
            *m *= share;
            if scale != 1.0 {
                *m *= scale;
            }
        }
    }

    /// Bytes that the master moved so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }
}

impl GradView for DataParallel {
    fn grad(&self, param: ParamId) -> &[f32] {
        self.mean.grad(param)
    }

    fn untouched(&self, param: ParamId) -> bool {
        !self.used.get(param.index()).copied().unwrap_or_default()
    }
}
