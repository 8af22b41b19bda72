//! Ranks that should be alike and are not: options at construction, weights later.

mod common;

use common::{Over, ranks};
use phalanx_ddp::{BucketCaps, DdpOptions, DistributedDataParallel, ErrorKind, verify_equal};
use phalanx_nn::{Init, Layout, Params, Scope, Seed};

fn model() -> Params {
    let mut scope = Scope::new(Seed(0));
    let mut layer = scope.enter("bn");
    layer.param("weight", &[3], Layout::Same, Init::Constant(1.0));
    layer.param("bias", &[2], Layout::Same, Init::Constant(0.0));
    layer.buffer("running_mean", &[2], 0.0);
    scope.build().expect("model builds")
}

#[test]
fn different_options_are_named_on_every_rank() {
    let given = DdpOptions {
        caps: Some(BucketCaps::PYTORCH),
        ..DdpOptions::default()
    };
    let kept = DdpOptions {
        keep_layout: true,
        ..DdpOptions::default()
    };
    let fact = DdpOptions {
        must_agree: vec!["lr 0.1".into()],
        ..DdpOptions::default()
    };
    for (options, part) in [
        (given, "BucketCaps"),
        (kept, "rebuilt: true"),
        (fact, "lr 0.1"),
    ] {
        let errors = ranks(3, Over::Thread, |group| {
            let mine = if group.rank() == 1 {
                options.clone()
            } else {
                DdpOptions::default()
            };
            DistributedDataParallel::new(group, &mut model(), mine)
                .err()
                .map(|e| (e.kind(), e.to_string()))
        });
        for error in errors {
            let (kind, text) = error.expect("options differ");
            assert_eq!(kind, ErrorKind::Mismatch);
            assert!(text.contains("rank 1") && text.contains(part), "{text}");
        }
    }
}

#[test]
fn unequal_weights_are_named_on_every_rank() {
    type Change = fn(&mut Params);
    let cases: [(Change, &str); 3] = [
        (
            |p| p.get_mut(p.find("bn.bias").expect("bias"))[1] = 1.0,
            "bn.bias",
        ),
        (
            |p| p.buffer_mut(p.find_buffer("bn.running_mean").expect("mean"))[0] = 1.0,
            "bn.running_mean",
        ),
        (|_| (), "neither parameter nor buffer"),
    ];
    for (change, name) in cases {
        let outcomes = ranks(4, Over::Thread, |group| {
            let mut params = model();
            verify_equal(&group, &params, [7; 32]).expect("equal digests");
            let differs = group.rank() >= 2;
            if differs {
                change(&mut params);
            }
            verify_equal(&group, &params, [u8::from(differs); 32])
                .map_err(|e| (e.kind(), e.to_string()))
        });
        for outcome in outcomes {
            let (kind, text) = outcome.expect_err("weights differ");
            assert_eq!(kind, ErrorKind::Mismatch);
            assert!(
                text.contains("ranks 2, 3 differ") && text.contains(name),
                "{text}"
            );
        }
    }
}
