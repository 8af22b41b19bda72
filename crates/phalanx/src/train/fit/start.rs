//! Builds a training: data, model, wrapper, optimizer, reports; new or from a
//! checkpoint.

use phalanx_ddp::DistributedDataParallel;
use phalanx_nn::{Scope, Seed, Tape, Threads};
use phalanx_train::checkpoint;
use phalanx_train::digest::MetricsDigest;
use phalanx_train::progress::Progress;
use phalanx_train::sampler::SamplerConfig;

use super::announce::{About, announce};
use super::{Reports, Results, Training};
use crate::convert::unlike;
use crate::error::Result;
use crate::train::context::RankContext;
use crate::train::cut::Cut;
use crate::train::evaluate::{Tested, loader};
use crate::train::format::{plural, thousands};
use crate::train::output::Output;
use crate::train::prepare;
use crate::train::profile::Profiler;
use crate::train::program::Program;
use crate::train::sample_log::SampleLog;
use crate::train::saving::{self, Resumed, Saving};
use crate::train::timing::Timing;
use crate::train::trace::Trace;
use crate::train::update::Update;

impl<'a, P: Program> Training<'a, P> {
    /// Everything before the first step. *Blocks* until all ranks call it.
    pub(super) fn start(ctx: &'a RankContext, program: &'a P) -> Result<Self> {
        let settings = program.settings();
        let world = ctx.world();
        settings.validate(world)?;
        let starting = ctx.phase("starting");
        let mut voice = program.voice();
        voice.starts(ctx)?;
        let dir = settings.output_dir.clone();
        let dir = dir.unwrap_or_else(|| crate::train::default_output_dir(program.name()));
        let dir = ctx.folder_of_rank_0(dir)?;
        let resumed = Resumed::find(ctx, &settings.saving, &dir)?;
        prepare::data(ctx, program.fetch(), settings.saving.folder)?;
        let loading = ctx.phase("loading data");
        let data = program.data()?;
        drop(loading);
        voice.loaded(ctx)?;
        let resumable = settings.resumable(program.name(), &data.content, world);
        let shaping = saving::settings(&[settings.shaping(), program.must_agree()].concat());

        let mut scope = Scope::new(Seed(settings.seed));
        let net = program.net(&mut scope);
        let mut params = scope.build()?;
        program.prepare(&mut params, &data)?;
        if let Some(resumed) = &resumed {
            resumed.check(&resumable)?;
            resumed.params(&mut params)?;
        } else {
            settings.init.fill(ctx, &mut params)?;
        }
        let mut facts = vec![format!("train {}", program.name())];
        facts.extend(settings.must_agree());
        facts.extend(program.must_agree());
        facts.push(format!("data {}", data.content));
        let exchange = settings.exchange.choose_for(ctx, settings)?; // DDP
        let options = settings.ddp_options(exchange, facts, program.frozen())?;
        let ddp = DistributedDataParallel::new(ctx.group.clone(), &mut params, options); // DDP
        let mut ddp = ddp.map_err(unlike)?;
        if let Some(hook) = settings.gradients.hook(settings.seed)? {
            ddp.set_hook(Some(hook))?; // DDP
        }
        let mut tape = Tape::new(Threads(ctx.threads));
        tape.set_precision(settings.precision.into());
        let mut optimizer_name = String::new();
        let mut update = Update::new(&ddp, &params, |params| {
            let (mut optimizer, name) = program.optimizer(params, world);
            optimizer.set_workers(tape.workers());
            optimizer_name = name;
            optimizer
        })?; // DDP
        if let Some(resumed) = &resumed {
            resumed.wrapper(ctx, &mut ddp)?; // DDP
            resumed.update(ctx, &params, &mut update, &shaping)?; // DDP
        }

        let cut = Cut::new(&settings.cut, world, ctx.rank())?;
        let config = SamplerConfig {
            samples: data.train.len(),
            world,
            rank: ctx.rank(),
            shuffle: true,
            seed: settings.seed,
        };
        let samplers = settings.samplers(&cut, config, program.drops_last())?;
        let steps = cut.epoch(&samplers, 0).len() / cut.mine().len();
        if let Some(resumed) = &resumed {
            resumed.fits(steps)?;
        }
        let mut schedule = program.schedule(world, steps * settings.epochs())?;
        let output = Output::open(ctx, dir, program.files(), settings.saving.fresh())?;
        let saving = Saving::open(
            ctx,
            &settings.saving,
            resumable.into_iter().chain(shaping.clone()).collect(),
            output.checkpoints(saving::FOLDER, settings.saving.keep()),
            resumed.as_ref(),
        )?
        .with_metadata(program.files().metadata());
        output.begin(&settings.saving.attempt)?;
        let weights = checkpoint::weights_sha256(&params);
        let initial = (ctx.is_main() && resumed.is_none()).then(|| weights.clone());
        let about = About {
            data: &data,
            initial: initial.as_deref(),
            steps,
            optimizer: &optimizer_name,
        };
        announce(ctx, program, &about, &params, &ddp, &output);
        voice.trains(ctx, settings.epochs())?;

        let place = resumed.as_ref().map(Resumed::place).unwrap_or_default();
        if (place.epoch as usize) < settings.epochs() {
            output.reopen()?;
        }
        let history = resumed.as_ref().map(Resumed::history).transpose()?;
        let history = history.unwrap_or_default();
        if let Some(resumed) = &resumed {
            announce_resumed(ctx, resumed, steps, settings.epochs());
            resumed.announce_changes(ctx, &shaping);
            settings.init.announce_unused(ctx);
        }
        if let Some(schedule) = &mut schedule {
            (0..place.step).for_each(|_| schedule.advance());
        }
        let mut metrics = MetricsDigest::new();
        let before = history.metrics();
        before.into_iter().for_each(|value| metrics.add(value));
        let reports = Reports {
            log: output.metrics(resumed.as_ref().map(Resumed::place))?,
            samples: SampleLog::open(
                ctx,
                settings.log_samples.as_deref(),
                resumed.as_ref().map(Resumed::place),
            )?,
            progress: Progress::for_rank(ctx.rank()),
            trace: Trace::new(settings.trace.as_deref(), ctx),
            profiler: Profiler::new(settings.profile.as_deref(), ctx),
            voice,
            output,
        };
        let results = Results {
            initial,
            weights,
            accuracies: history.accuracies(),
            last: Tested::nothing(),
            metrics,
            timing: Timing::default(),
        };
        drop(starting);
        Ok(Training {
            ctx,
            program,
            loader: loader(settings, &data.train)?,
            data,
            cut,
            samplers,
            steps,
            net,
            params,
            ddp,
            update,
            schedule,
            tape,
            saving,
            stop: false,
            place,
            history,
            results,
            reports,
        })
    }
}

fn announce_resumed(ctx: &RankContext, resumed: &Resumed, steps: usize, epochs: usize) {
    let place = resumed.place();
    let (taken, all) = (thousands(place.step as usize), steps * epochs);
    let next = match place.epoch as usize >= epochs {
        true => "no epoch is left; --epochs N for more".to_owned(),
        false => format!(
            "epoch {}, step {}",
            place.epoch + 1,
            place.step_in_epoch + 1
        ),
    };
    ctx.note(&format!(
        "resumed  after {taken} of {}: {next}",
        plural(all, "step")
    ));
}
