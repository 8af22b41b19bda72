//! A rank whose process is killed while rank 0 writes the weights.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use phalanx_checkpoint::save_params_with;
use phalanx_comm::{InitOptions, ProcessGroup, Transport};
use phalanx_global::{Error, ErrorKind, GlobalParams, Placement, Sbp};
use phalanx_nn::layers::Linear;
use phalanx_nn::{Scope, Seed};

const DIR: &str = "PHALANX_TEST_DIR";
const RANK: &str = "PHALANX_TEST_RANK";
const FILE: &str = "net.safetensors";
/// Rank 0 has written a part of the file.
const HALF: &str = "half";
const PATIENCE: Duration = Duration::from_secs(120);

/// Writes the weights as rank `rank` of two. Rank 0 calls `half` between two tensors.
fn save(dir: &Path, rank: usize, half: impl FnOnce()) -> Result<(), Error> {
    let group = ProcessGroup::init(InitOptions {
        init_method: format!("file://{}", dir.join("meeting").display()),
        rank: Some(rank),
        world_size: Some(2),
        timeout: PATIENCE,
        op_timeout: PATIENCE,
        first_op_timeout: PATIENCE,
        transport: Transport::Tcp,
        probe: false,
        ..InitOptions::default()
    })
    .unwrap();
    let mut scope = Scope::new(Seed(1));
    Linear::new(scope.enter("a"), 64, 64);
    let placement = Placement::of(&group);
    let model = scope.build().unwrap();
    let weights = GlobalParams::new(&placement, &model, |_| vec![Sbp::split(0)])?;
    let mut half = Some(half);
    let written = weights.gather_each(None, |outline, values| {
        let mut asked = 0;
        save_params_with(&dir.join(FILE), outline, &BTreeMap::new(), |tensor| {
            asked += 1;
            if asked == 2 {
                half.take().into_iter().for_each(|half| half());
            }
            values(tensor)
        })
    });
    written.map(drop)
}

#[test]
fn child() {
    if let (Ok(dir), Ok(rank)) = (std::env::var(DIR), std::env::var(RANK)) {
        let dir = Path::new(&dir);
        let half = || {
            std::fs::write(dir.join(HALF), "").unwrap();
            std::thread::sleep(PATIENCE);
        };
        let _ = save(dir, rank.parse().unwrap(), half);
    }
}

fn spawn(dir: &Path, rank: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "lost::child"])
        .env(DIR, dir)
        .env(RANK, rank)
        .spawn()
        .unwrap()
}

fn kill(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// The error names rank `rank`.
fn assert_lost(error: Error, rank: usize) {
    assert_eq!(error.kind(), ErrorKind::Comm, "{error:?}");
    let text = error.comm().map(ToString::to_string).unwrap_or_default();
    assert!(text.contains(&format!("rank {rank}")), "{text}");
    let error = phalanx_base::Error::from(error);
    assert_eq!(error.kind(), phalanx_base::ErrorKind::PeerLost, "{error:?}");
}

#[test]
fn without_another_rank_the_file_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = spawn(dir.path(), "1");
    let error = save(dir.path(), 0, || kill(&mut child)).unwrap_err();
    assert_lost(error, 1);
    let mut names = std::fs::read_dir(dir.path()).unwrap();
    let left = names.find(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        name.to_string_lossy().contains(FILE)
    });
    assert!(left.is_none(), "{left:?}");
}

#[test]
fn without_rank_0_the_file_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = spawn(dir.path(), "0");
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !dir.path().join(HALF).exists() {
                std::thread::sleep(Duration::from_millis(1));
            }
            kill(&mut child);
        });
        save(dir.path(), 1, || ()).unwrap_err()
    });
    assert_lost(error, 0);
    assert!(!dir.path().join(FILE).exists());
}
