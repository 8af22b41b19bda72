//! Values of candle's tensors in host memory.

use candle_core::{DType, Device, Tensor, Var};
use phalanx_ddp::HostTensor;

use crate::error::{Error, Result};

/// The types whose values are exact in f32, in which gradients are averaged.
const AVERAGED: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Refuses a variable whose values f32 cannot hold.
pub(crate) fn check_dtype(name: &str, var: &Var) -> Result<()> {
    match AVERAGED.contains(&var.dtype()) {
        true => Ok(()),
        false => Err(Error::usage(format!(
            "the variable {name} is {}; only f32, f16 and bf16 can be averaged over ranks, in f32: keep it outside the VarMap, \
             or use one of these types",
            var.dtype().as_str()
        ))),
    }
}

/// Writes the values of `tensor`, row by row, to `out`, which has as many.
pub(crate) fn read(tensor: &Tensor, out: &mut [f32]) -> candle_core::Result<()> {
    let tensor = tensor
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F32)?
        .contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let candle_core::Storage::Cpu(storage) = &*storage else {
        candle_core::bail!("a tensor was moved to the CPU and is not there")
    };
    let values = storage.as_slice::<f32>()?;
    let values = values.get(layout.start_offset()..).unwrap_or_default();
    match values.get(..out.len()) {
        Some(values) => out.copy_from_slice(values),
        None => candle_core::bail!("a tensor has {} values, not {}", values.len(), out.len()),
    }
    Ok(())
}

/// The values of a variable.
pub(crate) fn host(name: &str, var: &Var) -> Result<HostTensor> {
    let mut values = vec![0.0; var.elem_count()];
    read(var, &mut values)?;
    Ok(HostTensor {
        name: name.to_owned(),
        shape: var.dims().to_vec(),
        values,
    })
}

/// A tensor of `values` with shape, type and device of `like`.
pub(crate) fn tensor(values: Vec<f32>, like: &Tensor) -> candle_core::Result<Tensor> {
    Tensor::from_vec(values, like.shape(), &Device::Cpu)?
        .to_dtype(like.dtype())?
        .to_device(like.device())
}
