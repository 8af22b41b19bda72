//! A module's tensors, in the order in which Burn visits them.

use std::fmt;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, DataError, Device, Shape, Tensor, TensorData, Transaction, bf16, f16};
use phalanx_base::{Error, ErrorKind, Result};
use phalanx_ddp::{HostTensor, HostTensors, Parameters as _};

/// Names, roles and types of a module's float tensors.
#[derive(Default)]
pub(crate) struct Outline {
    pub(crate) tensors: Vec<Described>,
    path: Vec<String>,
    trained: usize,
}

/// A tensor of a module.
pub(crate) struct Described {
    pub(crate) name: String,
    pub(crate) id: ParamId,
    /// Its number among those that have a gradient. Without one it is frozen, or a running statistic.
    pub(crate) trained: Option<usize>,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
}

impl Outline {
    pub(crate) fn of(model: &impl Module) -> Outline {
        let mut outline = Outline::default();
        model.visit(&mut outline);
        outline
    }

    /// Those that have a gradient.
    pub(crate) fn trained(&self) -> impl Iterator<Item = &Described> {
        self.tensors.iter().filter(|t| t.trained.is_some())
    }
}

impl ModuleVisitor for Outline {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        let trained = value.is_require_grad().then_some(self.trained);
        self.trained += usize::from(trained.is_some());
        self.tensors.push(Described {
            name: self.path.join("."),
            id: param.id,
            trained,
            shape: value.shape(),
            dtype: value.dtype(),
        });
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

/// The values of a tensor, row by row.
pub(crate) fn values<const D: usize>(tensor: Tensor<D>, name: &str) -> Result<Vec<f32>> {
    let read = tensor.try_into_vec_as::<f32>();
    read.map_err(|e| Error::new(ErrorKind::Failed, format!("cannot read {name}: {e}")))
}

/// Copies a module's tensors to host memory.
struct Reader<'a> {
    outline: &'a Outline,
    at: usize,
    only_untrained: bool,
    parameters: Vec<HostTensor>,
    others: Vec<HostTensor>,
    error: Option<Error>,
}

impl ModuleVisitor for Reader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let about = &self.outline.tensors[self.at];
        self.at += 1;
        if self.only_untrained && about.trained.is_some() {
            return;
        }
        let value = param.val();
        let shape = value.dims().to_vec();
        match values(value, &about.name) {
            Ok(values) => {
                let name = about.name.clone();
                let tensor = HostTensor {
                    name,
                    shape,
                    values,
                };
                match about.trained {
                    Some(_) => self.parameters.push(tensor),
                    None => self.others.push(tensor),
                }
            }
            Err(error) => self.error = Some(error),
        }
    }
}

/// A module's tensors in host memory: trained ones, then the others.
pub(crate) fn staged(
    model: &impl Module,
    outline: &Outline,
    only_untrained: bool,
) -> Result<HostTensors> {
    // A visitor does not see the running statistics of the last forward before `valid` has merged them.
    let _ = model.valid();
    let mut reader = Reader {
        outline,
        at: 0,
        only_untrained,
        parameters: Vec::new(),
        others: Vec::new(),
        error: None,
    };
    model.visit(&mut reader);
    match reader.error {
        Some(error) => Err(error),
        None => Ok(HostTensors::new(reader.parameters, reader.others)),
    }
}

/// Copies host memory into a module.
struct Writer<'a> {
    outline: &'a Outline,
    at: usize,
    only_untrained: bool,
    tensors: &'a HostTensors,
    /// Number of tensors without gradients that were written.
    others: usize,
}

impl ModuleMapper for Writer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let trained = self.outline.tensors[self.at].trained;
        self.at += 1;
        if self.only_untrained && trained.is_some() {
            return param;
        }
        let index = trained.unwrap_or_else(|| {
            self.others += 1;
            self.tensors.parameters().len() + self.others - 1
        });
        let values = self.tensors.values(index).to_vec();
        param.map(|old| {
            let data = TensorData::new(values, old.dims());
            let new = Tensor::<D>::from_data(data, (&old.device(), old.dtype()));
            new.set_require_grad(trained.is_some())
        })
    }
}

/// The module with the values of `tensors`, as [`staged`] returned them.
pub(crate) fn with_values<M: Module>(
    model: M,
    outline: &Outline,
    tensors: &HostTensors,
    only_untrained: bool,
) -> M {
    model.map(&mut Writer {
        outline,
        at: 0,
        only_untrained,
        tensors,
        others: 0,
    })
}

/// Gradients on their way to host memory, by number of the trained tensor. Those of a bucket are read in one transaction.
struct Taker<'a, F> {
    outline: &'a Outline,
    at: usize,
    from: &'a mut GradientsParams,
    bucket: F,
    reads: Vec<Read>,
}

/// Gradients of one bucket, which are on one device.
struct Read {
    bucket: usize,
    device: Device,
    numbers: Vec<usize>,
    transaction: Transaction,
}

impl<F: Fn(usize) -> usize> ModuleVisitor for Taker<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let trained = self.outline.tensors[self.at].trained;
        self.at += 1;
        let Some(number) = trained else {
            return;
        };
        let Some(gradient) = self.from.remove::<D>(param.id) else {
            return;
        };
        let (bucket, device) = ((self.bucket)(number), gradient.device());
        let is_same = |read: &mut Read| read.bucket == bucket && read.device == device;
        let mut read = self.reads.pop_if(is_same).unwrap_or_else(|| Read {
            bucket,
            device,
            numbers: Vec::new(),
            transaction: Transaction::default(),
        });
        read.numbers.push(number);
        read.transaction = read.transaction.register(gradient);
        self.reads.push(read);
    }
}

/// The gradients of a micro-batch, which are copied to host memory in the order of the buckets.
pub(crate) struct Gradients {
    /// The next one is the last.
    reads: Vec<Read>,
    /// Of the bucket that was read last.
    arrived: Vec<(usize, TensorData)>,
}

impl Gradients {
    /// Those of the trained tensors of a module. `bucket` returns the bucket of a tensor by its number.
    pub(crate) fn of(
        model: &impl Module,
        outline: &Outline,
        mut from: GradientsParams,
        bucket: impl Fn(usize) -> usize,
    ) -> Gradients {
        let mut taker = Taker {
            outline,
            at: 0,
            from: &mut from,
            bucket,
            reads: Vec::new(),
        };
        model.visit(&mut taker);
        Gradients {
            reads: taker.reads,
            arrived: Vec::new(),
        }
    }

    /// Copies the gradient of a tensor to `out`; `false` if the loss does not depend on the tensor. Asked for the last
    /// tensor first. Waits for the device at the first gradient of a bucket.
    pub(crate) fn copy(&mut self, number: usize, name: &str, out: &mut [f32]) -> Result<bool> {
        let failed = |e: &dyn fmt::Display| {
            let text = format!("cannot read the gradient of {name}: {e}");
            Error::new(ErrorKind::Failed, text)
        };
        let is_next = |read: &mut Read| read.numbers.last() == Some(&number);
        if let Some(read) = self.reads.pop_if(is_next) {
            let data = read.transaction.try_execute().map_err(|e| failed(&e))?;
            self.arrived = read.numbers.into_iter().zip(data).collect();
        }
        let Some((_, data)) = self.arrived.pop_if(|(at, _)| *at == number) else {
            return Ok(false);
        };
        let (read, wanted) = (data.num_elements(), out.len());
        if read != wanted {
            return Err(Error::usage(format!(
                "the gradient of {name} has {read} values, not {wanted}"
            )));
        }
        widen(&data, out).map_err(|e| failed(&e))?;
        Ok(true)
    }
}

/// Copies values to `out`, as f32, without a copy in between.
fn widen(data: &TensorData, out: &mut [f32]) -> std::result::Result<(), DataError> {
    fn each<T: Copy>(from: &[T], out: &mut [f32], wide: impl Fn(T) -> f32) {
        let pairs = out.iter_mut().zip(from);
        pairs.for_each(|(out, value)| *out = wide(*value));
    }
    match data.dtype() {
        DType::F32 => out.copy_from_slice(data.as_slice()?),
        DType::F16 => each(data.as_slice()?, out, f16::to_f32),
        DType::BF16 => each(data.as_slice()?, out, bf16::to_f32),
        _ => out
            .iter_mut()
            .zip(data.iter())
            .for_each(|(out, value)| *out = value),
    }
    Ok(())
}

/// Gives Burn's container the averaged gradients.
struct Giver<'a, I> {
    outline: &'a Outline,
    at: usize,
    averaged: I,
    to: GradientsParams,
}

impl<I: Iterator<Item = Option<TensorData>>> ModuleVisitor for Giver<'_, I> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let trained = self.outline.tensors[self.at].trained;
        self.at += 1;
        if trained.is_some()
            && let Some(data) = self.averaged.next().flatten()
        {
            // Optimizers work on the device without autodiff.
            let like = param.val().inner();
            let gradient = Tensor::<D>::from_data(data, (&like.device(), like.dtype()));
            self.to.register(param.id, gradient);
        }
    }
}

/// The gradients that `averaged` has by number of the trained tensor, on the module's devices.
pub(crate) fn given(
    model: &impl Module,
    outline: &Outline,
    mut averaged: Vec<Option<TensorData>>,
) -> GradientsParams {
    // Memory from which a device copies faster, if it has some.
    if let Some(device) = model.devices().first() {
        device.staging(averaged.iter_mut().flatten());
    }
    let mut giver = Giver {
        outline,
        at: 0,
        averaged: averaged.into_iter(),
        to: GradientsParams::new(),
    };
    model.visit(&mut giver);
    giver.to
}
