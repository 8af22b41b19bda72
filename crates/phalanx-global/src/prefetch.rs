//! Gathers of sharded parameters that begin before their use.
//!
//! The gathers of a step, forward and again in backward, have the same order in each step: that of the step before
//! is followed. When one has been used, or a gradient is final, the next one begins in the background, at the same time as what
//! is computed until then. All ranks know the same order, so they begin the same ones.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use phalanx_comm::{Bucket, Call, Work};

use crate::boxing::Boxing;
use crate::error::{Error, Result};
use crate::params::GlobalParams;
use crate::placement::Placement;

#[derive(Clone, Default)]
pub(crate) struct Prefetch(Arc<Mutex<Order>>);

#[derive(Default)]
struct Order {
    is_on: bool,
    is_training: bool,
    /// Gathers that began before their use.
    begun: u64,
    /// Gathers of the step before, and how each is done.
    before: Vec<Gather>,
    /// Those of this step so far.
    now: Vec<Gather>,
    pending: Option<(usize, Pending)>,
}

type Pending = Work<(Bucket<f32>, Bucket<f32>)>;

/// A parameter, and its boxing to where it is used.
#[derive(Clone)]
struct Gather {
    param: usize,
    boxing: Arc<Boxing>,
}

impl Prefetch {
    fn order(&self) -> MutexGuard<'_, Order> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, on: bool) {
        self.order().is_on = on;
    }

    pub(crate) fn begun(&self) -> u64 {
        self.order().begun
    }

    /// A step begins; evaluations neither follow an order nor leave one.
    pub(crate) fn begin(&self, training: bool) {
        let mut order = self.order();
        order.is_training = training;
        if training {
            order.before = std::mem::take(&mut order.now);
        }
        // Of a step that ended early: its values may have changed.
        if let Some((_, work)) = order.pending.take() {
            let _ = work.wait();
        }
    }

    /// The values that parameter `param` is gathered to, of which `part` is this rank's.
    pub(crate) fn take(
        &self,
        param: usize,
        boxing: &Arc<Boxing>,
        placement: &Placement,
        part: &[f32],
        to: &mut [f32],
    ) -> Result<()> {
        let pending = {
            let mut order = self.order();
            if order.is_training {
                order.now.push(Gather {
                    param,
                    boxing: Arc::clone(boxing),
                });
            }
            order.pending.take()
        };
        match pending {
            Some((of, work)) => {
                let (_, all) = work.wait().map_err(|e| {
                    Error::comm_while("a sharded parameter could not be gathered", e)
                })?;
                match of == param {
                    true => boxing.place_gathered(placement, &all, to),
                    // The order has changed, on all ranks.
                    false => boxing.run_into(placement, part, to)?,
                }
                Ok(())
            }
            None => boxing.run_into(placement, part, to),
        }
    }

    /// Begins the gather that came after the last one in the step before.
    pub(crate) fn begin_next(&self, params: &GlobalParams) {
        let mut order = self.order();
        let at = order.now.len();
        let follows = at > 0
            && order.is_on
            && order.is_training
            && order.pending.is_none()
            && order.before.get(at - 1).map(|g| g.param) == order.now.last().map(|g| g.param);
        let Some(next) = order.before.get(at).filter(|_| follows).cloned() else {
            return;
        };
        let placement = params.placement();
        let Some(dim) = next.boxing.one_gather(placement) else {
            return;
        };
        let group = placement.line(dim);
        let Some(id) = params.local().ids().nth(next.param) else {
            return;
        };
        let part = Bucket::from_slice(params.local().get(id));
        let all = group.bucket(part.len() * group.world_size());
        let work = group.all_gather_async(part, all, Call::default());
        order.pending = Some((next.param, work));
        order.begun += 1;
    }
}
