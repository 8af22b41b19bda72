#![no_main]
phalanx_fuzz::fuzz!(phalanx_comm::fuzzing::TARGETS);
