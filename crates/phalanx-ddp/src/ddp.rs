//! `DistributedDataParallel`: the reducer as gradient sink of an engine model.

use phalanx_comm::{ProcessGroup, ReduceOp, TransportKind};
use phalanx_nn::{GradSink, GradView, ParamId, Params};

use crate::bucket::{BucketCaps, BucketPlan};
use crate::error::{Error, Result};
use crate::fingerprint::Fingerprint;
use crate::reducer::{ParamSpec, Reducer, ReducerOptions};
use crate::trace::StepTimes;
use crate::vote::Commit;

/// Settings of [`DistributedDataParallel`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DdpOptions {
    /// Bucket caps; `None` takes [`BucketCaps::ONE_HOST`] or
    /// [`BucketCaps::ACROSS_HOSTS`] by where the ranks are.
    pub caps: Option<BucketCaps>,
    /// Keep the first layout instead of rebuilding it in observed order.
    pub keep_layout: bool,
    /// Further facts that must be equal on all ranks (hyperparameters, data
    /// set): compared with the model at construction.
    pub must_agree: Vec<String>,
}

/// Keeps one model per rank in step: equal parameters at the start, averaged
/// gradients in every step.
///
/// Use as sink of `backward`, call [`finish`](Self::finish), then give it to the optimizer:
///
/// ```no_run
/// # use phalanx_nn::{layers::Linear, optim::Sgd, Scope, Seed, StepKey, Tape, Threads};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let group = phalanx_comm::ProcessGroup::threads(1, Default::default()).remove(0);
/// # let mut scope = Scope::new(Seed(0));
/// # let net = Linear::new(scope.enter("head"), 2, 1);
/// # let mut params = scope.build()?;
/// # let mut optimizer = Sgd::new(&params, 0.1);
/// # let mut tape = Tape::new(Threads(1));
/// # let (x, y) = ([1.0, 2.0], [3.0]);
/// let mut ddp = phalanx_ddp::DistributedDataParallel::new(group, &mut params, Default::default())?;
/// for i in 0..10 {
///     let step = tape.step(&params, StepKey::new(0, i));
///     let loss = net.forward(step.input(&x, &[1, 2])?)?.mse_loss(&y, phalanx_nn::Reduction::Mean)?;
///     loss.backward(&mut ddp)?;          // all-reduces start inside
///     drop(step);
///     if ddp.finish()?.is_yes() {         // and end here; all ranks have voted
///         optimizer.step(&mut params, &ddp)?;
///     }
/// }
/// # Ok(()) }
/// ```
pub struct DistributedDataParallel {
    reducer: Reducer,
}

impl DistributedDataParallel {
    /// Compares names, shapes and options over the ranks, then gives every
    /// rank the parameters and buffers of rank 0.
    ///
    /// *Blocks* until all ranks of the group construct it.
    ///
    /// # Errors
    ///
    /// `Mismatch` naming the first difference; `Comm` when a peer is lost or
    /// late.
    pub fn new(
        group: ProcessGroup,
        params: &mut Params,
        options: DdpOptions,
    ) -> Result<DistributedDataParallel> {
        // First of all: whether the ranks agree on anything that follows.
        fingerprint(&group, params, &options).compare(&group)?;
        let caps = match options.caps {
            Some(caps) => caps,
            None => default_caps(&group)?,
        };
        let reducer_options = ReducerOptions {
            caps,
            rebuild: !options.keep_layout,
        };
        if group.world_size() > 1 {
            let failed = |e| Error::comm_while("rank 0's parameters could not be broadcast", e);
            group.broadcast(params.flat_mut(), 0).map_err(failed)?;
            group
                .broadcast(params.buffers_flat_mut(), 0)
                .map_err(failed)?;
        }
        let specs = params
            .infos()
            .iter()
            .map(|info| ParamSpec {
                name: info.name.clone(),
                len: info.len,
            })
            .collect();
        Ok(DistributedDataParallel {
            reducer: Reducer::new(group, specs, reducer_options),
        })
    }

    /// Waits until all gradients of this step are averaged, and says whether
    /// the optimizer may have them ([`Reducer::finish`]).
    ///
    /// # Errors
    ///
    /// As [`Reducer::finish`].
    pub fn finish(&mut self) -> Result<Commit> {
        self.reducer.finish()
    }

    /// Votes against the step that runs ([`Reducer::veto`]).
    pub fn veto(&mut self) {
        self.reducer.veto();
    }

    /// How many steps were voted down so far.
    pub fn skipped_steps(&self) -> u64 {
        self.reducer.skipped_steps()
    }

    /// The bucket layout in use.
    pub fn plan(&self) -> &BucketPlan {
        self.reducer.plan()
    }

    /// The process group.
    pub fn group(&self) -> &ProcessGroup {
        self.reducer.group()
    }

    /// When things happened in the last finished step.
    pub fn times(&self) -> &StepTimes {
        self.reducer.times()
    }
}

impl GradSink for DistributedDataParallel {
    fn slot(&mut self, param: ParamId) -> &mut [f32] {
        self.reducer.slot(param.index())
    }

    fn ready(
        &mut self,
        param: ParamId,
    ) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(self.reducer.ready(param.index())?)
    }
}

impl GradView for DistributedDataParallel {
    fn grad(&self, param: ParamId) -> &[f32] {
        self.reducer.grad(param.index())
    }
}

/// Communication across hosts has a higher fixed cost, so wants larger buckets.
/// A rank sees only its own links; the ranks agree by maximum, since they must cut alike.
fn default_caps(group: &ProcessGroup) -> Result<BucketCaps> {
    let remote = group
        .transports()
        .iter()
        .any(|(_, kind)| *kind == TransportKind::Tcp);
    let mut any_remote = [u8::from(remote)];
    group
        .all_reduce(&mut any_remote, ReduceOp::Max)
        .map_err(|e| Error::comm_while("the ranks could not agree on bucket sizes", e))?;
    Ok(if any_remote[0] > 0 {
        BucketCaps::ACROSS_HOSTS
    } else {
        BucketCaps::ONE_HOST
    })
}

fn fingerprint(group: &ProcessGroup, params: &Params, options: &DdpOptions) -> Fingerprint {
    let mut print = Fingerprint::new();
    print.line(format!("phalanx-ddp {}", env!("CARGO_PKG_VERSION")));
    print.line(format!("world of {} ranks", group.world_size()));
    print.line(match options.caps {
        Some(caps) => format!("buckets {caps:?}"),
        None => "buckets sized by where the ranks are".to_owned(),
    });
    print.line(format!("buckets rebuilt: {}", !options.keep_layout));
    for fact in &options.must_agree {
        print.line(fact.as_str());
    }
    for info in params.infos() {
        print.line(format!("parameter {} f32 {:?}", info.name, info.shape));
    }
    for info in params.buffer_infos() {
        print.line(format!("buffer {} f32 {:?}", info.name, info.shape));
    }
    print
}
