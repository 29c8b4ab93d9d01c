//! Transfers that their receiver expects, between two processes.

use std::io::{Read, Write};
use std::time::Instant;

use super::{
    bytes_of, connect, next_offer, run_roles, transfers, wait, Buffers, Device, Host, GUARD, MOST,
    PATIENCE, ROLES,
};
use crate::cuda::tests::bench::free;
use crate::node::RTS_BYTES;
use crate::stats::{self, Counter};
use crate::transfer::fetch::NotTaken;
use crate::transfer::story::Path;
use crate::transfer::transfers::{Ended, Transfers};

/// Lengths of transfers that the receiver expects, and the offset in their allocation of both ends.
const EXPECTED: [(usize, usize); 7] = [
    (1, 0),
    (8, 3),
    (4097, 1),
    (65_536, 0),
    (300_001, 77),
    (1_999_999, 5),
    (100, 0),
];

/// Sends what the peer expects.
pub(super) fn writer() {
    let mut buffers = Buffers::new(0);
    let mut stream = connect(true);
    let mut transfers = transfers(0);
    for (case, (bytes, offset)) in EXPECTED.into_iter().enumerate() {
        let mut image = vec![0xa5; GUARD + offset];
        image.extend(bytes_of(case, bytes));
        buffers.write(Device, &image);
        // The peer expects this one.
        stream.read_exact(&mut [0]).expect("a byte");
        let address = buffers.address(Device, offset);
        let number = Some(case as u64);
        let offered = transfers.offer(1, address.first(bytes as u64), number);
        let (sending, told) = offered.expect("offered");
        stream.write_all(&told).expect("written");
        let ended = wait(&mut transfers, sending, Transfers::test_send);
        assert_eq!(ended, Ended::Complete(Path::Direct), "case {case}");
    }
    // What the peer expects by now is longer, and then it expects nothing: the peer reads it.
    for bytes in [99_u64, 100] {
        stream.read_exact(&mut [0]).expect("a byte");
        let address = buffers.address(Device, 0);
        let offered = transfers.offer(1, address.first(bytes), Some(9));
        let (sending, told) = offered.expect("offered");
        stream.write_all(&told).expect("written");
        let ended = wait(&mut transfers, sending, Transfers::test_send);
        assert_eq!(ended, Ended::Complete(Path::Direct));
    }
    stream.read_exact(&mut [0]).expect("a byte");
    let address = buffers.address(Device, 0);
    let offered = transfers.offer(1, address.first(100), Some(11));
    let (_sending, told) = offered.expect("offered");
    drop(transfers);
    stream.write_all(&told).expect("written");
    stream.write_all(&[1]).expect("written");
    free(buffers.device);
}

/// Receives on this GPU. `are_put`: nothing is in the way of a put.
pub(super) fn reader(ordinal: i32, are_put: bool) {
    let mut buffers = Buffers::new(ordinal);
    let mut stream = connect(false);
    let mut transfers = transfers(1);
    let mut sum = 0;
    for (case, (bytes, offset)) in EXPECTED.into_iter().enumerate() {
        let length = offset + bytes + 2 * GUARD;
        buffers.write(Device, &vec![0x5a; length]);
        let address = buffers.address(Device, offset);
        let expected = transfers.expect(0, case as u64, address.first(bytes as u64));
        assert!(expected.is_some(), "case {case}");
        let second = transfers.expect(0, case as u64 + 1, address.first(1));
        assert_eq!(second, None, "another is expected there");
        stream.write_all(&[1]).expect("written");
        let told = next_offer(&mut stream);
        let expected = expected.expect("expected");
        // What comes to nothing leaves it expected.
        let (why, expected) = transfers
            .take_expected(&[7; RTS_BYTES], expected)
            .expect_err("no offer");
        assert_eq!(why, NotTaken::Value);
        let receiving = transfers.take_expected(&told, expected).expect("taken");
        let ended = wait(&mut transfers, receiving, Transfers::test_receive);
        assert_eq!(ended, Ended::Complete(Path::Direct), "case {case}");
        let mut image = vec![0x5a; GUARD + offset];
        image.extend(bytes_of(case, bytes));
        image.extend(vec![0x5a; GUARD]);
        let found = buffers.read(Device, length);
        assert!(found == image, "case {case}: other bytes");
        sum += bytes as u64;
    }
    // On one GPU some are put for another reason: one of the two processes makes all copies there.
    let by_put = stats::get(Counter::PutBytes);
    assert!(ordinal == 0 || by_put == if are_put { sum } else { 0 });
    let at_once = if are_put { EXPECTED.len() } else { 0 };
    assert_eq!(stats::get(Counter::PutEarlyReceives), at_once as u64);
    let address = buffers.address(Device, 0);
    for forgets in [false, true] {
        buffers.write(Device, &[0x5a; 3 * GUARD]);
        let expected = transfers.expect(0, 9, address.first(100));
        let expected = expected.expect("expected");
        let kept = match forgets {
            true => {
                assert_eq!(transfers.forget(expected), Ok(true), "nothing was begun");
                None
            }
            false => Some(expected),
        };
        stream.write_all(&[1]).expect("written");
        let told = next_offer(&mut stream);
        let receiving = match kept {
            Some(expected) => transfers.take_expected(&told, expected).expect("taken"),
            None => transfers.take(&told, address.first(100)).expect("taken"),
        };
        let ended = wait(&mut transfers, receiving, Transfers::test_receive);
        assert_eq!(ended, Ended::Complete(Path::Direct));
    }
    assert!(
        ordinal == 0 || stats::get(Counter::PutBytes) == by_put,
        "both were read"
    );
    // Neither host memory is told of, nor nothing, nor what may be split.
    let host = buffers.address(Host, 0);
    for (to, bytes) in [(host, 100), (address, 0), (address, MOST as u64)] {
        let expected = transfers.expect(0, 10, to.first(bytes));
        assert_eq!(expected, None, "{bytes}");
    }
    // The peer writes, and gives up.
    let expected = transfers.expect(0, 11, address.first(100));
    stream.write_all(&[1]).expect("written");
    let told = next_offer(&mut stream);
    stream.read_exact(&mut [0]).expect("a byte");
    let expected = expected.expect("expected");
    let (why, expected) = transfers
        .take_expected(&told, expected)
        .expect_err("it is given up");
    assert_eq!(why, NotTaken::Lost);
    assert_eq!(transfers.forget(expected), Ok(!are_put));
    drop(transfers);
    free(buffers.device);
}

/// The process dies after it has begun to write to what its peer expects.
pub(super) fn heir() {
    let mut buffers = Buffers::new(1);
    let mut stream = connect(false);
    let mut transfers = transfers(1);
    let address = buffers.address(Device, 0);
    let expected = transfers
        .expect(0, 1, address.first(4096))
        .expect("expected");
    stream.write_all(&[1]).expect("written");
    // The peer has begun, and does not see to it.
    stream.read_exact(&mut [0]).expect("a byte");
    let mut kept = transfers.forget(expected).expect_err("the peer writes it");
    stream.write_all(&[1]).expect("written");
    let start = Instant::now();
    let is_whole = loop {
        match transfers.forget(kept) {
            Ok(is_whole) => break is_whole,
            Err(expected) => kept = expected,
        }
        assert!(start.elapsed() < PATIENCE, "it is not forgotten");
        std::thread::yield_now();
    };
    assert!(!is_whole, "its offer never comes");
    // Its line is free again.
    for number in 0..200 {
        let expected = transfers.expect(0, number, address.first(4096));
        let expected = expected.expect("a line");
        assert_eq!(transfers.forget(expected), Ok(true));
    }
    drop(transfers);
    free(buffers.device);
}

pub(super) fn testator() {
    let mut buffers = Buffers::new(0);
    let mut stream = connect(true);
    let mut transfers = transfers(0);
    stream.read_exact(&mut [0]).expect("a byte");
    let address = buffers.address(Device, 0);
    let offered = transfers.offer(1, address.first(4096), Some(1));
    let (sending, _told) = offered.expect("offered");
    let kept = transfers.cancel(sending);
    assert!(kept.is_err(), "it is being written");
    stream.write_all(&[1]).expect("written");
    stream.read_exact(&mut [0]).expect("a byte");
    println!("scenario complete");
    // The peer never hears of it.
    // SAFETY: ends the process.
    unsafe { libc::_exit(0) };
}

#[test]
fn transfers_that_are_expected() {
    run_roles(ROLES, &["writer", "reader"], true, &[]);
    run_roles(ROLES, &["testator", "heir"], true, &[]);
    // The sender cannot map what its peer has: the peer reads instead.
    let refused = (
        "SIMCUDA_FAULT",
        "cuIpcOpenMemHandle#0:1+=CUDA_ERROR_NOT_SUPPORTED",
    );
    run_roles(ROLES, &["writer", "taker"], true, &[refused]);
    run_roles(ROLES, &["writer", "neighbour"], true, &[]);
}
