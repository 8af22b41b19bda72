//! Collectives on parts of one slice, for optimizers that are sharded over the ranks (ZeRO: Rajbhandari et al.,
//! 2020): gradients are reduced to the rank that updates them, and the updated parameters are gathered in place.

use super::buffer::after;
use super::{Call, ProcessGroup, lengths_hash};
use crate::group::collectives::run_on;
use crate::operation::{Buffers, Operation};
use crate::plan::{Method, Uneven};
use crate::{Bucket, Element, ReduceOp, Result};

impl ProcessGroup {
    /// [`all_gather`](ProcessGroup::all_gather) in place: rank `r` gives the `part` elements of `data` from
    /// `r · part` on, and gets those of all others. Parts that reach beyond the end of `data` are truncated.
    /// `part` and the length of `data` must be the same everywhere.
    ///
    /// *Cost:* 1 round, `(P − 1)` times its own part sent per rank; in shared memory each rank copies the parts of
    /// the others, once if the system lets ranks read each other's memory.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` when parts do not cover `data`. After an error the
    /// contents of `data` are undefined.
    pub fn all_gather_in_place<T: Element>(&self, data: &mut [T], part: usize) -> Result<()> {
        const NAME: &str = "all_gather_in_place";
        let (rank, world, len) = (self.core.rank, self.core.world, data.len());
        let covered = part.checked_mul(world).filter(|all| *all >= len);
        let Some(all) = covered else {
            let why = format!("{world} parts of {part} elements do not cover {len}");
            return Err(self.usage(NAME, why));
        };
        if world == 1 {
            return Ok(());
        }
        let tail_padding = all - len;
        let length = |r: usize| (len.min((r + 1) * part)).saturating_sub(r * part);
        let mut operation = self.build_all_gather::<T>(part, all, &Call::default())?;
        if tail_padding > 0 {
            operation = Operation {
                tail_padding,
                lengths: lengths_hash([part, len].into_iter()),
                ..operation
            };
        }
        self.core.queue.run(|runner| {
            if runner.is_in_memory(&operation) {
                let output = data.as_mut_ptr();
                let buffers = Buffers {
                    input: output.wrapping_add(rank * part).cast_const().cast(),
                    output: output.cast(),
                    exposed: false,
                };
                // SAFETY: `data` is borrowed exclusively until this returns. An all-gather in shared memory reads this
                // rank's part of it, shortened by `tail_padding`, and writes the others'; it copies no part onto itself.
                return unsafe { runner.run(&operation, buffers, None) };
            }
            let own: Vec<T> = data[(rank * part).min(len)..][..length(rank)].to_vec();
            if tail_padding == 0 {
                return run_on(runner, &operation, &own, data);
            }
            let lengths: Vec<usize> = (0..world).map(length).collect();
            let kind = Uneven::AllGather { lengths: &lengths };
            let planned =
                self.build_uneven::<T>(Method::AllGather, &lengths, len, kind, &Call::default());
            run_on(runner, &planned, &own, data)
        })
    }

    /// [`reduce_scatter`](ProcessGroup::reduce_scatter) that shows `visit` this rank's part of the reduction, in
    /// one or several pieces, first to last, each with the place of its first element in the part. Where all
    /// ranks' inputs are registered a piece is shown while it is still in the processor's cache.
    /// Changes that `visit` makes to a piece are lost. `room` is as long as the part; its contents are
    /// undefined afterwards.
    ///
    /// *Blocks* in this thread, `visit` included: the other ranks wait for it.
    ///
    /// *Order:* canonical, see [`ReduceOp`]: the bits of a reduce-scatter.
    ///
    /// # Errors
    ///
    /// As [`reduce_scatter`](ProcessGroup::reduce_scatter). Some pieces may have been shown
    /// before an error.
    pub fn reduce_scatter_visited<T: Element>(
        &self,
        input: &mut Bucket<T>,
        room: &mut [T],
        op: ReduceOp,
        call: &Call,
        visit: &mut dyn FnMut(usize, &mut [T]),
    ) -> Result<()> {
        let operation = self.build_reduce_scatter::<T>(input.len(), room.len(), op, call)?;
        let (len, all) = (input.len(), room.len());
        let start = room.as_mut_ptr();
        // Taken, so that no other code can access it meanwhile, even after a panic.
        let held = std::mem::take(input);
        let buffers = Buffers {
            input: held.as_ptr().cast(),
            output: start.cast(),
            exposed: true,
        };
        let mut shown = 0;
        let mut each = |first: usize, elems: usize| {
            shown += elems;
            // SAFETY: `room` is ours until the end, begins with that many elements, and no other
            // reference into it exists.
            visit(first, unsafe {
                std::slice::from_raw_parts_mut(start, elems)
            });
        };
        let result = self.core.queue.run(|runner| {
            // SAFETY: the input belongs to a bucket that is held here and not accessed until this returns;
            // `room` is borrowed exclusively; lengths were checked. Although marked exposed, the output is
            // published to no other rank: they get the place of the input alone. After an error `after` drops
            // the bucket.
            unsafe { runner.run(&operation, buffers, Some(&mut each)) }
        });
        *input = after(&result, held, len);
        result?;
        if shown == 0 && all > 0 {
            visit(0, room);
        }
        Ok(())
    }
}
