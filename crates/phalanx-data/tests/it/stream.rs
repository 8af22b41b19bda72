//! Streams: each sample once an epoch over uneven shards, equal steps on all ranks, resumption anywhere, damaged shards.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use phalanx_base::process::proc_bytes;
use phalanx_base::{Error, ErrorKind, Result};
use phalanx_data::loader::{Loader, LoaderOptions};
use phalanx_data::sampler::{Cursor, EpochPlan, Sampler, SamplerConfig};
use phalanx_data::stream::{Concat, Stream, StreamDataset};
use phalanx_data::{Dataset, ShardOrder};
use phalanx_nn::rng::torch::Generator;
use sha2::{Digest, Sha256};

const SEED: u64 = 11;
/// Samples of each shard: fewer than ranks, uneven, one without any.
const SHARDS: [usize; 6] = [5, 1, 9, 0, 3, 2];

/// A tar archive of these members.
fn tar_of(members: &[(String, String)]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, content) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        let written = archive.append_data(&mut header, name, content.as_bytes());
        written.expect("a member");
    }
    archive.into_inner().expect("an archive")
}

fn members(range: std::ops::Range<usize>) -> Vec<(String, String)> {
    let members = range.flat_map(|i| {
        let member = |ending: &str, text: String| (format!("dir/{i:04}.{ending}"), text);
        [
            member("txt", format!("text {i}")),
            member("meta.JSON", format!("{{\"number\": {i}}}")),
        ]
    });
    members.collect()
}

/// A folder of shards whose samples are numbered.
struct Shards(tempfile::TempDir);

impl Shards {
    fn new(shards: &[usize], format: &str) -> Shards {
        let all = Shards(tempfile::tempdir().expect("a folder"));
        fs::create_dir(all.path()).expect("a folder");
        let mut first = 0;
        for (i, samples) in shards.iter().enumerate() {
            let range = first..first + samples;
            first = range.end;
            let lines = range.clone().map(|i| {
                format!("{{\"txt\": \"text {i}\", \"meta.json\": {{\"number\": {i}}}}}\n")
            });
            let content = match format {
                "tar" => tar_of(&members(range)),
                _ => lines.collect::<String>().into_bytes(),
            };
            fs::write(all.path().join(format!("s-{i:02}.{format}")), content).expect("a shard");
        }
        all
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("shards")
    }

    fn stream(&self) -> Stream {
        Stream::new(&self.path().display().to_string())
    }

    fn open(&self, buffer: usize) -> Result<StreamDataset<u64>> {
        self.stream().shuffle_buffer(buffer).map(|sample| {
            let meta: serde_json::Value = sample.json("meta.json")?;
            let number = meta["number"].as_u64().expect("a number");
            assert_eq!(sample.text("txt")?, format!("text {number}"));
            assert_eq!(sample.index(), number);
            Ok(number)
        })
    }
}

fn samplers(order: &ShardOrder, world: usize, batch: usize, drop_last: bool) -> Vec<Sampler> {
    let sampler = |rank| {
        let config = SamplerConfig {
            samples: order.samples() as usize,
            world,
            rank,
            shuffle: true,
            seed: SEED,
        };
        let sampler = Sampler::exact(config, batch).expect("a sampler");
        let sampler = sampler.drop_last(drop_last);
        sampler
            .shards(Some(order.clone()))
            .expect("as many samples")
    };
    (0..world).map(sampler).collect()
}

/// The global batches of the plans of all ranks, which all have as many steps.
fn global_batches(plans: &[EpochPlan]) -> Vec<Vec<u64>> {
    let steps = plans[0].len();
    assert!(plans.iter().all(|plan| plan.len() == steps));
    let batch = |step| {
        let parts: Vec<_> = plans.iter().map(|plan| plan.step(step).unwrap()).collect();
        let woven =
            (0..parts[0].global_len).map(|i| parts[i % plans.len()].indices[i / plans.len()]);
        woven.collect()
    };
    (0..steps).map(batch).collect()
}

#[test]
fn each_sample_once_an_epoch_and_equal_steps_on_all_ranks() {
    for (format, buffer) in [("tar", 1), ("jsonl", 4), ("tar", 100)] {
        let shards = Shards::new(&SHARDS, format);
        let data = Arc::new(shards.open(buffer).expect("a stream"));
        assert_eq!(data.len(), 20);
        let order = data.order().expect("an order");
        let mut first_epochs = Vec::new();
        for world in 1..=4 {
            for drop_last in [false, true] {
                let samplers = samplers(&order, world, 6, drop_last);
                let mut orders = Vec::new();
                for epoch in 0..2 {
                    let plans: Vec<_> = samplers.iter().map(|s| s.epoch(epoch)).collect();
                    assert!(
                        plans
                            .iter()
                            .all(|plan| plan.len() == if drop_last { 3 } else { 4 })
                    );
                    orders.push(global_batches(&plans));
                    // What the loaders of all ranks read.
                    let mut read = Vec::new();
                    for plan in plans {
                        let mut loader =
                            Loader::new(Arc::clone(&data), LoaderOptions::default()).unwrap();
                        loader.start(plan);
                        while let Some(batch) = loader.next_batch().expect("a batch") {
                            assert_eq!(*batch, batch.indices());
                            read.extend_from_slice(&batch);
                        }
                    }
                    let once: BTreeSet<u64> = read.iter().copied().collect();
                    assert_eq!(once.len(), read.len());
                    assert_eq!(read.len(), if drop_last { 18 } else { 20 });
                }
                assert_ne!(orders[0], orders[1]);
                if !drop_last {
                    first_epochs.push(orders.swap_remove(0));
                }
            }
        }
        first_epochs.dedup();
        assert_eq!(first_epochs.len(), 1, "the order depends on the ranks");
    }
}

/// The rule of the order, written again as a loop.
#[test]
fn samples_are_drawn_from_groups_of_whole_shards() {
    let sizes = SHARDS.map(|n| n as u64);
    for buffer in [1, 4, 100] {
        let order = ShardOrder::new(sizes, buffer);
        let mut draws = Generator::new(SEED + 3);
        let shards = draws.randperm(sizes.len());
        let (mut expected, mut group) = (Vec::new(), Vec::new());
        for (i, shard) in shards.iter().enumerate() {
            let first: u64 = sizes[..*shard as usize].iter().sum();
            group.extend(first..first + sizes[*shard as usize]);
            if group.len() >= buffer || i + 1 == shards.len() && !group.is_empty() {
                let drawn = draws.randperm(group.len());
                expected.extend(drawn.iter().map(|i| group[*i as usize]));
                group.clear();
            }
        }
        let all = global_batches(&[samplers(&order, 1, 1, false)[0].epoch(3)]).concat();
        assert_eq!(all, expected);
    }
}

#[test]
fn an_epoch_continues_at_each_step_with_any_number_of_ranks() {
    let order = ShardOrder::new(SHARDS.map(|n| n as u64), 4);
    let whole = global_batches(&[samplers(&order, 1, 3, false)[0].epoch(1)]);
    // 4 ranks, then 3, then 4 again, changed after each pair of steps: 0, an epoch's last step, and its end included.
    for first in 0..=whole.len() {
        for second in first..=whole.len() {
            let mut cursor = Cursor {
                epoch: 1,
                samples: 0,
            };
            let mut seen: Vec<Vec<u64>> = Vec::new();
            for (world, until) in [(4, first), (3, second), (4, whole.len())] {
                if cursor.epoch > 1 {
                    break;
                }
                let samplers = samplers(&order, world, 3, false);
                let plans: Vec<_> = samplers.iter().map(|s| s.resume(cursor).unwrap()).collect();
                let steps = until - seen.len();
                seen.extend(global_batches(&plans).into_iter().take(steps));
                cursor = plans[0].cursor_after(steps);
            }
            assert_eq!(seen, whole, "after {first} and {second} steps");
            assert_eq!(
                cursor,
                Cursor {
                    epoch: 2,
                    samples: 0
                }
            );
        }
    }
}

#[test]
fn fewer_samples_than_ranks_are_evaluated_and_some_left_out() {
    let shards = Shards::new(&[1, 1], "tar");
    let data = shards.open(10).expect("a stream");
    let config = |rank| SamplerConfig {
        samples: data.len(),
        world: 4,
        rank,
        shuffle: false,
        seed: 0,
    };
    let plans = (0..4).map(|rank| Sampler::exact(config(rank), 8).unwrap().epoch(0));
    assert_eq!(global_batches(&plans.collect::<Vec<_>>()), [[0, 1]]);
    // `--limit-train`: the first samples only.
    let order = ShardOrder::new([3, 4], 1);
    let few = SamplerConfig {
        samples: 5,
        world: 1,
        rank: 0,
        shuffle: true,
        seed: 1,
    };
    let plan = Sampler::exact(few, 5)
        .unwrap()
        .shards(Some(order.clone()))
        .unwrap()
        .epoch(0);
    let seen: BTreeSet<u64> = global_batches(&[plan]).concat().into_iter().collect();
    assert_eq!(seen, (0..5).collect::<BTreeSet<u64>>());
    let many = SamplerConfig { samples: 8, ..few };
    let error = Sampler::exact(many, 5)
        .unwrap()
        .shards(Some(order))
        .unwrap_err();
    assert!(error.to_string().contains("7 samples"), "{error}");
}

#[test]
fn sets_are_combined() {
    let shards = Shards::new(&SHARDS, "jsonl");
    let stream: Arc<dyn Dataset<Batch = Vec<u64>>> = Arc::new(shards.open(4).expect("a stream"));
    let more: Arc<dyn Dataset<Batch = Vec<u64>>> = Arc::new((100..111).collect::<Vec<u64>>());
    let all = Concat::new(vec![Arc::clone(&more), stream, more]);
    assert_eq!(all.len(), 11 + 20 + 11);
    let order = all.order().expect("an order");
    assert_eq!(order.samples(), 42);
    let mut seen = Vec::new();
    for batch in global_batches(&[samplers(&order, 1, 4, false)[0].epoch(0)]) {
        let mut values = Vec::new();
        all.read_batch(0, &batch, &mut values).expect("a batch");
        let expected = batch.iter().map(|i| match i {
            0..11 => 100 + i,
            11..31 => i - 11,
            _ => 100 + i - 31,
        });
        assert_eq!(values, expected.collect::<Vec<_>>());
        seen.extend(batch);
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..42).collect::<Vec<_>>());
    assert!(all.read_batch(0, &[42], &mut Vec::new()).is_err());
}

fn refused(shards: &Shards) -> Error {
    let error = shards.open(4).expect_err("an error");
    assert!(!shards.path().join("phalanx.index").exists());
    error
}

#[test]
fn a_cut_off_tar_is_named_and_counted_when_it_is_skipped() {
    let shards = Shards::new(&SHARDS, "tar");
    let path = shards.path().join("s-02.tar");
    let whole = fs::read(&path).expect("a shard");
    // A sample has 2 headers and 2 blocks. Within a header, a member, and where the mark at the end is missing.
    for (bytes, at, left) in [
        (4 * 2048 + 100, 8192, 3),
        (3 * 2048 + 700, 6144, 2),
        (9 * 2048, 18432, 8),
        (2048, 2048, 0),
    ] {
        fs::write(&path, &whole[..bytes]).expect("a shard");
        let error = refused(&shards);
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Data);
        assert!(
            text.contains(&format!("s-02.tar: broken at byte {at} of {bytes}")),
            "{text}"
        );
        let found = shards.stream().make_index(None, true).expect("an index");
        assert!(found.contains("1 damaged and left out"), "{found}");
        // The last sample may have had further members, so it is left out too.
        let data = shards.open(4).expect("a stream");
        assert_eq!(data.len(), 11 + left, "{bytes} bytes");
        let mut batch = Vec::new();
        let numbers: Vec<u64> = (0..6 + left as u64).collect();
        data.read_batch(0, &numbers, &mut batch)
            .expect("the samples before");
        fs::remove_file(shards.path().join("phalanx.index")).expect("an index");
    }
    // Two archives in one file.
    fs::write(&path, [&whole[..], &whole[..]].concat()).expect("a shard");
    assert!(
        refused(&shards)
            .to_string()
            .contains("two archives in one file")
    );
}

#[test]
fn names_that_are_there_twice_are_refused() {
    let of = |names: &[&str]| {
        let members: Vec<_> = names
            .iter()
            .map(|name| (name.to_string(), "{}".to_owned()))
            .collect();
        let shards = Shards::new(&[2], "tar");
        fs::write(shards.path().join("s-00.tar"), tar_of(&members)).expect("a shard");
        shards
    };
    for (names, culprit) in [
        (
            &["a.txt", "b.txt", "a.json"][..],
            "at byte 2048: the sample a was there before",
        ),
        (&["a.txt", "a.txt"], "at byte 1024: a.txt was there before"),
        (
            &["d/a.txt", "d/a.TXT"],
            "at byte 1024: d/a.TXT was there before",
        ),
    ] {
        let text = refused(&of(names)).to_string();
        assert!(
            text.contains("s-00.tar") && text.contains(culprit),
            "{text}"
        );
    }
    // The same name in another folder, and members that WebDataset skips.
    let shards = of(&[
        "d/a.txt",
        "e/a.txt",
        "e/README",
        "__meta__/x.json",
        "e/.hidden.txt",
    ]);
    let names = shards.stream().map(|sample| {
        let missing = sample.bytes("jpg").unwrap_err().to_string();
        assert!(
            missing.contains("s-00.tar, at byte") && missing.contains("jpg: there is only txt"),
            "{missing}"
        );
        Ok(sample.key().to_owned())
    });
    let mut batch = Vec::new();
    names
        .expect("a stream")
        .read_batch(0, &[1, 0], &mut batch)
        .expect("a batch");
    assert_eq!(batch, ["e/a", "d/a"]);
}

#[test]
fn a_line_that_is_no_object_is_named_and_left_out() {
    let shards = Shards::new(&[2, 3], "jsonl");
    let path = shards.path().join("s-01.jsonl");
    let text = fs::read_to_string(&path).expect("a shard");
    let mut lines: Vec<&str> = text.lines().collect();
    lines.splice(1..2, ["", "[1, 2]", "{\"txt\": ", lines[1]]);
    fs::write(&path, lines.join("\n")).expect("a shard");
    let text = refused(&shards).to_string();
    assert!(text.contains("s-01.jsonl: line 3, at byte "), "{text}");
    let found = shards.stream().make_index(None, true).expect("an index");
    assert!(
        found.contains("5 samples") && found.contains("2 damaged and left out"),
        "{found}"
    );
    let mut batch = Vec::new();
    let data = shards.open(1).expect("a stream");
    data.read_batch(0, &[4, 2, 3], &mut batch).expect("a batch");
    assert_eq!(batch, [4, 2, 3]);
}

#[test]
fn an_index_is_made_again_when_the_files_change() {
    let shards = Shards::new(&SHARDS, "jsonl");
    let content = shards.open(4).expect("a stream").content();
    let index = shards.path().join("phalanx.index");
    let about = || fs::metadata(&index).expect("an index").modified().unwrap();
    let made = about();
    let again = shards.open(4).expect("a stream");
    assert_eq!((again.content(), about()), (content.clone(), made));
    // Another text of the same length. Times of files have the clock's ticks.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let path = shards.path().join("s-04.jsonl");
    let text = fs::read_to_string(&path)
        .expect("a shard")
        .replace("text", "TEXT");
    fs::write(&path, text).expect("a shard");
    let changed = shards.open(4).expect("a stream");
    assert_ne!(changed.content(), content);
    assert_ne!(about(), made);
    assert_ne!(
        shards.open(5).expect("a stream").content(),
        changed.content()
    );
    // One that was taken elsewhere, and does not fit any more.
    let kept = shards.0.path().join("kept");
    shards
        .stream()
        .make_index(Some(&kept), false)
        .expect("an index");
    let given = |shards: &Shards| shards.stream().index(&kept).map(|_| Ok(()));
    assert_eq!(given(&shards).expect("a stream").len(), 20);
    fs::write(&path, "{}\n").expect("a shard");
    assert!(
        given(&shards)
            .unwrap_err()
            .to_string()
            .contains("is not the index of")
    );
    let mut batch = Vec::new();
    let text = changed
        .read_batch(0, &[15], &mut batch)
        .unwrap_err()
        .to_string();
    assert!(text.contains("s-04.jsonl has 3 bytes; it had "), "{text}");
    // Where it cannot be written, the way out is named.
    fs::remove_file(&index).expect("an index");
    fs::create_dir(&index).expect("a folder in its place");
    let error = shards.open(4).map(|_| ()).expect_err("no index");
    assert!(error.render().contains("phalanx.index"), "{error:?}");
}

#[test]
fn places_without_shards_are_refused_by_name() {
    let shards = Shards::new(&[1], "tar");
    let open = |place: &str| {
        let stream = Stream::new(place);
        let error = stream.map(|_| Ok(())).expect_err("an error");
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        error.to_string()
    };
    let place = shards.path().display().to_string();
    assert!(open(&format!("{place}/none")).contains("no folder"));
    assert!(open(&shards.0.path().display().to_string()).contains("has no files .tar"));
    assert!(open("ftp://host/x").contains("shards are read from a folder"));
    if !cfg!(feature = "object-store") {
        let error = Stream::new("s3://bucket/x")
            .map(|_| Ok(()))
            .expect_err("a folder");
        assert!(error.to_string().contains("shards are read from a folder"));
        assert!(
            error.render().contains("feature `object-store`"),
            "{error:?}"
        );
    }
    fs::write(shards.path().join("t.tar.gz"), "").expect("a file");
    assert!(open(&place).contains("t.tar.gz is compressed; unpack it"));
    fs::remove_file(shards.path().join("t.tar.gz")).expect("a file");
    fs::write(shards.path().join("t.jsonl"), "{}").expect("a shard");
    assert!(open(&place).contains("two formats: s-00.tar and t.jsonl"));
    fs::remove_file(shards.path().join("t.jsonl")).expect("a shard");
    let there = Stream::new(&format!("file://{place}/"));
    assert_eq!(there.map(|_| Ok(())).expect("a stream").len(), 1);
}

/// An index that several processes want is made by one of them, and none is left behind.
#[test]
fn several_processes_open_a_folder_at_once() {
    const FOLDER: &str = "PHALANX_TEST_STREAM";
    let test = "stream::several_processes_open_a_folder_at_once";
    if let Some(root) = std::env::var_os(FOLDER) {
        let stream = Stream::new(&Path::new(&root).join("shards").display().to_string());
        assert_eq!(stream.map(|_| Ok(())).expect("a stream").len(), 2000);
        return;
    }
    let shards = Shards::new(&[500; 4], "tar");
    let start = || {
        let mut command = Command::new(std::env::current_exe().expect("a program"));
        command
            .args(["--exact", test, "--nocapture"])
            .env(FOLDER, shards.0.path());
        command
            .stderr(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null());
        command.spawn().expect("a process")
    };
    let processes: Vec<_> = (0..4).map(|_| start()).collect();
    let mut made = 0;
    for process in processes {
        let output = process.wait_with_output().expect("its end");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}");
        made += text.matches("indexing 4 files").count();
    }
    assert_eq!(made, 1);
    assert_eq!(fs::read_dir(shards.path()).expect("shards").count(), 5);
}

/// Ten million samples, of which a rank of four reads its part: memory does not grow with the data, but for 8 bytes a sample of
/// this rank.
#[test]
fn ten_million_samples_need_little_memory() {
    const FOLDER: &str = "PHALANX_TEST_STREAM";
    let test = "stream::ten_million_samples_need_little_memory";
    if let Some(root) = std::env::var_os(FOLDER) {
        let stream = Stream::new(&Path::new(&root).join("shards").display().to_string());
        let data = stream.map(|sample| Ok(sample.index())).expect("a stream");
        assert_eq!(data.len(), 10_000_000);
        assert!(
            data.describe()
                .contains("76.3 MiB of memory for the shuffled order"),
            "{data:?}"
        );
        let order = data.order().expect("an order");
        let plan = samplers(&order, 4, 256, false)[1].epoch(0);
        let mut batch = Vec::new();
        for step in (0..plan.len()).step_by(5000) {
            let (indices, _) = plan.slice(step).expect("a step");
            data.read_batch(0, indices, &mut batch).expect("a batch");
            assert_eq!(batch, indices);
        }
        let status = fs::read_to_string("/proc/self/status").expect("status");
        let peak = proc_bytes(&status, "VmHWM:").expect("a peak");
        println!("peak {peak}");
        assert!(peak < 90 << 20, "{peak} bytes");
        return;
    }
    let shards = Shards::new(&[], "jsonl");
    for i in 0..100 {
        fs::write(
            shards.path().join(format!("s-{i:02}.jsonl")),
            "{}\n".repeat(100_000),
        )
        .expect("a shard");
    }
    let mut command = Command::new(std::env::current_exe().expect("a program"));
    command
        .args(["--exact", test, "--nocapture"])
        .env(FOLDER, shards.0.path());
    let output = command.output().expect("its end");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
}

/// `fixtures/webdataset.tar` and what WebDataset finds in it were written by `fixtures/make_webdataset.py`.
#[test]
fn samples_are_those_of_webdataset() {
    let root = tempfile::tempdir().expect("a folder");
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    fs::copy(fixtures.join("webdataset.tar"), root.path().join("w.tar")).expect("a copy");
    let expected = fs::read(fixtures.join("webdataset.json")).expect("a fixture");
    type Found = (String, std::collections::BTreeMap<String, String>);
    let expected: Vec<Found> = serde_json::from_slice(&expected).expect("a fixture");
    let stream = Stream::new(&root.path().display().to_string());
    let data = stream.map(|sample| -> Result<Found> {
        let members = sample.names().into_iter().map(|name| {
            let hash = Sha256::digest(sample.bytes(name)?);
            Ok((name.to_owned(), hex::encode(hash)))
        });
        Ok((sample.key().to_owned(), members.collect::<Result<_>>()?))
    });
    let data = data.expect("a stream");
    let mut found = Vec::new();
    let all: Vec<u64> = (0..data.len() as u64).collect();
    data.read_batch(0, &all, &mut found).expect("samples");
    assert_eq!(found, expected);
}

/// The images of shards are those of a folder.
#[cfg(feature = "images")]
#[test]
fn images_are_decoded_and_transformed() {
    use phalanx_data::ImageDataset;
    use phalanx_data::folder::{ImageFolder, Transforms};
    let root = tempfile::tempdir().expect("a folder");
    let mut archive = tar::Builder::new(Vec::new());
    fs::create_dir_all(root.path().join("photos/cat")).expect("a folder");
    for i in 0..3_u8 {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, 12, 10);
        encoder.set_color(png::ColorType::Rgb);
        let pixels: Vec<u8> = (0..360_u32).map(|n| (n * 7) as u8 ^ (i * 50)).collect();
        let mut writer = encoder.write_header().expect("a header");
        writer.write_image_data(&pixels).expect("an image");
        writer.finish().expect("an image");
        fs::write(root.path().join(format!("photos/cat/{i}.png")), &file).expect("a file");
        for (ending, content) in [("png", &file[..]), ("bad", &b"GIF89a"[..])] {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            archive
                .append_data(&mut header, format!("{i}.{ending}"), content)
                .expect("a member");
        }
    }
    fs::write(
        root.path().join("s.tar"),
        archive.into_inner().expect("an archive"),
    )
    .expect("a shard");
    let drawn = Transforms::new()
        .random_resized_crop(8)
        .random_horizontal_flip(0.5);
    let photos = ImageFolder::open(&root.path().join("photos")).expect("photos");
    let photos = photos.transform(drawn.clone(), 7).expect("transforms");
    let stream = Stream::new(&root.path().display().to_string()).map(move |sample| {
        let wrong = sample
            .image("bad", &drawn, 7)
            .expect_err("no image")
            .to_string();
        assert!(
            wrong.contains("s.tar, at byte") && wrong.contains("bad: "),
            "{wrong}"
        );
        sample.image("png", &drawn, 7)
    });
    let (stream, mut batch) = (stream.expect("a stream"), Vec::new());
    for epoch in 0..2 {
        stream
            .read_batch(epoch, &[0, 1, 2], &mut batch)
            .expect("a batch");
        for (i, image) in batch.iter().enumerate() {
            let mut expected = vec![0.0; 8 * 8 * 3];
            photos
                .read_in_epoch(i, epoch, &mut expected)
                .expect("an image");
            assert_eq!(image, &expected);
        }
    }
}

/// `fixtures/rows-*.parquet` and `rows.json` were written by pyarrow, in `fixtures/make_rows.py`.
#[cfg(feature = "parquet")]
#[test]
fn rows_of_parquet_are_those_of_pyarrow() {
    use serde_json::{Value, json};
    let root = tempfile::tempdir().expect("a folder");
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for name in ["rows-0.parquet", "rows-1.parquet"] {
        fs::copy(fixtures.join(name), root.path().join(name)).expect("a copy");
    }
    let expected = fs::read(fixtures.join("rows.json")).expect("a fixture");
    let expected: Vec<Value> = serde_json::from_slice(&expected).expect("a fixture");
    let place = root.path().display().to_string();
    let open = || {
        Stream::new(&place).shuffle_buffer(4).map(|sample| {
            let text = match sample.names().contains(&"text") {
                true => json!(sample.text("text")?),
                false => Value::Null,
            };
            Ok(json!({
                "n": sample.json::<u64>("n")?,
                "text": text,
                "x": sample.json::<f32>("x")?,
                "image": {"bytes": sample.bytes("image.bytes")?, "path": sample.text("image.path")?},
                "tags": sample.json::<Vec<String>>("tags")?,
            }))
        })
    };
    let data = open().expect("a stream");
    assert!(format!("{data:?}").contains("2 shards of Parquet, 12 samples"));
    let mut found = Vec::new();
    let all: Vec<u64> = (0..12).collect();
    data.read_batch(0, &all, &mut found).expect("rows");
    assert_eq!(found, expected);
    let some = [11, 0, 6, 7, 3];
    data.read_batch(1, &some, &mut found).expect("rows");
    assert_eq!(found, some.map(|n| expected[n as usize].clone()));
    // Each once, on three ranks in the order of one.
    let order = data.order().expect("an order");
    let plans = |world| -> Vec<EpochPlan> {
        let samplers = samplers(&order, world, 6, false).into_iter();
        samplers.map(|sampler| sampler.epoch(3)).collect()
    };
    assert_eq!(global_batches(&plans(3)), global_batches(&plans(1)));

    let whole = fs::read(root.path().join("rows-1.parquet")).expect("a shard");
    fs::write(
        root.path().join("rows-1.parquet"),
        &whole[..whole.len() - 9],
    )
    .expect("a shard");
    let error = open().expect_err("a damaged shard");
    assert_eq!(error.kind(), ErrorKind::Data, "{error}");
    assert!(error.to_string().contains("rows-1.parquet"), "{error}");
}
