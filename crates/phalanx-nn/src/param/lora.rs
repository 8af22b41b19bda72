//! Which layers of a model get low-rank adapters (E. J. Hu et al., "LoRA: Low-rank adaptation of large language models", 2021),
//! with PEFT's names and initial values.

/// The target that stands for all linear layers.
pub(crate) const ALL_LINEAR: &str = "all-linear";

/// LoRA's settings, as PEFT's `LoraConfig` has them: see [`Scope::lora`](crate::Scope::lora).
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rank of the two matrices of a layer (PEFT: `r`).
    pub rank: usize,
    /// The product of the matrices is multiplied by `alpha / rank` (PEFT: `lora_alpha`).
    pub alpha: f64,
    /// Dropout of the input of the first matrix (PEFT: `lora_dropout`).
    pub dropout: f64,
    /// Layers: each by its name or the end of its name after a point, or `all-linear` (PEFT: `target_modules`).
    pub targets: Vec<String>,
}

impl LoraConfig {
    /// Whether the layer of this name is one of the targets.
    pub(super) fn has(&self, layer: &str) -> bool {
        self.targets.iter().any(|target| {
            let rest = layer.strip_suffix(&**target);
            target == ALL_LINEAR || rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        })
    }
}
