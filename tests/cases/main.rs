//! End-to-end tests: unmodified MPI programs, real MPI libraries and launchers, simulated GPUs.

mod support;

mod bad_input;
mod bindings;
mod faults;
mod inert;
mod matching;
mod programs;
mod progress;
mod repository;
