//! What the pickles of `torch.save` may name and call.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use super::MAX_TENSORS;
use super::archive::Archive;
use super::tensor::{DType, MAX_DIMS, Storage, Tensor};
use super::value::{Arena, Global, Object};
use crate::pickle::{self, Called, Dialect, Dict, NodeId, Step, shortened};

type Node = pickle::Node<Object>;

/// The pickle of an archive. Does not read storages.
pub(super) struct Torch<'a> {
    archive: &'a Archive,
    /// By key.
    storages: HashMap<String, Arc<Storage>>,
    tensors: usize,
}

impl<'a> Torch<'a> {
    pub(super) fn new(archive: &'a Archive) -> Torch<'a> {
        Torch {
            archive,
            storages: HashMap::new(),
            tensors: 0,
        }
    }
}

impl Dialect for Torch<'_> {
    type Object = Object;

    const MAX_NODES: usize = 1 << 21;

    const OPCODES: &'static str = "one that torch.save writes";

    fn has(op: u8) -> bool {
        !matches!(op, b'U' | b'T')
    }

    fn global(&mut self, module: &str, name: &str) -> Step<Object> {
        let global = match (module, name) {
            ("collections", "OrderedDict") => Some(Global::OrderedDict),
            ("torch._utils", "_rebuild_tensor_v2") => Some(Global::RebuildTensor),
            ("torch._utils", "_rebuild_parameter") => Some(Global::RebuildParameter),
            ("torch", class) => DType::from_storage_class(class).map(Global::Storage),
            _ => None,
        };
        global.map(Object::Global).ok_or_else(|| {
            format!(
                "it names {module}.{name}; a file of tensors needs only OrderedDict, _rebuild_tensor_v2, _rebuild_parameter \
                 and the storages of float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8 and bool"
            )
        })
    }

    fn persistent(&mut self, arena: &Arena, id: NodeId) -> Step<Object> {
        storage(arena, id, self.archive, &mut self.storages).map(Object::Storage)
    }

    fn call(&mut self, arena: &Arena, function: NodeId, args: NodeId) -> Step<Called<Object>> {
        let called = call(arena, function, args)?;
        let is_tensor = matches!(called, Called::New(Node::Object(Object::Tensor(_))));
        self.tensors += usize::from(is_tensor);
        if self.tensors > MAX_TENSORS {
            return Err(format!("it has more than {MAX_TENSORS} tensors"));
        }
        Ok(called)
    }

    /// The `_metadata` of a module's state dict (versions of its layers), which is ignored.
    fn build(&mut self, arena: &mut Arena, object: NodeId, state: NodeId) -> Step<()> {
        match (arena.get(object), arena.get(state)) {
            (Node::Dict(dict), Node::Dict(_)) if dict.ordered => Ok(()),
            (object, state) => Err(format!(
                "it sets attributes of {} from {}; expected an OrderedDict and a dict",
                object.kind(),
                state.kind()
            )),
        }
    }
}

/// The storage of a persistent id: ('storage', class, key, location, length).
///
/// The location (device) is ignored.
fn storage(
    arena: &Arena,
    id: NodeId,
    archive: &Archive,
    known: &mut HashMap<String, Arc<Storage>>,
) -> Step<Arc<Storage>> {
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
        Node::Object(Object::Global(Global::Storage(dtype))),
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
        return Ok(storage.clone());
    }
    let storage = Arc::new(Storage {
        dtype: *dtype,
        name: archive.storage(key, size_bytes)?,
        size_bytes,
        bytes: OnceLock::new(),
    });
    known.insert((**key).to_owned(), storage.clone());
    Ok(storage)
}

fn call(arena: &Arena, function: NodeId, args: NodeId) -> Step<Called<Object>> {
    let nodes = &arena.nodes;
    let (Node::Object(Object::Global(function)), Node::Tuple(args)) =
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
            let Node::Object(Object::Storage(storage)) = &nodes[*storage as usize] else {
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
            Ok(Called::New(Node::Object(Object::Tensor(Box::new(tensor)))))
        }
        (Global::RebuildParameter, [tensor, _, _]) => match &nodes[*tensor as usize] {
            Node::Object(Object::Tensor(_)) => Ok(Called::Same(*tensor)),
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

fn sizes(nodes: &[Node], id: NodeId, what: &str) -> Step<Vec<usize>> {
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
