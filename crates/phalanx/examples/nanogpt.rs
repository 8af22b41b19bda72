//! nanoGPT's `train_shakespeare_char` with its settings for a CPU, as a program of its own: random windows of a text, steps
//! instead of epochs, weight decay on matrices only, a warm-up before a cosine, and text at the end.
//! `cargo run --release -p phalanx --example nanogpt -- --text input.txt --nproc-per-node 2`

use phalanx::nn::rng::torch::Generator;
use phalanx::prelude::*;

const CONTEXT: usize = 64;
const LAYERS: usize = 4;
const HEADS: usize = 4;
const WIDTH: usize = 128;

#[derive(clap::Args)]
struct Args {
    /// UTF-8 text file [default: synthetic text]
    #[arg(long)]
    text: Option<std::path::PathBuf>,
}

struct Block(LayerNorm, MultiHeadAttention, LayerNorm, Linear, Linear);

impl Block {
    fn new(mut scope: Scope) -> Block {
        Block(
            LayerNorm::without_bias(scope.enter("ln_1"), &[WIDTH]),
            MultiHeadAttention::without_bias(scope.enter("attn"), WIDTH, HEADS),
            LayerNorm::without_bias(scope.enter("ln_2"), &[WIDTH]),
            Linear::without_bias(scope.enter("fc"), WIDTH, 4 * WIDTH),
            Linear::without_bias(scope.enter("proj"), 4 * WIDTH, WIDTH),
        )
    }

    fn forward<'s>(&self, x: Tensor<'s>) -> Result<Tensor<'s>> {
        let Block(ln_1, attention, ln_2, fc, proj) = self;
        let x = x.share().add(attention.forward(ln_1.forward(x)?, true)?)?;
        let y = fc.forward(ln_2.forward(x.share())?)?.gelu()?;
        x.add(proj.forward(y)?)
    }
}

struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

impl Gpt {
    fn new(scope: &mut Scope, vocabulary: usize) -> Gpt {
        let mut block = |i| Block::new(scope.enter(&format!("h.{i}")));
        let gpt = Gpt {
            blocks: (0..LAYERS).map(&mut block).collect(),
            tokens: Embedding::new(scope.enter("wte"), vocabulary, WIDTH),
            positions: Embedding::new(scope.enter("wpe"), CONTEXT, WIDTH),
            norm: LayerNorm::without_bias(scope.enter("ln_f"), &[WIDTH]),
        };
        scope.initialize(|name, shape| {
            let ends_a_branch = name.ends_with("proj.weight");
            let share = if ends_a_branch { 2 * LAYERS } else { 1 };
            let (mean, std) = (0.0, 0.02 / (share as f64).sqrt());
            (shape.len() == 2).then_some(Init::Normal { mean, std })
        });
        gpt
    }

    /// The scores of the character after each of `tokens`, which are `rows` sequences.
    fn scores<'s>(&self, step: &'s Step<'s>, tokens: &[u32], rows: usize) -> Result<Tensor<'s>> {
        let length = tokens.len() / rows;
        let positions: Vec<u32> = (0..length as u32).collect();
        let positions = self.positions.forward(step, &positions, &[1, length])?;
        let x = self.tokens.forward(step, tokens, &[rows, length])?;
        let x = (self.blocks.iter()).try_fold(x.add(positions)?, |x, block| block.forward(x))?;
        let x = self.norm.forward(x)?.reshape(&[tokens.len(), WIDTH])?;
        // The output layer has the weight of the embedding.
        x.linear(self.tokens.weight, None, Act::None)
    }

    fn loss<'s>(&self, batch: &MicroBatch<'s, TextBatch>, divisor: usize) -> Result<Tensor<'s>> {
        let scores = self.scores(batch.step(), &batch.tokens, batch.samples())?;
        scores.cross_entropy(&batch.targets, divisor as f32)
    }
}

fn main() -> ExitCode {
    let defaults = Defaults::new(1, 12, 1e-3).max_steps(2000).eval_every(250);
    let program = Program::new().defaults(defaults);
    program.main_with(|job, args: &Args| {
        let text = match &args.text {
            Some(path) => TextDataset::open(path, CONTEXT)?,
            None => TextDataset::synthetic(200_000, job.settings().seed, CONTEXT)?,
        };
        let (train, test) = text.split(0.9)?;
        let (train, test) = (Arc::new(train.every_window()), Arc::new(test));
        let vocabulary = train.vocabulary().len();
        let adamw = |params: &Params, lr| {
            let adamw = Adam::adamw(params, lr).betas(0.9, 0.99).weight_decay(0.1);
            adamw.groups(|p| match p.shape.len() {
                2 => ParamGroup::new(),
                _ => ParamGroup::new().weight_decay(0.0),
            })
        };
        let mut trainer = (job.trainer(&train, |scope| Gpt::new(scope, vocabulary), adamw))
            .schedule(|lr, steps| {
                let warm = (steps / 20).max(1);
                Schedule::warm_up(warm, Schedule::cosine(lr, steps - warm + 1, lr / 10.0)?)
            })
            .clip_grad_norm(1.0)
            .start()?;
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |gpt, batch| gpt.loss(&batch, batch.targets.len()))?;
            }
            trainer.evaluate(&test, |gpt, batch| {
                Ok(Measure::of_loss(gpt.loss(&batch, CONTEXT)?))
            })?;
        }
        let written = trainer.infer(|gpt, step| {
            let (mut seen, mut random) = (vec![0], Generator::new(job.settings().seed));
            for _ in 0..300 {
                let last = &seen[seen.len().saturating_sub(CONTEXT)..];
                let shares = gpt.scores(step, last, 1)?.softmax(1)?.to_vec();
                let next = random.multinomial(&shares[shares.len() - vocabulary..], 1)?;
                seen.push(next[0] as u32);
            }
            Ok(train.decode(&seen))
        })?;
        job.print(&written)?;
        trainer.finish().map(drop)
    })
}
