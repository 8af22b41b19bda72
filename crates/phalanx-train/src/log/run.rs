//! `run.json`: which run it is.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;

use phalanx_base::files::Dir;
use phalanx_base::unix_time;
use phalanx_data::metrics::write_summary_in;
use phalanx_member::RankContext;
use phalanx_nn::{GraphNode, ParamInfo};
use serde_json::{Value, json};

use crate::args::LabelArgs;
use crate::error::{Error, Result, refuse};
use crate::say;

pub(crate) const RUN_FILE: &str = "run.json";
/// Until 2 a program's own records had the number of steps taken as their step.
pub(crate) const VERSION: u64 = 2;
pub(crate) const MAX_RUN_BYTES: u64 = 64 << 20;

/// Settings that change no value of a step.
const NOT_SHAPING: [&str; 11] = [
    "--bucket-cap-mb",
    "--exchange",
    "--log-batches",
    "--log-interval",
    "--resume",
    "--save-every",
    "--stop-after",
    "--test-batch-size",
    "--watch",
    "--workers",
    "best",
];

/// What `run.json` says of a training, besides its ranks.
#[derive(Debug, Default)]
pub struct RunInfo {
    /// The program's name.
    pub program: String,
    /// What the model is called.
    pub title: String,
    /// The data set.
    pub data: String,
    /// Steps of an epoch.
    pub steps: usize,
    /// Settings by name, defaults included.
    pub settings: BTreeMap<String, String>,
    /// The model's parameters.
    pub params: Vec<ParamInfo>,
    /// Names of the parameters that are not trained.
    pub frozen: Vec<String>,
    /// `--tag` and `--note`.
    pub labels: LabelArgs,
}

/// Which attempt at a run this is.
#[derive(Debug)]
pub(crate) struct Attempt {
    id: String,
    number: u64,
    /// `settings` and `branches` of the attempt before.
    settings: Value,
    branches: Vec<Value>,
    /// `tags` and `note` of the attempt before.
    labels: [Value; 2],
    /// The version of the files that an attempt before has written.
    pub(crate) version: u64,
}

impl Attempt {
    /// The next attempt at the run in `dir`, or the first of a new run.
    pub(crate) fn next(dir: &Dir, is_fresh: bool) -> Attempt {
        let old = (!is_fresh)
            .then(|| dir.read(RUN_FILE, MAX_RUN_BYTES).ok())
            .flatten();
        let old: Option<Value> = old
            .flatten()
            .and_then(|text| serde_json::from_slice(&text).ok());
        let known = old.and_then(|mut run| {
            Some(Attempt {
                id: run["id"].as_str()?.to_owned(),
                number: run["attempt"].as_u64()?.saturating_add(1),
                version: run["version"].as_u64()?,
                settings: run["settings"].take(),
                branches: run["branches"].as_array().cloned().unwrap_or_default(),
                labels: ["tags", "note"].map(|name| run[name].take()),
            })
        });
        known.unwrap_or_else(|| Attempt {
            // The standard library's keys are random.
            id: format!("{:016x}", RandomState::new().build_hasher().finish()),
            number: 1,
            settings: Value::Null,
            branches: Vec::new(),
            labels: Default::default(),
            version: VERSION,
        })
    }

    /// The attempts that resumed with other settings than the attempt before, and the step at which each resumed. Includes
    /// this attempt, if its `settings` differ. What was logged from that step on belongs to a branch that the run left.
    fn branches(&self, settings: &BTreeMap<String, String>, resumed_at: u64) -> Vec<Value> {
        let shapes = |name: &str| !NOT_SHAPING.contains(&name);
        let now = settings.iter().filter(|(name, _)| shapes(name));
        let now = now.map(|(name, value)| (&**name, Some(&**value)));
        let before = self.settings.as_object().into_iter().flatten();
        let before = before.filter(|(name, _)| shapes(name));
        let before = before.map(|(name, value)| (&**name, value.as_str()));
        let mut branches = self.branches.clone();
        if self.number > 1 && !now.eq(before) {
            branches.push(json!({ "attempt": self.number, "step": resumed_at }));
        }
        branches
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

/// The document, without the model's graph, of an attempt that resumed at `resumed_at` steps.
pub(crate) fn document(
    ctx: &RankContext,
    info: &RunInfo,
    attempt: &Attempt,
    resumed_at: u64,
) -> Value {
    let arguments = say::arguments();
    let typed = arguments.iter().filter(|word| word.starts_with("--"));
    let typed: Vec<&str> = typed
        .map(|word| word.split('=').next().unwrap_or_default())
        .collect();
    let infos = &info.params;
    let tensors = infos.iter().map(|tensor| {
        let trained = !info.frozen.contains(&tensor.name);
        json!({ "name": tensor.name, "shape": tensor.shape, "dtype": "f32", "trained": trained })
    });
    let [tags, note] = &attempt.labels;
    let mut document = json!({
        "version": VERSION,
        "tags": tags,
        "note": note,
        "id": attempt.id,
        "attempt": attempt.number,
        "branches": attempt.branches(&info.settings, resumed_at),
        "program": info.program,
        "phalanx": env!("CARGO_PKG_VERSION"),
        "started": unix_time().as_secs_f64() - ctx.started().elapsed().as_secs_f64(),
        "command": super::source::command(),
        "arguments": arguments,
        "git": super::source::git(Path::new(".")),
        "user": super::source::user(),
        "system": super::source::system(),
        "settings": info.settings,
        "typed": typed,
        "ranks": ctx.world(),
        "threads_per_rank": ctx.threads,
        "transport": ctx.describe(phalanx_nn::isa_name()),
        "host": phalanx_base::host_name(),
        "processor": super::system::processor(),
        "data": info.data,
        "steps_per_epoch": info.steps,
        "model": {
            "title": info.title,
            "parameters": infos.iter().map(|tensor| tensor.len).sum::<usize>(),
            "tensors": tensors.collect::<Vec<_>>(),
        },
    });
    if let Some(document) = document.as_object_mut() {
        info.labels.add_to(document);
    }
    document
}

impl LabelArgs {
    /// Adds them to `run.json` in the folder `dir`.
    ///
    /// # Errors
    ///
    /// Usage, where the folder has no `run.json`; those of reading and writing.
    pub fn add_to_folder(&self, dir: &Path) -> Result<()> {
        if !dir.is_dir() {
            refuse!("no folder {}", dir.display());
        }
        let folder = Dir::open(dir)?;
        let text = folder.read(RUN_FILE, MAX_RUN_BYTES)?;
        let run = text.and_then(|text| serde_json::from_slice(&text).ok());
        let Some(Value::Object(mut run)) = run else {
            let what = format!("{} has no {RUN_FILE}", dir.display());
            return Err(Error::usage(what).note("fix", "give the folder of a run"));
        };
        self.add_to(&mut run);
        write(&folder, &run.into())
    }
}

/// Writes the document.
pub(crate) fn write(dir: &Dir, run: &Value) -> Result<()> {
    write_summary_in(dir, RUN_FILE, run)
}

/// A node of the graph and what it is called.
pub(super) struct Named {
    pub(super) name: String,
    pub(super) inputs: Vec<String>,
    node: GraphNode,
}

/// Names for all nodes: `conv1` for the operation that uses `conv1.weight`, `relu_2` for the third operation, which uses
/// no parameters. What comes from outside is `input`.
pub(super) fn named(graph: Vec<GraphNode>) -> Vec<Named> {
    let mut all: Vec<Named> = Vec::with_capacity(graph.len());
    for (index, node) in graph.into_iter().enumerate() {
        let first = node.params.first();
        let layer = first.map(|name| name.rsplit_once('.').map_or(&**name, |(layer, _)| layer));
        let name = match layer {
            Some(layer) if all.iter().all(|known| known.name != layer) => layer.to_owned(),
            Some(layer) => format!("{layer}_{index}"),
            None => format!("{}_{index}", node.operation.to_lowercase()),
        };
        let of = |input: &Option<usize>| match input.and_then(|at| all.get(at)) {
            Some(known) => known.name.clone(),
            None => "input".to_owned(),
        };
        all.push(Named {
            inputs: node.inputs.iter().map(of).collect(),
            name,
            node,
        });
    }
    all
}

/// The graph as `run.json` has it.
pub(super) fn graph(nodes: &[Named]) -> Value {
    let of = |named: &Named| {
        let GraphNode {
            operation, shape, ..
        } = &named.node;
        json!({ "name": named.name, "operation": operation, "inputs": named.inputs, "shape": shape })
    };
    nodes.iter().map(of).collect()
}
