//! The clock that phases are timed by.

use crate::gpu;
use std::time::Instant;

/// Wall time, or the virtual time of a simulated GPU, on which wall time says nothing.
#[derive(Clone, Copy)]
pub enum Clock {
    /// Time since this instant.
    Wall(Instant),
    /// Nanoseconds, by the simulated driver.
    Virtual(unsafe extern "C" fn() -> u64),
}

impl Clock {
    /// The clock of the loaded driver library. [`gpu::init`] must have succeeded.
    pub fn detect() -> Clock {
        match gpu::symbol("simcuda_clock_ns") {
            // SAFETY: the simulated driver declares `uint64_t simcuda_clock_ns(void)`.
            Some(f) => Clock::Virtual(unsafe {
                std::mem::transmute::<*const std::ffi::c_void, unsafe extern "C" fn() -> u64>(f)
            }),
            None => Clock::Wall(Instant::now()),
        }
    }

    /// Now, in nanoseconds since some fixed time.
    pub fn now_ns(&self) -> u64 {
        match self {
            Clock::Wall(start) => start.elapsed().as_nanos() as u64,
            // SAFETY: the driver library is never unloaded.
            Clock::Virtual(f) => unsafe { f() },
        }
    }

    /// By how many nanoseconds programs on the simulated node have acted later than they could have; none of wall time.
    pub fn late_ns(&self) -> Option<u64> {
        let Clock::Virtual(_) = self else { return None };
        let symbol = gpu::symbol("simcuda_late_ns")?;
        // SAFETY: the simulated driver declares `uint64_t simcuda_late_ns(void)`, and is never unloaded.
        let late: unsafe extern "C" fn() -> u64 = unsafe { std::mem::transmute(symbol) };
        // SAFETY: as above.
        Some(unsafe { late() })
    }

    /// "wall" or "virtual".
    pub fn name(&self) -> &'static str {
        match self {
            Clock::Wall(_) => "wall",
            Clock::Virtual(_) => "virtual",
        }
    }
}
