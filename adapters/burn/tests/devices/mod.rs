//! The flag `--device`, and gradients of each type on the way to the host and back.

use burn::module::Module as _;
use burn::tensor::{DType, Device, Tensor, TensorData};
use phalanx_burn::comm::ProcessGroup;
use phalanx_burn::{
    BucketCaps, DeviceChoice, DistributedDataParallel, Error, ErrorKind, RankContext,
    ReplicaOptions, Result,
};

use super::{As, Model, device, numbers, ranks};

fn open(text: &str, group: ProcessGroup) -> Result<(Device, ReplicaOptions)> {
    let choice: DeviceChoice = text.parse()?;
    let mut options = ReplicaOptions::default();
    let device = choice.open(&RankContext::new(group, 1), &mut options)?;
    Ok((device, options))
}

/// The error of one rank.
fn refused(text: &str) -> Error {
    let results = ranks(1, |group| open(text, group).err());
    let error = results.into_iter().next().flatten().expect("refused");
    assert_eq!(error.kind(), ErrorKind::Usage);
    error
}

#[test]
fn choices_are_read_and_shown() {
    for text in [
        "auto",
        "cpu",
        "wgpu",
        "vulkan",
        "cuda",
        "cuda:0",
        "wgpu:12",
        "wgpu:cpu",
        "vulkan:cpu",
    ] {
        let choice: DeviceChoice = text.parse().expect(text);
        assert_eq!(choice.to_string(), text);
    }
    assert_eq!(DeviceChoice::default().to_string(), "auto");
    for text in [
        "", "gpu", "auto:0", "cpu:1", "cuda:cpu", "cuda:", "wgpu:-1", "cuda:0:1",
    ] {
        let error = text.parse::<phalanx_burn::DeviceChoice>().expect_err(text);
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains("use auto, cpu"), "{error}");
    }
}

#[test]
fn back_ends_that_are_not_compiled_in_are_named() {
    let all = [
        ("cuda", cfg!(feature = "cuda")),
        ("vulkan", cfg!(feature = "vulkan")),
        ("wgpu", cfg!(feature = "wgpu")),
        ("cpu", cfg!(feature = "flex")),
    ];
    for (name, _) in all.iter().filter(|(_, is_compiled)| !is_compiled) {
        let feature = name.replace("cpu", "flex");
        let want = format!(
            "--device {name}: the program was built without the back end {feature}; build it with the feature {feature} of phalanx-burn"
        );
        assert_eq!(refused(name).to_string(), want);
    }
}

#[test]
#[cfg(feature = "flex")]
fn the_back_end_must_agree() {
    ranks(2, |group| {
        let (found, mut options) = open("cpu", group.clone()).expect("the CPU");
        assert_eq!(found, Device::flex());
        if group.rank() == 1 {
            options.must_agree = vec!["the device's back end is wgpu".to_owned()];
        }
        let error = DistributedDataParallel::new(&group, Model::new(0), options).err();
        let text = error.expect("refused").to_string();
        assert!(text.contains("back end is"), "{text}");
    });
}

#[test]
fn half_gradients_are_added_in_f32_and_rounded_once() {
    for dtype in [DType::F16, DType::BF16] {
        let inputs = |rank: usize| {
            let data = TensorData::new(numbers(6, 7 + rank), [2, 3]).convert_dtype(dtype);
            Tensor::<2>::from_data(data, (&device(), dtype))
        };
        // The gradients are sums of two inputs, in the type of the parameter.
        let gradient = |model: &burn::nn::Linear, rank: usize| {
            let loss = model.forward(inputs(rank)).sum();
            burn::optim::GradientsParams::from_grads(loss.backward(), model)
        };
        let flat = |model: &burn::nn::Linear, from: &burn::optim::GradientsParams| {
            let mut read = super::Read {
                gradients: Some(from),
                all: Vec::new(),
            };
            model.visit(&mut read);
            read.all
        };
        ranks(3, |group| {
            let model = burn::nn::LinearConfig::new(3, 2).init(&device());
            let model = model.map(&mut As(dtype));
            let made = DistributedDataParallel::new(&group, model, Default::default());
            let (mut ddp, model) = made.expect("a wrapper");
            let all: Vec<_> = (0..3)
                .map(|rank| flat(&model, &gradient(&model, rank)))
                .collect();
            let round = |values: Vec<f32>| {
                let count = values.len();
                let data = TensorData::new(values, [count]).convert_dtype(dtype);
                data.iter::<f32>().collect::<Vec<_>>()
            };
            let want: Vec<_> = super::mean(&all).into_iter().map(round).collect();
            let got = ddp.average(&model, gradient(&model, group.rank()));
            let got = got.expect("gradients");
            assert_eq!(flat(&model, &got), want, "{dtype:?}");
            let one = got.get::<2>(model.weight.id).expect("a gradient");
            assert_eq!(one.dtype(), dtype);
        });
    }
}

#[test]
fn several_buckets_have_the_bits_of_one() {
    let averaged = |caps: Option<BucketCaps>| {
        ranks(2, |group| {
            let options = ReplicaOptions {
                caps,
                ..Default::default()
            };
            let made = DistributedDataParallel::new(&group, Model::new(0), options);
            let (mut ddp, model) = made.expect("a wrapper");
            let own = model.gradients(group.rank(), 5, 1.0);
            model.flat(&ddp.average(&model, own).expect("gradients"))
        })
    };
    let want = averaged(None);
    for bytes in [1, 30, 1000] {
        assert_eq!(averaged(Some(BucketCaps::uniform(bytes))), want);
    }
}

#[cfg(feature = "wgpu")]
#[allow(dead_code, reason = "only the model of the example")]
#[path = "../../examples/mnist_burn.rs"]
mod mnist_burn;

#[cfg(feature = "wgpu")]
mod wgpu {
    use std::process::Command;

    use burn::module::Module as _;
    use burn::nn::loss::CrossEntropyLossConfig;
    use burn::optim::{AdamWConfig, GradientsParams};
    use burn::tensor::{Device, DeviceKind, DeviceType, Int, Tensor, TensorData};
    use phalanx_burn::DistributedDataParallel;

    use super::mnist_burn::Cnn;
    use super::{open, refused};
    use crate::{Fill, numbers, ranks};

    /// Whether there is Mesa's llvmpipe or another software device.
    fn has_software() -> bool {
        let software = Device::wgpu(DeviceKind::Cpu);
        let has = Device::enumerate(DeviceType::Wgpu).contains(&software);
        if !has {
            println!("skipped: no software device for Vulkan (mesa-vulkan-drivers)");
        }
        has
    }

    fn has_gpu() -> bool {
        let found = Device::enumerate(DeviceType::Wgpu);
        found
            .iter()
            .any(|device| *device != Device::wgpu(DeviceKind::Cpu))
    }

    #[test]
    fn a_missing_gpu_is_an_error() {
        const CHILD: &str = "PHALANX_TEST_WITHOUT_DRIVERS";
        if std::env::var_os(CHILD).is_some() {
            for text in ["wgpu", "wgpu:0"] {
                let error = refused(text).to_string();
                assert!(error.contains("no GPU with a driver was found"), "{error}");
            }
            let error = refused("wgpu:cpu").to_string();
            assert!(error.contains("no software device was found"), "{error}");
            return;
        }
        let program = std::env::current_exe().expect("this program");
        let test = "devices::wgpu::a_missing_gpu_is_an_error";
        let status = Command::new(program)
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, "1")
            .env("VK_DRIVER_FILES", "/nonexistent")
            .env("VK_ICD_FILENAMES", "/nonexistent")
            .env("__EGL_VENDOR_LIBRARY_FILENAMES", "/nonexistent")
            .status();
        assert!(status.expect("a child").success());
    }

    #[test]
    fn a_software_device_is_taken_only_by_its_name() {
        if !has_software() || has_gpu() {
            return;
        }
        for text in ["wgpu", "wgpu:0"] {
            let error = refused(text).to_string();
            let want = [
                &format!("--device {text}: no GPU was found, only a software device, "),
                "; --device wgpu:cpu uses it",
            ];
            assert!(want.iter().all(|part| error.contains(*part)), "{error}");
        }
        #[cfg(feature = "flex")]
        ranks(2, |group| {
            let (device, _) = open("auto", group).expect("the CPU");
            assert_eq!(device, Device::flex());
        });
        #[cfg(feature = "nn")]
        ranks(2, |group| {
            let rank = phalanx_burn::RankContext::new(group, 1);
            let gpu = |text: &str| {
                text.parse::<phalanx_burn::DeviceChoice>()
                    .and_then(|c| c.open_gpu(&rank))
            };
            assert!(gpu("auto").expect("the CPU").is_none());
            let (_, back_end) = gpu("wgpu:cpu").expect("opened").expect("a device");
            assert_eq!(back_end, "wgpu");
        });
    }

    #[test]
    fn ranks_on_a_software_device_have_the_bits_of_one_rank_with_accumulation() {
        if !has_software() {
            return;
        }
        let trained = |world: usize, each: usize| {
            let digests = ranks(world, |group| {
                let (device, options) = open("wgpu:cpu", group.clone()).expect("a device");
                assert!(options.must_agree[0].contains("wgpu"));
                let device = device.autodiff();
                let model = Cnn::new(&device, 0.0).map(&mut Fill(group.rank()));
                let made = DistributedDataParallel::new(&group, model, options);
                let (mut ddp, mut model) = made.expect("a wrapper");
                let mut optimizer = AdamWConfig::new().init();
                let cross_entropy = CrossEntropyLossConfig::new().init(&device);
                for step in 0..2 {
                    let mut running = ddp.begin(&vec![2; each]).expect("a step");
                    for micro in 0..each {
                        let batch = step * world * each + group.rank() * each + micro;
                        let images = TensorData::new(numbers(2 * 784, batch), [2, 1, 28, 28]);
                        let images = Tensor::<4>::from_data(images, &device);
                        let labels = TensorData::new(vec![batch as i64, 1], [2]);
                        let labels = Tensor::<1, Int>::from_data(labels, &device);
                        let loss = cross_entropy.forward(model.forward(images), labels);
                        let gradients = GradientsParams::from_grads(loss.backward(), &model);
                        running.add(&model, gradients).expect("gradients");
                    }
                    let gradients = running.finish(&model).expect("gradients");
                    model = optimizer.step(1e-3, model, gradients);
                }
                ddp.digest(&model).expect("a digest")
            });
            assert!(digests.iter().all(|digest| *digest == digests[0]));
            digests[0].clone()
        };
        assert_eq!(trained(2, 1), trained(1, 2));
    }
}
