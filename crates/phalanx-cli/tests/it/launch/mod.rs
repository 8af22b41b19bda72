//! Process tests of `phalanx launch`: real launchers, small shell programs
//! as ranks, real signals. Every test looks afterwards whether a process of
//! its own is left anywhere.

mod harness;

mod command_line;
mod contract;
mod failures;
mod interrupts;
mod lost;
mod nodes;
mod orphans;
mod output;
mod restarts;
mod torchrun;
