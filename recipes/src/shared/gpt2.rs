//! The sizes of `train gpt`'s model: those of the flags, or of a file of GPT-2's weights.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx::checkpoint::{read_metadata, read_shapes};
use phalanx::prelude::*;
use phalanx::train::{Start, weights_of};
use phalanx_base::files::read_regular;

/// A GPT under nanoGPT's names, or GPT-2 under Hugging Face's.
pub struct Sizes {
    pub config: GptConfig,
    pub is_gpt2: bool,
}

impl Sizes {
    /// Registers the model.
    pub fn build(&self, scope: &mut Scope<'_>) -> Gpt {
        match self.is_gpt2 {
            true => Gpt::gpt2(scope, &self.config),
            false => Gpt::new(scope, &self.config),
        }
    }

    /// The sizes of the file that `--init` or `--resume` names if it is of GPT-2, else `flags`: layers, heads and width. The data
    /// have this vocabulary and context.
    ///
    /// # Errors
    ///
    /// Usage, when the data do not fit GPT-2; those of reading the file.
    pub fn of(
        job: &Job<'_>,
        (vocab, context): (usize, usize),
        [layers, heads, width]: [usize; 3],
        dropout: f64,
    ) -> Result<Sizes> {
        let settings = job.settings();
        let resumed = settings.saving.resumed_path().filter(|path| path.exists());
        let path = match &settings.init {
            Start::File(path) => Some(path.clone()),
            // A checkpoint that is gone was one: a later one is in its folder.
            _ => (resumed.map(Path::to_owned)).or_else(|| settings.saving.resumed_dir()),
        };
        // What is wrong with the file rank 0 says when it loads it; the ranks compare their models.
        let file = path.filter(|path| path.exists());
        let found = match file.and_then(|path| weights_of(&path).ok()) {
            Some(file) => gpt2(&file, &read_shapes(&file)?)?.map(|config| (config, file)),
            None => None,
        };
        let Some((found, file)) = found else {
            let config = GptConfig {
                vocab,
                context,
                layers,
                heads,
                width,
                dropout,
            };
            return Ok(Sizes {
                config,
                is_gpt2: false,
            });
        };
        if vocab > found.vocab || context > found.context {
            return Err(Error::usage(format!(
                "{} has {} tokens and a context of {}, the data {vocab} tokens and {context}; use GPT-2's tokens, and a smaller --context",
                file.display(),
                found.vocab,
                found.context
            )));
        }
        let config = GptConfig { dropout, ..found };
        Ok(Sizes {
            config,
            is_gpt2: true,
        })
    }

    /// The files of its training. Those of GPT-2 say what their shapes do not.
    pub fn files(&self) -> Files {
        let heads = ("heads", self.config.heads.to_string());
        Files {
            model: "gpt".to_owned(),
            about: self.is_gpt2.then_some(heads).into_iter().collect(),
            weights: Some("gpt.safetensors".to_owned()),
            ..Files::default()
        }
    }
}

/// The sizes of GPT-2 in a file with tensors of these shapes, if it is that. The number of heads is in the `config.json` next to
/// it or in the metadata of a run's file; without these, a head has the width 64, as in all of OpenAI's.
fn gpt2(file: &Path, shapes: &BTreeMap<String, Vec<usize>>) -> Result<Option<GptConfig>> {
    let shape = |name: &str| {
        let names = [name.to_owned(), format!("transformer.{name}")];
        names.iter().find_map(|name| shapes.get(name))
    };
    let block = |i: usize| shape(&format!("h.{i}.attn.c_attn.weight"));
    let (Some(&[vocab, width]), Some(&[context, _]), Some(_)) = (
        shape("wte.weight").map(Vec::as_slice),
        shape("wpe.weight").map(Vec::as_slice),
        block(0),
    ) else {
        return Ok(None);
    };
    let path = file.with_file_name("config.json");
    let said = match read_metadata(file)?.get("heads") {
        Some(heads) => heads.parse().ok(),
        None if path.is_file() => {
            let config: serde_json::Value = serde_json::from_slice(&read_regular(&path, 1 << 20)?)
                .map_err(|e| Error::data(format!("{}: {e}", path.display())))?;
            config["n_head"].as_u64()
        }
        None => None,
    };
    let heads = said.map_or(width / 64, |heads| heads as usize);
    if heads == 0 || !width.is_multiple_of(heads) {
        let what = format!(
            "{}: {heads} heads do not divide its width of {width}; the number is n_head in {}",
            file.display(),
            path.display()
        );
        return Err(Error::data(what));
    }
    Ok(Some(GptConfig {
        vocab,
        context,
        layers: (0..).take_while(|i| block(*i).is_some()).count(),
        heads,
        width,
        dropout: 0.0,
    }))
}
