//! Ranks that should be alike and are not: options at construction, weights later.

use crate::common::{Over, ranks};
use phalanx_ddp::{
    Average, BucketCaps, Buffers, DdpOptions, Deterministic, DistributedDataParallel, ErrorKind,
    Every, Exchange, ShardTree, Uneven, Unused, verify_equal,
};
use phalanx_nn::{Init, Layout, Params, Scope, Seed};

fn model() -> Params {
    let mut scope = Scope::new(Seed(0));
    let mut layer = scope.enter("bn");
    layer.param("weight", &[3], Layout::Same, Init::Constant(1.0));
    layer.param("bias", &[2], Layout::Same, Init::Constant(0.0));
    layer.buffer("running_mean", &[2], 0.0);
    scope.build().expect("model builds")
}

/// Each fact by itself, on the last rank of several.
#[test]
fn different_options_are_named_on_every_rank() {
    type Change = fn(&mut DdpOptions);
    let cases: [(Change, &str, &str); 13] = [
        (
            |o| o.caps = Some(BucketCaps::PYTORCH),
            "buckets sized by where the ranks are",
            "buckets of 1048576, then 26214400 bytes",
        ),
        (
            |o| o.keep_layout = true,
            "buckets rebuilt: true",
            "buckets rebuilt: false",
        ),
        (
            |o| o.average = Average::Ranks,
            "averaged over Samples",
            "averaged over Ranks",
        ),
        (
            |o| o.average = Average::ActiveRanks,
            "averaged over Samples",
            "averaged over ActiveRanks",
        ),
        (
            |o| o.deterministic = Deterministic::Off,
            "deterministic: Ranks",
            "deterministic: Off",
        ),
        (
            |o| o.deterministic = Deterministic::Shards(ShardTree::new(8).expect("fits")),
            "deterministic: Ranks",
            "deterministic: 8 shards",
        ),
        (
            |o| o.exchange = Exchange::ReduceScatter,
            "exchanged by AllReduce",
            "exchanged by ReduceScatter",
        ),
        (
            |o| o.exchange = Exchange::AtStep,
            "exchanged by AllReduce",
            "exchanged by AtStep",
        ),
        (
            |o| o.unchecked = true,
            "unchecked: false",
            "unchecked: true",
        ),
        (
            |o| o.uneven = Uneven::Refuse,
            "uneven data: Join",
            "uneven data: Refuse",
        ),
        (
            |o| o.unused = Unused::SameEveryStep,
            "unused parameters: Allow",
            "unused parameters: SameEveryStep",
        ),
        (
            |o| o.buffers = Buffers::Mean(Every::Epoch),
            "buffers made equal: those of rank 0, every step",
            "buffers made equal: means, every epoch",
        ),
        (
            |o| o.must_agree = vec!["lr 0.1".into()],
            "no further fact",
            "lr 0.1",
        ),
    ];
    for (change, first, other) in cases {
        check_named(change, first, other);
    }
    check_named(
        |o| o.ignored = vec!["bn.bias".into()],
        "ignored: []",
        r#"ignored: [\"bn.bias\"]"#,
    );
    check_named(
        |o| o.frozen = vec!["bn.bias".into()],
        "frozen: []",
        r#"frozen: [\"bn.bias\"]"#,
    );
}

/// The last rank's options are changed; every rank is told what rank 0 has and what the last one.
fn check_named(change: fn(&mut DdpOptions), first: &str, other: &str) {
    for world in [2, 3] {
        let errors = ranks(world, Over::Thread, |group| {
            let mut mine = DdpOptions::default();
            if group.rank() + 1 == world {
                change(&mut mine);
            }
            DistributedDataParallel::new(group, &mut model(), mine)
                .err()
                .map(|e| (e.kind(), e.to_string()))
        });
        for error in errors {
            let (kind, text) = error.expect("options differ");
            assert_eq!(kind, ErrorKind::Mismatch);
            let (left, right) = text.split_once(" where rank ").expect("both sides");
            assert!(
                left.contains("rank 0 has ") && left.contains(first),
                "{text}"
            );
            let last = format!("{} has ", world - 1);
            assert!(right.starts_with(&last) && right.contains(other), "{text}");
        }
    }
}

/// Names and shapes of parameters and buffers, and how many there are.
#[test]
fn different_models_are_named_on_every_rank() {
    type Build = fn(&mut Scope);
    let cases: [(Build, &str); 5] = [
        (
            |s| {
                s.param("weight", &[3], Layout::Same, Init::Constant(1.0));
                s.param("shift", &[2], Layout::Same, Init::Constant(0.0));
                s.buffer("running_mean", &[2], 0.0);
            },
            "parameter bn.shift f32 [2]",
        ),
        (
            |s| {
                s.param("weight", &[3, 1], Layout::Same, Init::Constant(1.0));
                s.param("bias", &[2], Layout::Same, Init::Constant(0.0));
                s.buffer("running_mean", &[2], 0.0);
            },
            "parameter bn.weight f32 [3, 1]",
        ),
        (
            |s| {
                s.param("weight", &[3], Layout::Same, Init::Constant(1.0));
                s.param("bias", &[2], Layout::Same, Init::Constant(0.0));
                s.buffer("running_mean", &[4], 0.0);
            },
            "buffer bn.running_mean f32 [4]",
        ),
        (
            |s| {
                s.param("weight", &[3], Layout::Same, Init::Constant(1.0));
                s.param("bias", &[2], Layout::Same, Init::Constant(0.0));
            },
            "has nothing",
        ),
        (
            |s| {
                s.param("weight", &[3], Layout::Same, Init::Constant(1.0));
                s.param("bias", &[2], Layout::Same, Init::Constant(0.0));
                s.param("more", &[2], Layout::Same, Init::Constant(0.0));
                s.buffer("running_mean", &[2], 0.0);
            },
            "parameter bn.more f32 [2]",
        ),
    ];
    for (build, words) in cases {
        let errors = ranks(3, Over::Thread, |group| {
            let mut params = if group.rank() == 1 {
                let mut scope = Scope::new(Seed(0));
                build(&mut scope.enter("bn"));
                scope.build().expect("model builds")
            } else {
                model()
            };
            let error =
                DistributedDataParallel::new(group, &mut params, DdpOptions::default()).err();
            let error = error.expect("models differ");
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            error.to_string()
        });
        for text in errors {
            assert!(
                text.contains("rank 1 does not train the same model as rank 0"),
                "{text}"
            );
            assert!(text.contains(words), "{text}");
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
