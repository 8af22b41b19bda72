//! Recorded operations: an enum in a vector that keeps its capacity, so that
//! recording does not allocate.

use super::Step;
use super::backward::BackwardContext;
use super::segment::Compute;
use super::state::{SlotId, State};
use crate::Precision;
use crate::error::{Error, Result};
use crate::ops;
use crate::param::ParamId;
use crate::pool::Buf;
use crate::tensor::{Shape, Tensor};

/// A reference of a node.
pub(crate) enum Visit {
    /// Its output slot.
    Output(SlotId),
    /// A slot it read, which may want a gradient, and which a second run reads again.
    Input(SlotId),
    /// A slot it read, which may want a gradient, and which nothing reads again.
    Once(SlotId),
    /// A slot whose value its backward reads.
    Saved(SlotId),
    /// A parameter whose gradient it contributes to, once.
    Param(ParamId),
}

/// A weight of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    Param(ParamId),
    Slot(SlotId),
}

/// One recorded operation.
pub(crate) trait Recorded {
    /// The operation's name in profiles, if it is not the variant's.
    fn name(&self) -> Option<&'static str> {
        None
    }

    /// Visits everything the node refers to; the output comes first.
    fn visit(&self, f: &mut dyn FnMut(Visit));

    /// Converts the gradient of the output into gradients of parameters and
    /// inputs. `dy` may be overwritten and passed on.
    fn backward(&self, ctx: &mut BackwardContext<'_>, dy: Buf) -> Result<()>;

    /// Whether [`recompute`](Self::recompute) can make the output's bits from the inputs.
    /// Otherwise a recomputed segment keeps the output.
    fn can_recompute(&self) -> bool {
        false
    }

    /// Computes the output's elements again. The values of all inputs are present.
    fn recompute(&self, _: &mut Compute<'_>) -> Result<Buf> {
        Err(Error::internal("an operation cannot be run again"))
    }
}

/// The slots of an operation on `N` tensors.
pub(crate) struct Slots<const N: usize> {
    pub(crate) x: [SlotId; N],
    pub(crate) out: SlotId,
    /// Memory made in the forward pass that only backward reads.
    pub(crate) aux: Option<SlotId>,
}

impl<const N: usize> Slots<N> {
    /// The slot of what [`Operation::forward`] made besides the output.
    pub(crate) fn aux(&self) -> Result<SlotId> {
        self.aux
            .ok_or_else(|| Error::internal("backward lacks memory that forward should have saved"))
    }
}

/// An operation on `N` tensors with one output.
pub(crate) trait Operation<const N: usize = 1> {
    /// Whether the output can be computed again from the inputs.
    const RECOMPUTES: bool = true;

    /// As [`Recorded::name`].
    fn name(&self) -> Option<&'static str> {
        None
    }

    /// Its weights.
    fn operands(&self) -> [Option<Operand>; 2] {
        [None; 2]
    }

    /// The weights that backward reads.
    fn saves_operands(&self) -> [bool; 2] {
        [false; 2]
    }

    /// The inputs that backward reads.
    fn saves(&self) -> [bool; N] {
        [false; N]
    }

    /// Whether backward reads the output.
    fn saves_output(&self) -> bool {
        false
    }

    /// Computes the output, and what backward needs besides.
    fn forward(&self, _: &mut Compute<'_>, _: [SlotId; N]) -> Result<(Buf, Option<Buf>)> {
        Err(Error::internal("an operation cannot be run again"))
    }

    /// As [`Recorded::backward`].
    fn backward(&self, ctx: &mut BackwardContext<'_>, slots: &Slots<N>, dy: Buf) -> Result<()>;

    /// Floating-point operations of the forward pass, as [`Tape::flops`](super::Tape::flops) counts them.
    fn flops(&self) -> u64 {
        0
    }

    /// The same of a backward pass that computes the gradients of the `wanted` inputs, and with
    /// `weight` of the first weight.
    fn backward_flops(&self, wanted: [bool; N], weight: bool) -> u64 {
        let gradients = wanted.into_iter().chain([weight]).filter(|wanted| *wanted);
        self.flops() * gradients.count() as u64
    }
}

/// An [`Operation`] and its slots.
pub(crate) struct OpNode<O, const N: usize> {
    slots: Slots<N>,
    op: O,
}

impl<O, const N: usize> OpNode<O, N> {
    pub(crate) fn new(x: [SlotId; N], out: SlotId, op: O) -> Self {
        let slots = Slots { x, out, aux: None };
        OpNode { slots, op }
    }
}

impl<const N: usize, O: Operation<N>> Recorded for OpNode<O, N> {
    fn name(&self) -> Option<&'static str> {
        self.op.name()
    }

    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.slots.out));
        self.slots.x.iter().for_each(|&x| f(Visit::Input(x)));
        let operands = self.op.operands().into_iter().zip(self.op.saves_operands());
        for (operand, saved) in operands {
            match operand {
                Some(Operand::Param(param)) => f(Visit::Param(param)),
                Some(Operand::Slot(slot)) if O::RECOMPUTES => f(Visit::Input(slot)),
                Some(Operand::Slot(slot)) => f(Visit::Once(slot)),
                None => {}
            }
            if let (Some(Operand::Slot(slot)), true) = (operand, saved) {
                f(Visit::Saved(slot));
            }
        }
        for (&x, saved) in self.slots.x.iter().zip(self.op.saves()) {
            if saved {
                f(Visit::Saved(x));
            }
        }
        let output = self.op.saves_output().then_some(self.slots.out);
        for saved in output.into_iter().chain(self.slots.aux) {
            f(Visit::Saved(saved));
        }
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, dy: Buf) -> Result<()> {
        let wanted = self.slots.x.map(|x| ctx.wants(x));
        let [weight, _] = self.op.operands();
        let weight = weight.is_some_and(|weight| ctx.state.wants_grad_of(weight));
        ctx.state.count(self.op.backward_flops(wanted, weight));
        self.op.backward(ctx, &self.slots, dy)
    }

    fn can_recompute(&self) -> bool {
        O::RECOMPUTES
    }

    fn recompute(&self, c: &mut Compute<'_>) -> Result<Buf> {
        let (buf, aux) = self.op.forward(c, self.slots.x)?;
        // Backward reads what the first run made.
        aux.into_iter().for_each(|aux| c.state.pool.put(aux));
        Ok(buf)
    }
}

impl Step<'_> {
    /// As [`apply`](Self::apply), for an output of any precision.
    pub(crate) fn apply_as<'s, const N: usize, O: Operation<N>>(
        &'s self,
        x: [SlotId; N],
        kind: (Shape, Precision),
        op: O,
    ) -> Result<Tensor<'s>>
    where
        Node: From<OpNode<O, N>>,
    {
        let mut st = self.state();
        let made = op.forward(&mut self.compute(&mut st), x)?;
        self.emit(&mut st, x, kind, made, op)
    }

    /// Runs an operation on the inputs `x`, and records it if a gradient is wanted.
    pub(crate) fn apply<'s, const N: usize, O: Operation<N>>(
        &'s self,
        x: [SlotId; N],
        shape: Shape,
        op: O,
    ) -> Result<Tensor<'s>>
    where
        Node: From<OpNode<O, N>>,
    {
        self.apply_as(x, (shape, Precision::F32), op)
    }

    /// Adds an operation's output, and records the operation if a gradient is wanted.
    pub(crate) fn emit<'s, const N: usize, O: Operation<N>>(
        &'s self,
        st: &mut State,
        x: [SlotId; N],
        (shape, precision): (Shape, Precision),
        (buf, aux): (Buf, Option<Buf>),
        op: O,
    ) -> Result<Tensor<'s>>
    where
        Node: From<OpNode<O, N>>,
    {
        st.count(op.flops());
        let mut operands = op.operands().into_iter().flatten();
        let wants = operands.any(|o| st.wants_grad_of(o)) || x.iter().any(|&x| st.wants_grad(x));
        let out = st.add_output_as((shape, precision), buf, wants);
        let mut node = OpNode::new(x, out, op);
        if wants {
            node.slots.aux = aux.map(|aux| st.add_aux(aux)).transpose()?;
        } else {
            aux.into_iter().for_each(|aux| st.pool.put(aux));
        }
        st.made(self.params(), node, wants)?;
        Ok(Tensor::held(self, st, out))
    }
}

macro_rules! nodes {
    ($($name:ident($ty:ty)),* $(,)?) => {
        /// All kinds of recorded operations.
        pub(crate) enum Node { $($name($ty)),* }

        $(impl From<$ty> for Node {
            fn from(n: $ty) -> Node { Node::$name(n) }
        })*

        impl Node {
            fn recorded(&self) -> (&dyn Recorded, &'static str) {
                match self { $(Node::$name(n) => (n, stringify!($name))),* }
            }
        }
    };
}

nodes! {
    AdaptiveMaxPool2d(OpNode<ops::adaptive_max_pool2d::AdaptiveMaxPool2d, 1>),
    Add(OpNode<ops::arithmetic::Add, 2>),
    AvgPool2d(OpNode<ops::avg_pool2d::AvgPool2d, 1>),
    BatchNorm(ops::batch_norm::BatchNorm),
    Binary(OpNode<ops::arithmetic::Binary, 2>),
    Attention(OpNode<ops::attention::Attention, 3>),
    Bmm(OpNode<ops::bmm::Bmm, 2>),
    Cast(OpNode<ops::cast::Cast, 1>),
    Computed(ops::custom::Foreign),
    Concat(ops::slice::Concat),
    Conv2d(OpNode<ops::conv2d::Conv2d, 1>),
    ConvTranspose2d(OpNode<ops::conv_transpose2d::ConvTranspose2d, 1>),
    Cumsum(OpNode<ops::cumsum::Cumsum, 1>),
    Interpolate(OpNode<ops::interpolate::Interpolate, 1>),
    Custom(ops::custom::Custom),
    Dropout(OpNode<ops::dropout::Dropout, 1>),
    Embedding(OpNode<ops::embedding::Embedding, 0>),
    Flatten(OpNode<ops::permute::Flatten, 1>),
    Gather(OpNode<ops::select::Gather, 1>),
    LayerNorm(OpNode<ops::layer_norm::LayerNorm, 1>),
    Linear(OpNode<ops::linear::Linear, 1>),
    MaskedFill(OpNode<ops::select::Masked, 1>),
    MaxPool2d(OpNode<ops::max_pool2d::MaxPool2d, 1>),
    Nll(OpNode<ops::nll::Nll, 1>),
    Parameter(OpNode<ops::parameter::Parameter, 0>),
    Permute(OpNode<ops::permute::Permute, 1>),
    PreparedLoss(OpNode<ops::element_loss::Prepared, 1>),
    Reduction(OpNode<ops::reduction::Reduction, 1>),
    Reshape(OpNode<ops::permute::Reshape, 1>),
    Rotary(OpNode<ops::rotary::Rotary, 1>),
    Scale(OpNode<ops::unary::Scale, 1>),
    SelectWhere(OpNode<ops::select::Masked, 2>),
    Slice(OpNode<ops::slice::Slice, 1>),
    Softmax(OpNode<ops::softmax::Softmax, 1>),
    Unary(OpNode<ops::unary::Unary, 1>),
}

impl Node {
    /// The operation's name in profiles.
    pub(crate) fn name(&self) -> &'static str {
        let (node, variant) = self.recorded();
        node.name().unwrap_or(variant)
    }

    /// The first parameter it uses.
    pub(crate) fn param(&self) -> Option<ParamId> {
        let mut first = None;
        self.visit(&mut |v| {
            if let Visit::Param(p) = v {
                first = first.or(Some(p));
            }
        });
        first
    }

    /// The slot it fills.
    pub(crate) fn output(&self) -> Option<SlotId> {
        let mut out = None;
        self.visit(&mut |v| {
            if let Visit::Output(s) = v {
                out = Some(s);
            }
        });
        out
    }

    /// Whether it writes an infinity that the user gave.
    pub(super) fn fills_infinity(&self) -> bool {
        matches!(self, Node::MaskedFill(n) if n.op.fills_infinity())
    }

    pub(crate) fn visit(&self, f: &mut dyn FnMut(Visit)) {
        self.recorded().0.visit(f);
    }

    pub(crate) fn backward(&self, ctx: &mut BackwardContext<'_>, dy: Buf) -> Result<()> {
        self.recorded().0.backward(ctx, dy)
    }

    pub(crate) fn can_recompute(&self) -> bool {
        self.recorded().0.can_recompute()
    }

    pub(crate) fn recompute(&self, c: &mut Compute<'_>) -> Result<Buf> {
        self.recorded().0.recompute(c)
    }
}
