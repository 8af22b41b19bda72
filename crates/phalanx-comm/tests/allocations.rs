//! The flight recorder is always on, so it must not allocate: counted here,
//! over whole operations.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use phalanx_comm::{GroupOptions, ProcessGroup, ReduceOp};

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: as our caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as our caller promised.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn nothing_is_allocated_per_operation() {
    const WARM: usize = 100;
    const COUNTED: usize = 5000;
    let groups = ProcessGroup::threads(2, GroupOptions::default());
    std::thread::scope(|scope| {
        for group in &groups {
            scope.spawn(move || {
                let mut small = [group.rank() as f32];
                let mut large = vec![1.0_f32; 20_000];
                let mut step = |n: u64| {
                    group.set_phase("backward");
                    group.set_position(1, n);
                    group.all_reduce(&mut small, ReduceOp::Max).unwrap();
                    if n.is_multiple_of(50) {
                        group.all_reduce(&mut large, ReduceOp::Mean).unwrap();
                    }
                };
                (0..WARM as u64).for_each(&mut step);
                let before = COUNT.get();
                (0..COUNTED as u64).for_each(&mut step);
                assert_eq!(COUNT.get() - before, 0, "allocations");
                let dump = group.flight();
                let all = (WARM + COUNTED) + (WARM + COUNTED) / 50;
                assert_eq!(dump.recorded as usize, all);
                assert!(COUNT.get() > before, "the counter counts");
            });
        }
    });
}
