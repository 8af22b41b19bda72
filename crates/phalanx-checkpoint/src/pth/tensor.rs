//! Data types, storages, and tensors as views of storages.

use std::fmt;
use std::sync::{Arc, OnceLock};

use half::{bf16, f16};

/// Maximum number of dimensions. PyTorch's kernels have 64, models have up to 6.
pub(super) const MAX_DIMS: usize = 16;

/// A tensor with strides of 0 may have more elements than its storage, up to this number.
pub(super) const MAX_EXPANDED: usize = 1 << 16;

/// Data type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "their names say it")]
pub enum DType {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
}

/// Type, its storage class in module `torch`, bytes, PyTorch's name.
const DTYPES: [(DType, &str, usize, &str); 10] = [
    (DType::F64, "DoubleStorage", 8, "float64"),
    (DType::F32, "FloatStorage", 4, "float32"),
    (DType::F16, "HalfStorage", 2, "float16"),
    (DType::BF16, "BFloat16Storage", 2, "bfloat16"),
    (DType::I64, "LongStorage", 8, "int64"),
    (DType::I32, "IntStorage", 4, "int32"),
    (DType::I16, "ShortStorage", 2, "int16"),
    (DType::I8, "CharStorage", 1, "int8"),
    (DType::U8, "ByteStorage", 1, "uint8"),
    (DType::Bool, "BoolStorage", 1, "bool"),
];

impl DType {
    fn entry(self) -> &'static (DType, &'static str, usize, &'static str) {
        // In the order of the enum; a test checks that.
        &DTYPES[self as usize]
    }

    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        self.entry().2
    }

    /// Whether it is a floating-point type.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
    }

    /// Its name in safetensors.
    pub(crate) fn safetensors_name(self) -> &'static str {
        match self {
            DType::F64 => "F64",
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::I64 => "I64",
            DType::I32 => "I32",
            DType::I16 => "I16",
            DType::I8 => "I8",
            DType::U8 => "U8",
            DType::Bool => "BOOL",
        }
    }

    pub(super) fn storage_class(self) -> &'static str {
        self.entry().1
    }

    pub(super) fn from_storage_class(class: &str) -> Option<DType> {
        DTYPES.iter().find(|d| d.1 == class).map(|d| d.0)
    }

    /// Whether `bytes` (little-endian) are numbers none of which is infinite or NaN.
    pub(crate) fn is_finite(self, bytes: &[u8]) -> bool {
        match self {
            // Larger ones than an f32 holds are finite, too.
            DType::F64 => (bytes.as_chunks().0.iter()).all(|b| f64::from_le_bytes(*b).is_finite()),
            _ => !self.is_float() || self.to_f32(bytes).iter().all(|v| v.is_finite()),
        }
    }

    /// Converts `bytes` (little-endian) to float32, rounding to nearest even.
    pub fn to_f32(self, bytes: &[u8]) -> Vec<f32> {
        fn each<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f32) -> Vec<f32> {
            bytes.as_chunks().0.iter().map(|b| number(*b)).collect()
        }
        match self {
            DType::F64 => each(bytes, |b| f64::from_le_bytes(b) as f32),
            DType::F32 => each(bytes, f32::from_le_bytes),
            DType::F16 => each(bytes, |b| f16::from_le_bytes(b).to_f32()),
            DType::BF16 => each(bytes, |b| bf16::from_le_bytes(b).to_f32()),
            DType::I64 => each(bytes, |b| i64::from_le_bytes(b) as f32),
            DType::I32 => each(bytes, |b| i32::from_le_bytes(b) as f32),
            DType::I16 => each(bytes, |b| f32::from(i16::from_le_bytes(b))),
            DType::I8 => each(bytes, |b| f32::from(i8::from_le_bytes(b))),
            DType::U8 => each(bytes, |[b]| f32::from(b)),
            DType::Bool => each(bytes, |[b]| f32::from(u8::from(b != 0))),
        }
    }
}

/// PyTorch's name: `float32`.
impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.entry().3)
    }
}

/// The memory of one or several tensors.
#[derive(Debug)]
pub(super) struct Storage {
    pub dtype: DType,
    /// Its entry in the archive.
    pub name: String,
    /// A multiple of the element size.
    pub size_bytes: usize,
    /// Little-endian; set when they have been read.
    pub bytes: OnceLock<Vec<u8>>,
}

impl Storage {
    fn len(&self) -> usize {
        self.size_bytes / self.dtype.size_bytes()
    }
}

/// A tensor of a file: a view of a storage, which several tensors may share.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub(super) storage: Arc<Storage>,
    /// In elements, as are the strides.
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
    len: usize,
}

impl Tensor {
    /// A view of `storage`, or the reason why it is invalid.
    pub(super) fn view(
        storage: Arc<Storage>,
        offset: usize,
        shape: Vec<usize>,
        strides: Vec<usize>,
    ) -> Result<Tensor, String> {
        if shape.len() != strides.len() {
            return Err(format!(
                "a tensor has shape {shape:?} and strides {strides:?} of different length"
            ));
        }
        if shape.len() > MAX_DIMS {
            return Err(format!(
                "a tensor has {} dimensions; the limit is {MAX_DIMS}",
                shape.len()
            ));
        }
        let available = storage.len();
        let len = count(&shape);
        // The last element; a tensor without elements uses none.
        let last = match len {
            Some(0) => Some(offset),
            Some(_) => shape.iter().zip(&strides).try_fold(offset, |at, (d, s)| {
                (d - 1).checked_mul(*s)?.checked_add(at)
            }),
            None => None,
        };
        let (Some(len), Some(last)) = (len, last) else {
            return Err(format!(
                "a tensor of shape {shape:?} and strides {strides:?} has more elements than can be counted"
            ));
        };
        if offset > available || (len > 0 && last >= available) {
            return Err(format!(
                "a tensor of shape {shape:?}, strides {strides:?} and offset {offset} reaches outside its storage \
                 of {available} elements"
            ));
        }
        if len > available && len > MAX_EXPANDED {
            return Err(format!(
                "a tensor of shape {shape:?} repeats a storage of {available} elements with stride 0; \
                 at most {MAX_EXPANDED} elements are believed"
            ));
        }
        Ok(Tensor {
            storage,
            offset,
            shape,
            strides,
            len,
        })
    }

    /// Data type.
    pub fn dtype(&self) -> DType {
        self.storage.dtype
    }

    /// Shape, as in PyTorch; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Offset of the first element in the storage.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Its values in row-major order, little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.to_bytes_of(self.storage.bytes.get().map_or(&[][..], Vec::as_slice))
    }

    /// The entry of its storage in the archive.
    pub(crate) fn storage_name(&self) -> &str {
        &self.storage.name
    }

    /// As [`to_bytes`](Self::to_bytes), where `bytes` are those of its storage.
    pub(super) fn to_bytes_of(&self, bytes: &[u8]) -> Vec<u8> {
        let size = self.dtype().size_bytes();
        if self.strides == row_major(&self.shape) {
            return bytes[self.offset * size..(self.offset + self.len) * size].to_vec();
        }
        let mut out = Vec::with_capacity(self.len * size);
        let mut index = vec![0; self.shape.len()];
        let mut at = self.offset;
        for _ in 0..self.len {
            out.extend_from_slice(&bytes[at * size..(at + 1) * size]);
            for d in (0..index.len()).rev() {
                index[d] += 1;
                at += self.strides[d];
                if index[d] < self.shape[d] {
                    break;
                }
                at -= self.strides[d] * self.shape[d];
                index[d] = 0;
            }
        }
        out
    }

    /// Its values in row-major order as float32.
    pub fn to_f32(&self) -> Vec<f32> {
        self.dtype().to_f32(&self.to_bytes())
    }
}

/// Number of elements of a shape; 0 if one dimension is 0.
pub(super) fn count(shape: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d))
}

/// Strides of a contiguous tensor, as PyTorch gives them.
pub(super) fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut next = 1usize;
    let mut strides = vec![0; shape.len()];
    for (stride, d) in strides.iter_mut().zip(shape).rev() {
        *stride = next;
        // With a dimension of 0 the others may have any size.
        next = next.saturating_mul((*d).max(1));
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(n: u8) -> Arc<Storage> {
        let bytes: Vec<u8> = (0..n).flat_map(|v| f32::from(v).to_le_bytes()).collect();
        Arc::new(Storage {
            dtype: DType::F32,
            name: String::new(),
            size_bytes: bytes.len(),
            bytes: bytes.into(),
        })
    }

    #[test]
    fn the_table_is_in_the_order_of_the_types() {
        for (i, entry) in DTYPES.iter().enumerate() {
            assert_eq!(entry.0 as usize, i);
            assert_eq!(DType::from_storage_class(entry.1), Some(entry.0));
        }
    }

    #[test]
    fn views_follow_their_strides() {
        let view = |offset, shape: &[usize], strides: &[usize]| {
            let view = Tensor::view(storage(12), offset, shape.to_vec(), strides.to_vec());
            view.map(|t| t.to_f32())
        };
        assert_eq!(view(1, &[4], &[2]).unwrap(), [1.0, 3.0, 5.0, 7.0]);
        assert_eq!(
            view(0, &[2, 3], &[1, 4]).unwrap(),
            [0.0, 4.0, 8.0, 1.0, 5.0, 9.0]
        );
        assert_eq!(view(5, &[2, 2], &[0, 1]).unwrap(), [5.0, 6.0, 5.0, 6.0]);
        assert_eq!(view(11, &[], &[]).unwrap(), [11.0]);
        assert!(view(12, &[0, usize::MAX], &[7, 7]).unwrap().is_empty());
    }

    #[test]
    fn geometry_that_lies_is_refused() {
        let why = |offset, shape: &[usize], strides: &[usize]| {
            Tensor::view(storage(12), offset, shape.to_vec(), strides.to_vec()).unwrap_err()
        };
        for (offset, shape, strides) in [
            (0, &[13][..], &[1][..]),
            (12, &[], &[]),
            (13, &[0], &[1]),
            (0, &[2, 7], &[6, 1]),
        ] {
            assert!(why(offset, shape, strides).contains("outside its storage"));
        }
        assert!(why(0, &[2], &[usize::MAX]).contains("outside its storage"));
        assert!(why(usize::MAX, &[2], &[1]).contains("can be counted"));
        assert!(why(1, &[2], &[usize::MAX]).contains("can be counted"));
        assert!(why(0, &[1 << 40, 1 << 40], &[0, 0]).contains("can be counted"));
        assert!(why(0, &[MAX_EXPANDED + 1], &[0]).contains("stride 0"));
        assert!(why(0, &[1; MAX_DIMS + 1], &[1; MAX_DIMS + 1]).contains("dimensions"));
        assert!(why(0, &[1], &[]).contains("different length"));
    }
}
