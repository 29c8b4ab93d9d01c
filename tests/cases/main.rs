//! End-to-end tests: unmodified MPI programs, real MPI libraries and launchers, simulated GPUs.

// What a test says goes through the harness, which collects it.
#![allow(clippy::print_stderr)]

mod support;

mod absent;
mod bad_input;
mod bindings;
mod churn;
mod compare;
mod counts;
mod doctor_sim;
mod faults;
mod habits;
mod inert;
mod interface;
mod loading;
mod matching;
mod memory;
mod model_error;
mod newer;
mod nodes;
mod nvtx;
mod one_owner;
mod otf2;
mod overhead;
mod pack;
mod page_keys;
mod paths;
mod programs;
mod progress;
mod repository;
mod router;
mod rtr;
mod run_ab;
mod stats_details;
mod stats_report;
mod trace_page;
mod tracing;
mod tracing_cases;
mod tracing_ucx;
mod type_trees;
mod types;
mod verify;
