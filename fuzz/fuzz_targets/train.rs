#![no_main]
phalanx_fuzz::fuzz!(phalanx_train::fuzzing::TARGETS);
