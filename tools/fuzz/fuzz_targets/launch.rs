#![no_main]
phalanx_fuzz::fuzz!(phalanx_launch::fuzzing::TARGETS);
