//! Checkpoints and files of weights that do not depend on the mesh.
//!
//! A file has full tensors in PyTorch's order, as a training on one rank writes it. Rank 0 reads and
//! writes, so only its host needs to see the file, and has one full tensor at a time in memory. It
//! calls the other ranks to each tensor: those that have parts send them, or all get theirs. So a
//! failure of rank 0 ends the calls, and then all ranks agree on the outcome.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use phalanx_checkpoint::state::{
    Folder, Manifest, OptimizerState, Place, SavedCheckpoint, State, Streamed,
};
use phalanx_checkpoint::{self as checkpoint, Loaded, Outline, Piece};
use phalanx_comm::ProcessGroup;
use phalanx_nn::optim::Optimizer;
use phalanx_nn::{BufferId, ParamId, ParamInfo, Params};
use serde::{Deserialize, Serialize};

use crate::boxing;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::Layout;
use crate::params::GlobalParams;
use crate::placement::coordinates;
use crate::sbp::Sbp;

/// How long the other ranks wait for rank 0's disk, beyond their deadline.
const DISK: Duration = Duration::from_secs(3600);

/// Rank 0 calls for no more tensors.
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
    /// What this rank does.
    call: String,
    /// A hash of names, shapes and layouts.
    model: u64,
    /// Why this rank cannot take part.
    wrong: Option<String>,
}

/// A failure, for other ranks.
#[derive(Serialize, Deserialize)]
struct Told {
    kind: u8,
    text: String,
}

/// What rank 0 found.
#[derive(Serialize, Deserialize)]
enum Opened {
    Nothing,
    Failed(Told),
    Found {
        manifest: Box<Manifest>,
        path: String,
        warnings: Vec<String>,
    },
}

/// Kinds of failures that one rank has alone.
const KINDS: [ErrorKind; 4] = [
    ErrorKind::File,
    ErrorKind::Usage,
    ErrorKind::Mismatch,
    ErrorKind::Engine,
];

impl Told {
    fn of(error: &Error) -> Self {
        let kind = KINDS.iter().position(|k| *k == error.kind()).unwrap_or(0);
        Told {
            kind: kind as u8,
            text: error.to_string(),
        }
    }

    fn error(&self) -> Error {
        let kind = KINDS.get(usize::from(self.kind));
        Error::told(kind.copied().unwrap_or(ErrorKind::File), self.text.clone())
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
        let elements = self.local().flat().len();
        let wrong = match state.iter().find(|(_, values)| values.len() != elements) {
            Some((name, values)) => Some(format!(
                "the optimizer's {name} has {} elements, the parameters {elements}; save the optimizer of these parameters",
                values.len()
            )),
            None if optimizer.updates().len() != self.local().len() => Some(format!(
                "the optimizer counts the updates of {} parameters, expected {}; save the optimizer of these parameters",
                optimizer.updates().len(),
                self.local().len()
            )),
            None => None,
        };
        let call = format!(
            "save step {} (optimizer: {} steps, {names:?})",
            info.place.step,
            optimizer.steps()
        );
        self.compared(call, wrong)?;
        let streamed = || {
            // Rank 0 has elements of each parameter, so it counts all updates.
            let counts = OptimizerState::from(optimizer);
            let (facts, progress) = (info.facts.clone(), info.progress.clone());
            Streamed::new(self.outline(), &counts, info.place, facts, progress)
                .with_metadata(info.metadata.clone())
        };
        let saved = self.written(&state, |values| folder.save_streamed(&streamed(), values))?;
        let not_finite = saved.as_ref().map(|saved| &saved.not_finite);
        let not_finite = self
            .group()
            .broadcast_object(not_finite, 0)
            .map_err(failed)?;
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
        let loaded = self.resumed("load", open, optimizer)?;
        loaded.ok_or_else(|| Error::usage(format!("no checkpoint {}", path.display())))
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
        self.resumed("load the newest", || folder.newest(), optimizer)
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
        self.compared("save_pth".to_owned(), None)?;
        self.written(&[], |values| {
            checkpoint::save_pth_with(path, &self.outline(), values)
        })
        .map(|_| ())
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
        self.compared("save_weights".to_owned(), None)?;
        self.written(&[], |values| {
            checkpoint::save_params_with(path, &self.outline(), metadata, values)
        })
        .map(|_| ())
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
        let (staged, loaded) = self.read(0, |take| checkpoint::read_each(path, &outline, take))?;
        let said = loaded.map(|l| (l.metadata, l.warnings));
        let (metadata, warnings) = (self.group())
            .broadcast_object(said.as_ref(), 0)
            .map_err(failed)?;
        *self.local_mut() = staged.params;
        Ok(Loaded { metadata, warnings })
    }

    fn group(&self) -> &ProcessGroup {
        self.placement().group()
    }

    /// Names and shapes of the full tensors.
    fn outline(&self) -> Outline {
        let local = self.local();
        let params = local.ids().zip(local.infos());
        let buffers = local.buffer_infos().iter();
        let named = |info: &ParamInfo, shape: &[usize]| (info.name.clone(), shape.to_vec());
        Outline::new(
            params
                .map(|(id, info)| named(info, self.layout(id).shape()))
                .collect(),
            buffers.map(|info| named(info, &info.shape)).collect(),
        )
    }

    /// What all ranks are about to do, which must be the same.
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
            // Nobody can be told.
            Err(error) if error.kind() == ErrorKind::Comm => return Err(error),
            other => other,
        };
        let told = mine.as_ref().err().map(Told::of);
        let all = self.group().all_gather_object(&told).map_err(failed)?;
        let first = all
            .iter()
            .enumerate()
            .find_map(|(rank, told)| Some((rank, told.as_ref()?)));
        let own = self.group().rank();
        match (first, mine) {
            (None, mine) => mine,
            (Some((rank, told)), Err(error)) if rank == own => {
                Err(error.with_message(self.on_rank(rank, &told.text)))
            }
            (Some((rank, told)), _) => {
                let text = self.on_rank(rank, &told.text);
                Err(told.error().with_message(text))
            }
        }
    }

    /// Saves by `write` on rank 0, which asks for tensors; `state` are the optimizer's buffers.
    fn written<R>(
        &self,
        state: &[(&str, &[f32])],
        write: impl FnOnce(
            &mut dyn FnMut(Piece) -> std::io::Result<Vec<f32>>,
        ) -> phalanx_base::Result<R>,
    ) -> Result<Option<R>> {
        if self.group().rank() != 0 {
            while let Some(piece) = self.called(state.len())? {
                self.give(piece, state)?;
            }
            return self.agreed(Ok(None));
        }
        let _phase = self.group().phase("saving", DISK);
        let mut lost = None;
        let outcome = write(&mut |piece| {
            self.collect(piece, state).map_err(|error| {
                let text = error.to_string();
                lost = Some(error);
                std::io::Error::other(text)
            })
        });
        self.agreed(self.ended(outcome, lost).map(Some))
    }

    /// Tells the others that rank 0 calls for no more tensors; `lost` is a failure of the
    /// communication, which `outcome` only repeats.
    fn ended<R>(&self, outcome: phalanx_base::Result<R>, lost: Option<Error>) -> Result<R> {
        if let Some(error) = lost {
            return Err(error);
        }
        self.call(END)?;
        outcome.map_err(Error::from)
    }

    /// Rank 0's number of the next tensor on all ranks.
    fn call(&self, number: i64) -> Result<i64> {
        let mut numbers = [number];
        self.group().broadcast(&mut numbers, 0).map_err(failed)?;
        Ok(numbers[0])
    }

    fn number(&self, piece: Piece) -> i64 {
        let (params, buffers) = (self.local().len(), self.local().buffer_infos().len());
        let number = match piece {
            Piece::Param(i) => i,
            Piece::Buffer(i) => params + i,
            Piece::State { buffer, param } => params + buffers + buffer * params + param,
        };
        number as i64
    }

    /// The tensor that rank 0 calls for, on other ranks; none at the end. The optimizer has `state`
    /// buffers.
    fn called(&self, state: usize) -> Result<Option<Piece>> {
        let number = self.call(END)?;
        if number == END {
            return Ok(None);
        }
        let (params, buffers) = (self.local().len(), self.local().buffer_infos().len());
        let piece = match usize::try_from(number).unwrap_or(usize::MAX) {
            i if i < params => Piece::Param(i),
            i if i - params < buffers => Piece::Buffer(i - params),
            i if i - params - buffers < state * params => Piece::State {
                buffer: (i - params - buffers) / params,
                param: (i - params - buffers) % params,
            },
            _ => {
                return Err(Error::mismatch(format!(
                    "rank 0 calls for tensor {number}, which this rank does not have"
                )));
            }
        };
        Ok(Some(piece))
    }

    /// This rank's part of a tensor.
    fn part(&self, piece: Piece, state: &[(&str, &[f32])]) -> Vec<f32> {
        let mut part = Vec::new();
        match piece {
            Piece::Param(i) => part = self.local().export(param(self.local(), i)),
            Piece::Buffer(i) => part.extend(self.local().buffer(buffer(self.local(), i))),
            Piece::State { buffer, param: i } => {
                let id = param(self.local(), i);
                self.local().export_of(id, state[buffer].1, &mut part);
            }
        }
        part
    }

    /// How a tensor lies; none for buffers, which are whole.
    fn lies(&self, piece: Piece) -> Option<&Layout> {
        match piece {
            Piece::Param(i) | Piece::State { param: i, .. } => {
                Some(self.layout(param(self.local(), i)))
            }
            Piece::Buffer(_) => None,
        }
    }

    /// A full tensor, on rank 0.
    fn collect(&self, piece: Piece, state: &[(&str, &[f32])]) -> Result<Vec<f32>> {
        self.call(self.number(piece))?;
        let own = self.part(piece, state);
        let Some(layout) = self.lies(piece) else {
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

    /// Sends this rank's part of it to rank 0, if that has none like it.
    fn give(&self, piece: Piece, state: &[(&str, &[f32])]) -> Result<()> {
        match self.lies(piece) {
            Some(layout) if owners(layout).contains(&self.group().rank()) => {
                let part = self.part(piece, state);
                self.group().send(&part, 0).map_err(failed)
            }
            _ => Ok(()),
        }
    }

    /// Gives all ranks their parts of a full tensor, on rank 0; returns its own.
    fn spread(&self, piece: Piece, mut values: Vec<f32>) -> Result<Vec<f32>> {
        // Nothing may fail between the call and what follows it.
        let expected = match (self.lies(piece), piece) {
            (Some(layout), _) => layout.numel(),
            (None, Piece::Buffer(i)) => self.local().buffer_infos()[i].len,
            (None, _) => 0,
        };
        if values.len() != expected {
            return Err(Error::usage(format!(
                "a tensor of {expected} elements has {} in the file",
                values.len()
            )));
        }
        self.call(self.number(piece))?;
        let Some(layout) = self.lies(piece).filter(|layout| !is_whole(layout)) else {
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

    /// This rank's part of a tensor that rank 0 spreads, on other ranks.
    fn receive(&self, piece: Piece) -> Result<Vec<f32>> {
        let (group, rank) = (self.group(), self.group().rank());
        let (len, is_whole) = match (self.lies(piece), piece) {
            (Some(layout), _) => (layout.numel_of(rank), is_whole(layout)),
            (None, Piece::Buffer(i)) => (self.local().buffer_infos()[i].len, true),
            (None, _) => (0, true),
        };
        let mut part = vec![0.0; len];
        match is_whole {
            true => group.broadcast(&mut part, 0).map_err(failed)?,
            false if part.is_empty() => {}
            false => group.recv(&mut part, 0).map_err(failed)?,
        }
        Ok(part)
    }

    /// Reads by `read` on rank 0, which hands out tensors; the optimizer has `state` buffers. What
    /// was read is staged on all ranks.
    fn read<R>(
        &self,
        state: usize,
        read: impl FnOnce(
            &mut dyn FnMut(Piece, Vec<f32>) -> phalanx_base::Result<()>,
        ) -> phalanx_base::Result<R>,
    ) -> Result<(Staged, Option<R>)> {
        let mut staged = Staged::new(self.local(), state);
        if self.group().rank() != 0 {
            let mut outcome = Ok(());
            while let Some(piece) = self.called(state)? {
                let part = self.receive(piece)?;
                outcome = outcome.and_then(|()| staged.put(piece, &part));
            }
            self.agreed(outcome)?;
            return Ok((staged, None));
        }
        let _phase = self.group().phase("loading", DISK);
        let mut lost = None;
        let mut wrong = None;
        let outcome = read(&mut |piece, values| {
            let put = |error: Error, to: &mut Option<Error>| {
                let text = error.to_string();
                *to = Some(error);
                phalanx_base::Error::new(phalanx_base::ErrorKind::Internal, text)
            };
            let part = self.spread(piece, values).map_err(|error| {
                let is_lost = error.kind() == ErrorKind::Comm;
                put(error, if is_lost { &mut lost } else { &mut wrong })
            })?;
            staged
                .put(piece, &part)
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

    fn resumed(
        &mut self,
        call: &str,
        open: impl FnOnce() -> phalanx_base::Result<(Option<State>, Vec<String>)>,
        optimizer: &mut dyn Optimizer,
    ) -> Result<Option<Checkpoint>> {
        self.compared(call.to_owned(), None)?;
        let outline = self.outline();
        let (mut state, mut own) = (None, None);
        let opened = (self.group().rank() == 0).then(|| {
            let _phase = self.group().phase("loading", DISK);
            let found = open().and_then(|(found, mut warnings)| {
                if let Some(state) = &found {
                    state.check(&outline)?;
                    warnings.extend(state.warning());
                }
                Ok((found, warnings))
            });
            match found {
                Ok((None, _)) => Opened::Nothing,
                Ok((Some(found), warnings)) => {
                    let manifest = Box::new(found.manifest().clone());
                    let path = found.path().to_string_lossy().into_owned();
                    state = Some(found);
                    Opened::Found {
                        manifest,
                        path,
                        warnings,
                    }
                }
                Err(error) => {
                    let error = Error::from(error);
                    let told = Told::of(&error);
                    own = Some(error);
                    Opened::Failed(told)
                }
            }
        });
        let opened = self.group().broadcast_object(opened.as_ref(), 0);
        let (manifest, path, warnings) = match opened.map_err(failed)? {
            Opened::Nothing => return Ok(None),
            Opened::Failed(told) => {
                let error = own.unwrap_or_else(|| told.error());
                return Err(error.with_message(self.on_rank(0, &told.text)));
            }
            Opened::Found {
                manifest,
                path,
                warnings,
            } => (*manifest, path, warnings),
        };
        let buffers = &manifest.optimizer_buffers;
        let (staged, _) = self.read(buffers.len(), |take| match &state {
            Some(state) => state.read_each(&outline, take),
            None => Ok(()),
        })?;
        let old = Saved::of(optimizer);
        let flats = staged.state.iter().map(Params::flat);
        let views: Vec<(&str, &[f32])> = buffers.iter().map(|b| &b[..]).zip(flats).collect();
        let updates = manifest.updates(self.local());
        let restored = optimizer.restore(manifest.optimizer_steps, &updates, &views);
        let is_new = restored.is_ok();
        let restored =
            restored.map_err(|e| Error::usage(format!("{path}: it is of another optimizer: {e}")));
        if let Err(error) = self.agreed(restored) {
            if is_new {
                old.put_back(optimizer)?;
            }
            return Err(error);
        }
        *self.local_mut() = staged.params;
        Ok(Some(Checkpoint {
            manifest,
            path: path.into(),
            warnings,
        }))
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

    fn put(&mut self, piece: Piece, part: &[f32]) -> Result<()> {
        match piece {
            Piece::Param(i) => self.params.import(param(&self.params, i), part)?,
            Piece::Buffer(i) => {
                let id = buffer(&self.params, i);
                self.params.buffer_mut(id).copy_from_slice(part);
            }
            Piece::State { buffer, param: i } => {
                let to = &mut self.state[buffer];
                to.import(param(to, i), part)?;
            }
        }
        Ok(())
    }
}

/// An optimizer's state.
struct Saved {
    steps: u64,
    updates: Vec<u64>,
    buffers: Vec<(&'static str, Vec<f32>)>,
}

impl Saved {
    fn of(optimizer: &dyn Optimizer) -> Self {
        let buffers = optimizer.state().into_iter();
        Saved {
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
    Error::comm_while("the ranks' parts of a checkpoint did not travel", cause)
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
