//! What a rank does between exchanges: nothing, a computation of its own, or one of its GPU for whose end it
//! waits.

use std::time::{Duration, Instant};

use anyhow::Context;

use super::cuda::{DevicePtr, Driver, Event, Stream};
use super::Device;

/// Away from MPI, for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Away {
    /// The processor computes.
    Cpu(Duration),
    /// The GPU does, and the processor waits for an event behind it.
    Kernel(Duration),
}

/// Reads `cpu:500us`, `kernel:1ms`.
pub fn parse(text: &str) -> Result<Away, String> {
    let wrong = || format!("{text:?}: write cpu:500us or kernel:500us; ns, us, ms and s are units");
    let (kind, time) = text.split_once(':').ok_or_else(wrong)?;
    let digits = time
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(time.len());
    let number: u64 = time[..digits].parse().map_err(|_| wrong())?;
    let unit = match &time[digits..] {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return Err(wrong()),
    };
    let time = Duration::from_nanos(number.checked_mul(unit).ok_or_else(wrong)?);
    if time > Duration::from_secs(10) {
        return Err(format!("{text:?}: 10s at most"));
    }
    match kind {
        "cpu" => Ok(Away::Cpu(time)),
        "kernel" => Ok(Away::Kernel(time)),
        _ => Err(wrong()),
    }
}

/// Memory that the GPU fills for a while.
const FILLED_MAX: usize = 256 << 20;
/// How often the time of a filling is taken, to find how long one must be.
const TRIES: u32 = 5;

/// A rank that is away between exchanges.
pub enum Pause<'a> {
    /// It computes for so long.
    Cpu(Duration),
    /// Its GPU does.
    Gpu(Gpu<'a>),
}

/// A GPU that has something to do for a while.
pub struct Gpu<'a> {
    driver: &'a Driver,
    memory: DevicePtr,
    stream: Stream,
    event: Event,
    /// Each filling is so long, and there are so many behind each other.
    bytes: usize,
    times: u32,
}

impl<'a> Pause<'a> {
    /// Finds out how much the GPU has to do.
    ///
    /// # Errors
    /// What the driver reports; no GPU.
    pub fn prepare(away: Away, device: Option<&'a Device>) -> anyhow::Result<Pause<'a>> {
        let time = match away {
            Away::Cpu(time) => return Ok(Pause::Cpu(time)),
            Away::Kernel(time) => time,
        };
        let device = device.context("--away kernel needs a GPU: both buffers in device memory")?;
        let driver = device.driver.as_ref();
        let mut gpu = Gpu {
            driver,
            memory: driver.alloc(FILLED_MAX)?,
            stream: driver.stream()?,
            event: driver.event()?,
            bytes: FILLED_MAX,
            times: 1,
        };
        gpu.run()?;
        let start = Instant::now();
        for _ in 0..TRIES {
            gpu.run()?;
        }
        let once = start.elapsed() / TRIES;
        let share = time.as_secs_f64() / once.as_secs_f64().max(1e-9);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        if share > 1.0 {
            gpu.times = share.round() as u32;
        } else {
            gpu.bytes = ((share * FILLED_MAX as f64) as usize).max(1);
        }
        Ok(Pause::Gpu(gpu))
    }

    /// Is away once.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn take(&self) -> anyhow::Result<()> {
        match self {
            Pause::Gpu(gpu) => gpu.run(),
            Pause::Cpu(time) => {
                let start = Instant::now();
                while start.elapsed() < *time {
                    std::hint::spin_loop();
                }
                Ok(())
            }
        }
    }
}

impl Gpu<'_> {
    fn run(&self) -> anyhow::Result<()> {
        for _ in 0..self.times {
            self.driver
                .fill_async(self.memory, self.bytes, self.stream)?;
        }
        self.driver.record(self.event, self.stream)?;
        self.driver.wait_event(self.event)
    }
}

impl Drop for Gpu<'_> {
    fn drop(&mut self) {
        let _ = self.driver.destroy_event(self.event);
        let _ = self.driver.destroy(self.stream);
        let _ = self.driver.free(self.memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(
            parse("cpu:500us"),
            Ok(Away::Cpu(Duration::from_micros(500)))
        );
        assert_eq!(
            parse("kernel:2ms"),
            Ok(Away::Kernel(Duration::from_millis(2)))
        );
        for wrong in [
            "",
            "cpu",
            "cpu:",
            "cpu:5",
            "cpu:us",
            "gpu:5us",
            "cpu:-5us",
            "cpu:11s",
            "cpu:99999999999999999999s",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
