//! The flight recorder is always on, so it must not allocate: counted here,
//! over whole operations.

#[allow(dead_code, reason = "other tests use the rest")]
mod counting;

use phalanx_comm::{GroupOptions, ProcessGroup, ReduceOp};

use counting::requests;

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
                let before = requests();
                (0..COUNTED as u64).for_each(&mut step);
                assert_eq!(requests() - before, 0, "allocations");
                let dump = group.flight();
                let all = (WARM + COUNTED) + (WARM + COUNTED) / 50;
                assert_eq!(dump.recorded as usize, all);
                assert!(requests() > before, "the counter counts");
            });
        }
    });
}
