//! Scenarios of the process's state: contexts, devices, pinned memory, forks.

use super::bench::*;
use crate::cuda::types::Context;
use crate::cuda::*;

fn exchange_mode(mut mode: i32) -> i32 {
    driver()
        .unwrap()
        .thread_exchange_stream_capture_mode(&mut mode)
        .unwrap();
    mode
}

pub(super) fn guard() {
    let own = use_device(0);
    let other = retain(1);
    // Whatever mode the thread had comes back.
    exchange_mode(1);
    {
        let _entered = Entered::enter(other).unwrap();
        assert_eq!(current(), other);
        {
            let _nested = Entered::enter(own).unwrap();
            assert_eq!(current(), own);
        }
        assert_eq!(current(), other);
        assert_eq!(exchange_mode(2), 2, "relaxed while inside");
    }
    assert_eq!(current(), own);
    assert_eq!(exchange_mode(0), 1);
    // A thread without a context has none afterwards.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            drop(Entered::enter(other).unwrap());
            assert!(current().is_null());
        });
    });
    assert_eq!(Entered::enter(Context::NULL).err(), Some(Error::NoContext));
    let another = ContextKey {
        handle: own,
        id: 987_654_321,
    };
    assert!(!another.is_alive());
    assert_eq!(Entered::enter_same(another).err(), Some(Error::ContextLost));
    assert_eq!(current(), own);
    stay(own, other);
    devices();
}

/// What a thread that stays leaves behind, and what it finds meanwhile.
fn stay(own: Context, other: Context) {
    let [here, there] = [own, other].map(|context| ContextKey::of(context).unwrap());
    exchange_mode(1);
    let stay = Stay::begin();
    assert!(stay.is_some() && Stay::begin().is_none(), "once at a time");
    drop(Entered::ask(there).unwrap());
    assert_eq!(current(), other, "it stays");
    drop(Entered::ask(there).unwrap());
    assert_eq!((current(), exchange_mode(2)), (other, 2));
    {
        // Whatever else enters the driver finds the thread as the program has left it.
        let _relaxed = Entered::relaxed().unwrap();
        assert_eq!(current(), own);
        drop(Entered::ask(there).unwrap());
        assert_eq!(current(), own, "not from within another");
    }
    assert_eq!((current(), exchange_mode(1)), (own, 1));
    drop(Entered::ask(there).unwrap());
    drop(Entered::enter_same(there).unwrap());
    assert_eq!((current(), exchange_mode(1)), (own, 1));
    {
        // Another one takes its place.
        drop(Entered::ask(there).unwrap());
        let _here = Entered::ask(here).unwrap();
        assert_eq!(current(), own);
        drop(Entered::ask(there).unwrap());
        assert_eq!((current(), exchange_mode(2)), (own, 2));
    }
    assert_eq!((current(), exchange_mode(2)), (own, 2), "it stays here");
    // A context that is destroyed while the thread stays in it takes nothing else with it.
    let staged = StagedMemory::allocate_on(2, 1 << 20).unwrap();
    assert!(staged.is_own_context());
    let of_staged = staged.context();
    drop(Entered::ask(of_staged).unwrap());
    assert_eq!(current(), of_staged.handle);
    drop(staged);
    assert!(!of_staged.is_alive());
    drop(stay);
    assert_eq!((current(), exchange_mode(0)), (own, 1), "all is as it was");
    drop(Entered::ask(there).unwrap());
    assert_eq!(current(), own, "nobody stays any more");
}

fn devices() {
    let devices = reach::devices();
    assert!(devices.len() >= 2);
    let (a, b) = (&devices[0].uuid, &devices[1].uuid);
    assert_ne!(a, b);
    assert_eq!(reach::by_uuid(b).unwrap().ordinal, 1);
    assert_eq!(reach::reach(a, a), reach::Reach::Same);
    assert_eq!(reach::reach(a, b), reach::Reach::Peer);
    assert_eq!(reach::reach(a, &[9; 16]), reach::Reach::Hidden);
    assert_eq!(
        reach::existing_context(3),
        Err(Error::NoContext),
        "no context is made"
    );
}

pub(super) fn pinned() {
    let key = ContextKey::of(use_device(0)).unwrap();
    let pool = PinnedPool::new(Budget::new(1 << 20));
    let first = pool.take(key, 100_000).unwrap();
    assert!(first.is_pinned() && first.capacity() >= 100_000);
    let place = first.as_ptr();
    assert!(matches!(pool.take(key, 1 << 20), Err(Error::Exhausted(_))));
    let second = pool.take(key, 500_000).unwrap();
    drop(first);
    let reused = pool.take(key, 100_000).unwrap();
    assert_eq!(reused.as_ptr(), place);
    drop((second, reused));
    // What is idle makes room for another size.
    let whole = pool.take(key, 1 << 20).unwrap();
    assert_eq!(pool.bytes(), 1 << 20);
    drop(whole);
    pool.clear();
    assert_eq!(pool.bytes(), 0);
    registrations(key);
}

fn registrations(key: ContextKey) {
    let range = map_host(1 << 20);
    let mut registrations = Registrations::new();
    // SAFETY: the range stays mapped to the end of the process.
    unsafe {
        registrations.register(key, range, 1 << 20).unwrap();
        registrations.register(key, range, 1 << 20).unwrap();
        registrations.register(key, range, 4096).unwrap();
    }
    assert!(registrations.is_registered(range, 1 << 20));
    assert!(!registrations.is_registered(range, (1 << 20) + 1));
    // A second owner finds it pinned, and leaves it so.
    let mut other = Registrations::new();
    // SAFETY: as above.
    unsafe { other.register(key, range, 1 << 20).unwrap() };
    drop(other);
    assert_eq!(classify(range), Kind::HostAccessible(HostMemory::Pinned));
    registrations.unregister(range);
    assert_eq!(classify(range), Kind::Host);
}

pub(super) fn fork() {
    let address = {
        use_device(0);
        device_memory(4096)
    };
    let mut bench = Bench::new(current());
    bench.upload(address, &pattern(4, 4096));
    let copy = bench.copy(Purpose::Get, address, address + 64, 64).unwrap();
    // SAFETY: the child ends by `_exit`, without returning into the test harness.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let none = driver().is_none() && !arm() && !look_again() && !is_device(at(address));
        let lost = !bench.key.is_alive();
        drop((copy, bench));
        // SAFETY: ends the child.
        unsafe { libc::_exit(if none && lost { 7 } else { 8 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child forked above.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(
        (libc::WIFEXITED(status), libc::WEXITSTATUS(status)),
        (true, 7)
    );
    finish(copy).unwrap();
    assert_eq!(bench.download(address, 64), pattern(4, 4096)[64..128]);
}
