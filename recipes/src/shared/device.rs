//! Where the networks that classify images compute.

use phalanx::nn::{self, Value};
use phalanx::prelude::*;

/// Images (N, H, W, C) to scores (N, classes), on any engine.
pub trait Classifier {
    /// The scores.
    ///
    /// # Errors
    ///
    /// `Usage` for images of another shape.
    fn scores<'s, V: Value<'s>>(&self, images: V) -> nn::Result<V>;
}

macro_rules! classifiers {
    ($($net:ident),*) => {$(
        impl Classifier for nn::models::$net {
            fn scores<'s, V: Value<'s>>(&self, images: V) -> nn::Result<V> {
                self.forward(images)
            }
        }
    )*};
}

classifiers!(MnistCnn, CifarResNet, ResNet, ResNet9, MobileNetV2);

/// An engine and its device.
pub trait Engine: Clone + 'static {
    /// What `net` gives for `images`.
    ///
    /// # Errors
    ///
    /// Those of the network and of the device.
    fn forward<'s>(&self, net: &impl Classifier, images: Tensor<'s>) -> nn::Result<Tensor<'s>>;

    /// Registers the network that `net` makes, to compute here.
    fn on<N>(&self, net: impl FnOnce(&mut Scope) -> N) -> impl FnOnce(&mut Scope) -> On<N, Self> {
        let engine = self.clone();
        |scope| On {
            net: net(scope),
            engine,
        }
    }

    /// What must be the same on all ranks, and is shown of the run.
    fn facts(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether it computes by CUDA.
    fn is_cuda(&self) -> bool {
        false
    }
}

/// The flags that choose an engine and its device.
pub trait EngineArgs: clap::Args + Clone + std::fmt::Debug + Send + Sync + 'static {
    /// What they choose from.
    type Engine: Engine;

    /// Opens the device of this rank, a GPU only if it may be one. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Usage, naming the flag, when there is no such device; peers that are lost.
    fn open(&self, ctx: &RankContext, may_be_gpu: bool) -> Result<Self::Engine>;
}

/// No flags: Phalanx's own engine, on the CPU.
#[derive(Debug, Clone, clap::Args)]
pub struct OnCpu {}

/// That engine.
#[derive(Debug, Clone)]
pub struct Cpu;

impl EngineArgs for OnCpu {
    type Engine = Cpu;

    fn open(&self, _: &RankContext, _: bool) -> Result<Cpu> {
        Ok(Cpu)
    }
}

impl Engine for Cpu {
    fn forward<'s>(&self, net: &impl Classifier, images: Tensor<'s>) -> nn::Result<Tensor<'s>> {
        net.scores(images)
    }
}

/// A network on its engine.
pub struct On<N, E> {
    pub net: N,
    engine: E,
}

impl<N: Classifier, E: Engine> On<N, E> {
    /// The scores of images.
    ///
    /// # Errors
    ///
    /// Those of the network and of the device.
    pub fn forward<'s>(&self, images: Tensor<'s>) -> nn::Result<Tensor<'s>> {
        self.engine.forward(&self.net, images)
    }
}
