//! This process as a rank of an elastic job of `phalanx launch`.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use phalanx_base::error::ErrorKind;
use phalanx_comm::{GroupOptions, InitOptions, ProcessGroup, ReduceOp};
use phalanx_member::{Elastic, Event, Newcomer, RankContext, RequestedChange, Requests, State};
use phalanx_store::Store as _;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::group::{Group, span};

create_exception!(
    _phalanx,
    JobError,
    PyRuntimeError,
    "A rank cannot take part in its job any more: the message, the exit code, and whether a peer was lost."
);

/// How long the other ranks wait for one that is busy on its own.
const PHASE_LIMIT: Duration = Duration::from_secs(600);

fn failed(error: phalanx_base::Error) -> PyErr {
    let is_lost = error.kind() == ErrorKind::PeerLost;
    JobError::new_err((error.chain(), error.exit_code(), is_lost))
}

fn of_store(error: phalanx_store::Error) -> PyErr {
    failed(phalanx_comm::Error::from(error).into())
}

/// A rank of an elastic job.
#[pyclass(frozen)]
pub(crate) struct Member {
    ctx: RankContext,
    requests: Mutex<Option<Requests>>,
}

#[pymethods]
impl Member {
    /// Connects to the launcher's store, and to the other ranks of the first group, of `first_world`. With a `number` this
    /// process joins the others later, with [`join`](Member::join). Operations have a deadline of `timeout` seconds.
    #[new]
    fn new(
        py: Python<'_>,
        first_world: usize,
        number: Option<usize>,
        timeout: f64,
        bind: Option<&str>,
        threads: usize,
    ) -> PyResult<Member> {
        let bind = bind.map(str::parse::<IpAddr>).transpose();
        let options = InitOptions {
            op_timeout: span(timeout),
            first_op_timeout: span(timeout),
            bind: bind.map_err(|error| PyValueError::new_err(format!("PHALANX_BIND: {error}")))?,
            compute_threads: Some(threads),
            ..InitOptions::default()
        };
        let connect = || -> phalanx_comm::Result<RankContext> {
            Ok(match number {
                Some(number) => {
                    let newcomer = Newcomer::new(number, options)?;
                    let alone = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
                    RankContext::of_newcomer(newcomer, alone, threads)
                }
                None => RankContext::new(ProcessGroup::init(options)?, threads),
            })
        };
        let mut ctx = py.detach(connect).map_err(|error| failed(error.into()))?;
        let patience = PHASE_LIMIT.min(span(timeout));
        ctx.elastic = Some(Elastic {
            first_world,
            patience,
        });
        Ok(Member {
            ctx,
            requests: Mutex::new(None),
        })
    }

    fn rank(&self) -> usize {
        self.ctx.rank()
    }

    fn world(&self) -> usize {
        self.ctx.world()
    }

    fn generation(&self) -> u32 {
        self.ctx.group().generation()
    }

    fn group(&self) -> Group {
        Group::of(self.ctx.group())
    }

    /// Whether a rank was lost since the group has formed.
    fn has_lost(&self, py: Python<'_>) -> bool {
        let failure = py.detach(|| self.ctx.group().check().err());
        failure.is_some_and(|e| phalanx_base::Error::from(e).kind() == ErrorKind::PeerLost)
    }

    /// Joins the others; false when the job has ended before.
    fn join(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.ctx.join()).map_err(failed)
    }

    /// Forms a group of the ranks that are left.
    fn shrink(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.ctx.shrink()).map_err(failed)
    }

    /// The numbers that all ranks call this with, by rank.
    fn gather(&self, py: Python<'_>, own: i64) -> PyResult<Vec<i64>> {
        let group = self.ctx.group();
        let mut all = vec![0; group.world_size()];
        let gathered = py.detach(|| group.all_gather(&[own], &mut all));
        gathered.map_err(|error| failed(error.into()))?;
        Ok(all)
    }

    /// From now on rank 0 watches for processes that ask to join, and ranks that are asked to leave.
    fn watch(&self) {
        let watches = self.ctx.rank() == 0;
        let members = || self.ctx.group().global_ranks().to_vec();
        let requests = watches.then(|| Requests::watch(self.ctx.log(), members()));
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner) = requests;
    }

    /// The job continues when ranks are lost, from now on.
    fn announce(&self, py: Python<'_>) -> PyResult<()> {
        let elastic = Event::Elastic { can_grow: true };
        let event = |state: &State| (!state.is_elastic()).then(|| elastic.clone());
        py.detach(|| self.ctx.append(event)).map_err(failed)
    }

    /// This process has the state of the others; `took_part`: it has also taken a step.
    fn announce_joined(&self, py: Python<'_>, took_part: bool) -> PyResult<()> {
        let number = self.ctx.number();
        let event = |_: &State| Some(Event::Joined { number, took_part });
        py.detach(|| self.ctx.append(event)).map_err(failed)
    }

    /// Between two steps, on all ranks: whether they continue as they are ("same"), in another group ("changed"), or this rank
    /// leaves ("left"). *Blocks* while the ranks are to wait. `say` prints why, on rank 0; `before_change` is called on all
    /// ranks before some join or leave, with whether all leave.
    fn between(
        &self,
        py: Python<'_>,
        say: &Bound<'_, PyAny>,
        before_change: &Bound<'_, PyAny>,
    ) -> PyResult<&'static str> {
        let requests = &self.requests;
        let wanted = || {
            let requests = requests.lock().unwrap_or_else(PoisonError::into_inner);
            let mut wanted = [u8::from(requests.as_ref().is_some_and(Requests::any))];
            let group = self.ctx.group();
            group.all_reduce(&mut wanted, ReduceOp::Max)?;
            Ok(wanted[0] > 0)
        };
        let wanted: phalanx_base::Result<bool> = py.detach(wanted);
        if !wanted.map_err(failed)? {
            return Ok("same");
        }
        let mut waits = false;
        loop {
            py.check_signals()?;
            let asked = py.detach(|| self.agree(waits)).map_err(failed)?;
            if !(asked.joining.is_empty() && asked.leaving.is_empty()) {
                let group = self.ctx.group();
                let leaves = |number: &usize| asked.leaving.contains(number);
                before_change.call1((group.global_ranks().iter().all(leaves),))?;
                if asked.leaving.contains(&self.ctx.number()) {
                    // The others wait for it.
                    let _ = py.detach(|| self.ctx.group().shutdown());
                    return Ok("left");
                }
                let change = || self.ctx.change(&asked.leaving);
                py.detach(change).map_err(failed)?;
                return Ok("changed");
            }
            let Some(why) = asked.hold else {
                return Ok("same");
            };
            if !std::mem::replace(&mut waits, true) && self.ctx.is_main() {
                say.call1((format!("waiting: {why}"),))?;
            }
        }
    }

    /// The store of the job.
    fn set(&self, py: Python<'_>, key: &str, value: &[u8]) -> PyResult<()> {
        py.detach(|| self.ctx.store().set(key, value))
            .map_err(of_store)
    }

    fn get<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let value = py.detach(|| self.ctx.store().try_get(key));
        let value = value.map_err(of_store)?;
        Ok(value.map(|value| PyBytes::new(py, &value)))
    }

    fn add(&self, py: Python<'_>, key: &str, delta: i64) -> PyResult<i64> {
        py.detach(|| self.ctx.store().add(key, delta))
            .map_err(of_store)
    }

    /// As PyTorch's `compare_set`: an empty `expected` also stands for a key that does not exist.
    fn compare_set<'py>(
        &self,
        py: Python<'py>,
        key: &str,
        expected: &[u8],
        desired: &[u8],
    ) -> PyResult<Bound<'py, PyBytes>> {
        let expected = Some(expected).filter(|expected| !expected.is_empty());
        let set = || self.ctx.store().compare_set(key, expected, desired);
        let value = py.detach(set).map_err(of_store)?;
        Ok(PyBytes::new(py, &value))
    }

    /// Removes all keys that begin with `prefix`.
    fn delete(&self, py: Python<'_>, prefix: &str) -> PyResult<u64> {
        py.detach(|| self.ctx.store().delete_prefix(prefix))
            .map_err(of_store)
    }

    /// Whether a rank, or the launcher, has ended the training.
    fn is_over(&self, py: Python<'_>) -> bool {
        let is_over = || self.ctx.ask(|state| state.over().is_some());
        py.detach(is_over).unwrap_or(false)
    }

    /// The training has ended on all ranks: processes that ask to join end, and this rank leaves the group.
    fn end(&self, py: Python<'_>) {
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner) = None;
        // Whatever fails here, the training is complete.
        let _ = py.detach(|| {
            let _ = self.ctx.log().end("the training has ended");
            self.ctx.group().shutdown()
        });
    }
}

impl Member {
    /// What is asked of the ranks, once all know it.
    fn agree(&self, waits: bool) -> phalanx_base::Result<RequestedChange> {
        let group = self.ctx.group();
        let _phase = waits.then(|| self.ctx.phase("waiting for more nodes"));
        let asked = (group.rank() == 0).then(|| self.ctx.requested(waits, || false));
        let asked = group.broadcast_object(asked.transpose()?.as_ref(), 0)?;
        group.barrier()?;
        Ok(asked)
    }
}
