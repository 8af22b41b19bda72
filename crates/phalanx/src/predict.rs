//! `phalanx predict`: what a trained network says about images.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use phalanx_nn::models::{CifarResNet, MnistCnn, MobileNetV2, ResNet9};
use phalanx_nn::{Params, Scope, Seed, Tape, Threads};
use phalanx_train::checkpoint::{load_params, read_tensors, save_tensors};
use phalanx_train::cifar10::{self, Scaling};
use phalanx_train::metrics::argmax;
use phalanx_train::{Dataset, image, mnist, synthetic};
use serde::Serialize;

use crate::error::{Error, ErrorKind, Result};
use crate::ranks;
use crate::train::{Net, mirrored, print};

/// Arguments of `phalanx predict`.
#[derive(Debug, clap::Args)]
pub struct PredictArgs {
    /// Weights (.pth, .pt, .safetensors), or a resumable checkpoint's .json
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// A data set's folder (its test set), `synthetic`, or images: PNG, PGM, PPM
    #[arg(long, required = true, num_args = 1.., value_name = "DIR|synthetic|IMAGE")]
    data: Vec<PathBuf>,
    /// The network [default: what the checkpoint says, or the one that it fits]
    #[arg(long, value_parser = names(), value_name = "NAME")]
    model: Option<String>,
    /// What networks of colour images take for a pixel [default: what the checkpoint says, or what the
    /// network is trained with by default]
    #[arg(long, value_enum, value_name = "unit|normalised")]
    pixels: Option<Pixels>,
    /// Whether to look at each image mirrored, too, and take the mean of the scores [default: as --pixels]
    #[arg(long, value_name = "true|false")]
    mirrored: Option<bool>,
    /// Predictions, a JSON object a line [default: standard output]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// At most so many samples of a data set
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Images at a time
    #[arg(long, default_value_t = 250, value_name = "N")]
    batch_size: usize,
    /// Compute threads [default: one a core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

/// What a byte of a colour image becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Pixels {
    /// 0 to 1
    Unit,
    /// The same less the training set's mean, divided by its deviation
    Normalised,
}

impl Pixels {
    fn scaling(self) -> Scaling {
        match self {
            Pixels::Unit => Scaling::Unit,
            Pixels::Normalised => Scaling::Normalised,
        }
    }
}

/// A network that predictions can be made with.
struct Known {
    /// As `--model` and a checkpoint's metadata have it.
    name: &'static str,
    /// Height, width, channels.
    image: [usize; 3],
    build: fn(&mut Scope) -> Box<dyn Net>,
    /// What it is trained with by default, and whether it is tested on mirrored images too.
    looks: (Pixels, bool),
}

const CIFAR: [usize; 3] = [32, 32, 3];

const KNOWN: [Known; 4] = [
    Known {
        name: "mnist_cnn",
        image: [28, 28, 1],
        build: |scope| Box::new(MnistCnn::new(scope)),
        looks: (Pixels::Normalised, false),
    },
    Known {
        name: "resnet18",
        image: CIFAR,
        build: |scope| Box::new(CifarResNet::resnet18(scope)),
        looks: (Pixels::Unit, false),
    },
    Known {
        name: "resnet9",
        image: CIFAR,
        build: |scope| Box::new(ResNet9::new(scope, cifar10::CLASSES)),
        looks: (Pixels::Normalised, true),
    },
    Known {
        name: "mobilenetv2",
        image: CIFAR,
        build: |scope| Box::new(MobileNetV2::new(scope, cifar10::CLASSES)),
        looks: (Pixels::Unit, false),
    },
];

/// How a checkpoint's network looks at images.
struct Looks {
    scaling: Scaling,
    mirrored: bool,
}

impl Looks {
    /// As typed, else as the checkpoint says, else as the network is trained by default.
    fn new(args: &PredictArgs, known: &Known, metadata: &BTreeMap<String, String>) -> Looks {
        let (pixels, mirrored) = match metadata.get("pixels").map(String::as_str) {
            Some("unit") => (Pixels::Unit, false),
            Some("normalised") => (Pixels::Normalised, false),
            _ => known.looks,
        };
        let said = metadata.get("mirrored").map(|text| text == "true");
        Looks {
            scaling: args.pixels.unwrap_or(pixels).scaling(),
            mirrored: args.mirrored.or(said).unwrap_or(mirrored),
        }
    }

    /// What each channel's bytes become.
    fn tables(&self, known: &Known) -> Vec<[f32; 256]> {
        if known.image[2] == 1 {
            vec![mnist::normalised()]
        } else {
            self.scaling.table().to_vec()
        }
    }
}

fn names() -> clap::builder::PossibleValuesParser {
    KNOWN
        .iter()
        .map(|known| known.name)
        .collect::<Vec<_>>()
        .into()
}

/// One image and what the network made of it.
#[derive(Debug, Serialize)]
struct Row {
    /// Number in the data set, or name of the file.
    image: serde_json::Value,
    /// The class with the highest score.
    guess: u32,
    /// The label, where there is one.
    truth: Option<u32>,
    /// One a class, as the network gives them.
    scores: Vec<f32>,
}

/// Runs `phalanx predict`.
///
/// # Errors
///
/// Usage, or those of reading and writing, naming the file.
pub fn run(args: &PredictArgs) -> Result<()> {
    ranks::check_count("--batch-size", args.batch_size, 1 << 20)?;
    ranks::check_count("--limit", args.limit.unwrap_or(1), usize::MAX)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(cores);
    ranks::check_count("--threads", threads, (4 * cores).max(16))?;
    let (known, net, params, metadata) = network(&args.checkpoint, args.model.as_deref())?;
    if known.image[2] == 1 && args.pixels.is_some() {
        return Err(Error::usage(format!(
            "--pixels is for networks of colour images, and {} takes grey ones",
            known.name
        )));
    }
    let looks = Looks::new(args, known, &metadata);
    let source = Source::open(args, known, &looks)?;
    let samples = source.len().min(args.limit.unwrap_or(usize::MAX));
    let mut tape = Tape::new(Threads(threads));
    let [h, w, c] = known.image;
    let elems = h * w * c;
    let mut text = Vec::new();
    let (mut right, mut judged) = (0usize, 0usize);
    for first in (0..samples).step_by(args.batch_size) {
        let batch = args.batch_size.min(samples - first);
        let mut images = vec![0.0; batch * elems];
        let mut truths = Vec::with_capacity(batch);
        for (i, image) in images.chunks_exact_mut(elems).enumerate() {
            truths.push(source.read(first + i, image, known)?);
        }
        let step = tape.inference(&params);
        let shape = [batch, h, w, c];
        let mut scores = net.forward(step.input(&images, &shape)?)?;
        if looks.mirrored {
            let other = net.forward(step.input(&mirrored(&images, known.image), &shape)?)?;
            scores = scores.add(other)?.scale(0.5)?;
        }
        let scores = scores.to_vec();
        let classes = scores.len() / batch;
        for (i, (scores, truth)) in scores.chunks_exact(classes).zip(truths).enumerate() {
            let guess = argmax(scores).unwrap_or(0) as u32;
            judged += usize::from(truth.is_some());
            right += usize::from(truth == Some(guess));
            let row = Row {
                image: source.name(first + i),
                guess,
                truth,
                scores: scores.to_vec(),
            };
            serde_json::to_writer(&mut text, &row).map_err(|e| {
                Error::new(ErrorKind::Failed, "predictions are no JSON").caused_by(e)
            })?;
            text.push(b'\n');
        }
    }
    match &args.output {
        Some(path) => phalanx_train::files::atomic_write(path, &text)?,
        None => print(&String::from_utf8_lossy(&text))?,
    }
    let accuracy = match judged {
        0 => String::new(),
        _ => format!(
            ", {right} of {judged} right ({:.2} %)",
            100.0 * right as f64 / judged as f64
        ),
    };
    eprintln!("{samples} images with {}{accuracy}", known.name);
    Ok(())
}

/// What [`network`] finds.
type Network = (
    &'static Known,
    Box<dyn Net>,
    Params,
    BTreeMap<String, String>,
);

/// The network of the checkpoint with its weights, and what the checkpoint says besides.
fn network(path: &Path, wanted: Option<&str>) -> Result<Network> {
    let (tensors, loaded) = read_tensors(path)?;
    for warning in &loaded.warnings {
        eprintln!("warning: {warning}");
    }
    let said = wanted.or(loaded.metadata.get("model").map(String::as_str));
    let candidates: Vec<&'static Known> = match said {
        Some(name) => KNOWN.iter().filter(|known| known.name == name).collect(),
        None => KNOWN.iter().collect(),
    };
    // Only a file of weights can be loaded; the state of a training is made one.
    let weights;
    let path = if path.extension().is_some_and(|e| e == "json") {
        let file = tempfile::Builder::new().suffix(".safetensors").tempfile();
        weights = file.map_err(|e| {
            Error::new(ErrorKind::System, "no temporary file can be made").caused_by(e)
        })?;
        save_tensors(weights.path(), tensors, &loaded.metadata)?;
        weights.path()
    } else {
        path
    };
    let mut why = None;
    for known in candidates {
        let mut scope = Scope::new(Seed(0));
        let net = (known.build)(&mut scope);
        let mut params = scope.build()?;
        match load_params(path, &mut params) {
            Ok(_) => return Ok((known, net, params, loaded.metadata)),
            Err(error) => why = Some(error),
        }
    }
    Err(match (why, said) {
        (Some(error), Some(_)) => error.into(),
        (Some(_), None) => {
            let names: Vec<&str> = KNOWN.iter().map(|known| known.name).collect();
            Error::usage(format!(
                "{} fits none of the networks that phalanx predict knows ({})",
                path.display(),
                names.join(", ")
            ))
            .note("see", "why it does not fit one of them, with --model NAME")
        }
        (None, said) => Error::usage(format!(
            "the checkpoint is of the network {}, which phalanx predict does not know",
            said.unwrap_or("without a name")
        )),
    })
}

/// Where images come from.
enum Source {
    Set(Box<dyn Dataset>),
    /// With what each channel's bytes become.
    Files(Vec<PathBuf>, Vec<[f32; 256]>),
}

impl Source {
    fn open(args: &PredictArgs, known: &Known, looks: &Looks) -> Result<Source> {
        let grey = known.image[2] == 1;
        let set: Box<dyn Dataset> = match &args.data[..] {
            [one] if one.as_os_str() == "synthetic" => {
                let samples = args.limit.unwrap_or(1000);
                if grey {
                    Box::new(synthetic::digits(samples, 1))
                } else {
                    Box::new(synthetic::pictures(0, samples, 1, looks.scaling))
                }
            }
            [one] if one.is_dir() => {
                if grey {
                    Box::new(mnist::load(one, mnist::Split::Test)?)
                } else {
                    Box::new(cifar10::load(one, cifar10::Split::Test, looks.scaling)?)
                }
            }
            files => return Ok(Source::Files(files.to_vec(), looks.tables(known))),
        };
        if set.image_shape() != known.image {
            return Err(Error::usage(format!(
                "{} has images of {:?}, the network {} takes {:?} (height, width, channels)",
                set.name(),
                set.image_shape(),
                known.name,
                known.image
            )));
        }
        Ok(Source::Set(set))
    }

    fn len(&self) -> usize {
        match self {
            Source::Set(set) => set.len(),
            Source::Files(files, _) => files.len(),
        }
    }

    fn name(&self, index: usize) -> serde_json::Value {
        match self {
            Source::Set(_) => index.into(),
            Source::Files(files, _) => files[index].to_string_lossy().into(),
        }
    }

    /// Writes image `index` to `out` and gives its label, if it has one.
    fn read(&self, index: usize, out: &mut [f32], known: &Known) -> Result<Option<u32>> {
        match self {
            Source::Set(set) => Ok(Some(set.read(index, out)?)),
            Source::Files(files, tables) => {
                let pixels = image::read(&files[index], known.image)?;
                let channels = tables.iter().cycle();
                for ((out, pixel), table) in out.iter_mut().zip(pixels).zip(channels) {
                    *out = table[usize::from(pixel)];
                }
                Ok(None)
            }
        }
    }
}
