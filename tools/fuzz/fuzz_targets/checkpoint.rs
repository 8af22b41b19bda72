#![no_main]
phalanx_fuzz::fuzz!(phalanx_checkpoint::fuzzing::TARGETS);
