//! Recurrent layers over sequences (N, T, C), made of operations.

use super::Act;
use crate::param::{Init, Layout, ParamId, Scope};
use crate::{Error, Result, Value, refuse};

/// Options of [`Lstm`] and [`Gru`], PyTorch's.
#[derive(Clone, Copy, Debug)]
pub struct RnnOptions {
    /// Layers, each over the outputs of the one before.
    pub layers: usize,
    /// Whether each layer also reads the sequence from its end: outputs are then twice as wide.
    pub bidirectional: bool,
    /// Dropout of what goes from a layer to the next.
    pub dropout: f64,
}

impl Default for RnnOptions {
    /// One layer, forward.
    fn default() -> Self {
        RnnOptions {
            layers: 1,
            bidirectional: false,
            dropout: 0.0,
        }
    }
}

/// What recurrent layers keep of a sequence, (N, hidden) for each layer, of two directions the forward one first.
#[derive(Clone, Debug)]
pub struct RnnState<V> {
    /// The last outputs.
    pub hidden: Vec<V>,
    /// The cells; none in a [`Gru`].
    pub cell: Vec<V>,
}

/// Long short-term memory with PyTorch's `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0`, …, their initial values, and
/// its gates in the order input, forget, cell, output.
#[derive(Clone, Debug)]
pub struct Lstm(Recurrent);

/// Gated recurrent units with PyTorch's parameters and initial values; gates are in the order reset, update, new.
#[derive(Clone, Debug)]
pub struct Gru(Recurrent);

#[derive(Clone, Debug)]
struct Recurrent {
    gates: usize,
    width: usize,
    /// Weight and bias of each layer's directions: for the input, and for the output before.
    layers: Vec<Vec<[(ParamId, ParamId); 2]>>,
    dropout: f64,
}

macro_rules! recurrent {
    ($name:ident, $gates:literal) => {
        impl $name {
            /// One layer, from `inputs` to `hidden` numbers.
            pub fn new(scope: Scope, inputs: usize, hidden: usize) -> Self {
                Self::with(scope, inputs, hidden, RnnOptions::default())
            }

            /// With options.
            pub fn with(scope: Scope, inputs: usize, hidden: usize, options: RnnOptions) -> Self {
                $name(Recurrent::new(scope, $gates, inputs, hidden, options))
            }

            /// The outputs (N, T, hidden) of the last layer for sequences (N, T, inputs), PyTorch's `batch_first`, and what the
            /// layers keep. They begin with `state`, or with zeros.
            ///
            /// # Errors
            /// `Usage` when the shapes do not fit.
            pub fn forward<'s, V: Value<'s>>(
                &self,
                x: V,
                state: Option<&RnnState<V>>,
            ) -> Result<(V, RnnState<V>)> {
                self.0.forward(x, state)
            }
        }
    };
}

recurrent!(Lstm, 4);
recurrent!(Gru, 3);

impl Recurrent {
    fn new(
        mut scope: Scope,
        gates: usize,
        inputs: usize,
        width: usize,
        options: RnnOptions,
    ) -> Self {
        let directions = &["", "_reverse"][..1 + usize::from(options.bidirectional)];
        let mut linears = |from: usize, depth: usize, direction: &str| {
            let init = Init::FanInUniform { fan_in: width };
            let mut param = |name: &str, shape: &[usize]| {
                let name = format!("{name}_l{depth}{direction}");
                scope.param(&name, shape, Layout::Same, init)
            };
            let weights = [from, width].map(|from| [gates * width, from]);
            let weights = [("weight_ih", weights[0]), ("weight_hh", weights[1])];
            let weights = weights.map(|(name, shape)| param(name, &shape));
            let biases = ["bias_ih", "bias_hh"].map(|name| param(name, &[gates * width]));
            [0, 1].map(|i| (weights[i], biases[i]))
        };
        let layer = |depth| {
            let from = match depth {
                0 => inputs,
                _ => width * directions.len(),
            };
            let directions = directions.iter();
            directions.map(|side| linears(from, depth, side)).collect()
        };
        Recurrent {
            gates,
            width,
            layers: (0..options.layers).map(layer).collect(),
            dropout: options.dropout,
        }
    }

    fn forward<'s, V: Value<'s>>(
        &self,
        mut x: V,
        start: Option<&RnnState<V>>,
    ) -> Result<(V, RnnState<V>)> {
        let shape = x.shape();
        let (n, length) = match *shape {
            [n, length, _] if length > 0 => (n, length),
            _ => {
                refuse!("a recurrent layer needs sequences (N, T, C), got shape {shape:?}");
            }
        };
        let (mut hidden, mut cell) = (Vec::new(), Vec::new());
        for (depth, directions) in self.layers.iter().enumerate() {
            if depth > 0 && self.dropout > 0.0 {
                x = x.dropout(self.dropout)?;
            }
            let mut sides = Vec::with_capacity(directions.len());
            for (side, [input, recurrent]) in directions.iter().enumerate() {
                let given = x.share().linear(input.0, Some(input.1), Act::None)?;
                let place = hidden.len();
                let first = |of: fn(&RnnState<V>) -> &Vec<V>| match start {
                    Some(state) => (of(state).get(place).map(V::share))
                        .ok_or_else(|| Error::usage(format!("the state has no layer {place}"))),
                    None => x.constant(&vec![0.0; n * self.width], &[n, self.width]),
                };
                let mut h = first(|state| &state.hidden)?;
                let mut c = match self.gates {
                    4 => Some(first(|state| &state.cell)?),
                    _ => None,
                };
                let mut outputs = Vec::with_capacity(length);
                for i in 0..length {
                    let at = if side == 1 { length - 1 - i } else { i };
                    let given = given.share().slice(1, at..at + 1)?;
                    let given = given.reshape(&[n, self.gates * self.width])?;
                    let from = h
                        .share()
                        .linear(recurrent.0, Some(recurrent.1), Act::None)?;
                    h = match &mut c {
                        Some(c) => lstm(given.add(from)?, c)?,
                        None => gru(given, from, h)?,
                    };
                    outputs.push(h.share());
                }
                if side == 1 {
                    outputs.reverse();
                }
                sides.push(V::stack(outputs, 1)?);
                hidden.push(h);
                cell.extend(c);
            }
            x = V::concat(sides, 2)?;
        }
        Ok((x, RnnState { hidden, cell }))
    }
}

/// S. Hochreiter and J. Schmidhuber, Long Short-Term Memory, 1997, with forget gates.
fn lstm<'s, V: Value<'s>>(gates: V, cell: &mut V) -> Result<V> {
    let mut gates = gates.chunk(4, 1)?.into_iter();
    let mut next = || {
        gates
            .next()
            .ok_or_else(|| Error::internal("a gate is gone"))
    };
    let (input, forget) = (next()?.sigmoid()?, next()?.sigmoid()?);
    let (new, output) = (next()?.tanh()?, next()?.sigmoid()?);
    *cell = forget.mul(cell.share())?.add(input.mul(new)?)?;
    output.mul(cell.share().tanh()?)
}

/// K. Cho and others, Learning Phrase Representations using RNN Encoder-Decoder, 2014, as cuDNN and PyTorch have it: the reset gate
/// acts after the product.
fn gru<'s, V: Value<'s>>(given: V, from: V, before: V) -> Result<V> {
    let mut pairs = given.chunk(3, 1)?.into_iter().zip(from.chunk(3, 1)?);
    let mut next = || {
        pairs
            .next()
            .ok_or_else(|| Error::internal("a gate is gone"))
    };
    let (a, b) = next()?;
    let reset = a.add(b)?.sigmoid()?;
    let (a, b) = next()?;
    let update = a.add(b)?.sigmoid()?;
    let (a, b) = next()?;
    let new = a.add(reset.mul(b)?)?.tanh()?;
    before.sub(new.share())?.mul(update)?.add(new)
}
