//! The messages of an event file that are written here, and the frame around each. Numbers and names are those of
//! TensorBoard's `event.proto`, `summary.proto`, `tensor.proto` and `plugins/hparams/plugin_data.proto`.

use std::collections::BTreeMap;

use prost::Message;
use serde_json::Value as Json;

/// One record of the file.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    #[prost(int64, tag = "2")]
    pub step: i64,
    #[prost(oneof = "What", tags = "3, 4, 5, 7")]
    pub what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    /// An encoded [`Graph`].
    #[prost(bytes = "vec", tag = "4")]
    Graph(Vec<u8>),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionLog {
    #[prost(int32, tag = "1")]
    pub status: i32,
}

/// A process starts to write: what an earlier one wrote of this step and later ones is dropped.
pub(super) const SESSION_START: i32 = 1;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Value {
    #[prost(string, tag = "1")]
    pub tag: String,
    #[prost(float, optional, tag = "2")]
    pub simple_value: Option<f32>,
    #[prost(message, optional, tag = "4")]
    pub image: Option<Image>,
    #[prost(message, optional, tag = "5")]
    pub histogram: Option<Histogram>,
    #[prost(message, optional, tag = "8")]
    pub tensor: Option<Tensor>,
    #[prost(message, optional, tag = "9")]
    pub metadata: Option<Metadata>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Image {
    #[prost(int32, tag = "1")]
    pub height: i32,
    #[prost(int32, tag = "2")]
    pub width: i32,
    #[prost(int32, tag = "3")]
    pub colorspace: i32,
    #[prost(bytes = "vec", tag = "4")]
    pub png: Vec<u8>,
}

pub(super) const RGB: i32 = 3;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Histogram {
    #[prost(double, tag = "1")]
    pub min: f64,
    #[prost(double, tag = "2")]
    pub max: f64,
    #[prost(double, tag = "3")]
    pub num: f64,
    #[prost(double, tag = "4")]
    pub sum: f64,
    #[prost(double, tag = "5")]
    pub sum_squares: f64,
    /// Where each bucket ends.
    #[prost(double, repeated, tag = "6")]
    pub bucket_limit: Vec<f64>,
    #[prost(double, repeated, tag = "7")]
    pub bucket: Vec<f64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Metadata {
    #[prost(message, optional, tag = "1")]
    pub plugin: Option<Plugin>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Plugin {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(bytes = "vec", tag = "2")]
    pub content: Vec<u8>,
}

/// A string as a tensor without dimensions.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Tensor {
    #[prost(int32, tag = "1")]
    pub dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub shape: Option<Shape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub strings: Vec<Vec<u8>>,
}

pub(super) const DT_STRING: i32 = 7;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Shape {}

/// `HParamsPluginData`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Hparams {
    #[prost(message, optional, tag = "3")]
    pub start: Option<SessionStart>,
    #[prost(message, optional, tag = "4")]
    pub end: Option<SessionEnd>,
}

/// `SessionEndInfo`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionEnd {
    #[prost(int32, tag = "1")]
    pub status: i32,
    #[prost(double, tag = "2")]
    pub end_time_secs: f64,
}

pub(super) const SUCCESS: i32 = 1;
pub(super) const FAILURE: i32 = 2;

/// `SessionStartInfo`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionStart {
    #[prost(btree_map = "string, message", tag = "1")]
    pub hparams: BTreeMap<String, Hparam>,
    #[prost(double, tag = "5")]
    pub start_time_secs: f64,
}

/// `google.protobuf.Value`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Hparam {
    #[prost(oneof = "HparamKind", tags = "2, 3")]
    pub kind: Option<HparamKind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum HparamKind {
    #[prost(double, tag = "2")]
    Number(f64),
    #[prost(string, tag = "3")]
    String(String),
}

/// `GraphDef`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Graph {
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<Node>,
}

/// `NodeDef`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Node {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub op: String,
    #[prost(string, repeated, tag = "3")]
    pub inputs: Vec<String>,
    #[prost(btree_map = "string, message", tag = "5")]
    pub attributes: BTreeMap<String, Attribute>,
}

/// `AttrValue` with a list of one shape.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Attribute {
    #[prost(message, optional, tag = "1")]
    pub list: Option<List>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct List {
    #[prost(message, repeated, tag = "7")]
    pub shapes: Vec<Dims>,
}

/// `TensorShapeProto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Dims {
    #[prost(message, repeated, tag = "2")]
    pub dims: Vec<Dim>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Dim {
    #[prost(int64, tag = "1")]
    pub size: i64,
}

/// The graph of `run.json`: dots in names become the slashes by which TensorBoard folds.
pub(super) fn graph(graph: &Json) -> Graph {
    let word = |of: &Json| of.as_str().unwrap_or_default().to_owned();
    let name = |of: &Json| word(of).replace('.', "/");
    let list = |of: &'_ Json| of.as_array().cloned().unwrap_or_default();
    let input = Node {
        name: "input".to_owned(),
        op: "Placeholder".to_owned(),
        ..Node::default()
    };
    let nodes = list(graph).into_iter().map(|node| {
        let dims = list(&node["shape"]).into_iter().map(|size| Dim {
            size: size.as_i64().unwrap_or(i64::MAX),
        });
        let shapes = vec![Dims {
            dims: dims.collect(),
        }];
        let shapes = Some(List { shapes });
        Node {
            name: name(&node["name"]),
            op: word(&node["operation"]),
            inputs: list(&node["inputs"]).iter().map(name).collect(),
            attributes: [("_output_shapes".to_owned(), Attribute { list: shapes })].into(),
        }
    });
    Graph {
        nodes: std::iter::once(input).chain(nodes).collect(),
    }
}

/// `event` as a TFRecord: length, its checksum, data, its checksum.
pub(super) fn record(event: &Event) -> Vec<u8> {
    let data = event.encode_to_vec();
    let length = (data.len() as u64).to_le_bytes();
    [
        &length[..],
        &masked_crc(&length).to_le_bytes(),
        &data,
        &masked_crc(&data).to_le_bytes(),
    ]
    .concat()
}

/// CRC-32C, changed so that checksums of data that holds checksums stay good.
pub(super) fn masked_crc(data: &[u8]) -> u32 {
    let crc = crc32c::crc32c(data);
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}
