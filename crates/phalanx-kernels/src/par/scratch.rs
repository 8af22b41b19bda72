//! Scratch memory: belongs to a thread, only grows.

use std::cell::RefCell;

use crate::aligned::AlignedBuf;

thread_local! {
    static SCRATCH: RefCell<Vec<AlignedBuf>> = const { RefCell::new(Vec::new()) };
}

/// Lends `len` elements with arbitrary contents. May be nested; each level
/// keeps a buffer of its own.
pub fn scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    // The deepest level pops last and pushes first, so sizes stay with levels.
    let mut buf = SCRATCH
        .with(|s| s.borrow_mut().pop())
        .filter(|b| b.len() >= len)
        .unwrap_or_else(|| AlignedBuf::zeroed(len.next_power_of_two()));
    let r = f(&mut buf[..len]);
    SCRATCH.with(|s| s.borrow_mut().push(buf));
    r
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nests_and_is_kept() {
        let at = scratch(100, |a| {
            a.fill(1.0);
            scratch(50, |b| {
                b.fill(2.0);
                assert_ne!(a.as_ptr(), b.as_ptr());
            });
            assert!(a.iter().all(|&v| v == 1.0));
            a.as_ptr()
        });
        assert_eq!(scratch(90, |a| a.as_ptr()), at);
    }
}
