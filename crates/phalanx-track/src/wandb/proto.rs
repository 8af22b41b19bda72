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

#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(message, optional, tag = "1")]
    pub version: Option<Version>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Version {
    #[prost(string, tag = "1")]
    pub producer: String,
    /// The oldest client that can read the file.
    #[prost(string, tag = "2")]
    pub min_consumer: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Run {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(string, tag = "2")]
    pub entity: String,
    #[prost(string, tag = "3")]
    pub project: String,
    #[prost(message, optional, tag = "4")]
    pub config: Option<Items>,
    #[prost(string, tag = "8")]
    pub display_name: String,
    #[prost(string, tag = "9")]
    pub notes: String,
    #[prost(string, repeated, tag = "10")]
    pub tags: Vec<String>,
    #[prost(string, tag = "13")]
    pub host: String,
    #[prost(message, optional, tag = "17")]
    pub start_time: Option<Time>,
}

/// `google.protobuf.Timestamp`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Time {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

/// `ConfigRecord`, `SummaryRecord`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Items {
    #[prost(message, repeated, tag = "1")]
    pub update: Vec<Item>,
}

/// A name and a value as JSON.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Item {
    /// Where `nested_key` is empty.
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, repeated, tag = "2")]
    pub nested_key: Vec<String>,
    #[prost(string, tag = "16")]
    pub value_json: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct History {
    #[prost(message, repeated, tag = "1")]
    pub item: Vec<Item>,
    #[prost(message, optional, tag = "2")]
    pub step: Option<Step>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Step {
    #[prost(int64, tag = "1")]
    pub num: i64,
}

/// Measures of the system.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Stats {
    #[prost(message, optional, tag = "2")]
    pub timestamp: Option<Time>,
    #[prost(message, repeated, tag = "3")]
    pub item: Vec<Item>,
}

/// Files in the folder `files` that are uploaded.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Files {
    #[prost(message, repeated, tag = "1")]
    pub files: Vec<FilesItem>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct FilesItem {
    #[prost(string, tag = "1")]
    pub path: String,
    /// Now, or [`AT_END`].
    #[prost(int32, tag = "2")]
    pub policy: i32,
}

pub(super) const AT_END: i32 = 1;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Artifact {
    #[prost(string, tag = "1")]
    pub run_id: String,
    #[prost(string, tag = "2")]
    pub project: String,
    #[prost(string, tag = "3")]
    pub entity: String,
    #[prost(string, tag = "4")]
    pub kind: String,
    #[prost(string, tag = "5")]
    pub name: String,
    #[prost(string, tag = "6")]
    pub digest: String,
    #[prost(string, repeated, tag = "11")]
    pub aliases: Vec<String>,
    #[prost(message, optional, tag = "12")]
    pub manifest: Option<Manifest>,
    #[prost(bool, tag = "14")]
    pub finalize: bool,
    /// A name for this version before the server has given one.
    #[prost(string, tag = "15")]
    pub client_id: String,
    /// The same for all versions.
    #[prost(string, tag = "16")]
    pub sequence_client_id: String,
    #[prost(string, tag = "20")]
    pub digest_algorithm: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Manifest {
    #[prost(int32, tag = "1")]
    pub version: i32,
    #[prost(string, tag = "2")]
    pub storage_policy: String,
    #[prost(message, repeated, tag = "3")]
    pub storage_policy_config: Vec<Config>,
    #[prost(message, repeated, tag = "4")]
    pub contents: Vec<Entry>,
}

/// `StoragePolicyConfigItem`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Config {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value_json: String,
}

/// `ArtifactManifestEntry`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Entry {
    #[prost(string, tag = "1")]
    pub path: String,
    /// MD5, in Base64.
    #[prost(string, tag = "2")]
    pub digest: String,
    #[prost(int64, tag = "4")]
    pub size: i64,
    #[prost(string, tag = "6")]
    pub local_path: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Exit {
    #[prost(int32, tag = "1")]
    pub exit_code: i32,
    /// In seconds.
    #[prost(int32, tag = "2")]
    pub runtime: i32,
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
