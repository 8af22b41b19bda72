//! Formatting of numbers, and escaping of text from files and peers.

use std::borrow::Cow;

/// 9000112 as `9,000,112`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Numbers from 1e7 up and below 1e-4 are written as `1e20`.
fn is_plain(value: f64) -> bool {
    value == 0.0 || (1e-4..1e7).contains(&value.abs())
}

/// A number with the shortest digits that give it again: `0.05`, `1e20`.
pub fn number(value: f64) -> String {
    match is_plain(value) {
        true => value.to_string(),
        false => format!("{value:e}"),
    }
}

/// A measured number, in four decimals: `0.0405`, `1.235e20`.
pub fn rounded(value: f64) -> String {
    match is_plain(value) {
        true => format!("{value:.4}"),
        false => format!("{value:.3e}"),
    }
}

/// Escapes `text` for a terminal: control characters, and characters that are invisible or
/// change the writing direction, become `\u{1b}`. Newlines and tabs stay.
///
/// Names in files, and names of files, could otherwise move the cursor or imitate other
/// output.
pub fn visible(text: &str) -> Cow<'_, str> {
    escaped(text, is_hidden, |c, out| out.extend(c.escape_unicode()))
}

/// As [`visible`], for a name within a line: newlines and tabs are escaped too.
pub fn one_line(text: &str) -> Cow<'_, str> {
    let hidden = |c| is_hidden(c) || c == '\n' || c == '\t';
    escaped(text, hidden, |c, out| out.extend(c.escape_default()))
}

/// As [`visible`], for JSON (`\u001b`), whose meaning does not change.
pub fn visible_json(text: &str) -> Cow<'_, str> {
    escaped(text, is_hidden, |c, out| {
        let units = &mut [0; 2];
        for unit in c.encode_utf16(units) {
            out.push_str(&format!("\\u{unit:04x}"));
        }
    })
}

fn escaped(
    text: &str,
    hidden: impl Fn(char) -> bool,
    escape: impl Fn(char, &mut String),
) -> Cow<'_, str> {
    if !text.contains(&hidden) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match hidden(c) {
            true => escape(c, &mut out),
            false => out.push(c),
        }
    }
    out.into()
}

/// Control characters except newline and tab, Unicode's format characters (category Cf),
/// and line and paragraph separators.
fn is_hidden(c: char) -> bool {
    matches!(c,
        '\0'..='\u{8}' | '\u{b}'..='\u{1f}' | '\u{7f}'..='\u{9f}'
        | '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{180e}'
        | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Whether `name` matches `pattern`, in which `*` stands for any characters, also none, and `?` for one.
pub fn matches(pattern: &str, name: &str) -> bool {
    let [pattern, name] = [pattern, name].map(|text| text.chars().collect::<Vec<char>>());
    // The last star, and how far it reaches.
    let (mut at, mut next, mut star) = (0, 0, None);
    while next < name.len() {
        match (pattern.get(at), star) {
            (Some('*'), _) => {
                star = Some((at, next));
                at += 1;
            }
            (Some(c), _) if *c == '?' || *c == name[next] => (at, next) = (at + 1, next + 1),
            (_, Some((from, end))) => {
                star = Some((from, end + 1));
                (at, next) = (from + 1, end + 1);
            }
            (_, None) => return false,
        }
    }
    pattern[at..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_steer_a_terminal_is_shown_and_not_done() {
        let same = "Größe é e\u{301} × … 重み שלום 👍🏽\n  a\tb \\ \"";
        assert!(matches!(visible(same), Cow::Borrowed(text) if text == same));
        for (text, shown) in [
            ("a\x1b[2Jb", "a\\u{1b}[2Jb"),
            ("\x07\r\0\x7f", "\\u{7}\\u{d}\\u{0}\\u{7f}"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("gpj.\u{202e}exe\u{2066}", "gpj.\\u{202e}exe\\u{2066}"),
            ("\u{200b}\u{feff}\u{e0041}", "\\u{200b}\\u{feff}\\u{e0041}"),
        ] {
            assert_eq!(visible(text), shown);
            assert_eq!(visible(shown), shown);
            let json = serde_json::to_string(text).unwrap();
            let safe = visible_json(&json);
            assert!(!safe.contains(is_hidden), "{safe}");
            assert_eq!(serde_json::from_str::<String>(&safe).unwrap(), text);
        }
        assert_eq!(one_line("a\nerror: b"), "a\\nerror: b");
    }

    #[test]
    fn large_and_small_numbers_have_exponents() {
        for (value, exact, short) in [
            (0.0, "0", "0.0000"),
            (0.05, "0.05", "0.0500"),
            (-3.0, "-3", "-3.0000"),
            (1e-4, "0.0001", "0.0001"),
            (2.5e-5, "2.5e-5", "2.500e-5"),
            (9_999_999.0, "9999999", "9999999.0000"),
            (-1e7, "-1e7", "-1.000e7"),
            (1e20, "1e20", "1.000e20"),
            (f64::NAN, "NaN", "NaN"),
            (f64::INFINITY, "inf", "inf"),
        ] {
            assert_eq!((&*number(value), &*rounded(value)), (exact, short));
        }
    }

    #[test]
    fn thousands_are_separated() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1000), "1,000");
        assert_eq!(grouped(47_040_016), "47,040,016");
    }
}
