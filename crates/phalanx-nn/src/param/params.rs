//! The built parameters and buffers of a model.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::layout::Layout;
use super::lora::LoraConfig;
use crate::error::{Error, Result, refuse};
use phalanx_kernels::aligned::{AlignedBuf, round_up};

/// The model of a parameter or buffer: a unique number of each root [`Scope`](crate::Scope) of the
/// process. Clones of [`Params`] are the same model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ModelId(u32);

impl ModelId {
    /// A number that no other model has.
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        ModelId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A parameter of one model, by registration order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId {
    pub(super) index: u32,
    pub(super) model: ModelId,
}

impl ParamId {
    /// Position in registration order, from 0; index into [`Params::infos`].
    pub fn index(self) -> usize {
        self.index as usize
    }
}

/// A buffer (running statistics and the like: state without a gradient).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId {
    pub(super) index: u32,
    pub(super) model: ModelId,
}

impl BufferId {
    /// Position in registration order, from 0; index into [`Params::buffer_infos`].
    pub fn index(self) -> usize {
        self.index as usize
    }
}

/// Name, shape and place of one parameter or buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParamInfo {
    /// PyTorch's dotted name, e.g. `conv1.weight`.
    pub name: String,
    /// PyTorch's shape. The order in memory is `layout`.
    pub shape: Vec<usize>,
    /// First element in the flat region; a multiple of 16 (64 bytes).
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
    /// Memory order compared with PyTorch's.
    pub layout: Layout,
    /// Whether it is [frozen](Params::freeze).
    pub(crate) frozen: bool,
    /// Name and shape of the parameter that this is a shard of, if it is one.
    pub(crate) whole: Option<Box<(String, Vec<usize>)>>,
}

impl ParamInfo {
    /// Its elements in the flat memory.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }

    /// Its name, or that of the parameter that it is a [shard](crate::Scope::shard) of.
    pub fn whole_name(&self) -> &str {
        self.whole.as_ref().map_or(&self.name, |whole| &whole.0)
    }

    /// Its shape, or that of the parameter that it is a [shard](crate::Scope::shard) of.
    pub fn whole_shape(&self) -> &[usize] {
        self.whole.as_ref().map_or(&self.shape, |whole| &whole.1)
    }

    /// Whether it is a [shard](crate::Scope::shard) of a parameter.
    pub(crate) fn is_shard(&self) -> bool {
        self.whole_shape() != self.shape
    }

    /// The shape in the engine's memory order: of [`Layout::Conv`] (kh, kw, in, out), of
    /// [`Layout::Conv1d`] (k, in, out), else PyTorch's.
    pub fn engine_shape(&self) -> Vec<usize> {
        match self.layout.order() {
            [] => self.shape.clone(),
            order => order.iter().map(|&i| self.shape[i]).collect(),
        }
    }

    /// The region of [`Params::flat`] from this parameter to the next: `values`, which are in PyTorch's row-major order,
    /// in the engine's order, and the gap of zeros.
    ///
    /// # Errors
    /// `Usage` when the number of values is not the parameter's.
    pub fn region(&self, values: &[f32]) -> Result<Vec<f32>> {
        let mut region = vec![0.0; round_up(self.len)];
        import(self, values, &mut region)?;
        Ok(region)
    }
}

/// Parameters or buffers so far: places, and values in PyTorch's order.
#[derive(Default)]
pub(super) struct Section {
    pub(super) infos: Vec<ParamInfo>,
    pub(super) values: Vec<AlignedBuf>,
    end: usize,
}

impl Section {
    pub(super) fn add(
        &mut self,
        name: String,
        shape: &[usize],
        layout: Layout,
        values: AlignedBuf,
    ) -> u32 {
        let len = values.len();
        self.infos.push(ParamInfo {
            name,
            shape: shape.to_vec(),
            offset: self.end,
            len,
            layout,
            frozen: false,
            whole: None,
        });
        self.values.push(values);
        self.end += round_up(len);
        self.infos.len() as u32 - 1
    }

    /// Says what number `index` is a shard of.
    pub(super) fn set_whole(&mut self, index: usize, name: &str, shape: &[usize]) {
        if let Some(info) = self.infos.get_mut(index) {
            info.whole = Some(Box::new((name.to_owned(), shape.to_vec())));
        }
    }

    /// Copies all values from PyTorch's order to their places.
    pub(super) fn build(self) -> Result<(AlignedBuf, Vec<ParamInfo>)> {
        let mut flat = AlignedBuf::zeroed(self.end);
        for (info, values) in self.infos.iter().zip(self.values) {
            import(info, &values, &mut flat[info.range()])?;
        }
        Ok((flat, self.infos))
    }
}

/// Every parameter and buffer of a model, each kind in one flat region.
///
/// Each starts on a 64-byte boundary; the gaps between them hold zeros, so a
/// hash, a broadcast or an optimizer may treat [`flat`](Params::flat) as one array.
#[derive(Clone)]
pub struct Params {
    pub(super) model: ModelId,
    pub(crate) values: AlignedBuf,
    pub(crate) infos: Vec<ParamInfo>,
    pub(crate) buffer_values: AlignedBuf,
    pub(crate) buffer_infos: Vec<ParamInfo>,
    pub(super) lora: Option<LoraConfig>,
    /// Of the values of parameters and buffers.
    pub(super) versions: [u64; 2],
}

/// A number that no other values of this process have.
pub(super) fn new_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Params {
    /// Number of parameters (tensors).
    pub fn len(&self) -> usize {
        self.infos.len()
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.infos.is_empty()
    }

    /// Number of elements of all parameters, without the gaps.
    pub fn numel(&self) -> usize {
        self.infos.iter().map(|i| i.len).sum()
    }

    /// The whole region, gaps (zeros) included.
    pub fn flat(&self) -> &[f32] {
        &self.values
    }

    /// Numbers that stand for the values of the parameters, and for those of the buffers: within a process, what has equal
    /// numbers has equal values. A copy has those of the original until one of them is written.
    pub fn versions(&self) -> [u64; 2] {
        self.versions
    }

    /// The whole region for writing; gaps must stay zero.
    pub fn flat_mut(&mut self) -> &mut [f32] {
        self.versions[0] = new_version();
        &mut self.values
    }

    /// One parameter in the engine's memory order.
    ///
    /// # Panics
    /// If `id` belongs to another, larger model.
    pub fn get(&self, id: ParamId) -> &[f32] {
        &self.values[self.infos[id.index()].range()]
    }

    /// One parameter for writing, in the engine's memory order.
    ///
    /// # Panics
    /// If `id` belongs to another, larger model.
    pub fn get_mut(&mut self, id: ParamId) -> &mut [f32] {
        self.versions[0] = new_version();
        &mut self.values[self.infos[id.index()].range()]
    }

    /// Names, shapes and places in registration order.
    pub fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    /// Name, shape and place of one parameter.
    ///
    /// # Errors
    /// `Usage` when it belongs to another model.
    pub fn info(&self, id: ParamId) -> Result<&ParamInfo> {
        match self.infos.get(id.index()) {
            Some(info) if id.model == self.model => Ok(info),
            info => Err(foreign("parameter", id.index(), info)),
        }
    }

    /// Name, shape and place of one buffer.
    ///
    /// # Errors
    /// `Usage` when it belongs to another model.
    pub fn buffer_info(&self, id: BufferId) -> Result<&ParamInfo> {
        match self.buffer_infos.get(id.index()) {
            Some(info) if id.model == self.model => Ok(info),
            info => Err(foreign("buffer", id.index(), info)),
        }
    }

    /// All ids in registration order.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = ParamId> + DoubleEndedIterator + use<> {
        let model = self.model;
        (0..self.infos.len() as u32).map(move |index| ParamId { index, model })
    }

    /// The parameter of that dotted name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        let index = self.infos.iter().position(|info| info.name == name)?;
        self.ids().nth(index)
    }

    /// Freezes a parameter: it gets no gradient from now on (PyTorch: `requires_grad_(False)`), and backward computes
    /// nothing that only it or others like it would need. A sink is told that it is unused. Batch norms of frozen weights go
    /// on to update their running statistics, as in PyTorch.
    ///
    /// # Panics
    /// If `id` belongs to another, larger model.
    pub fn freeze(&mut self, id: ParamId) {
        self.infos[id.index()].frozen = true;
    }

    /// The settings of its low-rank adapters, if it was built [with some](crate::Scope::lora).
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    /// Whether a parameter is [frozen](Self::freeze).
    ///
    /// # Panics
    /// If `id` belongs to another, larger model.
    pub fn is_frozen(&self, id: ParamId) -> bool {
        self.infos[id.index()].frozen
    }

    /// A copy of one parameter in PyTorch's row-major order.
    pub fn export(&self, id: ParamId) -> Vec<f32> {
        let mut out = Vec::new();
        self.export_of(id, &self.values, &mut out);
        out
    }

    /// As [`export`](Params::export), but from `flat`, other values in the places of
    /// [`flat`](Params::flat) (an optimizer's buffer), and into `out`, which is emptied
    /// first and whose memory is used again.
    ///
    /// # Panics
    /// If `id` belongs to another, larger model, or `flat` is shorter than this model's.
    pub fn export_of(&self, id: ParamId, flat: &[f32], out: &mut Vec<f32>) {
        let info = &self.infos[id.index()];
        out.clear();
        out.resize(info.len, 0.0);
        info.layout.export(&info.shape, &flat[info.range()], out);
    }

    /// Sets one parameter from PyTorch's row-major order.
    ///
    /// # Errors
    /// `Usage` when the number of values is not the parameter's, or `id` belongs to another, larger model.
    pub fn import(&mut self, id: ParamId, values: &[f32]) -> Result<()> {
        let info = self.infos.get(id.index()).cloned();
        let info = info.ok_or_else(|| foreign("parameter", id.index(), None))?;
        import(&info, values, self.get_mut(id))
    }

    /// A copy of the same model in which each parameter may have another shape (a shard of it,
    /// say): ids, names, layouts and buffers stay. `f` gets a parameter's values in PyTorch's
    /// row-major order and returns its new shape and values in the same order; there may be
    /// none. [`Grads`](crate::Grads) and optimizers made from the copy have its shapes.
    ///
    /// # Errors
    /// Those of `f`; `Usage` when the values do not fit the shape, or the shape the layout.
    pub fn map(
        &self,
        mut f: impl FnMut(&ParamInfo, Vec<f32>) -> Result<(Vec<usize>, Vec<f32>)>,
    ) -> Result<Params> {
        let mut section = Section::default();
        for (id, info) in self.ids().zip(&self.infos) {
            let (shape, values) = f(info, self.export(id))?;
            let numel = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
            let rank = info.layout.rank().unwrap_or(shape.len());
            if rank != shape.len() || numel != Some(values.len()) {
                refuse!(
                    "parameter {}: shape {shape:?} does not fit the layout {} and {} values",
                    info.name,
                    info.layout,
                    values.len()
                );
            }
            let mut own = AlignedBuf::zeroed(values.len());
            own.copy_from_slice(&values);
            let index = section.add(info.name.clone(), &shape, info.layout, own);
            if shape != info.whole_shape() {
                section.set_whole(index as usize, info.whole_name(), info.whole_shape());
            }
        }
        let (values, mut infos) = section.build()?;
        let old = infos.iter_mut().zip(&self.infos);
        old.for_each(|(info, old)| info.frozen = old.frozen);
        Ok(Params {
            values,
            infos,
            model: self.model,
            lora: self.lora.clone(),
            versions: [new_version(), self.versions[1]],
            buffer_values: self.buffer_values.clone(),
            buffer_infos: self.buffer_infos.clone(),
        })
    }

    /// Names, shapes and places of the buffers in registration order.
    pub fn buffer_infos(&self) -> &[ParamInfo] {
        &self.buffer_infos
    }

    /// All buffers in registration order.
    pub fn buffer_ids(&self) -> impl ExactSizeIterator<Item = BufferId> + use<> {
        let model = self.model;
        (0..self.buffer_infos.len() as u32).map(move |index| BufferId { index, model })
    }

    /// The buffer of that dotted name.
    pub fn find_buffer(&self, name: &str) -> Option<BufferId> {
        let index = self
            .buffer_infos
            .iter()
            .position(|info| info.name == name)?;
        self.buffer_ids().nth(index)
    }

    /// The region of all buffers, gaps (zeros) included.
    pub fn buffers_flat(&self) -> &[f32] {
        &self.buffer_values
    }

    /// The region of all buffers for writing; gaps must stay zero.
    pub fn buffers_flat_mut(&mut self) -> &mut [f32] {
        self.versions[1] = new_version();
        &mut self.buffer_values
    }

    /// One buffer.
    ///
    /// # Panics
    /// If `id` belongs to another, larger model.
    pub fn buffer(&self, id: BufferId) -> &[f32] {
        &self.buffer_values[self.buffer_infos[id.index()].range()]
    }

    /// One buffer for writing.
    ///
    /// # Panics
    /// If `id` belongs to another, larger model.
    pub fn buffer_mut(&mut self, id: BufferId) -> &mut [f32] {
        self.versions[1] = new_version();
        &mut self.buffer_values[self.buffer_infos[id.index()].range()]
    }
}

impl std::fmt::Debug for Params {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Params")
            .field("parameters", &self.len())
            .field("elements", &self.numel())
            .field("buffers", &self.buffer_infos.len())
            .finish()
    }
}

/// A layer's `kind` number `index` belongs to another model; `here` has that number in this one.
fn foreign(kind: &str, index: usize, here: Option<&ParamInfo>) -> Error {
    let here = match here {
        Some(info) => format!("{} is {kind} {index} of the model in use", info.name),
        None => format!("the model in use has no {kind} {index}"),
    };
    Error::usage(format!(
        "a layer's {kind} {index} belongs to another model ({here}); use a layer with the Params that were \
         built from its own Scope, or a clone of them"
    ))
}

pub(super) fn import(info: &ParamInfo, from: &[f32], into: &mut [f32]) -> Result<()> {
    if from.len() != info.len {
        refuse!(
            "parameter {} of shape {:?} has {} values, got {}",
            info.name,
            info.shape,
            info.len,
            from.len()
        );
    }
    info.layout.import(&info.shape, from, into);
    Ok(())
}
