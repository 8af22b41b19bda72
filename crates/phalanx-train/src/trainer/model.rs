//! The model in training, and what updates it.

use std::collections::BTreeMap;

use phalanx_base::text::matches;
use phalanx_member::RankContext;
use phalanx_nn::{Params, Scope, Seed, Tape, Threads};

use super::step::BeforeUpdate;
use crate::args::Settings;
use crate::error::{Result, refuse};
use crate::format::number;
use crate::log::RunInfo;
use crate::saving::Resumed;
use crate::strategy::{Choices, Parts, Strategy};

/// Changes freshly drawn parameters.
pub(super) type Init<'j> = Box<dyn FnOnce(&mut Params) -> Result<()> + 'j>;

/// A model, as the builder describes it.
pub(super) struct ModelPlan<'j, M> {
    pub(super) model: Box<dyn FnOnce(&mut Scope) -> M + 'j>,
    pub(super) init: Option<Init<'j>>,
    pub(super) optimizer_title: Option<String>,
    pub(super) clip: Option<f64>,
    pub(super) before_update: Option<BeforeUpdate<'j>>,
    pub(super) choices: Choices<'j>,
}

/// A model in training.
pub(super) struct Model<'j, M> {
    pub(super) net: M,
    pub(super) tape: Tape,
    /// The learning rate that the schedule was made with.
    pub(super) lr: f64,
    pub(super) clip: Option<f64>,
    pub(super) before_update: Option<BeforeUpdate<'j>>,
}

impl<'j, M> ModelPlan<'j, M> {
    /// Builds the model, new or with the weights of a checkpoint, and how it is distributed. `info` gets the optimizers in words,
    /// and the names of the parameters that are not trained. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Usage, naming flag or parameter; settings or models that differ between ranks; peers that are lost.
    pub(super) fn build<S: Strategy>(
        self,
        setup: S::Setup,
        info: &mut RunInfo,
        (ctx, settings): (&RankContext, &Settings),
        resumed: Option<(&Resumed, &BTreeMap<String, String>)>,
        facts: &[String],
    ) -> Result<(S, Model<'j, M>)> {
        let (lr, mut choices) = (self.choices.lr, self.choices);
        let mut scope = Scope::new(Seed(settings.seed));
        if let Some(lora) = settings.tune.lora()? {
            scope.lora(lora);
        }
        let net = (self.model)(&mut scope);
        let mut params = scope.build()?;
        choices.frozen.extend_from_slice(&settings.tune.freeze);
        choices.frozen = full_names(&params, &choices.frozen)?;
        for id in params.ids() {
            let name = &params.infos()[id.index()].name;
            match choices.frozen.binary_search(name) {
                Ok(_) => params.freeze(id),
                Err(at) if params.is_frozen(id) => choices.frozen.insert(at, name.clone()),
                Err(_) => {}
            }
        }
        if choices.frozen.len() == params.len() && !params.is_empty() {
            refuse!("all parameters are frozen; nothing is left to train");
        }
        info.frozen = choices.frozen.clone();
        if resumed.is_none() {
            if let Some(init) = self.init {
                init(&mut params)?;
            }
            settings.init.fill(ctx, &mut params, &settings.tune)?;
        }
        let mut tape = Tape::new(Threads(ctx.threads));
        tape.set_precision(settings.precision.into());
        tape.set_anomaly(settings.anomaly);
        let parts = Parts {
            ctx,
            settings,
            resumed,
            params,
            facts,
            choices,
            tape: &mut tape,
        };
        let strategy = S::build(setup, parts)?;
        let title = optimizers_title(&strategy, self.optimizer_title);
        info.settings.insert("optimizer".to_owned(), title);
        let model = Model {
            net,
            tape,
            lr,
            // With a hook the norm is taken, and nothing is scaled.
            clip: (self.clip).or(self.before_update.as_ref().map(|_| f64::INFINITY)),
            before_update: self.before_update,
        };
        Ok((strategy, model))
    }
}

/// The names of all parameters that `names` stand for: each is one parameter's, the beginning of several before a point, or a
/// pattern.
fn full_names(params: &Params, names: &[String]) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for name in names {
        let is_meant = |full: &&String| {
            let rest = full.strip_prefix(&**name);
            let is_part = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
            is_part || matches(name, full)
        };
        let infos = params.infos().iter().map(|info| &info.name);
        let meant: Vec<&String> = infos.filter(is_meant).collect();
        if meant.is_empty() {
            refuse!(
                "frozen(\"{name}\"): the model has no parameter of this name or pattern, and none whose name begins with \"{name}.\""
            );
        }
        all.extend(meant.into_iter().cloned());
    }
    all.sort();
    all.dedup();
    Ok(all)
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
