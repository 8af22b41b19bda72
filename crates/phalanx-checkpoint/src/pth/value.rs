//! What a file holds, for its readers.

use std::sync::Arc;

use super::tensor::{DType, Storage, Tensor};
use crate::pickle::{self, Key, Node, NodeId};

/// Functions and classes that a pickle may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(DType),
}

/// What a pickle has in addition to Python's own values.
pub(super) enum Object {
    Global(Global),
    Storage(Arc<Storage>),
    Tensor(Box<Tensor>),
}

impl pickle::Object for Object {
    fn kind(&self) -> &'static str {
        match self {
            Object::Global(_) => "a function or class",
            Object::Storage(_) => "a storage",
            Object::Tensor(_) => "a tensor",
        }
    }
}

/// All objects of a pickle.
pub(super) type Arena = crate::pickle::Arena<Object>;

/// One object of a file: `None`, a number, a string, a tuple, a list, a dict or a tensor.
///
/// A list may contain itself: code that descends must limit the depth.
#[derive(Clone, Copy)]
pub struct Value<'a> {
    arena: &'a Arena,
    id: NodeId,
}

impl<'a> Value<'a> {
    pub(super) fn of(arena: &'a Arena, id: NodeId) -> Value<'a> {
        Value { arena, id }
    }

    fn node(&self) -> &'a Node<Object> {
        self.arena.get(self.id)
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
            Node::Object(Object::Tensor(tensor)) => Some(tensor),
            _ => None,
        }
    }

    /// The elements of a tuple or list.
    pub fn elements(&self) -> Option<impl ExactSizeIterator<Item = Value<'a>> + use<'a>> {
        let arena = self.arena;
        match self.node() {
            Node::Tuple(ids) | Node::List(ids) => Some(ids.iter().map(|id| Value::of(arena, *id))),
            _ => None,
        }
    }

    /// The items of a dict with `str` keys, in its order.
    pub fn items(&self) -> Option<impl Iterator<Item = (&'a str, Value<'a>)> + use<'a>> {
        let arena = self.arena;
        match self.node() {
            Node::Dict(dict) => Some(dict.items.iter().filter_map(|(key, id)| match key {
                Key::Text(text) => Some((&**text, Value::of(arena, *id))),
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
                Key::Int(number) => Some((*number, Value::of(arena, *id))),
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
