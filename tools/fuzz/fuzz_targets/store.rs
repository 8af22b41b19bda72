#![no_main]
phalanx_fuzz::fuzz!(phalanx_store::fuzzing::TARGETS);
