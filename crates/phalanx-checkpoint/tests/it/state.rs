//! Resumable state: what comes back, what stays, and what survives a kill.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use phalanx_base::ErrorKind;
use phalanx_checkpoint::digest::optimizer_sha256;
use phalanx_checkpoint::state::{
    Background, Folder, OptimizerState, Place, Snapshot, State, Streamed,
};
use phalanx_checkpoint::{Outline, TensorId, save_pth_with, weights_sha256};
use phalanx_nn::optim::{Adam, Optimizer, Sgd};
use phalanx_nn::{GradView, Grads, Init, Layout, ParamId, Params, Scope, Seed};
use serde_json::json;
use sha2::{Digest, Sha256};

fn model(value: f32) -> Params {
    let mut scope = Scope::new(Seed(1));
    let constant = Init::Constant(value);
    let mut conv = scope.enter("conv");
    conv.param("weight", &[4, 3, 2, 2], Layout::Conv, constant);
    conv.param("bias", &[4], Layout::Same, constant);
    let mut fc = scope.enter("fc");
    fc.param("weight", &[5, 7], Layout::Same, constant);
    scope.enter("norm").buffer("running_mean", &[4], value);
    scope.build().unwrap()
}

/// Gradients that differ from element to element; `conv.bias` has none in every third step.
struct Made {
    grads: Grads,
    idle: Option<ParamId>,
}

impl GradView for Made {
    fn grad(&self, param: ParamId) -> &[f32] {
        self.grads.grad(param)
    }

    fn untouched(&self, param: ParamId) -> bool {
        self.idle == Some(param)
    }
}

fn gradients(params: &Params, seed: u64) -> Made {
    let mut grads = Grads::like(params);
    for info in params.infos() {
        let place = info.offset..info.offset + info.len;
        for (i, value) in (0u64..).zip(&mut grads.flat_mut()[place]) {
            *value = ((i * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0;
        }
    }
    let idle = params.find("conv.bias").filter(|_| seed.is_multiple_of(3));
    Made { grads, idle }
}

fn at(step: u64) -> Place {
    Place {
        epoch: 2,
        samples: 96,
        step_in_epoch: 3,
        step,
    }
}

fn facts() -> BTreeMap<String, String> {
    BTreeMap::from([("seed".to_owned(), "7".to_owned())])
}

fn snapshot(params: &Params, optimizer: &dyn Optimizer, step: u64) -> Snapshot {
    Snapshot::take(
        params,
        optimizer,
        at(step),
        facts(),
        json!({"accuracies": [0.5]}),
    )
}

fn optimizers(params: &Params) -> Vec<Box<dyn Optimizer>> {
    vec![
        Box::new(Sgd::new(params, 0.1)),
        Box::new(Sgd::new(params, 0.1).momentum(0.9)),
        Box::new(Adam::new(params, 0.01)),
        Box::new(Adam::adamw(params, 0.01).amsgrad(true)),
    ]
}

#[test]
fn a_training_goes_on_as_if_it_had_not_stopped() {
    let dir = tempfile::tempdir().unwrap();
    for kind in 0..optimizers(&model(0.0)).len() {
        let folder = Folder::new(&dir.path().join(kind.to_string()), 2);
        let mut params = model(0.5);
        let mut optimizer = optimizers(&params).swap_remove(kind);
        for seed in 0..3 {
            let grads = gradients(&params, seed);
            optimizer.step(&mut params, &grads).unwrap();
        }
        let taken = snapshot(&params, optimizer.as_ref(), 3);
        folder.save(&taken).unwrap();

        let (state, damaged) = folder.newest().unwrap();
        let state = state.unwrap();
        assert!(damaged.is_empty());
        assert_eq!(state.manifest().place, at(3));
        assert_eq!(state.manifest().facts, facts());
        let updates = BTreeMap::from([("conv.bias".to_owned(), 2)]);
        assert_eq!(state.manifest().optimizer_updates, updates);
        assert_eq!(state.manifest().progress, json!({"accuracies": [0.5]}));
        let mut resumed = model(-1.0);
        let mut theirs = optimizers(&resumed).swap_remove(kind);
        state.restore_params(&mut resumed).unwrap();
        state.restore_optimizer(&resumed, theirs.as_mut()).unwrap();
        for seed in 3..6 {
            let grads = gradients(&params, seed);
            optimizer.step(&mut params, &grads).unwrap();
            let grads = gradients(&resumed, seed);
            theirs.step(&mut resumed, &grads).unwrap();
        }
        assert_eq!(weights_sha256(&params), weights_sha256(&resumed));
        assert_eq!(
            optimizer_sha256(optimizer.as_ref()),
            optimizer_sha256(theirs.as_ref())
        );
    }
}

#[test]
fn another_model_or_optimizer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::new(dir.path(), 1);
    let params = model(0.5);
    let mut adam = Adam::new(&params, 0.01);
    adam.step(&mut params.clone(), &gradients(&params, 1))
        .unwrap();
    folder.save(&snapshot(&params, &adam, 1)).unwrap();
    let state = folder.newest().unwrap().0.unwrap();
    let mut sgd = Sgd::new(&params, 0.1).momentum(0.9);
    let error = state.restore_optimizer(&params, &mut sgd).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Data);
    assert!(
        error.to_string().contains("of another optimizer"),
        "{error}"
    );
    for (shape, extra, reason) in [
        (
            [5, 8],
            false,
            "model.fc.weight is F32 of shape [5, 7], expected F32 of shape [5, 8]",
        ),
        ([5, 7], true, "it lacks model.more"),
    ] {
        let mut scope = Scope::new(Seed(1));
        let zero = Init::Constant(0.0);
        scope.param("conv.weight", &[4, 3, 2, 2], Layout::Conv, zero);
        scope.param("conv.bias", &[4], Layout::Same, zero);
        scope.param("fc.weight", &shape, Layout::Same, zero);
        scope.buffer("norm.running_mean", &[4], 0.0);
        if extra {
            scope.param("more", &[1], Layout::Same, zero);
        }
        let mut other = scope.build().unwrap();
        let error = state.restore_params(&mut other).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
    let mut smaller = Scope::new(Seed(1));
    smaller.param("conv.bias", &[4], Layout::Same, Init::Constant(0.0));
    let error = state
        .restore_params(&mut smaller.build().unwrap())
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("the model does not know conv.weight, which it has"),
        "{error}"
    );
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap().flatten();
    let mut names: Vec<String> = entries
        .map(|e| e.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn only_the_newest_are_kept_and_nothing_else_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::new(dir.path(), 2);
    assert!(folder.newest().unwrap().0.is_none());
    let params = model(0.5);
    let sgd = Sgd::new(&params, 0.1);
    fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    // What a killed save leaves: data without a manifest.
    fs::write(dir.path().join("step-000000007.safetensors"), "old").unwrap();
    for step in [8, 9, 100, 1_000_000_000] {
        folder.save(&snapshot(&params, &sgd, step)).unwrap();
    }
    assert_eq!(
        names(dir.path()),
        [
            "notes.txt",
            "step-000000100.json",
            "step-000000100.safetensors",
            "step-1000000000.json",
            "step-1000000000.safetensors",
        ]
    );
    // The same step once more: its old data stays until the manifest is new.
    folder
        .save(&snapshot(&model(0.25), &sgd, 1_000_000_000))
        .unwrap();
    assert!(names(dir.path()).contains(&"step-1000000000-2.safetensors".to_owned()));
    assert_eq!(names(dir.path()).len(), 5);
    let mut read = model(0.0);
    let state = folder.newest().unwrap().0.unwrap();
    state.restore_params(&mut read).unwrap();
    assert_eq!(weights_sha256(&read), weights_sha256(&model(0.25)));
    folder.clear().unwrap();
    assert_eq!(names(dir.path()), ["notes.txt"]);
}

#[test]
fn what_was_just_saved_stays_whatever_its_step() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::new(dir.path(), 2);
    let params = model(0.5);
    let sgd = Sgd::new(&params, 0.1);
    for step in [20, 40] {
        folder.save(&snapshot(&params, &sgd, step)).unwrap();
    }
    let saved = folder.save(&snapshot(&params, &sgd, 7)).unwrap().path;
    assert_eq!(State::load(&saved).unwrap().manifest().place, at(7));
    let stems = ["step-000000007", "step-000000040"];
    let files = stems.map(|stem| ["json", "safetensors"].map(|e| format!("{stem}.{e}")));
    assert_eq!(names(dir.path()), files.concat());
}

#[test]
fn a_branch_that_is_left_is_kept_but_not_found() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::new(dir.path(), 2);
    let params = model(0.5);
    let sgd = Sgd::new(&params, 0.1);
    for step in [20, 40] {
        folder.save(&snapshot(&params, &sgd, step)).unwrap();
    }
    let newest = |folder: &Folder| {
        let state = folder.newest().unwrap().0;
        state.map(|state| state.manifest().place.step)
    };
    assert!(folder.set_aside(Some(40)).unwrap().is_empty());
    let aside = folder.set_aside(Some(20)).unwrap();
    assert_eq!(aside, [dir.path().join("aside-step-000000040.json")]);
    assert_eq!(newest(&folder), Some(20));
    // Saves and rotations later, of the same step too, its data are still there.
    for step in [30, 40, 50] {
        folder.save(&snapshot(&model(0.25), &sgd, step)).unwrap();
    }
    let mut read = model(0.0);
    let state = State::load(&aside[0]).unwrap();
    state.restore_params(&mut read).unwrap();
    assert_eq!(weights_sha256(&read), weights_sha256(&params));
    assert_eq!(newest(&folder), Some(50));
    assert_eq!(folder.set_aside(None).unwrap().len(), 2);
    assert_eq!(newest(&folder), None);
    folder.clear().unwrap();
    assert!(names(dir.path()).is_empty());
}

/// The same manifest with the hash that belongs to it.
fn signed(text: &str) -> String {
    let (before, rest) = text.rsplit_once("\"manifest_sha256\": \"").unwrap();
    let with = |hash: &str| format!("{before}\"manifest_sha256\": \"{hash}{}", &rest[64..]);
    with(&hex::encode(Sha256::digest(with(&"0".repeat(64)))))
}

#[test]
fn no_wrong_digit_in_a_manifest_goes_unnoticed() {
    let dir = tempfile::tempdir().unwrap();
    let params = model(0.5);
    let sgd = Sgd::new(&params, 0.1);
    let path = Folder::new(dir.path(), 1)
        .save(&snapshot(&params, &sgd, 3))
        .unwrap()
        .path;
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(signed(&text), text);
    let digits: Vec<usize> = (0..text.len())
        .filter(|&i| text.as_bytes()[i].is_ascii_digit())
        .collect();
    assert!(digits.len() > 100);
    for at in digits {
        let mut bytes = text.clone().into_bytes();
        bytes[at] ^= 1;
        fs::write(&path, bytes).unwrap();
        let error = State::load(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Data, "{error}");
    }
    fs::write(&path, text).unwrap();
    State::load(&path).unwrap();
}

#[test]
fn damaged_checkpoints_are_passed_over_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::new(dir.path(), 9);
    let params = model(0.5);
    let sgd = Sgd::new(&params, 0.1);
    for step in 1..=7 {
        folder.save(&snapshot(&params, &sgd, step)).unwrap();
    }
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let path = |step: u32, end: &str| dir.path().join(format!("step-00000000{step}.{end}"));
    let change = |path: &Path, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = fs::read(path).unwrap();
        change(&mut bytes);
        fs::write(path, bytes).unwrap();
    };
    change(&path(6, "json"), &|bytes| bytes.truncate(100));
    change(&path(5, "safetensors"), &|bytes| bytes.truncate(100));
    change(&path(4, "safetensors"), &|bytes| {
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
    });
    fs::remove_file(path(3, "safetensors")).unwrap();
    change(&path(2, "json"), &|bytes| {
        *bytes = signed(&text(bytes).replace("step-000000002", "../step-000000001")).into_bytes();
    });
    change(&path(7, "json"), &|bytes| {
        *bytes = text(bytes)
            .replace("\"samples\": 96", "\"samples\": 97")
            .into_bytes();
    });
    let (state, damaged) = folder.newest().unwrap();
    assert_eq!(state.unwrap().manifest().place.step, 1);
    let reasons = [
        ("step-000000007.json", "it was damaged or edited"),
        ("step-000000006.json", "not a checkpoint manifest"),
        ("step-000000005.safetensors", "it may be truncated"),
        ("step-000000004.safetensors", "is damaged: its SHA-256"),
        ("step-000000003.safetensors", "no checkpoint"),
        ("step-000000002.json", "is not in the same folder"),
    ];
    assert_eq!(damaged.len(), reasons.len());
    for (text, (file, reason)) in damaged.iter().zip(reasons) {
        assert!(text.contains(file) && text.contains(reason), "{text}");
    }
    fs::remove_file(path(1, "safetensors")).unwrap();
    let error = folder.newest().unwrap_err();
    assert!(error.to_string().contains("no checkpoint in"), "{error}");
    assert!(error.to_string().contains("step-000000007.json"), "{error}");
}

/// The model with `value` as the last of one tensor's numbers.
fn spoiled(tensor: &str, value: f32) -> Params {
    let mut params = model(0.5);
    match params.find(tensor) {
        Some(id) => *params.get_mut(id).last_mut().unwrap() = value,
        None => params.buffers_flat_mut()[0] = value,
    }
    params
}

#[test]
fn a_checkpoint_says_which_tensor_is_not_finite() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::new(dir.path(), 9);
    let sgd = Sgd::new(&model(0.5), 0.1).momentum(0.9);
    let text = |step: u64| {
        let name = phalanx_checkpoint::state::manifest_name(step);
        fs::read_to_string(dir.path().join(name)).unwrap()
    };
    let large = spoiled("fc.weight", f32::MAX);
    assert_eq!(
        folder.save(&snapshot(&large, &sgd, 1)).unwrap().not_finite,
        None
    );
    // A finite one is written as before.
    assert!(!text(1).contains("finite"), "{}", text(1));
    for (step, tensor, value) in [
        (2, "conv.bias", f32::INFINITY),
        (3, "fc.weight", f32::NAN),
        (4, "norm.running_mean", f32::NEG_INFINITY),
    ] {
        let saved = folder.save(&snapshot(&spoiled(tensor, value), &sgd, step));
        assert_eq!(saved.unwrap().not_finite.as_deref(), Some(tensor));
        let line = format!("\n  \"not_finite\": \"{tensor}\",\n");
        assert!(text(step).contains(&line), "{}", text(step));
        let name = phalanx_checkpoint::state::manifest_name(step);
        let state = State::load(&dir.path().join(name)).unwrap();
        assert!(
            state
                .warning()
                .unwrap()
                .ends_with(&format!("(first in {tensor})"))
        );
    }
    let (state, passed) = folder.newest().unwrap();
    assert_eq!(state.unwrap().manifest().place.step, 1);
    for (text, file) in passed
        .iter()
        .zip(["000000004.json", "000000003.json", "000000002.json"])
    {
        assert!(text.starts_with("passed over a checkpoint: "), "{text}");
        assert!(
            text.contains(file) && text.contains("infinite or NaN weights"),
            "{text}"
        );
    }
    assert_eq!(passed.len(), 3);
    // If the only finite one is damaged, there is nothing better than the newest.
    fs::remove_file(dir.path().join("step-000000001.safetensors")).unwrap();
    let (state, passed) = folder.newest().unwrap();
    assert_eq!(state.unwrap().manifest().place.step, 4);
    assert!(passed.is_empty(), "{passed:?}");
}

#[test]
fn the_last_finite_checkpoint_is_not_rotated_out() {
    for keep in [1, 2, 3] {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::new(dir.path(), keep);
        let sgd = Sgd::new(&model(0.5), 0.1);
        let nan = spoiled("fc.weight", f32::NAN);
        let steps = || -> Vec<u64> {
            let of = |name: &String| {
                name.strip_prefix("step-")?
                    .strip_suffix(".json")?
                    .parse()
                    .ok()
            };
            let steps: Vec<u64> = names(dir.path()).iter().filter_map(of).collect();
            // Each with its data, and nothing else.
            assert_eq!(names(dir.path()).len(), 2 * steps.len());
            steps
        };
        let save =
            |params: &Params, step| drop(folder.save(&snapshot(params, &sgd, step)).unwrap());
        for step in 1..=4 {
            save(&model(0.5), step);
        }
        for step in 5..=9 {
            save(&nan, step);
        }
        let mut left: Vec<u64> = (10 - keep as u64..=9).collect();
        left.insert(0, 4);
        assert_eq!(steps(), left, "keep {keep}");
        // Not in the way of the rotation of finite ones.
        save(&model(0.5), 10);
        let newest: Vec<u64> = (11 - keep as u64..=10).collect();
        assert_eq!(steps(), newest, "keep {keep}");
        // Where there never was a finite one, as many as asked for.
        folder.clear().unwrap();
        assert!(names(dir.path()).is_empty());
        for step in 1..=5 {
            save(&nan, step);
        }
        assert_eq!(steps(), (6 - keep as u64..=5).collect::<Vec<_>>());
        folder.clear().unwrap();
        assert!(names(dir.path()).is_empty());
    }
}

#[test]
fn a_save_in_the_background_has_the_state_of_its_beginning() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::new(dir.path(), 3);
    let mut saver = Background::new(folder.clone());
    assert!(saver.poll().unwrap().is_none());
    let mut params = model(1.0);
    let sgd = Sgd::new(&params, 0.1);
    for step in 1..=3 {
        saver.begin(snapshot(&params, &sgd, step)).unwrap();
        params.flat_mut().fill(-(step as f32));
    }
    assert!(saver.wait().unwrap().is_some());
    let state = folder.newest().unwrap().0.unwrap();
    assert_eq!(state.manifest().place.step, 3);
    let mut read = model(0.0);
    state.restore_params(&mut read).unwrap();
    assert_eq!(read.get(read.find("conv.bias").unwrap()), [-2.0; 4]);
    // Errors come at the next call, and by name.
    fs::remove_dir_all(dir.path()).unwrap();
    fs::write(dir.path(), "a file").unwrap();
    saver.begin(snapshot(&params, &sgd, 4)).unwrap();
    let error = saver.wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(
        error.to_string().contains("is a file, not a folder"),
        "{error}"
    );
    assert!(saver.poll().unwrap().is_none());
    fs::remove_file(dir.path()).unwrap();
    fs::create_dir(dir.path()).unwrap();
}

/// Set for the child that fills a small disk: where it is mounted.
const SMALL_DISK: &str = "PHALANX_TEST_SMALL_DISK";

/// In a child of the next test, on a disk of 300 KiB.
#[test]
fn fills_a_small_disk() {
    let Some(dir) = std::env::var_os(SMALL_DISK) else {
        return;
    };
    let folder = Folder::new(Path::new(&dir), 100);
    let mut scope = Scope::new(Seed(1));
    scope.param("weight", &[100, 100], Layout::Same, Init::Constant(0.5));
    let params = scope.build().unwrap();
    let sgd = Sgd::new(&params, 0.1);
    let mut saved = 0;
    let error = loop {
        match folder.save(&snapshot(&params, &sgd, saved + 1)) {
            Ok(_) => saved += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::DiskFull, "{error}");
    assert!(error.to_string().contains("the disk is full"), "{error}");
    assert!(error.to_string().contains("step-0000"), "{error}");
    // Those before are whole, and nothing of the failed one is left.
    let (state, damaged) = folder.newest().unwrap();
    assert_eq!(state.unwrap().manifest().place.step, saved);
    assert!(damaged.is_empty() && saved >= 3, "{damaged:?} {saved}");
    assert_eq!(names(Path::new(&dir)).len() as u64, 2 * saved);
    // With room again, it goes on.
    Folder::new(Path::new(&dir), 1).clear().unwrap();
    folder.save(&snapshot(&params, &sgd, 77)).unwrap();
    println!("the small disk was full");
}

#[test]
fn a_full_disk_leaves_the_checkpoints_before_intact() {
    if std::env::var_os(SMALL_DISK).is_some() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // In a mount namespace of its own, which ends with the child.
    let out = Command::new("unshare")
        .args(["--mount", "sh", "-c"])
        .arg("mount -t tmpfs -o size=300k none \"$0\" && echo mounted && exec \"$@\"")
        .arg(dir.path())
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "state::fills_a_small_disk", "--nocapture"])
        .env(SMALL_DISK, dir.path())
        .output();
    let Ok(out) = out else {
        eprintln!("skipped: there is no unshare");
        return;
    };
    let text = String::from_utf8_lossy(&out.stdout);
    if !text.contains("mounted") {
        eprintln!("skipped: a small disk cannot be mounted here (it needs root)");
        return;
    }
    assert!(
        out.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&out.stderr)
    );
    assert!(text.contains("the small disk was full"), "{text}");
}

/// Set for the child that saves until it is killed: its folder.
const CHILD: &str = "PHALANX_TEST_SAVES_INTO";

/// In a child of the next test: saves without end, all numbers equal to the step.
#[test]
fn saves_until_it_is_killed() {
    let Some(dir) = std::env::var_os(CHILD) else {
        return;
    };
    let folder = Folder::new(Path::new(&dir), 2);
    let first = folder
        .newest()
        .unwrap()
        .0
        .map_or(0, |s| s.manifest().place.step);
    for step in first + 1.. {
        let params = model(step as f32);
        let mut sgd = Sgd::new(&params, 0.1).momentum(0.9);
        let buffer = vec![step as f32; params.flat().len()];
        let updates = vec![step; params.len()];
        sgd.restore(step, &updates, &[("momentum_buffer", &buffer)])
            .unwrap();
        folder.save(&snapshot(&params, &sgd, step)).unwrap();
        println!("saved {step}");
    }
}

/// A stream of numbers, the same on each run.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// `PHALANX_KILLS` says how often; `tools/ci/checkpoint_kills.sh` says 200.
#[test]
fn after_a_kill_at_any_moment_the_newest_checkpoint_loads() {
    if std::env::var_os(CHILD).is_some() {
        return;
    }
    let kills = std::env::var("PHALANX_KILLS").map_or(12, |n| n.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::new(dir.path(), 2);
    let mut random = 0x9e37_79b9_7f4a_7c15;
    let mut seen = 0;
    for _ in 0..kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "state::saves_until_it_is_killed",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let wanted = 1 + next(&mut random) % 4;
        let mut told = 0;
        // Ends when the child does, which it would not by itself.
        for line in lines.map_while(std::result::Result::ok) {
            // The first line follows the harness's own words.
            if let Some((_, step)) = line.rsplit_once("saved ") {
                told = step.trim().parse().unwrap();
                if told >= seen + wanted {
                    break;
                }
            }
        }
        for _ in 0..next(&mut random) % 400_000 {
            std::hint::spin_loop();
        }
        child.kill().unwrap();
        child.wait().unwrap();

        let (state, damaged) = folder.newest().unwrap();
        assert!(damaged.is_empty(), "{damaged:?}");
        let state = state.unwrap();
        let step = state.manifest().place.step;
        assert!(step >= told && told > seen, "{seen} {told} {step}");
        seen = step;
        let mut params = model(0.0);
        let mut sgd = Sgd::new(&params, 0.1).momentum(0.9);
        state.restore_params(&mut params).unwrap();
        state.restore_optimizer(&params, &mut sgd).unwrap();
        let bias = params.find("conv.bias").unwrap();
        assert_eq!(params.get(bias), [step as f32; 4]);
        assert_eq!(sgd.steps(), step);
        assert_eq!(sgd.state()[0].1[0], step as f32);
    }
    println!("killed {kills} times while saving {seen} checkpoints; the newest loaded each time");
    // Two checkpoints, and at most one that was not finished or not yet removed.
    assert!(names(dir.path()).len() <= 6, "{:?}", names(dir.path()));
}

/// The values that a writer asks for.
fn piece(params: &Params, optimizer: &dyn Optimizer, piece: TensorId) -> Vec<f32> {
    let id = |i: usize| params.ids().nth(i).unwrap();
    let mut out = Vec::new();
    match piece {
        TensorId::Param(i) => out = params.export(id(i)),
        TensorId::Buffer(i) => out.extend(params.buffer(params.buffer_ids().nth(i).unwrap())),
        TensorId::State { buffer, param } => {
            params.export_of(id(param), optimizer.state()[buffer].1, &mut out);
        }
    }
    out
}

#[test]
fn tensor_by_tensor_files_are_the_same_and_read_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let at_path = |name: &str| dir.path().join(name);
    let mut params = model(1.0);
    let mut adam = Adam::new(&params, 0.1);
    for i in 1..4 {
        let grads = gradients(&params, i);
        adam.step(&mut params, &grads).unwrap();
    }
    let named = |infos: &[phalanx_nn::ParamInfo]| {
        let all = infos.iter().map(|i| (i.name.clone(), i.shape.clone()));
        all.collect::<Vec<_>>()
    };
    let outline = Outline::new(named(params.infos()), named(params.buffer_infos()));
    let optimizer = OptimizerState::from(&adam);
    let progress = json!({"accuracies": [0.5]});
    let streamed = Streamed::new(outline.clone(), &optimizer, at(3), facts(), progress);
    let folder = Folder::new(&at_path("streamed"), 1);
    let path = folder.save_streamed(&streamed, |p| Ok(piece(&params, &adam, p)));
    Folder::new(&at_path("taken"), 1)
        .save(&snapshot(&params, &adam, 3))
        .unwrap();
    for name in ["step-000000003.json", "step-000000003.safetensors"] {
        let read = |folder: &str| fs::read(at_path(folder).join(name)).unwrap();
        assert!(read("streamed") == read("taken"), "{name}");
    }
    let state = State::load(&path.unwrap().path).unwrap();
    let mut read = 0;
    let each = |p: TensorId, values: Vec<f32>| {
        read += 1;
        assert_eq!(values, piece(&params, &adam, p), "{p:?}");
        Ok(())
    };
    state.read_each(&outline, each).unwrap();
    assert_eq!(read, 4 + 2 * 3);
    save_pth_with(&at_path("a.pth"), &outline, |p| {
        Ok(piece(&params, &adam, p))
    })
    .unwrap();
    let mut read = 0;
    phalanx_checkpoint::read_each(&at_path("a.pth"), &outline, |p, values| {
        read += 1;
        assert_eq!(values, piece(&params, &adam, p), "{p:?}");
        Ok(())
    })
    .unwrap();
    assert_eq!(read, 4);
    // Values that do not fit are an error, and the file is the old one.
    let old = fs::read(at_path("a.pth")).unwrap();
    let error = save_pth_with(&at_path("a.pth"), &outline, |_| Ok(vec![1.0])).unwrap_err();
    assert!(error.to_string().contains("was given 1 values"), "{error}");
    assert!(fs::read(at_path("a.pth")).unwrap() == old);
    // Of other names, nothing is read.
    let mut less = named(params.infos());
    less.pop();
    let less = Outline::new(less, named(params.buffer_infos()));
    let error = state.read_each(&less, |_, _| panic!("read")).unwrap_err();
    assert!(error.to_string().contains("fc.weight"), "{error}");
}
