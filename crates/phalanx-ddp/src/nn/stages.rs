//! Manual model parallelism: layers on several ranks, with autograd through
//! what travels between them.
//!
//! A rank [sends](send_activation) what its last layer made, and the next one [receives](receive_activation)
//! it as an input of its own step. In backward the gradient goes the other way:
//!
//! ```no_run
//! # use phalanx_ddp::{receive_activation, send_activation};
//! # fn f(group: &phalanx_comm::ProcessGroup, step: &phalanx_nn::Step<'_>, x: phalanx_nn::Tensor<'_>, grads: &mut phalanx_nn::Grads) -> Result<(), Box<dyn std::error::Error>> {
//! if group.rank() == 0 {
//!     let sent = send_activation(group, x, 1)?;   // forward of rank 0's layers before
//!     sent.backward(grads)?;                      // waits for rank 1's gradient
//! } else {
//!     let (x, received) = receive_activation(group, step, &[64, 128], 0)?;
//!     let loss = x.relu()?.sum(&[0, 1], false)?; // forward of rank 1's layers
//!     loss.backward(grads)?;
//!     received.send_gradient()?;
//! }
//! # Ok(()) }
//! ```
//!
//! Only one rank computes at a time unless a batch is cut into several; this
//! is for models that do not fit one rank, not for speed.

use phalanx_comm::ProcessGroup;
use phalanx_nn::{GradSink, Step, Tensor};

use crate::error::{Error, Result};

/// What a later rank goes on with; made by [`send_activation`].
#[must_use = "without its backward the layers before get no gradients, and the other rank waits"]
pub struct Sent<'s> {
    group: ProcessGroup,
    tensor: Tensor<'s>,
    to: usize,
}

/// What came from an earlier rank; made by [`receive_activation`].
#[must_use = "without the gradient the other rank waits"]
pub struct Received<'s> {
    group: ProcessGroup,
    tensor: Tensor<'s>,
    from: usize,
}

/// Sends the values of `tensor`, of any shape, to rank `to`, which receives them with
/// [`receive_activation`].
///
/// *Blocks* until `to` has them, under the group's operation deadline.
///
/// # Errors
///
/// `Comm` when `to` is lost, late or this rank itself.
pub fn send_activation<'s>(
    group: &ProcessGroup,
    tensor: Tensor<'s>,
    to: usize,
) -> Result<Sent<'s>> {
    group
        .send(tensor.data(), to)
        .map_err(|e| Error::comm_while(format!("rank {to} got no activations"), e))?;
    Ok(Sent {
        group: group.clone(),
        tensor,
        to,
    })
}

/// Receives values of `shape` from rank `from` as an input of `step` whose
/// gradient goes back there.
///
/// *Blocks* until `from` sends them, under the group's operation deadline.
///
/// # Errors
///
/// `Comm` when `from` is lost or late, or sends another number of values;
/// `Usage` for a shape that there cannot be.
pub fn receive_activation<'s>(
    group: &ProcessGroup,
    step: &'s Step<'_>,
    shape: &[usize],
    from: usize,
) -> Result<(Tensor<'s>, Received<'s>)> {
    let usage = |e: phalanx_nn::Error| Error::usage(e.to_string());
    let mut values = Vec::new();
    let len = shape.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim));
    let Some(len) = len.filter(|len| values.try_reserve_exact(*len).is_ok()) else {
        return Err(Error::usage(format!(
            "there is no memory for activations of shape {shape:?}"
        )));
    };
    values.resize(len, 0.0);
    group
        .recv(&mut values, from)
        .map_err(|e| Error::comm_while(format!("no activations came from rank {from}"), e))?;
    let tensor = step.variable(&values, shape).map_err(usage)?;
    let received = Received {
        group: group.clone(),
        tensor: tensor.share(),
        from,
    };
    Ok((tensor, received))
}

impl Sent<'_> {
    /// Waits for the gradient of what was sent, and runs backward from it.
    ///
    /// *Blocks* until the other rank calls [`Received::send_gradient`], under
    /// the group's operation deadline.
    ///
    /// # Errors
    ///
    /// `Comm` when it is lost or late; `Usage` naming what stopped backward.
    pub fn backward(self, sink: &mut dyn GradSink) -> Result<()> {
        let mut gradient = vec![0.0; self.tensor.data().len()];
        self.group.recv(&mut gradient, self.to).map_err(|e| {
            Error::comm_while(
                format!("no gradient of the activations came from rank {}", self.to),
                e,
            )
        })?;
        self.tensor
            .backward_with(&gradient, sink)
            .map_err(|e| Error::usage(format!("backward failed: {e}")))
    }
}

impl Received<'_> {
    /// Sends the gradient back, once this rank's backward has run; zeros, if
    /// its loss does not depend on what came.
    ///
    /// *Blocks* until the other rank has it, under the group's operation deadline.
    ///
    /// # Errors
    ///
    /// `Comm` when it is lost or late.
    pub fn send_gradient(self) -> Result<()> {
        let len = self.tensor.data().len();
        let gradient = self.tensor.grad().unwrap_or_else(|| vec![0.0; len]);
        self.group.send(&gradient, self.from).map_err(|e| {
            Error::comm_while(
                format!("rank {} got no gradient of its activations", self.from),
                e,
            )
        })
    }
}
