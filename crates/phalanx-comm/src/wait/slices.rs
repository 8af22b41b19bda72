//! Short scheduling slices for a thread that shares its core with one that computes.

/// Requested slice in ns, the kernel's minimum. The data that arrives within it at 10 Gbit/s takes less time to
/// handle.
const SLICE_NS: u64 = 100_000;

/// Asks the scheduler to run the calling thread as soon as it is woken, for short slices, instead of after the slice of
/// the thread that computes on its core. That slice ends at a timer tick, up to 4 ms later at 250 ticks a second, and
/// meanwhile the network is idle. The thread's share of the core does not change, so no privilege is needed.
///
/// Linux 6.12 and later honour it (`sched_runtime` of `sched_setattr(2)` for ordinary threads: the slice of EEVDF,
/// by which a thread with a shorter one preempts). Elsewhere, and where the call is forbidden, nothing changes. A
/// thread with another policy than the ordinary one keeps its setting.
pub(crate) fn take_short_slices() {
    if let Err(e) = try_take() {
        tracing::debug!("the communication thread has slices as long as any other thread: {e}");
    }
}

fn try_take() -> std::io::Result<()> {
    let size = size_of::<libc::sched_attr>();
    // SAFETY: a structure of integers, of which all may be zero.
    let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: writes at most `size` bytes to `attr`, which is alive and has as many; 0 is this thread.
    let failed = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) };
    if failed != 0 {
        return Err(std::io::Error::last_os_error());
    }
    if attr.sched_policy != libc::SCHED_OTHER as u32 {
        return Ok(());
    }
    attr.size = size as u32;
    attr.sched_runtime = SLICE_NS;
    // SAFETY: reads `size` bytes of `attr`, which is alive and has as many.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    /// Policy, nice value, slice.
    fn now() -> (u32, i32, u64) {
        // SAFETY: as above.
        let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
        let size = size_of::<libc::sched_attr>();
        // SAFETY: as above.
        let failed = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) };
        assert_eq!(failed, 0);
        (attr.sched_policy, attr.sched_nice, attr.sched_runtime)
    }

    #[test]
    fn only_the_slice_of_the_calling_thread_changes() {
        let before = now();
        let inside = std::thread::spawn(|| {
            super::take_short_slices();
            now()
        });
        let inside = inside.join().unwrap();
        assert_eq!((inside.0, inside.1), (before.0, before.1));
        // Older kernels have no slices of threads, and return 0.
        assert!(inside.2 == super::SLICE_NS || inside.2 == before.2);
        assert_eq!(now(), before);
    }
}
