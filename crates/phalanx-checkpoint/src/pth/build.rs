//! The functions that a pickle may call.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use super::archive::Archive;
use super::tensor::{DType, MAX_DIMS, Storage, Tensor};
use super::value::{Arena, Dict, Global, Node, NodeId};

/// Storages by key.
pub(super) type Storages = HashMap<String, Arc<Storage>>;

/// The function or class with this name.
pub(super) fn global(module: &str, name: &str) -> std::result::Result<Global, String> {
    match (module, name) {
        ("collections", "OrderedDict") => return Ok(Global::OrderedDict),
        ("torch._utils", "_rebuild_tensor_v2") => return Ok(Global::RebuildTensor),
        ("torch._utils", "_rebuild_parameter") => return Ok(Global::RebuildParameter),
        ("torch", class) => {
            if let Some(dtype) = DType::from_storage_class(class) {
                return Ok(Global::Storage(dtype));
            }
        }
        _ => {}
    }
    Err(format!(
        "it names {module}.{name}; a file of tensors needs only OrderedDict, _rebuild_tensor_v2, _rebuild_parameter and \
         the storages of float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8 and bool"
    ))
}

/// The storage of a persistent id: ('storage', class, key, location, length).
///
/// The location (device) is ignored.
pub(super) fn storage(
    arena: &Arena,
    id: NodeId,
    archive: &Archive,
    known: &mut Storages,
) -> std::result::Result<Node, String> {
    let refused = Err;
    let nodes = &arena.nodes;
    let node = &nodes[id as usize];
    let parts: Vec<&Node> = match node {
        Node::Tuple(ids) if ids.len() == 5 => ids.iter().map(|id| &nodes[*id as usize]).collect(),
        other => {
            return refused(format!(
                "a persistent id is {}; expected the tuple ('storage', class, key, location, length)",
                other.kind()
            ));
        }
    };
    let [
        Node::Text(word),
        Node::Global(Global::Storage(dtype)),
        Node::Text(key),
        _,
        Node::Int(len),
    ] = parts[..]
    else {
        return refused(
            "a persistent id is not ('storage', class, key, location, length)".to_owned(),
        );
    };
    let plain = !key.is_empty() && key.len() <= 20 && key.bytes().all(|b| b.is_ascii_digit());
    if &**word != "storage" || !plain {
        return refused(format!(
            "a persistent id is ({word:?}, …, {:?}); expected \"storage\" and a number",
            shortened(key)
        ));
    }
    let size_bytes = usize::try_from(*len)
        .ok()
        .and_then(|n| n.checked_mul(dtype.size_bytes()));
    let Some(size_bytes) = size_bytes else {
        return refused(format!("storage {key} has {len} elements"));
    };
    if let Some(storage) = known.get(&**key) {
        if storage.dtype != *dtype || storage.size_bytes != size_bytes {
            return refused(format!(
                "storage {key} has {len} elements of {dtype} here, but {} bytes of {} before",
                storage.size_bytes, storage.dtype
            ));
        }
        return Ok(Node::Storage(storage.clone()));
    }
    let storage = Arc::new(Storage {
        dtype: *dtype,
        name: archive.storage(key, size_bytes)?,
        size_bytes,
        bytes: OnceLock::new(),
    });
    known.insert((**key).to_owned(), storage.clone());
    Ok(Node::Storage(storage))
}

/// The result of `function(*args)`: a new object or one of the arguments.
pub(super) enum Called {
    New(Node),
    Same(NodeId),
}

pub(super) fn call(
    arena: &Arena,
    function: NodeId,
    args: NodeId,
) -> std::result::Result<Called, String> {
    let nodes = &arena.nodes;
    let (Node::Global(function), Node::Tuple(args)) =
        (&nodes[function as usize], &nodes[args as usize])
    else {
        return Err(format!(
            "it calls {} with {}; expected a function and a tuple",
            nodes[function as usize].kind(),
            nodes[args as usize].kind()
        ));
    };
    match (function, &args[..]) {
        (Global::OrderedDict, []) => Ok(Called::New(Node::Dict(Box::new(Dict {
            ordered: true,
            ..Dict::default()
        })))),
        // Storage, offset, shape, strides. `requires_grad`, hooks and metadata are ignored.
        (
            Global::RebuildTensor,
            [storage, offset, shape, strides, _, _] | [storage, offset, shape, strides, _, _, _],
        ) => {
            let Node::Storage(storage) = &nodes[*storage as usize] else {
                return Err(format!(
                    "a tensor is built from {}; expected a storage",
                    nodes[*storage as usize].kind()
                ));
            };
            let Node::Int(offset) = nodes[*offset as usize] else {
                return Err("the offset of a tensor is not a number".to_owned());
            };
            let offset = usize::try_from(offset)
                .map_err(|_| format!("the offset of a tensor is {offset}; expected 0 or more"))?;
            let shape = sizes(nodes, *shape, "shape")?;
            let strides = sizes(nodes, *strides, "strides")?;
            let tensor = Tensor::view(storage.clone(), offset, shape, strides)?;
            Ok(Called::New(Node::Tensor(Box::new(tensor))))
        }
        (Global::RebuildParameter, [tensor, _, _]) => match &nodes[*tensor as usize] {
            Node::Tensor(_) => Ok(Called::Same(*tensor)),
            other => Err(format!(
                "a parameter is built from {}; expected a tensor",
                other.kind()
            )),
        },
        (function, args) => Err(format!(
            "it calls {function:?} with {} arguments, which PyTorch never does",
            args.len()
        )),
    }
}

fn sizes(nodes: &[Node], id: NodeId, what: &str) -> std::result::Result<Vec<usize>, String> {
    let Node::Tuple(ids) = &nodes[id as usize] else {
        return Err(format!(
            "the {what} of a tensor is {}; expected a tuple",
            nodes[id as usize].kind()
        ));
    };
    if ids.len() > MAX_DIMS {
        return Err(format!(
            "a tensor has {} dimensions; the limit is {MAX_DIMS}",
            ids.len()
        ));
    }
    ids.iter()
        .map(|id| match nodes[*id as usize] {
            Node::Int(n) => usize::try_from(n)
                .map_err(|_| format!("the {what} of a tensor contain {n}; expected 0 or more")),
            ref other => Err(format!(
                "the {what} of a tensor contain {}; expected numbers",
                other.kind()
            )),
        })
        .collect()
}

/// The start of a text, for messages.
pub(super) fn shortened(text: &str) -> String {
    const SHOWN: usize = 60;
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}
