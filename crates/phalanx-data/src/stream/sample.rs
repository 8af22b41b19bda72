//! A sample of a stream.

use phalanx_base::text::one_line;
use phalanx_base::{Error, Result};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::content::Content;
#[cfg(feature = "images")]
use crate::folder::Transforms;

/// A sample as it is in its shard: the members of a key of a tar archive, the columns of a row of Parquet, or the fields of a line of JSON.
#[derive(Debug)]
pub struct Sample {
    pub(super) key: String,
    pub(super) shard: String,
    /// Where it begins in the shard: `byte 512`, `row 7`.
    pub(super) at: String,
    pub(super) epoch: u64,
    pub(super) index: u64,
    pub(super) content: Content,
}

impl Sample {
    /// Its name: in a tar archive the path of its members up to the first dot of the last part; else the shard's name, `:`
    /// and the sample's number in it, from 0.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The epoch that it is read for, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Its number in the data set.
    pub fn index(&self) -> u64 {
        self.index
    }

    /// The endings of its members, as `jpg` and `seg.png`, or the names of its columns that are not null, or of its fields.
    pub fn names(&self) -> Vec<&str> {
        match &self.content {
            Content::Members(_, members) => members.iter().map(|(name, _)| &**name).collect(),
            Content::Object(fields) => fields.keys().map(|name| &**name).collect(),
        }
    }

    /// The content of the member with the ending `name`, or the text of the field `name`.
    ///
    /// # Errors
    ///
    /// `Data`, naming shard and sample, when there is none.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let found = match &self.content {
            Content::Members(bytes, members) => {
                let found = members.iter().find(|(known, _)| known == name);
                found.map(|(_, range)| &bytes[range.clone()])
            }
            Content::Object(fields) => match fields.get(name) {
                Some(Value::String(text)) => Some(text.as_bytes()),
                Some(_) => return Err(self.wrong_at(name, "it is not a text")),
                None => None,
            },
        };
        found.ok_or_else(|| {
            self.wrong_at(name, &format!("there is only {}", self.names().join(", ")))
        })
    }

    /// The same as UTF-8 text.
    ///
    /// # Errors
    ///
    /// As [`bytes`](Self::bytes), and when it is not UTF-8.
    pub fn text(&self, name: &str) -> Result<&str> {
        std::str::from_utf8(self.bytes(name)?).map_err(|e| self.wrong_at(name, &e.to_string()))
    }

    /// The member with the ending `name` parsed as JSON, or the field `name`: as a [`serde_json::Value`], a number, a `Vec`, or
    /// a type of one's own that implements `serde::Deserialize`.
    ///
    /// # Errors
    ///
    /// As [`bytes`](Self::bytes), and when it is not JSON of this type.
    pub fn json<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let parsed = match &self.content {
            Content::Object(fields) if fields.contains_key(name) => T::deserialize(&fields[name]),
            _ => serde_json::from_slice(self.bytes(name)?),
        };
        parsed.map_err(|e| self.wrong_at(name, &e.to_string()))
    }

    /// The image in the member with the ending `name`, JPEG or PNG, transformed: its values (height, width, 3). What is drawn at
    /// random depends on `seed`, the epoch and the sample's number only, as in [`ImageFolder`](crate::folder::ImageFolder).
    ///
    /// # Errors
    ///
    /// As [`bytes`](Self::bytes), and when it is no image; `Usage` for impossible transforms.
    #[cfg(feature = "images")]
    pub fn image(&self, name: &str, transforms: &Transforms, seed: u64) -> Result<Vec<f32>> {
        let image = phalanx_image::decode(self.bytes(name)?);
        let image = image.map_err(|what| self.wrong_at(name, &what))?;
        let [height, width] = transforms.size(Some([image.height, image.width]))?;
        let mut out = vec![0.0; height * width * 3];
        transforms.apply(image, seed, [self.epoch, self.index], &mut out)?;
        Ok(out)
    }

    fn wrong_at(&self, name: &str, why: &str) -> Error {
        self.wrong(&format!("{}: {why}", one_line(name)))
    }

    /// An error that names shard, offset and sample.
    pub(super) fn wrong(&self, why: &str) -> Error {
        let (shard, at, key) = (&self.shard, &self.at, one_line(&self.key));
        Error::data(format!("{shard}, at {at}: sample {key}: {}", one_line(why)))
    }
}
