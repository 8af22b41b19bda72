//! The Python version: one pickled dictionary per file, with `labels` and `data`.
//!
//! Of all pickles, only the opcodes that Python 2 used for these files and three names
//! (numpy's `_reconstruct`, `ndarray` and `dtype`) are accepted; anything else is an error. See
//! `docs/design/security.md`.

use std::ops::Range;
use std::path::Path;

use super::{Batch, CLASSES, PIXELS};
use phalanx_base::text::grouped;
use phalanx_base::{Error, Result};
use phalanx_checkpoint::pickle::{self, Called, Dialect, Key, NodeId, Refused, Step};

type Node = pickle::Node<Object>;
type Arena = pickle::Arena<Object>;

/// What numpy adds to Python's own values.
enum Object {
    Reconstruct,
    ArrayClass,
    DtypeClass,
    /// Whether it is that of unsigned bytes.
    Dtype {
        bytes: bool,
    },
    /// Shape, and where the content lies in the file; empty before its state is set.
    Array {
        shape: Vec<i64>,
        data: Range<usize>,
    },
}

impl pickle::Object for Object {
    fn kind(&self) -> &'static str {
        match self {
            Object::Reconstruct | Object::ArrayClass | Object::DtypeClass => "a function or class",
            Object::Dtype { .. } => "a dtype",
            Object::Array { .. } => "an array",
        }
    }
}

struct Numpy<'a> {
    /// The file.
    bytes: &'a [u8],
}

impl Dialect for Numpy<'_> {
    type Object = Object;

    /// The published files have 20,100.
    const MAX_NODES: usize = 1 << 18;

    const OPCODES: &'static str = "one that the files of CIFAR-10 have";

    fn has(op: u8) -> bool {
        b"\x80(}]NKMJUTqrc\x85\x86\x87taesuRb.\x88\x89".contains(&op)
    }

    fn global(&mut self, module: &str, name: &str) -> Step<Object> {
        match (module, name) {
            ("numpy.core.multiarray", "_reconstruct") => Ok(Object::Reconstruct),
            ("numpy", "ndarray") => Ok(Object::ArrayClass),
            ("numpy", "dtype") => Ok(Object::DtypeClass),
            _ => Err(format!(
                "the name {}.{}; expected one of numpy's three",
                module.escape_debug(),
                name.escape_debug()
            )),
        }
    }

    fn call(&mut self, arena: &Arena, function: NodeId, args: NodeId) -> Step<Called<Object>> {
        let Node::Tuple(args) = arena.get(args) else {
            let kind = arena.kind(args);
            return Err(format!("{kind} as arguments; expected a tuple"));
        };
        let args: Vec<&Node> = args.iter().map(|id| arena.get(*id)).collect();
        let made = match (arena.get(function), &args[..]) {
            (
                Node::Object(Object::Reconstruct),
                [
                    Node::Object(Object::ArrayClass),
                    Node::Tuple(_),
                    Node::Bytes(_),
                ],
            ) => Object::Array {
                shape: Vec::new(),
                data: 0..0,
            },
            (Node::Object(Object::DtypeClass), [Node::Bytes(kind), ..]) => Object::Dtype {
                bytes: &self.bytes[kind.clone()] == b"u1",
            },
            (other, _) => {
                return Err(format!(
                    "{} applied to {} arguments; expected numpy's array or dtype",
                    other.kind(),
                    args.len()
                ));
            }
        };
        Ok(Called::New(Node::Object(made)))
    }

    fn build(&mut self, arena: &mut Arena, object: NodeId, state: NodeId) -> Step<()> {
        let Node::Tuple(state) = arena.get(state) else {
            let kind = arena.kind(state);
            return Err(format!("{kind} as a state; expected a tuple"));
        };
        match arena.get(object) {
            // Byte order and alignment, which bytes do not have.
            Node::Object(Object::Dtype { .. }) => return Ok(()),
            Node::Object(Object::Array { .. }) => {}
            other => {
                let kind = other.kind();
                return Err(format!("a state for {kind}; expected an array or dtype"));
            }
        }
        let state: Vec<&Node> = state.iter().map(|id| arena.get(*id)).collect();
        let [
            Node::Int(_),
            Node::Tuple(shape),
            Node::Object(Object::Dtype { bytes }),
            Node::Bool(fortran),
            Node::Bytes(data),
        ] = state[..]
        else {
            return Err(
                "an array's state of another form; expected version, shape, dtype, order, bytes"
                    .to_owned(),
            );
        };
        if !bytes || *fortran {
            return Err(
                "an array of another type or order; expected rows of unsigned bytes (u1)"
                    .to_owned(),
            );
        }
        let shape = shape.iter().map(|id| match arena.get(*id) {
            Node::Int(n) => Ok(*n),
            other => Err(format!("{} in an array's shape", other.kind())),
        });
        let (shape, data) = (shape.collect::<Step<_>>()?, data.clone());
        arena.nodes[object as usize] = Node::Object(Object::Array { shape, data });
        Ok(())
    }
}

/// Parses the bytes of one file.
///
/// # Errors
///
/// `Data`, naming file, offset and what was expected there.
pub(super) fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<Batch<'a>> {
    let refused = |Refused { at, what }| {
        let (path, at) = (path.display(), grouped(at as u64));
        Error::data(format!("{path}: at byte {at}: {what}"))
    };
    if !bytes.starts_with(b"\x80\x02") {
        let hint = match bytes.first() {
            Some(b'<') => "; it looks like a web page, download the file itself",
            Some(0x1f) => "; it is compressed, give the whole archive instead",
            _ => "",
        };
        let found = match bytes {
            [] => "an empty file".to_owned(),
            bytes => hex::encode(&bytes[..bytes.len().min(2)]),
        };
        let what = format!("expected a pickle of protocol 2 (80 02), found {found}{hint}");
        return Err(refused(Refused { at: 0, what }));
    }
    let (arena, root) = pickle::run(bytes, Numpy { bytes }).map_err(refused)?;
    let root = arena.get(root);
    let Node::Dict(entries) = root else {
        let what = format!("the pickle gives {}; expected one dict", root.kind());
        let at = bytes.len() - 1;
        return Err(refused(Refused { at, what }));
    };
    batch(path, bytes, &arena, &entries.items)
}

/// What the dictionary has.
fn batch<'a>(
    path: &Path,
    bytes: &'a [u8],
    arena: &Arena,
    entries: &[(Key, NodeId)],
) -> Result<Batch<'a>> {
    let wrong = |what: String| Error::data(format!("{}: {what}", path.display()));
    let (mut labels, mut planes) = (None, None);
    for (key, value) in entries {
        let Key::Text(key) = key else { continue };
        match (&**key, arena.get(*value)) {
            ("labels", Node::List(items)) => labels = Some(items),
            ("data", Node::Object(Object::Array { shape, data })) => {
                planes = Some((shape, &bytes[data.clone()]));
            }
            ("labels" | "data", other) => {
                return Err(wrong(format!(
                    "entry \"{key}\" is {}; expected a list of labels and an array of pixels",
                    other.kind()
                )));
            }
            _ => {}
        }
    }
    let (Some(labels), Some((shape, data))) = (labels, planes) else {
        return Err(wrong(
            "the dictionary lacks \"labels\" or \"data\"; expected a batch of CIFAR-10".to_owned(),
        ));
    };
    let labels = (labels.iter().enumerate()).map(|(i, label)| match arena.get(*label) {
        Node::Int(label) if (0..CLASSES as i64).contains(label) => Ok(*label as u8),
        Node::Int(label) => Err(wrong(format!("label {i} is {label}; expected 0 to 9"))),
        other => Err(wrong(format!(
            "label {i} is {}; expected 0 to 9",
            other.kind()
        ))),
    });
    let labels: Vec<u8> = labels.collect::<Result<_>>()?;
    let expected = [labels.len() as i64, PIXELS as i64];
    if labels.is_empty() || *shape != expected || data.len() != labels.len() * PIXELS {
        return Err(wrong(format!(
            "the array of pixels has shape {shape:?} and {} bytes; expected {expected:?} for {} labels",
            grouped(data.len() as u64),
            labels.len()
        )));
    }
    Ok(Batch {
        planes: data,
        stride: PIXELS,
        labels,
    })
}
