//! Checkpoints from which a training continues with the same results, on any number of ranks.

use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind as Io;
use std::path::Path;
use std::time::Duration;

use candle_core::safetensors::Load;
use candle_core::{Device, Tensor, Var};
use phalanx_base::ErrorKind;
use phalanx_base::files::{atomic_write, open_regular, read_open};
use phalanx_comm::PhaseGuard;
use safetensors::SafeTensors;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::ddp::DistributedDataParallel;
use crate::error::{Error, Result};
use crate::optim::Resumable;

/// Before the names of an optimizer's buffers: `optimizer.exp_avg.fc1.weight`.
const OPTIMIZER: &str = "optimizer.";
const STEPS: &str = "phalanx.steps";
const RATE: &str = "phalanx.learning_rate";
const STATE: &str = "phalanx.state";
/// What rank 0 may fail with.
const KINDS: [ErrorKind; 4] = [
    ErrorKind::Usage,
    ErrorKind::System,
    ErrorKind::DiskFull,
    ErrorKind::Data,
];
/// Larger files are refused.
const MOST_BYTES: u64 = 1 << 40;
/// How long the other ranks wait for rank 0's disk, as by default for all that a rank does alone.
const ALONE: Duration = Duration::from_secs(600);

impl DistributedDataParallel {
    /// Saves variables, the state of `optimizer`, its learning rate and `state` (any value of the program's own: epoch,
    /// step, best accuracy) to one safetensors file, on rank 0. The variables have the names of the `VarMap`, whose `load` reads
    /// the file as well. The file is replaced as a whole: a rank that is killed leaves the old one or the new one.
    ///
    /// *Blocks* until all ranks of the group call it and rank 0 has written it to the disk, which may take 10 minutes, whatever
    /// the deadline of operations. Rank 0 may be in a [phase](phalanx_comm::ProcessGroup::phase) with another limit.
    ///
    /// # Errors
    ///
    /// On every rank: `DiskFull` or `System` naming the path; `Usage` when `state` cannot be written as JSON and read back, such as one with
    /// an infinite `f64`.
    pub fn save(
        &self,
        path: impl AsRef<Path>,
        optimizer: &impl Resumable,
        state: &(impl Serialize + DeserializeOwned),
    ) -> Result<()> {
        let saved = match self.group().rank() {
            0 => {
                let _phase = self.alone("saving a checkpoint");
                self.write(path.as_ref(), optimizer, state)
            }
            _ => Ok(()),
        };
        self.agree(saved.map(|()| None)).map(|_| ())
    }

    /// Loads what [`save`](Self::save) saved into the variables and `optimizer`, on all ranks, and returns the program's own
    /// value; `None`, with nothing changed, if there is no file at `path`. Only rank 0 reads the file.
    ///
    /// *Blocks* until all ranks of the group call it and rank 0 has read it, as long as [`save`](Self::save).
    ///
    /// # Errors
    ///
    /// On every rank, with nothing changed: `System` naming the path; `Data` when the file is truncated, or is of another model or
    /// optimizer, naming the first tensor that differs.
    pub fn load<S: DeserializeOwned>(
        &self,
        path: impl AsRef<Path>,
        optimizer: &mut impl Resumable,
    ) -> Result<Option<S>> {
        let path = path.as_ref();
        let read = match self.group().rank() {
            0 => {
                let _phase = self.alone("loading a checkpoint");
                read(path)
            }
            _ => Ok(None),
        };
        let Some(bytes) = self.agree(read)? else {
            return Ok(None);
        };
        let of_file = |why: String| Error::data(format!("cannot use {}: {why}", path.display()));
        let file = SafeTensors::deserialize(&bytes).map_err(|e| of_file(e.to_string()))?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| of_file(e.to_string()))?;
        let facts = header.metadata().clone().unwrap_or_default();
        let fact = |key: &str| {
            facts
                .get(key)
                .ok_or_else(|| of_file(format!("it has no {key}")))
        };
        let wrong = |key: &str| of_file(format!("{key} is no number"));
        let steps = fact(STEPS)?.parse().map_err(|_| wrong(STEPS))?;
        let rate: f64 = fact(RATE)?.parse().map_err(|_| wrong(RATE))?;
        let state = serde_json::from_str(fact(STATE)?);
        let state =
            state.map_err(|e| of_file(format!("the program state has another type: {e}")))?;
        // All are read before any is changed.
        let mut loaded: Vec<(&Var, Tensor)> = Vec::new();
        let wanted = self.tensors(optimizer)?;
        for (name, var) in &wanted {
            let view = file
                .tensor(name)
                .map_err(|_| of_file(format!("it has no tensor {name}")))?;
            let tensor = view
                .load(&Device::Cpu)
                .map_err(|e| of_file(e.to_string()))?;
            if tensor.dims() != var.dims() || tensor.dtype() != var.dtype() {
                return Err(of_file(format!(
                    "{name} is {} {:?} there and {} {:?} here",
                    tensor.dtype().as_str(),
                    tensor.dims(),
                    var.dtype().as_str(),
                    var.dims()
                )));
            }
            loaded.push((var, tensor));
        }
        if let Some(name) = file
            .names()
            .into_iter()
            .find(|name| !wanted.contains_key(*name))
        {
            return Err(of_file(format!(
                "unexpected tensor {name} in the checkpoint"
            )));
        }
        for (var, tensor) in loaded {
            var.set(&tensor.to_device(var.device())?)?;
        }
        optimizer.set_steps(steps);
        optimizer.set_learning_rate(rate);
        Ok(Some(state))
    }

    /// The others wait for this rank until the guard is dropped. A phase of the program's own continues instead.
    fn alone(&self, name: &str) -> Option<PhaseGuard> {
        let group = self.group();
        (!group.in_phase()).then(|| group.phase(name, ALONE))
    }

    /// What a checkpoint has, by name. The variables are shared, not copied.
    fn tensors(&self, optimizer: &impl Resumable) -> Result<BTreeMap<String, Var>> {
        let vars = self.parameters.iter().chain(&self.buffers);
        let mut all: BTreeMap<String, Var> = vars.cloned().collect();
        let names: HashMap<_, _> = self
            .parameters
            .iter()
            .map(|(name, var)| (var.id(), name))
            .collect();
        for state in optimizer.state() {
            // Of a buffer, or of a variable outside the map: nothing ever changes the first.
            let Some(name) = names.get(&state.var.id()) else {
                if self
                    .buffers
                    .iter()
                    .any(|(_, var)| var.id() == state.var.id())
                {
                    continue;
                }
                return Err(Error::usage(
                    "the optimizer has a variable that is not in the VarMap of DistributedDataParallel, so the checkpoint \
                     would not have it",
                ));
            };
            all.insert(
                format!("{OPTIMIZER}{}.{name}", state.name),
                state.value.clone(),
            );
        }
        Ok(all)
    }

    fn write<S: Serialize + DeserializeOwned>(
        &self,
        path: &Path,
        optimizer: &impl Resumable,
        state: &S,
    ) -> Result<()> {
        // An infinite f64 is null in JSON, which is no f64: what could not be loaded is not saved.
        let text = serde_json::to_string(state);
        let state = text.and_then(|text| serde_json::from_str::<S>(&text).map(|_| text));
        let state = state.map_err(|e| {
            Error::usage(format!(
                "the program's own state cannot be kept as JSON: {e}"
            ))
        })?;
        let facts = HashMap::from([
            (STEPS.to_owned(), optimizer.steps().to_string()),
            (RATE.to_owned(), optimizer.learning_rate().to_string()),
            (STATE.to_owned(), state),
        ]);
        let tensors = self.tensors(optimizer)?;
        let views = tensors.iter().map(|(name, var)| (name, var.as_tensor()));
        let bytes = safetensors::serialize(views, Some(facts));
        let bytes = bytes
            .map_err(|e| Error::internal(format!("a checkpoint could not be written: {e}")))?;
        Ok(atomic_write(path, &bytes)?)
    }

    /// What rank 0 has, on all ranks: its bytes, or its error.
    fn agree(&self, mine: Result<Option<Vec<u8>>>) -> Result<Option<Vec<u8>>> {
        let group = self.group();
        if group.world_size() == 1 {
            return mine;
        }
        // The number of bytes, or what went wrong there.
        let sent = match &mine {
            Ok(bytes) => Ok(bytes.as_ref().map(Vec::len)),
            Err(error) => {
                let kind = KINDS.iter().position(|kind| *kind == error.kind());
                Err((kind, error.to_string()))
            }
        };
        let sent = group.broadcast_object(Some(&sent).filter(|_| group.rank() == 0), 0)?;
        match (mine, sent) {
            (Err(error), _) => Err(error),
            (_, Err((kind, why))) => {
                let kind = kind
                    .and_then(|at| KINDS.get(at))
                    .unwrap_or(&ErrorKind::Failed);
                Err(Error::new(*kind, format!("rank 0: {why}")))
            }
            (_, Ok(None)) => Ok(None),
            (Ok(bytes), Ok(Some(len))) => {
                let mut bytes = bytes.unwrap_or_else(|| vec![0; len]);
                group.broadcast(&mut bytes, 0)?;
                Ok(Some(bytes))
            }
        }
    }
}

/// The bytes of the file; `None` if there is none.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match open_regular(path) {
        Ok(file) => Ok(Some(read_open(path, file, MOST_BYTES)?)),
        Err(error) if error.kind() == Io::NotFound => Ok(None),
        Err(error) => Err(phalanx_base::Error::io("cannot read", path, error).into()),
    }
}
