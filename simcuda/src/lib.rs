//! A software CUDA driver: a `libcuda.so.1` with no GPU behind it.
//!
//! Processes of one job share a simulated node (`job`, `shared`): a virtual clock (`clock`) on which
//! copies and kernels take the time that a topology file (`topology`) says, device memory that host
//! code cannot touch (`vm`, `memory`, `alloc`), memory pools (`pool`), mappings (`virt`), and a checker of happens-before (`checker`). Operations of a
//! process form a graph of dependencies (`sched`, `work`), driven by whoever waits (`wait`).
//! The exported functions are in `api`, one file an area; `build.rs` adds stubs for all others. Of the management library
//! that comes with a driver there is what tells of links (`nvml`).
//!
//! | variable | meaning |
//! | --- | --- |
//! | `SIMCUDA_TOPOLOGY` | `beluga`, `narval`, `dgx1-v100`, `hgx-h200` (default), or a file |
//! | `SIMCUDA_GPUS` | only the first so many GPUs of the topology |
//! | `SIMCUDA_JOB` | name of the node; default: the launcher's job, else the process alone |
//! | `SIMCUDA_HOST_ACCESS=1` | host code may touch device addresses |
//! | `SIMCUDA_HOST_MIB=N` or `all` | what the host's memory can back of the GPUs' on this node; default: what is available |
//! | `SIMCUDA_MEMLOCK=1` | memory that is pinned counts as locked: what exceeds RLIMIT_MEMLOCK is refused. The vendor's driver is not known to ask |
//! | `SIMCUDA_MPS=1` | processes use a GPU at the same time, as through MPS; otherwise they take turns |
//! | `SIMCUDA_IPC_ONCE=1` | memory of another process that is open already is refused (`ALREADY_MAPPED`); driver 580 opens it again |
//! | `SIMCUDA_NVML=0` | there is no management library |
//! | `SIMCUDA_CHECK=0` | no happens-before checker |
//! | `SIMCUDA_DATA=0` | copies and fills above 4 KiB take their time but move nothing: for measurements only. All memory can be had then |
//! | `SIMCUDA_REPORT=FILE` | appends JSON lines: findings as they occur, one `exit` line a process, which says whether it was checked |
//! | `SIMCUDA_FAULT=F[@RANK][#GPU]:N=CODE,..` | the N-th call of F returns CODE |
//! | `SIMCUDA_CORRUPT=R:K:N:O,..` | the N-th asynchronous copy of kind K (`DtoD`, `DtoH`, `HtoD`) of rank R flips a bit at offset O |
//! | `SIMCUDA_QUIET_US` | real time without a call after which a process counts as waiting (200) |
//! | `SIMCUDA_LOOKS` | queries in vain after which a process that polls counts as waiting (8); 32 for measurements of many streams |
//! | `CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_MAX_CONNECTIONS` | as on hardware |
//! | `CUDA_LAUNCH_BLOCKING=1` | kernels and fills are over when their call returns |
//!
//! A process in which a race or a use of freed memory was found ends with status 86.
//!
//! Three functions are found by `dlsym` only: `simcuda_clock_ns`, the virtual time that a measurement reads in place of a
//! wall clock; `simcuda_late_ns`, by how much host code has reacted after time had moved on, which makes a measurement
//! void above 2 % of its time; `simcuda_findings`. Nothing else has virtual time: CLOCK_MONOTONIC stays the machine's.
//! `conformance/` has the programs that lay this driver's answers and speed beside the vendor's.
//!
//! **Invariants.** An effect of an asynchronous operation is applied when its virtual time is over, but for some pieces
//! of copies, which are read and land when the copy may start: a real one reads and lands anywhere in between.
//! Streams of a context share hardware queues, in which an operation waits for those before it to start; that orders
//! nothing that a program may rely on, and the checker does not count it. Time moves only while every process waits. No pointer of the program is kept
//! beyond what the driver API lets one keep. No panic crosses an exported function.

mod alloc;
pub mod api;
mod broken;
mod capture;
pub mod checker;
pub mod clock;
mod corrupt;
pub mod driver;
pub mod errors;
mod event;
mod fault;
#[cfg(test)]
mod fuzz;
mod graph;
mod host;
mod ipc;
mod job;
mod memory;
mod module;
pub mod nvml;
mod ops;
mod pool;
mod report;
mod sched;
pub mod shared;
mod state;
pub mod topology;
pub mod types;
mod virt;
mod vm;
mod wait;
mod work;
