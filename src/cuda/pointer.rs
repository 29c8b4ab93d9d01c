//! What a buffer address points to.
//!
//! **Exact at any time**: an address is never taken for host memory because of an earlier answer, since the
//! program may have unmapped and allocated in between. The common answers are cheap because of this order:
//! 1. no driver in the process: host;
//! 2. the driver is not initialized (the current-context query says so): host, because no device address
//!    exists;
//! 3. the address is host memory for certain ([`super::host_range`]): host;
//! 4. else one query of one attribute. More is asked only for memory that is not plain host memory: first the
//!    number of the allocation, which is never used again. What was learnt of an allocation holds as long as
//!    an address in it has that number;
//! 5. once there are device buffers, the one query asks for both.
//!
//! No proof that is cheaper than the query exists once the program, or UCX on its behalf, has initialized the
//! driver: the thread may have no context while others have, and contexts made by `cuCtxCreate` are listed
//! nowhere.

use super::driver::{driver, Driver};
use super::error::{Error, Result};
use super::state::{insist, ContextKey, Entered};
use super::types::{attribute, code, memory_type, Context, Uuid};
use super::{host_range, reach};
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// What an address points to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Ordinary host memory, or nothing.
    Host,
    /// Memory known to the driver that host code may touch, so that it is a host buffer to MPI.
    HostAccessible(HostMemory),
    /// Device memory.
    Device(Buffer),
}

/// Host memory that the driver knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostMemory {
    /// Pinned: copies to and from a device need no bounce buffer.
    Pinned,
    /// Managed: pages move to whichever side touches them.
    Managed,
}

/// How device memory was allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Allocation {
    /// `cuMemAlloc` and its kin.
    Plain,
    /// From a memory pool.
    Pool,
    /// Mapped by the virtual memory functions, or anything else that legacy IPC does not cover.
    Virtual,
}

/// A device address and its allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Buffer {
    /// The address asked about.
    pub address: u64,
    /// Start of its allocation.
    pub base: u64,
    /// Bytes of its allocation.
    pub size: u64,
    /// `address - base`.
    pub offset: u64,
    /// The driver's number of the allocation. Unlike an address, it is never used again in this process.
    pub buffer_id: u64,
    /// A context in which it can be copied: the allocation's own, for pool and virtual memory an existing one
    /// of the device, null if there is none.
    pub context: Context,
    /// The driver's identity of the context, learnt together with the allocation, which does not outlive it.
    /// None if the driver did not say.
    pub context_id: Option<u64>,
    /// Ordinal of its device in this process.
    pub ordinal: i32,
    /// Identity of its device.
    pub uuid: Uuid,
    /// Whether legacy IPC covers it.
    pub ipc: bool,
    /// How it was allocated.
    pub allocation: Allocation,
}

impl Buffer {
    /// Bytes from the address to the end of the allocation.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.size - self.offset
    }

    /// The context, as lanes and mappings want it.
    pub fn context_key(&self) -> Result<ContextKey> {
        match self.context_id {
            Some(id) => Ok(ContextKey {
                handle: self.context,
                id,
            }),
            None => ContextKey::of(self.context),
        }
    }
}

/// Set at the first device buffer met.
static GPU_SEEN: AtomicBool = AtomicBool::new(false);
/// Set once the driver is seen initialized, which cannot be undone.
static INITIALIZED: AtomicBool = AtomicBool::new(false);
/// Which of [`DETAILS`] this driver understands.
static DETAIL_LEVEL: AtomicU8 = AtomicU8::new(0);

/// Whether this process has passed a device buffer to the engine. Sticky.
#[inline]
#[must_use]
pub fn gpu_seen() -> bool {
    GPU_SEEN.load(Ordering::Relaxed)
}

/// Whether the program has initialized the driver.
#[inline]
#[must_use]
pub fn driver_in_use() -> bool {
    driver().is_some_and(initialized)
}

#[inline]
fn initialized(driver: &Driver) -> bool {
    INITIALIZED.load(Ordering::Relaxed) || ask_initialized(driver)
}

fn ask_initialized(driver: &Driver) -> bool {
    let mut current = Context::NULL;
    let answer = driver.ctx_get_current(&mut current);
    // DEINITIALIZED comes at exit, when no copy can be made any more.
    let now = !answer
        .is_err_and(|error| error.is(code::NOT_INITIALIZED) || error.is(code::DEINITIALIZED));
    if now {
        INITIALIZED.store(true, Ordering::Relaxed);
    }
    now
}

/// Whether an address is device memory (managed and pinned host memory is not).
#[inline]
#[must_use]
pub fn is_device(address: *const c_void) -> bool {
    match certain(address) {
        Some(driver) => matches!(examine(driver, address), Kind::Device(_)),
        None => false,
    }
}

/// What an address points to.
#[inline]
#[must_use]
pub fn classify(address: *const c_void) -> Kind {
    match certain(address) {
        Some(driver) => examine(driver, address),
        None => Kind::Host,
    }
}

/// The driver to ask, or none if the address is host memory for certain.
#[inline(always)]
fn certain(address: *const c_void) -> Option<&'static Driver> {
    // The cheapest question first: the driver is asked for its state until it is initialized.
    if host_range::is_certainly_host(address) || address.is_null() {
        return None;
    }
    driver().filter(|driver| initialized(driver))
}

/// Whether an address still begins the allocation with this number. True if the driver does not say.
pub fn is_allocation(address: u64, number: u64) -> bool {
    let Some(driver) = driver() else { return true };
    let mut answers = Answers::default();
    let wanted = [attribute::MEMORY_TYPE, attribute::BUFFER_ID];
    match query(driver, &wanted, address, &mut answers) {
        Ok(()) => {
            answers.get32(attribute::MEMORY_TYPE) == memory_type::DEVICE
                && answers.get(attribute::BUFFER_ID) == number
        }
        Err(error) => {
            log::debug!("number of the allocation at {address:#x}: {error}");
            true
        }
    }
}

/// The driver's number of what is mapped at an address, and the kinds of handle that it can be exported as.
/// `None` if the driver does not say.
pub fn number_and_handle_types(address: u64) -> Option<(u64, u64)> {
    let mut answers = Answers::default();
    let wanted = [attribute::BUFFER_ID, attribute::ALLOWED_HANDLE_TYPES];
    query(driver()?, &wanted, address, &mut answers).ok()?;
    let of = |attribute| answers.get(attribute);
    Some((
        of(attribute::BUFFER_ID),
        of(attribute::ALLOWED_HANDLE_TYPES),
    ))
}

fn examine(driver: &Driver, address: *const c_void) -> Kind {
    if gpu_seen() {
        return examine_with_number(driver, address.addr() as u64);
    }
    // One attribute, asked directly: every call on mapped host memory pays for this.
    let mut answer = 0u64;
    let place: [*mut c_void; 1] = [(&raw mut answer).cast()];
    // SAFETY: one attribute of 4 bytes, and a place of 8 for it.
    let asked = unsafe {
        driver.pointer_get_attributes(
            1,
            [attribute::MEMORY_TYPE].as_ptr(),
            place.as_ptr(),
            address.addr() as u64,
        )
    };
    let memory_type = (answer & u64::from(u32::MAX)) as u32;
    match asked {
        Ok(()) if memory_type == memory_type::UNREGISTERED => Kind::Host,
        Ok(()) => examine_with_number(driver, address.addr() as u64),
        Err(_) => ask_again(driver, address.addr() as u64),
    }
}

/// Allocations that a thread has met of late: plain ones of devices, and as many that host code may touch.
const RECENT_MAX: usize = 4;

thread_local! {
    static RECENT: RefCell<Recent> = const {
        RefCell::new(Recent {
            buffers: [None; RECENT_MAX],
            hosts: [None; RECENT_MAX],
            next: 0,
            next_host: 0,
        })
    };
}

struct Recent {
    buffers: [Option<Buffer>; RECENT_MAX],
    /// Memory that host code may touch, by the numbers of the allocations.
    hosts: [Option<(u64, HostMemory)>; RECENT_MAX],
    next: usize,
    next_host: usize,
}

impl Recent {
    fn find(&self, address: u64, number: u64) -> Option<Kind> {
        let mut hosts = self.hosts.iter().flatten();
        if let Some((_, memory)) = hosts.find(|(known, _)| *known == number) {
            return Some(Kind::HostAccessible(*memory));
        }
        let mut known = self.buffers.iter().flatten();
        let buffer = known.find(|buffer| {
            buffer.buffer_id == number
                && buffer.base <= address
                && address - buffer.base < buffer.size
        })?;
        Some(Kind::Device(Buffer {
            address,
            offset: address - buffer.base,
            ..*buffer
        }))
    }

    /// An address of the allocation with this number was found to be of this kind.
    fn keep(&mut self, number: u64, kind: &Kind) {
        match kind {
            // Memory of other kinds may grow and shrink under one number.
            Kind::Device(buffer)
                if buffer.allocation == Allocation::Plain
                    && buffer.ipc
                    && buffer.buffer_id == number =>
            {
                self.buffers[self.next] = Some(*buffer);
                self.next = (self.next + 1) % RECENT_MAX;
            }
            Kind::HostAccessible(memory) => {
                self.hosts[self.next_host] = Some((number, *memory));
                self.next_host = (self.next_host + 1) % RECENT_MAX;
            }
            Kind::Device(_) | Kind::Host => {}
        }
    }
}

fn examine_with_number(driver: &Driver, address: u64) -> Kind {
    let mut answers = [0u64; 2];
    let [memory_type, number] = &mut answers;
    let places: [*mut c_void; 2] = [(&raw mut *memory_type).cast(), (&raw mut *number).cast()];
    let wanted = [attribute::MEMORY_TYPE, attribute::BUFFER_ID];
    // SAFETY: two attributes of at most 8 bytes, and a place of 8 for each.
    let asked =
        unsafe { driver.pointer_get_attributes(2, wanted.as_ptr(), places.as_ptr(), address) };
    let (memory_type, number) = ((answers[0] & u64::from(u32::MAX)) as u32, answers[1]);
    match (asked, memory_type) {
        (Ok(()), memory_type::UNREGISTERED) => Kind::Host,
        (Ok(()), memory_type) if number != 0 => {
            let known = RECENT.with_borrow(|recent| recent.find(address, number));
            known.unwrap_or_else(|| learn(driver, address, memory_type, number))
        }
        (Ok(()), memory_type) => examine_further(driver, address, memory_type),
        (Err(_), _) => ask_again(driver, address),
    }
}

#[cold]
fn learn(driver: &Driver, address: u64, memory_type: u32, number: u64) -> Kind {
    let found = insist(|| detail(driver, address));
    if let Ok(kind) = &found {
        RECENT.with_borrow_mut(|recent| recent.keep(number, kind));
    }
    or_without_detail(found, address, memory_type)
}

#[cold]
fn ask_again(driver: &Driver, address: u64) -> Kind {
    let mut found = Answers::default();
    match insist(|| query(driver, &[attribute::MEMORY_TYPE], address, &mut found)) {
        Ok(()) => match found.get32(attribute::MEMORY_TYPE) {
            memory_type::UNREGISTERED => Kind::Host,
            memory_type => examine_further(driver, address, memory_type),
        },
        Err(error) => {
            log::trace!("memory type of {address:#x}: {error}");
            Kind::Host
        }
    }
}

#[cold]
fn examine_further(driver: &Driver, address: u64, memory_type: u32) -> Kind {
    or_without_detail(insist(|| detail(driver, address)), address, memory_type)
}

fn or_without_detail(found: Result<Kind>, address: u64, memory_type: u32) -> Kind {
    found.unwrap_or_else(|error| {
        log::debug!("attributes of {address:#x}: {error}");
        without_detail(address, memory_type)
    })
}

/// Attributes asked about driver memory, the longest list first; older drivers refuse a list with one they do
/// not know.
const DETAILS: [&[i32]; 3] = [
    &[
        attribute::MEMORY_TYPE,
        attribute::IS_MANAGED,
        attribute::CONTEXT,
        attribute::BUFFER_ID,
        attribute::DEVICE_ORDINAL,
        attribute::RANGE_START_ADDR,
        attribute::RANGE_SIZE,
        attribute::IS_LEGACY_CUDA_IPC_CAPABLE,
        attribute::MEMPOOL_HANDLE,
    ],
    &[
        attribute::MEMORY_TYPE,
        attribute::IS_MANAGED,
        attribute::CONTEXT,
        attribute::BUFFER_ID,
        attribute::DEVICE_ORDINAL,
        attribute::RANGE_START_ADDR,
        attribute::RANGE_SIZE,
        attribute::IS_LEGACY_CUDA_IPC_CAPABLE,
    ],
    &[
        attribute::MEMORY_TYPE,
        attribute::IS_MANAGED,
        attribute::CONTEXT,
        attribute::BUFFER_ID,
        attribute::DEVICE_ORDINAL,
    ],
];
const ATTRIBUTES_MAX: usize = 18;

/// Values of attributes, indexed by attribute. Each slot starts as zero and is wide enough for any of them.
#[derive(Default)]
struct Answers([u64; ATTRIBUTES_MAX]);

impl Answers {
    fn slot(attribute: i32) -> usize {
        usize::try_from(attribute).unwrap_or(0)
    }

    fn get(&self, attribute: i32) -> u64 {
        self.0[Self::slot(attribute)]
    }

    /// A 32-bit value: the driver writes the low half of a zeroed slot.
    fn get32(&self, attribute: i32) -> u32 {
        (self.get(attribute) & u64::from(u32::MAX)) as u32
    }

    fn is_set(&self, attribute: i32) -> bool {
        self.get(attribute) != 0
    }
}

/// One plural query. If the driver wants a current context and the thread has none, an existing one is
/// entered.
fn query(driver: &Driver, attributes: &[i32], address: u64, answers: &mut Answers) -> Result<()> {
    match query_here(driver, attributes, address, answers) {
        Err(error) if error.is(code::INVALID_CONTEXT) => {
            let context = reach::devices()
                .iter()
                .find_map(|device| reach::existing_context(device.ordinal).ok())
                .ok_or(error)?;
            let _entered = Entered::enter(context)?;
            query_here(driver, attributes, address, answers)
        }
        result => result,
    }
}

fn query_here(
    driver: &Driver,
    attributes: &[i32],
    address: u64,
    answers: &mut Answers,
) -> Result<()> {
    let mut data = [std::ptr::null_mut::<c_void>(); ATTRIBUTES_MAX];
    for (place, attribute) in data.iter_mut().zip(attributes) {
        *place = (&raw mut answers.0[Answers::slot(*attribute)]).cast();
    }
    let count = u32::try_from(attributes.len()).unwrap_or(0);
    // SAFETY: `data` holds `count` pointers to slots of 8 bytes, at least as wide as any attribute asked for.
    unsafe { driver.pointer_get_attributes(count, attributes.as_ptr(), data.as_ptr(), address) }
}

#[cold]
fn richest_detail(driver: &Driver, address: u64, answers: &mut Answers) -> Result<usize> {
    let mut level = usize::from(DETAIL_LEVEL.load(Ordering::Relaxed));
    loop {
        let result = query(driver, DETAILS[level], address, answers);
        match result {
            Ok(()) => break,
            Err(error) if level + 1 == DETAILS.len() => return Err(error),
            Err(_) => level += 1,
        }
    }
    DETAIL_LEVEL.store(u8::try_from(level).unwrap_or(0), Ordering::Relaxed);
    Ok(level)
}

fn detail(driver: &Driver, address: u64) -> Result<Kind> {
    let mut answers = Answers::default();
    let mut level = usize::from(DETAIL_LEVEL.load(Ordering::Relaxed));
    if query(driver, DETAILS[level], address, &mut answers).is_err() {
        answers = Answers::default();
        level = richest_detail(driver, address, &mut answers)?;
    }
    if answers.is_set(attribute::IS_MANAGED) {
        return Ok(Kind::HostAccessible(HostMemory::Managed));
    }
    match answers.get32(attribute::MEMORY_TYPE) {
        memory_type::UNREGISTERED => Ok(Kind::Host),
        memory_type::DEVICE => device_buffer(driver, address, &answers, level).map(Kind::Device),
        _ => Ok(Kind::HostAccessible(HostMemory::Pinned)),
    }
}

/// Driver memory of which only the type can be learnt: never host memory, and never exported.
fn without_detail(address: u64, memory_type: u32) -> Kind {
    if memory_type == self::memory_type::HOST {
        return Kind::HostAccessible(HostMemory::Pinned);
    }
    Kind::Device(Buffer {
        address,
        base: address,
        size: 0,
        offset: 0,
        buffer_id: 0,
        context: Context::NULL,
        context_id: None,
        ordinal: -1,
        uuid: Uuid::default(),
        ipc: false,
        allocation: Allocation::Virtual,
    })
}

fn device_buffer(driver: &Driver, address: u64, answers: &Answers, level: usize) -> Result<Buffer> {
    GPU_SEEN.store(true, Ordering::Relaxed);
    let ordinal = i32::try_from(answers.get32(attribute::DEVICE_ORDINAL)).unwrap_or(-1);
    let (base, size) = if level < 2 {
        (
            answers.get(attribute::RANGE_START_ADDR),
            answers.get(attribute::RANGE_SIZE),
        )
    } else {
        address_range(driver, address)?
    };
    let own = usize::try_from(answers.get(attribute::CONTEXT)).unwrap_or(0);
    // SAFETY: the driver's answer.
    let own = unsafe { Context::told(own) };
    let allocation = if answers.is_set(attribute::MEMPOOL_HANDLE) {
        Allocation::Pool
    } else if own.is_null() || (level < 2 && !answers.is_set(attribute::IS_LEGACY_CUDA_IPC_CAPABLE))
    {
        Allocation::Virtual
    } else {
        Allocation::Plain
    };
    let context = if own.is_null() {
        insist(|| reach::existing_context(ordinal)).unwrap_or(Context::NULL)
    } else {
        own
    };
    let within = base <= address && address - base < size;
    Ok(Buffer {
        address,
        base: if within { base } else { address },
        size: if within { size } else { 0 },
        offset: if within { address - base } else { 0 },
        buffer_id: answers.get(attribute::BUFFER_ID),
        context,
        context_id: (!context.is_null())
            .then(|| ContextKey::told_by(driver, context).ok())
            .flatten()
            .map(|key| key.id),
        ordinal,
        uuid: reach::device(ordinal).map_or(Uuid::default(), |device| device.uuid),
        ipc: within && allocation == Allocation::Plain,
        allocation,
    })
}

/// The allocation that an address lies in: its base and its length.
pub(super) fn address_range(driver: &Driver, address: u64) -> Result<(u64, u64)> {
    let (mut base, mut bytes) = (0, 0);
    driver.mem_get_address_range(&mut base, &mut bytes, address)?;
    u64::try_from(bytes)
        .map(|bytes| (base, bytes))
        .map_err(|_| Error::NoContext)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::types::Code;

    // Addresses that the stand-in for the driver knows, each an allocation of 0x1000 bytes.
    const PLAIN: u64 = 0x10_0000;
    const POOL: u64 = 0x20_0000;
    const VIRTUAL: u64 = 0x30_0000;
    const MANAGED: u64 = 0x40_0000;
    const PINNED: u64 = 0x50_0000;

    /// Answers as the driver's reference has it: unknown addresses leave zeros (and device -2) and succeed.
    unsafe extern "C" fn attributes(
        count: u32,
        list: *const i32,
        data: *const *mut c_void,
        address: u64,
    ) -> Code {
        let base = address & !0xffff;
        for place in 0..count as usize {
            // SAFETY: the caller passes `count` attributes and places for them.
            let (wanted, to) = unsafe { (*list.add(place), (*data.add(place)).cast::<u64>()) };
            let value = match (wanted, base) {
                (attribute::MEMORY_TYPE, PLAIN | POOL | VIRTUAL | MANAGED) => 2,
                (attribute::MEMORY_TYPE, PINNED) | (attribute::IS_MANAGED, MANAGED) => 1,
                (attribute::CONTEXT, PLAIN) => 0xc0,
                (attribute::BUFFER_ID, _) => base >> 20,
                (attribute::RANGE_START_ADDR, _) => base,
                (attribute::RANGE_SIZE, _) => 0x1000,
                (attribute::IS_LEGACY_CUDA_IPC_CAPABLE, PLAIN) => 1,
                (attribute::MEMPOOL_HANDLE, POOL) => 0xbeef,
                _ => 0,
            };
            // SAFETY: each place is 8 bytes wide.
            unsafe { *to = value };
        }
        code::SUCCESS
    }

    /// A driver before memory pools: it refuses a list that names them.
    unsafe extern "C" fn old(
        count: u32,
        list: *const i32,
        data: *const *mut c_void,
        address: u64,
    ) -> Code {
        // SAFETY: the caller passes `count` attributes.
        let list_read = unsafe { std::slice::from_raw_parts(list, count as usize) };
        if list_read.contains(&attribute::MEMPOOL_HANDLE) {
            return code::INVALID_VALUE;
        }
        // SAFETY: as many attributes and places as this function has been given.
        unsafe { attributes(count, list, data, address) }
    }

    fn kind(driver: &Driver, address: u64) -> Kind {
        examine(
            driver,
            std::ptr::without_provenance(usize::try_from(address).unwrap()),
        )
    }

    fn check_all(driver: &Driver, pool: Allocation) {
        assert_eq!(kind(driver, 0x900_0000), Kind::Host);
        assert_eq!(
            kind(driver, MANAGED),
            Kind::HostAccessible(HostMemory::Managed)
        );
        assert_eq!(
            kind(driver, PINNED),
            Kind::HostAccessible(HostMemory::Pinned)
        );
        let expected = [
            (PLAIN, Allocation::Plain, true),
            (POOL, pool, false),
            (VIRTUAL, Allocation::Virtual, false),
        ];
        for (base, allocation, ipc) in expected {
            let Kind::Device(buffer) = kind(driver, base + 0x123) else {
                panic!("{base:#x}")
            };
            assert_eq!(
                (buffer.base, buffer.offset, buffer.size),
                (base, 0x123, 0x1000)
            );
            assert_eq!(
                (buffer.allocation, buffer.ipc, buffer.buffer_id),
                (allocation, ipc, base >> 20)
            );
            assert_eq!(buffer.context.is_null(), base != PLAIN);
        }
    }

    #[test]
    fn every_kind_by_its_attributes() {
        let new = Driver {
            pointer_get_attributes: Some(attributes),
            ..Driver::default()
        };
        check_all(&new, Allocation::Pool);
        // Without the pool attribute such memory has no context and is not capable, and is refused all the
        // same.
        let old = Driver {
            pointer_get_attributes: Some(old),
            ..Driver::default()
        };
        check_all(&old, Allocation::Virtual);
        assert_eq!(DETAIL_LEVEL.swap(0, Ordering::Relaxed), 1);
    }

    thread_local! {
        /// Attributes asked for, and what was added to the number of the pinned allocation: another is there.
        static ASKED: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
        static ANOTHER: std::cell::Cell<(u64, u64)> = const { std::cell::Cell::new((0, 0)) };
    }

    unsafe extern "C" fn counting(
        count: u32,
        list: *const i32,
        data: *const *mut c_void,
        address: u64,
    ) -> Code {
        ASKED.with_borrow_mut(|asked| asked.push(count));
        // SAFETY: as many attributes and places as this function has been given.
        let code = unsafe { attributes(count, list, data, address) };
        let (more, managed) = ANOTHER.get();
        for place in 0..count as usize {
            // SAFETY: the caller passes `count` attributes and places of 8 bytes for them.
            unsafe {
                match *list.add(place) {
                    attribute::BUFFER_ID => *(*data.add(place)).cast::<u64>() += more,
                    attribute::IS_MANAGED => *(*data.add(place)).cast::<u64>() += managed,
                    _ => {}
                }
            }
        }
        code
    }

    #[test]
    fn memory_that_host_code_may_touch_is_asked_about_once() {
        let driver = Driver {
            pointer_get_attributes: Some(counting),
            ..Driver::default()
        };
        GPU_SEEN.store(true, Ordering::Relaxed);
        let asked = |expected: HostMemory| {
            ASKED.take();
            assert_eq!(kind(&driver, PINNED + 8), Kind::HostAccessible(expected));
            ASKED.take().len()
        };
        assert_eq!(asked(HostMemory::Pinned), 2);
        assert_eq!(asked(HostMemory::Pinned), 1, "its number is the same");
        // Freed, and other memory is there.
        ANOTHER.set((1000, 1));
        assert_eq!(asked(HostMemory::Managed), 2);
        assert_eq!(asked(HostMemory::Managed), 1);
    }

    #[test]
    fn device_memory_of_which_nothing_else_is_known_is_not_host_memory() {
        let Kind::Device(buffer) = without_detail(PLAIN, memory_type::DEVICE) else {
            panic!("host")
        };
        assert!(!buffer.ipc && buffer.context.is_null());
    }
}
