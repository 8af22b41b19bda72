//! Flags of trainings that start from weights and change a part of them.

use std::path::Path;

use phalanx_base::text::number;
use phalanx_checkpoint::{AdapterConfig, LoadOptions};
use phalanx_nn::{Layout, LoraConfig, Params};

use crate::error::{Error, Result, refuse};

/// How `--init` loads weights, and which parameters are trained.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TuneArgs {
    /// Names in the file of --init that begin with OLD begin with NEW in the model; may be given several times
    #[arg(long, value_name = "OLD=NEW", value_parser = read_rename)]
    init_map: Vec<(String, String)>,
    /// Tensors that --init leaves out, by name (`*`: any characters): the model's keep their initial values, the file may have others; may be given several times
    #[arg(long, value_name = "PATTERN")]
    init_skip: Vec<String>,
    /// Parameters that are not trained, by name, part of the model, or pattern (`layer*`); may be given several times
    #[arg(long, value_name = "NAME")]
    pub(crate) freeze: Vec<String>,
    /// Train low-rank adapters of this rank (LoRA) in linear layers and attentions and nothing else, or go on with those in a folder of PEFT's
    #[arg(long, value_name = "RANK|DIR")]
    lora: Option<String>,
    /// The adapters' output is multiplied by ALPHA / RANK [default: RANK]
    #[arg(long, value_name = "ALPHA", requires = "lora")]
    lora_alpha: Option<f64>,
    /// Dropout probability of the adapters' inputs [default: 0]
    #[arg(long, value_name = "P", requires = "lora")]
    lora_dropout: Option<f64>,
    /// Layers with adapters, by the ends of their names, as in `c_attn,c_proj` [default: all-linear]
    #[arg(long, value_name = "NAMES", requires = "lora", value_delimiter = ',')]
    lora_targets: Vec<String>,
}

fn read_rename(text: &str) -> std::result::Result<(String, String), String> {
    match text.split_once('=') {
        Some((old, new)) => Ok((old.to_owned(), new.to_owned())),
        None => Err("expected OLD=NEW, as in `encoder.=backbone.`".to_owned()),
    }
}

impl TuneArgs {
    /// Checks them; `has_file`: `--init` names weights.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag or the adapter's file.
    pub(crate) fn validate(&self, has_file: bool) -> Result<()> {
        let loads = !self.init_map.is_empty() || !self.init_skip.is_empty();
        if loads && !has_file {
            let what =
                "--init-map and --init-skip say how the file of --init is loaded; add --init FILE";
            return Err(Error::usage(what));
        }
        if self.lora_alpha.is_some_and(|alpha| !alpha.is_finite()) {
            refuse!("--lora-alpha must be a number");
        }
        if self.lora_dropout.is_some_and(|p| !(0.0..1.0).contains(&p)) {
            refuse!("--lora-dropout must lie in 0..1 (1 excluded)");
        }
        self.lora().map(drop)
    }

    /// Whether parameters stay as they are.
    pub(crate) fn freezes(&self) -> bool {
        self.lora.is_some() || !self.freeze.is_empty()
    }

    /// How the file of `--init` is loaded.
    pub(crate) fn load_options(&self) -> LoadOptions {
        let renames = self.init_map.iter();
        let options = renames.fold(LoadOptions::new(), |all, (old, new)| all.rename(old, new));
        let skips = self.init_skip.iter();
        skips.fold(options, |all, pattern| all.skip(pattern))
    }

    /// The folder of the adapters that training goes on with.
    pub(crate) fn adapter(&self) -> Option<&Path> {
        let dir = self
            .lora
            .as_deref()
            .filter(|typed| typed.parse::<usize>().is_err());
        dir.map(Path::new)
    }

    /// The adapters that are trained.
    ///
    /// # Errors
    ///
    /// Usage or data, naming the flag or the adapter's file.
    pub(crate) fn lora(&self) -> Result<Option<LoraConfig>> {
        let Some(typed) = &self.lora else {
            return Ok(None);
        };
        if let Some(dir) = self.adapter() {
            if self.lora_alpha.is_some() || !self.lora_targets.is_empty() {
                let what =
                    "--lora-alpha and --lora-targets are those of the adapter; leave them out";
                return Err(Error::usage(what));
            }
            let mut config = AdapterConfig::read(dir)
                .map_err(|e| e.note("--lora", "takes a rank, as 8, or the folder of an adapter"))?
                .lora();
            config.dropout = self.lora_dropout.unwrap_or(config.dropout);
            return Ok(Some(config));
        }
        let rank = typed.parse().unwrap_or(0);
        crate::error::check_count("--lora", rank, 1 << 16)?;
        Ok(Some(LoraConfig {
            rank,
            alpha: self.lora_alpha.unwrap_or(rank as f64),
            dropout: self.lora_dropout.unwrap_or(0.0),
            targets: match self.lora_targets.is_empty() {
                true => vec!["all-linear".to_owned()],
                false => self.lora_targets.clone(),
            },
        }))
    }

    /// Those that shape the training, a flag and its value a line.
    pub(crate) fn shaping(&self) -> Vec<String> {
        let mut all = Vec::new();
        if !self.freeze.is_empty() {
            all.push(format!("--freeze {}", self.freeze.join(",")));
        }
        if let Ok(Some(lora)) = self.lora() {
            all.push(format!("--lora {}", lora.rank));
            all.push(format!("--lora-alpha {}", number(lora.alpha)));
            all.push(format!("--lora-dropout {}", number(lora.dropout)));
            all.push(format!("--lora-targets {}", lora.targets.join(",")));
        }
        all
    }
}

/// What files of weights say of the low-rank adapters among `params`.
///
/// # Errors
///
/// None, unless there is a bug.
pub(crate) fn lora_metadata(params: &Params) -> Result<Option<(&'static str, String)>> {
    let Some(config) = params.lora() else {
        return Ok(None);
    };
    let is_transposed = |layer: &str| {
        let weight = params.find(&format!("{layer}.weight"));
        weight.is_some_and(|id| params.infos()[id.index()].layout == Layout::Transposed)
    };
    let names = params.infos().iter().map(|info| info.name.as_str());
    let mut layers = names.filter_map(|name| name.strip_suffix(".lora_A.weight"));
    let config = AdapterConfig::of(config, layers.any(is_transposed));
    let text = serde_json::to_string(&config)
        .map_err(|e| Error::internal(format!("no JSON of an adapter: {e}")))?;
    Ok(Some((AdapterConfig::METADATA, text)))
}
