//! The inputs or outputs of a function, from the struct's `Deserialize`.

use std::fmt;

use serde::de::value::{MapDeserializer, StrDeserializer};
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess,
    Visitor,
};

use crate::spec::Type;

/// The names serde gives to [`crate::File`] and [`crate::Folder`].
pub(crate) const FILE: &str = "phalanx_flow::File";
pub(crate) const FOLDER: &str = "phalanx_flow::Folder";

/// The fields of `T`, a struct, by deserializing one with zeros and empty texts.
///
/// # Errors
///
/// A sentence about `T`.
pub(crate) fn fields_of<T: DeserializeOwned>() -> Result<Vec<(&'static str, Type)>, String> {
    let mut shape = Shape::default();
    match T::deserialize(Probe(&mut shape)) {
        Ok(_) if shape.is_struct => Ok(shape.fields),
        // `()` has no inputs or outputs.
        Ok(_) if shape.kind.is_none() => Ok(Vec::new()),
        Ok(_) => Err("is not a struct with named fields".to_owned()),
        Err(Refused(why)) => Err(format!("cannot be examined: {why}")),
    }
}

#[derive(Default)]
struct Shape {
    kind: Option<Type>,
    is_struct: bool,
    fields: Vec<(&'static str, Type)>,
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refused(String);

impl de::Error for Refused {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Refused(message.to_string())
    }
}

/// Gives every visitor a value of the type that it asks for, and notes that type.
struct Probe<'a>(&'a mut Shape);

macro_rules! scalars {
    ($($method:ident $visit:ident $value:expr, $kind:expr;)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
            self.0.kind = Some($kind);
            visitor.$visit($value)
        }
    )*};
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Refused;

    scalars! {
        deserialize_bool visit_bool false, Type::Bool;
        deserialize_i8 visit_i8 0, Type::Int;
        deserialize_i16 visit_i16 0, Type::Int;
        deserialize_i32 visit_i32 0, Type::Int;
        deserialize_i64 visit_i64 0, Type::Int;
        deserialize_u8 visit_u8 0, Type::Int;
        deserialize_u16 visit_u16 0, Type::Int;
        deserialize_u32 visit_u32 0, Type::Int;
        deserialize_u64 visit_u64 0, Type::Int;
        deserialize_f32 visit_f32 0.0, Type::Float;
        deserialize_f64 visit_f64 0.0, Type::Float;
        deserialize_char visit_char 'a', Type::String;
        deserialize_str visit_str "", Type::String;
        deserialize_string visit_str "", Type::String;
        deserialize_identifier visit_str "", Type::String;
        deserialize_bytes visit_bytes &[], Type::Json;
        deserialize_byte_buf visit_bytes &[], Type::Json;
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.0.kind = Some(Type::Json);
        visitor.visit_unit()
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.0.kind = Some(Type::Json);
        visitor.visit_none()
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        visitor.visit_unit()
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Refused> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Refused> {
        let mut inner = Shape::default();
        let value = visitor.visit_newtype_struct(Probe(&mut inner))?;
        self.0.kind = match name {
            FILE => Some(Type::File),
            FOLDER => Some(Type::Folder),
            _ => inner.kind,
        };
        Ok(value)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        let mut item = Shape::default();
        let value = visitor.visit_seq(Items {
            shape: &mut item,
            left: 1,
        })?;
        let scalar = item.kind.and_then(Type::scalar);
        self.0.kind = Some(scalar.map_or(Type::Json, Type::List));
        Ok(value)
    }

    fn deserialize_tuple<V: Visitor<'de>>(
        self,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, Refused> {
        self.0.kind = Some(Type::Json);
        visitor.visit_seq(Items {
            shape: &mut Shape::default(),
            left: len,
        })
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, Refused> {
        self.deserialize_tuple(len, visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.0.kind = Some(Type::Json);
        let none = std::iter::empty::<(&str, &str)>();
        visitor.visit_map(MapDeserializer::new(none))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Refused> {
        self.0.kind = Some(Type::Json);
        self.0.is_struct = true;
        visitor.visit_map(Fields {
            shape: self.0,
            left: fields,
        })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Refused> {
        self.0.kind = Some(Type::Json);
        let first = variants
            .first()
            .ok_or_else(|| Refused(format!("{name} has no variant")))?;
        let first: StrDeserializer<'_, Refused> = (*first).into_deserializer();
        visitor.visit_enum(first)
    }
}

struct Items<'a> {
    shape: &'a mut Shape,
    left: usize,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = Refused;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Refused> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        *self.shape = Shape::default();
        seed.deserialize(Probe(self.shape)).map(Some)
    }
}

struct Fields<'a> {
    shape: &'a mut Shape,
    left: &'static [&'static str],
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Refused;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Refused> {
        match self.left.first() {
            Some(name) => {
                let name: StrDeserializer<'_, Refused> = (*name).into_deserializer();
                seed.deserialize(name).map(Some)
            }
            None => Ok(None),
        }
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, Refused> {
        let mut field = Shape::default();
        let value = seed.deserialize(Probe(&mut field))?;
        if let Some((name, rest)) = self.left.split_first() {
            self.shape
                .fields
                .push((name, field.kind.unwrap_or(Type::Json)));
            self.left = rest;
        }
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[test]
    fn fields_have_the_types_of_the_struct() {
        #[derive(Deserialize)]
        #[expect(dead_code, reason = "only its types matter")]
        struct Inner {
            a: u8,
        }
        #[derive(Deserialize)]
        enum Kind {
            Small,
            Large,
        }
        #[derive(Deserialize)]
        #[expect(dead_code, reason = "likewise")]
        struct All {
            epochs: usize,
            rate: f32,
            name: String,
            #[serde(rename = "flag")]
            other: bool,
            losses: Vec<f64>,
            pairs: Vec<(i32, i32)>,
            inner: Inner,
            kind: Kind,
            maybe: Option<i64>,
            model: crate::File,
            data: crate::Folder,
        }
        let fields = fields_of::<All>().unwrap();
        let fields: Vec<String> = fields.iter().map(|(n, k)| format!("{n} {k}")).collect();
        let want = "epochs int,rate float,name string,flag bool,losses list[float],pairs json,inner json,kind json,maybe json,model file,data folder";
        assert_eq!(fields.join(","), want);
        assert_eq!(fields_of::<()>(), Ok(Vec::new()));
        assert!(fields_of::<Vec<i32>>().is_err());
    }
}
