//! The engine's parameters as [`Parameters`].

use phalanx_nn::{ParamInfo, Params};

use crate::error::Result;
use crate::parameters::Parameters;

fn info(params: &Params, index: usize) -> &ParamInfo {
    match index.checked_sub(params.len()) {
        None => &params.infos()[index],
        Some(buffer) => &params.buffer_infos()[buffer],
    }
}

/// Values are in the engine's memory order.
impl Parameters for Params {
    fn tensors(&self) -> usize {
        self.len() + self.buffer_infos().len()
    }

    fn is_buffer(&self, index: usize) -> bool {
        index >= self.len()
    }

    fn name(&self, index: usize) -> &str {
        &info(self, index).name
    }

    fn shape(&self, index: usize) -> &[usize] {
        &info(self, index).shape
    }

    fn values(&self, index: usize) -> &[f32] {
        let flat = match self.is_buffer(index) {
            true => self.buffers_flat(),
            false => self.flat(),
        };
        &flat[info(self, index).range()]
    }

    fn values_mut(&mut self, index: usize) -> &mut [f32] {
        let place = info(self, index).range();
        let flat = match self.is_buffer(index) {
            true => self.buffers_flat_mut(),
            false => self.flat_mut(),
        };
        &mut flat[place]
    }

    fn try_for_each_mut(&mut self, f: &mut dyn FnMut(&mut [f32]) -> Result<()>) -> Result<()> {
        f(self.flat_mut())?;
        f(self.buffers_flat_mut())
    }
}
