#![no_main]
phalanx_fuzz::fuzz!(phalanx_wire::fuzzing::TARGETS);
