//! `phalanx predict`: what a trained network says about images, or about the rows of a table.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use phalanx_base::text::visible_json;
use phalanx_checkpoint::{AdapterConfig, load_params, read_metadata};
use phalanx_data::cifar10::{self, Scaling};
use phalanx_data::folder::{ImageFolder, Transforms, read_image};
use phalanx_data::metrics::argmax;
use phalanx_data::{ImageDataset, mnist, synthetic};
use phalanx_nn::{Params, Scope, Seed, Tape, Threads};
use phalanx_report::image;
use serde::Serialize;

use crate::error::{Error, ErrorKind, Result, refuse};
use crate::format::plural;
use crate::say;
use phalanx_train::{check_folder_of, file_of, weights_of};

use phalanx_recipes::{NETWORKS, Net, Network, Pixels, Views, photos, programs};

/// Arguments of `phalanx predict`.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "phalanx predict CHECKPOINT [OPTIONS] --data <DIR|synthetic|IMAGE|TABLE>..."
)]
pub struct PredictArgs {
    /// Weights (.pth, .pt, .safetensors, the .index.json of a model in several files), a resumable checkpoint's .json, or the folder of a run
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// Test set in a data set's folder, `synthetic` (generated test images), image files (PNG, PGM, PPM; JPEG and PNG of any size
    /// for a network that was trained on a folder of classes), or for a run of train table a CSV or Parquet file; takes all following arguments, so put CHECKPOINT first
    #[arg(long, required = true, num_args = 1.., value_name = "DIR|synthetic|IMAGE|TABLE")]
    data: Vec<PathBuf>,
    /// Network [default: the checkpoint's, or the one that fits its weights]
    #[arg(long, value_parser = names(), value_name = "NAME")]
    model: Option<String>,
    /// Pixel values of colour images [default: the checkpoint's, or the network's training default]
    #[arg(long, value_enum, value_name = "unit|normalised")]
    pixels: Option<Pixels>,
    /// Views of each image whose scores are averaged: `mirrored` adds its mirror image, `shifted` four more by a pixel
    /// [default: as --pixels]
    #[arg(
        long,
        value_enum,
        hide_possible_values = true,
        value_name = "one|mirrored|shifted"
    )]
    views: Option<Views>,
    /// File for predictions, one JSON object per line, or CSV for a table [default: standard output]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Predict at most N samples of a data set
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Images or rows per batch
    #[arg(long, default_value_t = 250, value_name = "N")]
    batch_size: usize,
    /// Compute threads [default: one per core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Ranks that predict the rows of a table
    #[arg(long, default_value_t = 1, value_name = "N")]
    nproc_per_node: usize,
    /// What the launcher gives to the ranks
    #[arg(long, hide = true)]
    output_dir: Option<PathBuf>,
}

/// As many as a training may draw; far above any data set.
const MAX_SAMPLES: usize = 100_000_000;

/// The networks that predictions can be made with.
fn known() -> impl Iterator<Item = Network> {
    NETWORKS.into_iter().map(|(_, network)| network)
}

/// How images are prepared for a checkpoint's network.
struct Preprocessing {
    scaling: Scaling,
    views: Views,
    /// For a network that was trained on a folder of classes.
    own: Option<Own>,
}

/// Images of one's own.
struct Own {
    size: usize,
    classes: Vec<String>,
    transforms: Transforms,
}

impl Preprocessing {
    /// As typed, else as the checkpoint says, else as the network is trained by default.
    fn new(
        args: &PredictArgs,
        known: &Network,
        metadata: &BTreeMap<String, String>,
    ) -> Preprocessing {
        let (pixels, views) = match metadata.get("pixels").map(String::as_str) {
            Some("unit") => (Pixels::Unit, Views::One),
            Some("normalised") => (Pixels::Normalised, Views::One),
            _ => (known.pixels, known.views),
        };
        let said = metadata
            .get("views")
            .map(|text| <Views as clap::ValueEnum>::from_str(text, false));
        // As checkpoints before 2026-11-28 say it.
        let was_mirrored = metadata.get("mirrored").is_some_and(|text| text == "true");
        let was_mirrored = was_mirrored.then_some(Views::Mirrored);
        let said = said.and_then(std::result::Result::ok).or(was_mirrored);
        let pixels = args.pixels.unwrap_or(pixels);
        let own = classes(metadata).map(|classes| {
            let size = metadata
                .get("image_size")
                .and_then(|size| size.parse().ok());
            let size = size.filter(|size| (1..=4096).contains(size));
            let size = size.unwrap_or(known.image[0]);
            let transforms = photos::plain(size, pixels);
            Own {
                size,
                classes,
                transforms,
            }
        });
        Preprocessing {
            scaling: pixels.scaling(),
            views: args.views.or(said).unwrap_or(views),
            own,
        }
    }

    /// Height, width, channels of the images that the network gets.
    fn image(&self, known: &Network) -> [usize; 3] {
        let own = self.own.as_ref().map(|own| [own.size, own.size, 3]);
        own.unwrap_or(known.image)
    }

    /// What each channel's bytes become.
    fn tables(&self, known: &Network) -> Vec<[f32; 256]> {
        if known.image[2] == 1 {
            vec![mnist::normalised()]
        } else {
            self.scaling.table().to_vec()
        }
    }
}

/// The names of the classes of one's own images, if the checkpoint is of such a training.
fn classes(metadata: &BTreeMap<String, String>) -> Option<Vec<String>> {
    serde_json::from_str(metadata.get("classes")?).ok()
}

fn names() -> clap::builder::PossibleValuesParser {
    known().map(|known| known.model).collect::<Vec<_>>().into()
}

/// One image and what the network made of it.
#[derive(Debug, Serialize)]
struct Row {
    /// Number in the data set, or name of the file.
    image: serde_json::Value,
    /// The class with the highest score.
    guess: u32,
    /// Its name, where images are one's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    class: Option<String>,
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
    crate::error::check_count("--batch-size", args.batch_size, 1 << 20)?;
    crate::error::check_count("--limit", args.limit.unwrap_or(1), MAX_SAMPLES)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(cores);
    crate::error::check_count("--threads", threads, (4 * cores).max(16))?;
    if let Some(path) = &args.output {
        if path.as_os_str() == "-" {
            refuse!("--output - is no file; without --output, predictions go to standard output");
        }
        check_folder_of("--output", path)?;
    }
    if read_metadata(&weights_of(&args.checkpoint)?)?.contains_key("preprocessing") {
        return predict_rows(args);
    }
    if args.nproc_per_node != 1 {
        refuse!("--nproc-per-node is for tables");
    }
    let checkpoint = file_of(&args.checkpoint)?;
    let (known, net, params, metadata) = network(&checkpoint, args.model.as_deref())?;
    if known.image[2] == 1 && args.pixels.is_some() {
        refuse!(
            "--pixels is for networks of colour images, and {} takes grey ones",
            known.model
        );
    }
    if known.other_pixels && args.pixels.is_none() && !metadata.contains_key("pixels") {
        say::note(format_args!(
            "warning: {} does not say which pixels it was trained with; taken for unit ones, as those of the document's \
             training are; --pixels normalised for those of --recipe fast or standard",
            checkpoint.display()
        ));
    }
    let preprocessing = Preprocessing::new(args, &known, &metadata);
    let source = Source::open(args, &known, &preprocessing)?;
    let image = preprocessing.image(&known);
    let mut predictor = Predictor {
        args,
        image,
        known,
        net,
        params,
        source,
        views: preprocessing.views,
        classes: preprocessing.own.map_or_else(Vec::new, |own| own.classes),
        tape: Tape::new(Threads(threads)),
        seen: 0,
        judged: 0,
        right: 0,
    };
    match &args.output {
        Some(path) => predictor.write(path)?,
        None => predictor.all(&mut say::print_json)?,
    }
    predictor.sum_up();
    Ok(())
}

/// Predicts the rows of a table by `phalanx train table --predict`, to which each rank comes by this command.
fn predict_rows(args: &PredictArgs) -> Result<()> {
    let of_images = args.model.is_some() || args.pixels.is_some() || args.views.is_some();
    let [data] = &args.data[..] else {
        refuse!("--data takes one table");
    };
    if of_images || args.limit.is_some() {
        refuse!("--model, --pixels, --views and --limit are not for tables");
    }
    let [batch, ranks] = [args.batch_size, args.nproc_per_node].map(|n| n.to_string());
    let threads = args.threads.map(|threads| threads.to_string());
    let output = args.output.as_deref().unwrap_or("-".as_ref());
    let flags: [(&str, Option<&OsStr>); 7] = [
        ("--init", Some(args.checkpoint.as_ref())),
        ("--data", Some(data.as_ref())),
        ("--predict", Some(output.as_ref())),
        ("--test-batch-size", Some(batch.as_ref())),
        ("--nproc-per-node", Some(ranks.as_ref())),
        ("--threads", threads.as_ref().map(AsRef::as_ref)),
        ("--output-dir", args.output_dir.as_ref().map(AsRef::as_ref)),
    ];
    let given = flags
        .iter()
        .filter_map(|(flag, value)| Some([OsStr::new(*flag), (*value)?]));
    let words = [OsStr::new("table")].into_iter().chain(given.flatten());
    let failed = |e: clap::Error| Error::usage(e.to_string());
    let programs = programs();
    let table = programs.iter().find(|program| program.name() == "table");
    let table = table.ok_or_else(|| Error::internal("train has no table"))?;
    let matches = table
        .command()
        .try_get_matches_from(words)
        .map_err(failed)?;
    table.training(&matches).map_err(failed)?.run()
}

/// What predictions are made with, and how they have been so far.
struct Predictor<'a> {
    args: &'a PredictArgs,
    /// Height, width, channels.
    image: [usize; 3],
    known: Network,
    net: Net,
    params: Params,
    source: Source,
    views: Views,
    /// Names of the classes of one's own images.
    classes: Vec<String>,
    tape: Tape,
    /// Images looked at so far.
    seen: usize,
    /// Images with a label, and how many of them were right.
    judged: usize,
    right: usize,
}

impl Predictor<'_> {
    /// Images to look at.
    fn samples(&self) -> usize {
        (self.source.len()).min(self.args.limit.unwrap_or(usize::MAX))
    }

    /// All predictions into the file at `path`, which is whole or as before.
    fn write(&mut self, path: &Path) -> Result<()> {
        phalanx_base::files::try_atomic_write(path, |out| {
            self.all(&mut |rows| {
                let written = out.write_all(visible_json(rows).as_bytes());
                let written = written.map_err(|e| Error::io("cannot write", path, e));
                written.map(|()| true)
            })
        })
    }

    /// Gives `take` the predictions, a JSON object a line, after each batch, until it
    /// wants no more.
    fn all(&mut self, take: &mut dyn FnMut(&str) -> Result<bool>) -> Result<()> {
        let samples = self.samples();
        for first in (0..samples).step_by(self.args.batch_size) {
            let rows = self.batch(first, self.args.batch_size.min(samples - first))?;
            if !take(&rows)? {
                break;
            }
        }
        Ok(())
    }

    /// The predictions of `batch` images from number `first` on.
    fn batch(&mut self, first: usize, batch: usize) -> Result<String> {
        let [h, w, c] = self.image;
        let elems = h * w * c;
        let mut images = vec![0.0; batch * elems];
        let mut truths = Vec::with_capacity(batch);
        for (i, image) in images.chunks_exact_mut(elems).enumerate() {
            truths.push(self.source.read(first + i, image, self.image)?);
        }
        let step = self.tape.inference(&self.params);
        let shape = [batch, h, w, c];
        let forward = |view: &[f32]| (self.net)(step.input(view, &shape)?);
        let scores = self.views.scores(&images, shape, forward)?.to_vec();
        let classes = scores.len() / batch;
        let mut text = String::new();
        self.seen += batch;
        for (i, (scores, truth)) in scores.chunks_exact(classes).zip(truths).enumerate() {
            let guess = argmax(scores).unwrap_or(0) as u32;
            self.judged += usize::from(truth.is_some());
            self.right += usize::from(truth == Some(guess));
            let row = Row {
                image: self.source.name(first + i),
                guess,
                class: self.classes.get(guess as usize).cloned(),
                truth,
                scores: scores.to_vec(),
            };
            let row = serde_json::to_string(&row).map_err(|e| {
                Error::new(ErrorKind::Failed, "predictions are not JSON").caused_by(e)
            })?;
            text.push_str(&row);
            text.push('\n');
        }
        Ok(text)
    }

    /// The last line, for the person at the terminal.
    fn sum_up(&self) {
        let accuracy = match self.judged {
            0 => String::new(),
            judged => format!(
                ", {} of {judged} right ({:.2} %)",
                self.right,
                100.0 * self.right as f64 / judged as f64
            ),
        };
        say::note(format_args!(
            "{} with {}{accuracy}",
            plural(self.seen, "image"),
            self.known.model
        ));
    }
}

/// What [`network`] finds.
type Found = (Network, Net, Params, BTreeMap<String, String>);

/// The network of the checkpoint with its weights, and what the checkpoint says besides.
fn network(path: &Path, wanted: Option<&str>) -> Result<Found> {
    let metadata = read_metadata(path)?;
    let said = wanted.or(metadata.get("model").map(String::as_str));
    let candidates = known().filter(|known| said.is_none_or(|name| known.model == name));
    let mut why = None;
    for known in candidates {
        let mut scope = Scope::new(Seed(0));
        if let Some(config) = AdapterConfig::of_file(path, &metadata)? {
            scope.lora(config.lora());
        }
        let classes = classes(&metadata).map_or(known.classes, |classes| classes.len());
        let net = (known.build)(&mut scope, false, classes);
        let mut params = scope.build()?;
        match load_params(path, &mut params) {
            Ok(loaded) => {
                for warning in &loaded.warnings {
                    say::note(format_args!("warning: {warning}"));
                }
                return Ok((known, net, params, metadata));
            }
            Err(error) => why = Some(error),
        }
    }
    Err(match (why, said) {
        (Some(error), Some(_)) => error,
        (Some(_), None) => {
            let names: Vec<&str> = known().map(|known| known.model).collect();
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
    Set(Box<dyn ImageDataset>),
    /// With what each channel's bytes become.
    Files(Vec<PathBuf>, Vec<[f32; 256]>),
    /// Of any size.
    Photos(Vec<PathBuf>, Transforms),
    Folder(ImageFolder),
}

impl Source {
    fn open(args: &PredictArgs, known: &Network, preprocessing: &Preprocessing) -> Result<Source> {
        let grey = known.image[2] == 1;
        if let Some(own) = &preprocessing.own {
            return Source::of_own(args, own);
        }
        let set: Box<dyn ImageDataset> = match &args.data[..] {
            [one] if one.as_os_str() == "synthetic" => {
                let samples = args.limit.unwrap_or(1000);
                if grey {
                    Box::new(synthetic::range(synthetic::UNSEEN, samples, 1))
                } else {
                    Box::new(synthetic::pictures(
                        synthetic::UNSEEN,
                        samples,
                        1,
                        preprocessing.scaling,
                    ))
                }
            }
            [one] if one.is_dir() => {
                if grey {
                    Box::new(mnist::load(one, mnist::Split::Test)?)
                } else {
                    Box::new(cifar10::load(
                        one,
                        cifar10::Split::Test,
                        preprocessing.scaling,
                    )?)
                }
            }
            files => return Ok(Source::Files(files.to_vec(), preprocessing.tables(known))),
        };
        known.check_images(&*set, "images")?;
        Ok(Source::Set(set))
    }

    /// Image files, or a folder with the classes that the network knows.
    fn of_own(args: &PredictArgs, own: &Own) -> Result<Source> {
        let folder = match &args.data[..] {
            [one] if one.is_dir() => one,
            files => return Ok(Source::Photos(files.to_vec(), own.transforms.clone())),
        };
        let found: ImageFolder = photos::tests_in(folder)?;
        if found.class_names() != own.classes {
            let [theirs, ours] = [&found.class_names(), &own.classes].map(|names| names.join(", "));
            refuse!(
                "{} has the classes {theirs}, the network knows {ours}",
                folder.display()
            );
        }
        Ok(Source::Folder(found.transform(own.transforms.clone(), 0)?))
    }

    fn len(&self) -> usize {
        match self {
            Source::Set(set) => set.len(),
            Source::Folder(set) => set.len(),
            Source::Files(files, _) | Source::Photos(files, _) => files.len(),
        }
    }

    fn name(&self, index: usize) -> serde_json::Value {
        match self {
            Source::Set(_) => index.into(),
            Source::Folder(set) => set.path(index).map(Path::to_string_lossy).into(),
            Source::Files(files, _) | Source::Photos(files, _) => {
                files[index].to_string_lossy().into()
            }
        }
    }

    /// Writes image `index` to `out` and gives its label, if it has one.
    fn read(&self, index: usize, out: &mut [f32], shape: [usize; 3]) -> Result<Option<u32>> {
        match self {
            Source::Set(set) => Ok(Some(set.read(index, out)?)),
            Source::Folder(set) => Ok(Some(set.read(index, out)?)),
            Source::Files(files, tables) => {
                let pixels = image::read(&files[index], shape)?;
                let channels = tables.iter().cycle();
                for ((out, pixel), table) in out.iter_mut().zip(pixels).zip(channels) {
                    *out = table[usize::from(pixel)];
                }
                Ok(None)
            }
            Source::Photos(files, transforms) => {
                out.copy_from_slice(&read_image(&files[index], transforms)?.0);
                Ok(None)
            }
        }
    }
}
