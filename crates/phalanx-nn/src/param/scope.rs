//! Registration: layers name their parameters, then `build` allocates once.

use std::collections::HashSet;

use super::layout::Layout;
use super::lora::LoraConfig;
use super::params::{BufferId, ModelId, ParamId, Params, Section, new_version};
use crate::error::{Error, Result, refuse};
use crate::rng::{init, torch::Generator};
use phalanx_kernels::aligned::AlignedBuf;
use phalanx_kernels::isa;

/// The low-rank matrices of a layer: it adds `scale · x Aᵀ Bᵀ` to its output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lora {
    /// `lora_A.weight` of shape `[rank, in]`.
    pub(crate) a: ParamId,
    /// `lora_B.weight` of shape `[out, rank]`.
    pub(crate) b: ParamId,
    /// `alpha / rank`.
    pub(crate) scale: f32,
    /// Dropout of the input.
    pub(crate) dropout: f64,
}

/// Seed of the initial weights; `Seed(n)` stands for `torch.manual_seed(n)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed(pub u64);

/// How a parameter or buffer starts. Draws happen at registration, in PyTorch's
/// memory order, so that a model built in PyTorch's order starts with PyTorch's bits.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Init {
    /// Sets every element to this value; draws nothing.
    Constant(f32),
    /// PyTorch's default for weights of linear and convolution layers:
    /// uniform, Kaiming with a = sqrt 5, for this fan-in.
    KaimingUniform {
        /// Inputs of one output element.
        fan_in: usize,
    },
    /// PyTorch's default for their biases: uniform within 1 / sqrt(fan-in).
    FanInUniform {
        /// Inputs of one output element.
        fan_in: usize,
    },
    /// Uniform in [low, high).
    Uniform {
        /// Lower bound.
        low: f64,
        /// Upper bound.
        high: f64,
    },
    /// Normal.
    Normal {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        std: f64,
    },
}

/// Registers the parameters of a module, with a name prefix.
///
/// Mistakes (a name used twice, an impossible shape) are reported by
/// [`build`](Scope::build), so that model constructors need no error handling.
///
/// A scope that was [entered](Scope::enter) borrows the one it was entered from, so nothing can be
/// registered once the model is built:
///
/// ```compile_fail,E0505
/// # use phalanx_nn::{layers::Linear, Scope, Seed};
/// let mut scope = Scope::new(Seed(0));
/// let head = scope.enter("head");
/// let params = scope.build().unwrap();
/// let late = Linear::new(head, 2, 1); // error: `scope` was moved while `head` borrows it
/// ```
pub struct Scope<'a> {
    prefix: String,
    registry: Held<'a>,
}

/// A scope's access to the registry.
enum Held<'a> {
    /// The root's.
    Own(Box<Registry>),
    /// Of a scope that was entered.
    Lent(&'a mut Registry),
}

struct Registry {
    model: ModelId,
    generator: Generator,
    params: Section,
    buffers: Section,
    names: HashSet<String>,
    lora: Option<LoraConfig>,
    adapters: Vec<Lora>,
    first_mistake: Option<Error>,
}

impl Registry {
    fn mistake(&mut self, message: String) {
        self.first_mistake
            .get_or_insert_with(|| Error::usage(message));
    }

    /// Draws the adapters' values after all others, layer by layer as PEFT does, which draws those of new linear layers first.
    fn draw_adapters(&mut self) {
        if let (Some(config), true) = (&self.lora, self.adapters.is_empty()) {
            let targets = config.targets.join(", ");
            return self.mistake(format!(
                "LoRA: no linear layer or attention is called {targets}"
            ));
        }
        for Lora { a, b, .. } in &self.adapters {
            let infos = &self.params.infos;
            let inputs = |id: &ParamId| Init::KaimingUniform {
                fan_in: infos[id.index()].shape[1],
            };
            for (id, init) in [
                (a, inputs(a)),
                (b, inputs(b)),
                (a, inputs(a)),
                (b, Init::Constant(0.0)),
            ] {
                init.fill(&mut self.generator, &mut self.params.values[id.index()]);
            }
        }
    }
}

impl Scope<'static> {
    /// An empty root. Initial values are those PyTorch draws after
    /// `torch.manual_seed(seed)` when modules are constructed in the same order.
    pub fn new(seed: Seed) -> Self {
        Scope {
            prefix: String::new(),
            registry: Held::Own(Box::new(Registry {
                model: ModelId::new(),
                generator: Generator::new(seed.0),
                params: Section::default(),
                buffers: Section::default(),
                names: HashSet::new(),
                lora: None,
                adapters: Vec::new(),
                first_mistake: None,
            })),
        }
    }

    /// Lays everything out and returns the parameters.
    ///
    /// # Errors
    /// `Usage`: the first mistake made while registering, or `PHALANX_ISA`
    /// names an instruction set that this processor does not have.
    pub fn build(self) -> Result<Params> {
        // Every model is built here before anything is computed.
        isa::chosen().map_err(Error::usage)?;
        let Held::Own(r) = self.registry else {
            refuse!(
                "the scope {} was entered; build the one that Scope::new made",
                self.prefix
            );
        };
        let mut r = *r;
        r.draw_adapters();
        if let Some(e) = r.first_mistake {
            return Err(e);
        }
        let (values, infos) = r.params.build()?;
        let (buffer_values, buffer_infos) = r.buffers.build()?;
        let mut params = Params {
            model: r.model,
            values,
            infos,
            buffer_values,
            buffer_infos,
            lora: r.lora,
            versions: [new_version(), new_version()],
        };
        if params.lora.is_some() {
            let own: HashSet<ParamId> = r.adapters.iter().flat_map(|l| [l.a, l.b]).collect();
            let others = params.ids().filter(|id| !own.contains(id));
            others.for_each(|id| params.freeze(id));
        }
        Ok(params)
    }
}

impl Scope<'_> {
    /// A scope that puts `name.` before every name registered through it.
    pub fn enter(&mut self, name: &str) -> Scope<'_> {
        Scope {
            prefix: self.full(name),
            registry: Held::Lent(self.registry()),
        }
    }

    fn registry(&mut self) -> &mut Registry {
        match &mut self.registry {
            Held::Own(registry) => registry,
            Held::Lent(registry) => registry,
        }
    }

    /// Registers a parameter of PyTorch's `shape`.
    pub fn param(&mut self, name: &str, shape: &[usize], layout: Layout, init: Init) -> ParamId {
        let (full, values) = self.admit(name, shape, layout, init);
        let r = self.registry();
        ParamId {
            index: r.params.add(full, shape, layout, values),
            model: r.model,
        }
    }

    /// Low-rank adapters for the linear layers and attentions that are registered from now on and that `config` names
    /// (PEFT: `get_peft_model`): `lora_A.weight` and `lora_B.weight` next to the layer's own weight. All parameters but these are
    /// [frozen](Params::freeze). The values of the others are those that they have without adapters.
    ///
    /// [`build`](Scope::build) fails if no layer has such a name.
    ///
    /// ```
    /// use phalanx_nn::{LoraConfig, Scope, Seed, layers::Linear};
    ///
    /// let mut scope = Scope::new(Seed(0));
    /// scope.lora(LoraConfig { rank: 4, alpha: 8.0, dropout: 0.0, targets: vec!["head".to_owned()] });
    /// Linear::new(scope.enter("head"), 16, 10);
    /// let names: Vec<_> = scope.build()?.infos().iter().map(|info| info.name.clone()).collect();
    /// assert_eq!(names, ["head.weight", "head.bias", "head.lora_A.weight", "head.lora_B.weight"]);
    /// # Ok::<(), phalanx_nn::Error>(())
    /// ```
    pub fn lora(&mut self, config: LoraConfig) {
        let r = self.registry();
        if config.rank == 0 || !config.alpha.is_finite() || !(0.0..1.0).contains(&config.dropout) {
            r.mistake(format!("LoRA of rank {}, alpha {} and dropout {}: the rank is at least 1, alpha a number, dropout in 0..1", config.rank, config.alpha, config.dropout));
        }
        r.lora = Some(config);
    }

    /// Registers the adapter of this scope's layer, if it is to have one, or with `always` if there are any.
    pub(crate) fn adapter(&mut self, inputs: usize, outputs: usize, always: bool) -> Option<Lora> {
        let name = self.prefix.clone();
        let config = self.registry().lora.clone();
        let config = config.filter(|config| always || config.has(&name))?;
        let mut matrix = |name: &str, shape: [usize; 2]| {
            let mut scope = self.enter(name);
            scope.param("weight", &shape, Layout::Same, Init::Constant(0.0))
        };
        let lora = Lora {
            a: matrix("lora_A", [config.rank, inputs]),
            b: matrix("lora_B", [outputs, config.rank]),
            scale: (config.alpha / config.rank as f64) as f32,
            dropout: config.dropout,
        };
        self.registry().adapters.push(lora);
        Some(lora)
    }

    /// Registers a shard of a parameter, whose full dotted name and shape are `whole`, as where ranks divide parameters among themselves.
    /// Optimizers choose the shard's settings by these ([`Group`](crate::optim::ParamGroup)).
    pub fn shard(
        &mut self,
        name: &str,
        shape: &[usize],
        layout: Layout,
        whole: (&str, &[usize]),
    ) -> ParamId {
        let id = self.param(name, shape, layout, Init::Constant(0.0));
        let params = &mut self.registry().params;
        params.set_whole(id.index(), whole.0, whole.1);
        id
    }

    /// Draws the values of a registered parameter again, for models whose initial
    /// values differ from their layers' defaults.
    pub fn redraw(&mut self, param: ParamId, init: Init) {
        let r = self.registry();
        match r.params.values.get_mut(param.index()) {
            Some(values) if param.model == r.model => init.fill(&mut r.generator, values),
            _ => r.mistake(format!(
                "parameter {} was to be drawn again, but belongs to another model",
                param.index()
            )),
        }
    }

    /// Draws the values of registered parameters again: of each whose name begins with this scope's, in the order of
    /// registration, if `choose` gives values for its name within this scope and PyTorch's shape. This is PyTorch's
    /// `torch.nn.init` over `named_parameters()` of a new module, with the same bits, as the layers have drawn their own values
    /// before. GPT-2's:
    ///
    /// ```
    /// use phalanx_nn::{Init, Scope, Seed, layers::Linear};
    ///
    /// let mut scope = Scope::new(Seed(0));
    /// let head = Linear::new(scope.enter("head"), 8, 4);
    /// scope.initialize(|name, shape| match shape.len() {
    ///     2.. => Some(Init::Normal { mean: 0.0, std: 0.02 }),
    ///     _ if name.ends_with("bias") => Some(Init::Constant(0.0)),
    ///     _ => None,
    /// });
    /// assert_eq!(scope.build().unwrap().get(head.bias.unwrap()), [0.0; 4]);
    /// ```
    pub fn initialize(&mut self, mut choose: impl FnMut(&str, &[usize]) -> Option<Init>) {
        let prefix = self.full("");
        let r = self.registry();
        let adapters: HashSet<usize> =
            (r.adapters.iter().flat_map(|l| [l.a.index(), l.b.index()])).collect();
        let all = r.params.infos.iter().zip(&mut r.params.values).enumerate();
        for (_, (info, values)) in all.filter(|(i, _)| !adapters.contains(i)) {
            let own = info.name.strip_prefix(&prefix);
            if let Some(init) = own.and_then(|name| choose(name, &info.shape)) {
                init.fill(&mut r.generator, values);
            }
        }
    }

    /// Registers a buffer filled with `value`.
    pub fn buffer(&mut self, name: &str, shape: &[usize], value: f32) -> BufferId {
        let (full, values) = self.admit(name, shape, Layout::Same, Init::Constant(value));
        let r = self.registry();
        BufferId {
            index: r.buffers.add(full, shape, Layout::Same, values),
            model: r.model,
        }
    }

    fn full(&self, name: &str) -> String {
        if self.prefix.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.prefix)
        }
    }

    fn admit(
        &mut self,
        name: &str,
        shape: &[usize],
        layout: Layout,
        init: Init,
    ) -> (String, AlignedBuf) {
        let full = self.full(name);
        let r = self.registry();
        let mistake = if full.split('.').any(str::is_empty) {
            Some(format!("parameter name {full:?} has an empty part"))
        } else if !r.names.insert(full.clone()) {
            Some(format!("parameter name {full} is registered twice"))
        } else if layout.rank().is_some_and(|n| n != shape.len()) {
            Some(format!(
                "parameter {full}: shape {shape:?} does not fit the layout {layout}"
            ))
        } else {
            None
        };
        let elems = shape
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .filter(|&n| n <= isize::MAX as usize / 8);
        let mistake = match (mistake, elems) {
            (None, None) => Some(format!("parameter {full}: shape {shape:?} is too large")),
            (m, _) => m,
        };
        if let Some(m) = mistake {
            r.mistake(m);
            return (full, AlignedBuf::zeroed(0));
        }
        let mut values = AlignedBuf::zeroed(elems.unwrap_or(0));
        init.fill(&mut r.generator, &mut values);
        (full, values)
    }
}

impl Init {
    fn fill(self, generator: &mut Generator, values: &mut [f32]) {
        match self {
            Init::Constant(v) => values.fill(v),
            Init::KaimingUniform { fan_in } => init::fill_weight(generator, values, fan_in),
            Init::FanInUniform { fan_in } => init::fill_bias(generator, values, fan_in),
            Init::Uniform { low, high } => generator.fill_uniform_f32(values, low, high),
            Init::Normal { mean, std } => generator.fill_normal_f32(values, mean, std),
        }
    }
}

impl std::fmt::Debug for Scope<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope")
            .field("prefix", &self.prefix)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Params {
        let mut s = Scope::new(Seed(3));
        let mut a = s.enter("a");
        a.param(
            "weight",
            &[2, 3, 1, 2],
            Layout::Conv,
            Init::KaimingUniform { fan_in: 6 },
        );
        a.param("bias", &[2], Layout::Same, Init::FanInUniform { fan_in: 6 });
        a.buffer("mean", &[2], 1.0);
        s.build().unwrap()
    }

    #[test]
    fn names_places_and_gaps() {
        let p = two();
        let w = p.find("a.weight").unwrap();
        let b = p.find("a.bias").unwrap();
        assert_eq!((w.index(), b.index(), p.len(), p.numel()), (0, 1, 2, 14));
        assert_eq!(p.infos()[1].offset, 16);
        assert_eq!(p.flat().len(), 32);
        assert!(
            p.flat()[12..16]
                .iter()
                .chain(&p.flat()[18..])
                .all(|&v| v == 0.0)
        );
        assert!(p.get(w).iter().all(|&v| v != 0.0));
        assert_eq!(p.buffer(p.find_buffer("a.mean").unwrap()), [1.0, 1.0]);
        assert!(p.find("a.mean").is_none());
    }

    #[test]
    fn draws_follow_pytorchs_order_and_export_gives_them_back() {
        let p = two();
        let (w, b) = (p.find("a.weight").unwrap(), p.find("a.bias").unwrap());
        let mut want = vec![0.0; 12];
        init::fill_weight(&mut Generator::new(3), &mut want, 6);
        assert_eq!(p.export(w), want);
        // (kh, kw, in, out) inside: element [out 1, in 2, 0, kw 1].
        assert_eq!(p.get(w)[(3 + 2) * 2 + 1], want[(3 + 2) * 2 + 1]);
        assert_ne!(p.get(w), want);
        let mut q = two();
        q.flat_mut().fill(0.0);
        q.import(w, &want).unwrap();
        assert_eq!(q.get(w), p.get(w));
        assert!(
            q.import(b, &want)
                .unwrap_err()
                .to_string()
                .contains("a.bias")
        );
    }

    #[test]
    fn mistakes_surface_in_build() {
        let mut s = Scope::new(Seed(0));
        s.param("x", &[1], Layout::Same, Init::Constant(0.0));
        s.param("x", &[1], Layout::Same, Init::Constant(0.0));
        assert!(
            s.build()
                .unwrap_err()
                .to_string()
                .contains("x is registered twice")
        );
        for (outer, name) in [("a", ""), ("a..b", "w"), ("", ".w"), (".", "w")] {
            let mut s = Scope::new(Seed(0));
            s.enter(outer)
                .param(name, &[1], Layout::Same, Init::Constant(0.0));
            assert!(
                s.build().unwrap_err().to_string().contains("empty part"),
                "{outer:?} {name:?}"
            );
        }
        let mut s = Scope::new(Seed(0));
        s.param("w", &[1, 2, 3], Layout::Conv, Init::Constant(0.0));
        assert!(s.build().unwrap_err().to_string().contains("does not fit"));
        let mut s = Scope::new(Seed(0));
        s.param("w", &[usize::MAX, 2], Layout::Same, Init::Constant(0.0));
        assert!(s.build().unwrap_err().to_string().contains("too large"));
    }
}
