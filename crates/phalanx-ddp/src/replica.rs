//! Data-parallel training of a model of another engine.

use std::fmt::Display;

use phalanx_comm::ProcessGroup;

use crate::average::{self, Average, GlobalBatch, Uneven};
use crate::bucket::BucketCaps;
use crate::equal::{digest, verify_equal};
use crate::error::{Error, Result};
use crate::fingerprint::Fingerprint;
use crate::parameters::{ParamSpec, Parameters, broadcast_parameters};
use crate::reducer::{Reducer, ReducerOptions};
use crate::vote::Commit;

/// A tensor of another engine, copied to host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTensor {
    /// Name for messages, for example `fc1.weight`.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// The values, row by row.
    pub values: Vec<f32>,
}

/// A model's tensors, copied to host memory.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct HostTensors {
    tensors: Vec<HostTensor>,
    parameters: usize,
}

impl HostTensors {
    /// `parameters` in the order in which they are registered, then `buffers`; the same on all ranks.
    pub fn new(mut parameters: Vec<HostTensor>, buffers: Vec<HostTensor>) -> HostTensors {
        let number = parameters.len();
        parameters.extend(buffers);
        HostTensors {
            tensors: parameters,
            parameters: number,
        }
    }

    /// The parameters.
    pub fn parameters(&self) -> &[HostTensor] {
        &self.tensors[..self.parameters]
    }

    /// The buffers.
    pub fn buffers(&self) -> &[HostTensor] {
        &self.tensors[self.parameters..]
    }
}

impl Parameters for HostTensors {
    fn tensors(&self) -> usize {
        self.tensors.len()
    }

    fn is_buffer(&self, index: usize) -> bool {
        index >= self.parameters
    }

    fn name(&self, index: usize) -> &str {
        &self.tensors[index].name
    }

    fn shape(&self, index: usize) -> &[usize] {
        &self.tensors[index].shape
    }

    fn values(&self, index: usize) -> &[f32] {
        &self.tensors[index].values
    }

    fn values_mut(&mut self, index: usize) -> &mut [f32] {
        &mut self.tensors[index].values
    }
}

/// Settings of a [`Replica`]. They must be the same on all ranks.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ReplicaOptions {
    /// Size limits of buckets. `None` chooses them by where the ranks are.
    pub caps: Option<BucketCaps>,
    /// How the gradients of batches of different sizes are averaged.
    pub average: Average,
    /// Whether a rank may have no data while another has.
    pub uneven: Uneven,
    /// Scales gradients down to this norm, all together, as PyTorch's `clip_grad_norm_`.
    pub max_norm: Option<f64>,
    /// Let all-reduces add in an order other than that of the ranks if that is predicted to be faster.
    pub any_order: bool,
    /// Further facts that must be the same on all ranks, such as the settings of the optimizer.
    pub must_agree: Vec<String>,
}

/// One rank's copy of a model of another engine: averages its gradients over the ranks.
///
/// The engine's tape does not call the [`Reducer`] during backward; all gradients are there when it has ended, and are
/// copied into the buckets then. While one bucket is copied, those before it are reduced.
///
/// A step is [`begin`](Self::begin), one [`backward`](Self::backward) a micro-batch, and [`finish`](Self::finish). A
/// `backward` without `begin` is a step of one micro-batch, whose gradient is the plain mean over ranks.
///
/// ```
/// use phalanx_comm::ProcessGroup;
/// use phalanx_ddp::{Error, HostTensor, HostTensors, Replica};
///
/// # fn main() -> Result<(), Error> {
/// let group = ProcessGroup::threads(1, Default::default()).remove(0);
/// let weight = HostTensor { name: "weight".into(), shape: vec![2], values: vec![1.0, 2.0] };
/// let mut model = HostTensors::new(vec![weight], vec![]);
/// let mut replica = Replica::new(&group, &mut model, Default::default())?;
/// replica.backward(|_parameter, gradient| {
///     gradient.copy_from_slice(&[0.5, -0.5]); // what the engine computed
///     Ok::<_, Error>(true)
/// })?;
/// if replica.finish()?.is_yes() {
///     let gradient: Vec<f32> = replica.gradient(0).into_iter().flatten().collect();
///     assert_eq!(gradient, [0.5, -0.5]);
/// }
/// # Ok(()) }
/// ```
pub struct Replica {
    reducer: Reducer,
    /// Number of parameters.
    parameters: usize,
    options: ReplicaOptions,
    /// Micro-batches declared and run, in a step.
    begun: Option<[usize; 2]>,
    /// No rank has samples in this step.
    is_over: bool,
    norm: Option<f64>,
    scale: f32,
}

impl Replica {
    /// Compares names, shapes and options over the ranks, then overwrites `tensors` with the values of rank 0, which the
    /// caller copies back to the engine.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Mismatch` naming the first difference; `Comm` when a peer is lost or late; `Usage` for a
    /// [`max_norm`](ReplicaOptions::max_norm) that is not above 0.
    pub fn new(
        group: &ProcessGroup,
        tensors: &mut HostTensors,
        options: ReplicaOptions,
    ) -> Result<Replica> {
        let (caps, max_norm, any_order) = (options.caps, options.max_norm, options.any_order);
        if max_norm.is_some_and(|norm| norm.is_nan() || norm <= 0.0) {
            return Err(Error::usage(
                "the norm to which gradients are clipped must be above 0",
            ));
        }
        let mut facts = Fingerprint::of_wrapper(group, &options.must_agree, caps);
        facts.line(format!("added in any order: {any_order}"));
        let (average, uneven) = (options.average, options.uneven);
        facts.line(format!("gradients averaged over {average:?}, {uneven:?}"));
        facts.line(match max_norm {
            Some(norm) => format!("gradients clipped to a norm of {norm}"),
            None => "gradients not clipped".to_owned(),
        });
        facts.parameters(tensors).compare(group)?;
        broadcast_parameters(group, tensors, 0)?;
        let specs = (0..tensors.parameters).map(|i| ParamSpec::of(tensors, i));
        let reducer_options = ReducerOptions {
            caps: match caps {
                Some(caps) => caps,
                None => BucketCaps::of_group(group)?,
            },
            // The order is that of `backward` always.
            rebuild: false,
            any_order,
            ..ReducerOptions::default()
        };
        Ok(Replica {
            reducer: Reducer::new(group.clone(), specs.collect(), reducer_options),
            parameters: tensors.parameters,
            options,
            begun: None,
            is_over: false,
            norm: None,
            scale: 1.0,
        })
    }

    /// The process group that reduces.
    pub fn group(&self) -> &ProcessGroup {
        self.reducer.group()
    }

    /// Index of the bucket in which the gradient of a parameter is reduced. The parameters of a bucket have consecutive
    /// numbers, so [`backward`](Self::backward) asks for all gradients of one bucket before those of the next.
    pub fn bucket(&self, parameter: usize) -> usize {
        self.reducer.plan().place(parameter).0
    }

    /// Starts a step in which this rank has one micro-batch of each of `sizes` samples (or tokens). Sizes of 0 are left out:
    /// there is no [`backward`](Self::backward) for them. An empty list means that the rank has run out of data: it takes
    /// part with zeros until all have, as the result says (`samples` is 0).
    ///
    /// *Blocks* until all ranks of the group begin it, to compare sizes.
    ///
    /// # Errors
    ///
    /// `Mismatch` naming a rank without data under [`Uneven::Refuse`]; `Usage` while a step is in progress, which also aborts
    /// the group; `Comm` when a peer is lost or late.
    pub fn begin(&mut self, sizes: &[usize]) -> Result<GlobalBatch> {
        if self.begun.is_some_and(|[_, run]| run > 0) {
            let what = "a step was begun before the one in progress was finished";
            return self.or_abort(Err(Error::usage(what)));
        }
        let sizes: Vec<usize> = sizes.iter().copied().filter(|size| *size > 0).collect();
        let group = self.reducer.group();
        let global = average::exchange(group, &sizes, self.options.uneven, false)?;
        self.reducer
            .plan_sizes(self.options.average, &sizes, global)?;
        self.is_over = global.samples == 0;
        self.begun = Some([sizes.len(), 0]);
        Ok(global)
    }

    /// Takes the gradients of the next micro-batch. `read` writes the gradient of the parameter with this number to the
    /// slice, row by row, and returns whether there is one: `false` if the loss does not depend on the parameter. It is
    /// called once for each parameter, the last first. The loss is the mean over the micro-batch's samples.
    ///
    /// In the last micro-batch, buckets are reduced while later ones are read. Does not block on a peer.
    ///
    /// # Errors
    ///
    /// Those of `read`; `Usage` when there are more micro-batches than were declared, and after a step that failed. They also
    /// abort the group, since the other ranks would wait for the gradients.
    pub fn backward<E: From<Error> + Display>(
        &mut self,
        read: impl FnMut(usize, &mut [f32]) -> std::result::Result<bool, E>,
    ) -> std::result::Result<(), E> {
        let taken = self.take(read);
        self.or_abort(taken)
    }

    /// `result`; after an error [aborts](Self::abort) the group, so that the other ranks do not wait for this one.
    ///
    /// # Errors
    ///
    /// That one.
    pub fn or_abort<T, E: Display>(
        &mut self,
        result: std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        if let Err(error) = &result {
            self.abort(&error.to_string());
        }
        result
    }

    fn take<E: From<Error>>(
        &mut self,
        mut read: impl FnMut(usize, &mut [f32]) -> std::result::Result<bool, E>,
    ) -> std::result::Result<(), E> {
        if self.is_over {
            return Err(E::from(Error::usage(
                "no rank has samples in this step, so it has no micro-batches; stop when Replica::begin returns 0 samples",
            )));
        }
        match &mut self.begun {
            Some([declared, run]) => {
                *run += 1;
                if *run > 1 || *declared == 0 {
                    self.reducer.next_micro_batch()?;
                }
            }
            None => {
                self.reducer.plan_step(&[1.0], 1.0)?;
                self.begun = Some([1, 1]);
            }
        }
        for parameter in (0..self.parameters).rev() {
            match read(parameter, self.reducer.slot(parameter))? {
                true => self.reducer.ready(parameter)?,
                false => self.reducer.unused(parameter)?,
            }
        }
        Ok(())
    }

    /// Ends a step that was begun and is not finished. Once a micro-batch has run, the group is aborted: the other ranks
    /// would wait for the rest.
    pub fn cancel(&mut self) {
        match self.begun.take() {
            None => {}
            Some([_, 0]) => self.is_over = false,
            Some(_) => self.abort("a step was left before it was finished"),
        }
    }

    /// Aborts the group for the other ranks; this one takes no further steps.
    pub fn abort(&mut self, why: &str) {
        self.reducer.failed = true;
        self.group().abort(why);
    }

    /// Waits until the gradients of all ranks are averaged. Returns, alike on all ranks, whether the optimizer may apply
    /// them: not if one is infinite or NaN.
    ///
    /// *Blocks* until all ranks have launched all their buckets, under the group's deadline.
    ///
    /// # Errors
    ///
    /// As [`Reducer::finish`].
    pub fn finish(&mut self) -> Result<Commit> {
        (self.begun, self.norm, self.scale) = (None, None, 1.0);
        if std::mem::take(&mut self.is_over) {
            return Ok(Commit::Yes);
        }
        let commit = self.reducer.finish()?;
        if let (true, Some(limit)) = (commit.is_yes(), self.options.max_norm) {
            let squares = |p| {
                let gradient = self.reducer.grad(p).iter();
                gradient.map(|&g| f64::from(g) * f64::from(g)).sum::<f64>()
            };
            let norm = (0..self.parameters).map(squares).sum::<f64>().sqrt();
            self.norm = Some(norm);
            self.scale = (limit / (norm + 1e-6)).min(1.0) as f32;
        }
        Ok(commit)
    }

    /// The averaged gradient of a parameter, row by row, folded in rank order and clipped. `None` if no rank's loss
    /// depends on the parameter, and after a step that was voted down.
    pub fn gradient(&self, parameter: usize) -> Option<impl ExactSizeIterator<Item = f32> + '_> {
        let (gradient, scale) = (self.reducer.grad(parameter), self.scale);
        let is_absent = gradient.is_empty() || self.reducer.is_untouched(parameter);
        (!is_absent).then(|| gradient.iter().map(move |g| g * scale))
    }

    /// The norm of all averaged gradients together before they were clipped; `None` without
    /// [`max_norm`](ReplicaOptions::max_norm), and after a step that was voted down. The same on all ranks.
    ///
    /// *Order*: squares in f64, element by element, then parameter by parameter.
    pub fn grad_norm(&self) -> Option<f64> {
        self.norm
    }

    /// Number of steps skipped by vote so far, the same on all ranks.
    pub fn skipped_steps(&self) -> u64 {
        self.reducer.skipped_steps()
    }

    /// Compares the values of all ranks, bit by bit.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Mismatch`, on every rank, naming the ranks that differ from rank 0 and the first tensor in which they do.
    pub fn verify_equal(&self, tensors: &HostTensors) -> Result<()> {
        verify_equal(self.group(), tensors, digest(tensors))
    }

    /// SHA-256 of the values of all parameters in `tensors`, as little-endian f32, in hexadecimal: the same for equal
    /// parameters, whatever the number of ranks. Buffers are not in it. Does not communicate.
    pub fn digest(&self, mut tensors: HostTensors) -> String {
        tensors.tensors.truncate(self.parameters);
        let bytes = digest(&tensors);
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
