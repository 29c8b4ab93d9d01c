//! Two processes that know nothing of MPI, on one simulated node. One sends, the other receives; what they
//! tell each other goes through a socket.

use std::ffi::c_void;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::{Ended, Told, Transfers};
use crate::config::Config;
use crate::cuda::tests::bench::{at, device_memory, free, use_device, Bench};
use crate::cuda::tests::{run_roles, ROLE};
use crate::node::{Launch, Node, RTS_BYTES};
use crate::transfer::node_options;
use crate::transfer::story::Path;

const PATIENCE: Duration = Duration::from_secs(60);
/// The largest transfer, bytes.
const MOST: usize = (9 << 20) + 5;
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

    fn address(&mut self, memory: Memory, offset: usize) -> *mut c_void {
        let from = GUARD + offset;
        match memory {
            Device => at(self.device + from as u64).cast_mut(),
            Host => self.host[from..].as_mut_ptr().cast(),
        }
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

fn wait<T>(mut handle: T, mut poll: impl FnMut(T) -> Result<Ended, T>) -> Ended {
    let start = Instant::now();
    loop {
        match poll(handle) {
            Ok(ended) => return ended,
            Err(pending) => handle = pending,
        }
        assert!(start.elapsed() < PATIENCE, "it does not end");
        std::thread::yield_now();
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
        // SAFETY: the memory is this process's, and changes only once the transfer has ended.
        let offered = unsafe { transfers.offer(1, address, bytes as u64) };
        let (sending, told) = offered.expect("offered");
        stream.write_all(&told).expect("written");
        let ended = wait(sending, |sending| transfers.sent(sending));
        let path = if bytes == 0 { Path::Direct } else { path };
        assert_eq!(ended, Ended::Complete(path), "case {case}");
    }
    // One that the peer cannot take, and one that it has no room for.
    let address = buffers.address(Device, 0);
    // SAFETY: as above.
    let (sending, mut told) = unsafe { transfers.offer(1, address, 100) }.expect("offered");
    told[40] ^= 1;
    stream.write_all(&told).expect("written");
    told[40] ^= 1;
    stream.write_all(&told).expect("written");
    let ended = wait(sending, |sending| transfers.sent(sending));
    assert_eq!(
        ended,
        Ended::Complete(Path::Direct),
        "nothing of it was taken"
    );
    // SAFETY: as above.
    let nobody = unsafe { transfers.offer(7, address, 100) };
    assert!(nobody.is_err_and(|why| why.to_string().contains("rank 7")));
    stream.write_all(&[1]).expect("written");
    transfers.close();
    free(buffers.device);
}

fn receiver() {
    let mut buffers = Buffers::new(1);
    let mut stream = connect(false);
    let mut transfers = transfers(1);
    stream.write_all(&[1]).expect("written");
    let next = |stream: &mut UnixStream| -> Told {
        let mut told = [0; RTS_BYTES];
        stream.read_exact(&mut told).expect("an offer");
        told
    };
    for (case, (_, to, bytes, offset, path)) in CASES.into_iter().enumerate() {
        let length = offset + bytes + 2 * GUARD;
        buffers.write(to, &vec![0x5a; length]);
        let told = next(&mut stream);
        let address = buffers.address(to, offset);
        // SAFETY: the memory is this process's, and is used only once the transfer has ended.
        let taken = unsafe { transfers.take(&told, address, bytes as u64) };
        let receiving = taken.expect("taken");
        let ended = wait(receiving, |receiving| transfers.received(receiving));
        assert_eq!(ended, Ended::Complete(path), "case {case}");
        let mut expected = vec![0x5a; GUARD + offset];
        expected.extend(bytes_of(case, bytes));
        expected.extend(vec![0x5a; GUARD]);
        assert!(
            buffers.read(to, length) == expected,
            "case {case}: other bytes"
        );
    }
    buffers.write(Device, &[0x5a; 3 * GUARD]);
    let address = buffers.address(Device, 0);
    let told = next(&mut stream);
    // SAFETY: the memory is this process's, and nobody else uses it.
    let taken = unsafe { transfers.take(&told, address, 100) };
    assert!(taken.is_err(), "it is not what was sent");
    let told = next(&mut stream);
    // SAFETY: as above.
    let taken = unsafe { transfers.take(&told, address, 99) };
    let ended = wait(taken.expect("taken"), |receiving| {
        transfers.received(receiving)
    });
    assert_eq!(
        ended,
        Ended::Complete(Path::Unknown),
        "there is no room for it"
    );
    assert!(
        buffers.read(Device, 3 * GUARD) == [0x5a; 3 * GUARD],
        "nothing came"
    );
    stream.read_exact(&mut [0]).expect("a byte");
    transfers.close();
    free(buffers.device);
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
        other => panic!("unknown role {other}"),
    }
    println!("scenario complete");
}

#[test]
fn two_processes_without_mpi() {
    run_roles(
        "transfer::transfers::tests::role",
        &["sender", "receiver"],
        true,
        &[],
    );
}
