//! The messages of a `.wandb` file that are written here, and the file's frames. Numbers and names are those of wandb's
//! `wandb_internal.proto`.

use std::io::{self, Write};

use prost::Message;

/// One record of the file.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Record {
    /// Counts from 1.
    #[prost(int64, tag = "1")]
    pub num: i64,
    #[prost(oneof = "What", tags = "2, 3, 5, 6, 7, 8, 17, 18, 21")]
    pub what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum What {
    #[prost(message, tag = "2")]
    History(History),
    #[prost(message, tag = "3")]
    Summary(Items),
    #[prost(message, tag = "5")]
    Config(Items),
    #[prost(message, tag = "6")]
    Files(Files),
    #[prost(message, tag = "7")]
    Stats(Stats),
    #[prost(message, tag = "8")]
    Artifact(Artifact),
    #[prost(message, tag = "17")]
    Run(Run),
    #[prost(message, tag = "18")]
    Exit(Exit),
    #[prost(message, tag = "21")]
    Header(Header),
}

pub(super) const AT_END: i32 = 1;

messages! {
    Header {
        version: Option<Version> = 1 (message, optional);
    }

    Version {
        producer: String = 1 (string);
        /// The oldest client that can read the file.
        min_consumer: String = 2 (string);
    }

    Run {
        id: String = 1 (string);
        entity: String = 2 (string);
        project: String = 3 (string);
        config: Option<Items> = 4 (message, optional);
        display_name: String = 8 (string);
        notes: String = 9 (string);
        tags: Vec<String> = 10 (string, repeated);
        host: String = 13 (string);
        start_time: Option<Time> = 17 (message, optional);
    }

    /// `google.protobuf.Timestamp`.
    Time {
        seconds: i64 = 1 (int64);
        nanos: i32 = 2 (int32);
    }

    /// `ConfigRecord`, `SummaryRecord`.
    Items {
        update: Vec<Item> = 1 (message, repeated);
    }

    /// A name and a value as JSON.
    Item {
        /// Where `nested_key` is empty.
        key: String = 1 (string);
        nested_key: Vec<String> = 2 (string, repeated);
        value_json: String = 16 (string);
    }

    History {
        item: Vec<Item> = 1 (message, repeated);
        step: Option<Step> = 2 (message, optional);
    }

    Step {
        num: i64 = 1 (int64);
    }

    /// Measures of the system.
    Stats {
        timestamp: Option<Time> = 2 (message, optional);
        item: Vec<Item> = 3 (message, repeated);
    }

    /// Files in the folder `files` that are uploaded.
    Files {
        files: Vec<FilesItem> = 1 (message, repeated);
    }

    FilesItem {
        path: String = 1 (string);
        /// Now, or [`AT_END`].
        policy: i32 = 2 (int32);
    }

    Artifact {
        run_id: String = 1 (string);
        project: String = 2 (string);
        entity: String = 3 (string);
        kind: String = 4 (string);
        name: String = 5 (string);
        digest: String = 6 (string);
        aliases: Vec<String> = 11 (string, repeated);
        manifest: Option<Manifest> = 12 (message, optional);
        finalize: bool = 14 (bool);
        /// A name for this version before the server has given one.
        client_id: String = 15 (string);
        /// The same for all versions.
        sequence_client_id: String = 16 (string);
        digest_algorithm: String = 20 (string);
    }

    Manifest {
        version: i32 = 1 (int32);
        storage_policy: String = 2 (string);
        storage_policy_config: Vec<Config> = 3 (message, repeated);
        contents: Vec<Entry> = 4 (message, repeated);
    }

    /// `StoragePolicyConfigItem`.
    Config {
        key: String = 1 (string);
        value_json: String = 2 (string);
    }

    /// `ArtifactManifestEntry`.
    Entry {
        path: String = 1 (string);
        /// MD5, in Base64.
        digest: String = 2 (string);
        size: i64 = 4 (int64);
        local_path: String = 6 (string);
    }

    Exit {
        exit_code: i32 = 1 (int32);
        /// In seconds.
        runtime: i32 = 2 (int32);
    }
}

/// What a file begins with: its kind, a number for it, the version of its frames.
pub(super) const MAGIC: &[u8; 7] = b":W&B\xe1\xbe\x00";

/// A frame does not go over the end of a block.
const BLOCK: usize = 32 << 10;

/// CRC-32, length and kind of a frame.
const HEAD: usize = 7;

/// Writes `data` at `offset` of the file, as the frames of LevelDB's logs: whole, or first, middle and last parts.
/// Returns the offset behind it.
pub(super) fn write_frames(out: &mut impl Write, offset: u64, mut data: &[u8]) -> io::Result<u64> {
    let mut at = offset;
    let mut is_first = true;
    loop {
        let mut left = BLOCK - (at % BLOCK as u64) as usize;
        if left < HEAD {
            out.write_all(&[0; HEAD][..left])?;
            at += left as u64;
            left = BLOCK;
        }
        let (part, rest) = data.split_at(data.len().min(left - HEAD));
        let kind = match (is_first, rest.is_empty()) {
            (true, true) => 1,
            (true, false) => 2,
            (false, false) => 3,
            (false, true) => 4,
        };
        let mut crc = crc32fast::Hasher::new();
        crc.update(&[kind]);
        crc.update(part);
        out.write_all(&crc.finalize().to_le_bytes())?;
        // A part is shorter than a block.
        out.write_all(&(part.len() as u16).to_le_bytes())?;
        out.write_all(&[kind])?;
        out.write_all(part)?;
        at += (HEAD + part.len()) as u64;
        if rest.is_empty() {
            return Ok(at);
        }
        (data, is_first) = (rest, false);
    }
}
