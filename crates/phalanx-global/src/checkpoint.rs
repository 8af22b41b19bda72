//! Checkpoints and files of weights that do not depend on the mesh.
//!
//! A file has full tensors in PyTorch's order, as a training on one rank writes it. Only rank 0 reads and writes files, and
//! it has one full tensor in memory at a time. For each tensor it broadcasts an index; then the ranks send it their parts, or
//! it sends each rank its part. An index of -1 ends this, also after a failure of rank 0, and all ranks agree on the outcome.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use phalanx_checkpoint::state::{
    Folder, Manifest, OptimizerState, Place, SavedCheckpoint, State, Streamed,
};
use phalanx_checkpoint::{self as checkpoint, Loaded, Outline, TensorId, Values};
use phalanx_comm::{PhaseGuard, ProcessGroup};
use phalanx_nn::optim::Optimizer;
use phalanx_nn::{BufferId, ParamId, ParamInfo, Params};
use serde::{Deserialize, Serialize};

use crate::boxing;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::Layout;
use crate::params::GlobalParams;
use crate::placement::coordinates;
use crate::sbp::Sbp;

/// How long the other ranks wait for rank 0's disk, beyond their deadline, where the program has declared no phase.
const DISK: Duration = Duration::from_secs(3600);

/// The index after the last tensor.
const END: i64 = -1;

/// What a checkpoint has besides tensors and the optimizer's counts.
#[derive(Clone, Debug, Default)]
pub struct CheckpointInfo {
    /// Where the training continues: its step is in the names of the files, and its epoch and
    /// samples are the sampler's cursor.
    pub place: Place,
    /// Settings that a resumed training must share, as names and values.
    pub facts: BTreeMap<String, String>,
    /// Other values of the program: losses, accuracies.
    pub progress: serde_json::Value,
    /// Metadata of the model's weights.
    pub metadata: BTreeMap<String, String>,
}

/// A checkpoint that was loaded.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Checkpoint {
    /// Its manifest: where the training continues, and what was saved besides tensors.
    pub manifest: Manifest,
    /// Path of the manifest on rank 0.
    pub path: PathBuf,
    /// Newer checkpoints that were passed over, and whether its own weights are not finite, one sentence each.
    pub warnings: Vec<String>,
}

/// What ranks compare before they save or load.
#[derive(Serialize, Deserialize)]
struct Summary {
    /// What this rank calls.
    call: String,
    /// A hash of names, shapes and layouts.
    model: u64,
    /// Why this rank cannot take part.
    wrong: Option<String>,
}

/// A failure, for other ranks.
#[derive(Serialize, Deserialize)]
struct Failure {
    kind: u8,
    text: String,
}

/// Kinds of failures that one rank has alone.
const KINDS: [ErrorKind; 4] = [
    ErrorKind::File,
    ErrorKind::Usage,
    ErrorKind::Mismatch,
    ErrorKind::Engine,
];

impl Failure {
    fn of(error: &Error) -> Self {
        let kind = KINDS.iter().position(|k| *k == error.kind()).unwrap_or(0);
        Failure {
            kind: kind as u8,
            text: error.to_string(),
        }
    }

    fn error(&self) -> Error {
        let kind = KINDS.get(usize::from(self.kind));
        let kind = kind.copied().unwrap_or(ErrorKind::File);
        Error::with(kind, self.text.clone(), None)
    }
}

impl GlobalParams {
    /// Saves parameters, buffers and the optimizer's state into `folder` as a checkpoint to resume
    /// from, on any mesh, or as one on one rank (module
    /// [`state`](phalanx_checkpoint::state) describes the files). Returns the path of its manifest, and the name
    /// of a tensor with infinite or NaN weights, if there is one.
    ///
    /// Rank 0 writes, and decides the folder; of buffers the values of rank 0 are saved. Its memory
    /// holds one full tensor at a time. A checkpoint is complete or not there: an earlier one of the
    /// same step is replaced only by a complete one.
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, ProcessGroup};
    /// use phalanx_checkpoint::state::Folder;
    /// use phalanx_global::{CheckpointInfo, GlobalParams, Placement, Sbp};
    /// use phalanx_nn::{Scope, Seed, layers::Linear, optim::Adam};
    ///
    /// # let dir = tempfile::tempdir()?;
    /// let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
    /// let mut scope = Scope::new(Seed(0));
    /// Linear::new(scope.enter("up"), 4, 8);
    /// let model = scope.build()?;
    /// let mut params = GlobalParams::new(&Placement::of(&group), &model, |_| vec![Sbp::split(0)])?;
    /// let mut adam = Adam::new(params.local(), 1e-3);
    /// let saved = params.save(&Folder::new(dir.path(), 2), &adam, &CheckpointInfo::default())?;
    /// assert_eq!(saved.not_finite, None);
    /// let loaded = params.load(&saved.path, &mut adam)?;
    /// assert_eq!(loaded.manifest.place.step, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// *Blocks until* all ranks of the mesh call it, and the checkpoint is on the disk.
    ///
    /// # Errors
    /// On all ranks alike: `File` when rank 0 cannot write, naming the path; `Usage` when the
    /// optimizer belongs to other parameters; `Mismatch` when ranks save different things. `Comm`
    /// when a collective fails.
    pub fn save(
        &self,
        folder: &Folder,
        optimizer: &dyn Optimizer,
        info: &CheckpointInfo,
    ) -> Result<SavedCheckpoint> {
        let state = optimizer.state();
        let names: Vec<&str> = state.iter().map(|(name, _)| *name).collect();
        let call = format!(
            "save step {} (optimizer: {} steps, {names:?})",
            info.place.step,
            optimizer.steps()
        );
        let saved = self.gathered(call, Some(optimizer), |outline, values| {
            // Rank 0 has elements of each parameter, so it counts all updates.
            let counts = OptimizerState::from(optimizer);
            let (facts, progress) = (info.facts.clone(), info.progress.clone());
            let state = Streamed::new(outline.clone(), &counts, info.place, facts, progress)
                .with_metadata(info.metadata.clone());
            folder.save_streamed(&state, values)
        })?;
        let not_finite = saved.as_ref().map(|saved| &saved.not_finite);
        let not_finite = (self.group().broadcast_object(not_finite, 0)).map_err(failed)?;
        Ok(saved.unwrap_or_else(|| {
            let name = phalanx_checkpoint::state::manifest_name(info.place.step);
            SavedCheckpoint {
                path: folder.path().join(name),
                not_finite,
            }
        }))
    }

    /// Loads the checkpoint whose manifest is at `path`, saved on any mesh: parameters, buffers, and
    /// the state of `optimizer`, which was made for [`local`](Self::local).
    ///
    /// Rank 0 reads, one full tensor at a time, after the SHA-256 of the file was checked and all
    /// names, shapes and types were compared; each rank gets its parts. Nothing changes before all
    /// ranks have everything, which needs the memory of their parts once more.
    ///
    /// *Blocks until* all ranks of the mesh call it.
    ///
    /// # Errors
    /// On all ranks alike, with nothing changed: `File` when there is no such file, or it is damaged
    /// or of another model, naming file and tensor; `Usage` when it is of another optimizer;
    /// `Mismatch` when ranks have different models. `Comm` when a collective fails.
    pub fn load(&mut self, path: &Path, optimizer: &mut dyn Optimizer) -> Result<Checkpoint> {
        let open = || State::load(path).map(|state| (Some(state), Vec::new()));
        let loaded = self.loaded("load", open, optimizer)?;
        loaded.ok_or_else(|| Error::usage(format!("no checkpoint {}", path.display())))
    }

    /// As [`load`](Self::load), a checkpoint that rank 0 has opened: `state` is only used there, `manifest` on all ranks.
    ///
    /// *Blocks until* all ranks of the mesh call it.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_state(
        &mut self,
        state: Option<&State>,
        manifest: &Manifest,
        optimizer: &mut dyn Optimizer,
    ) -> Result<()> {
        self.compared("load a checkpoint".to_owned(), None)?;
        self.restored(state, manifest, optimizer)
    }

    /// As [`load`](Self::load), the newest complete checkpoint in `folder` with finite weights, or else the newest
    /// complete one; `None`, with nothing changed, if there is none.
    ///
    /// *Blocks until* all ranks of the mesh call it.
    ///
    /// # Errors
    /// As [`load`](Self::load), and `File` when all checkpoints in the folder are damaged.
    pub fn load_newest(
        &mut self,
        folder: &Folder,
        optimizer: &mut dyn Optimizer,
    ) -> Result<Option<Checkpoint>> {
        self.loaded("load the newest", || folder.newest(), optimizer)
    }

    /// Writes the full model to `path` as `torch.save(model.state_dict())` does.
    ///
    /// The file is the one that [`save_pth`](phalanx_checkpoint::save_pth) writes on one rank,
    /// byte by byte. Rank 0 writes, with one full tensor at a time in memory; the file is replaced
    /// at once, or unchanged.
    ///
    /// *Blocks until* all ranks of the mesh call it, and the file is on the disk.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn save_pth(&self, path: &Path) -> Result<()> {
        self.gathered("save_pth".to_owned(), None, |outline, values| {
            checkpoint::save_pth_with(path, outline, values)
        })
        .map(drop)
    }

    /// Writes the full model to `path` as safetensors, as [`save_pth`](Self::save_pth) does in
    /// PyTorch's format; the file is the one of
    /// [`save_params`](phalanx_checkpoint::save_params).
    ///
    /// *Blocks until* all ranks of the mesh call it, and the file is on the disk.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn save_weights(&self, path: &Path, metadata: &BTreeMap<String, String>) -> Result<()> {
        self.gathered("save_weights".to_owned(), None, |outline, values| {
            checkpoint::save_params_with(path, outline, metadata, values)
        })
        .map(drop)
    }

    /// Runs `write` on rank 0, which may ask for any parameter and buffer, and for the state of `optimizer`, in full: only
    /// one tensor at a time is in its memory. Of buffers it gets its own values. Returns the result of `write` on rank 0,
    /// `None` on other ranks.
    ///
    /// *Blocks until* all ranks of the mesh call it, and `write` has returned.
    ///
    /// # Errors
    /// On all ranks alike: `File` when `write` fails; otherwise as [`save`](Self::save).
    pub fn gather_each<R>(
        &self,
        optimizer: Option<&dyn Optimizer>,
        write: impl FnOnce(&Outline, &mut Values<'_>) -> phalanx_base::Result<R>,
    ) -> Result<Option<R>> {
        self.gathered("gather tensors".to_owned(), optimizer, write)
    }

    /// Loads parameters and buffers from a file of the full model: PyTorch's `.pth`, safetensors
    /// (both recognized by content), or the manifest (`.json`) of a checkpoint; as
    /// [`load_params`](phalanx_checkpoint::load_params) does on one rank.
    ///
    /// Rank 0 reads, one tensor at a time, after all names, shapes and types were compared; each
    /// rank gets its parts. Nothing changes before all ranks have everything.
    ///
    /// *Blocks until* all ranks of the mesh call it.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_weights(&mut self, path: &Path) -> Result<Loaded> {
        self.compared("load_weights".to_owned(), None)?;
        let outline = self.outline();
        let (staged, loaded) =
            self.scattered(0, |take| checkpoint::read_each(path, &outline, take))?;
        let said = loaded.map(|l| (l.metadata, l.warnings));
        let (metadata, warnings) = (self.group())
            .broadcast_object(said.as_ref(), 0)
            .map_err(failed)?;
        *self.local_mut() = staged.params;
        Ok(Loaded {
            metadata,
            warnings,
            ..Loaded::default()
        })
    }

    fn group(&self) -> &ProcessGroup {
        self.placement().group()
    }

    /// Names and shapes of the full tensors.
    fn outline(&self) -> Outline {
        let named = |infos: &[ParamInfo]| {
            let all = infos.iter().map(|i| (i.name.clone(), i.shape.clone()));
            all.collect()
        };
        Outline::new(
            named(&self.full_infos()),
            named(self.local().buffer_infos()),
        )
    }

    /// Checks that all ranks call the same function, with the same model. `wrong` is why this rank cannot take part.
    fn compared(&self, call: String, wrong: Option<String>) -> Result<()> {
        // The ranks run the same program, so equal values have equal hashes.
        let mut model = DefaultHasher::new();
        for (id, info) in self.local().ids().zip(self.local().infos()) {
            (&info.name, self.layout(id)).hash(&mut model);
        }
        for info in self.local().buffer_infos() {
            (&info.name, &info.shape).hash(&mut model);
        }
        let mine = Summary {
            call,
            model: model.finish(),
            wrong,
        };
        let all = self.group().all_gather_object(&mine).map_err(failed)?;
        for (rank, other) in all.iter().enumerate() {
            if let Some(wrong) = &other.wrong {
                return Err(Error::usage(self.on_rank(rank, wrong)));
            }
            if other.call != all[0].call {
                return Err(Error::mismatch(format!(
                    "rank 0 wants to {}, rank {rank} to {}",
                    all[0].call, other.call
                )));
            }
            if other.model != all[0].model {
                return Err(Error::mismatch(format!(
                    "rank {rank} has other parameters or layouts than rank 0; all ranks of the mesh need the same model"
                )));
            }
        }
        Ok(())
    }

    fn on_rank(&self, rank: usize, text: &str) -> String {
        match self.group().world_size() {
            1 => text.to_owned(),
            _ => format!("rank {rank}: {text}"),
        }
    }

    /// The outcome of all ranks: the first failure, on all of them, or this rank's value.
    fn agreed<T>(&self, mine: Result<T>) -> Result<T> {
        let mine = match mine {
            // The other ranks cannot be reached.
            Err(error) if error.kind() == ErrorKind::Comm => return Err(error),
            other => other,
        };
        let failure = mine.as_ref().err().map(Failure::of);
        let all = match (
            self.group().all_gather_object(&failure),
            mine.as_ref().err(),
        ) {
            (Ok(all), _) => all,
            // A rank that has seen the failure may have left already.
            (Err(_), Some(_)) => return mine,
            (Err(lost), None) => return Err(failed(lost)),
        };
        let first = all
            .iter()
            .enumerate()
            .find_map(|(rank, failure)| Some((rank, failure.as_ref()?)));
        let own = self.group().rank();
        match (first, mine) {
            (None, mine) => mine,
            (Some((rank, failure)), Err(error)) if rank == own => {
                Err(error.with_message(self.on_rank(rank, &failure.text)))
            }
            (Some((rank, failure)), _) => {
                let text = self.on_rank(rank, &failure.text);
                Err(failure.error().with_message(text))
            }
        }
    }

    /// [`gather_each`](Self::gather_each) for `call`.
    fn gathered<R>(
        &self,
        call: String,
        optimizer: Option<&dyn Optimizer>,
        write: impl FnOnce(&Outline, &mut Values<'_>) -> phalanx_base::Result<R>,
    ) -> Result<Option<R>> {
        let state = optimizer.map_or(Vec::new(), |optimizer| optimizer.state());
        self.compared(call, optimizer.and_then(|o| self.optimizer_mismatch(o)))?;
        if self.group().rank() != 0 {
            while let Some(tensor) = self.next_tensor(state.len())? {
                self.send_part(tensor, &state)?;
            }
            return self.agreed(Ok(None));
        }
        let _phase = self.disk_phase("saving");
        let mut lost = None;
        let outcome = write(&self.outline(), &mut |tensor| {
            self.gather(tensor, &state).map_err(|error| {
                let text = error.to_string();
                lost = Some(error).filter(|error| error.kind() == ErrorKind::Comm);
                std::io::Error::other(text)
            })
        });
        self.agreed(self.ended(outcome, lost).map(Some))
    }

    /// Why `optimizer` cannot be the one of these parameters.
    fn optimizer_mismatch(&self, optimizer: &dyn Optimizer) -> Option<String> {
        let (elements, params) = (self.local().flat().len(), self.local().len());
        let state = optimizer.state();
        let wrong = match state.iter().find(|(_, values)| values.len() != elements) {
            Some((name, values)) => format!(
                "the optimizer's {name} has {} elements, the parameters {elements}",
                values.len()
            ),
            None if optimizer.updates().len() != params => format!(
                "the optimizer counts the updates of {} parameters, expected {params}",
                optimizer.updates().len()
            ),
            None => return None,
        };
        Some(format!("{wrong}; save the optimizer of these parameters"))
    }

    /// Ends the tensors on all ranks, on rank 0; `lost` is a failure of the communication, which `outcome` only repeats.
    fn ended<R>(&self, outcome: phalanx_base::Result<R>, lost: Option<Error>) -> Result<R> {
        if let Some(error) = lost {
            return Err(error);
        }
        self.broadcast_index(END)?;
        outcome.map_err(Error::file)
    }

    /// Rank 0's index of the next tensor on all ranks.
    fn broadcast_index(&self, index: i64) -> Result<i64> {
        let mut indices = [index];
        self.group().broadcast(&mut indices, 0).map_err(failed)?;
        Ok(indices[0])
    }

    fn index_of(&self, tensor: TensorId) -> i64 {
        let (params, buffers) = (self.local().len(), self.local().buffer_infos().len());
        let index = match tensor {
            TensorId::Param(i) => i,
            TensorId::Buffer(i) => params + i,
            TensorId::State { buffer, param } => params + buffers + buffer * params + param,
        };
        index as i64
    }

    /// Rank 0's next tensor, on other ranks; none at the end. The optimizer has `state` buffers.
    fn next_tensor(&self, state: usize) -> Result<Option<TensorId>> {
        let index = self.broadcast_index(END)?;
        if index == END {
            return Ok(None);
        }
        let (params, buffers) = (self.local().len(), self.local().buffer_infos().len());
        let tensor = match usize::try_from(index).unwrap_or(usize::MAX) {
            i if i < params => TensorId::Param(i),
            i if i - params < buffers => TensorId::Buffer(i - params),
            i if i - params - buffers < state * params => TensorId::State {
                buffer: (i - params - buffers) / params,
                param: (i - params - buffers) % params,
            },
            _ => {
                return Err(Error::mismatch(format!(
                    "rank 0 asks for tensor {index}, which this rank does not have"
                )));
            }
        };
        Ok(Some(tensor))
    }

    /// This rank's part of a tensor.
    fn part(&self, tensor: TensorId, state: &[(&str, &[f32])]) -> Vec<f32> {
        let mut part = Vec::new();
        match tensor {
            TensorId::Param(i) => part = self.local().export(param(self.local(), i)),
            TensorId::Buffer(i) => part.extend(self.local().buffer(buffer(self.local(), i))),
            TensorId::State { buffer, param: i } => {
                let id = param(self.local(), i);
                self.local().export_of(id, state[buffer].1, &mut part);
            }
        }
        part
    }

    /// The layout of a tensor; none of buffers, which every rank has in full.
    fn layout_of(&self, tensor: TensorId) -> Option<&Layout> {
        match tensor {
            TensorId::Param(i) | TensorId::State { param: i, .. } => {
                Some(self.layout(param(self.local(), i)))
            }
            TensorId::Buffer(_) => None,
        }
    }

    /// A full tensor, on rank 0.
    fn gather(&self, tensor: TensorId, state: &[(&str, &[f32])]) -> Result<Vec<f32>> {
        let (params, buffers) = (self.local().len(), self.local().buffer_infos().len());
        let exists = match tensor {
            TensorId::Param(i) => i < params,
            TensorId::Buffer(i) => i < buffers,
            TensorId::State { buffer, param } => buffer < state.len() && param < params,
        };
        if !exists {
            return Err(Error::usage(format!("there is no tensor {tensor:?}")));
        }
        self.broadcast_index(self.index_of(tensor))?;
        let own = self.part(tensor, state);
        let Some(layout) = self.layout_of(tensor) else {
            return Ok(own);
        };
        let owners = owners(layout);
        if owners.len() < 2 && own.len() == layout.numel() {
            return Ok(own);
        }
        let whole = whole(layout.shape());
        let mut full = vec![0.0; layout.numel()];
        for rank in owners {
            let block = layout.block(rank);
            let mut part = Vec::new();
            let part = match rank {
                0 => &own,
                _ => {
                    part.resize(boxing::numel(&block), 0.0);
                    self.group().recv(&mut part, rank).map_err(failed)?;
                    &part
                }
            };
            boxing::copy(part, &block, &mut full, &whole, &block);
        }
        Ok(full)
    }

    /// Sends this rank's part of a tensor to rank 0, unless a lower rank has the same part.
    fn send_part(&self, tensor: TensorId, state: &[(&str, &[f32])]) -> Result<()> {
        match self.layout_of(tensor) {
            Some(layout) if owners(layout).contains(&self.group().rank()) => {
                let part = self.part(tensor, state);
                self.group().send(&part, 0).map_err(failed)
            }
            _ => Ok(()),
        }
    }

    /// Sends all ranks their parts of a full tensor, on rank 0; returns its own.
    fn scatter(&self, tensor: TensorId, mut values: Vec<f32>) -> Result<Vec<f32>> {
        // Nothing may fail between the index and what follows it.
        let expected = match (self.layout_of(tensor), tensor) {
            (Some(layout), _) => layout.numel(),
            (None, TensorId::Buffer(i)) => self.local().buffer_infos()[i].len,
            (None, _) => 0,
        };
        if values.len() != expected {
            return Err(Error::usage(format!(
                "a tensor of {expected} elements has {} in the file",
                values.len()
            )));
        }
        self.broadcast_index(self.index_of(tensor))?;
        let layout = self.layout_of(tensor);
        let Some(layout) = layout.filter(|layout| !is_whole(layout)) else {
            self.group().broadcast(&mut values, 0).map_err(failed)?;
            return Ok(values);
        };
        let whole = whole(layout.shape());
        for rank in 1..layout.ranks() {
            let part = boxing::slice(&values, &whole, &layout.block(rank));
            if !part.is_empty() {
                self.group().send(&part, rank).map_err(failed)?;
            }
        }
        Ok(boxing::slice(&values, &whole, &layout.block(0)))
    }

    /// The phase `name`, unless the program is in one, whose limit holds then.
    fn disk_phase(&self, name: &str) -> Option<PhaseGuard> {
        let group = self.group();
        (!group.in_phase()).then(|| group.phase(name, DISK))
    }

    /// This rank's part of a tensor that rank 0 scatters, on other ranks.
    fn receive(&self, tensor: TensorId) -> Result<Vec<f32>> {
        let (group, rank) = (self.group(), self.group().rank());
        let (len, is_whole) = match (self.layout_of(tensor), tensor) {
            (Some(layout), _) => (layout.numel_of(rank), is_whole(layout)),
            (None, TensorId::Buffer(i)) => (self.local().buffer_infos()[i].len, true),
            (None, _) => (0, true),
        };
        let mut part = vec![0.0; len];
        match is_whole {
            true => group.broadcast(&mut part, 0).map_err(failed)?,
            false if part.is_empty() => {}
            false => drop(group.recv(&mut part, 0).map_err(failed)?),
        }
        Ok(part)
    }

    /// Reads by `read` on rank 0, which passes tensors on; the optimizer has `state` buffers. Returns this rank's parts.
    fn scattered<R>(
        &self,
        state: usize,
        read: impl FnOnce(
            &mut dyn FnMut(TensorId, Vec<f32>) -> phalanx_base::Result<()>,
        ) -> phalanx_base::Result<R>,
    ) -> Result<(Staged, Option<R>)> {
        let mut staged = Staged::new(self.local(), state);
        if self.group().rank() != 0 {
            let mut outcome = Ok(());
            while let Some(tensor) = self.next_tensor(state)? {
                let part = self.receive(tensor)?;
                outcome = outcome.and_then(|()| staged.put(tensor, &part));
            }
            self.agreed(outcome)?;
            return Ok((staged, None));
        }
        let _phase = self.disk_phase("loading");
        let mut lost = None;
        let mut wrong = None;
        let outcome = read(&mut |tensor, values| {
            let put = |error: Error, to: &mut Option<Error>| {
                let text = error.to_string();
                *to = Some(error);
                phalanx_base::Error::new(phalanx_base::ErrorKind::Internal, text)
            };
            let part = self.scatter(tensor, values).map_err(|error| {
                let is_lost = error.kind() == ErrorKind::Comm;
                put(error, if is_lost { &mut lost } else { &mut wrong })
            })?;
            staged
                .put(tensor, &part)
                .map_err(|error| put(error, &mut wrong))
        });
        let outcome = self.ended(outcome, lost);
        let outcome = match wrong {
            Some(error) => Err(error),
            None => outcome,
        };
        let read = self.agreed(outcome)?;
        Ok((staged, Some(read)))
    }

    /// Loads the checkpoint that `open` finds on rank 0, if there is one.
    fn loaded(
        &mut self,
        call: &str,
        open: impl FnOnce() -> phalanx_base::Result<(Option<State>, Vec<String>)>,
        optimizer: &mut dyn Optimizer,
    ) -> Result<Option<Checkpoint>> {
        self.compared(call.to_owned(), None)?;
        let opened = match self.group().rank() {
            0 => {
                let _phase = self.disk_phase("loading");
                open().map_err(Error::file)
            }
            _ => Ok((None, Vec::new())),
        };
        let (state, mut warnings) = self.agreed(opened)?;
        warnings.extend(state.as_ref().and_then(State::warning));
        // JSON has no text for a path that is not UTF-8.
        let found = state.as_ref().map(|state| {
            let path = state.path().as_os_str().as_bytes();
            (state.manifest().clone(), path.to_vec(), warnings)
        });
        let found: Option<(Manifest, Vec<u8>, Vec<String>)> =
            (self.group().broadcast_object(Some(&found), 0)).map_err(failed)?;
        let found = found.map(|(manifest, path, warnings)| Checkpoint {
            manifest,
            path: OsString::from_vec(path).into(),
            warnings,
        });
        if let Some(found) = &found {
            self.restored(state.as_ref(), &found.manifest, optimizer)?;
        }
        Ok(found)
    }

    fn restored(
        &mut self,
        state: Option<&State>,
        manifest: &Manifest,
        optimizer: &mut dyn Optimizer,
    ) -> Result<()> {
        let outline = self.outline();
        let buffers = &manifest.optimizer_buffers;
        let (staged, _) = self.scattered(buffers.len(), |take| match state {
            Some(state) => state.read_each(&outline, take),
            None => Err(phalanx_base::Error::usage("rank 0 has no checkpoint")),
        })?;
        let old = OptimizerCopy::of(optimizer);
        let flats = staged.state.iter().map(Params::flat);
        let views: Vec<(&str, &[f32])> = buffers.iter().map(|b| &b[..]).zip(flats).collect();
        let updates = manifest.updates(self.local());
        let restored = optimizer.restore(manifest.optimizer_steps, &updates, &views);
        let is_new = restored.is_ok();
        let restored = restored
            .map_err(|e| Error::usage(format!("the checkpoint is of another optimizer: {e}")));
        if let Err(error) = self.agreed(restored) {
            if is_new {
                old.put_back(optimizer)?;
            }
            return Err(error);
        }
        *self.local_mut() = staged.params;
        Ok(())
    }
}

/// What was read so far, laid out as this rank's parts.
struct Staged {
    params: Params,
    /// The optimizer's buffers.
    state: Vec<Params>,
}

impl Staged {
    fn new(local: &Params, state: usize) -> Self {
        let mut empty = local.clone();
        empty.flat_mut().fill(0.0);
        Staged {
            params: empty.clone(),
            state: vec![empty; state],
        }
    }

    fn put(&mut self, tensor: TensorId, part: &[f32]) -> Result<()> {
        match tensor {
            TensorId::Param(i) => self.params.import(param(&self.params, i), part)?,
            TensorId::Buffer(i) => {
                let id = buffer(&self.params, i);
                self.params.buffer_mut(id).copy_from_slice(part);
            }
            TensorId::State { buffer, param: i } => {
                let to = &mut self.state[buffer];
                to.import(param(to, i), part)?;
            }
        }
        Ok(())
    }
}

/// A copy of an optimizer's state.
struct OptimizerCopy {
    steps: u64,
    updates: Vec<u64>,
    buffers: Vec<(&'static str, Vec<f32>)>,
}

impl OptimizerCopy {
    fn of(optimizer: &dyn Optimizer) -> Self {
        let buffers = optimizer.state().into_iter();
        OptimizerCopy {
            steps: optimizer.steps(),
            updates: optimizer.updates().to_vec(),
            buffers: buffers
                .map(|(name, values)| (name, values.to_vec()))
                .collect(),
        }
    }

    fn put_back(&self, optimizer: &mut dyn Optimizer) -> Result<()> {
        let buffers = self.buffers.iter();
        let views: Vec<(&str, &[f32])> = buffers.map(|(n, v)| (*n, &v[..])).collect();
        Ok(optimizer.restore(self.steps, &self.updates, &views)?)
    }
}

fn failed(cause: phalanx_comm::Error) -> Error {
    Error::comm_while("the ranks' parts of a tensor could not be exchanged", cause)
}

/// The parameter with this index, which the model has.
fn param(params: &Params, index: usize) -> ParamId {
    params
        .ids()
        .nth(index)
        .expect("an index below their number")
}

/// The buffer with this index, which the model has.
fn buffer(params: &Params, index: usize) -> BufferId {
    params
        .buffer_ids()
        .nth(index)
        .expect("an index below their number")
}

/// Of the ranks that have the same part, the first one; those without elements have none.
fn owners(layout: &Layout) -> Vec<usize> {
    let is_first = |rank: &usize| {
        let at = coordinates(layout.mesh(), *rank);
        let mut at = at.iter().zip(layout.sbp());
        at.all(|(at, sbp)| *sbp != Sbp::Broadcast || *at == 0) && layout.numel_of(*rank) > 0
    };
    (0..layout.ranks()).filter(is_first).collect()
}

fn is_whole(layout: &Layout) -> bool {
    layout.sbp().iter().all(|s| *s == Sbp::Broadcast)
}

fn whole(shape: &[usize]) -> Vec<Range<usize>> {
    shape.iter().map(|n| 0..*n).collect()
}
