//! `DistributedDataParallel` for Burn's modules.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, TensorData};
use phalanx_base::{Error, Result};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{GlobalBatch, Replica, ReplicaOptions, broadcast_parameters};

use crate::tensors::{Described, Gradients, Outline, given, staged, with_values};

/// The types whose values are exact in f32, in which gradients are averaged.
const AVERAGED: [DType; 4] = [DType::F32, DType::Flex32, DType::F16, DType::BF16];

/// One rank's copy of a Burn module: the same initial weights on all ranks, and gradients that are averaged over them.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::{GradientsParams, SgdConfig};
/// use burn::tensor::{Device, Distribution, Tensor};
/// use phalanx_burn::{DistributedDataParallel, Result, comm::ProcessGroup};
///
/// fn train(group: &ProcessGroup) -> Result<()> {
///     let device = Device::default().autodiff();
///     let model = LinearConfig::new(2, 1).init(&device);
///     let (mut ddp, mut model) = DistributedDataParallel::new(group, model, Default::default())?;
///     let mut optimizer = SgdConfig::new().init();
///     for _ in 0..10 {
///         let x = Tensor::<2>::random([4, 2], Distribution::Default, &device); // this rank's part of the batch
///         let loss = model.forward(x).powi_scalar(2).mean();
///         let gradients = GradientsParams::from_grads(loss.backward(), &model);
///         let gradients = ddp.average(&model, gradients)?;
///         model = optimizer.step(0.1, model, gradients);
///     }
///     ddp.verify_equal(&model)
/// }
///
/// let group = ProcessGroup::threads(1, Default::default()).remove(0);
/// train(&group)?;
/// # Ok::<(), phalanx_burn::Error>(())
/// ```
///
/// # Order of additions
///
/// Gradients are added in the order of the ranks and multiplied once by 1/world, in f32, whatever the type of the
/// parameters: N ranks get the bits of one process that accumulates N micro-batches.
///
/// # Steps that are skipped
///
/// If a gradient of some rank is infinite or NaN, all ranks skip the step: there are no gradients in the result, so
/// Burn's optimizers change no parameter. [`skipped_steps`](Self::skipped_steps) counts them.
pub struct DistributedDataParallel {
    outline: Outline,
    replica: Replica,
}

impl DistributedDataParallel {
    /// Compares the names, shapes and types of the module's float tensors and the options over the ranks, then gives every
    /// rank the values of rank 0: the module that is returned takes the place of `model`. Tensors of integers and booleans
    /// stay each rank's own. Those without gradients are frozen, or running statistics (see
    /// [`sync_statistics`](Self::sync_statistics)).
    ///
    /// The module is on a device with autodiff. *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Usage` naming a tensor that cannot be averaged in f32, or if nothing has a gradient; `Failed` naming the first
    /// difference between ranks; `PeerLost` or `Timeout` naming the rank.
    pub fn new<M: Module>(
        group: &ProcessGroup,
        model: M,
        mut options: ReplicaOptions,
    ) -> Result<(Self, M)> {
        let outline = Outline::of(&model);
        for tensor in &outline.tensors {
            if !AVERAGED.contains(&tensor.dtype) {
                return Err(Error::usage(format!(
                    "the tensor {} is {:?}; only f32, f16 and bf16 can be averaged over ranks, in f32",
                    tensor.name, tensor.dtype
                )));
            }
            options
                .must_agree
                .push(format!("{} is {:?}", tensor.name, tensor.dtype));
        }
        if outline.trained().next().is_none() {
            return Err(Error::usage(
                "no tensor of the module has a gradient; make it on a device with autodiff (Device::default().autodiff())",
            ));
        }
        let mut tensors = staged(&model, &outline, false)?;
        let replica = Replica::new(group, &mut tensors, options)?;
        let model = with_values(model, &outline, &tensors, false);
        Ok((DistributedDataParallel { outline, replica }, model))
    }

    /// The process group that averages.
    pub fn group(&self) -> &ProcessGroup {
        self.replica.group()
    }

    /// Starts a step in which this rank has one micro-batch of each of `sizes` samples: for accumulation, and for batches
    /// of different sizes. The gradient is that of the mean loss over all samples of all ranks. Sizes of 0 are left out:
    /// there is no [`Step::add`] for them. A rank that has run out of data passes an empty list until [`Step::is_over`]
    /// says that all have.
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

    /// Averages the gradients over the ranks, as the plain mean: a step of one micro-batch. The result has a gradient for
    /// each parameter on which the loss of some rank depends, and nothing else.
    ///
    /// *Blocks* until all ranks have called it, under the group's deadline.
    ///
    /// # Errors
    ///
    /// `Failed` when a gradient cannot be read; `PeerLost` or `Timeout` naming the rank and the parameters whose gradients
    /// were not averaged.
    pub fn average(
        &mut self,
        model: &impl Module,
        gradients: GradientsParams,
    ) -> Result<GradientsParams> {
        self.add(model, gradients)?;
        self.averaged(model)
    }

    fn add(&mut self, model: &impl Module, gradients: GradientsParams) -> Result<()> {
        self.check_or_abort(model)?;
        let names: Vec<&str> = self.outline.trained().map(|t| &*t.name).collect();
        let bucket = |parameter| self.replica.bucket(parameter);
        let mut gradients = Gradients::of(model, &self.outline, gradients, bucket);
        self.replica
            .backward(|index, out| gradients.copy(index, names[index], out))
    }

    /// The gradients of the step, averaged.
    fn averaged(&mut self, model: &impl Module) -> Result<GradientsParams> {
        self.check_or_abort(model)?;
        let commit = self.replica.finish()?;
        let averaged = |tensor: &Described| {
            let gradient = self.replica.gradient(tensor.trained?)?;
            let values = TensorData::new(gradient.collect::<Vec<f32>>(), tensor.shape.clone());
            Some(values.convert_dtype(tensor.dtype))
        };
        let gradients = match commit.is_yes() {
            true => self.outline.trained().map(averaged).collect(),
            false => Vec::new(),
        };
        Ok(given(model, &self.outline, gradients))
    }

    /// As [`check`](Self::check); aborts the group after an error, so that the other ranks do not wait for this one.
    fn check_or_abort(&mut self, model: &impl Module) -> Result<()> {
        let checked = self.check(model);
        self.replica.or_abort(checked)
    }

    /// Whether it is the module that this was made for.
    fn check(&self, model: &impl Module) -> Result<()> {
        let now = Outline::of(model);
        let known = self
            .outline
            .tensors
            .iter()
            .map(|t| (&t.name, t.id, t.trained));
        match known.eq(now.tensors.iter().map(|t| (&t.name, t.id, t.trained))) {
            true => Ok(()),
            false => Err(Error::usage(
                "the module's parameters changed since DistributedDataParallel was created; create a new one",
            )),
        }
    }

    /// The module with rank 0's values of all float tensors that have no gradient: the running statistics of batch norms,
    /// as with PyTorch's DDP. Call it before each evaluation, or after each step. Without such tensors it does nothing.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `PeerLost` or `Timeout` naming the rank.
    pub fn sync_statistics<M: Module>(&mut self, model: M) -> Result<M> {
        self.check_or_abort(&model)?;
        let mut tensors = staged(&model, &self.outline, true)?;
        if tensors.buffers().is_empty() || self.group().world_size() == 1 {
            return Ok(model);
        }
        broadcast_parameters(self.group(), &mut tensors, 0)?;
        Ok(with_values(model, &self.outline, &tensors, true))
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

    /// Compares the module's float tensors on all ranks, bit by bit; running statistics too, which differ before
    /// [`sync_statistics`](Self::sync_statistics).
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Failed`, on every rank, naming the ranks that differ from rank 0 and the first tensor in which they do.
    pub fn verify_equal(&self, model: &impl Module) -> Result<()> {
        self.check(model)?;
        Ok(self
            .replica
            .verify_equal(&staged(model, &self.outline, false)?)?)
    }

    /// SHA-256 of the values of all tensors that have a gradient, as little-endian f32 in the order in which Burn visits
    /// them, in hexadecimal. Equal parameters have equal digests, whatever the number of ranks. Running statistics
    /// are not in it. Does not communicate.
    ///
    /// # Errors
    ///
    /// `Usage` for another module than the one that this was made for; `Failed` when a tensor cannot be read.
    pub fn digest(&self, model: &impl Module) -> Result<String> {
        self.check(model)?;
        Ok(self.replica.digest(staged(model, &self.outline, false)?))
    }
}

/// A step in progress; made by [`DistributedDataParallel::begin`]. One that is dropped after its first
/// [`add`](Self::add) ends the other ranks, which would wait for it.
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

    /// Adds the gradients of the next micro-batch, in the declared order; its loss is the mean over its samples.
    ///
    /// # Errors
    ///
    /// `Failed` when a gradient cannot be read; `Usage` when all declared micro-batches were added.
    pub fn add(&mut self, model: &impl Module, gradients: GradientsParams) -> Result<()> {
        self.ddp.add(model, gradients)
    }

    /// The gradients, averaged over all samples of all ranks. *Blocks* as [`DistributedDataParallel::average`] does.
    ///
    /// # Errors
    ///
    /// As [`DistributedDataParallel::average`]; `Usage` when fewer micro-batches were added than declared.
    pub fn finish(self, model: &impl Module) -> Result<GradientsParams> {
        self.ddp.averaged(model)
    }
}
