//! What `phalanx.torch` calls: process groups on the memory of tensors.

mod group;
mod member;
mod pending;
mod store;

use phalanx_base::process::ProcessName;
use phalanx_wire::Token;
use pyo3::PyErrArguments;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// The error that users of `torch.distributed` expect, with the message of `error`.
fn raised(error: &phalanx_comm::Error) -> PyErr {
    if let Some(ranks) = lost(error) {
        return raise_as("phalanx.torch", "RankLostError", (error.to_string(), ranks));
    }
    match error.kind() {
        // Where users of PyTorch set the limit.
        phalanx_comm::ErrorKind::Timeout => raise(format!(
            "{error} (the timeout of init_process_group or new_group)"
        )),
        _ if error
            .message()
            .contains("ranks are in different operations") =>
        {
            raise(format!("{error}. {DESYNC}"))
        }
        _ => raise(error.to_string()),
    }
}

/// What PyTorch programs that are right otherwise have to change.
const DESYNC: &str = "If a DDP hook such as PowerSGD's communicates, set a larger bucket_cap_mb, so that there is one bucket. If a \
    thread such as async_save's communicates beside the training, give it process_group=torch.distributed.new_group().";

/// The ranks whose loss `error` reports; none of them where it is not known which. A program that ends with an exception
/// is lost too, for which `phalanx.torch` aborts the group in these words.
fn lost(error: &phalanx_comm::Error) -> Option<Vec<usize>> {
    let ended = || match error.message().contains(": the program ended with ") {
        true => error.origin_rank(),
        false => None,
    };
    // A program's error may name other ranks.
    match ended().or_else(|| error.lost_rank()) {
        None if error.kind() != phalanx_comm::ErrorKind::PeerLost => None,
        rank => Some(rank.into_iter().collect()),
    }
}

/// A `torch.distributed.DistBackendError`.
fn raise(message: String) -> PyErr {
    raise_as("torch.distributed", "DistBackendError", (message,))
}

fn raise_as(module: &str, class: &str, args: impl PyErrArguments + 'static) -> PyErr {
    Python::attach(|py| {
        let class = py.import(module).and_then(|module| module.getattr(class));
        match class.and_then(|class| Ok(class.cast_into::<PyType>()?)) {
            Ok(class) => PyErr::from_type(class, args),
            Err(_) => PyException::new_err(args),
        }
    })
}

/// Names this process to those that form a group with it: a word that no other process has, and the process, so that others
/// see whether it has died.
#[pyfunction]
fn new_handle() -> PyResult<String> {
    let word = Token::generate().map_err(|error| raise(error.to_string()))?;
    let process = serde_json::to_string(&ProcessName::own());
    let process = process.map_err(|error| raise(error.to_string()))?;
    Ok(format!("{} {process}", word.to_hex()))
}

/// The process of such a handle.
fn process_of(handle: &str) -> Option<ProcessName> {
    serde_json::from_str(handle.split_once(' ')?.1).ok()
}

/// The compiled part of the package `phalanx`.
#[pymodule]
mod _phalanx {
    #[pymodule_export]
    use super::group::Group;
    #[pymodule_export]
    use super::member::{JobError, Member};
    #[pymodule_export]
    use super::new_handle;
    #[pymodule_export]
    use super::pending::Pending;
}
