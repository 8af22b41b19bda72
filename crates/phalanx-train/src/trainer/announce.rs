//! What is said before the first step.

use std::collections::BTreeMap;

use super::extent::Extent;
use crate::args::{Determinism, GradientType, PrecisionArg, Settings, Start};
use crate::choice_name;
use crate::error::{Error, Result};
use crate::folder::Output;
use crate::format::{plural, rank_list, thousands};
use crate::log::RunInfo;
use crate::saving::Resumed;
use crate::strategy::Description;
use phalanx_member::RankContext;
use phalanx_nn::Family;
use phalanx_process::own_program;
use sha2::{Digest, Sha256};

/// What is announced besides the settings.
pub(super) struct About<'a> {
    /// SHA-256 of the weights before the first step.
    pub(super) initial: Option<&'a str>,
    /// The program sets them itself.
    pub(super) sets_weights: bool,
    pub(super) extent: Extent,
    pub(super) only_evaluates: bool,
}

/// Who trains, on what, which model, and how.
pub(super) fn announce(
    ctx: &RankContext,
    settings: &Settings,
    run: &RunInfo,
    about: &About<'_>,
    description: &Description,
    output: &Output,
) {
    let params = &run.params;
    let count: usize = params.iter().map(|i| i.len).sum();
    let frozen = params.iter().filter(|info| run.frozen.contains(&info.name));
    let frozen: usize = frozen.map(|info| info.len).sum();
    let is_drawn = settings.init == Start::Torch && !about.sets_weights;
    ctx.note(&format!(
        "phalanx {}  {}  {}",
        env!("CARGO_PKG_VERSION"),
        run.program,
        ctx.describe(phalanx_nn::isa_name())
    ));
    ctx.note(&format!("data     {}", run.data));
    ctx.note(&format!(
        "model    {}, {}, {} parameters{} in {} tensors{}",
        run.title,
        settings.precision.describe(),
        thousands(count),
        match frozen {
            0 => String::new(),
            _ => format!(
                " ({} trained, {} frozen)",
                thousands(count - frozen),
                thousands(frozen)
            ),
        },
        params.len(),
        match about.only_evaluates {
            true => "",
            false => &description.model,
        },
    ));
    description.lines.iter().for_each(|line| ctx.note(line));
    if let Some(initial) = about.initial {
        let from = match settings.init == Start::Torch && !is_drawn {
            true => "as the program's init sets them".to_owned(),
            false => settings.init.describe(settings.seed),
        };
        ctx.note(&format!("weights  {from} ({initial:.12}…)"));
    }
    if about.only_evaluates {
        if is_drawn {
            ctx.note("warning: the weights are random; --init FILE evaluates those of a file or a run's folder");
        }
        return;
    }
    let all = about.extent.all();
    let length = match settings.max_steps() {
        Some(max) if max == all => format!("{}, in epochs", plural(all as usize, "step")),
        _ => plural(about.extent.epochs(), "epoch"),
    };
    let what = match settings.find_lr {
        true => "finding a learning rate in ".to_owned() + &plural(all as usize, "step"),
        false => format!("training {length} of {}", plural(run.steps, "step")),
    };
    ctx.note(&format!(
        "{what}, global batch {}, {}",
        description.batch, run.settings["optimizer"],
    ));
    let bits = match settings.split.determinism() {
        Determinism::Ranks => None,
        other => Some(format!("deterministic {}", choice_name(&other))),
    };
    let gradients = match settings.gradient_type {
        GradientType::F32 => None,
        other => Some(format!("gradients travel as {}", choice_name(&other))),
    };
    let unusual: Vec<String> = gradients.into_iter().chain(bits).collect();
    if !unusual.is_empty() {
        ctx.note(&format!("exchange {}", unusual.join(", ")));
    }
    ctx.note(&format!("output   {}", output.dir().display()));
    description.last.iter().for_each(|line| ctx.note(line));
}

/// Says in what the processors and programs of several hosts differ. That ends no training, unless equal bits for every
/// number of ranks are wanted in bf16, whose bits are those of a [`Family`].
pub(super) fn compare_hosts(ctx: &RankContext, settings: &Settings) -> Result<()> {
    let is_one_launcher = std::env::var("GROUP_WORLD_SIZE").is_ok_and(|nodes| nodes == "1");
    if is_one_launcher || ctx.world() == 1 || ctx.transport() == "thread" {
        return Ok(());
    }
    let processor = crate::log::processor().unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let processor = format!("{processor} with {}", phalanx_nn::isa_name());
    if let Some(found) = differences(ctx, &processor)? {
        ctx.note(&format!(
            "warning: the processors differ: {found}; each step takes as long as on the slowest host; the results of fp32 are those of equal hosts, bit for bit"
        ));
    }
    if settings.precision == PrecisionArg::Bf16
        && let Some(found) = differences(ctx, Family::here().title())?
    {
        let found = format!("the processors multiply bf16 in different ways: {found}");
        let way = "--precision fp32, or PHALANX_ISA=avx2 on all hosts, makes them equal";
        if settings.split.determinism() == Determinism::Shards {
            return Err(
                Error::usage(format!("{found}; --deterministic shards needs one"))
                    .note("instead", way),
            );
        }
        ctx.note(&format!(
            "warning: {found}; results are not those of equal hosts; {way}"
        ));
    }
    if let Some(found) = differences(ctx, &program_digest())? {
        ctx.note(&format!(
            "warning: the program files differ: {found}, all with phalanx {}; results may differ from those of one build: copy one file to all hosts",
            env!("CARGO_PKG_VERSION")
        ));
    }
    Ok(())
}

/// Distinguishes builds of the program that runs as this process.
fn program_digest() -> String {
    let program = std::fs::read(own_program()).unwrap_or_default();
    format!("SHA-256 {}…", hex::encode(&Sha256::digest(program)[..6]))
}

/// Which ranks have what, as `x (rank 0, host a), y (ranks 1 and 2, host b)`, unless all have the same.
fn differences(ctx: &RankContext, own: &str) -> Result<Option<String>> {
    let own = (own.to_owned(), phalanx_base::host_name());
    let all: Vec<(String, String)> = ctx.group().all_gather_object(&own)?;
    let mut kinds: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (rank, (what, _)) in all.iter().enumerate() {
        kinds.entry(what).or_default().push(rank);
    }
    let show = |(what, ranks): (&&str, &Vec<usize>)| {
        let mut hosts: Vec<&str> = ranks.iter().map(|rank| all[*rank].1.as_str()).collect();
        hosts.dedup();
        format!("{what} ({}, host {})", rank_list(ranks), hosts.join(", "))
    };
    let shown: Vec<String> = kinds.iter().map(show).collect();
    Ok((shown.len() > 1).then(|| shown.join(", ")))
}

/// Where a resumed training continues.
pub(super) fn announce_resumed(
    ctx: &RankContext,
    resumed: &Resumed,
    extent: Extent,
    stops: bool,
    is_complete: bool,
) {
    let place = resumed.place();
    let taken = thousands(place.step as usize);
    let epochs = format!("--epochs {}", extent.epochs().saturating_add(1));
    let more = match extent.is_cut(place.step) {
        true if place.epoch as usize >= extent.epochs() => {
            format!("--max-steps {} {epochs}", place.step + 1)
        }
        true => format!("--max-steps {}", place.step + 1),
        false => epochs,
    };
    let next = match extent.is_over(place) {
        _ if is_complete && stops => {
            "the run was stopped early and stays as it is; a larger patience of early_stopping continues it".to_owned()
        }
        _ if is_complete => {
            format!("the run is complete and stays as it is; {more} continues it")
        }
        _ if stops => "the run was stopped early".to_owned(),
        true => format!("all steps are taken; {more} continues"),
        false => format!(
            "epoch {}, step {}",
            place.epoch + 1,
            place.step_in_epoch + 1
        ),
    };
    ctx.note(&format!(
        "resumed  after {taken} of {}: {next}",
        plural(extent.all() as usize, "step")
    ));
}
