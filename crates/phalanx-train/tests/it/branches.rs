//! Which attempts of a run went on with other settings, in `run.json`.

use std::path::Path;
use std::sync::Arc;

use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Reduction, Scope};
use phalanx_train::{ErrorKind, Job, Result};
use serde_json::{Value, json};

use crate::trainer::ranks_in;

fn train(job: &Job<'_>) -> Result<()> {
    let data: Arc<Vec<f32>> = Arc::new((0..16u8).map(f32::from).collect());
    let model = |scope: &mut Scope| Linear::new(scope.enter("fc"), 1, 1);
    let mut trainer = job.trainer(&data, model, Sgd::new).start()?;
    for _ in trainer.epochs() {
        for batch in trainer.batches(&data)? {
            trainer.step(&batch, |fc, batch| {
                let x: Vec<f32> = batch.iter().map(|x| x / 16.0).collect();
                let y = fc.forward(batch.input(&x, &[x.len(), 1])?)?;
                y.mse_loss(&x, Reduction::Mean)
            })?;
        }
    }
    trainer.finish().map(drop)
}

#[test]
fn attempts_with_other_settings_are_branches() {
    let dir = tempfile::tempdir().expect("folder");
    let attempt = |more: &[&str]| -> Value {
        let all = ["--batch-size", "4", "--save-every", "9"];
        let ranks = ranks_in(dir.path(), 1, &[&all, more].concat(), train);
        for rank in ranks {
            let stopped = |error| phalanx_train::Error::kind(&error) == ErrorKind::Stopped;
            assert!(rank.map_or_else(stopped, |()| true));
        }
        let text = std::fs::read_to_string(run_file(dir.path())).expect("run.json");
        let mut run: Value = serde_json::from_str(&text).expect("JSON");
        run["branches"].take()
    };
    assert_eq!(attempt(&["--stop-after", "3"]), json!([]));
    let same = ["--resume", "auto", "--save-every", "2", "--stop-after", "1"];
    assert_eq!(attempt(&same), json!([]));
    let second = json!({"attempt": 3, "step": 4});
    let other = ["--resume", "auto", "--lr", "0.05"];
    assert_eq!(attempt(&other), json!([second]));
    let longer = ["--resume", "auto", "--lr", "0.05", "--epochs", "3"];
    let third = json!({"attempt": 4, "step": 8});
    assert_eq!(attempt(&longer), json!([second, third]));
}

fn run_file(dir: &Path) -> std::path::PathBuf {
    dir.join("run/run.json")
}
