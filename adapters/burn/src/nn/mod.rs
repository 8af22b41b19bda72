//! Models of phalanx-nn on a device of Burn.

mod value;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::iter;
use std::mem::{replace, take};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::module;
use burn::tensor::{DType, Device, Int, Tensor as Burn, TensorData, Transaction};
use phalanx_base::refuse;
use phalanx_ddp::BucketCaps;
use phalanx_nn::layers::RunningStats;
use phalanx_nn::{
    BatchStatistics, BufferId, Computed, ComputedBackward, Error, ErrorKind, Layout, ParamId,
    Params, Result, Step, TakeGradient, Tensor, Value, ValueStep,
};

pub use value::DeviceTensor;

/// Dimensions of a tensor on the device: the first ones are 1 where phalanx-nn's tensor has fewer.
const RANK: usize = 6;

/// Returns an error of kind `Usage` with this message unless a condition holds.
macro_rules! ensure {
    ($fits:expr, $($message:tt)+) => {
        if !$fits {
            refuse!($($message)+);
        }
    };
}
use ensure;

/// Runs models of phalanx-nn on a device of Burn: forward and backward there, parameters and optimizer in host memory.
///
/// Clones share the parameters on the device. They are uploaded again when their values in host memory have changed.
///
/// ```
/// use phalanx_burn::OnDevice;
/// use phalanx_nn::{Grads, Reduction, Scope, Seed, StepKey, Tape, Threads, layers::Linear, optim::Sgd};
///
/// # fn main() -> phalanx_burn::Result<()> {
/// let device = OnDevice::new(burn::tensor::Device::default());
/// let mut scope = Scope::new(Seed(0));
/// let model = Linear::new(scope.enter("fc"), 2, 3);
/// let mut params = scope.build()?;
/// let (mut grads, mut sgd) = (Grads::like(&params), Sgd::new(&params, 0.1));
/// let mut tape = Tape::new(Threads(1));
/// for i in 0..10 {
///     let step = tape.step(&params, StepKey::new(0, i));
///     let scores = device.run(&step, |device| {
///         model.forward(device.input(&[1.0, 2.0, 3.0, 4.0], &[2, 2])?)
///     })?;
///     scores.cross_entropy(&[0, 2], Reduction::Mean)?.backward(&mut grads)?;
///     drop(step);
///     sgd.step(&mut params, &grads)?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct OnDevice(Arc<Shared>);

struct Shared {
    device: Device,
    /// Parameters, and buffers.
    uploaded: Mutex<[Uploaded; 2]>,
}

/// Values on the device that are equal to those of one version in host memory, by number.
#[derive(Default)]
struct Uploaded {
    version: Option<u64>,
    values: HashMap<usize, Burn<1>>,
    uploads: u64,
}

impl Shared {
    /// A parameter (kind 0) or buffer (kind 1) on the device. `values` are those in host memory.
    fn get(
        &self,
        params: &Params,
        (kind, number): (usize, usize),
        values: impl FnOnce() -> Vec<f32>,
    ) -> Burn<1> {
        let mut all = self.uploaded();
        let uploaded = &mut all[kind];
        let version = Some(params.versions()[kind]);
        if replace(&mut uploaded.version, version) != version {
            uploaded.values.clear();
        }
        let upload = || {
            uploaded.uploads += 1;
            let values = values();
            let shape = [values.len()];
            upload(&self.device, values, shape)
        };
        let value = uploaded.values.entry(number).or_insert_with(upload);
        value.clone()
    }

    fn uploaded(&self) -> MutexGuard<'_, [Uploaded; 2]> {
        self.uploaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Values row by row, in the shape of `D` dimensions.
fn upload<const D: usize>(device: &Device, values: Vec<f32>, shape: [usize; D]) -> Burn<D> {
    let mut data = TensorData::new(values, shape);
    // Memory from which a device copies faster, if it has some.
    device.staging(iter::once(&mut data));
    Burn::from_data(data, (device, DType::F32))
}

fn unreadable(e: impl fmt::Display) -> Error {
    let text = format!("cannot read values from the device: {e}");
    Error::new(ErrorKind::Failed, text)
}

impl OnDevice {
    /// On this device, as [`DeviceChoice::open`](crate::DeviceChoice::open) returns it. Autodiff is switched on in training
    /// steps only.
    pub fn new(device: Device) -> OnDevice {
        OnDevice(Arc::new(Shared {
            device: device.without_autodiff(),
            uploaded: Mutex::default(),
        }))
    }

    /// Runs `part` of a model on the device, and returns its result in host memory. In a training step the tape's backward
    /// pass runs on the device too, and gives the gradients in reverse order of registration. The parameters that `part`
    /// uses are those of `step`.
    ///
    /// *Blocks* until the device has computed the result.
    ///
    /// # Errors
    ///
    /// Those of `part`, `Failed` when the result cannot be read, and those of [`Step::computed`].
    pub fn run<'s>(
        &self,
        step: &'s Step<'_>,
        part: impl for<'d> FnOnce(DeviceStep<'d>) -> Result<DeviceTensor<'d>>,
    ) -> Result<Tensor<'s>> {
        let run = Run {
            shared: &self.0,
            step,
            leaves: RefCell::default(),
            batches: RefCell::default(),
        };
        let result = part(DeviceStep { run: &run })?;
        let (shape, len) = (result.shape(), result.len());
        let result = result.to([len]);
        let (leaves, batches) = (run.leaves.into_inner(), run.batches.into_inner());
        let mut reads = Transaction::default().register(result.clone().inner());
        for batch in &batches {
            reads = reads.register(batch.mean.clone().inner());
            reads = reads.register(batch.var.clone().inner());
        }
        let arrived = reads.try_execute().map_err(unreadable)?.into_iter();
        let arrived = arrived.map(TensorData::try_into_vec_as::<f32>);
        let arrived: Vec<_> = arrived
            .collect::<std::result::Result<_, _>>()
            .map_err(unreadable)?;
        let mut arrived = arrived.into_iter();
        let mut next = || arrived.next().unwrap_or_default();
        let values = next();
        let statistics = batches.into_iter().map(|batch| BatchStatistics {
            running: batch.running,
            momentum: batch.momentum,
            rows: batch.rows,
            mean: next(),
            var: {
                let unbiased = batch.rows as f32 / (batch.rows as f32 - 1.0);
                next().into_iter().map(|var| var * unbiased).collect()
            },
        });
        let statistics = statistics.collect();
        step.computed(Computed {
            values,
            shape,
            params: leaves.keys().copied().collect(),
            statistics,
            backward: Box::new(Backward {
                device: self.0.device.clone(),
                result: Some(result),
                leaves,
            }),
        })
    }

    /// Number of uploads of parameters and buffers so far.
    #[doc(hidden)]
    pub fn uploads(&self) -> u64 {
        self.0.uploaded().iter().map(|kind| kind.uploads).sum()
    }
}

/// What a part of a model needs while it runs.
struct Run<'s> {
    shared: &'s Shared,
    step: &'s Step<'s>,
    /// The parameters that get a gradient.
    leaves: RefCell<BTreeMap<ParamId, Burn<1>>>,
    batches: RefCell<Vec<Batch>>,
}

/// Mean and biased variance of a batch.
struct Batch {
    running: RunningStats,
    momentum: Option<f64>,
    rows: usize,
    mean: Burn<1>,
    var: Burn<1>,
}

struct Backward {
    device: Device,
    result: Option<Burn<1>>,
    leaves: BTreeMap<ParamId, Burn<1>>,
}

/// Gradients that are read together.
#[derive(Default)]
struct Reads {
    /// The parameters in order, and whether each has a gradient.
    params: Vec<(ParamId, bool)>,
    bytes: usize,
    transaction: Transaction,
}

impl ComputedBackward for Backward {
    fn backward(&mut self, output: &[f32], gradient: &mut TakeGradient<'_>) -> Result<()> {
        let mut gradients = self.result.take().filter(Burn::is_tracked).map(|result| {
            let output = upload(&self.device, output.to_vec(), [output.len()]);
            result.mul(output.autodiff()).sum().backward()
        });
        let caps = BucketCaps::PYTORCH;
        let (mut all, mut reads) = (Vec::new(), Reads::default());
        for (id, leaf) in take(&mut self.leaves).into_iter().rev() {
            let own = gradients.as_mut().and_then(|all| leaf.grad_remove(all));
            reads.params.push((id, own.is_some()));
            if let Some(own) = own {
                reads.bytes += size_of::<f32>() * own.dims()[0];
                reads.transaction = reads.transaction.register(own);
            }
            let cap = match all.is_empty() {
                true => caps.first_bytes,
                false => caps.cap_bytes,
            };
            if reads.bytes >= cap {
                all.push(take(&mut reads));
            }
        }
        all.push(reads);
        for reads in all {
            let arrived = match reads.bytes {
                0 => Vec::new(),
                _ => reads.transaction.try_execute().map_err(unreadable)?,
            };
            let mut arrived = arrived.iter();
            for (id, has) in reads.params {
                let data = if has { arrived.next() } else { None };
                let values = data.map(TensorData::as_slice::<f32>).transpose();
                gradient(id, values.map_err(unreadable)?)?;
            }
        }
        Ok(())
    }
}

/// A part of a step on the device. [`OnDevice::run`] makes it.
#[derive(Clone, Copy)]
pub struct DeviceStep<'s> {
    run: &'s Run<'s>,
}

impl<'s> DeviceStep<'s> {
    /// A network input: a copy of `data`, of `shape` (images: N, H, W, C). It gets no gradient.
    ///
    /// # Errors
    ///
    /// `Usage` when data and shape disagree, or there are no elements.
    pub fn input(self, data: &[f32], shape: &[usize]) -> Result<DeviceTensor<'s>> {
        self.input_of(data.to_vec(), shape)
    }

    fn input_of(self, data: Vec<f32>, shape: &[usize]) -> Result<DeviceTensor<'s>> {
        let (sizes, len) = (sizes(shape)?, data.len());
        let fits = sizes.iter().product::<usize>() == len;
        ensure!(fits, "{len} values for shape {shape:?}");
        let values = self.made(data, sizes);
        Ok(self.rows(values, shape))
    }

    /// The values of a parameter in PyTorch's shape, for code that uses Burn itself. In a training step the parameter gets
    /// its gradient.
    ///
    /// # Errors
    ///
    /// `Usage` when the parameter belongs to another model or has another number of dimensions.
    pub fn parameter<const D: usize>(self, id: ParamId) -> Result<Burn<D>> {
        let info = self.run.step.params().info(id)?;
        let (name, shape) = (&info.name, &*info.shape);
        match <[usize; D]>::try_from(shape) {
            Ok(shape) => Ok(self.leaf(id)?.reshape(shape)),
            Err(_) => refuse!("{name} of shape {shape:?} does not have {D} dimensions"),
        }
    }

    /// A tensor that Burn computed on the device, row by row.
    ///
    /// # Errors
    ///
    /// `Usage` when it has more than 6 dimensions or no elements.
    pub fn tensor<const D: usize>(self, values: Burn<D>) -> Result<DeviceTensor<'s>> {
        let shape = values.dims();
        sizes(&shape)?;
        Ok(self.rows(self.tracked(values), &shape))
    }

    /// Values of this shape and number of elements.
    fn rows<const D: usize>(self, values: Burn<D>, shape: &[usize]) -> DeviceTensor<'s> {
        DeviceTensor {
            step: self,
            values: values.reshape(padded(shape)),
            rank: shape.len(),
            is_image: false,
        }
    }

    /// Images in Burn's order (N, C, H, W).
    fn images(self, values: Burn<4>) -> DeviceTensor<'s> {
        let [n, c, h, w] = values.dims();
        DeviceTensor {
            step: self,
            values: values.reshape([1, 1, n, c, h, w]),
            rank: 4,
            is_image: true,
        }
    }

    fn made<const D: usize>(self, values: Vec<f32>, shape: [usize; D]) -> Burn<D> {
        self.tracked(upload(&self.run.shared.device, values, shape))
    }

    /// With autodiff in a training step, where all tensors have it.
    fn tracked<const D: usize>(self, values: Burn<D>) -> Burn<D> {
        match self.run.step.training() {
            true => values.autodiff(),
            false => values,
        }
    }

    fn leaf(self, id: ParamId) -> Result<Burn<1>> {
        if let Some(leaf) = self.run.leaves.borrow().get(&id) {
            return Ok(leaf.clone());
        }
        let (shared, params) = (self.run.shared, self.run.step.params());
        params.info(id)?;
        let values = shared.get(params, (0, id.index()), || params.export(id));
        let values = self.tracked(values);
        if !self.run.step.training() || params.is_frozen(id) {
            return Ok(values);
        }
        let leaf = values.require_grad();
        self.run.leaves.borrow_mut().insert(id, leaf.clone());
        Ok(leaf)
    }

    fn buffer(self, id: BufferId) -> Burn<1> {
        let (shared, params) = (self.run.shared, self.run.step.params());
        let values = || params.buffer(id).to_vec();
        self.tracked(shared.get(params, (1, id.index()), values))
    }

    /// A bias, or the weight of a norm.
    fn vector(self, id: Option<ParamId>, (len, what): (usize, &str)) -> Result<Option<Burn<1>>> {
        let Some(id) = id else {
            return Ok(None);
        };
        let info = self.run.step.params().info(id)?;
        let (name, own) = (&info.name, info.len);
        ensure!(own == len, "{name} has {own} values for {len} {what}");
        Ok(Some(self.leaf(id)?))
    }
}

impl<'s> ValueStep<'s> for DeviceStep<'s> {
    type Value = DeviceTensor<'s>;
    type Tokens = [u32];

    fn embedding(
        self,
        weight: ParamId,
        tokens: &[u32],
        shape: &[usize],
        padding: Option<u32>,
    ) -> Result<DeviceTensor<'s>> {
        let info = self.run.step.params().info(weight)?;
        let table = match info.layout {
            Layout::Transposed => self.parameter::<2>(weight)?.transpose(),
            _ => self.parameter::<2>(weight)?,
        };
        let ([rows, width], name, count) = (table.dims(), &info.name, tokens.len());
        let shape = [shape, &[width]].concat();
        let fits = sizes(&shape)?.iter().product::<usize>() == count * width;
        ensure!(
            fits,
            "embedding {name}: {count} numbers for shape {shape:?}"
        );
        if let Some(i) = tokens.iter().find(|i| **i as usize >= rows) {
            refuse!("embedding {name}: there is no row {i}, it has {rows}");
        }
        let numbers: Vec<i64> = tokens.iter().map(|i| i64::from(*i)).collect();
        let numbers = TensorData::new(numbers, [1, count]);
        let numbers = Burn::<2, Int>::from_data(numbers, &table.device());
        let mut found = module::embedding(table, numbers);
        if padding.is_some_and(|padding| tokens.contains(&padding)) {
            // That row gets no gradient.
            let is_padding = tokens.iter().map(|i| f32::from(Some(*i) == padding));
            let mask = self.made(is_padding.collect(), [1, count, 1]);
            let mask = mask.greater_scalar(0.5).expand(found.dims());
            found = found.clone().mask_where(mask, found.detach());
        }
        Ok(self.rows(found, &shape))
    }

    fn constant_embedding(
        self,
        weight: ParamId,
        indices: &[u32],
        shape: &[usize],
    ) -> Result<DeviceTensor<'s>> {
        self.embedding(weight, indices, shape, None)
    }
}

/// The sizes on the device of a tensor of this shape.
fn sizes(shape: &[usize]) -> Result<[usize; RANK]> {
    let total = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    let fits = total.is_some_and(|n| n > 0 && n <= isize::MAX as usize / 8);
    ensure!(
        fits && shape.len() <= RANK,
        "a device has no tensor of shape {shape:?}: it needs elements, and at most {RANK} dimensions"
    );
    Ok(padded(shape))
}

/// The same of at most [`RANK`] dimensions.
fn padded(shape: &[usize]) -> [usize; RANK] {
    let mut all = [1; RANK];
    all[RANK - shape.len()..].copy_from_slice(shape);
    all
}
