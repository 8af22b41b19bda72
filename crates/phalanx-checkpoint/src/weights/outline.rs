//! Names and shapes of a model's tensors, for reading and writing them one at a time.

use phalanx_nn::Params;

/// A name and a shape, as PyTorch has them.
pub(crate) type NamedShape = (String, Vec<usize>);

/// Names and shapes of a model's full tensors, where no process has all of their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    params: Vec<NamedShape>,
    buffers: Vec<NamedShape>,
}

/// A tensor of an [`Outline`], or of the optimizer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorId {
    /// The parameter with this index.
    Param(usize),
    /// The buffer (running statistics) with this index.
    Buffer(usize),
    /// An optimizer's buffer of a parameter.
    State {
        /// Index of the optimizer's buffer.
        buffer: usize,
        /// Index of the parameter.
        param: usize,
    },
}

/// Returns a tensor in full, in PyTorch's row-major order.
pub type Values<'a> = dyn FnMut(TensorId) -> std::io::Result<Vec<f32>> + 'a;

impl Outline {
    /// Parameters and buffers, in the order of their indices.
    pub fn new(params: Vec<(String, Vec<usize>)>, buffers: Vec<(String, Vec<usize>)>) -> Outline {
        Outline { params, buffers }
    }

    /// That of `params`.
    pub fn of(params: &Params) -> Outline {
        let named = |infos: &[phalanx_nn::ParamInfo]| {
            let all = infos.iter().map(|i| (i.name.clone(), i.shape.clone()));
            all.collect()
        };
        Outline::new(named(params.infos()), named(params.buffer_infos()))
    }

    /// Names and shapes of the parameters.
    pub fn params(&self) -> &[(String, Vec<usize>)] {
        &self.params
    }

    /// Names and shapes of the buffers.
    pub fn buffers(&self) -> &[(String, Vec<usize>)] {
        &self.buffers
    }

    /// The name of a parameter or buffer, or of the parameter that a state belongs to.
    pub fn name(&self, tensor: TensorId) -> &str {
        match tensor {
            TensorId::Buffer(i) => &self.buffers[i].0,
            TensorId::Param(i) | TensorId::State { param: i, .. } => &self.params[i].0,
        }
    }

    /// Parameters and buffers in ascending order of their names.
    pub(crate) fn by_name(&self) -> Vec<(TensorId, &NamedShape)> {
        let params = self.params.iter().enumerate();
        let params = params.map(|(i, named)| (TensorId::Param(i), named));
        let buffers = self.buffers.iter().enumerate();
        let buffers = buffers.map(|(i, named)| (TensorId::Buffer(i), named));
        let mut all: Vec<_> = params.chain(buffers).collect();
        all.sort_by(|a, b| a.1.0.cmp(&b.1.0));
        all
    }

    /// Parameters and buffers as in PyTorch's `state_dict()`: buffers follow the parameters of
    /// their layer.
    pub(crate) fn as_in_state_dict(&self) -> Vec<(TensorId, &NamedShape)> {
        let buffers = self.buffers.iter().enumerate();
        let mut buffers: Vec<_> = buffers.map(|(i, b)| (TensorId::Buffer(i), b)).collect();
        let mut all = Vec::with_capacity(self.params.len() + buffers.len());
        let mut params = self.params.iter().enumerate().peekable();
        while let Some((i, param)) = params.next() {
            all.push((TensorId::Param(i), param));
            let layer = layer_of(&param.0);
            if params
                .peek()
                .is_none_or(|(_, next)| layer_of(&next.0) != layer)
            {
                all.extend(buffers.extract_if(.., |(_, b)| layer_of(&b.0) == layer));
            }
        }
        all.append(&mut buffers);
        all
    }
}

/// A copy of a parameter or buffer of `params` in PyTorch's row-major order; empty for a state.
pub fn full_values(params: &Params, tensor: TensorId) -> Vec<f32> {
    let values = match tensor {
        TensorId::Param(i) => params.ids().nth(i).map(|id| params.export(id)),
        TensorId::Buffer(i) => params
            .buffer_ids()
            .nth(i)
            .map(|id| params.buffer(id).to_vec()),
        TensorId::State { .. } => None,
    };
    values.unwrap_or_default()
}

/// `bn1` of `bn1.weight`.
fn layer_of(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(layer, _)| layer)
}

/// Fails unless `values` are those of a tensor of this shape.
pub(crate) fn check_len(named: &NamedShape, values: &[f32]) -> std::io::Result<()> {
    let (name, shape) = named;
    if shape.iter().product::<usize>() == values.len() {
        return Ok(());
    }
    let what = format!(
        "{name} of shape {shape:?} was given {} values",
        values.len()
    );
    Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, what))
}
