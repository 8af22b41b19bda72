//! `DistributedDataParallel` for the variables of a `VarMap`.

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use candle_nn::{Optimizer, VarMap};
use phalanx_base::say;
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{GlobalBatch, HostTensors, Parameters as _, Replica, ReplicaOptions};

use crate::error::{Error, Result};
use crate::tensors::{check_dtype, host, read, tensor};

/// One rank's copy of a candle model: the same initial weights on all ranks, and gradients that are averaged over them.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear};
/// use phalanx_candle::{DistributedDataParallel, Result, comm::ProcessGroup};
///
/// fn train(group: &ProcessGroup) -> Result<()> {
///     let varmap = VarMap::new();
///     let model = linear(2, 1, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
///     let mut ddp = DistributedDataParallel::new(group, &varmap, Default::default())?;
///     let mut optimizer = SGD::new(varmap.all_vars(), 0.1)?;
///     for _ in 0..10 {
///         let x = Tensor::randn(0f32, 1.0, (4, 2), &Device::Cpu)?; // this rank's part of the batch
///         let loss = model.forward(&x)?.sqr()?.mean_all()?;
///         ddp.backward_step(&mut optimizer, &loss)?;
///     }
///     ddp.verify_equal()
/// }
///
/// let group = ProcessGroup::threads(1, Default::default()).remove(0);
/// train(&group)?;
/// # Ok::<(), phalanx_candle::Error>(())
/// ```
///
/// # Order of additions
///
/// Gradients are added in the order of the ranks and multiplied once by 1/world, in f32, whatever the type of the
/// variables: N ranks get the bits of one process that accumulates N micro-batches.
///
/// # Steps that are skipped
///
/// If a gradient of some rank is infinite or NaN, all ranks skip the step: the returned store has no gradients, so that
/// optimizers change no variable. [`skipped_steps`](Self::skipped_steps) counts them.
pub struct DistributedDataParallel {
    varmap: VarMap,
    /// By name.
    pub(crate) parameters: Vec<(String, Var)>,
    pub(crate) buffers: Vec<(String, Var)>,
    replica: Replica,
}

/// Whether candle's own layers keep a running statistic under this name.
fn is_running_statistic(name: &str) -> bool {
    let last = name.rsplit('.').next();
    matches!(last, Some("running_mean" | "running_var"))
}

impl DistributedDataParallel {
    /// Compares the variables' names, shapes and types and the options over the ranks, then gives every rank the values
    /// of rank 0. Variables named `running_mean` and `running_var`, those of candle's `batch_norm`, are buffers: they have
    /// no gradient, and every rank gets rank 0's after each step, as in PyTorch. All others are parameters.
    ///
    /// All variables must exist: build the model first. Variables outside the map get no gradients. *Blocks* until all ranks of
    /// the group call it.
    ///
    /// # Errors
    ///
    /// `Usage` naming a variable that is neither f32, f16 nor bf16, or without any variable; `Failed` naming the first
    /// difference between ranks; `PeerLost` or `Timeout` naming the rank.
    pub fn new(group: &ProcessGroup, varmap: &VarMap, options: ReplicaOptions) -> Result<Self> {
        Self::with_buffers(group, varmap, options, is_running_statistic)
    }

    /// As [`new`](Self::new), with another rule for which variables are buffers, by name.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_buffers(
        group: &ProcessGroup,
        varmap: &VarMap,
        mut options: ReplicaOptions,
        is_buffer: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let mut vars: Vec<(String, Var)> = {
            let all = varmap.data().lock();
            let all =
                all.map_err(|_| Error::usage("a thread panicked while it used the VarMap"))?;
            all.iter()
                .map(|(name, var)| (name.clone(), var.clone()))
                .collect()
        };
        if vars.is_empty() {
            return Err(Error::usage(
                "the VarMap has no variables; build the model before DistributedDataParallel",
            ));
        }
        vars.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (name, var) in &vars {
            check_dtype(name, var)?;
            // The shapes are compared by the replica.
            options
                .must_agree
                .push(format!("{name} is {}", var.dtype().as_str()));
        }
        let elsewhere = vars
            .iter()
            .find(|(_, var)| !matches!(var.device(), Device::Cpu));
        if let (0, Some((_, var))) = (group.rank(), elsewhere) {
            say::note(format!(
                "note: tensors on {:?} are copied through host memory to be averaged",
                var.device().location()
            ));
        }
        let (buffers, parameters): (Vec<_>, Vec<_>) =
            vars.into_iter().partition(|(name, _)| is_buffer(name));
        let mut tensors = staged(&parameters, &buffers)?;
        let replica = Replica::new(group, &mut tensors, options)?;
        let ddp = DistributedDataParallel {
            varmap: varmap.clone(),
            parameters,
            buffers,
            replica,
        };
        ddp.put(&tensors)?;
        Ok(ddp)
    }

    /// The process group that averages.
    pub fn group(&self) -> &ProcessGroup {
        self.replica.group()
    }

    /// Gives the variables the values of `tensors`, which has all of them.
    fn put(&self, tensors: &HostTensors) -> Result<()> {
        let vars = self.parameters.iter().chain(&self.buffers);
        for (index, (_, var)) in vars.enumerate() {
            var.set(&tensor(tensors.values(index).to_vec(), var)?)?;
        }
        Ok(())
    }

    /// Starts a step in which this rank has one micro-batch of each of `sizes` samples: for accumulation, and for batches
    /// of different sizes. The gradient is that of the mean loss over all samples of all ranks. Sizes of 0 are left out:
    /// there is no [`Step::backward`] for them. A rank that has run out of data passes an empty list until
    /// [`Step::is_over`] says that all have.
    ///
    /// ```
    /// # use phalanx_candle::{DistributedDataParallel, Result};
    /// # use candle_core::Tensor;
    /// # fn f(ddp: &mut DistributedDataParallel, loss: impl Fn(usize) -> Result<Tensor>) -> Result<()> {
    /// let mut step = ddp.begin(&[64, 64, 17])?;
    /// for i in 0..3 {
    ///     step.backward(&loss(i)?)?; // the mean over the samples of this micro-batch
    /// }
    /// let gradients = step.finish()?;
    /// # Ok(()) }
    /// ```
    ///
    /// *Blocks* until all ranks of the group begin it, to compare sizes.
    ///
    /// # Errors
    ///
    /// `Failed` naming a rank without data under `Uneven::Refuse`; `PeerLost` or `Timeout` naming the rank.
    pub fn begin(&mut self, sizes: &[usize]) -> Result<Step<'_>> {
        let global = self.replica.begin(sizes)?;
        Ok(Step { ddp: self, global })
    }

    /// Runs backward from `loss` and averages the gradients over the ranks, as the plain mean: a step of one micro-batch.
    /// The result has a gradient for each parameter on which the loss of some rank depends, and nothing else; candle's
    /// and our optimizers take it.
    ///
    /// *Blocks* until all ranks have run backward, under the group's deadline.
    ///
    /// # Errors
    ///
    /// Those of candle; `PeerLost` or `Timeout` naming the rank and the parameters whose gradients were not averaged.
    pub fn backward(&mut self, loss: &Tensor) -> Result<GradStore> {
        self.add(loss)?;
        self.averaged()
    }

    /// [`backward`](Self::backward), then a step of the optimizer.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward).
    pub fn backward_step(&mut self, optimizer: &mut impl Optimizer, loss: &Tensor) -> Result<()> {
        let skipped = self.skipped_steps();
        let gradients = self.backward(loss)?;
        if self.skipped_steps() == skipped {
            optimizer.step(&gradients)?;
        }
        Ok(())
    }

    /// Runs backward of one micro-batch.
    fn add(&mut self, loss: &Tensor) -> Result<()> {
        let gradients = self.check_vars().and_then(|()| Ok(loss.backward()?));
        let mut gradients = self.replica.or_abort(gradients)?;
        let parameters = &self.parameters;
        self.replica.backward(|index, out| {
            let (name, var) = &parameters[index];
            // Its memory is free once it is in the bucket.
            let Some(gradient) = gradients.remove(var) else {
                return Ok(false);
            };
            if gradient.elem_count() != out.len() {
                return Err(Error::internal(format!(
                    "the gradient of {name} has shape {:?}, the variable {:?}",
                    gradient.dims(),
                    var.dims()
                )));
            }
            read(&gradient, out)?;
            Ok(true)
        })
    }

    /// Whether the map still has the variables that it had at first.
    fn check_vars(&self) -> Result<()> {
        let now = self.varmap.data().lock().map_or(0, |all| all.len());
        match now == self.parameters.len() + self.buffers.len() {
            true => Ok(()),
            false => Err(Error::usage(
                "the VarMap got a variable after DistributedDataParallel was made, which has no values of rank 0 and would get \
                 no gradients; build the whole model first",
            )),
        }
    }

    /// The gradients of the step, averaged.
    fn averaged(&mut self) -> Result<GradStore> {
        let store = self.store();
        let store = self.replica.or_abort(store)?;
        let synchronized = self.sync_buffers();
        self.replica.or_abort(synchronized)?;
        Ok(store)
    }

    fn store(&mut self) -> Result<GradStore> {
        let commit = self.replica.finish()?;
        let mut store = no_gradients()?;
        if commit.is_yes() {
            for (index, (_, var)) in self.parameters.iter().enumerate() {
                if let Some(gradient) = self.replica.gradient(index) {
                    store.insert(var, tensor(gradient.collect(), var)?);
                }
            }
        }
        Ok(store)
    }

    /// Gives every rank the buffers of rank 0.
    fn sync_buffers(&self) -> Result<()> {
        if self.buffers.is_empty() || self.group().world_size() == 1 {
            return Ok(());
        }
        let count = self.buffers.iter().map(|(_, var)| var.elem_count()).sum();
        let mut all = vec![0.0f32; count];
        let mut rest = &mut all[..];
        for (_, var) in &self.buffers {
            let (out, after) = rest.split_at_mut(var.elem_count());
            read(var, out)?;
            rest = after;
        }
        self.group().broadcast(&mut all, 0)?;
        if self.group().rank() == 0 {
            return Ok(());
        }
        let mut rest = &all[..];
        for (_, var) in &self.buffers {
            let (values, after) = rest.split_at(var.elem_count());
            var.set(&tensor(values.to_vec(), var)?)?;
            rest = after;
        }
        Ok(())
    }

    /// The norm of all gradients of the last step before they were clipped
    /// ([`ReplicaOptions::max_norm`]); `None` without clipping, and after a skipped step. The same on all ranks.
    pub fn grad_norm(&self) -> Option<f64> {
        self.replica.grad_norm()
    }

    /// Number of steps that all ranks skipped so far because a gradient was infinite or NaN.
    pub fn skipped_steps(&self) -> u64 {
        self.replica.skipped_steps()
    }

    /// Compares the variables of all ranks, bit by bit.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Failed`, on every rank, naming the ranks that differ from rank 0 and the first variable in which they do.
    pub fn verify_equal(&self) -> Result<()> {
        let tensors = staged(&self.parameters, &self.buffers)?;
        Ok(self.replica.verify_equal(&tensors)?)
    }

    /// SHA-256 of the values of all parameters, as little-endian f32 in the order of their names, in hexadecimal. Equal
    /// parameters have equal digests, whatever the number of ranks. Buffers are not in it. Does not communicate.
    ///
    /// # Errors
    ///
    /// Those of candle.
    pub fn digest(&self) -> Result<String> {
        let tensors = staged(&self.parameters, &[])?;
        Ok(self.replica.digest(tensors))
    }
}

fn staged(parameters: &[(String, Var)], buffers: &[(String, Var)]) -> Result<HostTensors> {
    let copied = |vars: &[(String, Var)]| -> Result<Vec<_>> {
        vars.iter().map(|(name, var)| host(name, var)).collect()
    };
    Ok(HostTensors::new(copied(parameters)?, copied(buffers)?))
}

/// A store without gradients. candle makes stores in `backward` only.
fn no_gradients() -> Result<GradStore> {
    let nothing = Tensor::new(0f32, &Device::Cpu)?;
    let mut store = nothing.backward()?;
    store.remove(&nothing);
    Ok(store)
}

/// A step in progress; made by [`DistributedDataParallel::begin`]. One that is dropped after its first
/// [`backward`](Self::backward) ends the other ranks, which would wait for it.
#[must_use]
pub struct Step<'a> {
    ddp: &'a mut DistributedDataParallel,
    global: GlobalBatch,
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.ddp.replica.cancel();
    }
}

impl Step<'_> {
    /// Whether no rank has data: the epoch is over for all ranks, and there is nothing to finish.
    pub fn is_over(&self) -> bool {
        self.global.samples == 0
    }

    /// Sizes of the step over all ranks.
    pub fn global(&self) -> GlobalBatch {
        self.global
    }

    /// Runs backward of the next micro-batch, in the declared order; `loss` is the mean over its samples.
    ///
    /// # Errors
    ///
    /// Those of candle; `Usage` when all declared micro-batches were run.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.ddp.add(loss)
    }

    /// The gradients, averaged over all samples of all ranks. *Blocks* as [`DistributedDataParallel::backward`] does.
    ///
    /// # Errors
    ///
    /// As [`DistributedDataParallel::backward`]; `Usage` when fewer micro-batches were run than declared.
    pub fn finish(self) -> Result<GradStore> {
        self.ddp.averaged()
    }
}
