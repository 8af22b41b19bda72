//! The fuzz targets of `tools/fuzz/` for the code that reads untrusted bytes; the tests
//! here run them on garbled seeds.

use crate::group::fuzzing as group;
use crate::recorder::fuzzing as recorder;
use crate::stall::fuzzing as stall;
use crate::transport::fuzzing as transport;
use crate::wait::fuzzing as wait;

/// Name, body, seeds.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// All of them.
pub const TARGETS: &[Target] = &[
    ("comm_member", transport::member, transport::member_seeds),
    (
        "comm_failure_mark",
        transport::failure_mark,
        transport::failure_mark_seeds,
    ),
    ("comm_segment", transport::segment, transport::segment_seeds),
    ("comm_roster", transport::roster, transport::roster_seeds),
    (
        "comm_unix_hello",
        transport::unix_hello,
        transport::unix_hello_seeds,
    ),
    ("comm_control", transport::control, transport::control_seeds),
    (
        "comm_first_cause",
        transport::first_cause,
        transport::first_cause_seeds,
    ),
    ("comm_posts", stall::posts, stall::posts_seeds),
    ("comm_record", recorder::record, recorder::record_seeds),
    ("comm_flight", recorder::memory, recorder::memory_seeds),
    ("comm_address", group::address, group::address_seeds),
    ("comm_cores", wait::cores, wait::cores_seeds),
    (
        "comm_environment",
        group::environment,
        group::environment_seeds,
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_survives_garbled_seeds() {
        for (_, run, seeds) in TARGETS {
            phalanx_garble::feed(&seeds(), 2000, run);
        }
    }
}
