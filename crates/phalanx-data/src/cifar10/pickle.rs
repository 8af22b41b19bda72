//! The Python version: one pickled dictionary per file, with `labels` and `data`.
//!
//! This is not a general unpickler. It accepts the opcodes that Python 2 used for these
//! files (protocol 2) and three names (numpy's `_reconstruct`, `ndarray` and `dtype`);
//! anything else is an error. Nothing is called, looked up or imported. The number and
//! nesting of values are limited. See `docs/design/security.md`.

use std::path::Path;

use super::{Batch, CLASSES, PIXELS};
use phalanx_base::text::grouped;
use phalanx_base::{Error, Result};

/// Maximum number of values; the published files have 20,100.
const MAX_VALUES: usize = 1 << 18;
/// Maximum nesting of containers; the published files have three levels.
const MAX_DEPTH: usize = 6;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Name {
    Reconstruct,
    Array,
    Dtype,
}

#[derive(Debug, Clone)]
enum Value<'a> {
    Mark,
    None,
    Bool(bool),
    Int(i64),
    Bytes(&'a [u8]),
    Name(Name),
    List(Vec<Value<'a>>, usize),
    Tuple(Vec<Value<'a>>, usize),
    Dict(Vec<(&'a [u8], Value<'a>)>),
    /// Whether the type is unsigned bytes.
    Dtype {
        bytes: bool,
    },
    /// Shape and content; empty before its state is set.
    Array {
        shape: Vec<i64>,
        data: &'a [u8],
    },
}

impl Value<'_> {
    fn depth(&self) -> usize {
        match self {
            Value::List(_, depth) | Value::Tuple(_, depth) => *depth,
            Value::Dict(_) => MAX_DEPTH,
            _ => 0,
        }
    }

    fn what(&self) -> &'static str {
        match self {
            Value::Mark => "a mark",
            Value::None => "None",
            Value::Bool(_) => "a truth value",
            Value::Int(_) => "a number",
            Value::Bytes(_) => "a string",
            Value::Name(_) => "a name",
            Value::List(..) => "a list",
            Value::Tuple(..) => "a tuple",
            Value::Dict(_) => "a dictionary",
            Value::Dtype { .. } => "a dtype",
            Value::Array { .. } => "an array",
        }
    }
}

struct Machine<'p, 'a> {
    path: &'p Path,
    bytes: &'a [u8],
    /// Offset of the next byte.
    at: usize,
    /// Offset of the current opcode.
    op_at: usize,
    stack: Vec<Value<'a>>,
    values: usize,
}

/// Parses the bytes of one file.
///
/// # Errors
///
/// `Data`, naming file, offset and what was expected there.
pub(super) fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<Batch<'a>> {
    let mut machine = Machine {
        path,
        bytes,
        at: 0,
        op_at: 0,
        stack: Vec::new(),
        values: 0,
    };
    let entries = machine.run()?;
    batch(path, entries)
}

/// The entries of the dictionary.
fn batch<'a>(path: &Path, entries: Vec<(&'a [u8], Value<'a>)>) -> Result<Batch<'a>> {
    let wrong = |what: String| Error::data(format!("{}: {what}", path.display()));
    let (mut labels, mut planes) = (None, None);
    for (key, value) in entries {
        match (key, value) {
            (b"labels", Value::List(items, _)) => labels = Some(items),
            (b"data", Value::Array { shape, data }) => planes = Some((shape, data)),
            (b"labels" | b"data", other) => {
                return Err(wrong(format!(
                    "entry \"{}\" is {}; expected a list of labels and an array of pixels",
                    String::from_utf8_lossy(key),
                    other.what()
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
    let labels = labels.iter().enumerate().map(|(i, label)| match label {
        Value::Int(label) if (0..CLASSES as i64).contains(label) => Ok(*label as u8),
        Value::Int(label) => Err(wrong(format!("label {i} is {label}; expected 0 to 9"))),
        other => Err(wrong(format!(
            "label {i} is {}; expected 0 to 9",
            other.what()
        ))),
    });
    let labels: Vec<u8> = labels.collect::<Result<_>>()?;
    let expected = [labels.len() as i64, PIXELS as i64];
    if labels.is_empty() || shape != expected || data.len() != labels.len() * PIXELS {
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

impl<'a> Machine<'_, 'a> {
    fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::data(format!(
            "{}: at byte {}: {what}",
            self.path.display(),
            grouped(self.op_at as u64)
        ))
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        if count > left {
            return Err(self.error(format_args!(
                "{} bytes should follow, but the file has {} more; it is truncated",
                grouped(count as u64),
                grouped(left as u64)
            )));
        }
        let taken = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn length(&mut self) -> Result<usize> {
        let value = i32::from_le_bytes(self.number()?);
        usize::try_from(value).map_err(|_| {
            self.error(format_args!(
                "a string of {value} bytes; expected none below 0"
            ))
        })
    }

    /// Text up to the next end of line.
    fn line(&mut self) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        // The longest known name has 35 bytes.
        match rest.iter().take(64).position(|b| *b == b'\n') {
            Some(len) => {
                self.at += len + 1;
                Ok(&rest[..len])
            }
            None => Err(self.error("a name without end; expected one of numpy's")),
        }
    }

    fn push(&mut self, value: Value<'a>) -> Result<()> {
        self.values += 1;
        if self.values > MAX_VALUES {
            return Err(self.error(format_args!(
                "more than {MAX_VALUES} values; expected a batch of CIFAR-10"
            )));
        }
        if value.depth() > MAX_DEPTH {
            return Err(self.error("containers nested too deeply; expected a batch of CIFAR-10"));
        }
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value<'a>> {
        let value = self.stack.pop();
        value.ok_or_else(|| self.error("an operand is missing; the file is not a CIFAR-10 pickle"))
    }

    /// Pops everything above the last mark, and the mark.
    fn pop_marked(&mut self) -> Result<Vec<Value<'a>>> {
        let mark = self.stack.iter().rposition(|v| matches!(v, Value::Mark));
        let mark = mark
            .ok_or_else(|| self.error("no mark before this; the file is not a CIFAR-10 pickle"))?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items)
    }

    fn tuple(&mut self, items: Vec<Value<'a>>) -> Result<()> {
        let depth = depth_of(&items);
        self.push(Value::Tuple(items, depth))
    }

    fn pop_many(&mut self, count: usize) -> Result<Vec<Value<'a>>> {
        let first = self.stack.len().checked_sub(count);
        let first = first.ok_or_else(|| {
            self.error("an operand is missing; the file is not a CIFAR-10 pickle")
        })?;
        Ok(self.stack.split_off(first))
    }

    /// Runs to the end; returns the entries of the dictionary that remains.
    fn run(&mut self) -> Result<Vec<(&'a [u8], Value<'a>)>> {
        if !self.bytes.starts_with(b"\x80\x02") {
            let hint = match self.bytes.first() {
                Some(b'<') => "; it looks like a web page, download the file itself",
                Some(0x1f) => "; it is compressed, give the whole archive instead",
                _ => "",
            };
            let found = match self.bytes {
                [] => "an empty file".to_owned(),
                bytes => hex::encode(&bytes[..bytes.len().min(2)]),
            };
            return Err(self.error(format_args!(
                "expected a pickle of protocol 2 (80 02), found {found}{hint}"
            )));
        }
        self.at = 2;
        loop {
            self.op_at = self.at;
            let op = self.take(1)?[0];
            if op == b'.' {
                break;
            }
            self.instruction(op)?;
        }
        if self.at != self.bytes.len() {
            return Err(self.error(format_args!(
                "{} bytes follow the end of the pickle",
                grouped((self.bytes.len() - self.at) as u64)
            )));
        }
        let last = self.pop()?;
        match last {
            Value::Dict(entries) if self.stack.is_empty() => Ok(entries),
            other => Err(self.error(format_args!(
                "the pickle gives {}; expected one dictionary",
                other.what()
            ))),
        }
    }

    fn instruction(&mut self, op: u8) -> Result<()> {
        match op {
            b'(' => self.push(Value::Mark),
            b'}' => self.push(Value::Dict(Vec::new())),
            b']' => self.push(Value::List(Vec::new(), 1)),
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'K' => {
                let [value] = self.number()?;
                self.push(Value::Int(i64::from(value)))
            }
            b'M' => {
                let value = u16::from_le_bytes(self.number()?);
                self.push(Value::Int(i64::from(value)))
            }
            b'J' => {
                let value = i32::from_le_bytes(self.number()?);
                self.push(Value::Int(i64::from(value)))
            }
            b'U' => {
                let [len] = self.number()?;
                let bytes = self.take(usize::from(len))?;
                self.push(Value::Bytes(bytes))
            }
            b'T' => {
                let len = self.length()?;
                let bytes = self.take(len)?;
                self.push(Value::Bytes(bytes))
            }
            // Memo keys. Nothing in these files refers to them.
            b'q' => self.take(1).map(drop),
            b'r' => self.take(4).map(drop),
            b'c' => self.name(),
            0x85 => {
                let items = self.pop_many(1)?;
                self.tuple(items)
            }
            0x86 => {
                let items = self.pop_many(2)?;
                self.tuple(items)
            }
            0x87 => {
                let items = self.pop_many(3)?;
                self.tuple(items)
            }
            b't' => {
                let items = self.pop_marked()?;
                self.tuple(items)
            }
            b'a' => {
                let items = self.pop_many(1)?;
                self.append(items)
            }
            b'e' => {
                let items = self.pop_marked()?;
                self.append(items)
            }
            b's' => {
                let items = self.pop_many(2)?;
                self.set_items(items)
            }
            b'u' => {
                let items = self.pop_marked()?;
                self.set_items(items)
            }
            b'R' => self.reduce(),
            b'b' => self.build(),
            _ => Err(self.error(format_args!(
                "opcode {op:02x}, which the files of CIFAR-10 do not have"
            ))),
        }
    }

    fn name(&mut self) -> Result<()> {
        let (module, name) = (self.line()?, self.line()?);
        let known = match (module, name) {
            (b"numpy.core.multiarray", b"_reconstruct") => Name::Reconstruct,
            (b"numpy", b"ndarray") => Name::Array,
            (b"numpy", b"dtype") => Name::Dtype,
            _ => {
                return Err(self.error(format_args!(
                    "the name {}.{}; expected one of numpy's three",
                    String::from_utf8_lossy(module).escape_debug(),
                    String::from_utf8_lossy(name).escape_debug()
                )));
            }
        };
        self.push(Value::Name(known))
    }

    fn append(&mut self, items: Vec<Value<'a>>) -> Result<()> {
        let below = depth_of(&items);
        match self.stack.last_mut() {
            Some(Value::List(list, depth)) if below <= MAX_DEPTH => {
                list.extend(items);
                *depth = below.max(*depth);
                Ok(())
            }
            _ => Err(self
                .error("items without a list to put them in; the file is not a CIFAR-10 pickle")),
        }
    }

    fn set_items(&mut self, items: Vec<Value<'a>>) -> Result<()> {
        let mut entries = Vec::with_capacity(items.len() / 2);
        let mut items = items.into_iter();
        while let Some(key) = items.next() {
            match (key, items.next()) {
                // Otherwise dictionaries could nest without limit.
                (Value::Bytes(key), Some(value)) if !matches!(value, Value::Dict(_)) => {
                    entries.push((key, value));
                }
                _ => {
                    return Err(self.error("entries that are not pairs of a name and a value"));
                }
            }
        }
        match self.stack.last_mut() {
            Some(Value::Dict(dict)) => {
                dict.extend(entries);
                Ok(())
            }
            _ => Err(self.error("entries without a dictionary; the file is not a CIFAR-10 pickle")),
        }
    }

    fn reduce(&mut self) -> Result<()> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let Value::Tuple(arguments, _) = arguments else {
            return Err(self.error(format_args!(
                "{} as arguments; expected a tuple",
                arguments.what()
            )));
        };
        let made = match (function, arguments.as_slice()) {
            (
                Value::Name(Name::Reconstruct),
                [Value::Name(Name::Array), Value::Tuple(..), Value::Bytes(_)],
            ) => Value::Array {
                shape: Vec::new(),
                data: &[],
            },
            (Value::Name(Name::Dtype), [Value::Bytes(kind), ..]) => Value::Dtype {
                bytes: *kind == b"u1",
            },
            (other, _) => {
                return Err(self.error(format_args!(
                    "{} applied to {} arguments; expected numpy's array or dtype",
                    other.what(),
                    arguments.len()
                )));
            }
        };
        self.push(made)
    }

    fn build(&mut self) -> Result<()> {
        let state = self.pop()?;
        let Value::Tuple(state, _) = state else {
            return Err(self.error(format_args!(
                "{} as a state; expected a tuple",
                state.what()
            )));
        };
        match self.pop()? {
            // Byte order and alignment, which bytes do not have.
            dtype @ Value::Dtype { .. } => self.push(dtype),
            Value::Array { .. } => {
                let [
                    Value::Int(_),
                    Value::Tuple(shape, _),
                    Value::Dtype { bytes },
                    Value::Bool(fortran),
                    Value::Bytes(data),
                ] = state.as_slice()
                else {
                    return Err(self.error("an array's state of another form; expected version, shape, dtype, order, bytes"));
                };
                if !bytes || *fortran {
                    return Err(self.error(
                        "an array of another type or order; expected rows of unsigned bytes (u1)",
                    ));
                }
                let shape = shape.iter().map(|n| match n {
                    Value::Int(n) => Ok(*n),
                    other => Err(self.error(format_args!("{} in an array's shape", other.what()))),
                });
                let shape = shape.collect::<Result<_>>()?;
                self.push(Value::Array { shape, data })
            }
            other => Err(self.error(format_args!(
                "a state for {}; expected an array or dtype",
                other.what()
            ))),
        }
    }
}

/// One more than the depth of the deepest of `items`.
fn depth_of(items: &[Value<'_>]) -> usize {
    1 + items.iter().map(Value::depth).max().unwrap_or(0)
}
