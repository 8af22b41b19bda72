#![no_main]
phalanx_fuzz::fuzz!(phalanx_cli::fuzzing::TARGETS);
