//! Checks that all ranks train the same model with the same settings.
//!
//! Each rank writes names, shapes and options as lines of text; the ranks compare
//! hashes of them. When they differ, the texts of rank 0 and of the first rank that
//! differs are broadcast, so that every rank can name the first difference.

use phalanx_comm::ProcessGroup;
use sha2::{Digest, Sha256};

use crate::bucket::BucketCaps;
use crate::error::{Error, Result};
use crate::parameters::Parameters;

/// Longest text that is compared line by line (8 MiB is about 100,000
/// parameters); a peer's length is checked against it before it is used.
const MAX_TEXT_BYTES: i64 = 8 << 20;

/// The facts that must be equal on all ranks, one per line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fingerprint {
    lines: Vec<String>,
}

impl Fingerprint {
    /// No facts yet.
    pub fn new() -> Fingerprint {
        Fingerprint::default()
    }

    /// What every wrapper compares first: the build, the world, the facts that the user set, since they explain the others,
    /// and `caps`.
    pub(crate) fn of_wrapper(
        group: &ProcessGroup,
        must_agree: &[String],
        caps: Option<BucketCaps>,
    ) -> Fingerprint {
        let mut print = Fingerprint::new();
        print.line(format!("phalanx-ddp {}", env!("CARGO_PKG_VERSION")));
        print.line(format!("world of {} ranks", group.world_size()));
        for fact in must_agree {
            print.line(fact.as_str());
        }
        print.line("no further fact that must agree");
        print.line(match caps {
            Some(caps) => caps.to_string(),
            None => "buckets sized by where the ranks are".to_owned(),
        });
        print
    }

    /// Adds a fact. The order of facts counts.
    pub fn line(&mut self, fact: impl Into<String>) -> &mut Self {
        self.lines.push(fact.into().replace('\n', " "));
        self
    }

    /// Adds a fact for each tensor of a model: kind, name and shape.
    pub fn parameters(&mut self, params: &dyn Parameters) -> &mut Self {
        for i in 0..params.tensors() {
            let kind = match params.is_buffer(i) {
                true => "buffer",
                false => "parameter",
            };
            let (name, shape) = (params.name(i), params.shape(i));
            self.line(format!("{kind} {name} f32 {shape:?}"));
        }
        self
    }

    /// The facts as text, a line each.
    pub fn text(&self) -> String {
        self.lines.join("\n")
    }

    /// The first difference from the facts `theirs`, if there is one: what `them` have where `us` has something else.
    pub fn difference(&self, theirs: &str, them: &str, us: &str) -> Option<String> {
        let own = self.text();
        (own != theirs).then(|| describe(theirs, &own, them, us))
    }

    /// Compares with all other ranks.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Mismatch`, on every rank, naming the first rank that differs from rank
    /// 0 and the first line in which it does.
    pub fn compare(&self, group: &ProcessGroup) -> Result<()> {
        let failed = |e| Error::comm_while("the ranks' models could not be compared", e);
        let world = group.world_size();
        if world == 1 {
            return Ok(());
        }
        let text = self.text();
        let mine = Sha256::digest(text.as_bytes());
        let mut all = vec![0u8; world * mine.len()];
        group
            .all_gather(mine.as_slice(), &mut all)
            .map_err(failed)?;
        let mut hashes = all.chunks_exact(mine.len());
        let first = hashes.next().unwrap_or_default();
        let Some(other) = hashes.position(|h| h != first).map(|i| i + 1) else {
            return Ok(());
        };
        let reference = share_text(group, &text, 0)?;
        let different = share_text(group, &text, other)?;
        // A rank that fails aborts the group; the barrier keeps it from doing so before all have both texts.
        // If an abort comes early nevertheless, this rank knows the difference.
        let _ = group.barrier();
        let other = format!("rank {other}");
        Err(Error::mismatch(describe(
            &reference, &different, "rank 0", &other,
        )))
    }
}

/// Broadcasts `root`'s text to all ranks.
fn share_text(group: &ProcessGroup, mine: &str, root: usize) -> Result<String> {
    let failed = |e| Error::comm_while("the ranks' models could not be compared", e);
    let mut len = [mine.len() as i64];
    group.broadcast(&mut len, root).map_err(failed)?;
    let len = usize::try_from(len[0].clamp(0, MAX_TEXT_BYTES)).unwrap_or(0);
    let mut bytes = vec![0u8; len];
    if group.rank() == root {
        bytes.copy_from_slice(&mine.as_bytes()[..len]);
    }
    group.broadcast(&mut bytes, root).map_err(failed)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The first difference between the text of `first` and that of `other`.
fn describe(reference: &str, different: &str, first: &str, other: &str) -> String {
    // Not `lines`: it would hide a difference in carriage returns.
    let mut left = reference.split('\n');
    let mut right = different.split('\n');
    loop {
        match (left.next(), right.next()) {
            (Some(a), Some(b)) if a == b => {}
            (None, None) => {
                return format!(
                    "{other} differs from {first}, but only beyond the compared {MAX_TEXT_BYTES} bytes"
                );
            }
            (a, b) => {
                return format!(
                    "{other} does not train the same model as {first}: {first} has {} where {other} has \
                     {}; start all ranks with the same program and arguments",
                    shown(a),
                    shown(b)
                );
            }
        }
    }
}

/// A peer's line as it is printed: quoted, control characters escaped, of limited length.
fn shown(line: Option<&str>) -> String {
    const SHOWN_CHARS: usize = 300;
    let Some(line) = line else {
        return "nothing".to_owned();
    };
    let head: String = line.chars().take(SHOWN_CHARS).collect();
    let more = if head.len() < line.len() { "..." } else { "" };
    format!("{head:?}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_difference_is_named() {
        let text = describe(
            "a\nfc1.weight [128]\nx",
            "a\nfc1.weight [64]\ny",
            "rank 0",
            "rank 3",
        );
        assert!(text.contains("rank 3"), "{text}");
        assert!(text.contains("rank 0 has \"fc1.weight [128]\""), "{text}");
        assert!(text.contains("rank 3 has \"fc1.weight [64]\""), "{text}");
        let text = describe("a", "a\nb", "rank 0", "rank 1");
        assert!(
            text.contains("rank 0 has nothing where rank 1 has \"b\""),
            "{text}"
        );
        let text = describe("a\nb", "a\r\nb", "rank 0", "rank 1");
        assert!(
            text.contains(r#"rank 0 has "a" where rank 1 has "a\r""#),
            "{text}"
        );
        let text = describe("a", &"\x1b".repeat(1 << 20), "rank 0", "rank 1");
        assert!(text.len() < 5000 && !text.contains('\x1b'));
    }
}
