//! Data sets, samplers, the loader, metrics and progress.

mod loader;
mod metrics;
mod mnist_files;
mod progress;
mod sampler_exact;
mod sampler_torch;
mod synthetic;

/// Runs the test called `name` again in a process of its own, because peak memory is counted for the
/// whole process, other tests included. True in that process; false in the first one, after it passed.
fn alone(name: &str) -> bool {
    const CHILD: &str = "PHALANX_TEST_ALONE";
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(
        child.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&child.stderr)
    );
    false
}
