//! torchrun's flags that `phalanx launch` does not have, and what to do instead.

/// What to do instead of `word`, if it is such a flag (`--run-path`, `-m`).
pub(super) fn instead_of(word: &str) -> Option<&'static str> {
    let name = word.split('=').next().unwrap_or(word);
    Some(match name {
        "--no-python" => "leave it out: PROGRAM may be any program here",
        "-m" | "--module" => "start the interpreter yourself: phalanx launch ... python3 -m MODULE",
        "--run-path" => "start the interpreter yourself: phalanx launch ... python3 FILE",
        "-r" => "write it out: --redirects",
        "-t" => "write it out: --tee",
        "--rdzv-conf" => "leave it out; --rdzv-timeout is how long to wait for the other nodes",
        "--shutdown-timeout" => "--stop-grace-s is how long ranks may take to end",
        "--local-ranks-filter" => {
            "--redirects 0:0,1:3,... with --log-dir takes ranks off the screen"
        }
        "--log-line-prefix-template" => "--no-prefix leaves out the `[rank N]` before each line",
        "--logs-specs" | "--event-log-handler" => {
            "leave it out; --log-dir keeps each rank's output"
        }
        "--duplicate-stdout-filters" | "--duplicate-stderr-filters" => {
            "leave it out; --log-dir keeps each rank's output for grep"
        }
        "--numa-binding" => "leave it out; put numactl before PROGRAM",
        "--signals-to-handle" => "leave it out: SIGTERM, SIGINT, SIGHUP and SIGQUIT end the ranks",
        "--virtual-local-rank" => "leave it out; LOCAL_RANK says which rank of its host a rank is",
        _ => return None,
    })
}
