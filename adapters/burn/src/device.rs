//! The device on which a rank computes: the flag `--device`.

use std::fmt;
use std::fs;
use std::str::FromStr;

use burn::tensor::{Device, DeviceKind};
use phalanx_base::{Error, ErrorKind, Result, host_name};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::ReplicaOptions;
use phalanx_launch::RankContext;

/// The value of a program's flag `--device`.
///
/// | value | device |
/// |---|---|
/// | `auto` | a card by CUDA if there is one, else a discrete card by wgpu, else the CPU; never a software device |
/// | `cpu` | Burn's back end flex |
/// | `cuda`, `vulkan`, `wgpu` | the card whose number is the local rank: discrete cards first, then integrated, then virtual ones |
/// | `cuda:N`, `vulkan:N`, `wgpu:N` | card N for all ranks of the host |
/// | `vulkan:cpu`, `wgpu:cpu` | a software device, such as Mesa's llvmpipe |
///
/// Each back end needs the Cargo feature of this crate with its name; that of `cpu` is `flex`.
///
/// ```no_run
/// use std::process::ExitCode;
/// use phalanx_burn::{DeviceChoice, RankContext, ReplicaOptions, Result, clap};
///
/// #[derive(clap::Args)]
/// struct Args {
///     /// auto, cpu, wgpu, vulkan or cuda; a card by its number, as in cuda:0
///     #[arg(long, default_value_t)]
///     device: DeviceChoice,
/// }
///
/// fn train(rank: &RankContext, args: &Args) -> Result<()> {
///     let mut options = ReplicaOptions::default();
///     let device = args.device.open(rank, &mut options)?.autodiff();
///     // DistributedDataParallel::new(&rank.group(), model, options)
///     # Ok(())
/// }
///
/// fn main() -> ExitCode {
///     phalanx_burn::main_with(train)
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceChoice {
    back_end: BackEnd,
    which: Which,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum BackEnd {
    #[default]
    Auto,
    Cpu,
    Cuda,
    Vulkan,
    Wgpu,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Which {
    #[default]
    OfLocalRank,
    Number(usize),
    Software,
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<DeviceChoice> {
        use BackEnd::{Auto, Cpu, Cuda, Vulkan, Wgpu};
        let (_, card) = text.split_once(':').unwrap_or((text, ""));
        let all = [Auto, Cpu, Cuda, Vulkan, Wgpu];
        let which = match card.parse() {
            Ok(number) => Which::Number(number),
            Err(_) if card == "cpu" => Which::Software,
            Err(_) => Which::OfLocalRank,
        };
        let choice = all.map(|back_end| DeviceChoice { back_end, which });
        let choice = choice.into_iter().find(|choice| {
            let may_have = match which {
                Which::OfLocalRank => true,
                Which::Number(_) => matches!(choice.back_end, Cuda | Vulkan | Wgpu),
                Which::Software => matches!(choice.back_end, Vulkan | Wgpu),
            };
            may_have && choice.to_string() == text
        });
        choice.ok_or_else(|| {
            Error::usage(
                "not a device; use auto, cpu, wgpu, vulkan or cuda, a card by its number as in cuda:0, or wgpu:cpu for a software device",
            )
        })
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.back_end.name();
        match self.which {
            Which::OfLocalRank => f.write_str(name),
            Which::Number(number) => write!(f, "{name}:{number}"),
            Which::Software => write!(f, "{name}:cpu"),
        }
    }
}

/// A back end and its cards.
type Found = (BackEnd, Vec<DeviceKind>);

impl DeviceChoice {
    /// Opens the device of this rank, without autodiff, and adds its back end to what
    /// [must agree](ReplicaOptions::must_agree). Rank 0 prints card, back end and float type.
    ///
    /// Two ranks may compute on one card only if its number is given. Nothing is opened before the system was asked whether
    /// it is there: a missing device is an error, not a panic. Call it before the first tensor is made.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Usage` if the back end was not compiled in, if there is no such device, or if two ranks would share a card; `Failed`
    /// if the device cannot be opened; `PeerLost` or `Timeout` naming the rank. The group is aborted after an error, so that
    /// the other ranks do not wait.
    pub fn open(self, rank: &RankContext, options: &mut ReplicaOptions) -> Result<Device> {
        let (device, back_end) = self.opened(rank, self.back_end_and_cards())?;
        let (_, back_end, _) = back_end.facts();
        options
            .must_agree
            .push(format!("the device's back end is {back_end}"));
        if rank.is_main() {
            rank.line(&format!("device {}", described(&device, back_end)))?;
        }
        Ok(device)
    }

    /// Opens the GPU of this rank, for [`OnDevice`](crate::OnDevice), and gives the name of the back end: `cuda`, `vulkan` or
    /// `wgpu`. `None` where the choice is the CPU, whose engine is phalanx-nn's own. Rank 0 says on standard error what it is.
    ///
    /// *Blocks* until all ranks of the group call it. A process that has yet to join an elastic training does not wait for the
    /// others, and may share a card with one of them.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    #[cfg(feature = "nn")]
    pub fn open_gpu(self, rank: &RankContext) -> Result<Option<(Device, &'static str)>> {
        let found = self.back_end_and_cards();
        if found.0 == BackEnd::Cpu {
            if !rank.is_newcomer() {
                // Ranks with a GPU wait for this one, and then see that it has none.
                self.refuse_sharing(&rank.group(), &String::new(), String::new)?;
            }
            rank.note("device   CPU, Phalanx's own engine");
            return Ok(None);
        }
        let (device, back_end) = self.opened(rank, found)?;
        rank.note(&format!("device   {}", described(&device, back_end.name())));
        Ok(Some((device, back_end.name())))
    }

    fn opened(self, rank: &RankContext, found: Found) -> Result<(Device, BackEnd)> {
        if rank.is_newcomer() {
            let (back_end, kind) = self.find(rank.local_rank, found)?;
            return Ok((back_end.open(&kind)?, back_end));
        }
        let group = rank.group();
        let opened = self.opened_in(rank.local_rank, found, &group);
        if let Err(error) = &opened {
            group.abort(&error.to_string());
        }
        opened
    }

    fn opened_in(
        self,
        local_rank: usize,
        found: Found,
        group: &ProcessGroup,
    ) -> Result<(Device, BackEnd)> {
        let (back_end, kind) = self.find(local_rank, found)?;
        let device = back_end.open(&kind)?;
        // Empty if it may be shared.
        let card = match (back_end, self.which) {
            (BackEnd::Cpu, _) | (_, Which::Number(_) | Which::Software) => String::new(),
            _ => {
                let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
                let host = boot.unwrap_or_else(|_| host_name());
                let bus = bus_address(&device);
                host + &bus.unwrap_or_else(|| format!("{back_end:?} {kind:?}"))
            }
        };
        self.refuse_sharing(group, &card, || name(&device))?;
        Ok((device, back_end))
    }

    fn refuse_sharing(
        self,
        group: &ProcessGroup,
        card: &String,
        name: impl Fn() -> String,
    ) -> Result<()> {
        let cards = group.all_gather_object(card)?;
        let is_same = |rank: &usize| !card.is_empty() && cards[*rank] == *card;
        let sharing: Vec<usize> = (0..cards.len()).filter(is_same).collect();
        match sharing[..] {
            [first, second, ..] => Err(self.usage(format!(
                "ranks {first} and {second} have the same card, {}; start one rank for each card, or give the number of the card that they share, as in --device wgpu:0",
                name()
            ))),
            _ => Ok(()),
        }
    }

    /// The back end, and the cards from which it takes one.
    fn back_end_and_cards(self) -> Found {
        let discrete = |back_end: BackEnd| {
            let mut cards = back_end.cards();
            cards.retain(|kind| matches!(kind, DeviceKind::DiscreteGpu(_)));
            (!cards.is_empty()).then_some((back_end, cards))
        };
        match self.back_end {
            BackEnd::Auto => [BackEnd::Cuda, BackEnd::Wgpu]
                .into_iter()
                .find_map(discrete)
                .unwrap_or((BackEnd::Cpu, Vec::new())),
            back_end => (back_end, back_end.cards()),
        }
    }

    /// The back end and the device that it opens.
    fn find(self, local_rank: usize, (back_end, cards): Found) -> Result<(BackEnd, DeviceKind)> {
        let (_, feature, is_compiled) = back_end.facts();
        if !is_compiled {
            return Err(self.usage(format!(
                "the program was built without the back end {feature}; build it with the feature {feature} of phalanx-burn"
            )));
        }
        match back_end {
            BackEnd::Cpu => Ok((back_end, DeviceKind::Cpu)),
            _ => Ok((back_end, self.pick(back_end, &cards, local_rank)?)),
        }
    }

    fn pick(
        self,
        back_end: BackEnd,
        cards: &[DeviceKind],
        local_rank: usize,
    ) -> Result<DeviceKind> {
        let is_software = |kind: &&DeviceKind| **kind == DeviceKind::Cpu;
        let software = cards.iter().find(is_software);
        let gpus: Vec<_> = cards.iter().filter(|kind| !is_software(kind)).collect();
        let chosen = match self.which {
            Which::OfLocalRank => gpus.get(local_rank).copied(),
            Which::Number(number) => gpus.get(number).copied(),
            Which::Software => software,
        };
        if let Some(kind) = chosen {
            return Ok(kind.clone());
        }
        let name = back_end.name();
        Err(self.usage(match (self.which, software) {
            (Which::Software, _) => "no software device was found".to_owned(),
            (_, Some(kind)) if gpus.is_empty() => format!(
                "no GPU was found, only a software device, {}; --device {name}:cpu uses it",
                self::name(&back_end.open(kind)?)
            ),
            (_, None) if gpus.is_empty() => "no GPU with a driver was found".to_owned(),
            (Which::Number(_), _) => format!("there are {} cards: {gpus:?}", gpus.len()),
            (Which::OfLocalRank, _) => format!(
                "there is no card for local rank {local_rank}, only {gpus:?}; start one rank for each card, or give the number of the card that the ranks share, as in --device {name}:0"
            ),
        }))
    }

    fn usage(self, why: String) -> Error {
        Error::usage(format!("--device {self}: {why}"))
    }
}

impl BackEnd {
    /// Name, Cargo feature, and whether that is on.
    fn facts(self) -> (&'static str, &'static str, bool) {
        match self {
            BackEnd::Auto => ("auto", "flex", true),
            BackEnd::Cpu => ("cpu", "flex", cfg!(feature = "flex")),
            BackEnd::Cuda => ("cuda", "cuda", cfg!(feature = "cuda")),
            BackEnd::Vulkan => ("vulkan", "vulkan", cfg!(feature = "vulkan")),
            BackEnd::Wgpu => ("wgpu", "wgpu", cfg!(feature = "wgpu")),
        }
    }

    fn name(self) -> &'static str {
        self.facts().0
    }

    /// The cards of this host. Opens none.
    fn cards(self) -> Vec<DeviceKind> {
        #[cfg(any(feature = "cuda", feature = "wgpu"))]
        use burn::tensor::DeviceType;
        match self {
            // Burn looks for the driver's library first.
            #[cfg(feature = "cuda")]
            BackEnd::Cuda => {
                let number = Device::enumerate(DeviceType::Cuda).len();
                (0..number).map(DeviceKind::DiscreteGpu).collect()
            }
            #[cfg(feature = "vulkan")]
            BackEnd::Vulkan => listed(&Device::enumerate(DeviceType::Vulkan), Device::vulkan),
            #[cfg(feature = "wgpu")]
            BackEnd::Wgpu => listed(&Device::enumerate(DeviceType::Wgpu), Device::wgpu),
            #[allow(unreachable_patterns, reason = "with all features")]
            _ => Vec::new(),
        }
    }

    /// Opens one of [`cards`](Self::cards).
    fn open(self, kind: &DeviceKind) -> Result<Device> {
        let failed = |why: &dyn fmt::Display| {
            let text = format!("cannot open {kind:?} by {}: {why}", self.name());
            Error::new(ErrorKind::Failed, text)
        };
        match (self, kind) {
            #[cfg(feature = "flex")]
            (BackEnd::Cpu, _) => Ok(Device::flex()),
            #[cfg(feature = "cuda")]
            (BackEnd::Cuda, DeviceKind::DiscreteGpu(number)) => Ok(Device::cuda(*number)),
            #[cfg(feature = "wgpu")]
            (BackEnd::Vulkan | BackEnd::Wgpu, _) => {
                use burn::tensor::wgpu::WgpuInitError;
                let options = Device::wgpu_options().device_kind(kind.clone());
                let (options, again) = match self {
                    #[cfg(feature = "vulkan")]
                    BackEnd::Vulkan => (
                        options.graphics_api(burn::tensor::wgpu::WgpuBackend::Vulkan),
                        Device::vulkan(kind.clone()),
                    ),
                    _ => (options, Device::wgpu(kind.clone())),
                };
                match options.init() {
                    // This process has opened it before.
                    Err(WgpuInitError::Registration { .. }) => Ok(again),
                    opened => opened.map_err(|e| failed(&e)),
                }
            }
            _ => Err(failed(&"it is not one of the back end's devices")),
        }
    }
}

/// The kinds of the devices that were found. `make` makes the device of a kind without opening it.
#[cfg(feature = "wgpu")]
fn listed(found: &[Device], make: fn(DeviceKind) -> Device) -> Vec<DeviceKind> {
    let numbered = [
        DeviceKind::DiscreteGpu,
        DeviceKind::IntegratedGpu,
        DeviceKind::VirtualGpu,
    ];
    let kinds = numbered.iter().flat_map(|kind| (0..found.len()).map(*kind));
    let kinds = kinds.chain([DeviceKind::Cpu]);
    kinds
        .filter(|kind| found.contains(&make(kind.clone())))
        .collect()
}

/// A device, its back end and its type of floats, for people.
fn described(device: &Device, back_end: &str) -> String {
    let float = format!("{:?}", device.settings().float_dtype).to_lowercase();
    format!("{}, back end {back_end}, {float}", name(device))
}

/// What a device calls itself. Opens it.
fn name(device: &Device) -> String {
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    if let Some(identity) = device.identity() {
        return identity.name;
    }
    let _ = device;
    "CPU".to_owned()
}

/// Where a card is in its host. Opens the device.
fn bus_address(device: &Device) -> Option<String> {
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    if let Some(card) = device.identity()?.physical {
        return card.pci_address.map(|address| address.to_string());
    }
    let _ = device;
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str, cards: &[DeviceKind], local_rank: usize) -> String {
        let choice: DeviceChoice = text.parse().expect("a choice");
        let error = choice.pick(choice.back_end, cards, local_rank);
        let error = error.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Usage);
        error.to_string()
    }

    #[test]
    fn a_rank_gets_the_card_of_its_number_and_a_missing_one_is_named() {
        let cards = [
            DeviceKind::DiscreteGpu(0),
            DeviceKind::IntegratedGpu(0),
            DeviceKind::Cpu,
        ];
        for (text, rank, want) in [
            ("auto", 0, 0),
            ("wgpu", 1, 1),
            ("wgpu:0", 3, 0),
            ("wgpu:cpu", 1, 2),
        ] {
            let choice: DeviceChoice = text.parse().expect("a choice");
            let picked = choice.pick(BackEnd::Wgpu, &cards, rank);
            assert_eq!(picked.expect("a card"), cards[want]);
        }
        for (text, cards, rank, want) in [
            (
                "wgpu",
                &cards[..],
                2,
                "no card for local rank 2, only [DiscreteGpu(0), IntegratedGpu(0)]; start",
            ),
            ("wgpu", &cards[..], 2, "as in --device wgpu:0"),
            (
                "vulkan:7",
                &cards[..],
                0,
                "--device vulkan:7: there are 2 cards",
            ),
            (
                "cuda",
                &[],
                0,
                "--device cuda: no GPU with a driver was found",
            ),
            ("cuda:1", &[], 0, "no GPU with a driver"),
            ("wgpu:cpu", &cards[..2], 0, "no software device"),
        ] {
            let text = refused(text, cards, rank);
            assert!(text.contains(want), "{text}");
        }
    }

    #[test]
    fn ranks_on_one_card_are_refused_unless_it_was_named() {
        let sharing = |cards: [&'static str; 3]| {
            let groups = ProcessGroup::threads(3, Default::default());
            std::thread::scope(|scope| {
                let ranks: Vec<_> = groups
                    .into_iter()
                    .zip(cards)
                    .map(|(group, card)| {
                        scope.spawn(move || {
                            let name = || "a card".to_owned();
                            let choice = DeviceChoice::default();
                            choice.refuse_sharing(&group, &card.to_owned(), name)
                        })
                    })
                    .collect();
                let results = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
                results.collect::<Vec<_>>()
            })
        };
        assert!(sharing(["", "", ""]).iter().all(Result::is_ok));
        assert!(sharing(["a", "b", "c"]).iter().all(Result::is_ok));
        let results = sharing(["a", "b", "a"]);
        assert!(results[1].is_ok());
        let error = results[2].as_ref().expect_err("refused");
        let text = error.to_string();
        assert!(
            text.contains("ranks 0 and 2 have the same card, a card;"),
            "{text}"
        );
        assert_eq!(error.kind(), ErrorKind::Usage);
    }
}
