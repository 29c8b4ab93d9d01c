//! The time of records: ticks of the processor where they come evenly, as reading them costs a fifth of reading a clock.
//! Pairs of ticks and nanoseconds in the file tell what they mean ([`Sync`](super::record::Sync)).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::OnceLock;

/// Times are ticks.
static TICKS: AtomicBool = AtomicBool::new(false);
/// A clock that is not the machine's.
static CLOCK: OnceLock<fn() -> u64> = OnceLock::new();

/// Chooses the clock: the given one, which has nanoseconds, or the machine's.
pub(crate) fn choose(clock: Option<fn() -> u64>) {
    match clock {
        Some(clock) => _ = CLOCK.set(clock),
        None => TICKS.store(are_even(), Ordering::Relaxed),
    }
}

/// Whether times are ticks.
pub(crate) fn has_ticks() -> bool {
    TICKS.load(Ordering::Relaxed)
}

/// The time, in ticks or nanoseconds. It is never 0, which in records is no time: a simulated node's clock begins there.
#[inline]
pub(crate) fn now() -> u64 {
    if TICKS.load(Ordering::Relaxed) {
        ticks()
    } else {
        CLOCK.get().map_or_else(machine_ns, |clock| clock()).max(1)
    }
}

/// Ticks and nanoseconds at the same time, where times are ticks.
pub(super) fn pair() -> Option<(u64, u64)> {
    if !TICKS.load(Ordering::Relaxed) {
        return None;
    }
    // The closest pair of a few: this thread may lose the processor between the two readings.
    let pairs = (0..5).map(|_| {
        let (before, ns, after) = (ticks(), machine_ns(), ticks());
        (
            after.wrapping_sub(before),
            before.wrapping_add(after.wrapping_sub(before) / 2),
            ns,
        )
    });
    pairs.min().map(|(_, ticks, ns)| (ticks, ns))
}

/// The same clock in all processes of a machine, ns.
pub fn machine_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // The system's library, and not another reader of the vdso: valgrind hides that.
    // SAFETY: it is written to; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn ticks() -> u64 {
    // SAFETY: every processor of this architecture has the instruction.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    machine_ns()
}

/// Whether ticks come at the same rate all the time and on all cores.
fn are_even() -> bool {
    if cfg!(not(target_arch = "x86_64")) {
        return false;
    }
    let about = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = about
        .lines()
        .find(|line| line.starts_with("flags"))
        .unwrap_or_default();
    ["constant_tsc", "nonstop_tsc"]
        .iter()
        .all(|flag| flags.split(' ').any(|word| word == *flag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_nanoseconds_by_two_pairs() {
        choose(None);
        let Some(first) = pair() else { return };
        std::thread::sleep(std::time::Duration::from_millis(50));
        let (at, ns) = (now(), machine_ns());
        std::thread::sleep(std::time::Duration::from_millis(50));
        let last = pair().expect("a pair");
        let rate = (last.1 - first.1) as f64 / (last.0 - first.0) as f64;
        let told = first.1 as f64 + (at - first.0) as f64 * rate;
        assert!((told - ns as f64).abs() < 1e6, "{told} {ns}");
    }
}
