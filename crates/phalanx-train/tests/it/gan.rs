//! Two networks with an optimizer each, trained alternately on the same batch.

use std::path::Path;
use std::sync::{Arc, Mutex};

use phalanx_nn::layers::{Act, Dropout, Linear};
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::optim::{Adam, Sgd};
use phalanx_nn::{Params, Reduction, Scope, Tensor};
use phalanx_train::{ErrorKind, Job, Measure, MicroBatch, Result, Trainer};

use crate::trainer::{ranks, ranks_in};

/// A number that is real, and one that the generator makes another of.
type Sample = [f32; 2];

fn data(count: usize) -> Arc<Vec<Sample>> {
    let sample = |i: usize| {
        [
            (i * 7 % 13) as f32 / 13.0 + 1.0,
            (i * 5 % 11) as f32 / 11.0 - 0.5,
        ]
    };
    Arc::new((0..count).map(sample).collect())
}

struct Lines {
    generator: Linear,
    discriminator: Linear,
}

impl Lines {
    fn new(scope: &mut Scope) -> Lines {
        Lines {
            generator: Linear::new(scope.enter("generator"), 1, 1),
            discriminator: Linear::new(scope.enter("discriminator"), 1, 1),
        }
    }

    /// The discriminator's answers to what the generator makes.
    fn on_fake<'s>(&self, batch: &MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
        let noise: Vec<f32> = batch.iter().map(|s| s[1]).collect();
        let fake = self
            .generator
            .forward(batch.input(&noise, &[noise.len(), 1])?)?;
        self.discriminator.forward(fake)
    }

    /// The mean of `(D(x) - 1)^2 + D(G(z))^2`.
    fn loss_d<'s>(&self, batch: &MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
        let real: Vec<f32> = batch.iter().map(|s| s[0]).collect();
        let n = real.len();
        let real = self.discriminator.forward(batch.input(&real, &[n, 1])?)?;
        let real = real.mse_loss(&vec![1.0; n], Reduction::Mean)?;
        let fake = self
            .on_fake(batch)?
            .mse_loss(&vec![0.0; n], Reduction::Mean)?;
        real.add(fake)
    }

    /// The mean of `(D(G(z)) - 1)^2`.
    fn loss_g<'s>(&self, batch: &MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
        let ones = vec![1.0; batch.samples()];
        self.on_fake(batch)?.mse_loss(&ones, Reduction::Mean)
    }
}

/// Factor and summand of the generator, then of the discriminator.
fn weights(params: &Params) -> [f64; 4] {
    let all: Vec<f32> = params.ids().flat_map(|id| params.export(id)).collect();
    std::array::from_fn(|i| f64::from(all[i]))
}

const STEPS_OF_D: usize = 2;

/// Steps of both in f64, on the samples of each step: the weights after each.
fn in_f64(
    train: &[Sample],
    steps: &[Vec<u64>],
    mut w: [f64; 4],
    clip: Option<f64>,
) -> Vec<[f64; 4]> {
    let mut seen = vec![w];
    // SGD's momentum of the discriminator; Adam's means of the generator.
    let (mut momentum, mut mean, mut square) = ([0.0; 2], [0.0; 2], [0.0; 2]);
    let clipped = |g: [f64; 2]| {
        let norm = (g[0] * g[0] + g[1] * g[1]).sqrt();
        let scale = clip.map_or(1.0, |limit| (limit / (norm + 1e-6)).min(1.0));
        g.map(|g| g * scale)
    };
    for (t, indices) in steps.iter().enumerate() {
        let n = indices.len() as f64;
        let samples = || indices.iter().map(|&i| train[i as usize].map(f64::from));
        let angle = std::f64::consts::PI * t as f64 / steps.len() as f64;
        let schedule = 0.5 * (1.0 + angle.cos());
        for _ in 0..STEPS_OF_D {
            let [p, q, a, c] = w;
            let mut g = [0.0; 2];
            for [x, z] in samples() {
                let fake = p * z + q;
                let (real_error, fake_error) = (a * x + c - 1.0, a * fake + c);
                g[0] += 2.0 * (real_error * x + fake_error * fake) / n;
                g[1] += 2.0 * (real_error + fake_error) / n;
            }
            for (i, g) in clipped(g).into_iter().enumerate() {
                momentum[i] = 0.5 * momentum[i] + g;
                w[2 + i] -= 0.2 * schedule * momentum[i];
            }
        }
        let [p, q, a, c] = w;
        let mut g = [0.0; 2];
        for [_, z] in samples() {
            let error = a * (p * z + q) + c - 1.0;
            g[0] += 2.0 * error * a * z / n;
            g[1] += 2.0 * error * a / n;
        }
        let t = t as i32 + 1;
        for (i, g) in clipped(g).into_iter().enumerate() {
            mean[i] = 0.9 * mean[i] + 0.1 * g;
            square[i] = 0.999 * square[i] + 0.001 * g * g;
            let (m, v) = (
                mean[i] / (1.0 - 0.9f64.powi(t)),
                square[i] / (1.0 - 0.999f64.powi(t)),
            );
            w[i] -= 0.1 * schedule * m / (v.sqrt() + 1e-8);
        }
        seen.push(w);
    }
    seen
}

#[test]
fn two_optimizers_train_as_in_f64() {
    let train = data(23);
    for (world, args, clip) in [
        (1, &["--global-batch-size", "6"][..], None),
        (2, &["--global-batch-size", "6"], None),
        (2, &["--global-batch-size", "6"], Some(0.1)),
        (
            3,
            &["--global-batch-size", "8", "--exchange", "reduce-scatter"],
            None,
        ),
        (
            2,
            &["--global-batch-size", "6", "--exchange", "at-step"],
            Some(0.1),
        ),
        (2, &["--global-batch-size", "8", "--accumulate", "2"], None),
        (
            2,
            &["--global-batch-size", "8", "--deterministic", "shards"],
            None,
        ),
    ] {
        // Samples of each step over all ranks.
        let steps: Mutex<Vec<Vec<u64>>> = Mutex::default();
        let trained = ranks(world, args, |job| {
            let builder = job
                .trainer(&train, Lines::new, Adam::new)
                .optimizer_of("discriminator", |params, lr| {
                    Sgd::new(params, 2.0 * lr).momentum(0.5)
                })
                .schedule(|lr, steps| Schedule::cosine(lr, steps, 0.0));
            let mut trainer = match clip {
                Some(limit) => builder.clip_grad_norm(limit),
                None => builder,
            }
            .start()?;
            let mut seen = vec![weights(trainer.params())];
            for _ in trainer.epochs() {
                for batch in trainer.batches(&train)? {
                    for _ in 0..STEPS_OF_D {
                        trainer.step_of("discriminator", &batch, |model, batch| {
                            model.loss_d(&batch)
                        })?;
                    }
                    trainer.step(&batch, |model, batch| {
                        let (mut steps, at) = (steps.lock().expect("no panic"), seen.len() - 1);
                        if steps.len() <= at {
                            steps.resize(at + 1, Vec::new());
                        }
                        steps[at].extend_from_slice(batch.indices());
                        model.loss_g(&batch)
                    })?;
                    seen.push(weights(trainer.params()));
                }
            }
            trainer.finish()?;
            Ok(seen)
        });
        let steps = steps.into_inner().expect("no panic");
        assert_eq!(steps.iter().map(Vec::len).sum::<usize>(), 2 * train.len());
        for seen in trained {
            let seen = seen.expect("trained");
            let expected = in_f64(&train, &steps, seen[0], clip);
            assert_eq!(seen.len(), expected.len());
            for (step, (got, expected)) in seen.iter().zip(&expected).enumerate() {
                for (got, expected) in got.iter().zip(expected) {
                    let what = || format!("{world} ranks, {args:?}, step {step}: {got} {expected}");
                    assert!((got - expected).abs() < 2e-5, "{}", what());
                }
            }
            let (first, last) = (expected[0], expected[expected.len() - 1]);
            assert!(
                (0..4).all(|i| (last[i] - first[i]).abs() > 0.01),
                "{first:?} {last:?}"
            );
        }
    }
}

/// Networks with noise and dropout.
struct Gan {
    generator: [Linear; 2],
    discriminator: [Linear; 2],
    dropout: Dropout,
}

impl Gan {
    fn new(scope: &mut Scope) -> Gan {
        let mut generator = scope.enter("generator");
        let make = [
            Linear::new(generator.enter("0"), 4, 16),
            Linear::new(generator.enter("1"), 16, 2),
        ];
        let mut discriminator = scope.enter("discriminator");
        let judge = [
            Linear::new(discriminator.enter("0"), 2, 16),
            Linear::new(discriminator.enter("1"), 16, 1),
        ];
        Gan {
            generator: make,
            discriminator: judge,
            dropout: Dropout::new(0.3),
        }
    }

    fn fake<'s>(&self, batch: &MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
        let [first, second] = &self.generator;
        second.forward(first.forward_act(batch.normal(&[4])?, Act::Relu)?)
    }

    fn judge<'s>(&self, x: Tensor<'s>) -> Result<Tensor<'s>> {
        let [first, second] = &self.discriminator;
        let x = self.dropout.forward(first.forward_act(x, Act::Relu)?)?;
        second.forward(x)
    }
}

fn gan<'j>(job: &Job<'j>, train: &Arc<Vec<Sample>>) -> Result<Trainer<'j, Gan>> {
    job.trainer(train, Gan::new, Adam::new)
        .optimizer_of("discriminator", |params, lr| {
            Sgd::new(params, 0.1 * lr).momentum(0.9)
        })
        .start()
}

/// Trains, unless it is stopped before its end.
fn train(job: &Job<'_>, train: &Arc<Vec<Sample>>) -> Result<()> {
    let mut trainer = gan(job, train)?;
    for _ in trainer.epochs() {
        for batch in trainer.batches(train)? {
            trainer.step_of("discriminator", &batch, |model, batch| {
                let n = batch.samples();
                let real: Vec<f32> = batch.iter().flatten().copied().collect();
                let real = model.judge(batch.input(&real, &[n, 2])?)?;
                let real = real.mse_loss(&vec![1.0; n], Reduction::Mean)?;
                let fake = model.fake(&batch)?;
                let fake = batch.input(fake.data(), &fake.shape())?;
                let fake = model
                    .judge(fake)?
                    .mse_loss(&vec![0.0; n], Reduction::Mean)?;
                real.add(fake)
            })?;
            let stepped = trainer.step(&batch, |model, batch| {
                let ones = vec![1.0; batch.samples()];
                let scores = model.judge(model.fake(&batch)?)?;
                scores.mse_loss(&ones, Reduction::Mean)
            });
            match stepped {
                Err(error) if error.kind() == ErrorKind::Stopped => return Ok(()),
                other => other?,
            };
        }
    }
    trainer.finish().map(drop)
}

/// What the run in `dir` ended with.
fn hashes(dir: &Path) -> [String; 2] {
    let text = std::fs::read_to_string(dir.join("run/summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    ["weights_sha256", "optimizer_sha256"].map(|name| summary[name].to_string())
}

#[test]
fn a_stopped_training_of_two_optimizers_resumes_to_the_same_bits() {
    let data = data(37);
    for (world, args) in [
        (1, &["--global-batch-size", "6"][..]),
        (2, &["--global-batch-size", "6", "--exchange", "all-reduce"]),
        (2, &["--global-batch-size", "6", "--exchange", "at-step"]),
        (2, &["--global-batch-size", "6", "--gradient-type", "bf16"]),
    ] {
        let [whole, halves] = [(); 2].map(|()| tempfile::tempdir().expect("folder"));
        let run = |dir: &Path, more: &[&str]| {
            let args = [args, &["--save-every", "3"], more].concat();
            for rank in ranks_in(dir, world, &args, |job| train(job, &data)) {
                rank.expect("trained");
            }
        };
        run(whole.path(), &[]);
        run(halves.path(), &["--stop-after", "4"]);
        assert!(!halves.path().join("run/summary.json").exists(), "stopped");
        run(halves.path(), &["--resume", "auto"]);
        assert_eq!(
            hashes(halves.path()),
            hashes(whole.path()),
            "{world} {args:?}"
        );
    }
}

#[test]
fn a_checkpoint_is_resumed_with_the_same_optimizers_only() {
    let (data, dir) = (data(12), tempfile::tempdir().expect("folder"));
    let args = [
        "--batch-size",
        "5",
        "--save-every",
        "1",
        "--stop-after",
        "1",
    ];
    ranks_in(dir.path(), 1, &args, |job| train(job, &data))
        .remove(0)
        .expect("stopped");
    let args = ["--batch-size", "5", "--resume", "auto", "--save-every", "1"];
    let outcome = ranks_in(dir.path(), 1, &args, |job| {
        job.trainer(&data, Gan::new, Adam::new).start().map(drop)
    });
    let error = outcome.into_iter().next().and_then(Result::err);
    let text = error.expect("other optimizers").to_string();
    let why = "continues a training with optimizers of their own for discriminator; this run has one optimizer";
    assert!(text.contains(why), "{text}");
}

#[test]
fn groups_without_parameters_are_usage_errors() {
    let data = data(8);
    let wrong = |names: &[&str]| {
        let outcome = ranks(1, &[], |job| {
            let builder = job.trainer(&data, Lines::new, Adam::new);
            let with_groups = names
                .iter()
                .fold(builder, |b, name| b.optimizer_of(name, Sgd::new));
            with_groups.start().map(drop)
        });
        let error = outcome
            .into_iter()
            .next()
            .and_then(Result::err)
            .expect("refused");
        assert_eq!(error.kind(), ErrorKind::Usage);
        error.to_string()
    };
    assert!(wrong(&["discrim"]).contains("no further parameter's name begins with \"discrim.\""));
    assert!(wrong(&["generator", "generator"]).contains("no further parameter's name"));
    assert!(wrong(&["generator", "discriminator"]).contains("no parameter is left"));
    let outcome = ranks(1, &[], |job| {
        let mut trainer = gan(job, &data)?;
        let batch = trainer.batches(&data)?.next().expect("a batch");
        let stepped = trainer.step_of("critic", &batch, |_, batch| batch.normal(&[1]));
        stepped.map(drop)
    });
    let error = outcome
        .into_iter()
        .next()
        .and_then(Result::err)
        .expect("refused");
    assert!(
        error
            .to_string()
            .contains("made without optimizer_of(\"critic\""),
        "{error}"
    );
}

/// The mean square of what `part` makes of the real numbers.
fn distance<'s>(part: &Linear, batch: &MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
    let real: Vec<f32> = batch.iter().map(|s| s[0]).collect();
    let made = part.forward(batch.input(&real, &[real.len(), 1])?)?;
    made.mse_loss(&vec![0.0; 3 * real.len()], Reduction::Mean)
}

/// Three parts with an optimizer each, of which every rank has a piece.
#[test]
fn sharded_state_of_several_groups_is_gathered_by_all_ranks() {
    let data = data(20);
    let three =
        |scope: &mut Scope| ["a", "b", "c"].map(|name| Linear::new(scope.enter(name), 1, 3));
    let digests = |exchange: &str| {
        let dir = tempfile::tempdir().expect("a folder");
        let args = ["--epochs", "2", "--save-every", "3", "--exchange", exchange];
        let ended = ranks_in(dir.path(), 2, &args, |job| {
            let builder = job.trainer(&data, three, Adam::new);
            let builder = builder.optimizer_of("b", Adam::new);
            let mut trainer = builder.optimizer_of("c", Adam::new).start()?;
            for _ in trainer.epochs() {
                for batch in trainer.batches(&data)? {
                    trainer.step_of("b", &batch, |parts, batch| distance(&parts[1], &batch))?;
                    trainer.step_of("c", &batch, |parts, batch| distance(&parts[2], &batch))?;
                    trainer.step(&batch, |parts, batch| distance(&parts[0], &batch))?;
                }
            }
            trainer.finish().map(drop)
        });
        ended.into_iter().for_each(|rank| rank.expect("trained"));
        let summary = std::fs::read(dir.path().join("run/summary.json")).expect("a summary");
        let summary: serde_json::Value = serde_json::from_slice(&summary).expect("JSON");
        ["weights_sha256", "optimizer_sha256"].map(|name| summary[name].clone())
    };
    let whole = digests("all-reduce");
    assert!(whole.iter().all(serde_json::Value::is_string), "{whole:?}");
    for exchange in ["reduce-scatter", "at-step"] {
        assert_eq!(digests(exchange), whole, "{exchange}");
    }
}

/// Noise by sample, in the order of the samples, of two calls in each of two steps.
fn noise(world: usize, args: &[&str]) -> Vec<(u64, Vec<u32>)> {
    let data = data(60);
    let all: Mutex<Vec<(u64, Vec<u32>)>> = Mutex::default();
    let drawn = ranks(world, args, |job| {
        let mut trainer = job.trainer(&data, Lines::new, Adam::new).start()?;
        for _ in trainer.epochs() {
            for batch in trainer.batches(&data)? {
                trainer.step(&batch, |model, batch| {
                    for _ in 0..2 {
                        let noise = batch.normal(&[5, 3])?;
                        assert_eq!(noise.shape(), [batch.samples(), 5, 3]);
                        let mut all = all.lock().expect("no panic");
                        for (sample, values) in batch.indices().iter().zip(noise.data().chunks(15))
                        {
                            all.push((*sample, values.iter().map(|v| v.to_bits()).collect()));
                        }
                    }
                    model.loss_g(&batch)
                })?;
            }
        }
        trainer.finish().map(drop)
    });
    drawn.into_iter().for_each(|rank| rank.expect("drawn"));
    let mut all = all.into_inner().expect("no panic");
    all.sort();
    all
}

#[test]
fn noise_is_normal_and_does_not_depend_on_the_number_of_ranks() {
    let alone = noise(1, &["--global-batch-size", "30"]);
    assert_eq!(
        alone,
        noise(3, &["--global-batch-size", "30", "--accumulate", "2"])
    );
    assert_ne!(
        alone,
        noise(1, &["--global-batch-size", "30", "--seed", "2"])
    );
    // Each call, sample and epoch has numbers of its own.
    let mut values: Vec<u32> = alone.into_iter().flat_map(|(_, values)| values).collect();
    let count = values.len();
    let moment = |power: i32| {
        let values = values
            .iter()
            .map(|v| f64::from(f32::from_bits(*v)).powi(power));
        values.sum::<f64>() / count as f64
    };
    for (power, expected) in [(1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)] {
        let found = moment(power);
        assert!((found - expected).abs() < 0.35, "moment {power}: {found}");
    }
    values.sort();
    values.dedup();
    assert!(values.len() > count - 5, "{} of {count}", values.len());
}

#[test]
fn an_evaluation_has_the_same_noise_every_time() {
    let data = data(9);
    let sums = ranks(1, &[], |job| {
        let mut trainer = gan(job, &data)?;
        let mut measure = || {
            let measured = trainer.measure(&data, |_, batch| {
                let noise = batch.normal(&[4])?;
                Ok(Measure::of_sum(
                    noise.data().iter().map(|v| f64::from(*v)).sum(),
                ))
            });
            measured.map(|evaluation| evaluation.loss)
        };
        Ok([measure()?, measure()?])
    });
    let [first, second] = sums.into_iter().next().expect("a rank").expect("measured");
    assert!(first == second && first != 0.0, "{first} {second}");
}
