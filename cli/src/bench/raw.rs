//! The driver's own copy between the GPUs of the two ranks, driven by rank 0: what no library can
//! be expected to beat over the direct link.

use std::rc::Rc;

use super::cuda::{DevicePtr, Driver, Stream};
use super::mpi::Mpi;
use super::{Arguments, Clock, Device, Kind};

/// One direction: `window` copies of an iteration go to one stream.
struct Lane {
    to: DevicePtr,
    from: DevicePtr,
    stream: Stream,
}

/// What a rank holds for the raw copy.
pub struct Raw {
    driver: Rc<Driver>,
    latency: bool,
    /// Empty on rank 1, which only lends its memory.
    lanes: Vec<Lane>,
    allocated: Vec<DevicePtr>,
    mapped: Vec<DevicePtr>,
    how: &'static str,
}

impl Raw {
    /// Allocates memory of `bytes` for each direction on both GPUs; both ranks call it.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn prepare(
        arguments: &Arguments,
        mpi: &Mpi,
        device: Option<&Device>,
        bytes: usize,
    ) -> anyhow::Result<Option<Raw>> {
        let Some(device) = device else {
            return Ok(None);
        };
        let driver = device.driver.clone();
        let latency = arguments.kind == Kind::Latency;
        let raw = Raw {
            driver,
            latency,
            lanes: vec![],
            allocated: vec![],
            mapped: vec![],
            how: "lent to rank 0",
        };
        let directions = if arguments.kind == Kind::Bibw { 2 } else { 1 };
        raw.set_up(mpi, device, bytes.max(1), directions).map(Some)
    }

    fn set_up(
        mut self,
        mpi: &Mpi,
        device: &Device,
        bytes: usize,
        directions: usize,
    ) -> anyhow::Result<Raw> {
        let peer = 1 - mpi.rank;
        let mine = self.driver.device_uuid(device.ordinal)?;
        let theirs = mpi.swap_bytes(peer, mine);
        let seen = if mpi.rank == 0 {
            self.ordinal_of(theirs)?
        } else {
            None
        };
        let is_seen = (mpi.swap(peer, u64::from(seen.is_some())) | u64::from(seen.is_some())) != 0;
        let (remote, back_context) = match (mpi.rank, seen) {
            (0, Some(ordinal)) => {
                self.how = "both GPUs driven by rank 0";
                let other = self.driver.enter(ordinal)?;
                if ordinal != device.ordinal {
                    self.driver.enable_peer(device.context)?;
                }
                let remote = self.allocate(directions, bytes)?;
                self.driver.select(device.context)?;
                if ordinal != device.ordinal {
                    self.driver.enable_peer(other)?;
                }
                (remote, other)
            }
            _ if is_seen => return Ok(self),
            (0, None) => {
                self.how = "driven by rank 0 into memory of rank 1, which it has mapped";
                (self.map_from(mpi, peer, directions)?, device.context)
            }
            _ => {
                self.lend_to(mpi, peer, directions, bytes)?;
                return Ok(self);
            }
        };
        let local = self.allocate(directions, bytes)?;
        for (direction, (near, far)) in local.iter().zip(&remote).enumerate() {
            let (to, from) = if direction == 0 {
                (*far, *near)
            } else {
                (*near, *far)
            };
            self.driver.select(if direction == 0 {
                device.context
            } else {
                back_context
            })?;
            let stream = self.driver.stream()?;
            self.lanes.push(Lane { to, from, stream });
        }
        self.driver.select(device.context)?;
        self.fill_sources(bytes)?;
        Ok(self)
    }

    fn ordinal_of(&self, uuid: Option<[u8; 16]>) -> anyhow::Result<Option<u32>> {
        for ordinal in 0..self.driver.device_count()? {
            if Some(self.driver.device_uuid(ordinal)?) == uuid {
                return Ok(Some(ordinal));
            }
        }
        Ok(None)
    }

    fn allocate(&mut self, count: usize, bytes: usize) -> anyhow::Result<Vec<DevicePtr>> {
        let fresh: Vec<DevicePtr> = (0..count)
            .map(|_| self.driver.alloc(bytes))
            .collect::<anyhow::Result<_>>()?;
        self.allocated.extend(&fresh);
        Ok(fresh)
    }

    fn lend_to(&mut self, mpi: &Mpi, peer: i32, count: usize, bytes: usize) -> anyhow::Result<()> {
        for address in self.allocate(count, bytes)? {
            let handle = self.driver.export(address)?;
            mpi.swap_bytes(peer, handle);
        }
        Ok(())
    }

    fn map_from(&mut self, mpi: &Mpi, peer: i32, count: usize) -> anyhow::Result<Vec<DevicePtr>> {
        for _ in 0..count {
            let Some(handle) = mpi.swap_bytes(peer, [0u8; 64]) else {
                anyhow::bail!("no memory handle came from rank 1")
            };
            self.mapped.push(self.driver.open_handle(handle)?);
        }
        Ok(self.mapped.clone())
    }

    /// Random data: a link that compresses or skips zeros must not look faster.
    fn fill_sources(&self, bytes: usize) -> anyhow::Result<()> {
        let mut piece = vec![0u8; bytes.min(1 << 20)];
        for lane in &self.lanes {
            for offset in (0..bytes).step_by(piece.len()) {
                let part = piece.len().min(bytes - offset);
                super::check::random_bytes(lane.from ^ offset as u64, &mut piece[..part]);
                self.driver
                    .write(lane.from + offset as u64, &piece[..part])?;
            }
        }
        Ok(())
    }

    /// How the copy is driven.
    pub fn describe(&self) -> &'static str {
        self.how
    }

    /// Seconds for `iterations` windows of copies, each waited for; `None` on the rank that does
    /// not drive them.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn measure(
        &self,
        bytes: usize,
        window: usize,
        warmup: u32,
        iterations: u32,
        clock: &Clock,
    ) -> anyhow::Result<Option<f64>> {
        if self.lanes.is_empty() {
            return Ok(None);
        }
        let window = if self.latency { 1 } else { window };
        let mut start = clock.seconds();
        for iteration in 0..warmup + iterations {
            if iteration == warmup {
                start = clock.seconds();
            }
            for _ in 0..window {
                for lane in &self.lanes {
                    self.driver
                        .copy_async(lane.to, lane.from, bytes, lane.stream)?;
                }
            }
            for lane in &self.lanes {
                self.driver.wait(lane.stream)?;
            }
        }
        Ok(Some(clock.seconds() - start))
    }

    /// Gives everything back. On rank 0 first: what is mapped must not be freed.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn unmap(&mut self) -> anyhow::Result<()> {
        for lane in self.lanes.drain(..) {
            self.driver.destroy(lane.stream)?;
        }
        for address in self.mapped.drain(..) {
            self.driver.close(address)?;
        }
        Ok(())
    }

    /// Frees the memory, once no rank maps it.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn free(&mut self) -> anyhow::Result<()> {
        for address in self.allocated.drain(..) {
            self.driver.free(address)?;
        }
        Ok(())
    }
}
