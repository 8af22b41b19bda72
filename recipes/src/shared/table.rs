//! The network for rows of a table, and its predictions.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx::checkpoint::read_metadata;
use phalanx::data::table::{Preprocessing, TableBatch};
use phalanx::nn::layers::Act;
use phalanx::prelude::*;
use phalanx::train::weights_of;
use phalanx_base::files::atomic_write;

use crate::error::check_count;

/// Linear layers with ReLU between them.
pub struct TableNet {
    hidden: Vec<Linear>,
    output: Linear,
    width: usize,
}

impl TableNet {
    /// From the features of a row to a number or the scores of its classes.
    pub fn new(scope: &mut Scope, rows: &Preprocessing, hidden: &[usize]) -> TableNet {
        let (width, outputs) = (rows.width(), rows.classes().len().max(1));
        let (mut inputs, mut layers) = (width, scope.enter("hidden"));
        let layer = |(i, outputs): (usize, &usize)| {
            let inputs = std::mem::replace(&mut inputs, *outputs);
            Linear::new(layers.enter(&i.to_string()), inputs, *outputs)
        };
        let hidden = hidden.iter().enumerate().map(layer).collect();
        drop(layers);
        let output = Linear::new(scope.enter("output"), inputs, outputs);
        TableNet {
            hidden,
            output,
            width,
        }
    }

    /// The outputs for the features of some rows, a row each.
    ///
    /// # Errors
    ///
    /// `Usage` when there are not as many features as rows have.
    pub fn forward<'s>(&self, step: &'s Step<'s>, features: &[f32]) -> Result<Tensor<'s>> {
        let x = step.input(features, &[features.len() / self.width, self.width])?;
        let mut layers = self.hidden.iter();
        let x = layers.try_fold(x, |x, layer| layer.forward_act(x, Act::Relu))?;
        self.output.forward(x)
    }
}

/// Loss and accuracy of a batch, or loss and what [`in_units_of_the_target`] needs.
///
/// # Errors
///
/// Those of the model.
pub fn measure(net: &TableNet, batch: MicroBatch<'_, TableBatch>) -> Result<Measure> {
    let outputs = net.forward(batch.step(), &batch.features)?;
    if !batch.labels.is_empty() {
        let measure = Measure::of_scores(&outputs, &batch.labels)?;
        return Ok(measure.with_loss(outputs.cross_entropy(&batch.labels, Reduction::Sum)?));
    }
    let targets = batch.targets.iter().map(|target| f64::from(*target));
    let off = targets
        .clone()
        .zip(outputs.data())
        .map(|(target, is)| (target - f64::from(*is)).abs());
    let (off, sum) = (off.sum(), targets.clone().sum());
    let squares = targets.map(|target| target * target).sum();
    let measure = Measure::of_loss(outputs.mse_loss(&batch.targets, Reduction::Sum)?);
    Ok(measure
        .with_value("mae", off)
        .with_value("mean", sum)
        .with_value("square", squares))
}

/// The error in the target's units, and the share of its variance that is explained.
pub fn in_units_of_the_target(evaluation: &mut Evaluation, std: f64) {
    let (values, loss) = (&mut evaluation.values, evaluation.loss);
    if let (Some(mean), Some(square)) = (values.remove("mean"), values.remove("square")) {
        let variance = square - mean * mean;
        if variance > 0.0 {
            values.insert("r2".to_owned(), 1.0 - loss / variance);
        }
        values.insert("rmse".to_owned(), loss.sqrt() * std);
        values.entry("mae".to_owned()).and_modify(|off| *off *= std);
    }
}

/// Checks the sizes of hidden layers, called `flag`.
///
/// # Errors
///
/// Usage, naming the flag.
pub fn check_hidden(flag: &str, hidden: &[usize]) -> Result<()> {
    check_count(flag, hidden.len(), 64)?;
    hidden
        .iter()
        .try_for_each(|size| check_count(flag, *size, 1 << 13))
}

/// Predicts the rows of the file `data` with the weights that `--init` names, on all ranks, and writes them to `output` in the
/// order of the file; `-` is standard output. *Blocks* until all ranks call it.
///
/// # Errors
///
/// Usage and data, naming flag, file or column; those of writing; peers that are lost.
pub fn predict(job: &Job<'_>, data: &Path, output: &Path) -> Result<()> {
    let weights = job.settings().init.path();
    let no_weights = || Error::usage("--predict needs --init RUN, the folder of a training");
    let weights = weights.ok_or_else(no_weights)?;
    let said = match job.is_main() {
        true => Some(read_metadata(&weights_of(weights)?)?),
        false => None,
    };
    let said: BTreeMap<String, String> = job.group().broadcast_object(said.as_ref(), 0)?;
    let (Some(rows), Some(hidden)) = (said.get("preprocessing"), said.get("hidden")) else {
        let what = format!("{} is not of train table", weights.display());
        return Err(Error::usage(what));
    };
    let rows = Preprocessing::from_json(rows);
    let rows = rows.map_err(|e| Error::data(format!("{}: {e}", weights.display())))?;
    let sizes = hidden.split(',').map(|size| size.parse().unwrap_or(0));
    let hidden: Vec<usize> = sizes.collect();
    check_hidden("\"hidden\" of the weights", &hidden)?;
    let table = rows.open(data)?;
    if !table.unused().is_empty() {
        let unused = table.unused().join(", ");
        job.warn(&format!("columns that are not used: {unused}"));
    }
    let samples = Arc::new(rows.transform(&table)?);
    samples.warnings().iter().for_each(|text| job.warn(text));
    let net = |scope: &mut Scope| TableNet::new(scope, &rows, &hidden);
    let trainer = job.trainer(&samples, net, Adam::new);
    let mut trainer = trainer.evaluate_only().start()?;
    let outputs = trainer.predict(&samples, |net, batch| {
        let outputs = net.forward(batch.step(), &batch.features)?;
        if !outputs.data().iter().all(|score| score.is_finite()) {
            let what = "predictions are NaN or infinite: the weights have diverged, or values in the file are too large";
            return Err(Error::data(what));
        }
        let of_row = outputs.data().chunks(outputs.shape()[1]);
        Ok(of_row.map(<[f32]>::to_vec).collect())
    })?;
    let text = rows.predictions(&table, &outputs.concat())?;
    match job.is_main() {
        true if output.as_os_str() == "-" => job.print(text.trim_end()),
        true => atomic_write(output, text.as_bytes()),
        false => Ok(()),
    }
}
