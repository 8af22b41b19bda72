//! A training program as one rank runs it.

use std::rc::Rc;
use std::sync::Arc;

use phalanx_comm::ProcessGroup;
use phalanx_data::Dataset;
#[cfg(feature = "images")]
use phalanx_data::folder::{DamagedImage, ImageFolder};
use phalanx_nn::optim::Optimizer;
use phalanx_nn::{Params, Scope};

use crate::args::Settings;
use crate::error::{Error, ErrorKind, Result, refuse};
use crate::run::{About, Run};
use crate::trainer::{TrainerBuilder, Trainings};
use phalanx_member::RankContext;

/// What a training program gets on each rank: its place among the ranks, and the settings of its
/// command line.
pub struct Job<'a> {
    name: &'a str,
    ctx: &'a RankContext,
    settings: &'a Settings,
    trainings: Rc<Trainings>,
}

impl<'a> Job<'a> {
    /// The job of the program `name` on a rank.
    pub fn new(name: &'a str, ctx: &'a RankContext, settings: &'a Settings) -> Self {
        Job {
            name,
            ctx,
            settings,
            trainings: Rc::default(),
        }
    }

    /// An error if the program has trained and has not called [`Trainer::finish`](crate::Trainer::finish): nothing of it
    /// would be saved. For those who call the program, after it.
    ///
    /// # Errors
    ///
    /// That one.
    pub fn check_finished(&self) -> Result<()> {
        match self.trainings.unfinished.get() {
            true => Err(Error::new(
                ErrorKind::Failed,
                "the program ended without Trainer::finish, which saves the weights",
            )),
            false => Ok(()),
        }
    }

    /// This rank, 0-based.
    pub fn rank(&self) -> usize {
        self.ctx.rank()
    }

    /// Number of ranks; 1 without a launcher. For a process that has yet to join an elastic training, that with which this was
    /// started.
    pub fn world_size(&self) -> usize {
        match self.ctx.is_newcomer() {
            true => self.ctx.first_world(),
            false => self.ctx.world(),
        }
    }

    /// Whether this is rank 0, which reports and saves.
    pub fn is_main(&self) -> bool {
        self.ctx.is_main()
    }

    /// The process group of all ranks, for collectives of the program's own. In an elastic training another one takes its
    /// place when ranks are lost or join: ask for it anew before each use.
    pub fn group(&self) -> ProcessGroup {
        self.ctx.group()
    }

    /// The training flags of the command line.
    pub fn settings(&self) -> &'a Settings {
        self.settings
    }

    /// The rank.
    pub fn context(&self) -> &'a RankContext {
        self.ctx
    }

    /// Prints `text` and a newline on standard output, from rank 0 only.
    ///
    /// # Errors
    ///
    /// When standard output cannot be written.
    pub fn print(&self, text: &str) -> Result<()> {
        match self.is_main() {
            true => self.ctx.line(text),
            false => Ok(()),
        }
    }

    /// Prints `warning: ` and `text` on standard error, from rank 0 only. Where it cannot be written, nothing happens.
    pub fn warn(&self, text: &str) {
        self.ctx.note(&format!("warning: {text}"));
    }

    /// `images` without those that cannot be read; the ranks divide the work of decoding all, and rank 0 lists what is left out.
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Usage, when none is left; peers that are lost.
    #[cfg(feature = "images")]
    pub fn skip_damaged(&self, images: &ImageFolder) -> Result<ImageFolder> {
        const SHOWN: usize = 20;
        let _phase = self.ctx.phase("checking images");
        let (group, threads) = (self.group(), self.ctx.threads);
        let parts = group.world_size() * threads;
        let mine: Option<Vec<Vec<DamagedImage>>> = std::thread::scope(|scope| {
            let part = |thread| {
                let part = group.rank() * threads + thread;
                scope.spawn(move || images.damaged(part, parts))
            };
            let all: Vec<_> = (0..threads).map(part).collect();
            all.into_iter().map(|thread| thread.join().ok()).collect()
        });
        let mine = mine.ok_or_else(|| {
            Error::new(
                ErrorKind::Failed,
                "decoding an image panicked; this is a bug",
            )
        })?;
        let mut damaged = group.all_gather_object(&mine.concat())?.concat();
        damaged.sort_by_key(|image| image.index);
        let sound = images.without(&damaged);
        let (count, all) = (damaged.len(), images.len());
        if count > 0 {
            let mut lines: Vec<&str> = damaged.iter().map(|image| &*image.what).collect();
            lines.truncate(SHOWN);
            let more = match count - lines.len() {
                0 => String::new(),
                more => format!("\n  and {more} more"),
            };
            let lines = lines.join("\n  ");
            self.warn(&format!(
                "{count} of {all} images are left out:\n  {lines}{more}"
            ));
        }
        match sound.is_empty() {
            true => Err(Error::usage("no image can be read")),
            false => Ok(sound),
        }
    }

    /// The run of a training loop of the program's own, without a [`Trainer`](crate::Trainer). *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Usage, naming the flag or what is in the folder's way; peers that are lost.
    pub fn run(&self, about: About) -> Result<Run<'a>> {
        if !self.trainings.folders.borrow_mut().insert(String::new()) {
            refuse!("an earlier trainer or run of this program has written into its folder");
        }
        Run::start((self.ctx, self.settings), self.name, about)
    }

    /// A training on `train` of the model whose parameters `model` registers, with the optimizer
    /// that `optimizer` makes for the learning rate (`--lr`), which may be called more than once. A program's second trainer needs a folder of its own
    /// ([`TrainerBuilder::folder`]).
    pub fn trainer<D: Dataset + ?Sized, M, O: Optimizer + 'static>(
        &self,
        train: &Arc<D>,
        model: impl FnOnce(&mut Scope) -> M + 'a,
        optimizer: impl Fn(&Params, f64) -> O + 'a,
    ) -> TrainerBuilder<'a, M> {
        let (at, trainings) = ((self.ctx, self.settings), Rc::clone(&self.trainings));
        TrainerBuilder::new(at, self.name, train, model, optimizer, trainings)
    }
}
