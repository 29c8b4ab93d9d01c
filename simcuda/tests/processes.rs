//! What several processes of a simulated node see of each other.
#![allow(
    missing_docs,
    clippy::print_stderr,
    clippy::undocumented_unsafe_blocks,
    clippy::ptr_as_ptr,
    clippy::borrow_as_ptr
)]

mod common;
use common::*;
use simcuda::api::*;
use simcuda::types::*;

const N: usize = 3 << 20;

#[test]
fn scenario() {
    match std::env::var("SCENARIO").as_deref() {
        Ok("export") => export(),
        Ok("import") => import(),
        Ok("import_once") => import_once(),
        Ok("first") => first(true),
        Ok("first_unsynchronized") => first(false),
        Ok("second") => second(),
        Ok("flags_out") => flags_out(),
        Ok("flags_in") => flags_in(),
        Ok("event_out") => event_out(),
        Ok("event_in") => event_in(),
        Ok("free_early") => free_early(),
        Ok("use_late") => use_late(),
        Ok("hang_around") => hang_around(),
        Ok("take_all") => take_all(),
        Ok("ring") => ring(),
        Ok("apart") => apart(),
        Ok("chunks_out") => chunks_out(),
        Ok("chunks_in") => chunks_in(),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
}

const PAGE: usize = 2 << 20;

fn prop(handle_types: u32) -> CUmemAllocationProp {
    let mut p: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    (p.kind, p.location.kind, p.location.id) = (1, 1, 0);
    p.requestedHandleTypes = handle_types;
    p
}

fn reserve(pages: usize) -> u64 {
    let mut p = 0;
    ok(unsafe { virt::cuMemAddressReserve(&mut p, pages * PAGE, 0, 0, 0) });
    p
}

fn let_in(p: u64, pages: usize) {
    let desc = CUmemAccessDesc {
        location: prop(0).location,
        flags: 3,
    };
    ok(unsafe { virt::cuMemSetAccess(p, pages * PAGE, &desc, 1) });
}

fn release_all(handles: &[u64]) {
    for handle in handles {
        ok(unsafe { virt::cuMemRelease(*handle) });
    }
}

/// Pages from the beginning, and how many, of two chunks side by side.
const CHUNKS: [(usize, usize); 2] = [(0, 1), (1, 2)];

/// Physical memory of one process, mapped in another by a file descriptor for each chunk.
fn chunks_out() {
    start(0);
    let p = reserve(3);
    let (mut files, mut handles) = (vec![std::process::id()], Vec::new());
    for (at, pages) in CHUNKS {
        let (mut handle, mut file) = (0, 0u32);
        unsafe {
            ok(virt::cuMemCreate(&mut handle, pages * PAGE, &prop(1), 0));
            ok(virt::cuMemMap(
                p + (at * PAGE) as u64,
                pages * PAGE,
                0,
                handle,
                0,
            ));
            let to = (&raw mut file).cast();
            ok(virt::cuMemExportToShareableHandle(to, handle, 1, 0));
        }
        files.push(file);
        handles.push(handle);
    }
    let_in(p, 3);
    upload(p, &pattern(5, 3 * PAGE));
    let file = files[1] as usize as *mut _;
    unsafe {
        let mut types = 9u64;
        ok(pointer::cuPointerGetAttribute(
            (&raw mut types).cast(),
            14,
            p,
        ));
        assert_eq!(types, 1);
        // What was not made for it is not exported.
        let (mut plain, mut none) = (0, -1);
        ok(virt::cuMemCreate(&mut plain, PAGE, &prop(0), 0));
        let to = (&raw mut none).cast();
        assert_eq!(virt::cuMemExportToShareableHandle(to, plain, 1, 0), 1);
        assert_eq!(virt::cuMemExportToShareableHandle(to, plain, 8, 0), 801);
        // In the same process it is the same handle, with one reference more.
        let mut same = 0;
        ok(virt::cuMemImportFromShareableHandle(&mut same, file, 1));
        assert_eq!(same, handles[0]);
        ok(virt::cuMemRelease(same));
    }
    let numbers: Vec<u8> = files.iter().flat_map(|file| file.to_le_bytes()).collect();
    say("files", &numbers);
    hear("mapped");
    // The memory is the other's as long as it is mapped there.
    let before = free_bytes();
    unsafe { ok(virt::cuMemUnmap(p, 3 * PAGE)) };
    release_all(&handles);
    assert_eq!(free_bytes(), before);
    say("released", &[]);
    hear("unmapped");
    assert_eq!(free_bytes(), before + 3 * PAGE as u64);
    // A file whose memory is gone leads nowhere, nor does none.
    let mut gone = 0;
    let none = usize::MAX as *mut _;
    unsafe {
        assert_eq!(virt::cuMemImportFromShareableHandle(&mut gone, file, 1), 1);
        assert_eq!(virt::cuMemImportFromShareableHandle(&mut gone, none, 1), 1);
    }
}

fn chunks_in() {
    start(0);
    let numbers = hear("files");
    let number = |at: usize| u32::from_le_bytes(numbers[4 * at..4 * at + 4].try_into().unwrap());
    let p = reserve(3);
    let mut handles = Vec::new();
    for (index, (at, pages)) in CHUNKS.into_iter().enumerate() {
        // As a socket would bring it.
        let path = format!("/proc/{}/fd/{}", number(0), number(index + 1));
        let file = std::fs::File::open(path).unwrap();
        let mut handle = 0;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file) as usize as *mut _;
        unsafe {
            ok(virt::cuMemImportFromShareableHandle(&mut handle, fd, 1));
            drop(file);
            ok(virt::cuMemMap(
                p + (at * PAGE) as u64,
                pages * PAGE,
                0,
                handle,
                0,
            ));
        }
        handles.push(handle);
    }
    let_in(p, 3);
    assert_eq!(download(p, 3 * PAGE), pattern(5, 3 * PAGE));
    release_all(&handles);
    say("mapped", &[]);
    hear("released");
    // Its owner has released it: what is mapped stays.
    assert_eq!(download(p, 3 * PAGE), pattern(5, 3 * PAGE));
    upload(p, &pattern(6, 3 * PAGE));
    assert_eq!(download(p, 3 * PAGE), pattern(6, 3 * PAGE));
    unsafe { ok(virt::cuMemUnmap(p, 3 * PAGE)) };
    say("unmapped", &[]);
}

#[test]
fn physical_memory_is_shared_by_file_descriptors() {
    let (out, into) = pair("chunks_out", "chunks_in");
    succeeds(&out);
    succeeds(&into);
}

/// Runs two scenarios of one job at once, each seeing one GPU.
fn pair(a: &str, b: &str) -> (std::process::Output, std::process::Output) {
    pair_with(a, b, ("SIMCUDA_IPC_ONCE", "0"))
}

fn pair_with(a: &str, b: &str, set: (&str, &str)) -> (std::process::Output, std::process::Output) {
    let folder = tempfile::tempdir().unwrap();
    let job = format!("pair {} {a} {b}", std::process::id());
    let env = |gpu| {
        [
            ("SIMCUDA_JOB", job.as_str()),
            ("FOLDER", folder.path().to_str().unwrap()),
            ("CUDA_VISIBLE_DEVICES", gpu),
            set,
        ]
    };
    let first = command(a, &env("0")).spawn().unwrap();
    let second = command(b, &env("1")).spawn().unwrap();
    (finish(first), finish(second))
}

fn handle_of(p: u64) -> CUipcHandle {
    let mut h = CUipcHandle { reserved: [0; 64] };
    ok(unsafe { ipc::cuIpcGetMemHandle(&mut h, p) });
    h
}

fn heard(name: &str) -> CUipcHandle {
    CUipcHandle {
        reserved: hear(name).try_into().unwrap(),
    }
}

fn open(h: CUipcHandle) -> u64 {
    let mut p = 0;
    ok(unsafe { ipc::cuIpcOpenMemHandle_v2(&mut p, h, 1) });
    p
}

fn export() {
    start(0);
    let p = alloc(N);
    upload(p, &pattern(4, N));
    let h = handle_of(p);
    let mut own = 0;
    assert_eq!(
        unsafe { ipc::cuIpcOpenMemHandle_v2(&mut own, h, 1) },
        201,
        "one's own handle"
    );
    say("handle", &h.reserved);
    hear("done");
    assert_eq!(download(p + 5, N - 5), pattern(6, N - 5));
}

fn import() {
    let first = start(0);
    let h = heard("handle");
    let p = open(h);
    assert_eq!(open(h), p, "once more");
    in_a_second_context(first, h, p);
    ok(unsafe { ipc::cuIpcCloseMemHandle(p) });
    let own = alloc(N);
    let s = new_stream();
    ok(unsafe { copy::cuMemcpyDtoDAsync_v2(own, p, N, s) });
    sync(s);
    assert_eq!(download(own, N), pattern(4, N));
    upload(own, &pattern(6, N));
    ok(unsafe { copy::cuMemcpyDtoDAsync_v2(p + 5, own, N - 5, s) });
    sync(s);
    ok(unsafe { ipc::cuIpcCloseMemHandle(p) });
    assert_eq!(
        unsafe { ipc::cuIpcCloseMemHandle(p) },
        1,
        "as often as open"
    );
    let p = open(h);
    ok(unsafe { ipc::cuIpcCloseMemHandle(p) });
    say("done", b"");
}

/// A driver that opens what another process has once, and again when it has been closed.
fn import_once() {
    let first = start(0);
    let h = heard("handle");
    let p = open(h);
    let mut q = 0;
    assert_eq!(unsafe { ipc::cuIpcOpenMemHandle_v2(&mut q, h, 1) }, 208);
    let mut second = 0;
    ok(unsafe { context::cuCtxCreate_v2(&mut second, 0, 0) });
    assert_eq!(unsafe { ipc::cuIpcOpenMemHandle_v2(&mut q, h, 1) }, 208);
    ok(unsafe { context::cuCtxDestroy_v2(second) });
    ok(unsafe { context::cuCtxSetCurrent(first) });
    assert_eq!(download(p, N), pattern(4, N));
    ok(unsafe { ipc::cuIpcCloseMemHandle(p) });
    let p = open(h);
    upload(p + 5, &pattern(6, N - 5));
    ok(unsafe { ipc::cuIpcCloseMemHandle(p) });
    say("done", b"");
}

/// What is open in one context is not opened in another one of the same device, which reaches it all the same.
fn in_a_second_context(first: usize, h: CUipcHandle, p: u64) {
    let (mut second, mut q) = (0, 0);
    ok(unsafe { context::cuCtxCreate_v2(&mut second, 0, 0) });
    assert_eq!(unsafe { ipc::cuIpcOpenMemHandle_v2(&mut q, h, 1) }, 400);
    assert_eq!(download(p, 8), pattern(4, N)[..8]);
    ok(unsafe { context::cuCtxDestroy_v2(second) });
    ok(unsafe { context::cuCtxSetCurrent(first) });
}

#[test]
fn memory_goes_both_ways_between_processes_that_see_one_gpu_each() {
    let (a, b) = pair("export", "import");
    succeeds(&a);
    succeeds(&b);
}

#[test]
fn memory_is_opened_once_where_the_driver_is_to() {
    let (a, b) = pair_with("export", "import_once", ("SIMCUDA_IPC_ONCE", "1"));
    succeeds(&a);
    succeeds(&b);
}

/// Writes, and says so after (or without) having seen the end.
fn first(synchronize: bool) {
    start(0);
    let (p, q) = (alloc(N), alloc(N));
    let s = new_stream();
    ok(unsafe { copy::cuMemcpyDtoDAsync_v2(p, q, N, s) });
    if synchronize {
        sync(s);
    }
    say("handle", &handle_of(p).reserved);
    hear("done");
    sync(s);
}

fn second() {
    start(0);
    let p = open(heard("handle"));
    let own = alloc(N);
    let s = new_stream();
    ok(unsafe { copy::cuMemcpyDtoDAsync_v2(own, p, N, s) });
    sync(s);
    say("done", b"");
}

#[test]
fn an_observed_copy_is_ordered_for_every_process() {
    let (a, b) = pair("first", "second");
    succeeds(&a);
    succeeds(&b);
}

#[test]
fn an_unobserved_copy_races_with_another_process() {
    let (a, b) = pair("first_unsynchronized", "second");
    succeeds(&a);
    assert_eq!(b.status.code(), Some(86), "{}", stderr(&b));
    assert!(stderr(&b).contains("race"));
}

fn shared_flags() -> *mut u32 {
    use std::os::fd::AsRawFd;
    let path = std::path::Path::new(&std::env::var("FOLDER").unwrap()).join("flags");
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .unwrap();
    file.set_len(4096).unwrap();
    let p = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            3,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(p, libc::MAP_FAILED);
    ok(unsafe { memory::cuMemHostRegister_v2(p, 4096, 0) });
    p.cast()
}

/// The stream writes a flag behind its copies; the other process polls it on the host, copies, and answers
/// on a flag that a stream of the first waits for.
fn flags_out() {
    start(0);
    let (p, q) = (alloc(N), alloc(N));
    let s = new_stream();
    let flags = shared_flags();
    say("handle", &handle_of(p).reserved);
    for round in 1..=20u32 {
        ok(unsafe { fill::cuMemsetD8Async(q, round as u8, N, s) });
        ok(unsafe { copy::cuMemcpyDtoDAsync_v2(p, q, N, s) });
        ok(unsafe { memop::cuStreamWriteValue32_v2(s, flags as u64, round, 0) });
        ok(unsafe { memop::cuStreamWaitValue32_v2(s, flags as u64 + 64, round, 0) });
    }
    sync(s);
    hear("done");
}

fn flags_in() {
    start(0);
    let p = open(heard("handle"));
    let own = alloc(N);
    let s = new_stream();
    let flags = shared_flags();
    for round in 1..=20u32 {
        while unsafe { flags.read_volatile() } < round {
            std::thread::yield_now();
        }
        ok(unsafe { copy::cuMemcpyDtoDAsync_v2(own, p, N, s) });
        ok(unsafe { memop::cuStreamWriteValue32_v2(s, flags as u64 + 64, round, 0) });
        sync(s);
        assert_eq!(download(own, 16), [round as u8; 16]);
    }
    say("done", b"");
}

#[test]
fn flags_in_shared_memory_order_two_processes() {
    let (a, b) = pair("flags_out", "flags_in");
    succeeds(&a);
    succeeds(&b);
}

fn event_out() {
    start(0);
    let (p, q) = (alloc(N), alloc(N));
    upload(q, &pattern(8, N));
    let s = new_stream();
    let mut e = 0;
    let mut h = CUipcHandle { reserved: [0; 64] };
    unsafe {
        ok(event::cuEventCreate(&mut e, 6));
        ok(copy::cuMemcpyDtoDAsync_v2(p, q, N, s));
        ok(event::cuEventRecord(e, s));
        ok(ipc::cuIpcGetEventHandle(&mut h, e));
    }
    say("event", &h.reserved);
    say("handle", &handle_of(p).reserved);
    hear("done");
    sync(s);
}

fn event_in() {
    start(0);
    let p = open(heard("handle"));
    let own = alloc(N);
    let s = new_stream();
    let mut e = 0;
    unsafe {
        ok(ipc::cuIpcOpenEventHandle(&mut e, heard("event")));
        ok(stream::cuStreamWaitEvent(s, e, 0));
        ok(copy::cuMemcpyDtoDAsync_v2(own, p, N, s));
        ok(event::cuEventSynchronize(e));
    }
    sync(s);
    assert_eq!(download(own, N), pattern(8, N));
    say("done", b"");
}

#[test]
fn shared_events_order_two_processes() {
    let (a, b) = pair("event_out", "event_in");
    succeeds(&a);
    succeeds(&b);
}

fn free_early() {
    start(0);
    let p = alloc(N);
    say("handle", &handle_of(p).reserved);
    hear("opened");
    ok(unsafe { memory::cuMemFree_v2(p) });
    say("freed", b"");
    hear("done");
}

fn use_late() {
    start(0);
    let h = heard("handle");
    let p = open(h);
    say("opened", b"");
    hear("freed");
    let own = alloc(N);
    let s = new_stream();
    // Nothing faults: the mapping keeps the pages. It is wrong all the same.
    ok(unsafe { copy::cuMemcpyDtoDAsync_v2(own, p, N, s) });
    sync(s);
    ok(unsafe { ipc::cuIpcCloseMemHandle(p) });
    let mut again = 0;
    assert_eq!(unsafe { ipc::cuIpcOpenMemHandle_v2(&mut again, h, 1) }, 1);
    say("done", b"");
}

#[test]
fn a_mapping_of_freed_memory_is_reported_when_used() {
    let (a, b) = pair("free_early", "use_late");
    succeeds(&a);
    assert_eq!(b.status.code(), Some(86));
    assert!(stderr(&b).contains("its owner has freed"), "{}", stderr(&b));
}

fn hang_around() {
    start(0);
    alloc(10 << 30);
    let s = new_stream();
    let (p, q) = (alloc(N), alloc(N));
    ok(unsafe { copy::cuMemcpyDtoDAsync_v2(p, q, N, s) });
    say("here", b"");
    loop {
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
}

/// Beluga's V100 has 16160 MiB: this fits only if nobody else has 10 GiB of it.
fn take_all() {
    start(0);
    alloc(15 << 30);
    let s = new_stream();
    sync(s);
}

#[test]
fn what_a_killed_process_held_is_reclaimed() {
    let folder = tempfile::tempdir().unwrap();
    let job = format!("killed {}", std::process::id());
    let env = [
        ("SIMCUDA_JOB", job.as_str()),
        ("FOLDER", folder.path().to_str().unwrap()),
    ];
    let mut child = command("hang_around", &env).spawn().unwrap();
    hear_in(folder.path(), "here");
    child.kill().unwrap();
    child.wait().unwrap();
    succeeds(&finish(command("take_all", &env).spawn().unwrap()));
    let left = std::fs::read_dir("/dev/shm")
        .unwrap()
        .flatten()
        .filter(|e| {
            let name = e.file_name().to_string_lossy().into_owned();
            name.contains(&format!(
                "{:016x}",
                simcuda::topology::fnv1a(format!("named {job}").as_bytes())
            ))
        });
    assert_eq!(left.count(), 0);
}

/// Each process sends to the next, many times: eight processes on however few cores.
fn ring() {
    let me: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let n = 8;
    start(0);
    let (p, q) = (alloc(N), alloc(N));
    say(&format!("handle{me}"), &handle_of(p).reserved);
    let next = open(heard(&format!("handle{}", (me + 1) % n)));
    let s = new_stream();
    for round in 0..10u8 {
        ok(unsafe { fill::cuMemsetD8Async(q, round * 8 + me as u8, N, s) });
        ok(unsafe { copy::cuMemcpyDtoDAsync_v2(next, q, N, s) });
        sync(s);
        say(&format!("sent{me}.{round}"), b"");
        hear(&format!("sent{}.{round}", (me + n - 1) % n));
        assert_eq!(download(p, 8), [round * 8 + ((me + n - 1) % n) as u8; 8]);
        say(&format!("seen{me}.{round}"), b"");
        hear(&format!("seen{}.{round}", (me + 1) % n));
    }
    say(&format!("end{me}"), b"");
    (0..n).for_each(|r| drop(hear(&format!("end{r}"))));
}

#[test]
fn eight_processes_get_on() {
    let folder = tempfile::tempdir().unwrap();
    let job = format!("ring {}", std::process::id());
    let children: Vec<_> = (0..8)
        .map(|r| {
            let (rank, gpu) = (r.to_string(), r.to_string());
            let env = [
                ("SIMCUDA_JOB", job.as_str()),
                ("FOLDER", folder.path().to_str().unwrap()),
                ("CUDA_VISIBLE_DEVICES", gpu.as_str()),
                ("RANK", rank.as_str()),
                ("SIMCUDA_TOPOLOGY", "dgx1-v100"),
            ];
            command("ring", &env).spawn().unwrap()
        })
        .collect();
    children.into_iter().for_each(|c| succeeds(&finish(c)));
}

/// A child in a pid namespace of its own, as in a container; `None` where that is not permitted.
fn in_container(name: &str, env: &[(&str, &str)]) -> Option<std::process::Command> {
    let container = || {
        let mut command = std::process::Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child"]);
        command
    };
    let permitted = container().arg("true").output();
    if !permitted.is_ok_and(|output| output.status.success()) {
        eprintln!(
            "skipped: no pid namespace of one's own is permitted here (unshare --pid --mount-proc)"
        );
        return None;
    }
    let plain = command(name, env);
    let mut command = container();
    command.arg(plain.get_program()).args(plain.get_args());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    Some(command)
}

/// Two processes that do not see each other copy at the same time, each to the rhythm of the other.
fn apart() {
    let me: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let other = 1 - me;
    start(0);
    let (p, q) = (alloc(N), alloc(N));
    say(&format!("handle{me}"), &handle_of(p).reserved);
    let theirs = heard(&format!("handle{other}"));
    let mut address = 0;
    assert_ne!(
        unsafe { ipc::cuIpcOpenMemHandle_v2(&mut address, theirs, 1) },
        0,
        "the owner is not to be seen"
    );
    let s = new_stream();
    for round in 0..10u8 {
        ok(unsafe { fill::cuMemsetD8Async(q, round * 2 + me as u8, N, s) });
        ok(unsafe { copy::cuMemcpyDtoDAsync_v2(p, q, N, s) });
        say(&format!("queued{me}.{round}"), b"");
        hear(&format!("queued{other}.{round}"));
        sync(s);
        assert_eq!(download(p, 8), [round * 2 + me as u8; 8]);
    }
    say(&format!("end{me}"), b"");
    hear(&format!("end{other}"));
}

#[test]
fn processes_of_two_containers_share_the_gpus_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let job = format!("containers {}", std::process::id());
    let env = |rank| {
        [
            ("SIMCUDA_JOB", job.as_str()),
            ("FOLDER", folder.path().to_str().unwrap()),
            ("RANK", rank),
        ]
    };
    let Some(mut first) = in_container("apart", &env("0")) else {
        return;
    };
    let first = first.spawn().unwrap();
    let mut second = in_container("apart", &env("1")).unwrap();
    let second = second.spawn().unwrap();
    succeeds(&finish(first));
    succeeds(&finish(second));
}

#[test]
fn what_a_killed_process_of_a_container_held_is_reclaimed() {
    let folder = tempfile::tempdir().unwrap();
    let job = format!("killed container {}", std::process::id());
    let env = [
        ("SIMCUDA_JOB", job.as_str()),
        ("FOLDER", folder.path().to_str().unwrap()),
    ];
    let Some(mut container) = in_container("hang_around", &env) else {
        return;
    };
    // Keeps the node in being, so that what is reclaimed is a row of it and not the whole.
    let other = tempfile::tempdir().unwrap();
    let mut witness = command(
        "hang_around",
        &[
            ("SIMCUDA_JOB", job.as_str()),
            ("FOLDER", other.path().to_str().unwrap()),
            ("CUDA_VISIBLE_DEVICES", "1"),
        ],
    )
    .spawn()
    .unwrap();
    hear_in(other.path(), "here");
    let mut child = container.spawn().unwrap();
    hear_in(folder.path(), "here");
    let refused = finish(command("take_all", &env).spawn().unwrap());
    assert!(!refused.status.success(), "the other one holds 10 GiB");
    child.kill().unwrap();
    child.wait().unwrap();
    // The kernel takes the namespace down a moment after its keeper.
    let taken = (0..100).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        finish(command("take_all", &env).spawn().unwrap())
            .status
            .success()
    });
    witness.kill().unwrap();
    witness.wait().unwrap();
    assert!(taken, "10 GiB are lost");
}
