//! A maximum over dimensions that ranks divide.

use phalanx_comm::ReduceOp;
use phalanx_nn::CustomOp;

use crate::error::Error;
use crate::placement::Placement;
use crate::sbp::Fold;

/// The largest element over axes that are split: each rank's own, then over the ranks. Equal largest elements
/// share the gradient, on whatever ranks they are.
pub(super) struct MaxOver {
    pub(super) placement: Placement,
    /// The mesh dimensions that split the axes.
    pub(super) mesh_dims: Vec<usize>,
    /// Of the part, and which axes are reduced.
    pub(super) shape: Vec<usize>,
    pub(super) over: Vec<bool>,
}

impl MaxOver {
    /// Calls `f` with the place of each element and that of its result.
    fn each(&self, mut f: impl FnMut(usize, usize)) {
        let numel: usize = self.shape.iter().product();
        for at in 0..numel {
            let (mut rest, mut place, mut step) = (at, 0, 1);
            for (n, over) in self.shape.iter().zip(&self.over).rev() {
                if !over {
                    place += rest % n * step;
                    step *= n;
                }
                rest /= n;
            }
            f(at, place);
        }
    }

    fn over_ranks(&self, values: &mut [f32], op: ReduceOp) -> phalanx_base::Result<()> {
        for dim in self.mesh_dims.iter().rev() {
            let group = self.placement.line(*dim);
            group
                .all_reduce(values, op)
                .map_err(|e| Error::comm_while("a maximum over ranks is needed", e))?;
        }
        Ok(())
    }
}

fn is_hit(x: f32, most: f32) -> bool {
    x == most || x.is_nan()
}

impl CustomOp for MaxOver {
    fn forward(&self, inputs: &[&[f32]], output: &mut [f32]) -> phalanx_base::Result<()> {
        output.fill(Fold::Max.identity());
        self.each(|at, to| {
            let x = inputs[0][at];
            if x > output[to] || x.is_nan() {
                output[to] = x;
            }
        });
        self.over_ranks(output, ReduceOp::Max)
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        output: &[f32],
        d_output: &[f32],
        d_inputs: &mut [&mut [f32]],
    ) -> phalanx_base::Result<()> {
        // The whole gradient, and the number of elements that share it.
        let mut sums = d_output.to_vec();
        sums.resize(2 * output.len(), 0.0);
        let (_, counts) = sums.split_at_mut(output.len());
        self.each(|at, to| {
            if is_hit(inputs[0][at], output[to]) {
                counts[to] += 1.0;
            }
        });
        self.over_ranks(&mut sums, ReduceOp::Sum)?;
        let (d, counts) = sums.split_at(output.len());
        self.each(|at, to| {
            let share = match (output[to].is_nan(), is_hit(inputs[0][at], output[to])) {
                (true, _) => f32::NAN,
                (_, true) => d[to] / counts[to],
                _ => 0.0,
            };
            d_inputs[0][at] = share;
        });
        Ok(())
    }

    fn name(&self) -> &'static str {
        "MaxOverRanks"
    }
}
