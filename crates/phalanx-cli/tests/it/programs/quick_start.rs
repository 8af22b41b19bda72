//! The quick start's two programs, which are examples of this crate
//! (`recipes/`): what they print, and what they leave.

use std::process::{Command, Stdio};

use phalanx_checkpoint as checkpoint;
use phalanx_nn::layers::Linear;
use phalanx_nn::{Scope, Seed};

use super::*;

/// The lines that begin with the words, numbers as `#`, in any order of ranks.
fn shapes(out: &str) -> Vec<String> {
    let mut lines: Vec<String> = out.lines().map(shape).collect();
    lines.sort();
    lines
}

#[test]
fn the_spawn_form_runs_its_function_on_every_rank() {
    let dir = tempfile::tempdir().expect("folder");
    let mut command = Command::new(example("quick_start_spawn"));
    command.current_dir(dir.path()).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = wait(command.spawn().expect("started"));
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert_eq!(shapes(&out), ["rank #/# step # loss #.####"; 10], "{out}");
    for rank in 0..2 {
        // Each rank's own lines are in order.
        let own = format!("rank {rank}/2 step ");
        let steps: Vec<&str> = out.lines().filter_map(|l| l.strip_prefix(&own)).collect();
        for (i, step) in steps.iter().enumerate() {
            assert!(step.starts_with(&format!("{i} loss ")), "{out}");
        }
    }
}

#[test]
fn the_launch_form_trains_and_leaves_the_documents_file() {
    let dir = tempfile::tempdir().expect("folder");
    let program = example("quick_start_launch");
    let program = program.to_str().expect("text");
    // As the document types it.
    let args = ["launch", "--nproc_per_node", "2", program];
    let (out, err) = succeed(&args, dir.path());
    let told = "warning: no data folder data: training on drawn pictures instead (`phalanx download cifar10 --to data` gets the real ones)";
    assert_eq!(err.matches(told).count(), 1, "{err}");
    let mut expected = vec!["Loaded the model on CPU #".to_owned(); 2];
    expected.extend(vec!["rank #/# epoch # loss #.####".to_owned(); 4]);
    let lines: Vec<String> = out
        .lines()
        .map(|line| line.split_once("] ").map_or(line, |(_, line)| line))
        .map(shape)
        .collect();
    let mut sorted = lines.clone();
    sorted.sort();
    assert_eq!(sorted, expected, "{out}");
    for rank in 0..2 {
        assert!(
            out.contains(&format!("Loaded the model on CPU {rank}")),
            "{out}"
        );
        for epoch in 0..2 {
            let line = format!("rank {rank}/2 epoch {epoch} loss ");
            assert_eq!(out.matches(&line).count(), 1, "{out}");
        }
    }
    // Once, by rank 0, and under the model's own names.
    let names: Vec<_> = std::fs::read_dir(dir.path())
        .expect("folder")
        .flatten()
        .map(|e| e.file_name())
        .collect();
    assert_eq!(names, ["saved_model.ckpt"]);
    let mut scope = Scope::new(Seed(7));
    Linear::new(scope.enter("linear"), 3 * 32 * 32, 10);
    let mut params = scope.build().expect("a model");
    let path = dir.path().join("saved_model.ckpt");
    checkpoint::load_params(&path, &mut params).expect("loads");
    let start = std::fs::read(&path).expect("read");
    assert!(start.starts_with(b"PK"), "a file of torch.save");
}
