//! Sizes, rates and times as people write them: `25MiB`, `10gbit`, `0.1ms`.

use std::str::FromStr;

/// Bytes: `4`, `1KiB`, `25MiB`, `44.7MB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub usize);

/// Larger buffers than this are a typing error.
const MAX_BYTES: f64 = (1u64 << 36) as f64;

/// Bytes a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate(pub f64);

/// Seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Delay(pub f64);

/// A time of `us` microseconds.
pub fn time(us: f64) -> String {
    match us {
        us if us < 1000.0 => format!("{us:.1} µs"),
        us => format!("{:.2} ms", us / 1000.0),
    }
}

/// The number in front, and the unit behind it in lower case.
fn split(text: &str) -> Option<(f64, String)> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().ok()?;
    let unit = unit.trim().to_ascii_lowercase();
    number.is_finite().then_some((number, unit))
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<ByteSize, String> {
        let wrong = || format!("\"{text}\" is not a size; examples: 4, 1KiB, 25MiB, 44.7MB");
        let (number, unit) = split(text).ok_or_else(wrong)?;
        let factor = match unit.as_str() {
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
        let bytes = (number * factor).round();
        if bytes > MAX_BYTES {
            return Err(format!("{text} is above 64 GiB"));
        }
        Ok(ByteSize(bytes as usize))
    }
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Rate, String> {
        let wrong = || format!("\"{text}\" is not a rate; examples: 10gbit, 800mbit, 1.25GB");
        let (number, unit) = split(text).ok_or_else(wrong)?;
        let bytes = match unit.trim_end_matches("/s") {
            "gbit" => 1e9 / 8.0,
            "mbit" => 1e6 / 8.0,
            "kbit" => 1e3 / 8.0,
            "gb" => 1e9,
            "mb" => 1e6,
            _ => return Err(wrong()),
        };
        if number * bytes < 1.0 {
            return Err(format!("the rate {text} is below a byte a second"));
        }
        Ok(Rate(number * bytes))
    }
}

impl FromStr for Delay {
    type Err = String;

    fn from_str(text: &str) -> Result<Delay, String> {
        let wrong = || format!("\"{text}\" is not a time; examples: 30us, 0.1ms, 1ms");
        let (number, unit) = split(text).ok_or_else(wrong)?;
        let seconds = match unit.as_str() {
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            _ => return Err(wrong()),
        };
        Ok(Delay(number * seconds))
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

    #[test]
    fn rates_and_delays_are_read() {
        assert_eq!("10gbit".parse(), Ok(Rate(1.25e9)));
        assert_eq!("800 Mbit/s".parse(), Ok(Rate(1e8)));
        assert_eq!("1.5GB/s".parse(), Ok(Rate(1.5e9)));
        assert_eq!("0.5ms".parse(), Ok(Delay(0.5e-3)));
        assert_eq!("0s".parse(), Ok(Delay(0.0)));
        for text in ["", "10", "gbit", "0gbit", "-1gbit", "1e9mbit", "1tbit"] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
        for text in ["", "1", "ms", "-1ms", "1h"] {
            assert!(text.parse::<Delay>().is_err(), "{text}");
        }
    }
}
