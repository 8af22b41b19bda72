//! Rows of all ranks within a model, with gradients.

use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_nn::{CustomOp, Step, Tensor};

use crate::error::{Result, refuse};
use crate::split::BatchSplit;

/// The ranks that take a micro-batch at the same time.
pub struct Peers {
    group: ProcessGroup,
    /// Samples of each rank; in a step that is cut into shards of its own, none.
    sizes: Vec<usize>,
}

impl Peers {
    /// Those of this rank's micro-batch number `index` in a step of `samples` over all ranks.
    pub fn new(group: &ProcessGroup, split: &BatchSplit, index: usize, samples: usize) -> Peers {
        let (parts, world) = (split.parts(), split.world());
        let size =
            |rank| (samples + parts - 1).saturating_sub(rank * (parts / world) + index) / parts;
        let sizes = match split.tree() {
            None => (0..world).map(size).collect(),
            Some(_) => Vec::new(),
        };
        Peers {
            group: group.clone(),
            sizes,
        }
    }

    /// The rows of all ranks, and where those of this one, of which there are `rows`, are among them.
    pub fn all_gather<'s>(
        &self,
        step: &'s Step<'s>,
        x: Tensor<'s>,
        rows: usize,
    ) -> Result<(Tensor<'s>, Vec<u32>)> {
        let mut shape = x.shape();
        if self.sizes.is_empty() {
            refuse!(
                "all_gather does not work with --deterministic shards, where each shard is computed alone"
            );
        }
        let (sizes, rank) = (&self.sizes, self.group.rank());
        if let Some(idle) = sizes.iter().position(|size| *size == 0) {
            refuse!(
                "all_gather: rank {idle} has no sample in this step\n  --drop-last leaves out a last batch that is short"
            );
        }
        if shape.first() != Some(&rows) {
            refuse!(
                "all_gather: a tensor of shape {shape:?} for {rows} samples; the first size is that of the micro-batch"
            );
        }
        shape[0] = sizes.iter().sum();
        let own = (0..rows).map(|row| (row * sizes.len() + rank) as u32);
        let op = Gather {
            wide: shape[1..].iter().product(),
            sizes: sizes.clone(),
            group: self.group.clone(),
        };
        let all = step.custom(Box::new(op), vec![x], &shape)?;
        Ok((all, own.collect()))
    }
}

/// Rows of `wide` numbers.
struct Gather {
    group: ProcessGroup,
    sizes: Vec<usize>,
    wide: usize,
}

impl Gather {
    /// Elements of each rank.
    fn lengths(&self) -> Vec<usize> {
        self.sizes.iter().map(|size| size * self.wide).collect()
    }

    /// Calls `each` with the rank of each row, its place among the rows by rank, and its place in the global batch.
    fn rows(&self, mut each: impl FnMut(usize, usize, usize)) {
        let mut at = 0;
        for (rank, size) in self.sizes.iter().enumerate() {
            for row in 0..*size {
                each(
                    rank,
                    at * self.wide,
                    (row * self.sizes.len() + rank) * self.wide,
                );
                at += 1;
            }
        }
    }
}

impl CustomOp for Gather {
    fn forward(&self, inputs: &[&[f32]], output: &mut [f32]) -> Result<()> {
        let mut by_rank = vec![0.0; output.len()];
        self.group
            .all_gather_v(inputs[0], &self.lengths(), &mut by_rank)?;
        self.rows(|_, from, to| {
            output[to..to + self.wide].copy_from_slice(&by_rank[from..from + self.wide]);
        });
        Ok(())
    }

    fn backward(
        &self,
        _: &[&[f32]],
        _: &[f32],
        d_output: &[f32],
        d_inputs: &mut [&mut [f32]],
    ) -> Result<()> {
        // Each rank's loss is a mean over its own samples, and counts by their number.
        let mine = self.sizes[self.group.rank()] as f32;
        let mut by_rank = vec![0.0; d_output.len()];
        self.rows(|rank, to, from| {
            let share = mine / self.sizes[rank] as f32;
            let from = &d_output[from..from + self.wide];
            let to = &mut by_rank[to..to + self.wide];
            to.iter_mut().zip(from).for_each(|(to, d)| *to = d * share);
        });
        let lengths = self.lengths();
        (self.group).reduce_scatter_v(&by_rank, &lengths, d_inputs[0], ReduceOp::Sum)?;
        Ok(())
    }

    fn name(&self) -> &'static str {
        "AllGather"
    }

    fn saves_inputs(&self) -> bool {
        false
    }

    fn saves_output(&self) -> bool {
        false
    }
}
