//! Builds a training: model, wrapper, optimizer, reports; new or from a checkpoint.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use phalanx_base::env::real_env;
use phalanx_base::files::{Dir, as_typed};
use phalanx_checkpoint::state::Place;
use phalanx_checkpoint::weights_digest;
use phalanx_data::Dataset;
use phalanx_data::progress::Progress;
use phalanx_data::sampler::SamplerConfig;
use phalanx_global::Parallel;
use phalanx_nn::optim::Optimizer;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::{Params, Scope};
use phalanx_track::Tracker;

use super::announce::{About, announce, announce_resumed, compare_hosts};
use super::course::{Course, CoursePlan};
use super::elastic::Elasticity;
use super::model::ModelPlan;
use super::sources::Sources;
use super::step::PendingUpdate;
use super::{Purpose, Reports, Trainer, Trainings};
use crate::args::{self, FOLDER, Found, Mesh, Settings};
use crate::best::{BestEpoch, EarlyStopping};
use crate::deliveries::Deliveries;
use crate::error::{Error, Result, refuse};
use crate::evaluation::Evaluation;
use crate::folder::{BEST_FILE, Files, Lock, Output, RunDir, default_output_dir};
use crate::format::thousands;
use crate::log::{IMAGES_DIR, RunInfo, TABLES_DIR};
use crate::profile::Profiler;
use crate::reporter::{EpochLines, Reporter};
use crate::sample_log::SampleLog;
use crate::saving::{AfterSaving, Resumed, Saving};
use crate::strategy::{Choices, Ddp, MakeOptimizer, OnMesh, Strategy, weights_sha256};
use phalanx_member::RankContext;

/// Whether a training's folder may be called so in the run's, where a trainer without a name has files and folders.
fn is_folder_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let own = [FOLDER, crate::FLIGHT_DIR, IMAGES_DIR, TABLES_DIR, "wandb"];
    !name.is_empty() && name.chars().all(plain) && !own.contains(&name)
}

/// What a [`Trainer`] is made of; [`start`](Self::start) makes it.
#[must_use = "nothing is trained before start"]
pub struct TrainerBuilder<'j, M, S: Strategy = Ddp> {
    plan: Plan<'j>,
    model: ModelPlan<'j, M>,
    course: CoursePlan<'j>,
    strategy: S::Setup,
}

/// What is around the training of a model.
struct Plan<'j> {
    ctx: &'j RankContext,
    settings: &'j Settings,
    info: RunInfo,
    /// Whether `--limit-train` leaves samples out.
    is_limited: bool,
    /// What distinguishes the data from other data.
    content: String,
    classes: Vec<String>,
    /// What samples are called, and how many of these a sample has.
    unit: (&'static str, usize),
    shaping: Vec<String>,
    must_agree: Vec<String>,
    files: Files,
    reporter: Box<dyn Reporter>,
    after_saving: Option<AfterSaving<'j>>,
    trackers: Vec<Box<dyn Tracker + Send>>,
    folder: Option<String>,
    purpose: Purpose,
    trainings: Rc<Trainings>,
}

impl<'j, M> TrainerBuilder<'j, M> {
    /// A training of the model that `model` registers, on `train`, with the optimizer that
    /// `optimizer` makes for a learning rate; one of the `trainings` of a program.
    pub(crate) fn new<D: Dataset + ?Sized, O: Optimizer + 'static>(
        (ctx, settings): (&'j RankContext, &'j Settings),
        program: &str,
        train: &Arc<D>,
        model: impl FnOnce(&mut Scope) -> M + 'j,
        optimizer: impl Fn(&Params, f64) -> O + 'j,
        trainings: Rc<Trainings>,
    ) -> Self {
        let samples = settings.limited_train(train.len());
        let choices = Choices {
            frozen: Vec::new(),
            lr: settings.lr(),
            sampler: SamplerConfig {
                samples,
                world: 1,
                rank: 0,
                shuffle: true,
                seed: settings.seed,
            },
            drop_last: false,
            order: train.order(),
            sync_batch_norm: false,
            optimizers: Vec::new(),
        };
        let model = ModelPlan {
            model: Box::new(model),
            init: None,
            optimizer_title: None,
            clip: None,
            before_update: None,
            choices,
        };
        let plan = Plan {
            ctx,
            settings,
            info: RunInfo {
                program: program.to_owned(),
                title: program.to_owned(),
                data: format!("{}, {} samples", train.describe(), thousands(train.len())),
                labels: settings.labels.clone(),
                ..RunInfo::default()
            },
            is_limited: samples < train.len(),
            content: train.content(),
            classes: train.class_names(),
            unit: ("samples", 1),
            shaping: Vec::new(),
            must_agree: Vec::new(),
            files: Files {
                model: program.to_owned(),
                weights: Some(format!("{program}.safetensors")),
                ..Files::default()
            },
            reporter: Box::new(EpochLines),
            after_saving: None,
            trackers: Vec::new(),
            folder: None,
            purpose: Purpose::Train,
            trainings,
        };
        let builder = TrainerBuilder {
            plan,
            model,
            course: CoursePlan::default(),
            strategy: (),
        };
        builder.optimizer_of("", optimizer)
    }

    /// Trains on `mesh`: the ranks of its dimension `data` split each batch, and the parameters are laid out as `parallel`
    /// says (splits over `tensor` are left out where the mesh has one rank there). The model computes with [`Global`](phalanx_global::Global) tensors; models that are generic over [`Value`](phalanx_nn::Value) stay as
    /// they are.
    pub fn on(self, mesh: Mesh, parallel: Parallel) -> TrainerBuilder<'j, M, OnMesh> {
        TrainerBuilder {
            plan: self.plan,
            model: self.model,
            course: self.course,
            strategy: (mesh, parallel),
        }
    }
}

impl<'j, M, S: Strategy> TrainerBuilder<'j, M, S> {
    /// What the model is called in the first lines of the output.
    pub fn title(mut self, title: &str) -> Self {
        self.plan.info.title = title.to_owned();
        self
    }

    /// What the data set is called in the first lines of the output, and `content`, which distinguishes it
    /// apart from other data ([`Dataset::content`]).
    pub fn data(mut self, description: &str, content: &str) -> Self {
        (self.plan.info.data, self.plan.content) = (description.to_owned(), content.to_owned());
        self
    }

    /// Changes the freshly drawn parameters before the training starts. Rank 0's are then sent to
    /// all ranks. Not called when a training is resumed.
    pub fn init(mut self, init: impl FnOnce(&mut Params) -> Result<()> + 'j) -> Self {
        self.model.init = Some(Box::new(init));
        self
    }

    /// Parameters that are not trained, besides those of `--freeze`: each by its name, all whose names begin with one of `names`
    /// and a point, as those of a layer or a part of the model, or all that match one of them (`*`: any characters, `?`: one).
    /// Backward computes no gradients that only they need. Running statistics of batch norms are updated, as in PyTorch.
    pub fn frozen(mut self, names: Vec<String>) -> Self {
        self.model.choices.frozen = names;
        self
    }

    /// The learning rate that the optimizer and the schedule are made for, where it follows from
    /// more than `--lr`.
    pub fn lr(mut self, lr: f64) -> Self {
        self.model.choices.lr = lr;
        self
    }

    /// The optimizer in words, for the first lines of the output.
    pub fn optimizer_title(mut self, title: &str) -> Self {
        self.model.optimizer_title = Some(title.to_owned());
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
        self.model.choices.optimizers.push((name.to_owned(), make));
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
        self.course.schedule = Some(Box::new(schedule));
        self
    }

    /// Scales gradients whose norm, over all parameters, is above `limit` down to it, as
    /// PyTorch's `clip_grad_norm_` does. [`Trainer::grad_norm`] gives the norm, which is also in `metrics.jsonl`; with a limit
    /// of `f64::INFINITY` nothing is scaled.
    pub fn clip_grad_norm(mut self, limit: f64) -> Self {
        self.model.clip = Some(limit);
        self.plan.shaping.push(format!("clip_grad_norm {limit}"));
        self
    }

    /// The measure of [`evaluate`](Trainer::evaluate) that decides which weights are the best: its name, `:`, and `max` or
    /// `min`, as in `f1:max`. Without this call it is the accuracy, or the loss if there is none.
    pub fn best(mut self, measure: &str) -> Self {
        self.course.best = Some(measure.to_owned());
        self
    }

    /// Ends the training when the [best](Self::best) measure has not improved for some evaluations: the loop over
    /// [`epochs`](Trainer::epochs) ends then. A resumed training counts on, and one that was stopped early trains nothing.
    pub fn early_stopping(mut self, early: EarlyStopping) -> Self {
        self.plan.shaping.push(early.describe());
        self.course.early_stopping = Some(early);
        self
    }

    /// Whether batch norms take the mean and variance of all ranks' samples (PyTorch's `convert_sync_batchnorm`), so that small
    /// batches on each rank train as their sum does. On a [mesh](TrainerBuilder::on) they always do.
    pub fn sync_batch_norm(mut self, sync: bool) -> Self {
        self.model.choices.sync_batch_norm = sync;
        self
    }

    /// Whether every epoch has another order of the samples, as it has without this call; else they come in the data
    /// set's.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.model.choices.sampler.shuffle = shuffle;
        self
    }

    /// Whether `--sampler torch` drops a last batch that is short. `--drop-last` does so with every sampler.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.model.choices.drop_last = drop_last;
        self
    }

    /// What samples are called in the output: `images`.
    pub fn unit(self, unit: &'static str) -> Self {
        self.unit_of(unit, 1)
    }

    /// The unit of the speed in the output and in `summary.json`, and how many units a sample has, as in `("characters", 64)`.
    pub fn unit_of(mut self, unit: &'static str, in_a_sample: usize) -> Self {
        self.plan.unit = (unit, in_a_sample);
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
        self.model.before_update = Some(Box::new(hook));
        self.plan.must_agree.push("before_update".to_owned());
        self
    }

    /// Calls `hook` with the path of each checkpoint's JSON file when it is complete on the disk, on rank 0: with DDP at the end of
    /// a later step, because checkpoints are written while the training continues. An error ends the training.
    pub fn after_saving(mut self, hook: impl FnMut(&Path) -> Result<()> + 'j) -> Self {
        self.plan.after_saving = Some(Box::new(hook));
        self
    }

    /// Hyperparameters of the program's own, one a line, its name first:
    /// `--momentum 0.9`. They must be the same on all ranks, and a resumed run says which have
    /// changed.
    pub fn hyperparameters(mut self, settings: Vec<String>) -> Self {
        self.plan.shaping.extend(settings);
        self
    }

    /// Further settings that must be the same on all ranks.
    pub fn same_on_all_ranks(mut self, settings: Vec<String>) -> Self {
        self.plan.must_agree.extend(settings);
        self
    }

    /// The files that are written besides metrics, summary and checkpoints.
    pub fn files(mut self, files: Files) -> Self {
        self.plan.files = files;
        self
    }

    /// What the program prints on standard output.
    pub fn reporter(mut self, reporter: Box<dyn Reporter>) -> Self {
        self.plan.reporter = reporter;
        self
    }

    /// Hands what the run logs to `tracker`, on rank 0, besides those of `--mlflow` and `--wandb`. It has a thread of its
    /// own, and its errors are warnings. The end of the training waits for it, at most ten seconds.
    pub fn tracker(mut self, tracker: impl Tracker + Send + 'static) -> Self {
        self.plan.trackers.push(Box::new(tracker));
        self
    }

    /// Writes into the folder `name` in the run's folder. Each trainer of a program with several, as a teacher's and a
    /// student's, needs a folder of its own; one of them may do without a name.
    pub fn folder(mut self, name: &str) -> Self {
        self.plan.folder = Some(name.to_owned());
        self
    }

    /// The program only evaluates, the weights that `--init` names: the trainer has no epochs and leaves no files.
    pub fn evaluate_only(mut self) -> Self {
        self.plan.purpose = Purpose::Evaluate;
        self
    }

    /// The program measures the training, which leaves no files and prints nothing.
    pub fn measure_only(mut self) -> Self {
        self.plan.purpose = Purpose::Measure;
        self.plan.reporter = Box::new(Silent);
        self
    }

    /// Checks the settings, and completes what shapes the training. Gives the number of ranks that split a batch: those that
    /// share a part of it count as one.
    fn settle(&mut self) -> Result<usize> {
        let plan = &mut self.plan;
        let settings = plan.settings;
        let (world, shaping) = S::plan(&self.strategy, settings, plan.ctx.first_world())?;
        if plan.ctx.elastic.is_some() && plan.purpose == Purpose::Train {
            settings.check_elastic()?;
            S::check_elastic(&self.strategy)?;
            if !plan.trainings.folders.borrow().is_empty() {
                refuse!("--elastic is for programs with one trainer");
            }
        }
        let choices = &mut self.model.choices;
        choices.sampler.world = world;
        if choices.sync_batch_norm {
            settings.check_sync_batch_norm()?;
            plan.shaping.push("sync_batch_norm true".to_owned());
        }
        if !choices.sampler.shuffle {
            plan.shaping.push("shuffle false".to_owned());
        }
        plan.shaping.splice(0..0, shaping);
        if plan.is_limited {
            let shown = thousands(choices.sampler.samples);
            plan.info.data.push_str(&format!(", the first {shown}"));
            let limit = format!(", the first {}", choices.sampler.samples);
            plan.content.push_str(&limit);
        }
        if plan.ctx.is_main() {
            let trackers = settings.track.of_run(&real_env())?;
            plan.trackers.extend(trackers);
        }
        Ok(world)
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
        let world = self.settle()?;
        let TrainerBuilder {
            mut plan,
            model,
            course,
            strategy: setup,
        } = self;
        let (ctx, settings, purpose) = (plan.ctx, plan.settings, plan.purpose);
        let starting = ctx.phase("starting");
        let [run, dir] = plan.folders()?;
        if ctx.is_main() && purpose == Purpose::Train {
            plan.take_up(&dir)?;
        }
        let resumed = Resumed::find(ctx, &settings.saving, &dir)?;
        let resumed = resumed.as_ref();
        let resumable = settings.resumable(&plan.info.program, &plan.content, world);
        let mut shaping = args::settings(&[settings.shaping(), plan.shaping.clone()].concat());
        shaping.extend(settings.precision.family());
        let facts = plan.facts();
        plan.info.settings = plan.shown(&facts);
        // Newcomers compare it before they are in a group.
        let frozen = format!("frozen parameters: {}", model.choices.frozen.join(", "));
        let agreed = [&facts[..], &[frozen]].concat();
        if let Some(resumed) = resumed {
            resumed.check(&resumable)?;
        }
        let (at, from) = ((ctx, settings), resumed.map(|resumed| (resumed, &shaping)));
        let sampler = model.choices.sampler;
        let order = (model.choices.drop_last, model.choices.order.clone());
        let sets_weights = model.init.is_some();
        let (mut strategy, model) = model.build::<S>(setup, &mut plan.info, at, from, &facts)?;
        (plan.files.about).extend(args::lora_metadata(strategy.params())?);
        let group = strategy.batch_group();
        let sources = Sources::new(settings, sampler, order, plan.unit, group)?;
        plan.info.steps = sources.steps;
        plan.info.params = strategy.report(settings).infos;
        let (steps, state) = (sources.steps, strategy.state());
        let mut course = course.begin(settings, steps, model.lr, resumed, state)?;
        if let Some(resumed) = resumed {
            strategy.restore(ctx, resumed, &shaping)?;
        }
        let mut output = match purpose {
            Purpose::Train => Output::open(ctx, dir, plan.files.clone(), &settings.saving, None)?,
            _ => Output::nowhere(dir),
        };
        let known = resumable.into_iter().chain(shaping.clone()).collect();
        let (kept, hook) = ((known, plan.files.metadata()), plan.after_saving.take());
        let checkpoints = output.checkpoints(settings.saving.keep());
        let saving = Saving::open(ctx, &settings.saving, kept, hook, checkpoints, resumed)?;
        // A launcher looks for them, and for what a later attempt continues, in the run's folder.
        if purpose != Purpose::Measure {
            ctx.group().set_flight_dir(&run.join(crate::FLIGHT_DIR));
        }
        output.begin(&run, &settings.saving)?;
        let weights = start_sha256(&strategy, ctx)?;
        course.results.initial = weights.clone().filter(|_| resumed.is_none());
        course.results.weights = weights.unwrap_or_default();
        find_complete(ctx, &mut output, &mut course, from)?;
        let trainings = Rc::clone(&plan.trainings);
        plan.announce(&strategy, &course, &output, sets_weights)?;
        let reports = plan.report(output, &saving, &mut strategy, &course, from)?;
        drop(starting);
        let mut trainer = Trainer {
            ctx,
            settings,
            sources,
            strategy,
            model,
            course,
            saving,
            reports,
            purpose,
            trainings,
            elastic: Elasticity::new(agreed),
            best: None,
        };
        trainer.update_loop();
        if purpose == Purpose::Train && !trainer.is_complete() {
            // On all ranks at about the same time, as they train.
            trainer.course.results.timing.peak_flops_per_s = trainer.model.tape.peak_flops_per_s();
        }
        trainer.join()?;
        Ok(trainer)
    }
}

impl Plan<'_> {
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
            refuse!("folder({name:?}): use letters, digits, - and _, and no name of the trainer's");
        }
        if self.settings.track.output_url.is_some() {
            let what = "--output-url keeps one training, and this program has several";
            return Err(Error::usage(what).note("instead", "copy the folder when they have ended"));
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
            RunDir::at(dir.clone()).check(saving, run)?;
        }
        Ok(dir)
    }

    /// Copies to the training's folder `dir` what `--output-url` has of a run that is to be continued. On rank 0.
    fn take_up(&self, dir: &Path) -> Result<()> {
        let (saving, track) = (&self.settings.saving, &self.settings.track);
        if track.output_url.is_none() {
            return Ok(());
        }
        let resumes = saving.takes_up(dir);
        let _lock = resumes.then(|| Lock::take(&Dir::create(dir)?, None));
        let _lock = _lock.transpose()?;
        let copied = track.prepare(dir, resumes, saving.fresh().is_some())?;
        copied.into_iter().for_each(|text| self.ctx.note(&text));
        Ok(())
    }

    /// The run's folder, and the training's: that one, or one in it. *Blocks* until all ranks call it.
    fn folders(&self) -> Result<[PathBuf; 2]> {
        let (ctx, settings) = (self.ctx, self.settings);
        let dir = settings.output_dir.clone();
        let dir = dir.unwrap_or_else(|| default_output_dir(&self.info.program));
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

    /// What must be the same on all ranks, a fact a line.
    fn facts(&self) -> Vec<String> {
        let mut facts = vec![format!("train {}", self.info.program)];
        facts.extend(self.settings.must_agree());
        facts.extend_from_slice(&self.must_agree);
        facts.extend_from_slice(&self.shaping);
        facts.push(format!("data {}", self.content));
        facts
    }

    /// The settings that are shown of the run.
    fn shown(&self, facts: &[String]) -> BTreeMap<String, String> {
        let mut shown = args::settings(facts);
        // "no --flag" of what was not typed.
        shown.remove("no");
        shown.retain(|_, value| value != "none");
        shown.extend(self.settings.of_each_rank());
        shown.extend(self.settings.precision.family());
        shown.insert("model".to_owned(), self.info.title.clone());
        shown
    }

    /// Announces the training. *Blocks* until all ranks call it.
    fn announce(
        &mut self,
        strategy: &impl Strategy,
        course: &Course,
        output: &Output,
        sets_weights: bool,
    ) -> Result<()> {
        let (ctx, best) = (self.ctx, course.results.best.wanted());
        let shown = &mut self.info.settings;
        shown.extend(best.map(|measure| ("best".to_owned(), measure)));
        let description = strategy.describe(ctx, self.settings)?;
        if self.purpose == Purpose::Measure {
            return Ok(());
        }
        let about = About {
            initial: course.results.initial.as_deref(),
            sets_weights,
            extent: course.extent,
            only_evaluates: self.purpose == Purpose::Evaluate,
        };
        announce(ctx, self.settings, &self.info, &about, &description, output);
        compare_hosts(ctx, self.settings)
    }

    /// Begins to write the run's files. *Blocks* until all ranks call it.
    fn report<S: Strategy>(
        mut self,
        mut output: Output,
        saving: &Saving<'_>,
        strategy: &mut S,
        course: &Course,
        from: Option<(&Resumed, &BTreeMap<String, String>)>,
    ) -> Result<Reports> {
        let (ctx, settings) = (self.ctx, self.settings);
        let (extent, place, best) = (course.extent, course.place, &course.results.best);
        let (is_complete, is_training) =
            (output.complete().is_some(), self.purpose == Purpose::Train);
        if !is_complete && is_training {
            self.reporter.on_train_start(ctx, extent.epochs())?;
        }
        output.reopen()?;
        restore_best(ctx, &mut output, saving, strategy, best.so_far(), place)?;
        if let Some((resumed, shaping)) = from {
            announce_resumed(ctx, resumed, extent, best.stops(), is_complete);
            resumed.announce_changes(ctx, shaping);
            settings.init.announce_unused(ctx);
        }
        let from = from.map(|(resumed, _)| resumed.place());
        let past_cut = extent.goes_past_cut(place) && !extent.is_end_of_part(place);
        let log = output.log(ctx, from, &self.info, past_cut)?;
        let trackers = match ctx.is_main() && is_training {
            true => std::mem::take(&mut self.trackers),
            false => Vec::new(),
        };
        let from = from.or(settings.saving.begins_again(ctx)?.then(Place::default));
        let classes =
            (!self.classes.is_empty()).then_some(("classes".to_owned(), self.classes.into()));
        Ok(Reports {
            info: self.info,
            files: self.files,
            trackers: self.trackers,
            summary: classes.into_iter().collect(),
            log,
            deliveries: Deliveries::start(output.dir(), trackers),
            samples: SampleLog::open(ctx, settings.log_samples.as_deref(), from)?,
            progress: match self.purpose {
                Purpose::Measure => Progress::silent(),
                _ => Progress::for_rank(ctx.rank()).with_unit(self.unit.0),
            },
            profiler: Profiler::new(settings.profile.as_deref(), ctx),
            reporter: self.reporter,
            output,
        })
    }
}

/// SHA-256 of the weights that a training starts with, on each rank that may need it. *Blocks* until all ranks call it.
fn start_sha256<S: Strategy>(strategy: &S, ctx: &RankContext) -> Result<Option<String>> {
    let weights = weights_sha256(strategy, ctx)?;
    // Any rank may become rank 0.
    Ok(match ctx.elastic {
        Some(_) if S::CAN_GROW => Some(hex::encode(weights_digest(strategy.params()))),
        Some(_) => Some(ctx.group().broadcast_object(weights.as_ref(), 0)?),
        None => weights,
    })
}

/// Finds whether the run is complete, and what it ended with.
fn find_complete(
    ctx: &RankContext,
    output: &mut Output,
    course: &mut Course,
    from: Option<(&Resumed, &BTreeMap<String, String>)>,
) -> Result<()> {
    let (extent, results) = (course.extent, &mut course.results);
    let stops = results.best.stops();
    // A program may have ended before its last epoch.
    let lengthens =
        |line: &String| line.starts_with("--epochs ") || line.starts_with("--max-steps ");
    let may_be = from.is_some_and(|(resumed, shaping)| {
        extent.is_over(course.place) || stops || resumed.changed(shaping).iter().all(lengthens)
    });
    if may_be {
        // One that was stopped early has no more steps, however many are asked for.
        let asked = match stops {
            true => (0, 0),
            false => (extent.epochs(), extent.all()),
        };
        output.find_complete(ctx, &results.weights, asked)?;
    }
    if let (None, Some(summary)) = (course.history.last(), output.complete()) {
        results.last = Evaluation::of_summary(summary);
        results.last_step = Some(course.place.step);
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

/// Prints nothing.
struct Silent;

impl Reporter for Silent {
    fn on_step_evaluation(&mut self, _: &RankContext, _: u64, _: &Evaluation) -> Result<()> {
        Ok(())
    }
}
