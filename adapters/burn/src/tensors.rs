//! A module's tensors, in the order in which Burn visits them.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
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
    pub(crate) dtype: String,
}

impl Outline {
    pub(crate) fn of(model: &impl Module) -> Outline {
        let mut outline = Outline::default();
        model.visit(&mut outline);
        outline
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
            dtype: format!("{:?}", value.dtype()),
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

/// Takes the gradients of trained tensors out of Burn's container, in one dimension each.
struct Taker<'a> {
    outline: &'a Outline,
    at: usize,
    from: &'a mut GradientsParams,
    taken: Vec<Option<Tensor<1>>>,
}

impl ModuleVisitor for Taker<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let trained = self.outline.tensors[self.at].trained;
        self.at += 1;
        if trained.is_some() {
            let gradient = self.from.remove::<D>(param.id);
            self.taken.push(gradient.map(|g| g.flatten::<1>(0, D - 1)));
        }
    }
}

/// The gradients by number of the trained tensor; `None` where the loss does not depend on it.
pub(crate) fn taken(
    model: &impl Module,
    outline: &Outline,
    mut from: GradientsParams,
) -> Vec<Option<Tensor<1>>> {
    let mut taker = Taker {
        outline,
        at: 0,
        from: &mut from,
        taken: Vec::new(),
    };
    model.visit(&mut taker);
    taker.taken
}

/// Gives Burn's container the averaged gradients.
struct Giver<'a, F> {
    outline: &'a Outline,
    at: usize,
    averaged: F,
    to: GradientsParams,
}

impl<F: FnMut(usize) -> Option<Vec<f32>>> ModuleVisitor for Giver<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let trained = self.outline.tensors[self.at].trained;
        self.at += 1;
        if let Some(index) = trained
            && let Some(values) = (self.averaged)(index)
        {
            // Optimizers work on the device without autodiff.
            let like = param.val().inner();
            let data = TensorData::new(values, like.dims());
            let gradient = Tensor::<D>::from_data(data, (&like.device(), like.dtype()));
            self.to.register(param.id, gradient);
        }
    }
}

/// The gradients that `averaged` returns by number of the trained tensor.
pub(crate) fn given(
    model: &impl Module,
    outline: &Outline,
    averaged: impl FnMut(usize) -> Option<Vec<f32>>,
) -> GradientsParams {
    let mut giver = Giver {
        outline,
        at: 0,
        averaged,
        to: GradientsParams::new(),
    };
    model.visit(&mut giver);
    giver.to
}
