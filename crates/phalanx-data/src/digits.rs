//! The pixels of MNIST, and of the digits that replace it.

/// Mean of MNIST's training pixels, as PyTorch's example uses it.
const MEAN: f32 = 0.1307;
/// Their standard deviation.
const DEVIATION: f32 = 0.3081;

/// (x / 255 - mean) / deviation in float32, with the rounding of torchvision's `ToTensor`
/// and `Normalize`.
pub fn normalised() -> [f32; 256] {
    std::array::from_fn(|x| (x as f32 / 255.0 - MEAN) / DEVIATION)
}
