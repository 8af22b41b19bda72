//! Formats numbers and choices for output.

use std::time::Duration;

use crate::text::grouped;
pub use crate::text::{number, rounded};

/// A number as Python's `repr` writes a float: shortest digits that round-trip, in
/// scientific form below 1e-4 and from 1e16 on, exponents of at least two digits.
///
/// `float32` values are widened first, as `tensor.item()` does, so
/// `0.00025336414` prints as `0.00025336415274068713`.
pub fn python_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.into();
    }
    // Rust's `{:e}` has the same shortest digits, only laid out otherwise.
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        if plain.contains('.') {
            plain
        } else {
            format!("{plain}.0")
        }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.abs())
    }
}

/// 1234567 as `1,234,567`.
pub fn thousands(n: usize) -> String {
    grouped(n as u64)
}

/// `on` or `off`.
pub fn on_or_off(flag: bool) -> &'static str {
    if flag { "on" } else { "off" }
}

/// `1 rank`, `2 ranks`.
pub fn plural(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// `a`, `a and b`, `a, b and c`.
pub fn join(parts: &[String]) -> String {
    match parts.split_last() {
        None => String::new(),
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
    }
}

/// Ascending ranks in runs: `0`, `2-4`, `7`.
pub fn rank_runs(ranks: &[usize]) -> Vec<String> {
    let runs = ranks.chunk_by(|a, b| a + 1 == *b);
    let texts = runs.flat_map(|run| match run {
        [first, _, .., last] => vec![format!("{first}-{last}")],
        few => few.iter().map(usize::to_string).collect(),
    });
    texts.collect()
}

/// `rank 0`, `ranks 0 and 2`, `ranks 0-6 and 9`.
pub fn rank_list(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        _ => format!("ranks {}", join(&rank_runs(ranks))),
    }
}

/// Bytes in binary units with at most one decimal: `73.5 KiB`, `4 MiB`.
pub fn bytes(n: usize) -> String {
    const UNITS: [&str; 4] = ["B", "KiB", "MiB", "GiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let text = format!("{value:.1}");
    format!(
        "{} {}",
        text.strip_suffix(".0").unwrap_or(&text),
        UNITS[unit]
    )
}

/// `900 µs`, `1.2 ms`, `2.3 s`, `58 s`, `3 min 20 s`.
pub fn duration(time: Duration) -> String {
    let (value, unit) = match time.as_secs_f64() {
        s if s < 1e-3 => (s * 1e6, "µs"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s if s < 10.0 => (s, "s"),
        s if s < 120.0 => return format!("{} s", time.as_secs()),
        _ => return format!("{} min {} s", time.as_secs() / 60, time.as_secs() % 60),
    };
    let text = format!("{value:.1}");
    format!("{} {unit}", text.strip_suffix(".0").unwrap_or(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_ranks() {
        for (ranks, want) in [
            (&[][..], "no rank"),
            (&[3], "rank 3"),
            (&[0, 1], "ranks 0 and 1"),
            (&[0, 2], "ranks 0 and 2"),
            (&[0, 1, 2, 3, 9], "ranks 0-3 and 9"),
            (&[0, 1, 2], "ranks 0-2"),
            (&[0, 2, 4, 5], "ranks 0, 2, 4 and 5"),
        ] {
            assert_eq!(rank_list(ranks), want);
        }
    }

    #[test]
    fn durations() {
        for (us, want) in [
            (0.9, "0.9 µs"),
            (900.0, "900 µs"),
            (1_250.0, "1.2 ms"),
            (200_000.0, "200 ms"),
            (3e6, "3 s"),
            (2.34e6, "2.3 s"),
            (58.9e6, "58 s"),
            (605e6, "10 min 5 s"),
        ] {
            assert_eq!(duration(Duration::from_secs_f64(us / 1e6)), want);
        }
    }

    #[test]
    fn floats_print_as_in_python() {
        // The OneFlow document's own lines (golden test G1).
        let bits = |v: f32| python_repr(f64::from(v));
        assert_eq!(bits(0.000_253_364_15), "0.00025336415274068713");
        assert_eq!(bits(0.004_111_831_5), "0.004111831542104483");
        assert_eq!(bits(4.547_473_5e-12), "4.547473508864641e-12");
        assert_eq!(bits(6.184_564e-11), "6.184563972055912e-11");
        assert_eq!(python_repr(1.0), "1.0");
        assert_eq!(python_repr(0.0001), "0.0001");
        assert_eq!(python_repr(0.00001), "1e-05");
        assert_eq!(python_repr(1e16), "1e+16");
        assert_eq!(python_repr(-2.5e-7), "-2.5e-07");
        assert_eq!(python_repr(123456.0), "123456.0");
        assert_eq!(python_repr(0.0), "0.0");
        assert_eq!(python_repr(f64::NAN), "nan");
    }

    #[test]
    fn units() {
        assert_eq!(thousands(1_199_882), "1,199,882");
        assert_eq!(thousands(999), "999");
        assert_eq!(bytes(75_264), "73.5 KiB");
        assert_eq!(bytes(4 << 20), "4 MiB");
        assert_eq!(bytes(40), "40 B");
        assert_eq!(plural(1, "rank"), "1 rank");
        assert_eq!(plural(2, "rank"), "2 ranks");
    }
}
