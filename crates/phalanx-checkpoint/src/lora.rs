//! Low-rank adapters in the files of Hugging Face's PEFT: `adapter_config.json` and `adapter_model.safetensors` in a folder.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use phalanx_base::files::{atomic_write, open_regular, read_open};
use phalanx_base::text::one_line;
use phalanx_base::{Error, Result, refuse};
use phalanx_nn::LoraConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::load::{FRONT, from_peft, is_adapter, read_tensors};
use crate::pth::{DType, Saved};
use crate::weights::{little_endian, save_tensors};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
const A: &str = ".lora_A.weight";
const B: &str = ".lora_B.weight";
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// What a folder of PEFT's says of an adapter. Of a file with a model and its adapters, it is the metadata [`Self::METADATA`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdapterConfig {
    peft_type: String,
    /// Rank.
    pub r: usize,
    /// The product of the two matrices is multiplied by `lora_alpha / r`.
    pub lora_alpha: f64,
    /// Dropout of the adapters' inputs in training.
    #[serde(default)]
    pub lora_dropout: f64,
    /// Layers, by the end of their names.
    pub target_modules: Targets,
    /// The layers' weights are `[in, out]`, as those of GPT-2.
    #[serde(default)]
    pub fan_in_fan_out: bool,
    #[serde(default)]
    bias: Option<String>,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// The names of layers, or one for all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Targets {
    /// `all-linear`, or a regular expression, which is refused.
    One(String),
    /// The ends of names.
    Each(Vec<String>),
}

impl AdapterConfig {
    /// That of the file of weights at `path` with this metadata, if it has adapters.
    ///
    /// # Errors
    ///
    /// `Data` when it is damaged.
    pub fn of_file(
        path: &Path,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Option<AdapterConfig>> {
        let text = metadata.get(Self::METADATA);
        text.map(|text| AdapterConfig::parse(path, text.as_bytes()))
            .transpose()
    }

    /// The name of the metadata that has it, as JSON.
    pub const METADATA: &str = "lora";

    /// Of adapters that a model was built with; `fan_in_fan_out` where weights are `[in, out]`.
    pub fn of(config: &LoraConfig, fan_in_fan_out: bool) -> AdapterConfig {
        AdapterConfig {
            peft_type: "LORA".to_owned(),
            r: config.rank,
            lora_alpha: config.alpha,
            lora_dropout: config.dropout,
            target_modules: Targets::Each(config.targets.clone()),
            fan_in_fan_out,
            bias: Some("none".to_owned()),
            others: BTreeMap::new(),
        }
    }

    /// Reads that of the folder `dir`.
    ///
    /// # Errors
    ///
    /// `Usage` when there is none; `Data` for another kind of adapter, or settings that are not supported.
    pub fn read(dir: &Path) -> Result<AdapterConfig> {
        let path = dir.join(CONFIG);
        let file = open_regular(&path).map_err(|e| Error::not_opened("adapter", &path, e))?;
        AdapterConfig::parse(&path, &read_open(&path, file, MAX_CONFIG_BYTES)?)
    }

    pub(crate) fn parse(path: &Path, text: &[u8]) -> Result<AdapterConfig> {
        let wrong = |what: &str| Error::data(format!("{}: {}", path.display(), one_line(what)));
        let config: AdapterConfig =
            serde_json::from_slice(text).map_err(|e| wrong(&e.to_string()).with_source(e))?;
        let is_set = |name: &&str| match config.others.get(*name) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Object(all)) => !all.is_empty(),
            Some(Value::Array(all)) => !all.is_empty(),
            Some(_) => true,
        };
        let mut unknown =
            "use_dora use_rslora use_qalora lora_bias layer_replication target_parameters trainable_token_indices alora_invocation_tokens rank_pattern alpha_pattern modules_to_save layers_to_transform"
                .split(' ');
        if config.peft_type != "LORA" {
            return Err(wrong("its peft_type is not LORA"));
        }
        if let Some(name) = unknown.find(is_set) {
            return Err(wrong(&format!("{name} is not supported")));
        }
        if config.bias.as_deref().is_some_and(|bias| bias != "none") {
            return Err(wrong("biases of its own are not supported"));
        }
        let is_share = (0.0..1.0).contains(&config.lora_dropout);
        if !(1..=1 << 16).contains(&config.r) || !config.lora_alpha.is_finite() || !is_share {
            return Err(wrong(
                "r must be at least 1 and at most 65536, lora_alpha a number, and lora_dropout in 0..1",
            ));
        }
        Ok(config)
    }

    /// The adapters that a model is built with to load it.
    pub fn lora(&self) -> LoraConfig {
        LoraConfig {
            rank: self.r,
            alpha: self.lora_alpha,
            dropout: self.lora_dropout,
            targets: match &self.target_modules {
                Targets::One(all) => vec![all.clone()],
                Targets::Each(all) => all.clone(),
            },
        }
    }
}

/// The adapters of a model, without the model.
#[derive(Debug)]
pub struct Adapter {
    config: AdapterConfig,
    /// Under the model's names.
    matrices: Vec<Saved>,
}

impl Adapter {
    /// The file with the tensors of the adapter in folder `dir`.
    pub fn tensors_in(dir: &Path) -> PathBuf {
        dir.join(TENSORS)
    }

    /// Takes the adapters out of the `tensors` of a model, whose file has this `metadata`.
    ///
    /// # Errors
    ///
    /// `Usage` when there are none; `Data` when the metadata are damaged.
    pub fn take(
        tensors: &mut Vec<Saved>,
        metadata: &mut BTreeMap<String, String>,
        path: &Path,
    ) -> Result<Adapter> {
        let matrices: Vec<Saved> = tensors.extract_if(.., |t| is_adapter(&t.name)).collect();
        let text = metadata.remove(AdapterConfig::METADATA);
        let Some(text) = text.filter(|_| !matrices.is_empty()) else {
            let why = match matrices.is_empty() {
                true => "has no low-rank adapters (--lora)",
                false => {
                    "has low-rank adapters without their alpha, which .pth files cannot have; use the run's .safetensors"
                }
            };
            refuse!("{} {why}", path.display());
        };
        let mut config = AdapterConfig::parse(path, text.as_bytes())?;
        let layers = layers(&matrices);
        let targets = layers.iter().filter(|layer| !is_inner(layer, &layers));
        config.target_modules = Targets::Each(targets.cloned().collect());
        Ok(Adapter { config, matrices })
    }

    /// Reads the adapter in the folder `dir`.
    ///
    /// # Errors
    ///
    /// As [`AdapterConfig::read`] and [`read_tensors`]; `Data` when there are other tensors.
    pub fn read(dir: &Path) -> Result<Adapter> {
        let (config, path) = (AdapterConfig::read(dir)?, Adapter::tensors_in(dir));
        let (mut matrices, _) = read_tensors(&path)?;
        for tensor in &mut matrices {
            if !is_adapter(&tensor.name) {
                let (path, name) = (path.display(), one_line(&tensor.name));
                return Err(Error::data(format!("{path}: {name} is of no LoRA adapter")));
            }
            tensor.name = from_peft(tensor.name.strip_prefix(FRONT).unwrap_or(&tensor.name));
        }
        Ok(Adapter { config, matrices })
    }

    /// Writes it to the folder `dir`, which `PeftModel.from_pretrained` reads. The folder is made if it is not there.
    ///
    /// # Errors
    ///
    /// `DiskFull` or `System`, naming the path.
    pub fn save(mut self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(|e| Error::io("cannot make", dir, e))?;
        let layers = layers(&self.matrices);
        for tensor in &mut self.matrices {
            if let Some((layer, rest)) = tensor.name.split_once(".lora_")
                && is_inner(layer, &layers)
                && let Some((outer, inner)) = layer.rsplit_once('.')
            {
                tensor.name = format!("{outer}.base_layer.{inner}.lora_{rest}");
            }
            tensor.name.insert_str(0, FRONT);
        }
        save_tensors(&dir.join(TENSORS), self.matrices, &BTreeMap::new())?;
        let text = serde_json::to_vec_pretty(&self.config)
            .map_err(|e| Error::internal(format!("no JSON of an adapter: {e}")))?;
        atomic_write(&dir.join(CONFIG), &text)
    }

    /// Adds the products of its matrices to the weights of the model `tensors`, which become float32. Gives the number of
    /// layers.
    ///
    /// # Errors
    ///
    /// `Data`, naming a layer that the model lacks or whose sizes differ.
    pub fn merge_into(&self, tensors: &mut [Saved]) -> Result<usize> {
        let places = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i));
        let places: HashMap<String, usize> = places.collect();
        let by_name = self.matrices.iter().map(|t| (t.name.as_str(), t));
        let by_name: HashMap<&str, &Saved> = by_name.collect();
        let mut layers = 0;
        for a in &self.matrices {
            let Some(layer) = a.name.strip_suffix(A) else {
                continue;
            };
            let wrong =
                |what: &str| Error::data(format!("the adapter of {}: {what}", one_line(layer)));
            let b = by_name.get(&*format!("{layer}{B}"));
            let b = *b.ok_or_else(|| wrong("it has only one of its two matrices"))?;
            // A file may lack the first part of all names, as those of Hugging Face's models without their head do.
            let short = layer.split_once('.').map_or(layer, |(_, rest)| rest);
            let ends = ["weight", "in_proj_weight"];
            let names = [layer, short]
                .into_iter()
                .flat_map(|l| ends.map(|end| format!("{l}.{end}")));
            let at = names.into_iter().find_map(|name| places.get(&name));
            let at = at.ok_or_else(|| wrong("the model has no such layer"))?;
            self.merge(&mut tensors[*at], [a, b])
                .ok_or_else(|| wrong("its matrices are not of the layer's sizes"))?;
            layers += 1;
        }
        Ok(layers)
    }

    /// Adds `scale · B A` to a weight; none if sizes differ.
    fn merge(&self, weight: &mut Saved, [a, b]: [&Saved; 2]) -> Option<()> {
        let (&[rank, inputs], &[outputs, rank_b]) = (&a.shape[..], &b.shape[..]) else {
            return None;
        };
        let is_transposed =
            weight.shape == [inputs, outputs] && (self.config.fan_in_fan_out || inputs != outputs);
        if [rank, rank_b] != [self.config.r; 2]
            || !(is_transposed || weight.shape == [outputs, inputs])
        {
            return None;
        }
        let [a, b] = [a, b].map(|t| t.dtype.to_f32(&t.bytes));
        let mut values = weight.dtype.to_f32(&weight.bytes);
        let scale = self.config.lora_alpha / self.config.r as f64;
        for out in 0..outputs {
            for inp in 0..inputs {
                let sum: f64 = (0..rank)
                    .map(|r| f64::from(b[out * rank + r]) * f64::from(a[r * inputs + inp]))
                    .sum();
                let at = match is_transposed {
                    true => inp * outputs + out,
                    false => out * inputs + inp,
                };
                values[at] = (f64::from(values[at]) + scale * sum) as f32;
            }
        }
        (weight.dtype, weight.bytes) = (DType::F32, little_endian(&values));
        Some(())
    }
}

/// The layers that `matrices` belong to.
fn layers(matrices: &[Saved]) -> BTreeSet<String> {
    let layers = matrices.iter().filter_map(|t| t.name.strip_suffix(A));
    layers.map(str::to_owned).collect()
}

/// Whether `layer` is the output projection of one of `layers`.
fn is_inner(layer: &str, layers: &BTreeSet<String>) -> bool {
    let outer = layer.strip_suffix(".out_proj");
    outer.is_some_and(|outer| layers.contains(outer))
}
