//! `--mesh`: the ranks as a mesh.

use std::fmt;

use phalanx_comm::ProcessGroup;
use phalanx_global::Placement;
use phalanx_member::RankContext;

use super::{ExchangeArg, GradientType, Settings};
use crate::choice_name;
use crate::error::{Error, Result, refuse};

/// Arguments about the mesh of ranks.
#[derive(Debug, Clone, clap::Args)]
pub struct MeshArgs {
    /// Train on global tensors, with the ranks as a mesh: `data` splits the batch, `tensor` the attention heads, MLPs and vocabulary. The sizes multiply to the number of ranks; the one that is left out follows from it [default: DistributedDataParallel over all ranks]
    #[arg(long, value_parser = parse, value_name = "data=N,tensor=N")]
    pub mesh: Option<MeshSize>,
    /// Split the weights over `data` too: each is gathered before its use, and its gradient is reduced and scattered (fully sharded data parallel)
    #[arg(long, requires = "mesh")]
    pub fully_sharded: bool,
    /// Print the placement of each parameter, and which tensors the first step converts with how many bytes
    #[arg(long, requires = "mesh")]
    pub explain: bool,
}

/// The sizes that were typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeshSize {
    data: Option<usize>,
    tensor: Option<usize>,
}

fn parse(text: &str) -> std::result::Result<MeshSize, String> {
    const ALLOWED: &str = "write data=N, tensor=N, or data=N,tensor=N, with sizes from 1 up";
    let mut typed = MeshSize {
        data: None,
        tensor: None,
    };
    for part in text.split(',') {
        let (name, size) = part.split_once('=').unwrap_or((part, ""));
        let place = match name {
            "data" => &mut typed.data,
            "tensor" => &mut typed.tensor,
            _ => return Err(format!("{name:?} is not a dimension; {ALLOWED}")),
        };
        let size = size.parse().ok().filter(|size| *size > 0);
        let Some(size) = size else {
            return Err(format!("{part:?} has no size; {ALLOWED}"));
        };
        if place.replace(size).is_some() {
            return Err(format!("{name} is given twice; {ALLOWED}"));
        }
    }
    Ok(typed)
}

impl fmt::Display for MeshSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = [("data", self.data), ("tensor", self.tensor)];
        let sizes = sizes.iter().filter_map(|(name, size)| {
            let size = (*size)?;
            Some(format!("{name}={size}"))
        });
        f.write_str(&sizes.collect::<Vec<_>>().join(","))
    }
}

impl MeshArgs {
    /// The mesh of `world` ranks; none without `--mesh`.
    ///
    /// # Errors
    ///
    /// Usage, when the sizes do not fit.
    pub fn mesh(&self, world: usize) -> Result<Option<Mesh>> {
        let Some(typed) = self.mesh else {
            return Ok(None);
        };
        let given = [typed.data, typed.tensor].into_iter().flatten();
        let product = given.fold(1usize, usize::saturating_mul);
        let is_whole = typed.data.is_some() && typed.tensor.is_some();
        if is_whole && product != world || !world.is_multiple_of(product) {
            let ranks = crate::format::plural(world, "rank");
            let (need, most) = match is_whole {
                true => (format!("{product} ranks"), ""),
                false => (format!("a multiple of {product} ranks"), " or a multiple"),
            };
            let error = Error::usage(format!("--mesh {typed} needs {need}; this run has {ranks}"));
            return Err(error.note("try", format!("--nproc-per-node {product}{most}")));
        }
        Ok(Some(Mesh {
            data: typed.data.unwrap_or(world / product),
            tensor: typed.tensor.unwrap_or(world / product),
            fully_sharded: self.fully_sharded,
            explain: self.explain,
        }))
    }
}

/// Ranks as a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mesh {
    /// Parts of a batch.
    pub data: usize,
    /// Parts of layers.
    pub tensor: usize,
    /// Weights are split over `data`.
    pub fully_sharded: bool,
    /// Layouts and conversions are printed.
    pub explain: bool,
}

impl Mesh {
    /// `world` ranks that split batches.
    pub fn data_parallel(world: usize) -> Mesh {
        Mesh {
            data: world,
            tensor: 1,
            fully_sharded: false,
            explain: false,
        }
    }

    /// The ranks of `group`. *Blocks* until all call it.
    ///
    /// # Errors
    ///
    /// Those of forming groups.
    pub fn placement(&self, group: &ProcessGroup) -> Result<Placement> {
        let dims = [("data", self.data), ("tensor", self.tensor)];
        let used = if self.tensor == 1 { 1 } else { 2 };
        Ok(Placement::new(group, &dims[..used])?)
    }

    /// A usage error for each flag that has no meaning on a mesh; `asked_by` is what asked for the mesh.
    ///
    /// # Errors
    ///
    /// That one.
    pub fn refuse(&self, settings: &Settings, asked_by: &str) -> Result<()> {
        let Settings {
            gradient_type,
            split,
            ..
        } = settings;
        let exchange = choice_name(&settings.exchange);
        let is_split = self.tensor > 1 || self.fully_sharded;
        const LAYOUT: &str = "a mesh exchanges gradients as its parameters are laid out";
        let cases = [
            (
                settings.exchange != ExchangeArg::Auto,
                format!("--exchange {exchange}"),
                LAYOUT,
            ),
            (
                *gradient_type != GradientType::F32,
                format!("--gradient-type {}", choice_name(gradient_type)),
                "a mesh exchanges gradients as f32",
            ),
            (
                choice_name(&split.determinism()) == "shards",
                "--deterministic shards".into(),
                "layers that are split over ranks add in another order for each mesh",
            ),
            (
                settings.tune.freezes(),
                "--freeze or --lora".into(),
                "a mesh trains all parameters",
            ),
            (
                settings.bucket_cap_mb.is_some(),
                "--bucket-cap-mb".into(),
                "a mesh has no buckets",
            ),
            (
                settings.watch > 0 && is_split,
                "--watch".into(),
                "it shows the parameters of rank 0, which has a part of them on this mesh",
            ),
        ];
        match cases.into_iter().find(|(is_typed, ..)| *is_typed) {
            Some((_, flag, why)) => {
                refuse!("{flag} does not go with {asked_by}: {why}; leave out one of them")
            }
            None => Ok(()),
        }
    }

    /// Checks `settings` before any rank is started; `flag` asked for the mesh.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flags.
    pub fn validate(&self, settings: &Settings, flag: &str) -> Result<()> {
        self.refuse(settings, flag)?;
        // The ranks that share a batch count as one.
        settings.validate(self.data)
    }

    /// What the ranks must agree on, and a resumed run may change.
    pub fn shaping(&self) -> Vec<String> {
        let mut all = vec![format!("--mesh data={},tensor={}", self.data, self.tensor)];
        all.push(format!("--fully-sharded {}", self.fully_sharded));
        all
    }

    /// For the person at the terminal: what is split over what.
    pub fn describe(&self) -> String {
        let splits = [
            (self.data > 1, "batches over data"),
            (
                self.tensor > 1,
                "attention heads, MLPs and vocabulary over tensor",
            ),
            (self.fully_sharded && self.data > 1, "weights over data"),
        ];
        let parts = splits.iter().filter(|split| split.0).map(|split| split.1);
        let parts: Vec<&str> = parts.collect();
        let parts = match parts[..] {
            [] => "nothing is split".to_owned(),
            _ => parts.join(", "),
        };
        let tensor = match self.tensor {
            1 => String::new(),
            n => format!(",tensor={n}"),
        };
        format!("data={}{tensor}: {parts}", self.data)
    }

    /// Numbers of all ranks as a range: `7` or `7 to 9`. *Blocks* until all call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    pub fn range(ctx: &RankContext, own: usize, show: impl Fn(usize) -> String) -> Result<String> {
        let all: Vec<usize> = ctx.group().all_gather_object(&own)?;
        let least = all.iter().min().copied().unwrap_or(own);
        let most = all.iter().max().copied().unwrap_or(own);
        Ok(match least == most {
            true => show(own),
            false => format!("{} to {}", show(least), show(most)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(mesh: &str) -> MeshArgs {
        MeshArgs {
            mesh: Some(parse(mesh).expect("sizes")),
            fully_sharded: false,
            explain: false,
        }
    }

    #[test]
    fn the_size_that_is_left_out_follows() {
        let sizes = |mesh: &str, world| {
            let mesh = args(mesh).mesh(world).expect("fits").expect("a mesh");
            [mesh.data, mesh.tensor]
        };
        assert_eq!(sizes("data=2,tensor=2", 4), [2, 2]);
        assert_eq!(sizes("tensor=2,data=3", 6), [3, 2]);
        assert_eq!(sizes("tensor=2", 2), [1, 2]);
        assert_eq!(sizes("tensor=2", 6), [3, 2]);
        assert_eq!(sizes("data=4", 4), [4, 1]);
    }

    #[test]
    fn wrong_sizes_say_what_is_allowed() {
        for (typed, words) in [
            ("", "\"\" is not a dimension"),
            ("data", "\"data\" has no size"),
            ("data=0", "\"data=0\" has no size"),
            ("data=two", "\"data=two\" has no size"),
            ("data=2,model=2", "\"model\" is not a dimension"),
            ("data=2,data=2", "data is given twice"),
            ("data=2, tensor=2", "\" tensor\" is not a dimension"),
        ] {
            let error = parse(typed).expect_err(typed);
            assert!(error.starts_with(words), "{error}");
            assert!(error.contains("data=N,tensor=N"), "{error}");
        }
        for (typed, world, words) in [
            ("data=2,tensor=2", 2, "needs 4 ranks; this run has 2 ranks"),
            ("data=2,tensor=2", 8, "needs 4 ranks; this run has 8 ranks"),
            (
                "tensor=3",
                4,
                "needs a multiple of 3 ranks; this run has 4 ranks",
            ),
        ] {
            let error = args(typed).mesh(world).expect_err(typed).to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
