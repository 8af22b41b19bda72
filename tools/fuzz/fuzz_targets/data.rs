#![no_main]
phalanx_fuzz::fuzz!(phalanx_data::fuzzing::TARGETS);
