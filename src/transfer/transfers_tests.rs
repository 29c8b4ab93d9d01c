//! Two processes that know nothing of MPI, on one simulated node. One sends, the other receives; what they
//! tell each other goes through a socket.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::{Descriptor, Ended, LentMemory, Transfers};
use crate::config::Config;
use crate::cuda::tests::bench::{at, device_memory, free, use_device, Bench};
use crate::cuda::tests::{run_roles, ROLE};
use crate::node::{Launch, Node, RTS_BYTES};
use crate::transfer::fetch::protocol::bounce;
use crate::transfer::node_options;
use crate::transfer::story::Path;

#[path = "transfers/expected_tests.rs"]
mod expected;

const PATIENCE: Duration = Duration::from_secs(60);
/// The test that plays a role.
const ROLES: &str = "transfer::transfers::tests::role";
/// The largest transfer, bytes.
const MOST: usize = (9 << 20) + 5;
/// The price of the protocol that only tests have, if the receiver is to have it.
const BOUNCE: &str = "ANABRANCH_TEST_BOUNCE";
/// Bytes around a transfer that stay as they are.
const GUARD: usize = 512;

/// Where the bytes are, and where they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Device,
    Host,
}
use Memory::{Device, Host};

/// What is transferred: from, to, bytes, offset of both ends in their allocation, and the path by which it
/// must come.
const CASES: [(Memory, Memory, usize, usize, Path); 12] = [
    (Device, Device, 1, 0, Path::Direct),
    (Device, Device, 8, 3, Path::Direct),
    (Device, Device, 4097, 1, Path::Direct),
    (Device, Device, 300_001, 77, Path::Direct),
    (Device, Device, MOST, 5, Path::Direct),
    (Device, Host, 5, 2, Path::HostPipeline),
    (Device, Host, 1_000_003, 9, Path::HostPipeline),
    (Host, Device, 6, 1, Path::HostPipeline),
    (Host, Device, 3_000_001, 33, Path::HostPipeline),
    (Host, Host, 2_000_003, 7, Path::HostPipeline),
    (Device, Device, 0, 0, Path::Unknown),
    (Device, Device, 65_536, 0, Path::Direct),
];

/// Bytes that are others for each case, and not the same in two places.
fn bytes_of(case: usize, length: usize) -> Vec<u8> {
    let mut word = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(case as u64 + 1) | 1;
    let mut next = || {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        (word >> 32) as u8
    };
    (0..length).map(|_| next()).collect()
}

fn socket() -> String {
    std::env::var("ANABRANCH_CUDA_TEST_SOCKET").expect("a path")
}

/// The stream between the two: the sender waits for the receiver.
fn connect(sends: bool) -> UnixStream {
    if sends {
        let _ = std::fs::remove_file(socket());
        return UnixListener::bind(socket())
            .expect("bound")
            .accept()
            .expect("the peer")
            .0;
    }
    let start = Instant::now();
    loop {
        match UnixStream::connect(socket()) {
            Ok(stream) => return stream,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What the peer has offered next.
fn next_offer(stream: &mut UnixStream) -> Descriptor {
    let mut told = [0; RTS_BYTES];
    stream.read_exact(&mut told).expect("an offer");
    told
}

fn transfers(rank: u32) -> Transfers {
    let config = Config::default();
    let launch = Launch::named(&socket());
    let node = Node::register(&launch, rank, &node_options(&config)).expect("registered");
    Transfers::new(config, node, 17)
}

/// Both memories of a process, with room for each case.
struct Buffers {
    device: u64,
    host: Vec<u8>,
    bench: Bench,
}

impl Buffers {
    fn new(ordinal: i32) -> Buffers {
        let context = use_device(ordinal);
        Buffers {
            device: device_memory(MOST + 4 * GUARD),
            host: vec![0; MOST + 4 * GUARD],
            bench: Bench::new(context),
        }
    }

    /// What there is from an offset on.
    fn address(&mut self, memory: Memory, offset: usize) -> LentMemory {
        let from = GUARD + offset;
        let start = match memory {
            Device => at(self.device + from as u64).cast_mut(),
            Host => self.host[from..].as_mut_ptr().cast(),
        };
        // SAFETY: the memory is this process's, and is used and freed only once the transfers have ended.
        unsafe { LentMemory::new(start, (self.host.len() - from) as u64) }
    }

    fn write(&mut self, memory: Memory, bytes: &[u8]) {
        match memory {
            Device => self.bench.upload(self.device, bytes),
            Host => self.host[..bytes.len()].copy_from_slice(bytes),
        }
    }

    fn read(&mut self, memory: Memory, length: usize) -> Vec<u8> {
        match memory {
            Device => self.bench.download(self.device, length),
            Host => self.host[..length].to_vec(),
        }
    }
}

fn wait<T>(
    transfers: &mut Transfers,
    mut handle: T,
    test: fn(&mut Transfers, T) -> Result<Ended, T>,
) -> Ended {
    let start = Instant::now();
    loop {
        match test(transfers, handle) {
            Ok(ended) => return ended,
            Err(pending) => handle = pending,
        }
        assert!(start.elapsed() < PATIENCE, "it does not end");
        if !transfers.progress() {
            std::thread::yield_now();
        }
    }
}

fn sender() {
    let mut buffers = Buffers::new(0);
    let mut stream = connect(true);
    let mut transfers = transfers(0);
    // The peer is registered.
    stream.read_exact(&mut [0]).expect("a byte");
    for (case, (from, _, bytes, offset, path)) in CASES.into_iter().enumerate() {
        let mut image = vec![0xa5; GUARD + offset];
        image.extend(bytes_of(case, bytes));
        buffers.write(from, &image);
        let address = buffers.address(from, offset);
        let offered = transfers.offer(1, address.first(bytes as u64), None);
        let (sending, told) = offered.expect("offered");
        stream.write_all(&told).expect("written");
        let ended = wait(&mut transfers, sending, Transfers::test_send);
        let path = if bytes == 0 { Path::Direct } else { path };
        assert_eq!(ended, Ended::Complete(path), "case {case}");
    }
    // One that the peer cannot take, and one that it has no room for.
    let address = buffers.address(Device, 0);
    let (sending, mut told) = transfers
        .offer(1, address.first(100), None)
        .expect("offered");
    told[40] ^= 1;
    stream.write_all(&told).expect("written");
    told[40] ^= 1;
    stream.write_all(&told).expect("written");
    let ended = wait(&mut transfers, sending, Transfers::test_send);
    assert_eq!(
        ended,
        Ended::Complete(Path::Direct),
        "nothing of it was taken"
    );
    let nobody = transfers.offer(7, address.first(100), None);
    assert!(nobody.is_err_and(|why| why.to_string().contains("rank 7")));
    stream.write_all(&[1]).expect("written");
    drop(transfers);
    free(buffers.device);
}

fn receiver() {
    let price = std::env::var(BOUNCE).ok();
    let price: Option<u32> = price.map(|price| price.parse().expect("a price"));
    if let Some(price) = price {
        bounce::offer(price);
    }
    let mut buffers = Buffers::new(1);
    let mut stream = connect(false);
    let mut transfers = transfers(1);
    stream.write_all(&[1]).expect("written");
    for (case, (_, to, bytes, offset, path)) in CASES.into_iter().enumerate() {
        let length = offset + bytes + 2 * GUARD;
        buffers.write(to, &vec![0x5a; length]);
        let told = next_offer(&mut stream);
        let address = buffers.address(to, offset);
        let taken = transfers.take(&told, address.first(bytes as u64));
        let receiving = taken.expect("taken");
        let ended = wait(&mut transfers, receiving, Transfers::test_receive);
        assert_eq!(ended, Ended::Complete(path), "case {case}");
        let mut expected = vec![0x5a; GUARD + offset];
        expected.extend(bytes_of(case, bytes));
        expected.extend(vec![0x5a; GUARD]);
        assert!(
            buffers.read(to, length) == expected,
            "case {case}: other bytes"
        );
    }
    let cases = CASES.iter();
    let between_devices = cases.filter(|case| (case.0, case.1) == (Device, Device));
    let expected = match price {
        // Cheaper than a get.
        Some(0) => between_devices.map(|case| case.2 as u64).sum(),
        _ => 0,
    };
    assert_eq!(bounce::brought(), expected, "price {price:?}");
    buffers.write(Device, &[0x5a; 3 * GUARD]);
    let address = buffers.address(Device, 0);
    let told = next_offer(&mut stream);
    let taken = transfers.take(&told, address.first(100));
    assert!(taken.is_err(), "it is not what was sent");
    let told = next_offer(&mut stream);
    let taken = transfers.take(&told, address.first(99));
    let receiving = taken.expect("taken");
    let ended = wait(&mut transfers, receiving, Transfers::test_receive);
    assert_eq!(ended, Ended::Truncated(100), "there is no room for it");
    assert!(
        buffers.read(Device, 3 * GUARD) == [0x5a; 3 * GUARD],
        "nothing came"
    );
    stream.read_exact(&mut [0]).expect("a byte");
    drop(transfers);
    free(buffers.device);
}

/// Sends and receives a window of transfers at once, all of them received at one address, and waits for what it
/// sends first, as the peer does. What is left there is the last one.
fn exchange(rank: u32) {
    const WINDOW: usize = 6;
    const BYTES: usize = 200_003;
    let mut buffers = Buffers::new(rank as i32);
    let context = crate::cuda::tests::bench::current();
    let mut stream = connect(rank == 0);
    let mut transfers = transfers(rank);
    stream.write_all(&[1]).expect("written");
    stream.read_exact(&mut [0]).expect("a byte");
    for round in 0..4 {
        let from: Vec<u64> = (0..WINDOW).map(|_| device_memory(BYTES)).collect();
        let mut bench = Bench::new(context);
        let mut sending = Vec::new();
        for (number, address) in from.iter().enumerate() {
            let seed = 1000 * (rank as usize + 1) + 10 * round + number;
            bench.upload(*address, &bytes_of(seed, BYTES));
            // SAFETY: the memory is this process's, and changes only once the transfer has ended.
            let memory = unsafe { LentMemory::new(at(*address).cast_mut(), BYTES as u64) };
            let offered = transfers.offer(1 - rank, memory, None);
            let (one, descriptor) = offered.expect("offered");
            stream.write_all(&descriptor).expect("written");
            sending.push(one);
        }
        buffers.write(Device, &vec![0x5a; BYTES + 2 * GUARD]);
        let mut receiving = Vec::new();
        for _ in 0..WINDOW {
            let descriptor = next_offer(&mut stream);
            let address = buffers.address(Device, 0);
            let taken = transfers.take(&descriptor, address.first(BYTES as u64));
            receiving.push(taken.expect("taken"));
        }
        for one in sending {
            let ended = wait(&mut transfers, one, Transfers::test_send);
            assert!(matches!(ended, Ended::Complete(_)), "{ended:?}");
        }
        for one in receiving {
            let ended = wait(&mut transfers, one, Transfers::test_receive);
            assert!(matches!(ended, Ended::Complete(_)), "{ended:?}");
        }
        let last = 1000 * (2 - rank as usize) + 10 * round + WINDOW - 1;
        let mut expected = vec![0x5a; GUARD];
        expected.extend(bytes_of(last, BYTES));
        expected.extend(vec![0x5a; GUARD]);
        let found = buffers.read(Device, BYTES + 2 * GUARD);
        assert!(found == expected, "round {round}: not the last one");
        // The peer is through with what it has mapped of this process.
        stream.write_all(&[1]).expect("written");
        let start = Instant::now();
        stream.set_nonblocking(true).expect("set");
        while stream.read_exact(&mut [0]).is_err() {
            transfers.progress();
            assert!(start.elapsed() < PATIENCE, "the peer does not end");
            std::thread::yield_now();
        }
        stream.set_nonblocking(false).expect("set");
        from.into_iter().for_each(free);
    }
    drop(transfers);
    free(buffers.device);
}

/// An offer is taken back, and a peer dies with an offer that it has not taken and one that it was sent.
fn survivor() {
    let mut buffers = Buffers::new(0);
    let mut stream = connect(true);
    let mut transfers = transfers(0);
    // This process is registered.
    stream.write_all(&[1]).expect("written");
    let theirs = next_offer(&mut stream);
    let address = buffers.address(Device, 0);
    let (sending, taken_back) = transfers
        .offer(1, address.first(500), None)
        .expect("offered");
    assert_eq!(transfers.cancel(sending), Ok(()));
    stream.write_all(&taken_back).expect("written");
    let address = buffers.address(Device, 1000);
    let (sending, kept) = transfers
        .offer(1, address.first(500), None)
        .expect("offered");
    stream.write_all(&kept).expect("written");
    // The peer has looked at both, and ends.
    stream.read_exact(&mut [0]).expect("a byte");
    let address = buffers.address(Host, 0);
    let taken = transfers.take(&theirs, address.first(1 << 20));
    let receiving = taken.expect("taken");
    let ended = wait(&mut transfers, sending, Transfers::test_send);
    let Ended::Failed(why) = ended else {
        panic!("{ended:?}");
    };
    assert!(why.contains("has died"), "{why}");
    let ended = wait(&mut transfers, receiving, Transfers::test_receive);
    assert!(matches!(ended, Ended::Failed(_)), "{ended:?}");
    drop(transfers);
    free(buffers.device);
}

fn victim() {
    let mut buffers = Buffers::new(1);
    let mut stream = connect(false);
    let mut transfers = transfers(1);
    stream.read_exact(&mut [0]).expect("a byte");
    let address = buffers.address(Host, 0);
    let (_lost, descriptor) = transfers
        .offer(0, address.first(1 << 20), None)
        .expect("offered");
    stream.write_all(&descriptor).expect("written");
    let taken_back = next_offer(&mut stream);
    let address = buffers.address(Device, 0);
    let taken = transfers.take(&taken_back, address.first(500));
    assert!(taken.is_err(), "it was taken back");
    next_offer(&mut stream);
    stream.write_all(&[1]).expect("written");
    println!("scenario complete");
    // Not in order: nothing is given back.
    // SAFETY: ends the process.
    unsafe { libc::_exit(0) };
}

/// The scenarios. In an ordinary run there is no role and nothing to do.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    match role.as_str() {
        "sender" => sender(),
        "receiver" => receiver(),
        "exchange0" => exchange(0),
        "exchange1" => exchange(1),
        "writer" => expected::writer(),
        "reader" => expected::reader(1, true),
        "taker" => expected::reader(1, false),
        "neighbour" => expected::reader(0, false),
        "heir" => expected::heir(),
        "testator" => expected::testator(),
        "survivor" => survivor(),
        "victim" => victim(),
        other => panic!("unknown role {other}"),
    }
    println!("scenario complete");
}

#[test]
fn two_processes_without_mpi() {
    run_roles(ROLES, &["sender", "receiver"], true, &[]);
}

/// A protocol that is a file and a line in the table brings what it is the cheapest for, and nothing else.
#[test]
fn a_protocol_of_the_tests() {
    let roles = ["sender", "receiver"];
    for price in ["0", "2"] {
        run_roles(ROLES, &roles, true, &[(BOUNCE, price)]);
    }
}

#[test]
fn both_ways_to_one_address() {
    let roles = ["exchange0", "exchange1"];
    run_roles(ROLES, &roles, true, &[]);
    // The same, through staging: no memory of the other can be mapped.
    let refused = [(
        "SIMCUDA_FAULT",
        "cuIpcOpenMemHandle:1+=CUDA_ERROR_NOT_SUPPORTED",
    )];
    run_roles(ROLES, &roles, true, &refused);
}

#[test]
fn a_peer_that_dies() {
    run_roles(ROLES, &["survivor", "victim"], true, &[]);
}
