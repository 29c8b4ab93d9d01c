//! Starting the driver: topologies, visible devices, planned errors, names.
#![allow(
    missing_docs,
    clippy::undocumented_unsafe_blocks,
    clippy::ptr_as_ptr,
    clippy::borrow_as_ptr
)]

mod common;
use common::*;
use simcuda::api::*;

/// Runs the scenario that the parent asked for; does nothing in a plain test run.
#[test]
fn scenario() {
    match std::env::var("SCENARIO").as_deref() {
        Ok("init_fails") => assert_ne!(unsafe { device::cuInit(0) }, 0),
        Ok("planned_error") => planned_error(),
        Ok("wrong_byte") => wrong_byte(),
        Ok("blocking_launches") => blocking_launches(),
        Ok("symbols") => symbols(),
        Ok("visible") => visible(),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
}

#[test]
fn a_bad_topology_fails_init_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.toml");
    let good = include_str!("../topologies/beluga.toml");
    std::fs::write(&path, good.replacen("gb_s = 48.0", "gb_s = -1.0", 1)).unwrap();
    let out = run(
        "init_fails",
        &[("SIMCUDA_TOPOLOGY", path.to_str().unwrap())],
    );
    succeeds(&out);
    let lines: Vec<String> = stderr(&out)
        .lines()
        .filter(|l| l.starts_with("simcuda"))
        .map(String::from)
        .collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0].contains("link between GPU 0 and 1")
            && lines[0].contains("must be a positive rate"),
        "{lines:?}"
    );
    succeeds(&run("init_fails", &[("CUDA_VISIBLE_DEVICES", "")]));
    succeeds(&run("init_fails", &[("SIMCUDA_GPUS", "9")]));
}

fn planned_error() {
    start(0);
    let p = alloc(64);
    assert_eq!(unsafe { copy::cuMemcpyDtoD_v2(p, p + 32, 32) }, 0);
    assert_eq!(unsafe { copy::cuMemcpyDtoD_v2(p, p + 32, 32) }, 719);
    assert_eq!(unsafe { copy::cuMemcpyDtoD_v2(p, p + 32, 32) }, 0);
}

#[test]
fn errors_come_on_demand() {
    succeeds(&run(
        "planned_error",
        &[("SIMCUDA_FAULT", "cuMemcpyDtoD:2=CUDA_ERROR_LAUNCH_FAILED")],
    ));
}

/// Three copies of a pattern: the second has one bit of byte 5 flipped. Calls that are not asynchronous do not count.
fn wrong_byte() {
    start(0);
    let data = pattern(9, 100);
    let (a, b, c, s) = (alloc(100), alloc(300), alloc(1), new_stream());
    upload(a, &data);
    for place in 0..3 {
        assert_eq!(unsafe { copy::cuMemcpyDtoD_v2(c, a, 1) }, 0);
        ok(unsafe { copy::cuMemcpyDtoDAsync_v2(b + 100 * place, a, 100, s) });
    }
    sync(s);
    let mut expected = [data.clone(), data.clone(), data].concat();
    expected[105] ^= 0x10;
    assert_eq!(download(b, 300), expected);
}

#[test]
fn a_byte_is_wrong_on_demand() {
    succeeds(&run("wrong_byte", &[("SIMCUDA_CORRUPT", "*:DtoD:2:5")]));
    assert!(!run("wrong_byte", &[("SIMCUDA_CORRUPT", "1:DtoD:2:5")])
        .status
        .success());
}

const NOT_READY: i32 = 600;

fn blocking_launches() {
    start(0);
    let (p, s) = (alloc(1 << 24), new_stream());
    let is_blocking = std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some();
    ok(unsafe { fill::cuMemsetD8Async(p, 1, 1 << 24, s) });
    let state = unsafe { stream::cuStreamQuery(s) };
    assert_eq!(state, if is_blocking { 0 } else { NOT_READY });
}

#[test]
fn launches_block_where_the_environment_says_so() {
    succeeds(&run("blocking_launches", &[("CUDA_LAUNCH_BLOCKING", "1")]));
    succeeds(&run(
        "blocking_launches",
        &[("SIMCUDA_QUIET_US", "1000000")],
    ));
}

fn visible() {
    start(0);
    let mut count = 0;
    let mut id = [0i8; 32];
    unsafe {
        ok(device::cuDeviceGetCount(&mut count));
        ok(device::cuDeviceGetPCIBusId(id.as_mut_ptr().cast(), 32, 0));
    }
    let text: String = id
        .iter()
        .take_while(|c| **c != 0)
        .map(|c| *c as u8 as char)
        .collect();
    // The third GPU's bus: they are 0x10 apart from 0x18 on.
    assert_eq!((count, text.as_str()), (2, "00000000:38:00.0"));
}

#[test]
fn visible_devices_are_renumbered() {
    succeeds(&run("visible", &[("CUDA_VISIBLE_DEVICES", "2,0")]));
}

/// Every name a loader may ask for resolves, and what is not there says so.
fn symbols() {
    let ask = |name: &std::ffi::CStr| {
        let mut address = std::ptr::null();
        let code = unsafe {
            misc::cuGetProcAddress_v2(name.as_ptr(), &mut address, 12080, 0, std::ptr::null_mut())
        };
        (code, address)
    };
    assert_eq!(ask(c"cuNoSuchFunction").0, 500);
    let (code, address) = ask(c"cuMulticastCreate");
    assert_eq!(code, 0);
    let stub: unsafe extern "C" fn() -> i32 = unsafe { std::mem::transmute(address) };
    assert_eq!(unsafe { stub() }, 801);
    for line in include_str!("../symbols.txt")
        .lines()
        .filter(|l| l.starts_with("cu"))
    {
        assert!(misc::exact(line).is_some(), "{line}");
    }
    // Before cuInit.
    let mut count = 0;
    assert_eq!(unsafe { device::cuDeviceGetCount(&mut count) }, 3);
    start(0);
    // A forked child has no driver.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = unsafe { device::cuDeviceGetCount(&mut count) };
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    unsafe { libc::waitpid(pid, &mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), 3);
}

#[test]
fn every_listed_name_resolves() {
    succeeds(&run("symbols", &[]));
}
