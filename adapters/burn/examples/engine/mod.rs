//! The flag `--device` of `phalanx train`'s programs.

use phalanx_burn::{DeviceChoice, Error, OnDevice, RankContext, Result, clap};
use phalanx_nn::Tensor;
use phalanx_recipes::{Classifier, Engine, EngineArgs};

#[derive(Debug, Clone, clap::Args)]
pub struct OnBurn {
    /// Where the network computes: auto (a discrete GPU if there is one), cpu, wgpu, vulkan or cuda; a card by its number, as in cuda:0; a
    /// software device as wgpu:cpu
    #[arg(long, default_value_t, help_heading = "Device")]
    device: DeviceChoice,
}

/// A device of Burn, and its back end; nothing for the CPU.
#[derive(Clone)]
pub struct Opened(Option<(OnDevice, &'static str)>);

impl EngineArgs for OnBurn {
    type Engine = Opened;

    fn open(&self, rank: &RankContext, may_be_gpu: bool) -> Result<Opened> {
        let choice = match (may_be_gpu, self.device == DeviceChoice::default()) {
            (true, _) => self.device,
            (false, true) => "cpu".parse()?,
            (false, false) => {
                let what = format!(
                    "--enable_gpu false and --device {}: leave out one",
                    self.device
                );
                return Err(Error::usage(what));
            }
        };
        let opened = choice.open_gpu(rank)?;
        Ok(Opened(opened.map(|(device, back_end)| {
            (OnDevice::new(device), back_end)
        })))
    }
}

impl Engine for Opened {
    fn forward<'s>(
        &self,
        net: &impl Classifier,
        images: Tensor<'s>,
    ) -> phalanx_nn::Result<Tensor<'s>> {
        match &self.0 {
            Some((device, _)) => device.run(images.step(), |device| {
                net.scores(device.input(images.data(), &images.shape())?)
            }),
            None => net.scores(images),
        }
    }

    fn facts(&self) -> Vec<String> {
        let back_end = self.0.as_ref().map_or("cpu", |(_, back_end)| back_end);
        vec![format!("device {back_end}")]
    }

    fn is_cuda(&self) -> bool {
        self.0
            .as_ref()
            .is_some_and(|(_, back_end)| *back_end == "cuda")
    }
}
