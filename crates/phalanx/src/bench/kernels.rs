//! Times each convolution of a network alone, all three passes.

use std::time::{Duration, Instant};

use phalanx_nn::layers::Conv2dOptions;
use phalanx_nn::measure::{ConvPass, Convolution, peak_gflops};
use phalanx_nn::{Precision, Threads};
use serde_json::json;

use crate::error::Result;
use crate::say;
use phalanx_train::PrecisionArg;

/// Arguments of `bench kernels`.
#[derive(Debug, Clone, clap::Args)]
pub struct KernelArgs {
    /// Network whose convolutions are timed
    #[arg(value_enum, default_value_t = Network::Resnet18)]
    pub network: Network,
    /// Images in a batch
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub batch: usize,
    /// Compute threads
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub threads: usize,
    /// Milliseconds to spend on each pass of each layer
    #[arg(long, default_value_t = 150, value_name = "MS")]
    pub time: u64,
    /// Numbers that are multiplied
    #[arg(long, value_enum, default_value_t = PrecisionArg::Fp32)]
    pub precision: PrecisionArg,
    /// One JSON object a line instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Networks whose convolutions can be timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Network {
    /// The CIFAR ResNet-18 of the distributed-training guide
    Resnet18,
    /// torchvision's MobileNetV2 on 32 x 32 images
    Mobilenetv2,
}

impl Network {
    fn key(self) -> &'static str {
        match self {
            Network::Resnet18 => "resnet18",
            Network::Mobilenetv2 => "mobilenetv2",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Network::Resnet18 => "the CIFAR ResNet-18",
            Network::Mobilenetv2 => "MobileNetV2",
        }
    }

    fn layers(self) -> &'static [Layer] {
        match self {
            Network::Resnet18 => &RESNET18,
            Network::Mobilenetv2 => &MOBILENETV2,
        }
    }
}

/// A convolution of the network, and how often it occurs.
struct Layer {
    times: usize,
    input: [usize; 3],
    outputs: usize,
    kernel: usize,
    stride: usize,
    groups: usize,
}

/// A 3x3 kernel for each channel.
const fn depthwise(times: usize, size: usize, channels: usize, stride: usize) -> Layer {
    Layer {
        groups: channels,
        ..layer(times, size, channels, channels, 3, stride)
    }
}

/// A 1x1 kernel.
const fn one(times: usize, size: usize, inputs: usize, outputs: usize) -> Layer {
    layer(times, size, inputs, outputs, 1, 1)
}

const fn layer(
    times: usize,
    size: usize,
    inputs: usize,
    outputs: usize,
    kernel: usize,
    stride: usize,
) -> Layer {
    Layer {
        times,
        input: [size, size, inputs],
        outputs,
        kernel,
        stride,
        groups: 1,
    }
}

/// The convolutions of the CIFAR ResNet-18.
const RESNET18: [Layer; 11] = [
    layer(1, 32, 3, 64, 3, 1),
    layer(4, 32, 64, 64, 3, 1),
    layer(1, 32, 64, 128, 3, 2),
    layer(1, 32, 64, 128, 1, 2),
    layer(3, 16, 128, 128, 3, 1),
    layer(1, 16, 128, 256, 3, 2),
    layer(1, 16, 128, 256, 1, 2),
    layer(3, 8, 256, 256, 3, 1),
    layer(1, 8, 256, 512, 3, 2),
    layer(1, 8, 256, 512, 1, 2),
    layer(3, 4, 512, 512, 3, 1),
];

/// The convolutions of torchvision's MobileNetV2 on 32 x 32 images.
const MOBILENETV2: [Layer; 33] = [
    layer(1, 32, 3, 32, 3, 2),
    depthwise(1, 16, 32, 1),
    one(1, 16, 32, 16),
    one(1, 16, 16, 96),
    depthwise(1, 16, 96, 2),
    one(1, 8, 96, 24),
    one(2, 8, 24, 144),
    depthwise(1, 8, 144, 1),
    one(1, 8, 144, 24),
    depthwise(1, 8, 144, 2),
    one(1, 4, 144, 32),
    one(3, 4, 32, 192),
    depthwise(2, 4, 192, 1),
    one(2, 4, 192, 32),
    depthwise(1, 4, 192, 2),
    one(1, 2, 192, 64),
    one(4, 2, 64, 384),
    depthwise(4, 2, 384, 1),
    one(3, 2, 384, 64),
    one(1, 2, 384, 96),
    one(3, 2, 96, 576),
    depthwise(2, 2, 576, 1),
    one(2, 2, 576, 96),
    depthwise(1, 2, 576, 2),
    one(1, 1, 576, 160),
    one(3, 1, 160, 960),
    depthwise(3, 1, 960, 1),
    one(2, 1, 960, 160),
    one(1, 1, 960, 320),
    one(1, 1, 320, 1280),
    // On larger images, where the memory's speed shows.
    depthwise(0, 56, 144, 1),
    depthwise(0, 56, 144, 2),
    depthwise(0, 14, 384, 1),
];

/// Runs the benchmark and prints.
///
/// # Errors
///
/// Usage errors naming the flag, and output that is gone.
pub fn run(args: &KernelArgs) -> Result<()> {
    crate::error::check_count("--batch", args.batch, 1 << 14)?;
    crate::error::check_count("--threads", args.threads, 1 << 10)?;
    let peak = peak_gflops(args.precision.into(), 100);
    // Layers with groups multiply f32 at any precision.
    let grouped_peak = match args.precision {
        PrecisionArg::Fp32 => peak,
        PrecisionArg::Bf16 => peak_gflops(Precision::F32, 100),
    };
    if !args.json {
        print_line(&format!(
            "convolutions of {}, batch {}, {}, {}; {peak:.0} GFLOP/s is the peak of one core\n\
             GFLOP/s count the plain sum's operations: methods that need fewer can exceed the peak\n{:<22} {:>5} {:>15} {:>9} {:>9} {:>6}",
            args.network.title(),
            args.batch,
            crate::format::plural(args.threads, "thread"),
            args.precision.describe(),
            "layer",
            "times",
            "pass",
            "best",
            "GFLOP/s",
            "peak"
        ))?;
    }
    let mut total_ms = 0.0;
    for (i, l) in args.network.layers().iter().enumerate() {
        let options = Conv2dOptions::new(l.kernel)
            .stride(l.stride)
            .padding(l.kernel / 2)
            .groups(l.groups);
        let threads = Threads(args.threads);
        let precision = args.precision.into();
        let mut c = Convolution::new(args.batch, l.input, l.outputs, options, threads, precision)?;
        for pass in ConvPass::ALL {
            // Nobody wants the gradient of the images.
            if i == 0 && pass == ConvPass::InputGradient {
                continue;
            }
            let best = best_of(&mut c, pass, Duration::from_millis(args.time));
            let gflops = c.flops() / best.as_secs_f64() / 1e9;
            let peak = if l.groups == 1 { peak } else { grouped_peak };
            let share = gflops / (peak * args.threads as f64);
            total_ms += best.as_secs_f64() * 1e3 * l.times as f64;
            report(args, l, pass, best, gflops, share)?;
        }
    }
    if args.json {
        return Ok(());
    }
    print_line(&format!(
        "{:<22} {:>5} {:>15} {total_ms:>6.1} ms",
        "all", "", "one step"
    ))
}

/// The shortest of as many runs as fit, at least three.
fn best_of(c: &mut Convolution, pass: ConvPass, time: Duration) -> Duration {
    let (began, mut best, mut runs) = (Instant::now(), Duration::MAX, 0);
    while runs < 3 || began.elapsed() < time {
        let start = Instant::now();
        c.run(pass);
        best = best.min(start.elapsed());
        runs += 1;
    }
    best
}

fn report(
    args: &KernelArgs,
    l: &Layer,
    pass: ConvPass,
    best: Duration,
    gflops: f64,
    share: f64,
) -> Result<()> {
    let name = match pass {
        ConvPass::Forward => "forward",
        ConvPass::InputGradient => "input gradient",
        ConvPass::WeightGradient => "weight gradient",
    };
    let [size, _, inputs] = l.input;
    let ms = best.as_secs_f64() * 1e3;
    if args.json {
        let line = json!({
            "model": args.network.key(), "batch": args.batch, "threads": args.threads, "precision": args.precision.title(), "times": l.times,
            "size": size, "inputs": inputs, "outputs": l.outputs, "kernel": l.kernel, "stride": l.stride, "groups": l.groups,
            "pass": name, "best_ms": ms, "gflops": gflops, "peak_share": share,
        });
        return print_line(&line.to_string());
    }
    let stride = if l.stride == 1 { "" } else { "/2" };
    let depthwise = if l.groups == 1 { "" } else { " dw" };
    print_line(&format!(
        "{:<22} {:>5} {name:>15} {ms:>6.2} ms {gflops:>9.0} {:>5.0}%",
        format!(
            "{size}x{size} {inputs}-{} {}x{}{stride}{depthwise}",
            l.outputs, l.kernel, l.kernel
        ),
        l.times,
        share * 100.0
    ))
}

fn print_line(line: &str) -> Result<()> {
    say::print(&format!("{line}\n"))
}
