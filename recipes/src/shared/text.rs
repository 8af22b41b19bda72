//! Text to train on, and text that a model makes.

use std::f64::consts::LN_2;

use phalanx::data::{TextBatch, TextDataset};
use phalanx::nn::rng::philox::{philox4x32_10, unit_f32};
use phalanx::prelude::*;
use phalanx::train::Strategy;

use crate::error::check_count;

/// Separates the random numbers of generated text from others with the same seed.
const STREAM: u32 = 0x7465_7874; // "text"

/// Most tokens with a confusion matrix, from which the accuracy follows.
const MAX_CLASSES: usize = 256;

/// Arguments about text.
#[derive(Debug, Clone, clap::Args)]
pub struct TextArgs {
    /// UTF-8 text file, folder of .txt files, file of `phalanx pack`, or `synthetic` for 200000 generated characters,
    /// `synthetic:N` for N; the last tenth is for validation
    #[arg(long, default_value = "synthetic", value_name = "PATH|synthetic[:N]")]
    data: String,
    /// Number of tokens from which the next one is predicted; the tokens of text are its characters
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub context: usize,
}

impl TextArgs {
    /// Adds the names of the data and of its tokens to the summary.
    pub fn name_in_summary<M, S: Strategy>(
        &self,
        trainer: &mut Trainer<'_, M, S>,
        text: &TextDataset,
    ) {
        trainer.add_to_summary("data", self.data.as_str());
        if text.vocabulary().len() <= MAX_CLASSES {
            let names = (0..text.vocabulary().len() as u32).map(|token| text.decode(&[token]));
            trainer.add_to_summary("classes", names.collect::<Vec<_>>());
        }
    }

    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage and data errors naming the flag or the file.
    pub fn validate(&self, seed: u64) -> Result<()> {
        check_count("--context", self.context, 1 << 16)?;
        // A wrong file is one error here, and not one per rank.
        self.load(seed).map(drop).map_err(Error::into_usage)
    }

    /// Text to train on and text for validation.
    ///
    /// # Errors
    ///
    /// Usage and data errors naming the file.
    pub fn load(&self, seed: u64) -> Result<(Arc<TextDataset>, Arc<TextDataset>)> {
        let all = match synthetic::samples(&self.data, 200_000)? {
            Some(characters) => TextDataset::synthetic(characters, seed, self.context),
            None => TextDataset::open(self.data.as_ref(), self.context),
        };
        let (train, test) = all?.split(0.9)?;
        Ok((Arc::new(train), Arc::new(test)))
    }
}

/// The model's scores, a row for each target.
///
/// # Errors
///
/// `Usage` when the sequences are longer than the model's context.
pub fn scores<'s>(gpt: &Gpt, batch: &MicroBatch<'s, TextBatch>) -> Result<Tensor<'s>> {
    let rows = batch.targets.len();
    let sizes = (batch.samples(), rows / batch.samples());
    let scores = gpt.forward(batch.step(), &batch.tokens, sizes)?;
    let vocab = scores.shape()[2];
    scores.reshape(&[rows, vocab])
}

/// Loss, bits per character or byte, and accuracy of a batch of `text`.
///
/// # Errors
///
/// As [`scores`].
pub fn measure(
    gpt: &Gpt,
    batch: &MicroBatch<'_, TextBatch>,
    text: &TextDataset,
) -> Result<Measure> {
    measure_scores(scores(gpt, batch)?, &batch.targets, text)
}

/// The same of the scores of sequences.
///
/// # Errors
///
/// `Usage` when the targets do not fit.
pub fn measure_scores(scores: Tensor<'_>, targets: &[u32], text: &TextDataset) -> Result<Measure> {
    let measure = match scores.shape()[1] {
        ..=MAX_CLASSES => Measure::of_scores(&scores, targets)?,
        _ => Measure::of_sum(0.0),
    };
    // A sample is a sequence; its loss is the mean over its tokens.
    let loss = scores.cross_entropy(targets, text.context() as f32)?;
    let bits = f64::from(loss.item()?) / LN_2;
    let measure = match text.bytes_per_token() {
        None => measure.with_value("bits_per_character", bits),
        Some(bytes) => measure.with_value("bits_per_byte", bits / bytes),
    };
    Ok(measure.with_loss(loss))
}

/// Text of `count` tokens that the model makes.
///
/// # Errors
///
/// Those of the model.
pub fn sample<'s>(
    gpt: &Gpt,
    step: &'s Step<'s>,
    text: &TextDataset,
    count: usize,
    seed: u64,
) -> Result<String> {
    let (mut caches, mut cached) = (Vec::new(), 0);
    generate(text, count, seed, |seen| {
        let scores = match &seen[cached..] {
            // The text exceeds a sequence: every token has another position than before.
            [] => gpt.forward(step, seen, (1, seen.len()))?,
            new => gpt.forward_cached(step, new, (1, new.len()), &mut caches)?,
        };
        cached = seen.len();
        let shares = scores.softmax(2)?;
        let last = shares.numel() - shares.shape()[2];
        Ok(shares.data()[last..].to_vec())
    })
}

/// Text of `count` tokens, each drawn with the probability that
/// `probabilities` gives to it after those before, of which it sees as many as a sequence has.
///
/// # Errors
///
/// Those of `probabilities`.
fn generate(
    text: &TextDataset,
    count: usize,
    seed: u64,
    mut probabilities: impl FnMut(&[u32]) -> Result<Vec<f32>>,
) -> Result<String> {
    let mut tokens = vec![text.first_token()];
    for i in 0..count {
        let first = tokens.len().saturating_sub(text.context());
        let shares = probabilities(&tokens[first..])?;
        let counter = [i as u32, (i >> 32) as u32, 0, STREAM];
        let words = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]);
        tokens.push(pick(&shares, unit_f32(words[0])));
    }
    Ok(text.decode(&tokens[1..]))
}

/// The first element up to which the sum of `shares` exceeds `number`, else the last.
fn pick(shares: &[f32], number: f32) -> u32 {
    let mut sum = 0.0;
    let found = shares.iter().position(|share| {
        sum += share;
        sum > number
    });
    found.unwrap_or(shares.len().saturating_sub(1)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx::nn::{Seed, Tape, Threads};

    #[test]
    fn characters_come_with_their_probability() {
        let text = TextDataset::from_text("t", "ab\n", 2).expect("long enough");
        let mut seen = Vec::new();
        let out = generate(&text, 1000, 7, |tokens| {
            seen.push(tokens.len());
            Ok(vec![0.0, 0.25, 0.75])
        });
        let out = out.expect("text");
        assert_eq!(seen[..3], [1, 2, 2]);
        assert_eq!(out.len(), 1000);
        let a = out.matches('a').count();
        assert!((200..300).contains(&a) && !out.contains('\n'), "{a}");
        assert_eq!((pick(&[0.5, 0.5], 1.0), pick(&[], 0.5)), (1, 0));
    }

    /// Shorter than a sequence, and longer.
    #[test]
    fn text_is_that_of_the_whole_model_for_each_character() {
        let text = TextDataset::synthetic(1000, 1, 24).expect("long enough");
        let mut scope = Scope::new(Seed(3));
        let config = GptConfig {
            vocab: text.vocabulary().len(),
            context: 24,
            layers: 2,
            heads: 2,
            width: 32,
            dropout: 0.1,
        };
        let gpt = Gpt::new(&mut scope, &config);
        let params = scope.build().expect("parameters");
        let mut tape = Tape::new(Threads(2));
        let step = tape.inference(&params);
        let got = sample(&gpt, &step, &text, 60, 5).expect("text");
        let want = generate(&text, 60, 5, |seen| {
            let scores = gpt.forward(&step, seen, (1, seen.len()))?.softmax(2)?;
            Ok(scores.data()[(seen.len() - 1) * config.vocab..].to_vec())
        });
        assert_eq!(got, want.expect("text"));
        assert_eq!(got.chars().count(), 60);
    }
}
