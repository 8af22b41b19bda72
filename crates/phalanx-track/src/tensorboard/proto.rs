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

/// A process starts to write: what an earlier one wrote of this step and later ones is dropped.
pub(super) const SESSION_START: i32 = 1;
pub(super) const RGB: i32 = 3;
pub(super) const DT_STRING: i32 = 7;
pub(super) const SUCCESS: i32 = 1;
pub(super) const FAILURE: i32 = 2;

messages! {
    SessionLog {
        status: i32 = 1 (int32);
    }

    Summary {
        values: Vec<Value> = 1 (message, repeated);
    }

    Value {
        tag: String = 1 (string);
        simple_value: Option<f32> = 2 (float, optional);
        image: Option<Image> = 4 (message, optional);
        histogram: Option<Histogram> = 5 (message, optional);
        tensor: Option<Tensor> = 8 (message, optional);
        metadata: Option<Metadata> = 9 (message, optional);
    }

    Image {
        height: i32 = 1 (int32);
        width: i32 = 2 (int32);
        colorspace: i32 = 3 (int32);
        png: Vec<u8> = 4 (bytes = "vec");
    }

    Histogram {
        min: f64 = 1 (double);
        max: f64 = 2 (double);
        num: f64 = 3 (double);
        sum: f64 = 4 (double);
        sum_squares: f64 = 5 (double);
        /// Where each bucket ends.
        bucket_limit: Vec<f64> = 6 (double, repeated);
        bucket: Vec<f64> = 7 (double, repeated);
    }

    Metadata {
        plugin: Option<Plugin> = 1 (message, optional);
    }

    Plugin {
        name: String = 1 (string);
        content: Vec<u8> = 2 (bytes = "vec");
    }

    /// A string as a tensor without dimensions.
    Tensor {
        dtype: i32 = 1 (int32);
        shape: Option<Shape> = 2 (message, optional);
        strings: Vec<Vec<u8>> = 8 (bytes = "vec", repeated);
    }

    Shape {}

    /// `HParamsPluginData`.
    Hparams {
        start: Option<SessionStart> = 3 (message, optional);
        end: Option<SessionEnd> = 4 (message, optional);
    }

    /// `SessionEndInfo`.
    SessionEnd {
        status: i32 = 1 (int32);
        end_time_secs: f64 = 2 (double);
    }

    /// `SessionStartInfo`.
    SessionStart {
        hparams: BTreeMap<String, Hparam> = 1 (btree_map = "string, message");
        start_time_secs: f64 = 5 (double);
    }

    /// `GraphDef`.
    Graph {
        nodes: Vec<Node> = 1 (message, repeated);
    }

    /// `NodeDef`.
    Node {
        name: String = 1 (string);
        op: String = 2 (string);
        inputs: Vec<String> = 3 (string, repeated);
        attributes: BTreeMap<String, Attribute> = 5 (btree_map = "string, message");
    }

    /// `AttrValue` with a list of one shape.
    Attribute {
        list: Option<List> = 1 (message, optional);
    }

    List {
        shapes: Vec<Dims> = 7 (message, repeated);
    }

    /// `TensorShapeProto`.
    Dims {
        dims: Vec<Dim> = 2 (message, repeated);
    }

    Dim {
        size: i64 = 1 (int64);
    }
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
