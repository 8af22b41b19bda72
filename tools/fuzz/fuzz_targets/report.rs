#![no_main]
phalanx_fuzz::fuzz!(phalanx_report::fuzzing::TARGETS);
