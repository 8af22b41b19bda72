//! A workflow of Rust functions: makes data, trains with two rates, keeps the better model.
//!
//! `cargo run --example flow -- run --input epochs=20`, then `... list`, `... show last`.

use std::fs;
use std::process::ExitCode;

use phalanx::flow::{Error, File, Flow, Resources, Result};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct DataSettings {
    samples: u64,
}

#[derive(Serialize, Deserialize)]
struct Data {
    numbers: File,
}

/// Samples of y = 3 x.
fn make_data(settings: DataSettings) -> Result<Data> {
    if settings.samples == 0 {
        // An error of kind Usage is not retried.
        return Err(Error::usage("samples must be at least 1"));
    }
    let lines = (0..settings.samples).map(|x| format!("{x} {}\n", 3 * x));
    fs::write("numbers.txt", lines.collect::<String>())?;
    Ok(Data {
        numbers: File("numbers.txt".into()),
    })
}

#[derive(Deserialize)]
struct TrainSettings {
    numbers: File,
    epochs: u32,
    rate: f64,
}

#[derive(Serialize, Deserialize)]
struct Trained {
    losses: Vec<f64>,
    weight: f64,
}

/// Gradient descent on the mean squared error of y = w x.
fn train(settings: TrainSettings) -> Result<Trained> {
    let text = fs::read_to_string(&settings.numbers.0)?;
    let numbers: Vec<f64> = text
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let pairs: Vec<&[f64]> = numbers.chunks_exact(2).collect();
    let (mut weight, mut losses) = (0.0, Vec::new());
    for epoch in 0..settings.epochs {
        let error = |pair: &&[f64]| weight * pair[0] - pair[1];
        let loss: f64 = pairs.iter().map(|pair| error(pair).powi(2)).sum();
        let gradient: f64 = pairs.iter().map(|pair| 2.0 * error(pair) * pair[0]).sum();
        let count = pairs.len() as f64;
        losses.push(loss / count);
        weight -= settings.rate * gradient / count;
        // Standard output is the task's log: `... logs last fast`.
        let line = format!("epoch {epoch}: loss {:.6}\n", loss / count);
        std::io::Write::write_all(&mut std::io::stdout(), line.as_bytes())?;
    }
    Ok(Trained { losses, weight })
}

#[derive(Deserialize)]
struct Candidates {
    slow: f64,
    fast: f64,
}

#[derive(Serialize, Deserialize)]
struct Best {
    weight: f64,
}

fn choose(candidates: Candidates) -> Result<Best> {
    let error = |weight: f64| (weight - 3.0).abs();
    let Candidates { slow, fast } = candidates;
    let weight = if error(slow) < error(fast) {
        slow
    } else {
        fast
    };
    Ok(Best { weight })
}

fn main() -> ExitCode {
    let one = Resources {
        cpus: Some(1),
        ..Resources::default()
    };
    let flow = Flow::new("line")
        .input("samples", 10)
        .input("epochs", 5)
        .task("data", make_data, |task| task.cache("1"))
        .task("slow", train, |task| {
            let task = task.bind("numbers", "{data.numbers}").value("rate", 0.001);
            task.cache("1").retries(2).requests(one)
        })
        .task("fast", train, |task| {
            let task = task.bind("numbers", "{data.numbers}").value("rate", 0.01);
            task.cache("1").retries(2).requests(one)
        })
        .task("choose", choose, |task| {
            task.bind("slow", "{slow.weight}")
                .bind("fast", "{fast.weight}")
        })
        .output("weight", "{choose.weight}")
        .output("losses", "{fast.losses}");
    phalanx::flow::main(flow)
}
