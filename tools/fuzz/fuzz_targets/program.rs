#![no_main]
phalanx_fuzz::fuzz!(phalanx::fuzzing::TARGETS);
