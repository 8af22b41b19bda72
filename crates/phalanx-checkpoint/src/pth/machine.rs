//! A pickle machine for the opcodes that `torch.save` writes.
//!
//! Opcodes as in CPython's `pickletools`; protocol 2. Anything else is refused with its
//! offset.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::MAX_TENSORS;
use super::archive::Archive;
use super::build::{self, Called, Storages, shortened};
use super::value::{Arena, Key, Node, NodeId};
use phalanx_base::{Error, Result};

/// Maximum number of objects in a pickle; each takes about a hundred bytes.
const MAX_NODES: usize = 1 << 21;

/// Maximum length of a module's or function's name.
const MAX_NAME_BYTES: usize = 256;

enum Slot {
    Mark,
    Object(NodeId),
}

/// Result of an opcode, or the reason to refuse the pickle.
type Step<T> = std::result::Result<T, String>;

fn refuse<T>(what: impl Into<String>) -> Step<T> {
    Err(what.into())
}

/// Runs the pickle of `archive`; returns all objects and the root. Does not read storages.
pub(super) fn run(path: &Path, pickle: &[u8], archive: &Archive) -> Result<(Arena, NodeId)> {
    let mut machine = Machine {
        pickle,
        at: 0,
        arena: Arena::default(),
        stack: Vec::new(),
        memo: HashMap::new(),
        storages: Storages::new(),
        tensors: 0,
        archive,
    };
    loop {
        let began = machine.at;
        match machine.step() {
            Ok(None) => {}
            Ok(Some(root)) => return Ok((machine.arena, root)),
            Err(what) => {
                return Err(Error::data(format!(
                    "{}: data.pkl at byte {began} of {}: {what}",
                    path.display(),
                    pickle.len()
                )));
            }
        }
    }
}

struct Machine<'a> {
    pickle: &'a [u8],
    at: usize,
    arena: Arena,
    stack: Vec<Slot>,
    memo: HashMap<u32, NodeId>,
    storages: Storages,
    tensors: usize,
    archive: &'a Archive,
}

impl<'a> Machine<'a> {
    /// Runs one opcode; returns the root object after the last one.
    fn step(&mut self) -> Step<Option<NodeId>> {
        let [op] = self.take::<1>()?;
        match op {
            0x80 => {
                let [protocol] = self.take::<1>()?;
                if !(2..=5).contains(&protocol) {
                    return refuse(format!("it is of protocol {protocol}; expected 2"));
                }
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                let global = build::global(module, name)?;
                self.push(Node::Global(global))?;
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
            b'(' => self.stack.push(Slot::Mark),
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
                let node = build::storage(&self.arena, id, self.archive, &mut self.storages)?;
                self.push(node)?;
            }
            b'R' => {
                let args = self.pop()?;
                let function = self.pop()?;
                match build::call(&self.arena, function, args)? {
                    Called::New(node) => {
                        self.tensors += usize::from(matches!(node, Node::Tensor(_)));
                        if self.tensors > MAX_TENSORS {
                            return refuse(format!("it has more than {MAX_TENSORS} tensors"));
                        }
                        self.push(node)?;
                    }
                    Called::Same(id) => self.stack.push(Slot::Object(id)),
                }
            }
            b'b' => self.set_attributes()?,
            b'.' => return self.finish().map(Some),
            other => {
                return refuse(format!(
                    "opcode {} is not one that torch.save writes",
                    name_of(other)
                ));
            }
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
                "it ends early: {len} bytes are needed, {} are left",
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
            return refuse(format!("a name has no end within {MAX_NAME_BYTES} bytes"));
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

    fn push(&mut self, node: Node) -> Step<()> {
        if self.arena.nodes.len() >= MAX_NODES {
            return refuse(format!("it has more than {MAX_NODES} objects"));
        }
        self.stack
            .push(Slot::Object(self.arena.nodes.len() as NodeId));
        self.arena.nodes.push(node);
        Ok(())
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
        if self.memo.len() >= MAX_NODES {
            return refuse(format!("its memo has more than {MAX_NODES} objects"));
        }
        self.memo.insert(key, top);
        Ok(())
    }

    fn get(&mut self, key: u32) -> Step<()> {
        match self.memo.get(&key) {
            Some(id) => {
                self.stack.push(Slot::Object(*id));
                Ok(())
            }
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

    /// `BUILD`: the `_metadata` of a module's state dict (versions of its layers), which is
    /// ignored.
    fn set_attributes(&mut self) -> Step<()> {
        let state = self.pop()?;
        let object = self.top()?;
        let nodes = &self.arena.nodes;
        match (&nodes[object as usize], &nodes[state as usize]) {
            (Node::Dict(dict), Node::Dict(_)) if dict.ordered => Ok(()),
            (object, state) => refuse(format!(
                "it sets attributes of {} from {}; expected an OrderedDict and a dict",
                object.kind(),
                state.kind()
            )),
        }
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
