//! Devices that this process sees, and which of them reach which.
//!
//! Between processes a device is named by its UUID, never by an ordinal: each process may see another set.

use super::driver::required;
use super::error::{Error, Result};
use super::state::{insist, ContextKey, Entered};
use super::types::{Context, Device, Uuid, DEVICE_HOST_NUMA, DEVICE_MPS_ENABLED};
use parking_lot::Mutex;
use std::sync::OnceLock;

/// A device that this process sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number in this process.
    pub ordinal: i32,
    /// Its handle.
    pub device: Device,
    /// Its identity.
    pub uuid: Uuid,
    /// Processes use it through MPS, at the same time; otherwise they take turns.
    pub is_mps: bool,
    /// Its name, as the driver prints it.
    pub name: String,
}

/// How a device of this process reaches another device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// It is the same device.
    Same,
    /// Peer access works.
    Peer,
    /// No peer access: copies between the two go through the host.
    NotPeer,
    /// This process does not see the other device. Opening an exported allocation may work all the same; the
    /// first attempt shows it (see [`record_attempt`]).
    Hidden,
    /// Hidden, and an allocation of it has been opened.
    HiddenPeer,
}

impl Reach {
    /// Whether opening an exported allocation is worth an attempt.
    #[must_use]
    pub fn is_possible(self) -> bool {
        self != Reach::NotPeer
    }
}

static DEVICES: OnceLock<Vec<DeviceInfo>> = OnceLock::new();
/// What the driver, or an attempt, has said of pairs: (own, other, works). At most one row a pair.
static ATTEMPTS: Mutex<Vec<(Uuid, Uuid, bool)>> = Mutex::new(Vec::new());
/// A node has at most a few dozen devices, MIG instances included; more rows would be nonsense.
const ATTEMPTS_MAX: usize = 4096;

/// The devices of this process. Empty as long as the program has not initialized the driver.
pub fn devices() -> &'static [DeviceInfo] {
    if let Some(list) = DEVICES.get() {
        return list;
    }
    match insist(list_devices) {
        Ok(list) => DEVICES.get_or_init(|| list),
        Err(error) => {
            log::debug!("listing cuda devices: {error}");
            &[]
        }
    }
}

fn list_devices() -> Result<Vec<DeviceInfo>> {
    let entered = Entered::relaxed()?;
    let driver = entered.driver();
    let mut count = 0;
    driver.device_get_count(&mut count)?;
    (0..count)
        .map(|ordinal| {
            let (mut device, mut uuid, mut name) = (0, Uuid::default(), [0u8; 256]);
            driver.device_get(&mut device, ordinal)?;
            driver.device_get_uuid(&mut uuid, device)?;
            // SAFETY: it is written within the size given.
            let named = unsafe { driver.device_get_name(name.as_mut_ptr().cast(), 255, device) };
            named.unwrap_or_default();
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            // A driver that does not know the attribute leaves it.
            let mut mps = 0;
            let _ = driver.device_get_attribute(&mut mps, DEVICE_MPS_ENABLED, device);
            Ok(DeviceInfo {
                ordinal,
                device,
                uuid,
                is_mps: mps == 1,
                name: String::from_utf8_lossy(name).into_owned(),
            })
        })
        .collect()
}

/// The NUMA node of the host that is nearest to a device, if the driver tells.
pub fn host_numa(device: &DeviceInfo) -> Option<i32> {
    let mut numa = -1;
    let driver = required().ok()?;
    driver
        .device_get_attribute(&mut numa, DEVICE_HOST_NUMA, device.device)
        .ok()?;
    Some(numa)
}

/// The device of an ordinal.
#[must_use]
pub fn device(ordinal: i32) -> Option<&'static DeviceInfo> {
    usize::try_from(ordinal)
        .ok()
        .and_then(|index| devices().get(index))
}

/// The device of an identity, if this process sees it.
#[must_use]
pub fn by_uuid(uuid: &Uuid) -> Option<&'static DeviceInfo> {
    devices().iter().find(|device| device.uuid == *uuid)
}

/// How device `own` of this process reaches the memory of `other`.
#[must_use]
pub fn reach(own: &Uuid, other: &Uuid) -> Reach {
    if own == other {
        return Reach::Same;
    }
    let known = ATTEMPTS
        .lock()
        .iter()
        .find(|(a, b, _)| a == own && b == other)
        .map(|row| row.2);
    let (works, visible) = match (known, by_uuid(own), by_uuid(other)) {
        (Some(works), a, b) => (works, a.is_some() && b.is_some()),
        (None, Some(a), Some(b)) => {
            let works = can_access(a.device, b.device);
            record_attempt(own, other, works);
            (works, true)
        }
        (None, _, _) => return Reach::Hidden,
    };
    match (works, visible) {
        (true, true) => Reach::Peer,
        (true, false) => Reach::HiddenPeer,
        (false, _) => Reach::NotPeer,
    }
}

/// Whether memory of the device can be opened from device `own`, as far as is known before an attempt.
#[must_use]
pub fn can_reach(own: &Uuid, other: &Uuid) -> bool {
    reach(own, other).is_possible()
}

/// Remembers what opening an allocation of `other` on device `own` has shown, so that a pair is tried once.
pub fn record_attempt(own: &Uuid, other: &Uuid, works: bool) {
    let mut attempts = ATTEMPTS.lock();
    if let Some(row) = attempts.iter_mut().find(|(a, b, _)| a == own && b == other) {
        row.2 = works;
    } else if attempts.len() < ATTEMPTS_MAX {
        attempts.push((*own, *other, works));
    }
}

fn can_access(device: Device, peer: Device) -> bool {
    let mut can = 0;
    let asked = required().and_then(|driver| driver.device_can_access_peer(&mut can, device, peer));
    asked.is_ok() && can != 0
}

/// The context to use on a device for memory that belongs to none: the primary context if it exists, else the
/// thread's current context if it is on that device. Makes no context.
pub fn existing_context(ordinal: i32) -> Result<Context> {
    let entered = Entered::relaxed()?;
    let driver = entered.driver();
    let device = device(ordinal).ok_or(Error::NoContext)?.device;
    if let Some(context) = active_primary(device)? {
        return Ok(context);
    }
    let (mut current, mut on) = (Context::NULL, -1);
    driver.ctx_get_current(&mut current)?;
    if !current.is_null() {
        driver.ctx_get_device(&mut on)?;
    }
    if on == device {
        Ok(current)
    } else {
        Err(Error::NoContext)
    }
}

/// The primary context of a device, if it exists. The reference taken to learn the handle is given back at
/// once, so that the program's own release or reset does what it would have done.
fn active_primary(device: Device) -> Result<Option<Context>> {
    let driver = required()?;
    let (mut flags, mut active) = (0, 0);
    let mut context = Context::NULL;
    driver.primary_ctx_get_state(device, &mut flags, &mut active)?;
    if active == 0 {
        return Ok(None);
    }
    driver.primary_ctx_retain(&mut context, device)?;
    // A reference that is not given back keeps the context alive after the program has released it.
    // SAFETY: the reference just taken. The program holds another as long as the context is active.
    insist(|| unsafe { driver.primary_ctx_release(device) })?;
    Ok(Some(context))
}

/// A primary context held by the engine, made if there was none (about half a gigabyte of device memory): for
/// relays over a device that its rank does not use itself. Given back when dropped.
#[derive(Debug)]
pub struct HeldContext {
    device: Device,
    /// The context.
    pub key: ContextKey,
}

impl HeldContext {
    /// Holds the primary context of a device.
    pub fn hold(ordinal: i32) -> Result<HeldContext> {
        let entered = Entered::relaxed()?;
        let device = device(ordinal).ok_or(Error::NoContext)?.device;
        let mut context = Context::NULL;
        entered.driver().primary_ctx_retain(&mut context, device)?;
        match ContextKey::of(context) {
            Ok(key) => Ok(HeldContext { device, key }),
            Err(error) => {
                // SAFETY: gives back the reference just taken.
                let _ = unsafe { entered.driver().primary_ctx_release(device) };
                Err(error)
            }
        }
    }
}

impl Drop for HeldContext {
    fn drop(&mut self) {
        if let Ok(entered) = Entered::relaxed() {
            if self.key.is_alive() {
                // SAFETY: gives back the reference that `hold` took.
                let _ = unsafe { entered.driver().primary_ctx_release(self.device) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_settles_what_is_known_of_a_hidden_pair() {
        let (own, other) = ([1; 16], [2; 16]);
        assert_eq!(reach(&own, &own), Reach::Same);
        assert_eq!(reach(&own, &other), Reach::Hidden);
        record_attempt(&own, &other, true);
        assert_eq!(reach(&own, &other), Reach::HiddenPeer);
        record_attempt(&own, &other, false);
        assert!(!can_reach(&own, &other));
    }
}
