//! The tensor handle: an index and a borrow of the step.

use std::cell::Cell;

use crate::param::GradSink;
use crate::tape::{SlotId, State, Step};
use crate::tensor::Shape;
use crate::{Precision, Result, refuse};

/// A value of one training step: images are (N, H, W, C), everything else is
/// row-major with the batch outermost.
///
/// Operations take their operands by value, so that they can reuse memory that is not
/// needed any more; [`share`](Tensor::share) makes a second handle.
pub struct Tensor<'s> {
    step: &'s Step<'s>,
    /// Changes at most once, from a value in bf16 to the same in f32 or back, before
    /// its elements are borrowed.
    slot: Cell<SlotId>,
}

impl<'s> Tensor<'s> {
    pub(crate) fn new(step: &'s Step<'s>, slot: SlotId) -> Self {
        Self::held(step, &mut step.state(), slot)
    }

    /// As [`new`](Self::new), where the step's state is borrowed already.
    pub(crate) fn held(step: &'s Step<'s>, state: &mut State, slot: SlotId) -> Self {
        state.hold(slot);
        let slot = Cell::new(slot);
        Tensor { step, slot }
    }

    /// The step that it belongs to.
    pub fn step(&self) -> &'s Step<'s> {
        self.step
    }

    /// The value's slot, of f32: what most operations read.
    pub(crate) fn slot(&self) -> SlotId {
        self.slot_as(Precision::F32)
    }

    /// The value's slot, whatever its elements are.
    pub(crate) fn own_slot(&self) -> SlotId {
        self.slot.get()
    }

    /// Names another slot from now on, of the same value.
    pub(crate) fn move_to(&self, slot: SlotId) {
        let mut state = self.step.state();
        state.hold(slot);
        state.let_go(self.slot.replace(slot));
    }

    pub(crate) fn dims(&self) -> Shape {
        self.step.state().shape(self.slot.get())
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> Vec<usize> {
        self.dims().to_vec()
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.dims().numel()
    }

    /// The elements, row-major (channels-last for images).
    pub fn data(&self) -> &[f32] {
        let slot = self.slot();
        let state = self.step.state();
        let v = state.value(slot);
        // SAFETY: this handle is counted, and an operation that overwrites,
        // moves or gives back a slot's memory needs a count of one *and* that
        // handle by value, which the borrow of `self` rules out. The pool's
        // memory itself lives as long as the tape, which the step borrows.
        unsafe { std::slice::from_raw_parts(v.as_ptr(), v.len()) }
    }

    /// A copy of the elements.
    pub fn to_vec(&self) -> Vec<f32> {
        self.data().to_vec()
    }

    /// The value of a tensor of one element, such as a loss.
    ///
    /// # Errors
    /// `Usage` when there is not exactly one element.
    pub fn item(&self) -> Result<f32> {
        match self.data() {
            [one] => Ok(*one),
            _ => refuse!(
                "item() needs a tensor of one element, this one has shape {:?}; losses have one with Reduction::Mean or Sum",
                self.dims()
            ),
        }
    }

    /// A second handle to the same value.
    #[must_use]
    pub fn share(&self) -> Self {
        Tensor::new(self.step, self.slot.get())
    }

    /// The same elements as an input that gets no gradient: a copy, unless this handle is the only one. PyTorch:
    /// `detach`.
    ///
    /// # Errors
    /// None at present; operations share one signature.
    pub fn detach(self) -> Result<Tensor<'s>> {
        let slot = self.slot();
        let mut state = self.step.state();
        let buf = state.take_for_writing(slot);
        let shape = state.shape(slot);
        let slot = state.add_leaf(shape, buf, false)?;
        Ok(Tensor::held(self.step, &mut state, slot))
    }

    /// Runs `part` of a model on this tensor as in an evaluation, while the rest of the step trains: dropout does nothing
    /// (and does not count among the step's random operations), and batch norms use their running statistics, which stay
    /// as they are. Gradients flow through it. PyTorch: `part.eval()`.
    ///
    /// A part that is to stay as it is also gets no gradients if its output is [detached](Tensor::detach), keeps no
    /// inner values until the step's end if it runs under [`recompute`](Tensor::recompute) besides, and does not change by weight
    /// decay if its parameters have a group whose [`lr_scale`](crate::optim::ParamGroup::lr_scale) is 0.
    ///
    /// # Errors
    /// Those of `part`.
    pub fn evaluate<R>(self, part: impl FnOnce(Tensor<'s>) -> Result<R>) -> Result<R> {
        let step = self.step;
        step.evaluate(|| part(self))
    }

    /// Runs `part` of a model on this tensor, and frees its inner values that backward would read; backward recomputes
    /// them just before it reads them. The step needs less memory, and more time: at most that of the part's forward
    /// pass. `part` may use other tensors too, and may contain further parts.
    ///
    /// No bit changes, of gradients or anything else: the recorded operations run
    /// again, not the code. Dropout drops the same elements, batch norms keep
    /// their statistics (running ones change once, and joined ones are not
    /// joined twice). Values that `part` returns, holds or takes are kept; so are outputs
    /// of operations that cannot be run again: losses, embeddings, concatenations, and
    /// custom operations unless they [can be](crate::CustomOp::can_recompute). In an
    /// evaluation it just runs `part`.
    ///
    /// # Errors
    /// Those of `part`.
    pub fn recompute<R>(self, part: impl FnOnce(Tensor<'s>) -> Result<R>) -> Result<R> {
        let step = self.step;
        let segment = step.state().open();
        let result = part(self);
        step.state().close(segment);
        result
    }

    /// The gradient of a [`Step::variable`] after the backward pass; `None` for other
    /// tensors, before that, and if the loss does not depend on it.
    pub fn grad(&self) -> Option<Vec<f32>> {
        self.step
            .state()
            .kept_grad(self.slot.get())
            .map(<[f32]>::to_vec)
    }

    /// Runs the backward pass from this loss (one element). Gradients are written into
    /// memory that `sink` supplies; `sink.ready` is called inside.
    ///
    /// *Order*: nodes in exact reverse of recording; parameters that the loss
    /// does not depend on are zero-filled and reported first.
    ///
    /// # Errors
    /// `Usage` when this is not one element, depends on nothing that has a
    /// gradient, or the step already ran its backward pass; `Sink` when the
    /// sink refused a gradient, `Custom` when a user's operation failed, `Anomaly` for a gradient that is not
    /// finite where that is [checked](crate::Tape::set_anomaly) (the step cannot be used after that).
    pub fn backward(self, sink: &mut dyn GradSink) -> Result<()> {
        if self.numel() != 1 {
            refuse!(
                "backward needs a loss of one element, this tensor has shape {:?}; use backward_with",
                self.dims()
            );
        }
        self.backward_with(&[1.0], sink)
    }

    /// As [`backward`](Tensor::backward) from a tensor of any shape, given the
    /// gradient with respect to it.
    ///
    /// # Errors
    /// As [`backward`](Tensor::backward).
    pub fn backward_with(self, gradient: &[f32], sink: &mut dyn GradSink) -> Result<()> {
        self.step.backward(self.slot(), gradient, sink)
    }
}

impl Drop for Tensor<'_> {
    fn drop(&mut self) {
        self.step.state().let_go(self.slot.get());
    }
}

impl std::fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tensor")
            .field("shape", &self.dims())
            .finish()
    }
}
