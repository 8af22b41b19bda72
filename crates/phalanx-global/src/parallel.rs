//! How the parameters of a model lie, by the names of its modules.

use phalanx_nn::{ParamInfo, Params};

use crate::error::{Error, Result};
use crate::params::GlobalParams;
use crate::placement::Placement;
use crate::sbp::Sbp;

/// Which parameters of a model are split, and how: data parallel, tensor parallel, fully sharded, or a
/// mixture over the dimensions of a mesh (PyTorch's `parallelize_module` and `fully_shard`).
///
/// Modules are named as in their parameters' names, without the last part; `*` stands for one part or a
/// piece of it, so `h.*.attn.q` means that module of every block. A parameter that nothing names is whole on all ranks.
///
/// ```
/// use phalanx_comm::{GroupOptions, ProcessGroup};
/// use phalanx_global::{Parallel, Placement};
/// use phalanx_nn::models::{Gpt, GptConfig};
/// use phalanx_nn::{Scope, Seed};
///
/// # let config = GptConfig { vocab: 8, context: 4, layers: 2, heads: 2, width: 8, dropout: 0.0 };
/// let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
/// let placement = Placement::new(&group, &[("data", 1), ("tensor", 1)])?;
/// let mut scope = Scope::new(Seed(0));
/// let model = Gpt::new(&mut scope, &config);
/// let params = Parallel::new()
///     .column("tensor", &["transformer.h.*.attn.[qkv]", "transformer.h.*.mlp.fc"])
///     .row("tensor", &["transformer.h.*.attn.proj", "transformer.h.*.mlp.proj"])
///     .fully_sharded("data")
///     .build(&placement, &scope.build()?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Parallel {
    splits: Vec<Split>,
    sharded: Option<String>,
}

#[derive(Clone, Debug)]
struct Split {
    /// Name of the mesh dimension.
    dim: String,
    /// Names of parameters.
    pattern: String,
    axis: usize,
    /// Parameters that need not exist, such as biases.
    optional: bool,
    role: Role,
}

/// What a parameter is to the sums over a mesh dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Nothing.
    Plain,
    /// Results of it are sums, and are made whole.
    Summed,
    /// It is whole, and the first rank adds it to a sum.
    Added,
}

impl Parallel {
    /// All parameters whole: data parallel over whatever splits the batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Column parallel linear layers and convolutions: each rank of mesh dimension `dim` has some of the
    /// outputs, of weight and bias. An input that is whole needs no communication; the result is split along
    /// its last axis.
    #[must_use]
    pub fn column(self, dim: &str, modules: &[&str]) -> Self {
        modules.iter().fold(self, |all, module| {
            all.with(dim, format!("{module}.weight"), 0, false).with(
                dim,
                format!("{module}.bias"),
                0,
                true,
            )
        })
    }

    /// Row parallel linear layers and convolutions: each rank of mesh dimension `dim` has some of the inputs
    /// of the weight. An input that is split along its last axis needs no communication; the result, to which
    /// the first rank adds the bias, is added up over the ranks by an all-reduce (PyTorch's `RowwiseParallel`).
    #[must_use]
    pub fn row(self, dim: &str, modules: &[&str]) -> Self {
        modules.iter().fold(self, |all, module| {
            let weight = format!("{module}.weight");
            let all = all.with(dim, weight, 1, false).role(Role::Summed);
            let bias = format!("{module}.bias");
            all.with(dim, bias, 0, true).role(Role::Added)
        })
    }

    /// Embeddings of which each rank of mesh dimension `dim` has some of the rows; the result is added up over the ranks
    /// by an all-reduce.
    #[must_use]
    pub fn vocabulary(self, dim: &str, modules: &[&str]) -> Self {
        modules.iter().fold(self, |all, module| {
            all.with(dim, format!("{module}.weight"), 0, false)
                .role(Role::Summed)
        })
    }

    /// Attention over some of the heads on each rank of mesh dimension `dim`: projections called `q`, `k` and
    /// `v` column parallel, `proj` row parallel.
    #[must_use]
    pub fn attention(self, dim: &str, modules: &[&str]) -> Self {
        modules.iter().fold(self, |all, module| {
            all.column(dim, &[&format!("{module}.[qkv]")])
                .row(dim, &[&format!("{module}.proj")])
        })
    }

    /// Any parameters, by their own names, split along `axis` (in PyTorch's order).
    #[must_use]
    pub fn split(self, dim: &str, parameters: &[&str], axis: usize) -> Self {
        parameters.iter().fold(self, |all, name| {
            all.with(dim, (*name).to_owned(), axis, false)
        })
    }

    fn with(mut self, dim: &str, pattern: String, axis: usize, optional: bool) -> Self {
        self.splits.push(Split {
            dim: dim.to_owned(),
            pattern,
            axis,
            optional,
            role: Role::Plain,
        });
        self
    }

    /// With another role of the last parameters.
    fn role(mut self, role: Role) -> Self {
        if let Some(split) = self.splits.last_mut() {
            split.role = role;
        }
        self
    }

    /// Fully sharded data parallel: over mesh dimension `dim`, each rank has a part of every weight with
    /// two axes or more, gathers it before each use and frees it after; its gradient is reduced and
    /// scattered, and its optimizer state exists once. The split axis is the first that the number
    /// of ranks divides, else the longest, of those that are not split over another dimension. Vectors (biases, norms)
    /// stay whole.
    #[must_use]
    pub fn fully_sharded(mut self, dim: &str) -> Self {
        self.sharded = Some(dim.to_owned());
        self
    }

    /// Leaves out what is split over mesh dimension `dim`: for a mesh that does not have it.
    #[must_use]
    pub fn without(mut self, dim: &str) -> Self {
        self.splits.retain(|split| split.dim != dim);
        self
    }

    /// The parameters of a model, which every rank has in full and with equal values, laid out so.
    ///
    /// # Errors
    /// `Usage` when a dimension of the mesh or a module does not exist, or an axis is split twice over one
    /// dimension.
    pub fn build(&self, placement: &Placement, params: &Params) -> Result<GlobalParams> {
        let dim_of = |name: &str| {
            placement.dim(name).ok_or_else(|| {
                Error::usage(format!("the mesh {placement} has no dimension {name:?}"))
            })
        };
        let mut dims = Vec::new();
        for split in &self.splits {
            dims.push(dim_of(&split.dim)?);
            let found = params
                .infos()
                .iter()
                .any(|i| matches(&split.pattern, &i.name));
            if !found && !split.optional {
                return Err(Error::usage(format!(
                    "no parameter is called {}; the model has {}",
                    split.pattern,
                    names(params.infos())
                )));
            }
        }
        let sharded = self.sharded.as_deref().map(dim_of).transpose()?;
        let mut built = GlobalParams::new(placement, params, |info| {
            let mut sbp = vec![Sbp::Broadcast; placement.sizes().len()];
            for (split, dim) in self.splits.iter().zip(&dims) {
                if split.role != Role::Added && matches(&split.pattern, &info.name) {
                    sbp[*dim] = Sbp::Split(split.axis);
                }
            }
            if let Some(dim) = sharded
                && info.shape.len() > 1
                && sbp[dim] == Sbp::Broadcast
            {
                let ranks = placement.sizes()[dim];
                let free = || (0..info.shape.len()).filter(|a| !sbp.contains(&Sbp::Split(*a)));
                let equal = free().find(|a| info.shape[*a].is_multiple_of(ranks));
                let axis = equal.or_else(|| free().max_by_key(|a| info.shape[*a]));
                sbp[dim] = axis.map_or(Sbp::Broadcast, Sbp::Split);
            }
            sbp
        })?;
        for (split, dim) in self.splits.iter().zip(&dims) {
            let infos = params.infos().iter().enumerate();
            for (index, _) in infos.filter(|(_, i)| matches(&split.pattern, &i.name)) {
                match split.role {
                    Role::Plain => {}
                    Role::Summed => built.sum_over(index, *dim),
                    Role::Added => built.add_once(index, *dim)?,
                }
            }
        }
        match &self.sharded {
            Some(dim) => built.gather_over(dim),
            None => Ok(built),
        }
    }
}

fn names(infos: &[ParamInfo]) -> String {
    const SHOWN: usize = 8;
    let mut names: Vec<&str> = infos.iter().take(SHOWN).map(|i| &*i.name).collect();
    if infos.len() > SHOWN {
        names.push("...");
    }
    names.join(", ")
}

/// Whether a name fits a pattern: `*` is any text without a dot, `[abc]` one of these characters.
fn matches(pattern: &str, name: &str) -> bool {
    let mut rest = pattern.chars();
    match rest.next() {
        None => name.is_empty(),
        Some('*') => {
            let rest = rest.as_str();
            let end = name.find('.').unwrap_or(name.len());
            (0..=end).any(|n| name.is_char_boundary(n) && matches(rest, &name[n..]))
        }
        Some('[') => {
            let Some((set, rest)) = rest.as_str().split_once(']') else {
                return false;
            };
            let first = name.chars().next();
            first.is_some_and(|c| set.contains(c) && matches(rest, &name[c.len_utf8()..]))
        }
        Some(c) => name
            .strip_prefix(c)
            .is_some_and(|name| matches(rest.as_str(), name)),
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns() {
        for (pattern, name, fits) in [
            ("h.*.attn.q", "h.0.attn.q", true),
            ("h.*.attn.q", "h.11.attn.q", true),
            ("h.*.attn.q", "h.1.1.attn.q", false),
            ("h.*", "h.", true),
            ("*.weight", "fc.weight", true),
            ("fc*.weight", "fc1.weight", true),
            ("attn.[qkv]", "attn.k", true),
            ("attn.[qkv]", "attn.p", false),
            ("attn.[qkv", "attn.q", false),
            ("", "a", false),
            ("a", "", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }
}
