//! The memory of rank 0 while a mesh saves and loads, counted by the allocator: it never has the whole model and optimizer.

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../phalanx-comm/tests/counting/mod.rs"]
mod counting;

use std::path::Path;
use std::sync::Arc;

use clap::Parser;
use phalanx_comm::{GroupOptions, ProcessGroup};
use phalanx_global::Parallel;
use phalanx_nn::Value as _;
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Adam;
use phalanx_train::{ErrorKind, Job, Mesh, RankContext, Result, Settings};

use counting::peak_bytes;

const RANKS: usize = 4;
const LAYERS: usize = 16;
const WIDTH: usize = 512;
/// Bytes of the largest tensor.
const TENSOR: isize = size_of::<[[f32; WIDTH]; WIDTH]>() as isize;
/// Bytes of all parameters, but for biases.
const MODEL: isize = LAYERS as isize * TENSOR;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    settings: Settings,
}

/// Bytes that rank 0 needed at most to start, and beyond that to save a checkpoint, and to finish.
fn peaks(dir: &Path, args: &[&str]) -> [isize; 3] {
    let dir = dir.join("run").display().to_string();
    let typed = ["test", "--global-batch-size", "4", "--output-dir", &dir];
    let settings = Cli::parse_from(typed.iter().chain(args)).settings;
    let rank = |group: ProcessGroup| -> Result<[isize; 3]> {
        let ctx = RankContext::new(group, 1);
        let train = Arc::new((0..8).map(|i| i as f32 / 8.0).collect::<Vec<f32>>());
        let job = Job::new("test", &ctx, &settings);
        let model = |scope: &mut phalanx_nn::Scope<'_>| -> Vec<Linear> {
            let layer = |i: usize| Linear::new(scope.enter(&format!("layer{i}")), WIDTH, WIDTH);
            (0..LAYERS).map(layer).collect()
        };
        let mesh = Mesh {
            fully_sharded: true,
            ..Mesh::data_parallel(RANKS)
        };
        let builder = job.trainer(&train, model, Adam::new);
        let (trainer, starting) = peak_bytes(|| builder.on(mesh, Parallel::new()).start());
        let (mut trainer, mut saving) = (trainer?, 0);
        for epoch in trainer.epochs() {
            // The checkpoint after an epoch is saved before the next one begins.
            let (batches, peak) = peak_bytes(|| trainer.batches(&train));
            if epoch > 1 {
                saving = peak;
            }
            for batch in batches? {
                trainer.step(&batch, |layers, batch| {
                    let rows = batch.data().iter().flat_map(|x| [*x; WIDTH]);
                    let rows: Vec<f32> = rows.collect();
                    let mut x = batch.input(&rows, &[batch.samples(), WIDTH])?;
                    for layer in layers {
                        x = layer.forward(x)?;
                    }
                    x.mean(&[], false)
                })?;
            }
        }
        let (finished, finishing) = peak_bytes(|| trainer.finish());
        finished.map(|_| [starting, saving, finishing])
    };
    std::thread::scope(|scope| {
        let groups = ProcessGroup::threads(RANKS, GroupOptions::default());
        let all: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(|| rank(group)))
            .collect();
        let mut all = all.into_iter().map(|rank| rank.join().expect("no panic"));
        match all.next().expect("rank 0") {
            Ok(peaks) => peaks,
            Err(error) if error.kind() == ErrorKind::Stopped => [0; 3],
            Err(error) => panic!("{error:?}"),
        }
    })
}

#[test]
fn rank_0_of_a_mesh_saves_and_loads_a_tensor_at_a_time() {
    let dir = tempfile::tempdir().expect("folder");
    let [_, saving, finishing] = peaks(dir.path(), &["--epochs", "2", "--save-every", "100"]);
    // A full tensor, a copy of it in another order, its bytes, and the file's buffer. The state is three times the model.
    for (peak, what) in [(saving, "saving"), (finishing, "finishing")] {
        assert!(peak > TENSOR, "{what}: nothing was counted");
        assert!(
            peak < 4 * TENSOR,
            "{what} needs {peak} bytes, a tensor {TENSOR}"
        );
    }
    // Each rank draws the initial values of the whole model. (Parameters themselves are mapped memory, which is not
    // counted.)
    let resume = ["--epochs", "3", "--resume", "auto"];
    let [starting, ..] = peaks(dir.path(), &resume);
    assert!(starting > MODEL, "starting: nothing was counted");
    assert!(
        starting < MODEL + 4 * TENSOR,
        "starting needs {starting} bytes, the model {MODEL}"
    );
}
