//! The objects of a pickle.

use std::collections::HashSet;
use std::sync::Arc;

use super::tensor::{DType, Storage, Tensor};

/// Index of a [`Node`] in its [`Arena`].
pub(super) type NodeId = u32;

/// Functions and classes that a pickle may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(DType),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Int(i64),
    Text(Arc<str>),
}

#[derive(Debug, Default)]
pub(super) struct Dict {
    /// Whether it is a `collections.OrderedDict`.
    pub ordered: bool,
    pub items: Vec<(Key, NodeId)>,
    pub keys: HashSet<Key>,
}

/// One object. Objects refer to each other by index, so shared objects exist once, and
/// cycles are harmless.
#[derive(Debug)]
pub(super) enum Node {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Arc<str>),
    Tuple(Vec<NodeId>),
    List(Vec<NodeId>),
    Dict(Box<Dict>),
    Global(Global),
    Storage(Arc<Storage>),
    Tensor(Box<Tensor>),
}

impl Node {
    /// Name of its type in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Node::None => "None",
            Node::Bool(_) => "a bool",
            Node::Int(_) => "an int",
            Node::Float(_) => "a float",
            Node::Text(_) => "a str",
            Node::Tuple(_) => "a tuple",
            Node::List(_) => "a list",
            Node::Dict(_) => "a dict",
            Node::Global(_) => "a function or class",
            Node::Storage(_) => "a storage",
            Node::Tensor(_) => "a tensor",
        }
    }
}

/// All objects of a pickle.
#[derive(Debug, Default)]
pub(super) struct Arena {
    pub nodes: Vec<Node>,
}

impl Arena {
    pub fn value(&self, id: NodeId) -> Value<'_> {
        Value { arena: self, id }
    }
}

/// One object of a file: `None`, a number, a string, a tuple, a list, a dict or a tensor.
///
/// A list may contain itself: code that descends must limit the depth.
#[derive(Clone, Copy)]
pub struct Value<'a> {
    arena: &'a Arena,
    id: NodeId,
}

impl<'a> Value<'a> {
    fn node(&self) -> &'a Node {
        &self.arena.nodes[self.id as usize]
    }

    /// Its Python type: `a dict`.
    pub fn kind(&self) -> &'static str {
        self.node().kind()
    }

    /// Whether it is `None`.
    pub fn is_none(&self) -> bool {
        matches!(self.node(), Node::None)
    }

    /// Its value as a `bool`.
    pub fn as_bool(&self) -> Option<bool> {
        match self.node() {
            Node::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// Its value as an `int` of 64 bits.
    pub fn as_int(&self) -> Option<i64> {
        match self.node() {
            Node::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// Its value as a `float`, also from an `int`.
    pub fn as_float(&self) -> Option<f64> {
        match self.node() {
            Node::Float(value) => Some(*value),
            Node::Int(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// Its value as a `str`.
    pub fn as_str(&self) -> Option<&'a str> {
        match self.node() {
            Node::Text(value) => Some(value),
            _ => None,
        }
    }

    /// Its value as a tensor, also from an `nn.Parameter`.
    pub fn as_tensor(&self) -> Option<&'a Tensor> {
        match self.node() {
            Node::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }

    /// The elements of a tuple or list.
    pub fn elements(&self) -> Option<impl ExactSizeIterator<Item = Value<'a>> + use<'a>> {
        let arena = self.arena;
        match self.node() {
            Node::Tuple(ids) | Node::List(ids) => Some(ids.iter().map(|id| arena.value(*id))),
            _ => None,
        }
    }

    /// The items of a dict with `str` keys, in its order.
    pub fn items(&self) -> Option<impl Iterator<Item = (&'a str, Value<'a>)> + use<'a>> {
        let arena = self.arena;
        match self.node() {
            Node::Dict(dict) => Some(dict.items.iter().filter_map(|(key, id)| match key {
                Key::Text(text) => Some((&**text, arena.value(*id))),
                Key::Int(_) => None,
            })),
            _ => None,
        }
    }

    /// The items of a dict with `int` keys, in its order.
    pub fn numbered(&self) -> Option<impl Iterator<Item = (i64, Value<'a>)> + use<'a>> {
        let arena = self.arena;
        match self.node() {
            Node::Dict(dict) => Some(dict.items.iter().filter_map(|(key, id)| match key {
                Key::Int(number) => Some((*number, arena.value(*id))),
                Key::Text(_) => None,
            })),
            _ => None,
        }
    }

    /// The value of a dict under this key.
    pub fn get(&self, key: &str) -> Option<Value<'a>> {
        self.items()?.find(|(name, _)| *name == key).map(|i| i.1)
    }
}
