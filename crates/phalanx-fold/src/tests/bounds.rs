//! No byte beyond the ends is touched: the memory after the last element is not
//! accessible.

use super::oracle::Oracle;
use super::*;

/// Elements that end at an inaccessible page.
struct Edge {
    start: *mut u8,
    page: usize,
}

impl Edge {
    fn new() -> Edge {
        // SAFETY: asks for a number.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
        // SAFETY: a new mapping of two pages, the second of which is closed.
        let start = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let start = libc::mmap(std::ptr::null_mut(), 2 * page, protection, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            assert_eq!(
                libc::mprotect(start.byte_add(page), page, libc::PROT_NONE),
                0
            );
            start.cast()
        };
        Edge { start, page }
    }

    fn last<T>(&self, count: usize) -> *mut T {
        assert!(count * size_of::<T>() <= self.page);
        // SAFETY: within the first page; its end is aligned for any element.
        unsafe { self.start.byte_add(self.page).cast::<T>().sub(count) }
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this size, and no longer used.
        unsafe { libc::munmap(self.start.cast(), 2 * self.page) };
    }
}

#[test]
fn nothing_beyond_the_ends_is_touched() {
    fn at_the_edge<T: Oracle>(isa: Isa, edges: &[Edge; 3]) {
        for count in (0..70).chain([127, 128, 129, 300]) {
            let [a, b, into] = edges.each_ref().map(|edge| edge.last::<T>(count));
            let values = values::<T>(2, count, count as u64);
            // SAFETY: `count` elements lie before each edge, one more before
            // the destination; a page has space for 512 of 8 bytes.
            unsafe {
                a.copy_from_nonoverlapping(values[0].as_ptr(), count);
                b.copy_from_nonoverlapping(values[1].as_ptr(), count);
                into.sub(1).write(T::from_bits(77));
                let op = ReduceOp::Sum;
                let sources = [a.cast_const().cast(), b.cast_const().cast()];
                fold_on(isa, T::dtype(), op, &[into.cast()], &sources, count, None);
                assert_eq!(into.sub(1).read().bits(), T::from_bits(77).bits());
                for (i, (x, y)) in values[0].iter().zip(&values[1]).enumerate() {
                    let want = T::fold(op, &[*x, *y], None);
                    assert_eq!(into.add(i).read().bits(), want.bits());
                }
            }
        }
    }
    let edges = [Edge::new(), Edge::new(), Edge::new()];
    for isa in Isa::available() {
        on_every_type!(at_the_edge, isa, &edges);
    }
}
