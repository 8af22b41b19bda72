//! Builds a training: model, wrapper, optimizer, reports; new or from a checkpoint.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use phalanx_base::env::real_env;
use phalanx_base::files::as_typed;
use phalanx_checkpoint::state::Place;
use phalanx_checkpoint::weights_digest;
use phalanx_data::Dataset;
use phalanx_data::progress::Progress;
use phalanx_data::sampler::SamplerConfig;
use phalanx_global::Parallel;
use phalanx_nn::optim::Optimizer;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::{Params, Scope, Seed, Tape, Threads};
use phalanx_track::Tracker;

use super::announce::{About, announce, announce_resumed, compare_hosts};
use super::elastic::{Elasticity, Opening};
use super::extent::Extent;
use super::step::{BeforeUpdate, PendingUpdate};
use super::{OwnState, Purpose, Reports, Results, Trainer, Trainings};
use crate::args::Settings;
use crate::args::{self, FOLDER, Found, Mesh};
use crate::best::{Best, BestEpoch, BestMeasure, EarlyStopping};
use crate::deliveries::Deliveries;
use crate::error::{Error, Result};
use crate::evaluation::Evaluation;
use crate::folder::{BEST_FILE, Files, Output};
use crate::folder::{RunDir, default_output_dir};
use crate::format::{number, thousands};
use crate::log::{IMAGES_DIR, RunInfo, TABLES_DIR};
use crate::lr_finder::{self, LrFinder};
use crate::profile::Profiler;
use crate::reporter::{EpochLines, Reporter};
use crate::sample_log::SampleLog;
use crate::saving::{AfterSaving, History, Resumed, SaveAction, Saving};
use crate::split::BatchSplit;
use crate::strategy::{Ddp, MakeOptimizer, OnMesh, Parts, Strategy, weights_sha256};
use crate::timing::Timing;
use phalanx_launch::RankContext;

type Init<'j> = Box<dyn FnOnce(&mut Params) -> Result<()> + 'j>;
type MakeSchedule<'j> = Box<dyn FnOnce(f64, u64) -> Result<Option<Schedule>> + 'j>;

/// Whether a training's folder may be called so in the run's, where a trainer without a name has files and folders.
fn is_folder_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let own = [FOLDER, crate::FLIGHT_DIR, IMAGES_DIR, TABLES_DIR, "wandb"];
    !name.is_empty() && name.chars().all(plain) && !own.contains(&name)
}

/// What a [`Trainer`] is made of; [`start`](Self::start) makes it.
#[must_use = "nothing is trained before start"]
pub struct TrainerBuilder<'j, M, S: Strategy = Ddp> {
    ctx: &'j RankContext,
    settings: &'j Settings,
    program: String,
    title: String,
    samples: usize,
    /// The number of samples, if `--limit-train` leaves some out.
    limited: Option<usize>,
    data: String,
    content: String,
    classes: Vec<String>,
    model: Box<dyn FnOnce(&mut Scope) -> M + 'j>,
    init: Option<Init<'j>>,
    frozen: Vec<String>,
    lr: f64,
    optimizer: MakeOptimizer<'j>,
    optimizer_title: Option<String>,
    /// Name and optimizer of further groups of parameters.
    groups: Vec<(String, MakeOptimizer<'j>)>,
    schedule: Option<MakeSchedule<'j>>,
    clip: Option<f64>,
    best: Option<String>,
    early_stopping: Option<EarlyStopping>,
    drop_last: bool,
    shuffle: bool,
    unit: &'static str,
    /// Units in a sample.
    unit_size: usize,
    shaping: Vec<String>,
    must_agree: Vec<String>,
    files: Files,
    reporter: Box<dyn Reporter>,
    before_update: Option<BeforeUpdate<'j>>,
    after_saving: Option<AfterSaving<'j>>,
    trackers: Vec<Box<dyn Tracker + Send>>,
    folder: Option<String>,
    purpose: Purpose,
    sync_batch_norm: bool,
    trainings: Rc<Trainings>,
    strategy: S::Setup,
}

impl<'j, M> TrainerBuilder<'j, M> {
    /// A training of the model that `model` registers, on `train`, with the optimizer that
    /// `optimizer` makes for a learning rate.
    pub(crate) fn new<D: Dataset + ?Sized, O: Optimizer + 'static>(
        ctx: &'j RankContext,
        settings: &'j Settings,
        program: &str,
        train: &Arc<D>,
        model: impl FnOnce(&mut Scope) -> M + 'j,
        optimizer: impl Fn(&Params, f64) -> O + 'j,
    ) -> Self {
        let samples = settings.limited_train(train.len());
        let limited = (samples < train.len()).then_some(samples);
        TrainerBuilder {
            ctx,
            settings,
            program: program.to_owned(),
            title: program.to_owned(),
            samples,
            limited,
            data: format!("{}, {} samples", train.describe(), thousands(train.len())),
            content: train.content(),
            classes: train.class_names(),
            model: Box::new(model),
            init: None,
            frozen: Vec::new(),
            lr: settings.lr(),
            optimizer: Box::new(move |params, lr| Box::new(optimizer(params, lr))),
            optimizer_title: None,
            groups: Vec::new(),
            schedule: None,
            clip: None,
            best: None,
            early_stopping: None,
            drop_last: false,
            shuffle: true,
            unit: "samples",
            unit_size: 1,
            shaping: Vec::new(),
            must_agree: Vec::new(),
            files: Files {
                model: program.to_owned(),
                weights: Some(format!("{program}.safetensors")),
                ..Files::default()
            },
            reporter: Box::new(EpochLines),
            before_update: None,
            after_saving: None,
            trackers: Vec::new(),
            folder: None,
            purpose: Purpose::Train,
            sync_batch_norm: false,
            trainings: Rc::default(),
            strategy: (),
        }
    }

    /// Trains on `mesh`: the ranks of its dimension `data` split each batch, and the parameters are laid out as `parallel`
    /// says (splits over `tensor` are left out where the mesh has one rank there). The model computes with [`Global`](phalanx_global::Global) tensors; models that are generic over [`Value`](phalanx_nn::Value) stay as
    /// they are.
    pub fn on(self, mesh: Mesh, parallel: Parallel) -> TrainerBuilder<'j, M, OnMesh> {
        self.with_strategy((mesh, parallel))
    }
}

impl<'j, M, S: Strategy> TrainerBuilder<'j, M, S> {
    /// The same with another strategy.
    pub(crate) fn with_strategy<T: Strategy>(self, strategy: T::Setup) -> TrainerBuilder<'j, M, T> {
        TrainerBuilder {
            ctx: self.ctx,
            settings: self.settings,
            program: self.program,
            title: self.title,
            samples: self.samples,
            limited: self.limited,
            data: self.data,
            content: self.content,
            classes: self.classes,
            model: self.model,
            init: self.init,
            frozen: self.frozen,
            lr: self.lr,
            optimizer: self.optimizer,
            optimizer_title: self.optimizer_title,
            groups: self.groups,
            schedule: self.schedule,
            clip: self.clip,
            best: self.best,
            early_stopping: self.early_stopping,
            drop_last: self.drop_last,
            shuffle: self.shuffle,
            unit: self.unit,
            unit_size: self.unit_size,
            before_update: self.before_update,
            after_saving: self.after_saving,
            shaping: self.shaping,
            must_agree: self.must_agree,
            files: self.files,
            reporter: self.reporter,
            trackers: self.trackers,
            folder: self.folder,
            purpose: self.purpose,
            sync_batch_norm: self.sync_batch_norm,
            trainings: self.trainings,
            strategy,
        }
    }

    /// What the model is called in the first lines of the output.
    pub fn title(mut self, title: &str) -> Self {
        self.title = title.to_owned();
        self
    }

    /// What the data set is called in the first lines of the output, and `content`, which tells it
    /// apart from other data ([`Dataset::content`]).
    pub fn data(mut self, description: &str, content: &str) -> Self {
        (self.data, self.content) = (description.to_owned(), content.to_owned());
        self
    }

    /// Changes the freshly drawn parameters before the training starts. Rank 0's are then sent to
    /// all ranks. Not called when a training is resumed.
    pub fn init(mut self, init: impl FnOnce(&mut Params) -> Result<()> + 'j) -> Self {
        self.init = Some(Box::new(init));
        self
    }

    /// Parameters that are not trained: each by its name, or all whose names begin with one of `names` and a point, as those
    /// of a layer or a part of the model.
    pub fn frozen(mut self, names: Vec<String>) -> Self {
        self.frozen = names;
        self
    }

    /// The learning rate that the optimizer and the schedule are made for, where it follows from
    /// more than `--lr`.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
    }

    /// The optimizer in words, for the first lines of the output.
    pub fn optimizer_title(mut self, title: &str) -> Self {
        self.optimizer_title = Some(title.to_owned());
        self
    }

    /// An optimizer of their own for the parameters whose names begin with `name` and a point, as
    /// those of a GAN's discriminator: [`Trainer::step_of`] trains these and nothing else,
    /// [`Trainer::step`] the others. Their gradients are averaged and clipped apart, and their
    /// optimizer's state is in the checkpoints. The schedule changes all learning rates by
    /// the same factor (not at `--lr 0`, which has none), and sets the same momentum.
    pub fn optimizer_of<O: Optimizer + 'static>(
        mut self,
        name: &str,
        optimizer: impl Fn(&Params, f64) -> O + 'j,
    ) -> Self {
        let make: MakeOptimizer<'j> = Box::new(move |params, lr| Box::new(optimizer(params, lr)));
        self.groups.push((name.to_owned(), make));
        self
    }

    /// The learning rate of each step: `schedule` gets the learning rate and the number of steps
    /// of the whole training.
    pub fn schedule(
        self,
        schedule: impl FnOnce(f64, u64) -> phalanx_nn::Result<Schedule> + 'j,
    ) -> Self {
        self.try_schedule(|lr, steps| Ok(Some(schedule(lr, steps)?)))
    }

    /// As [`schedule`](Self::schedule), of one that may be absent; errors are the program's.
    pub fn try_schedule(
        mut self,
        schedule: impl FnOnce(f64, u64) -> Result<Option<Schedule>> + 'j,
    ) -> Self {
        self.schedule = Some(Box::new(schedule));
        self
    }

    /// Scales gradients whose norm, over all parameters, is above `limit` down to it, as
    /// PyTorch's `clip_grad_norm_` does. [`Trainer::grad_norm`] gives the norm, which is also in `metrics.jsonl`; with a limit
    /// of `f64::INFINITY` nothing is scaled.
    pub fn clip_grad_norm(mut self, limit: f64) -> Self {
        self.clip = Some(limit);
        self.shaping.push(format!("clip_grad_norm {limit}"));
        self
    }

    /// The measure of [`evaluate`](Trainer::evaluate) that decides which weights are the best: its name, `:`, and `max` or
    /// `min`, as in `f1:max`. Without this call it is the accuracy, or the loss if there is none.
    pub fn best(mut self, measure: &str) -> Self {
        self.best = Some(measure.to_owned());
        self
    }

    /// Ends the training when the [best](Self::best) measure has not improved for some evaluations: the loop over
    /// [`epochs`](Trainer::epochs) ends then. A resumed training counts on, and one that was stopped early trains nothing.
    pub fn early_stopping(mut self, early: EarlyStopping) -> Self {
        self.shaping.push(early.describe());
        self.early_stopping = Some(early);
        self
    }

    /// Whether batch norms take the mean and variance of all ranks' samples (PyTorch's `convert_sync_batchnorm`), so that small
    /// batches on each rank train as their sum does. On a [mesh](TrainerBuilder::on) they always do.
    pub fn sync_batch_norm(mut self, sync: bool) -> Self {
        self.sync_batch_norm = sync;
        self
    }

    /// Whether every epoch has another order of the samples, as it has without this call; else they come in the data
    /// set's.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// Whether `--sampler torch` drops a last batch that is short. `--drop-last` does so with every sampler.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// What samples are called in the output: `images`.
    pub fn unit(self, unit: &'static str) -> Self {
        self.unit_of(unit, 1)
    }

    /// The unit of the speed in the output and in `summary.json`, and how many units a sample has, as in `("characters", 64)`.
    pub fn unit_of(mut self, unit: &'static str, in_a_sample: usize) -> Self {
        (self.unit, self.unit_size) = (unit, in_a_sample);
        self
    }

    /// Calls `hook` in each step after the gradients are averaged and before the optimizer changes the weights. If it returns
    /// `Ok(false)` on any rank, all ranks skip the update, as they do for gradients that are not finite. A skipped update
    /// counts as a step, and in `skipped_steps` of `summary.json`. An error ends the training. All ranks set a hook. It may be
    /// called twice for a step of an elastic training, if a rank is lost.
    ///
    /// *Cost:* the norm of the gradients, as [`clip_grad_norm`](Self::clip_grad_norm) takes it, and a collective of some bytes.
    pub fn before_update(
        mut self,
        hook: impl FnMut(&PendingUpdate<'_>) -> Result<bool> + 'j,
    ) -> Self {
        self.before_update = Some(Box::new(hook));
        self.must_agree.push("before_update".to_owned());
        self
    }

    /// Calls `hook` with the path of each checkpoint's JSON file when it is complete on the disk, on rank 0: with DDP at the end of
    /// a later step, as checkpoints are written while the training goes on. An error ends the training.
    pub fn after_saving(mut self, hook: impl FnMut(&Path) -> Result<()> + 'j) -> Self {
        self.after_saving = Some(Box::new(hook));
        self
    }

    /// Hyperparameters of the program's own, one a line, its name first:
    /// `--momentum 0.9`. They must be the same on all ranks, and a resumed run says which have
    /// changed.
    pub fn hyperparameters(mut self, settings: Vec<String>) -> Self {
        self.shaping.extend(settings);
        self
    }

    /// Further settings that must be the same on all ranks.
    pub fn same_on_all_ranks(mut self, settings: Vec<String>) -> Self {
        self.must_agree.extend(settings);
        self
    }

    /// The files that are written besides metrics, summary and checkpoints.
    pub fn files(mut self, files: Files) -> Self {
        self.files = files;
        self
    }

    /// What the program prints on standard output.
    pub fn reporter(mut self, reporter: Box<dyn Reporter>) -> Self {
        self.reporter = reporter;
        self
    }

    /// Hands what the run logs to `tracker`, on rank 0, besides those of `--mlflow` and `--wandb`. It has a thread of its
    /// own, and its errors are warnings. The end of the training waits for it, at most ten seconds.
    pub fn tracker(mut self, tracker: impl Tracker + Send + 'static) -> Self {
        self.trackers.push(Box::new(tracker));
        self
    }

    /// Writes into the folder `name` in the run's folder. Each trainer of a program with several, as a teacher's and a
    /// student's, needs a folder of its own; one of them may do without a name.
    pub fn folder(mut self, name: &str) -> Self {
        self.folder = Some(name.to_owned());
        self
    }

    /// The program only evaluates, the weights that `--init` names: the trainer has no epochs and leaves no files.
    pub fn evaluate_only(mut self) -> Self {
        self.purpose = Purpose::Evaluate;
        self
    }

    /// The program measures the training, which leaves no files and prints nothing.
    pub fn measure_only(mut self) -> Self {
        self.purpose = Purpose::Measure;
        self.reporter = Box::new(Silent);
        self
    }

    /// One of the trainings of a program.
    pub(crate) fn of_program(mut self, trainings: Rc<Trainings>) -> Self {
        self.trainings = trainings;
        self
    }

    /// The training's folder: the run's, `run`, or [one in it](Self::folder).
    fn claim_folder(&self, run: &Path) -> Result<PathBuf> {
        let (saving, name) = (&self.settings.saving, self.folder.as_deref());
        let dir = name.map_or_else(|| run.to_owned(), |name| run.join(name));
        let given = name.unwrap_or_default();
        if !self.trainings.folders.borrow_mut().insert(given.to_owned()) {
            let what = format!(
                "an earlier trainer of this program has written into {}",
                dir.display()
            );
            return Err(Error::usage(what).note(
                "fix",
                r#"give this one a folder of its own: job.trainer(...).folder("NAME")"#,
            ));
        }
        let Some(name) = name else {
            return Ok(dir);
        };
        if !is_folder_name(name) {
            let what = format!(
                "folder({name:?}): use letters, digits, - and _, and no name of the trainer's"
            );
            return Err(Error::usage(what));
        }
        if let Some(path) = saving.resumed_path() {
            let what = format!(
                "--resume {} is of one training, and this program has several",
                path.display()
            );
            let flags = format!("--resume auto --output-dir {}", as_typed(run));
            return Err(Error::usage(what).note("fix", flags));
        }
        if self.ctx.is_main() && !matches!(saving.found, Found::Attempt) {
            RunDir::given(dir.clone()).check(saving, run)?;
        }
        Ok(dir)
    }

    /// The run's folder, and the training's: that one, or one in it. *Blocks* until all ranks call it.
    fn folders(&self) -> Result<[PathBuf; 2]> {
        let (ctx, settings) = (self.ctx, self.settings);
        let dir = settings.output_dir.clone();
        let dir = dir.unwrap_or_else(|| default_output_dir(&self.program));
        let run = ctx.folder_of_rank_0(dir)?;
        if self.purpose == Purpose::Train {
            let dir = self.claim_folder(&run)?;
            return Ok([run, dir]);
        }
        if settings.saving.enabled() {
            let what = "--save-every, --stop-after and --resume are for training, and this program only evaluates or measures";
            return Err(Error::usage(what).note("fix", "leave them out; --init FILE names weights"));
        }
        Ok([run.clone(), run])
    }

    /// Checks the settings, and completes what shapes the training. Gives the number of ranks that split a batch: those that
    /// share a part of it count as one.
    fn settle(&mut self) -> Result<usize> {
        let settings = self.settings;
        let (world, shaping) = S::plan(&self.strategy, settings, self.ctx.first_world())?;
        if self.ctx.elastic.is_some() && self.purpose == Purpose::Train {
            settings.check_elastic()?;
            S::check_elastic(&self.strategy)?;
            if !self.trainings.folders.borrow().is_empty() {
                return Err(Error::usage("--elastic is for programs with one trainer"));
            }
        }
        if self.sync_batch_norm {
            settings.check_sync_batch_norm()?;
            self.shaping.push("sync_batch_norm true".to_owned());
        }
        if !self.shuffle {
            self.shaping.push("shuffle false".to_owned());
        }
        self.shaping.splice(0..0, shaping);
        Ok(world)
    }

    /// What must be the same on all ranks, a fact a line.
    fn facts(&self) -> Vec<String> {
        let mut facts = vec![format!("train {}", self.program)];
        facts.extend(self.settings.must_agree());
        facts.extend_from_slice(&self.must_agree);
        facts.extend_from_slice(&self.shaping);
        facts.push(format!("data {}", self.content));
        facts
    }

    /// Builds the training, new or from the checkpoint that `--resume` names, and announces it
    /// on standard error. Rank 0's parameters are sent to all ranks.
    ///
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Usage, naming the flag, folder or file; settings, data or models that differ between
    /// ranks; peers that are lost.
    pub fn start(mut self) -> Result<Trainer<'j, M, S>> {
        let (ctx, settings) = (self.ctx, self.settings);
        let world = self.settle()?;
        if let Some(samples) = self.limited {
            let shown = thousands(samples);
            self.data.push_str(&format!(", the first {shown}"));
            self.content.push_str(&format!(", the first {samples}"));
        }
        let mut trackers = std::mem::take(&mut self.trackers);
        if ctx.is_main() {
            trackers.extend(settings.track.trackers(&real_env())?);
        }
        let starting = ctx.phase("starting");
        let [run, dir] = self.folders()?;
        let resumed = Resumed::find(ctx, &settings.saving, &dir)?;
        let resumable = settings.resumable(&self.program, &self.content, world);
        let shaping = args::settings(&[settings.shaping(), self.shaping.clone()].concat());

        let facts = self.facts();
        // Newcomers compare it before they are in a group.
        let frozen = format!("frozen parameters: {}", self.frozen.join(", "));
        let agreed = [&facts[..], &[frozen]].concat();
        let mut scope = Scope::new(Seed(settings.seed));
        let model = (self.model)(&mut scope);
        let mut params = scope.build()?;
        self.frozen = full_names(&params, &self.frozen)?;
        let sets_weights = self.init.is_some();
        if let Some(resumed) = &resumed {
            resumed.check(&resumable)?;
        } else {
            if let Some(init) = self.init {
                init(&mut params)?;
            }
            settings.init.fill(ctx, &mut params)?;
        }
        let mut tape = Tape::new(Threads(ctx.threads));
        tape.set_precision(settings.precision.into());
        tape.set_anomaly(settings.anomaly);
        let main = (String::new(), self.optimizer);
        let parts = Parts {
            ctx,
            settings,
            resumed: resumed.as_ref().map(|resumed| (resumed, &shaping)),
            params,
            facts: &facts,
            frozen: &self.frozen,
            lr: self.lr,
            samples: self.samples,
            drop_last: self.drop_last,
            shuffle: self.shuffle,
            sync_batch_norm: self.sync_batch_norm,
            optimizers: [main].into_iter().chain(self.groups).collect(),
            tape: &mut tape,
        };
        let mut strategy = S::build(self.strategy, parts)?;
        let title = optimizers_title(&strategy, self.optimizer_title);
        let group = strategy.batch_group();
        let split = BatchSplit::new(&settings.split, group.world_size(), group.rank())?;
        let config = SamplerConfig {
            samples: self.samples,
            world,
            rank: group.rank(),
            shuffle: self.shuffle,
            seed: settings.seed,
        };
        let samplers = settings.samplers(&split, config, self.drop_last)?;
        let plan = split.epoch(&samplers, 0);
        let steps = plan.len() / split.mine().len();
        if steps == 0 {
            return Err(Error::usage(match self.samples {
                0 => "the training set has no samples".to_owned(),
                samples => format!(
                    "no step is left: a short last batch is left out, and the training set has {samples} samples where a step \
                     takes {}",
                    settings.global_batch(world)
                ),
            }));
        }
        let last_batch = split.sizes(&plan, steps - 1).1.samples;
        if let Some(resumed) = &resumed {
            resumed.fits(steps)?;
        }
        let place = resumed.as_ref().map(Resumed::place).unwrap_or_default();
        let extent = Extent::new(settings, steps);
        let history = resumed.as_ref().map(Resumed::history).transpose()?;
        let mut history = history.unwrap_or_default();
        let is_part = settings.eval_every().is_some_and(|every| {
            let taken = place.step_in_epoch as usize;
            taken.is_multiple_of(every)
        });
        let goes_past_cut = place.step_in_epoch > 0 && !extent.is_over(place);
        if goes_past_cut {
            history.go_past_cut(place.step, is_part);
        }
        let lr_finder = settings.find_lr.then(LrFinder::default);
        let schedule = match &lr_finder {
            Some(_) => Some(lr_finder::schedule(extent.all())),
            None => {
                let schedule = self.schedule.map(|make| make(self.lr, extent.all()));
                schedule.transpose()?.flatten()
            }
        };
        let schedule = schedule.map(|mut schedule| {
            use_momentum(&schedule, &mut strategy)?;
            history.replay(&mut schedule, place.step);
            Ok::<_, Error>(schedule)
        });
        let schedule = schedule.transpose()?;
        if let Some(resumed) = &resumed {
            strategy.restore(ctx, resumed, &shaping)?;
        }
        let metadata = self.files.metadata();
        let files = ctx.elastic.map(|_| self.files.clone());
        let mut output = match self.purpose {
            Purpose::Train => Output::open(ctx, dir, self.files, &settings.saving, None)?,
            _ => Output::nowhere(dir),
        };
        let saving = Saving::open(
            ctx,
            &settings.saving,
            resumable.into_iter().chain(shaping.clone()).collect(),
            output.checkpoints(settings.saving.keep()),
            resumed.as_ref(),
        )?
        .with_metadata(metadata)
        .with_hook(self.after_saving);
        // A launcher looks for them, and for what a later attempt continues, in the run's folder.
        if self.purpose != Purpose::Measure {
            ctx.group().set_flight_dir(&run.join(crate::FLIGHT_DIR));
        }
        output.begin(&run, &settings.saving)?;
        let weights = weights_sha256(&strategy, ctx)?;
        // Any rank may become rank 0.
        let weights = match ctx.elastic {
            Some(_) if S::TAKES_OTHERS => Some(hex::encode(weights_digest(strategy.params()))),
            Some(_) => Some(ctx.group().broadcast_object(weights.as_ref(), 0)?),
            None => weights,
        };
        let initial = weights.clone().filter(|_| resumed.is_none());
        let weights = weights.unwrap_or_default();
        let infos = strategy.report(settings).infos;
        let wanted = self.best.as_deref().map(BestMeasure::parse).transpose()?;
        let measure = wanted.as_ref().map(BestMeasure::to_string);
        let mut best = Best::new(wanted, self.early_stopping);
        best.go_on(history.best(), history.judged());
        let is_over = extent.is_over(place);
        // A program may have ended before its last epoch.
        let unchanged = |resumed: &Resumed| {
            let changed = resumed.changed(&shaping);
            let lengthens =
                |line: &String| line.starts_with("--epochs ") || line.starts_with("--max-steps ");
            changed.iter().all(lengthens)
        };
        if let Some(resumed) = &resumed
            && (is_over || best.stops() || unchanged(resumed))
        {
            // One that was stopped early has no more steps, however many are asked for.
            let asked = match best.stops() {
                true => (0, 0),
                false => (extent.epochs(), extent.all()),
            };
            output.find_complete(ctx, &weights, asked)?;
        }
        let is_complete = output.complete().is_some();
        let about = About {
            program: &self.program,
            title: &self.title,
            data: &self.data,
            initial: initial.as_deref(),
            sets_weights,
            frozen: &self.frozen,
            steps,
            extent,
            optimizer: &title,
            only_evaluates: self.purpose == Purpose::Evaluate,
        };
        let description = strategy.describe(ctx, settings)?;
        if self.purpose != Purpose::Measure {
            announce(ctx, settings, &about, &infos, &description, &output);
            compare_hosts(ctx)?;
        }
        let mut reporter = self.reporter;
        if !is_complete && self.purpose == Purpose::Train {
            reporter.on_train_start(ctx, extent.epochs())?;
        }
        output.reopen()?;
        restore_best(
            ctx,
            &mut output,
            &saving,
            &mut strategy,
            best.so_far(),
            place,
        )?;
        if let Some(resumed) = &resumed {
            announce_resumed(ctx, resumed, extent, best.stops(), is_complete);
            resumed.announce_changes(ctx, &shaping);
            settings.init.announce_unused(ctx);
        }
        let mut shown = args::settings(&facts);
        // "no --flag" of what was not typed.
        shown.remove("no");
        shown.retain(|_, value| value != "none");
        shown.extend(settings.of_each_rank());
        shown.insert("model".to_owned(), self.title.clone());
        shown.insert("optimizer".to_owned(), title);
        shown.extend(measure.map(|measure| ("best".to_owned(), measure)));
        let info = RunInfo {
            program: &self.program,
            title: &self.title,
            data: &self.data,
            steps,
            settings: shown,
            params: &infos,
            frozen: &self.frozen,
            labels: &settings.labels,
        };
        let log = match goes_past_cut && !is_part {
            true => output.log_past_cut(ctx, place, &info)?,
            false => output.log(ctx, resumed.as_ref().map(Resumed::place), &info)?,
        };
        let settings_shown = info.settings;
        let mut opening = files.map(|files| Opening {
            title: self.title.clone(),
            data: self.data.clone(),
            settings: settings_shown,
            frozen: self.frozen.clone(),
            files,
            trackers: Vec::new(),
        });
        if !ctx.is_main() || self.purpose != Purpose::Train {
            let trackers = std::mem::take(&mut trackers);
            if let Some(opening) = &mut opening {
                opening.trackers = trackers;
            }
        }
        let from = resumed.as_ref().map(Resumed::place);
        let from = from.or(settings.saving.begins_again(ctx)?.then(Place::default));
        let reports = Reports {
            log,
            deliveries: Deliveries::start(output.dir(), trackers),
            samples: SampleLog::open(ctx, settings.log_samples.as_deref(), from)?,
            progress: match self.purpose {
                Purpose::Measure => Progress::silent(),
                _ => Progress::for_rank(ctx.rank()).with_unit(self.unit),
            },
            profiler: Profiler::new(settings.profile.as_deref(), ctx),
            reporter,
            output,
        };
        let recorded = || {
            let summary = reports.output.complete()?;
            Some((Evaluation::of_summary(summary), Some(place.step)))
        };
        let last = history.last().map(|last| (last, history.last_step()));
        let (last, last_step) = last.or_else(recorded).unzip();
        let results = Results {
            initial,
            weights,
            averages: None,
            accuracies: history.accuracies(),
            last: last.unwrap_or_else(Evaluation::nothing),
            last_step: last_step.flatten(),
            before_cut: None,
            best,
            metrics: history.metrics().unwrap_or_default(),
            timing: Timing::default(),
        };
        drop(starting);
        let mut trainer = Trainer {
            ctx,
            settings,
            program: self.program,
            unit: self.unit,
            unit_size: self.unit_size,
            split,
            samplers,
            samples: self.samples,
            steps,
            last_batch,
            extent,
            round_end: steps,
            model,
            strategy,
            lr: self.lr,
            // With a hook the norm is taken, and nothing is scaled.
            clip: (self.clip).or(self.before_update.as_ref().map(|_| f64::INFINITY)),
            before_update: self.before_update,
            schedule,
            lr_finder,
            set_lr: None,
            tape,
            saving,
            due: SaveAction::Continue,
            own_state: OwnState::default(),
            place,
            history: History::default(),
            running: None,
            loop_state: Rc::default(),
            position: Rc::default(),
            ended: None,
            waited: Rc::new(Cell::default()),
            results,
            reports,
            summary: match self.classes.is_empty() {
                true => serde_json::Map::new(),
                false => [("classes".to_owned(), self.classes.into())]
                    .into_iter()
                    .collect(),
            },
            purpose: self.purpose,
            trainings: self.trainings,
            sampler_config: config,
            drop_last: self.drop_last,
            global_batch: settings.global_batch(world),
            elastic: Elasticity::new(opening, agreed),
        };
        trainer.take_program(&history);
        trainer.history = history;
        trainer.update_loop();
        if self.purpose == Purpose::Train && !trainer.is_complete() {
            // On all ranks at about the same time, as they train.
            trainer.results.timing.peak_flops_per_s = trainer.tape.peak_flops_per_s();
        }
        trainer.join()?;
        Ok(trainer)
    }
}

/// Prints nothing.
struct Silent;

impl Reporter for Silent {
    fn on_step_evaluation(&mut self, _: &RankContext, _: u64, _: &Evaluation) -> Result<()> {
        Ok(())
    }
}

/// The names of all parameters that `names` stand for: each is one parameter's, or the beginning of several before a point.
fn full_names(params: &Params, names: &[String]) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for name in names {
        let is_meant = |full: &&String| {
            let rest = full.strip_prefix(&**name);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let infos = params.infos().iter().map(|info| &info.name);
        let meant: Vec<&String> = infos.filter(is_meant).collect();
        if meant.is_empty() {
            return Err(Error::usage(format!(
                "frozen(\"{name}\"): the model has no parameter of this name, and none whose name begins with \"{name}.\""
            )));
        }
        all.extend(meant.into_iter().cloned());
    }
    all.sort();
    all.dedup();
    Ok(all)
}

/// Gives the optimizers the momentum of `schedule`, where it has one.
fn use_momentum<S: Strategy>(schedule: &Schedule, strategy: &mut S) -> Result<()> {
    if let Some(momentum) = schedule.momentum() {
        // An optimizer without momentum of its own has it from now on, and state for it.
        for optimizer in strategy.state().optimizers {
            optimizer.set_momentum(momentum)?;
        }
    }
    Ok(())
}

/// Finds the file of the best weights. Where it is missing, it is written if they are the weights at `place`.
fn restore_best<S: Strategy>(
    ctx: &RankContext,
    output: &mut Output,
    saving: &Saving<'_>,
    strategy: &mut S,
    best: Option<&BestEpoch>,
    place: Place,
) -> Result<()> {
    // Only rank 0 knows whether it is missing.
    let lacks_best = output.lacks_best(ctx, best, saving.folder());
    let lacks = lacks_best.as_ref().is_ok_and(|lacks| *lacks);
    saving.handle_weights_error("the best", lacks_best.map(drop))?;
    let Some(best) = best else {
        return Ok(());
    };
    if !best.is_at(place) {
        if lacks {
            let what = best.describe();
            ctx.note(&format!(
                "warning: the weights of the best evaluation so far ({what}) are not in this folder; the next better one is saved as {BEST_FILE}"
            ));
        }
        return Ok(());
    }
    if ctx.group().broadcast_object(Some(&lacks), 0)? {
        let own = strategy.state().show_averages();
        let saved = strategy.gather_weights(ctx, |outline, values| {
            let saved = output.save_best(best, None, outline, values);
            saving.handle_weights_error("the best", saved)
        });
        if let Some(own) = own {
            strategy.state().params.flat_mut().copy_from_slice(&own);
        }
        saved?;
    }
    Ok(())
}

/// The optimizers in words, where the first has the words `own`.
fn optimizers_title(strategy: &impl Strategy, own: Option<String>) -> String {
    let mut title = own.unwrap_or_default();
    for group in strategy.groups() {
        let averages = match group.optimizer.averages() {
            Some(_) => " with averaged weights",
            None => "",
        };
        let words = format!(
            "{} lr {}{averages}",
            group.optimizer.name(),
            number(group.lr)
        );
        match group.name {
            "" if title.is_empty() => title = words,
            "" => {}
            name => title.push_str(&format!(", of {name} {words}")),
        }
    }
    title
}
