//! What the executors do, over the simulated driver.

use super::{planner, random_plan, Random};
use crate::cuda::tests::bench::{at, device_memory, pattern, retain, symbol, use_device, Bench};
use crate::cuda::{driver, reach, Budget, ContextKey, Entered, Error};
use crate::exec::*;
use crate::plan::{Message, Occupancy, Options, Planner};
use std::ffi::CString;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Bytes before and behind a buffer that must stay as they are.
const GUARD: usize = 4096;

struct Room {
    planner: Planner,
    contexts: [Option<ContextKey>; MAX_GPUS],
    source: Vec<u64>,
    target: Vec<u64>,
    bytes: usize,
}

impl Room {
    /// Two buffers on every GPU of the node.
    fn new(bytes: u64) -> Room {
        let node = std::env::var("EXEC_TEST_NODE").expect("a node");
        use_device(0);
        let planner = planner(&node);
        let gpus = planner.gpus();
        let mut room = Room {
            planner,
            contexts: [None; MAX_GPUS],
            source: Vec::new(),
            target: Vec::new(),
            bytes: bytes as usize,
        };
        for gpu in 0..gpus {
            let context = retain(gpu as i32);
            room.contexts[gpu] = Some(ContextKey::of(context).unwrap());
            let _entered = Entered::enter(context).unwrap();
            room.source.push(device_memory(room.bytes + 2 * GUARD));
            room.target.push(device_memory(room.bytes + 2 * GUARD));
        }
        room
    }

    fn bench(&self, gpu: u8) -> Bench {
        Bench::new(self.contexts[usize::from(gpu)].unwrap().handle)
    }

    fn upload(&self, gpu: u8, address: u64, bytes: &[u8]) {
        self.bench(gpu).upload(address, bytes);
    }

    fn download(&self, gpu: u8, address: u64, bytes: usize) -> Vec<u8> {
        self.bench(gpu).download(address, bytes)
    }

    fn request<'a>(&self, plan: &'a Plan, shift: u64) -> Request<'a> {
        let from = self.source[usize::from(plan.message.from)];
        Request {
            plan,
            contexts: self.contexts,
            source: [from + shift; MAX_GPUS],
            target: self.target[usize::from(plan.message.to)] + GUARD as u64 + shift,
            mappings: Vec::new(),
            after: Vec::new(),
        }
    }

    /// Puts data at the source and poison at the target.
    fn prepare(&self, plan: &Plan, seed: u8, shift: u64) -> Vec<u8> {
        let bytes = plan.message.bytes as usize;
        let data = pattern(seed, bytes);
        let (from, to) = (plan.message.from, plan.message.to);
        self.upload(from, self.source[usize::from(from)] + shift, &data);
        let poison = vec![seed ^ 0xa5; self.bytes + 2 * GUARD];
        self.upload(to, self.target[usize::from(to)], &poison);
        data
    }

    /// The bytes are there, and those around them as they were.
    fn check(&self, plan: &Plan, data: &[u8], seed: u8, shift: u64, what: &str) {
        let to = plan.message.to;
        let all = self.download(to, self.target[usize::from(to)], self.bytes + 2 * GUARD);
        let begin = GUARD + shift as usize;
        let end = begin + data.len();
        assert!(all[begin..end] == *data, "{what}: wrong bytes");
        let around = all[..begin].iter().chain(&all[end..]);
        assert!(
            around.into_iter().all(|byte| *byte == seed ^ 0xa5),
            "{what}: bytes around it have changed"
        );
    }

    fn plan(&self, from: u8, to: u8, bytes: u64) -> Plan {
        let options = Options {
            staging_bytes: MIB,
            chunk_bytes_min: 64 << 10,
            gain_min: 0.0,
            ..Options::default()
        };
        self.plan_by(from, to, bytes, &options)
    }

    fn plan_by(&self, from: u8, to: u8, bytes: u64, options: &Options) -> Plan {
        let message = Message::new(from, to, bytes);
        let planned = self.planner.plan(&Occupancy::free(), &message, options);
        planned.unwrap()
    }
}

fn exec(how: Option<ExecutorName>) -> Exec {
    Exec::new(Settings {
        forced: how,
        ..Settings::default()
    })
}

fn finish(exec: &mut Exec, mut drive: Drive) -> Ended<()> {
    let start = Instant::now();
    while !exec.poll(&mut drive)? {
        assert!(start.elapsed() < Duration::from_secs(60), "it never ends");
        std::thread::yield_now();
    }
    assert!(drive.is_over());
    Ok(())
}

pub(super) fn bytes() {
    let room = Room::new(14 * MIB);
    let mut execs = ExecutorName::ALL.map(|how| exec(Some(how)));
    let mut random = Random::new(5);
    let (mut batches, mut relays) = (0, 0);
    for round in 0..12u8 {
        // Of small ones there is little to split.
        let most = if round % 2 == 0 { 14 * MIB } else { MIB };
        let plan = random_plan(&room.planner, &mut random, most);
        relays += plan.paths().len() - 1;
        for exec in &mut execs {
            let data = room.prepare(&plan, round, 0);
            let drive = exec.launch(room.request(&plan, 0)).unwrap();
            let how = drive.how;
            batches += usize::from(how == ExecutorName::Batch);
            finish(exec, drive).unwrap();
            room.check(&plan, &data, round, 0, &format!("{round} {how:?} {plan:?}"));
        }
    }
    assert!(
        batches > 0 && relays > 3,
        "{batches} {relays}: the plans are too simple"
    );
    assert_eq!(
        crate::cuda::tests::bench::current(),
        room.contexts[0].unwrap().handle
    );
}

fn count(counter: Counter) -> u64 {
    stats::get(counter)
}

fn graphs() -> [u64; 4] {
    [
        Counter::GraphsBuilt,
        Counter::GraphsRelaunched,
        Counter::GraphsUpdated,
        Counter::GraphsEvicted,
    ]
    .map(count)
}

pub(super) fn cache() {
    let room = Room::new(2 * MIB);
    let mut exec = Exec::new(Settings {
        forced: Some(ExecutorName::Graph),
        graphs_max: 3,
        ..Settings::default()
    });
    let mut go = |plan: &Plan, shift: u64| {
        let seed = shift as u8 + 1;
        let data = room.prepare(plan, seed, shift);
        let drive = exec.launch(room.request(plan, shift)).unwrap();
        assert_eq!(drive.how, ExecutorName::Graph);
        finish(&mut exec, drive).unwrap();
        room.check(plan, &data, seed, shift, "graph");
        exec.graphs()
    };
    let plan = room.plan(0, 1, MIB + 77);
    assert!(plan.paths().len() > 2, "{plan:?}");
    go(&plan, 0);
    assert_eq!(graphs(), [1, 0, 0, 0]);
    for _ in 0..3 {
        go(&plan, 0);
    }
    assert_eq!(graphs(), [1, 3, 0, 0]);
    // Other addresses: changed in place, not built anew, and right; then back.
    for shift in [33, 64, 0] {
        go(&plan, shift);
    }
    assert_eq!(graphs(), [1, 3, 3, 0]);
    // Other shapes: bounded, and the one unused for longest goes.
    for bytes in [MIB, MIB + 1, MIB + 2, MIB + 3] {
        assert!(go(&room.plan(0, 1, bytes), 0) <= 3);
    }
    assert_eq!(graphs(), [5, 3, 3, 2]);
    go(&room.plan(0, 1, MIB + 3), 0);
    go(&room.plan(0, 1, MIB + 1), 0);
    assert_eq!(graphs(), [5, 5, 3, 2]);
    go(&plan, 0);
    assert_eq!(graphs(), [6, 5, 3, 3], "the first had been evicted");
    go(&room.plan(0, 1, MIB + 3), 0);
    assert_eq!(graphs(), [6, 6, 3, 3], "the latest had not");
}

/// Messages of one shape, all at once.
pub(super) fn window() {
    let room = Room::new(16 * MIB);
    let mut exec = exec(Some(ExecutorName::Graph));
    let plan = room.plan(0, 1, MIB + 5);
    let data = pattern(3, room.bytes);
    room.upload(0, room.source[0], &data);
    room.upload(1, room.target[1], &vec![0xcc; room.bytes + GUARD]);
    let shifts: Vec<u64> = (0..6).map(|at| at * (MIB + 100)).collect();
    let drives: Vec<Drive> = shifts
        .iter()
        .map(|shift| exec.launch(room.request(&plan, *shift)).unwrap())
        .collect();
    let of = |how| drives.iter().filter(|drive| drive.how == how).count();
    assert_eq!(
        of(ExecutorName::Graph),
        graphs::INSTANCES_MAX,
        "as many as there may be"
    );
    assert_eq!(of(ExecutorName::Streams), 2, "the others go another way");
    assert_eq!(graphs()[..3], [4, 0, 0], "none was launched while it ran");
    for drive in drives {
        finish(&mut exec, drive).unwrap();
    }
    for shift in &shifts {
        let got = room.download(
            1,
            room.target[1] + GUARD as u64 + shift,
            plan.message.bytes as usize,
        );
        assert!(got == data[*shift as usize..][..got.len()], "{shift}");
    }
    // Free again.
    let drive = exec.launch(room.request(&plan, 0)).unwrap();
    assert_eq!((drive.how, graphs()[0]), (ExecutorName::Graph, 4));
    // Nobody waits for it: it is given back all the same, and a bounded number is under way.
    drop(drive);
    let mut under_way = Vec::new();
    let refused = loop {
        let shift = (1 + under_way.len() as u64) * (MIB + 100);
        match exec.launch(room.request(&plan, shift)) {
            Ok(drive) => under_way.push(drive),
            Err(error) => break error,
        }
        assert!(under_way.len() < 12, "no bound");
    };
    assert!(matches!(refused.error, Error::Exhausted(_)) && exec.is_busy());
    for drive in under_way {
        finish(&mut exec, drive).unwrap();
    }
    exec.close();
    assert!(!exec.is_busy());
}

/// Messages of equal and of different lengths to one place, launched at once, each by any executor: the last one stays. (The
/// driver's checker sees copies that merely happened to be in order.)
pub(super) fn order() {
    const MESSAGES: usize = 4;
    let room = Room::new(16 * MIB);
    let mut random = Random::new(7);
    let mut exec = exec(None);
    for round in 0..24 {
        let (from, to) = (0, 1 + (round % 3) as u8);
        let long = MIB + random.below(2 * MIB);
        let poison = vec![0xa5; room.bytes + 2 * GUARD];
        room.upload(to, room.target[usize::from(to)], &poison);
        let mut expected = poison;
        let mut drives: Vec<Drive> = Vec::new();
        for message in 0..MESSAGES {
            let bytes = if random.below(3) == 0 {
                MIB + random.below(long - MIB + 1)
            } else {
                long
            };
            let plan = room.plan(from, to, bytes);
            let data = pattern((8 * round + message) as u8, bytes as usize);
            let shift = message as u64 * 4 * MIB;
            room.upload(from, room.source[usize::from(from)] + shift, &data);
            expected[GUARD..][..data.len()].copy_from_slice(&data);
            let mut request = room.request(&plan, 0);
            request.source = [room.source[usize::from(from)] + shift; MAX_GPUS];
            request.after = drives.iter().map(|drive| drive.number).collect();
            let how = ExecutorName::ALL[random.below(3) as usize];
            exec.settings.forced = Some(how);
            drives.push(exec.launch(request).unwrap());
        }
        for drive in drives {
            finish(&mut exec, drive).unwrap();
        }
        let got = room.download(to, room.target[usize::from(to)], expected.len());
        assert!(got == expected, "round {round}");
    }
    exec.close();
}

/// Windows of which each message is received in the place of the one before, then windows in places of their own.
pub(super) fn in_place() {
    const MESSAGES: u64 = 4;
    let room = Room::new(16 * MIB);
    let mut exec = exec(None);
    let mut plan = room.plan(0, 1, MIB + 5);
    plan.message.window = MESSAGES as u32;
    plan.predicted_us *= MESSAGES as f64;
    let mut streams = 0;
    let mut window = |exec: &mut Exec, apart: u64| -> Vec<ExecutorName> {
        let mut drives: Vec<Drive> = Vec::new();
        for message in 0..MESSAGES {
            let mut request = room.request(&plan, message * apart);
            if apart == 0 {
                request.after = drives.iter().map(|drive| drive.number).collect();
            }
            drives.push(exec.launch(request).unwrap());
        }
        let hows: Vec<ExecutorName> = drives.iter().map(|drive| drive.how).collect();
        // Before the first is known to be over, the driver is not asked about those that follow it on its streams.
        if !hows.contains(&ExecutorName::Graph) {
            wait_for_all(&room);
            for drive in drives.iter_mut().skip(1) {
                assert!(!exec.poll(drive).unwrap(), "the driver was asked");
            }
            streams += 1;
        }
        for drive in drives {
            finish(exec, drive).unwrap();
        }
        hows
    };
    // Nothing could be launched behind a graph before all of it has ended.
    let hows: Vec<Vec<ExecutorName>> = (0..8).map(|_| window(&mut exec, 0)).collect();
    let later = || hows[1..].iter().flatten();
    assert!(later().all(|how| *how != ExecutorName::Graph), "{hows:?}");
    let apart: Vec<Vec<ExecutorName>> = (0..8).map(|_| window(&mut exec, MIB + 100)).collect();
    assert!(
        apart
            .iter()
            .flatten()
            .any(|how| *how == ExecutorName::Graph),
        "{apart:?}"
    );
    assert!(streams >= 7, "{hows:?}, {apart:?}");
    exec.close();
}

pub(super) fn choice() {
    let room = Room::new(16 * MIB);
    let mut exec = exec(None);
    let mut plan = room.plan_by(0, 1, 16 * MIB, &Options::default());
    assert!(Schedule::of(&plan).unwrap().has_batches(), "{plan:?}");
    let taken = |exec: &mut Exec, plan: &Plan| -> Vec<ExecutorName> {
        let take = |_| {
            let drive = exec.launch(room.request(plan, 0)).unwrap();
            let how = drive.how;
            finish(exec, drive).unwrap();
            how
        };
        (0..10).map(take).collect()
    };
    // Alone, a message would wait longer for the first batches than all launches take: that is not tried.
    let hows = taken(&mut exec, &plan);
    assert!(!hows.contains(&ExecutorName::Batch), "{hows:?}");
    // In a window, whose pipeline is filled once, it is.
    plan.message.window = 16;
    plan.predicted_us *= 16.0;
    let more = taken(&mut exec, &plan);
    for how in ExecutorName::ALL {
        let mut all = hows.iter().chain(&more);
        assert!(
            all.any(|taken| *taken == how),
            "{how:?} was not tried: {hows:?}, {more:?}"
        );
    }
    let schedule = Schedule::of(&plan).unwrap();
    let costs = exec
        .costs()
        .of((schedule.steps.len().ilog2(), schedule.gpus.count_ones()));
    for (how, cost) in ExecutorName::ALL.iter().zip(costs) {
        println!(
            "{how:?}: {} copies, {:.1} us",
            schedule.steps.len(),
            cost.ns / 1000.0
        );
        // A copy costs microseconds by the simulated clock; the machine's would not say the same twice.
        let per_copy = cost.ns / schedule.steps.len() as f64;
        assert!(
            (500.0..10_000.0).contains(&per_copy),
            "{how:?}: {per_copy} ns a copy"
        );
    }
    assert!(
        costs[ExecutorName::Batch as usize].ns < costs[ExecutorName::Streams as usize].ns,
        "{costs:?}: a batch costs less than its copies"
    );
}

/// Plans the errors of a text from now on; `None` ends that.
fn fail(text: Option<&str>) {
    type Plan = unsafe extern "C" fn(*const libc::c_char) -> i32;
    // SAFETY: the simulated driver's function has this signature.
    let plan = unsafe { std::mem::transmute::<*mut libc::c_void, Plan>(symbol(c"simcudaFaults")) };
    let text = text.map(|text| CString::new(text).unwrap());
    // SAFETY: null or NUL-terminated.
    let done = unsafe { plan(text.as_ref().map_or(std::ptr::null(), |text| text.as_ptr())) };
    assert_eq!(done, 0);
}

fn calls() -> u64 {
    type Calls = unsafe extern "C" fn() -> libc::c_ulonglong;
    // SAFETY: the simulated driver's function has this signature, and takes nothing.
    unsafe { std::mem::transmute::<*mut libc::c_void, Calls>(symbol(c"simcudaFaultCalls"))() }
}

pub(super) fn faults() {
    let room = Room::new(MIB);
    let plan = room.plan(0, 1, MIB);
    let (mut failed, mut right) = (0, 0);
    for how in ExecutorName::ALL {
        // A fresh one each time, so that streams, staging and graphs are made under errors too; `lasting`: nothing
        // works any more from that call on.
        for lasting in ["", "+"] {
            let mut position = 1;
            loop {
                let what = format!("{how:?}, call {position}{lasting}");
                let mut exec = exec(Some(how));
                let data = room.prepare(&plan, 1, 0);
                fail(Some(&format!("*:{position}{lasting}=CUDA_ERROR_UNKNOWN")));
                let ended = exec
                    .launch(room.request(&plan, 0))
                    .and_then(|drive| finish(&mut exec, drive));
                let made = calls();
                fail(None);
                match ended {
                    Ok(()) => {
                        room.check(&plan, &data, 1, 0, &what);
                        right += 1;
                    }
                    // Where the driver answers nothing but errors, nobody can tell.
                    Err(_) if lasting == "+" => {
                        wait_for_all(&room);
                        failed += 1;
                    }
                    Err(_) => {
                        // Nothing of it runs: the buffer stays what the next one writes.
                        let other = vec![0x77; MIB as usize];
                        room.upload(1, room.target[1] + GUARD as u64, &other);
                        wait_for_all(&room);
                        let got = room.download(1, room.target[1] + GUARD as u64, MIB as usize);
                        assert!(got == other, "{what}: written to after its end");
                        failed += 1;
                    }
                }
                assert!(!exec.is_busy(), "{what}: staging is not given back");
                let drive = exec.launch(room.request(&plan, 0)).expect(&what);
                finish(&mut exec, drive).expect(&what);
                if made < position {
                    break;
                }
                // Every call at the beginning, where each is another; then a sample.
                position += if position < 120 { 3 } else { 17 };
            }
        }
    }
    assert!(failed > 20 && right > 20, "{failed} {right}");
}

fn wait_for_all(room: &Room) {
    for key in room.contexts.iter().flatten() {
        let entered = Entered::enter_same(*key).unwrap();
        entered.driver().ctx_synchronize().unwrap();
    }
}

fn free_memory(key: ContextKey) -> usize {
    let entered = Entered::enter_same(key).unwrap();
    let (mut free, mut total) = (0, 0);
    entered
        .driver()
        .mem_get_info(&mut free, &mut total)
        .unwrap();
    free
}

pub(super) fn memory() {
    let room = Room::new(16 * MIB);
    let key = |gpu: usize| room.contexts[gpu].unwrap();
    let before: Vec<usize> = (0..4).map(|gpu| free_memory(key(gpu))).collect();
    let mut exec = Exec::new(Settings {
        gpu_bytes_max: 2 * MIB,
        host_budget: Budget::new(2 * MIB as usize),
        forced: Some(ExecutorName::Streams),
        ..Settings::default()
    });
    let over_relays = Options {
        direct: false,
        host: false,
        staging_bytes: 2 * MIB,
        chunk_bytes_min: 512 << 10,
        gain_min: 0.0,
        ..Options::default()
    };
    let plan = room.plan_by(0, 1, 2 * MIB, &over_relays);
    let mut drives = Vec::new();
    let refused = loop {
        let shift = drives.len() as u64 * 2 * MIB;
        match exec.launch(room.request(&plan, shift)) {
            Ok(drive) => drives.push(drive),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused.error, Error::Exhausted(_)), "{refused}");
    assert!(
        matches!(refused.place, Some(Place::Gpu(2 | 3))),
        "{refused:?}"
    );
    assert!((1..=2).contains(&drives.len()), "{} plans", drives.len());
    for gpu in [2, 3] {
        assert_eq!(exec.staging_in(key(gpu)), 2 * MIB);
    }
    for drive in drives {
        finish(&mut exec, drive).unwrap();
    }
    // Rings of another size take the place of idle ones.
    let options = Options {
        direct: false,
        host: false,
        staging_bytes: 2 * MIB,
        gain_min: 0.0,
        chunk_bytes_min: 512 << 10,
        ..Options::default()
    };
    let large = room.plan_by(0, 1, 4 * MIB, &options);
    assert!(
        large.paths().iter().any(|path| path.staging_bytes() > MIB),
        "{large:?}"
    );
    let drive = exec.launch(room.request(&large, 0)).unwrap();
    assert!(exec.staging_in(key(2)) <= 2 * MIB);
    finish(&mut exec, drive).unwrap();
    // The same in host memory.
    let by_host = Options {
        relay: false,
        host: true,
        ..options
    };
    let plan = room.plan_by(0, 1, 4 * MIB, &by_host);
    let drive = exec.launch(room.request(&plan, 0)).unwrap();
    assert_eq!(exec.staging_in_host(), 2 * MIB);
    finish(&mut exec, drive).unwrap();
    // A ring that never fits is not waited for: nothing is under way.
    let options = Options {
        staging_bytes: 12 * MIB,
        chunk_bytes_min: 2 * MIB,
        ..options
    };
    let huge = room.plan_by(0, 1, 64 * MIB, &options);
    assert!(exec.launch(room.request(&huge, 0)).is_err() && !exec.is_busy());
    exec.close();
    exec.release();
    let after: Vec<usize> = (0..4).map(|gpu| free_memory(key(gpu))).collect();
    assert_eq!(before, after, "all is given back");
    // Contexts that were made for plans only are gone with them.
    assert!(reach::devices().len() >= 4 && driver().is_some() && !at(room.target[0]).is_null());
}
