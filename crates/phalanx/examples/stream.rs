//! A training on samples in shards, which need not fit into memory: tar archives as WebDataset writes them, or JSON lines, in a
//! folder. Without `--data` it writes shards of its own into a folder first.
//! `cargo run --release -p phalanx --example stream -- --nproc-per-node 2`

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use phalanx::data::stream::{Sample, Stream, StreamDataset};
use phalanx::prelude::*;

/// Features, and the class 0 or 1.
type Point = ([f32; 2], u32);

fn decode(sample: &Sample) -> Result<Point> {
    Ok((sample.json("x")?, sample.json("class")?))
}

/// Eight shards of 512 points each: those right of the line x = y are of class 1.
fn write_shards(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|e| Error::io("cannot create", folder, e))?;
    for shard in 0..8 {
        let mut lines = String::new();
        for i in shard * 512..(shard + 1) * 512 {
            let [x, y] = [i * 37 % 101, i * 53 % 97].map(|n| n as f32 / 50.0 - 1.0);
            let _ = writeln!(
                lines,
                "{{\"x\": [{x}, {y}], \"class\": {}}}",
                u32::from(x > y)
            );
        }
        let path = folder.join(format!("points-{shard}.jsonl"));
        if fs::read(&path).ok().as_deref() != Some(lines.as_bytes()) {
            fs::write(&path, lines).map_err(|e| Error::io("cannot write", &path, e))?;
        }
    }
    Ok(())
}

struct Network(Linear, Linear);

impl Network {
    fn new(scope: &mut Scope) -> Network {
        let hidden = Linear::new(scope.enter("hidden"), 2, 16);
        Network(hidden, Linear::new(scope.enter("output"), 16, 2))
    }

    fn scores<'s>(&self, batch: &MicroBatch<'s, Vec<Point>>) -> Result<Tensor<'s>> {
        let values: Vec<f32> = batch.data().iter().flat_map(|(x, _)| *x).collect();
        let x = batch.input(&values, &[batch.samples(), 2])?;
        self.1.forward(self.0.forward_act(x, Act::Relu)?)
    }
}

fn classes(batch: &MicroBatch<'_, Vec<Point>>) -> Vec<u32> {
    batch.data().iter().map(|(_, class)| *class).collect()
}

#[derive(clap::Args)]
struct Args {
    /// Folder of shards [default: shards of its own in stream-shards]
    #[arg(long)]
    data: Option<String>,
}

fn main() -> ExitCode {
    let program = Program::new().defaults(Defaults::new(3, 64, 0.01));
    program.main_with(|job, args: &Args| {
        let own = Path::new("stream-shards");
        let place = args.data.as_deref().unwrap_or("stream-shards");
        if args.data.is_none() && job.is_main() {
            write_shards(own)?;
        }
        job.group().barrier()?;
        let data: StreamDataset<Point> = Stream::new(place).shuffle_buffer(1000).map(decode)?;
        let data = Arc::new(data);
        let mut trainer = job.trainer(&data, Network::new, Adam::new).start()?;
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&data)? {
                trainer.step(&batch, |net, batch| {
                    let scores = net.scores(&batch)?;
                    scores.cross_entropy(&classes(&batch), batch.samples() as f32)
                })?;
            }
            trainer.evaluate(&data, |net, batch| {
                let (scores, classes) = (net.scores(&batch)?, classes(&batch));
                let measure = Measure::of_scores(&scores, &classes)?;
                Ok(measure.with_loss(scores.cross_entropy(&classes, 1.0)?))
            })?;
        }
        trainer.finish().map(drop)
    })
}
