//! What an evaluation measures.

use std::collections::BTreeMap;

use phalanx_data::metrics::Confusion;
use phalanx_nn::Tensor;
use serde_json::{Value, json};

use crate::error::Result;

/// Result of one pass over a test set.
#[derive(Debug, Clone)]
pub struct Evaluation {
    /// Mean over all samples.
    pub loss: f64,
    /// Share of right answers; NaN where no scores were given.
    pub accuracy: f64,
    /// Which class was taken for which, over all samples; of no classes where no scores were given.
    pub confusion: Confusion,
    /// Further measures, each the mean over all samples.
    pub values: BTreeMap<String, f64>,
}

impl Evaluation {
    /// Nothing evaluated yet.
    pub(crate) fn nothing() -> Evaluation {
        Evaluation::new(f64::NAN, Confusion::new(0))
    }

    /// The accuracy follows from `confusion`.
    pub fn new(loss: f64, confusion: Confusion) -> Evaluation {
        Evaluation {
            loss,
            accuracy: confusion.accuracy().unwrap_or(f64::NAN),
            confusion,
            values: BTreeMap::new(),
        }
    }

    /// `record` with what was measured.
    pub(crate) fn added_to(&self, mut record: Value) -> Value {
        record["test_loss"] = json!(self.loss);
        record["accuracy"] = json!(self.accuracy);
        for (name, value) in &self.values {
            record[format!("test_{name}")] = json!(value);
        }
        record
    }

    /// That of a run's summary, without further measures.
    pub(crate) fn of_summary(summary: &Value) -> Evaluation {
        let rows: Vec<Vec<i64>> =
            serde_json::from_value(summary["confusion"].clone()).unwrap_or_default();
        let mut confusion = Confusion::new(rows.len());
        for (count, there) in confusion.counts_mut().iter_mut().zip(rows.concat()) {
            *count = there;
        }
        Evaluation::new(summary["test_loss"].as_f64().unwrap_or(f64::NAN), confusion)
    }

    /// Rows of the true class, columns of the answer.
    pub fn matrix(&self) -> Vec<&[i64]> {
        let classes = self.confusion.classes();
        self.confusion
            .counts()
            .chunks_exact(classes.max(1))
            .collect()
    }

    /// Share of each class that was recognised; `None` for one that is not in
    /// the test set.
    pub fn class_accuracies(&self) -> Vec<Option<f64>> {
        (0..self.confusion.classes())
            .map(|class| self.confusion.recall(class))
            .collect()
    }
}

/// What is measured of one batch of an evaluation.
#[derive(Debug, Clone)]
pub struct Measure {
    /// Sum over the batch's samples.
    pub loss: f64,
    /// Samples of the batch; [`Trainer::evaluate`](crate::Trainer::evaluate) fills it in.
    pub samples: usize,
    /// Counts by true class and answer, where the model classifies.
    pub confusion: Option<Confusion>,
    pub(crate) values: BTreeMap<String, f64>,
    /// Why there is no loss.
    pub(crate) wrong: Option<String>,
}

impl Measure {
    /// A loss that is the *sum* over the batch's samples, as
    /// `scores.cross_entropy(labels, 1.0)` is.
    pub fn of_loss(sum: Tensor<'_>) -> Measure {
        Measure::of_sum(0.0).with_loss(sum)
    }

    /// As [`of_loss`](Self::of_loss), of a number.
    pub fn of_sum(loss: f64) -> Measure {
        Measure {
            loss,
            samples: 0,
            confusion: None,
            values: BTreeMap::new(),
            wrong: None,
        }
    }

    /// Of no sample, where a rank has none of a batch.
    pub fn empty() -> Measure {
        Measure::of_sum(0.0)
    }

    /// The answers of a classifier: `scores` has a row a sample and a column a class, the highest
    /// is the answer. Read before the loss takes the scores:
    /// `Measure::of_scores(&scores, labels)?.with_loss(scores.cross_entropy(labels, 1.0)?)`.
    ///
    /// # Errors
    ///
    /// `Usage`, when a label is not below the number of classes.
    pub fn of_scores(scores: &Tensor<'_>, labels: &[u32]) -> Result<Measure> {
        let values = scores.data();
        let mut confusion = Confusion::new(values.len() / labels.len().max(1));
        confusion.add_scores(values, labels)?;
        Ok(Measure {
            confusion: Some(confusion),
            ..Measure::of_sum(0.0)
        })
    }

    /// The same with a loss, as [`of_loss`](Self::of_loss) takes it.
    #[must_use]
    pub fn with_loss(mut self, sum: Tensor<'_>) -> Measure {
        match sum.item() {
            Ok(sum) => self.loss = f64::from(sum),
            Err(error) => self.wrong = Some(error.to_string()),
        }
        self
    }

    /// The measures that [`with_value`](Self::with_value) added.
    pub fn values(&self) -> &BTreeMap<String, f64> {
        &self.values
    }

    /// One more measure: `sum` over the batch's samples. All batches have the same names.
    #[must_use]
    pub fn with_value(mut self, name: &str, sum: f64) -> Measure {
        self.values.insert(name.to_owned(), sum);
        self
    }
}
