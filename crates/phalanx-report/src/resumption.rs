/// Where a resumed attempt continues, as its `start` says. What was logged from there on is logged again.
#[derive(Clone, Copy, Debug)]
pub struct Resumption {
    /// The step that comes next.
    pub step: f64,
    /// Its epoch, from 1; files of older versions do not have it.
    pub epoch: Option<f64>,
}

impl Resumption {
    /// Whether an image, table, text or number of a program stays that was logged at `step` of `epoch`.
    pub fn keeps(self, step: f64, epoch: Option<f64>) -> bool {
        match (epoch, self.epoch) {
            (Some(epoch), Some(next)) if epoch != next => epoch < next,
            (Some(_), Some(_)) => step < self.step,
            // Older versions counted the steps taken.
            _ => step <= self.step,
        }
    }
}
