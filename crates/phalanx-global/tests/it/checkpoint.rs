//! Checkpoints that were saved on one mesh and load on another, and what goes wrong with files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use phalanx_checkpoint::state::{Folder, Place, Snapshot, State};
use phalanx_checkpoint::{TensorId, load_params, save_params, save_pth};
use phalanx_global::{CheckpointInfo, ErrorKind, GlobalGrads, GlobalParams, Placement, Sbp};
use phalanx_nn::models::{Gpt, GptConfig};
use phalanx_nn::optim::{Adam, Optimizer, Sgd};
use phalanx_nn::{
    Grads, Init, Layout, ParamInfo, Params, Reduction, Scope, Seed, StepKey, Tape, Threads,
};

use crate::common::{Over, number, on_mesh};

const B: Sbp = Sbp::Broadcast;

/// A mesh, and how parameters and tokens lie on it.
struct Kind {
    name: &'static str,
    mesh: &'static [usize],
    sbp: fn(&ParamInfo) -> Vec<Sbp>,
    gather: bool,
    tokens: fn() -> Vec<Sbp>,
}

fn s0() -> Sbp {
    Sbp::split(0)
}

/// Column and row parallel.
fn tensor_parallel(info: &ParamInfo) -> Sbp {
    let is = |parts: &[&str]| parts.iter().any(|p| info.name.contains(p));
    if is(&["attn.q", "attn.k", "attn.v", "mlp.fc", "lm_head", "wte"]) {
        s0()
    } else if is(&["attn.proj.weight", "mlp.proj.weight"]) {
        Sbp::split(1)
    } else {
        B
    }
}

fn kinds() -> [Kind; 6] {
    let kind = |name, mesh, sbp, gather, tokens| Kind {
        name,
        mesh,
        sbp,
        gather,
        tokens,
    };
    [
        kind("one rank", &[1], |_| vec![B], false, || vec![B]),
        kind("data", &[2], |_| vec![B], false, || vec![s0()]),
        kind(
            "tensor",
            &[2],
            |i| vec![tensor_parallel(i)],
            false,
            || vec![B],
        ),
        kind(
            "both, sharded",
            &[2, 2],
            |i| vec![s0(), tensor_parallel(i)],
            true,
            || vec![s0(), B],
        ),
        kind(
            "tensor, uneven",
            &[3],
            |i| vec![tensor_parallel(i)],
            false,
            || vec![B],
        ),
        kind("fully sharded", &[3], |_| vec![s0()], true, || vec![s0()]),
    ]
}

struct Training<'k> {
    kind: &'k Kind,
    model: Gpt,
    weights: GlobalParams,
    grads: GlobalGrads,
    adam: Adam,
    tape: Tape,
}

fn gpt(seed: u64) -> (Gpt, Params) {
    const CONFIG: GptConfig = GptConfig {
        vocab: 11,
        context: 6,
        layers: 1,
        heads: 4,
        width: 16,
        dropout: 0.1,
    };
    let mut scope = Scope::new(Seed(seed));
    let model = Gpt::new(&mut scope, &CONFIG);
    (model, scope.build().unwrap())
}

impl<'k> Training<'k> {
    fn new(kind: &'k Kind, placement: &Placement, seed: u64) -> Self {
        let (model, params) = gpt(seed);
        let mut weights = GlobalParams::new(placement, &params, kind.sbp).unwrap();
        if kind.gather {
            weights = weights.gather_over("data").unwrap();
        }
        Training {
            kind,
            model,
            grads: weights.grads(),
            adam: Adam::new(weights.local(), 1e-2),
            weights,
            tape: Tape::new(Threads(1)),
        }
    }

    fn steps(&mut self, steps: std::ops::Range<u64>) -> Vec<u32> {
        let mut losses = Vec::new();
        for i in steps {
            let step = self.weights.step(&mut self.tape, StepKey::new(0, i));
            let text: Vec<u32> = (0..8 * 7)
                .map(|k| ((k * k + i as usize) % 11) as u32)
                .collect();
            let from = |first: usize| -> Vec<u32> {
                text.chunks(7)
                    .flat_map(|row| row[first..first + 6].to_vec())
                    .collect()
            };
            let tokens = (self.kind.tokens)();
            let x = step.indices(&from(0), &[8, 6], &tokens).unwrap();
            let y = step.indices(&from(1), &[8, 6], &tokens).unwrap();
            let logits = self.model.forward(&step, &x, (8, 6)).unwrap();
            let loss = logits.cross_entropy(&y, Reduction::Mean).unwrap();
            losses.push(loss.item().unwrap().to_bits());
            loss.backward(&mut self.grads).unwrap();
            drop(step);
            self.adam
                .step(self.weights.local_mut(), &self.grads)
                .unwrap();
        }
        losses
    }

    fn full(&self) -> Full {
        full(&self.weights, &self.adam)
    }
}

/// Everything in a checkpoint, as bits.
#[derive(Clone, Debug, PartialEq)]
struct Full {
    weights: Vec<Vec<u32>>,
    buffers: Vec<u32>,
    steps: u64,
    state: Vec<(&'static str, Vec<Vec<u32>>)>,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn full(weights: &GlobalParams, optimizer: &dyn Optimizer) -> Full {
    let ids = || weights.local().ids();
    let of = |flat: &[f32]| {
        ids()
            .map(|id| bits(&weights.full_of(id, flat).unwrap()))
            .collect()
    };
    Full {
        weights: of(weights.local().flat()),
        buffers: bits(weights.local().buffers_flat()),
        steps: optimizer.steps(),
        state: (optimizer.state().into_iter())
            .map(|(name, flat)| (name, of(flat)))
            .collect(),
    }
}

fn at(step: u64) -> CheckpointInfo {
    CheckpointInfo {
        place: Place {
            step,
            step_in_epoch: step,
            samples: 8 * step,
            epoch: 0,
        },
        facts: BTreeMap::from([("seed".to_owned(), "1".to_owned())]),
        progress: "of the test".into(),
        ..CheckpointInfo::default()
    }
}

#[test]
fn a_checkpoint_of_any_mesh_loads_on_any_other() {
    let dir = tempfile::tempdir().unwrap();
    let folder = |kind: &Kind| Folder::new(&dir.path().join(kind.name), 2);
    let kinds = kinds();
    let mut saved: Vec<(Full, Vec<u32>, Full)> = Vec::new();
    for kind in &kinds {
        let mut made = on_mesh(Over::Thread, kind.mesh, |p| {
            let mut training = Training::new(kind, p, 1);
            training.steps(0..3);
            let before = training.full();
            let path = (training.weights).save(&folder(kind), &training.adam, &at(3));
            assert!(path.unwrap().path.ends_with("step-000000003.json"));
            assert_eq!(training.full(), before);
            let losses = training.steps(3..6);
            (before, losses, training.full())
        });
        assert!(made.iter().all(|rank| rank == &made[0]), "{}", kind.name);
        saved.push(made.swap_remove(0));
    }
    for to in &kinds {
        on_mesh(Over::Thread, to.mesh, |p| {
            for (from, (then, losses, end)) in kinds.iter().zip(&saved) {
                let mut training = Training::new(to, p, 2);
                let (weights, adam) = (&mut training.weights, &mut training.adam);
                let found = weights.load_newest(&folder(from), adam).unwrap().unwrap();
                assert_eq!(found.manifest.place, at(3).place);
                assert_eq!(found.manifest.progress, at(3).progress);
                let names = format!("from {} to {}", from.name, to.name);
                assert_eq!(training.full(), *then, "{names}");
                if from.name == to.name {
                    assert_eq!(training.steps(3..6), *losses, "{names}");
                    assert_eq!(training.full(), *end, "{names}");
                }
            }
        });
    }
    // Also as an ordinary checkpoint of one rank, without a mesh.
    for (kind, (then, ..)) in kinds.iter().zip(&saved) {
        let (_, mut params) = gpt(3);
        let (state, damaged) = folder(kind).newest().unwrap();
        assert_eq!(damaged, [""; 0]);
        state.unwrap().restore_params(&mut params).unwrap();
        let values: Vec<_> = params.ids().map(|id| bits(&params.export(id))).collect();
        assert_eq!(values, then.weights, "{}", kind.name);
    }
}

/// A model with a convolution, buffers, and a parameter that some of three ranks have nothing of.
fn odd(seed: usize) -> Params {
    let mut scope = Scope::new(Seed(0));
    let constant = Init::Constant(0.0);
    let mut conv = scope.enter("conv");
    conv.param("weight", &[4, 3, 2, 2], Layout::Conv, constant);
    conv.param("bias", &[4], Layout::Same, constant);
    scope
        .enter("few")
        .param("weight", &[2, 5], Layout::Same, constant);
    let mut norm = scope.enter("norm");
    norm.param("weight", &[4], Layout::Same, constant);
    norm.buffer("running_mean", &[4], seed as f32);
    norm.buffer("num_batches_tracked", &[], 5.0);
    let mut params = scope.build().unwrap();
    for id in params.ids() {
        let len = params.infos()[id.index()].len;
        let values: Vec<f32> = (0..len).map(|i| number(&[seed, id.index(), i])).collect();
        params.import(id, &values).unwrap();
    }
    params
}

fn split(dims: usize) -> impl Fn(&ParamInfo) -> Vec<Sbp> {
    move |info| match (dims, info.name.as_str()) {
        (1, "norm.weight") => vec![B],
        (1, _) => vec![s0()],
        (_, "conv.weight") => vec![Sbp::split(1), s0()],
        (_, "norm.weight") => vec![B, s0()],
        _ => vec![s0(), B],
    }
}

/// One step whose gradients are the weights.
fn one_step(params: &mut Params, adam: &mut Adam) {
    let mut grads = Grads::like(params);
    grads.flat_mut().copy_from_slice(params.flat());
    adam.step(params, &grads).unwrap();
}

/// All files in a folder.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    let files = entries.filter(|path| path.is_file());
    files.map(|p| (name(&p), fs::read(&p).unwrap())).collect()
}

const MESHES: [&[usize]; 4] = [&[1], &[2], &[3], &[2, 2]];

#[test]
fn files_are_those_of_one_rank_byte_by_byte() {
    let dir = tempfile::tempdir().unwrap();
    let mut whole = odd(1);
    let mut adam = Adam::new(&whole, 1e-2);
    one_step(&mut whole, &mut adam);
    let write = |to: &Path| {
        let info = at(7);
        let snapshot = Snapshot::take(&whole, &adam, info.place, info.facts, info.progress);
        Folder::new(to, 1).save(&snapshot).unwrap();
        save_pth(&to.join("net.pth"), &whole).unwrap();
        save_params(&to.join("net.safetensors"), &whole, &BTreeMap::new()).unwrap();
    };
    write(&dir.path().join("serial"));
    let serial = files(&dir.path().join("serial"));
    assert_eq!(serial.len(), 4);
    for (i, mesh) in MESHES.into_iter().enumerate() {
        let to = dir.path().join(i.to_string());
        on_mesh(Over::Thread, mesh, |p| {
            let mut weights = GlobalParams::new(p, &odd(1), split(mesh.len())).unwrap();
            let mut adam = Adam::new(weights.local(), 1e-2);
            one_step(weights.local_mut(), &mut adam);
            weights.save(&Folder::new(&to, 1), &adam, &at(7)).unwrap();
            weights.save_pth(&to.join("net.pth")).unwrap();
            (weights.save_weights(&to.join("net.safetensors"), &BTreeMap::new())).unwrap();
        });
        assert!(files(&to) == serial, "{mesh:?}");
        // And back, each format.
        on_mesh(Over::Shm, mesh, |p| {
            for name in ["net.pth", "net.safetensors", "step-000000007.json"] {
                let from = dir.path().join("serial").join(name);
                let mut weights = GlobalParams::new(p, &odd(2), split(mesh.len())).unwrap();
                weights.load_weights(&from).unwrap();
                let expected = GlobalParams::new(p, &whole, split(mesh.len())).unwrap();
                let (got, wanted) = (weights.local(), expected.local());
                assert_eq!(bits(got.flat()), bits(wanted.flat()), "{mesh:?} {name}");
                assert_eq!(got.buffers_flat(), wanted.buffers_flat(), "{mesh:?} {name}");
            }
        });
    }
    let mut read = odd(2);
    load_params(&dir.path().join("3/net.pth"), &mut read).unwrap();
    assert_eq!(bits(read.flat()), bits(whole.flat()));
}

#[test]
fn a_failing_save_is_everybodys_error_and_harms_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let at_path = |name: &str| dir.path().join(name);
    fs::write(at_path("file"), "").unwrap();
    let kind = &kinds()[3];
    on_mesh(Over::Thread, kind.mesh, |p| {
        let mut training = Training::new(kind, p, 1);
        training.steps(0..1);
        let (weights, adam) = (&training.weights, &training.adam);
        let folder = Folder::new(&at_path("run"), 2);
        weights.save(&folder, adam, &at(1)).unwrap();
        p.group().barrier().unwrap();
        if p.group().rank() == 0 {
            // In the way of the manifest, which comes last.
            fs::create_dir_all(at_path("run/step-000000002.json/x")).unwrap();
        }
        let before = files(&at_path("run"));
        p.group().barrier().unwrap();
        let error = weights.save(&folder, adam, &at(2)).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::File);
        assert!(text.starts_with("rank 0: cannot write"), "{text}");
        assert!(text.contains("step-000000002.json"), "{text}");
        assert!(
            files(&at_path("run")) == before,
            "the first one is still there"
        );
        // A folder that cannot be made, one that is missing, and a disk that is full half way.
        let none = Folder::new(&at_path("file/x"), 1);
        let error = weights.save(&none, adam, &at(2)).unwrap_err();
        assert!(error.to_string().contains("file is a file"), "{error}");
        let error = weights.save_pth(&at_path("none/net.pth")).unwrap_err();
        assert!(
            error.to_string().contains("none/net.pth: No such"),
            "{error}"
        );
        for full in [
            weights.save_pth("/dev/full".as_ref()),
            weights.save_weights("/dev/full".as_ref(), &BTreeMap::new()),
        ] {
            let error = full.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::File);
            assert!(error.to_string().contains("the disk is full"), "{error}");
        }
        // An optimizer of other parameters.
        let foreign = Adam::new(&odd(1), 1e-2);
        let error = weights.save(&folder, &foreign, &at(2)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        // A tensor that does not exist.
        for tensor in [
            TensorId::Param(99),
            TensorId::State {
                buffer: 0,
                param: 0,
            },
        ] {
            let error = weights.gather_each(None, |_, values| Ok(values(tensor)?));
            let error = error.unwrap_err().to_string();
            assert!(error.contains("there is no tensor"), "{error}");
        }
        // What was saved still loads, and the group is usable.
        let then = training.full();
        let mut other = Training::new(kind, p, 2);
        let path = at_path("run/step-000000001.json");
        other.weights.load(&path, &mut other.adam).unwrap();
        assert_eq!(other.full(), then);
    });
}

#[test]
fn damaged_and_foreign_files_change_nothing_on_any_rank() {
    let dir = tempfile::tempdir().unwrap();
    let at_path = |name: &str| dir.path().join(name);
    let mut whole = odd(1);
    let mut adam = Adam::new(&whole, 1e-2);
    one_step(&mut whole, &mut adam);
    let info = at(1);
    let save = |name: &str, params: &Params, optimizer: &dyn Optimizer| {
        let nothing = serde_json::Value::Null;
        let snapshot = Snapshot::take(params, optimizer, info.place, BTreeMap::new(), nothing);
        Folder::new(&at_path(name), 1).save(&snapshot).unwrap();
        at_path(name).join("step-000000001.json")
    };
    let good = save("good", &whole, &adam);
    let cut = save("cut", &whole, &adam);
    let data = at_path("cut/step-000000001.safetensors");
    let bytes = fs::read(&data).unwrap();
    fs::write(&data, &bytes[..bytes.len() - 4]).unwrap();
    let flipped = save("flipped", &whole, &adam);
    let mut bytes = bytes;
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(at_path("flipped/step-000000001.safetensors"), &bytes).unwrap();
    let other = |shape: &[usize], more: bool| {
        let mut scope = Scope::new(Seed(0));
        let constant = Init::Constant(0.0);
        let mut conv = scope.enter("conv");
        conv.param("weight", &[4, 3, 2, 2], Layout::Conv, constant);
        if more {
            conv.param("bias", &[4], Layout::Same, constant);
        }
        scope
            .enter("few")
            .param("weight", shape, Layout::Same, constant);
        let mut norm = scope.enter("norm");
        norm.param("weight", &[4], Layout::Same, constant);
        norm.buffer("running_mean", &[4], 0.0);
        norm.buffer("num_batches_tracked", &[], 0.0);
        scope.build().unwrap()
    };
    let wide = other(&[2, 6], true);
    let wide_path = save("wide", &wide, &Adam::new(&wide, 0.1));
    save_pth(&at_path("wide.pth"), &wide).unwrap();
    let fewer = other(&[2, 5], false);
    let fewer_path = save("fewer", &fewer, &Adam::new(&fewer, 0.1));
    save_params(&at_path("fewer.safetensors"), &fewer, &BTreeMap::new()).unwrap();
    fs::write(
        at_path("cut.pth"),
        &fs::read(at_path("wide.pth")).unwrap()[..900],
    )
    .unwrap();
    let sgd = save("sgd", &whole, &Sgd::new(&whole, 0.1));
    on_mesh(Over::Thread, &[3], |p| {
        let mut weights = GlobalParams::new(p, &odd(2), split(1)).unwrap();
        let mut adam = Adam::new(weights.local(), 1e-2);
        one_step(weights.local_mut(), &mut adam);
        let before = full(&weights, &adam);
        for (path, words) in [
            (&cut, "it may be truncated"),
            (&flipped, "is damaged: its SHA-256"),
            (&wide_path, "few.weight is F32 of shape [2, 6]"),
            (&fewer_path, "it lacks model.conv.bias"),
            (&at_path("none.json"), "no checkpoint"),
        ] {
            let error = weights.load(path, &mut adam).unwrap_err();
            let text = error.to_string();
            assert_eq!(error.kind(), ErrorKind::File, "{text}");
            assert!(text.starts_with("rank 0: "), "{text}");
            assert!(text.contains(words), "{text}");
            assert!(text.contains(&*dir.path().to_string_lossy()), "{text}");
            let source = std::error::Error::source(&error).is_some();
            assert_eq!(source, p.group().rank() == 0);
        }
        for (name, words) in [
            ("wide.pth", "few.weight is float32 of shape [2, 6]"),
            ("fewer.safetensors", "it lacks conv.bias"),
            ("cut.pth", "cut.pth"),
            ("none.pth", "no checkpoint"),
        ] {
            let error = weights.load_weights(&at_path(name)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::File, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        // Of another optimizer: none has its state.
        let mut other = Sgd::new(weights.local(), 0.1);
        let error = weights.load(&good, &mut other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains("another optimizer"), "{error}");
        let fresh = weights.load(&sgd, &mut adam).unwrap();
        assert_eq!((fresh.manifest.optimizer_steps, adam.steps()), (0, 0));
        weights.load(&good, &mut adam).unwrap();
        assert_ne!(full(&weights, &adam), before);
        assert_eq!(adam.updates(), [1; 4]);
    });
}

#[test]
fn nothing_changes_before_every_rank_has_accepted_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut whole = odd(1);
    let mut adam = Adam::new(&whole, 1e-2);
    one_step(&mut whole, &mut adam);
    let info = at(1);
    let snapshot = Snapshot::take(&whole, &adam, info.place, info.facts, info.progress);
    let path = Folder::new(dir.path(), 1).save(&snapshot).unwrap().path;
    assert_eq!(State::load(&path).unwrap().manifest().optimizer_steps, 1);
    on_mesh(Over::Thread, &[2], |p| {
        let mut weights = GlobalParams::new(p, &odd(2), split(1)).unwrap();
        let before = bits(weights.local().flat());
        let mut adam = Adam::new(weights.local(), 1e-2);
        let mut sgd = Sgd::new(weights.local(), 0.1);
        let rank = p.group().rank();
        let error = match rank {
            0 => weights.load(&path, &mut adam),
            _ => weights.load(&path, &mut sgd),
        }
        .unwrap_err();
        assert!(error.to_string().starts_with("rank 1: "), "{error}");
        assert_eq!(bits(weights.local().flat()), before);
        assert_eq!((adam.steps(), adam.state().len()), (0, 0));
        // Nor does anybody wait where the ranks call different things, or have different models.
        let to = dir.path().join("net.pth");
        let error = match rank {
            0 => weights.save_pth(&to),
            _ => weights.save_weights(&to, &BTreeMap::new()),
        }
        .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        let other = GlobalParams::new(p, &odd(2), |_| vec![if rank == 0 { B } else { s0() }]);
        let error = other.unwrap().save_pth(&to).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert!(!to.exists());
    });
}
