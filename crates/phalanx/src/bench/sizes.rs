//! Sizes as people write them: `4`, `1KiB`, `25MiB`, `44.7MB`.

use std::str::FromStr;

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub usize);

/// Larger buffers than this are a typing error.
const MAX_BYTES: f64 = (1u64 << 36) as f64;

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<ByteSize, String> {
        let text = text.trim();
        let digits = text
            .find(|c: char| !(c.is_ascii_digit() || c == '.'))
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let factor = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "k" | "kib" => 1024.0,
            "m" | "mib" => 1024.0 * 1024.0,
            "g" | "gib" => 1024.0 * 1024.0 * 1024.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            other => {
                return Err(format!(
                    "unknown unit \"{other}\"; use B, KiB, MiB, GiB, KB, MB or GB"
                ));
            }
        };
        let number: f64 = number
            .parse()
            .map_err(|_| format!("\"{text}\" is not a size; examples: 4, 1KiB, 25MiB, 44.7MB"))?;
        let bytes = (number * factor).round();
        if bytes > MAX_BYTES {
            return Err(format!("{text} is above 64 GiB"));
        }
        Ok(ByteSize(bytes as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [
            ("4", 4),
            ("1KiB", 1024),
            ("25MiB", 25 << 20),
            ("44.7MB", 44_700_000),
            ("1g", 1 << 30),
            (" 2 k", 2048),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in ["", "KiB", "4x", "1.2.3", "-4", "9999GiB"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }
}
