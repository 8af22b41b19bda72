//! What `phalanx.torch` calls: process groups on the memory of tensors.

mod group;
mod member;
mod pending;
mod store;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The error that users of `torch.distributed` expect, with the message of `error`.
fn raised(error: &phalanx_comm::Error) -> PyErr {
    match error.kind() {
        // Where users of PyTorch set the limit.
        phalanx_comm::ErrorKind::Timeout => raise(format!(
            "{error} (the timeout of init_process_group or new_group)"
        )),
        _ => raise(error.to_string()),
    }
}

/// A `torch.distributed.DistBackendError`.
fn raise(message: String) -> PyErr {
    static TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    Python::attach(
        |py| match TYPE.import(py, "torch.distributed", "DistBackendError") {
            Ok(class) => PyErr::from_type(class.clone(), message),
            Err(_) => PyException::new_err(message),
        },
    )
}

/// The compiled part of the package `phalanx`.
#[pymodule]
mod _phalanx {
    #[pymodule_export]
    use super::group::Group;
    #[pymodule_export]
    use super::member::{JobError, Member};
    #[pymodule_export]
    use super::pending::Pending;
}
