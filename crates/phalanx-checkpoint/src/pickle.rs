//! A pickle machine that executes nothing: what a pickle may name, make and hold is up to a [`Dialect`].
//!
//! Opcodes as in CPython's `pickletools`; protocol 2, and that of Python 2's strings. Anything else is refused with its
//! offset. Memory is limited by the number of objects, and nothing is recursive: objects refer to each other by index.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// Maximum length of a module's or function's name.
const MAX_NAME_BYTES: usize = 256;

/// Result of an opcode, or the reason to refuse the pickle.
pub type Step<T> = std::result::Result<T, String>;

/// Objects in addition to Python's own values: functions, tensors, arrays.
pub trait Object {
    /// Name of its type in messages.
    fn kind(&self) -> &'static str;
}

/// What the pickles of one format may do.
pub trait Dialect {
    /// What they have in addition to Python's own values.
    type Object: Object;

    /// Maximum number of objects; each takes about a hundred bytes.
    const MAX_NODES: usize;

    /// What opcodes belong to, for messages: `one that torch.save writes`.
    const OPCODES: &'static str;

    /// Whether they have this opcode.
    fn has(op: u8) -> bool;

    /// `GLOBAL`: the function or class with this name.
    fn global(&mut self, module: &str, name: &str) -> Step<Self::Object>;

    /// `BINPERSID`: what lies outside of the pickle under this name.
    fn persistent(&mut self, arena: &Arena<Self::Object>, id: NodeId) -> Step<Self::Object> {
        let kind = arena.kind(id);
        Err(format!("it has the persistent id {kind}; expected none"))
    }

    /// `REDUCE`: what `function(*args)` makes.
    fn call(
        &mut self,
        arena: &Arena<Self::Object>,
        function: NodeId,
        args: NodeId,
    ) -> Step<Called<Self::Object>>;

    /// `BUILD`: sets the state of an object.
    fn build(&mut self, arena: &mut Arena<Self::Object>, object: NodeId, state: NodeId)
    -> Step<()>;
}

/// The result of a call: a new object or one of the arguments.
pub enum Called<O> {
    New(Node<O>),
    Same(NodeId),
}

/// Index of a [`Node`] in its [`Arena`].
pub type NodeId = u32;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    Int(i64),
    Text(Arc<str>),
}

#[derive(Default)]
pub struct Dict {
    /// Whether it is a `collections.OrderedDict`.
    pub ordered: bool,
    pub items: Vec<(Key, NodeId)>,
    pub keys: HashSet<Key>,
}

/// One object. Objects refer to each other by index, so shared objects exist once, and
/// cycles are harmless.
pub enum Node<O> {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Arc<str>),
    /// A string of Python 2: where it lies in the pickle.
    Bytes(Range<usize>),
    Tuple(Vec<NodeId>),
    List(Vec<NodeId>),
    Dict(Box<Dict>),
    Object(O),
}

impl<O: Object> Node<O> {
    /// Name of its type in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Node::None => "None",
            Node::Bool(_) => "a bool",
            Node::Int(_) => "an int",
            Node::Float(_) => "a float",
            Node::Text(_) | Node::Bytes(_) => "a str",
            Node::Tuple(_) => "a tuple",
            Node::List(_) => "a list",
            Node::Dict(_) => "a dict",
            Node::Object(object) => object.kind(),
        }
    }
}

/// All objects of a pickle.
pub struct Arena<O> {
    pub nodes: Vec<Node<O>>,
}

impl<O: Object> Arena<O> {
    /// The object of this number.
    pub fn get(&self, id: NodeId) -> &Node<O> {
        &self.nodes[id as usize]
    }

    /// Name of its type in messages.
    pub fn kind(&self, id: NodeId) -> &'static str {
        self.get(id).kind()
    }
}

/// Where and why a pickle was refused.
pub struct Refused {
    /// Offset of the opcode.
    pub at: usize,
    pub what: String,
}

/// Runs a pickle; all its objects, and which one it is.
///
/// # Errors
///
/// Anything that the dialect's files do not have.
pub fn run<D: Dialect>(
    pickle: &[u8],
    dialect: D,
) -> std::result::Result<(Arena<D::Object>, NodeId), Refused> {
    let mut machine = Machine {
        pickle,
        at: 0,
        arena: Arena { nodes: Vec::new() },
        stack: Vec::new(),
        memo: HashMap::new(),
        dialect,
    };
    loop {
        let at = machine.at;
        match machine.step() {
            Ok(None) => {}
            Ok(Some(root)) => return Ok((machine.arena, root)),
            Err(what) => return Err(Refused { at, what }),
        }
    }
}

enum Slot {
    Mark,
    Object(NodeId),
}

fn refuse<T>(what: impl Into<String>) -> Step<T> {
    Err(what.into())
}

struct Machine<'a, D: Dialect> {
    pickle: &'a [u8],
    at: usize,
    arena: Arena<D::Object>,
    stack: Vec<Slot>,
    memo: HashMap<u32, NodeId>,
    dialect: D,
}

impl<'a, D: Dialect> Machine<'a, D> {
    /// Runs one opcode; returns the root object after the last one.
    fn step(&mut self) -> Step<Option<NodeId>> {
        let [op] = self.take::<1>()?;
        let unknown = || refuse(format!("opcode {} is not {}", name_of(op), D::OPCODES));
        if !D::has(op) {
            return unknown();
        }
        match op {
            0x80 => {
                let [protocol] = self.take::<1>()?;
                if !(2..=5).contains(&protocol) {
                    return refuse(format!("it is of protocol {protocol}; expected 2"));
                }
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                let global = self.dialect.global(module, name)?;
                self.push(Node::Object(global))?;
            }
            b'q' => {
                let [key] = self.take::<1>()?;
                self.put(u32::from(key))?;
            }
            b'r' => {
                let key = u32::from_le_bytes(self.take()?);
                self.put(key)?;
            }
            b'h' => {
                let [key] = self.take::<1>()?;
                self.get(u32::from(key))?;
            }
            b'j' => {
                let key = u32::from_le_bytes(self.take()?);
                self.get(key)?;
            }
            b'(' => self.push_slot(Slot::Mark)?,
            b')' => self.push(Node::Tuple(Vec::new()))?,
            0x85..=0x87 => {
                let mut items = Vec::with_capacity(3);
                for _ in 0x84..op {
                    items.push(self.pop()?);
                }
                items.reverse();
                self.push(Node::Tuple(items))?;
            }
            b't' => {
                let items = self.pop_to_mark()?;
                self.push(Node::Tuple(items))?;
            }
            b'}' => self.push(Node::Dict(Box::default()))?,
            b']' => self.push(Node::List(Vec::new()))?,
            b'K' => {
                let [value] = self.take::<1>()?;
                self.push(Node::Int(i64::from(value)))?;
            }
            b'M' => {
                let value = u16::from_le_bytes(self.take()?);
                self.push(Node::Int(i64::from(value)))?;
            }
            b'J' => {
                let value = i32::from_le_bytes(self.take()?);
                self.push(Node::Int(i64::from(value)))?;
            }
            0x8a => {
                let value = self.long()?;
                self.push(Node::Int(value))?;
            }
            b'G' => {
                // The only big-endian value.
                let value = f64::from_be_bytes(self.take()?);
                self.push(Node::Float(value))?;
            }
            b'X' => {
                let len = u32::from_le_bytes(self.take()?) as usize;
                let bytes = self.slice(len)?;
                let Ok(text) = std::str::from_utf8(bytes) else {
                    return refuse("a text is not UTF-8");
                };
                self.push(Node::Text(Arc::from(text)))?;
            }
            b'U' => {
                let [len] = self.take::<1>()?;
                self.push_bytes(usize::from(len))?;
            }
            b'T' => {
                let len = i32::from_le_bytes(self.take()?);
                match usize::try_from(len) {
                    Ok(len) => self.push_bytes(len)?,
                    Err(_) => return refuse(format!("a str of {len} bytes")),
                }
            }
            b'N' => self.push(Node::None)?,
            0x88 => self.push(Node::Bool(true))?,
            0x89 => self.push(Node::Bool(false))?,
            b'a' => {
                let item = self.pop()?;
                self.extend_list(vec![item])?;
            }
            b'e' => {
                let items = self.pop_to_mark()?;
                self.extend_list(items)?;
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set_items(&[key, value])?;
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.set_items(&items)?;
            }
            b'Q' => {
                let id = self.pop()?;
                let object = self.dialect.persistent(&self.arena, id)?;
                self.push(Node::Object(object))?;
            }
            b'R' => {
                let args = self.pop()?;
                let function = self.pop()?;
                match self.dialect.call(&self.arena, function, args)? {
                    Called::New(node) => self.push(node)?,
                    Called::Same(id) => self.push_slot(Slot::Object(id))?,
                }
            }
            b'b' => {
                let state = self.pop()?;
                let object = self.top()?;
                self.dialect.build(&mut self.arena, object, state)?;
            }
            b'.' => return self.finish().map(Some),
            _ => return unknown(),
        }
        Ok(None)
    }

    fn finish(&mut self) -> Step<NodeId> {
        let root = self.pop()?;
        if !self.stack.is_empty() {
            return refuse(format!(
                "{} objects are left on the stack at its end",
                self.stack.len()
            ));
        }
        match self.pickle.len() - self.at {
            0 => Ok(root),
            more => refuse(format!("{more} bytes follow its end")),
        }
    }

    fn slice(&mut self, len: usize) -> Step<&'a [u8]> {
        let rest = &self.pickle[self.at..];
        match rest.get(..len) {
            Some(bytes) => {
                self.at += len;
                Ok(bytes)
            }
            None => refuse(format!(
                "it ends early: {len} bytes are expected, {} are left",
                rest.len()
            )),
        }
    }

    fn take<const N: usize>(&mut self) -> Step<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.slice(N)?);
        Ok(out)
    }

    fn line(&mut self) -> Step<&'a str> {
        let rest = &self.pickle[self.at..];
        let shown = &rest[..rest.len().min(MAX_NAME_BYTES)];
        let Some(len) = shown.iter().position(|b| *b == b'\n') else {
            return refuse(format!("a name has no end within {} bytes", shown.len()));
        };
        self.at += len + 1;
        match std::str::from_utf8(&shown[..len]) {
            Ok(name) if name.is_ascii() => Ok(name),
            _ => refuse("the name of a function is not ASCII"),
        }
    }

    /// `LONG1`: a length, then a little-endian two's complement integer.
    fn long(&mut self) -> Step<i64> {
        let [len] = self.take::<1>()?;
        let bytes = self.slice(usize::from(len))?;
        if bytes.len() > 8 {
            return refuse(format!("an int of {len} bytes; the limit is 8"));
        }
        let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
        let mut all = [if negative { 0xff } else { 0 }; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        Ok(i64::from_le_bytes(all))
    }

    fn push(&mut self, node: Node<D::Object>) -> Step<()> {
        let id = self.arena.nodes.len();
        if id >= D::MAX_NODES {
            return refuse(format!("it has more than {} objects", D::MAX_NODES));
        }
        self.arena.nodes.push(node);
        self.push_slot(Slot::Object(id as NodeId))
    }

    fn push_slot(&mut self, slot: Slot) -> Step<()> {
        if self.stack.len() >= D::MAX_NODES {
            return refuse(format!("its stack has more than {} objects", D::MAX_NODES));
        }
        self.stack.push(slot);
        Ok(())
    }

    /// A string of Python 2 that follows.
    fn push_bytes(&mut self, len: usize) -> Step<()> {
        self.slice(len)?;
        self.push(Node::Bytes(self.at - len..self.at))
    }

    fn pop(&mut self) -> Step<NodeId> {
        match self.stack.pop() {
            Some(Slot::Object(id)) => Ok(id),
            Some(Slot::Mark) => refuse("it uses a mark as an object"),
            None => refuse("it pops an empty stack"),
        }
    }

    /// Pops everything above the last mark, and the mark.
    fn pop_to_mark(&mut self) -> Step<Vec<NodeId>> {
        let mark = self.stack.iter().rposition(|s| matches!(s, Slot::Mark));
        let Some(mark) = mark else {
            return refuse("it pops to a mark that is not on the stack");
        };
        let items = self.stack.drain(mark..);
        Ok(items
            .filter_map(|slot| match slot {
                Slot::Object(id) => Some(id),
                Slot::Mark => None,
            })
            .collect())
    }

    fn top(&self) -> Step<NodeId> {
        match self.stack.last() {
            Some(Slot::Object(id)) => Ok(*id),
            _ => refuse("it needs an object on the stack"),
        }
    }

    fn put(&mut self, key: u32) -> Step<()> {
        let top = self.top()?;
        if self.memo.len() >= D::MAX_NODES {
            return refuse(format!("its memo has more than {} objects", D::MAX_NODES));
        }
        self.memo.insert(key, top);
        Ok(())
    }

    fn get(&mut self, key: u32) -> Step<()> {
        match self.memo.get(&key) {
            Some(id) => self.push_slot(Slot::Object(*id)),
            None => refuse(format!("it gets memo entry {key}, which was never put")),
        }
    }

    fn extend_list(&mut self, items: Vec<NodeId>) -> Step<()> {
        let top = self.top()? as usize;
        match &mut self.arena.nodes[top] {
            Node::List(list) => {
                list.extend(items);
                Ok(())
            }
            other => refuse(format!("it appends to {}; expected a list", other.kind())),
        }
    }

    /// Sets the alternating keys and values in `items`.
    fn set_items(&mut self, items: &[NodeId]) -> Step<()> {
        let top = self.top()? as usize;
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return refuse("a key of a dict has no value");
        }
        let mut keyed = Vec::with_capacity(pairs.len());
        for [key, value] in pairs {
            let key = match &self.arena.nodes[*key as usize] {
                Node::Text(text) => Key::Text(text.clone()),
                Node::Int(number) => Key::Int(*number),
                Node::Bytes(bytes) => match std::str::from_utf8(&self.pickle[bytes.clone()]) {
                    Ok(text) => Key::Text(Arc::from(text)),
                    Err(_) => return refuse("a key of a dict is not UTF-8"),
                },
                other => {
                    return refuse(format!(
                        "a key of a dict is {}; expected a str or an int",
                        other.kind()
                    ));
                }
            };
            keyed.push((key, *value));
        }
        let Node::Dict(dict) = &mut self.arena.nodes[top] else {
            let kind = self.arena.nodes[top].kind();
            return refuse(format!("it sets items of {kind}; expected a dict"));
        };
        for (key, value) in keyed {
            if !dict.keys.insert(key.clone()) {
                let key = match &key {
                    Key::Text(text) => shortened(text),
                    Key::Int(number) => number.to_string(),
                };
                return refuse(format!("a dict has the key {key:?} twice"));
            }
            dict.items.push((key, value));
        }
        Ok(())
    }
}

/// The start of a text, for messages.
pub(crate) fn shortened(text: &str) -> String {
    const SHOWN: usize = 60;
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// An opcode for messages.
fn name_of(op: u8) -> String {
    if op.is_ascii_graphic() {
        format!("{:?} (0x{op:02x})", char::from(op))
    } else {
        format!("0x{op:02x}")
    }
}
