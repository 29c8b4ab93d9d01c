//! Scenarios run in processes of their own: the driver is one a process, and several must meet.
#![allow(
    dead_code,
    missing_docs,
    clippy::undocumented_unsafe_blocks,
    clippy::ptr_as_ptr,
    clippy::borrow_as_ptr
)]

use simcuda::api::{context, copy, device, ipc, memory, pointer, pool, stream};
use simcuda::types::CUipcHandle;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Nothing here takes longer unless it hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// So long is no process taken to be quiet that time moves only where all wait.
pub const LONG: (&str, &str) = ("SIMCUDA_QUIET_US", "20000000");
pub const MIB: usize = 1 << 20;

pub fn ok(code: i32) {
    assert_eq!(code, 0, "driver call failed");
}

/// A child that will run scenario `name` of this test binary.
pub fn command(name: &str, env: &[(&str, &str)]) -> Command {
    let mut c = Command::new(std::env::current_exe().unwrap());
    c.args(["scenario", "--exact", "--nocapture", "--test-threads=1"]);
    for var in [
        "CUDA_VISIBLE_DEVICES",
        "SIMCUDA_REPORT",
        "SIMCUDA_FAULT",
        "SIMCUDA_CORRUPT",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "SIMCUDA_GPUS",
        "SIMCUDA_HOST_ACCESS",
        "SIMCUDA_IPC_ONCE",
    ] {
        c.env_remove(var);
    }
    c.env("SCENARIO", name)
        .env("SIMCUDA_TOPOLOGY", "beluga")
        // What is allocated here is as large as a GPU's memory, and hardly touched.
        .env("SIMCUDA_HOST_MIB", "all")
        .env("SIMCUDA_JOB", format!("test {} {name}", std::process::id()));
    c.envs(env.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    c
}

/// Waits, bounded.
pub fn finish(mut child: Child) -> Output {
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > LIMIT {
            let _ = child.kill();
            let out = child.wait_with_output().unwrap();
            panic!("hangs: {}", String::from_utf8_lossy(&out.stderr));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().unwrap()
}

pub fn run(name: &str, env: &[(&str, &str)]) -> Output {
    finish(command(name, env).spawn().unwrap())
}

pub fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

pub fn succeeds(out: &Output) {
    assert!(
        out.status.success(),
        "{:?}\n{}\n{}",
        out.status,
        String::from_utf8_lossy(&out.stdout),
        stderr(out)
    );
}

/// Messages between processes: files in a folder that both know.
pub fn say(name: &str, bytes: &[u8]) {
    let folder = std::env::var("FOLDER").unwrap();
    let path = Path::new(&folder).join(name);
    std::fs::write(path.with_extension("tmp"), bytes).unwrap();
    std::fs::rename(path.with_extension("tmp"), path).unwrap();
}

pub fn hear(name: &str) -> Vec<u8> {
    hear_in(Path::new(&std::env::var("FOLDER").unwrap()), name)
}

/// What is said in another folder than this process's own.
pub fn hear_in(folder: &Path, name: &str) -> Vec<u8> {
    let path = folder.join(name);
    let start = Instant::now();
    while !path.exists() {
        assert!(start.elapsed() < LIMIT, "nobody says {name}");
        std::thread::sleep(Duration::from_micros(200));
    }
    std::fs::read(path).unwrap()
}

/// cuInit and the primary context of `device`, current.
pub fn start(ordinal: i32) -> usize {
    let mut ctx = 0;
    unsafe {
        ok(device::cuInit(0));
        ok(context::cuDevicePrimaryCtxRetain(&mut ctx, ordinal));
        ok(context::cuCtxSetCurrent(ctx));
    }
    ctx
}

pub fn alloc(bytes: usize) -> u64 {
    let mut p = 0;
    ok(unsafe { memory::cuMemAlloc_v2(&mut p, bytes) });
    p
}

pub fn pinned(bytes: usize) -> *mut u8 {
    let mut p = std::ptr::null_mut();
    ok(unsafe { memory::cuMemHostAlloc(&mut p, bytes, 0) });
    p.cast()
}

pub fn new_stream() -> usize {
    let mut s = 0;
    ok(unsafe { stream::cuStreamCreate(&mut s, 1) });
    s
}

pub fn upload(to: u64, data: &[u8]) {
    ok(unsafe { copy::cuMemcpyHtoD_v2(to, data.as_ptr().cast(), data.len()) });
}

pub fn download(from: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    ok(unsafe { copy::cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), from, bytes) });
    data
}

pub fn sync(s: usize) {
    ok(unsafe { stream::cuStreamSynchronize(s) });
}

pub fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed))
        .collect()
}

/// One attribute of a pointer, as wide as it may be; what the driver leaves alone reads as zero.
pub fn attribute(which: u32, p: u64) -> Result<u64, i32> {
    let mut value = 0u64;
    match unsafe { pointer::cuPointerGetAttribute((&raw mut value).cast(), which, p) } {
        0 => Ok(value),
        code => Err(code),
    }
}

/// Free bytes of the current device.
pub fn free_bytes() -> u64 {
    let (mut free, mut total) = (0, 0);
    ok(unsafe { memory::cuMemGetInfo_v2(&mut free, &mut total) });
    free as u64
}

/// What legacy IPC says to exporting an address.
pub fn ipc_handle(p: u64) -> i32 {
    let mut handle: CUipcHandle = unsafe { std::mem::zeroed() };
    unsafe { ipc::cuIpcGetMemHandle(&mut handle, p) }
}

pub fn alloc_managed(bytes: usize) -> u64 {
    let mut p = 0;
    ok(unsafe { pool::cuMemAllocManaged(&mut p, bytes, 1) });
    p
}

pub fn alloc_async(bytes: usize, s: usize) -> u64 {
    let mut p = 0;
    ok(unsafe { pool::cuMemAllocAsync(&mut p, bytes, s) });
    p
}

pub fn free_async(p: u64, s: usize) {
    ok(unsafe { pool::cuMemFreeAsync(p, s) });
}
