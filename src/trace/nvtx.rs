//! Messages as ranges of NVTX, which Nsight Systems and other tools show (`ANABRANCH_NVTX`).
//!
//! A tool names its library in `NVTX_INJECTION64_PATH`. Whoever has ranges opens it, and hands it a function that returns
//! tables, into which the tool puts its handlers: that is all that NVTX 3 consists of, and it is done here. Tools that bring
//! `libnvToolsExt.so.1` of NVTX 2 into the process are called through it.
//!
//! A send is a range from its offer, a receive one from when its payload begins to move; both until nothing is left to do.

use std::ffi::{c_char, c_int, c_void, CStr, CString, OsStr};
use std::mem::transmute;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::OnceLock;

use hashbrown::HashMap;
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL, RTLD_NOW};
use parking_lot::Mutex;

use super::record::{Message, Side};

/// The variable that names a tool's library.
const INJECTION: &str = "NVTX_INJECTION64_PATH";
/// The library of NVTX 2.
const LEGACY: &str = "libnvToolsExt.so.1";
/// All ranges are in it.
const DOMAIN: &CStr = c"Anabranch";

/// A function that a tool has put into a table; null: it does without.
type Slot = AtomicPtr<c_void>;
/// A module's table: pointers to its slots by number, from 1 on.
type Table = [AtomicPtr<Slot>; SLOTS];

/// Functions of each module and one more, as the table's size is told. The first module is no module.
const SIZES: [u32; 7] = [0, 16, 9, 15, 7, 16, 7];
/// Slots of the largest module, and the null at a table's end.
const SLOTS: usize = 17;
/// The module of domains, and its functions used here.
const CORE2: usize = 5;
const RANGE_START: usize = 2;
const RANGE_END: usize = 3;
const DOMAIN_CREATE: usize = 12;

static HANDLERS: [[Slot; SLOTS]; SIZES.len()] =
    [const { [const { Slot::new(null_mut()) }; SLOTS] }; SIZES.len()];
static TABLES: [Table; SIZES.len()] =
    [const { [const { AtomicPtr::new(null_mut()) }; SLOTS] }; SIZES.len()];

/// Version of the attributes.
const NVTX_3: u16 = 3;
const NVTX_2: u16 = 2;
/// Kinds of a payload and of a name: a number of 64 bits, and a text that ends with NUL.
const UNSIGNED_64: i32 = 1;
const ASCII: i32 = 1;

/// What a range is like, as tools read it.
#[repr(C)]
struct Attributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_char,
}

type Create = unsafe extern "C" fn(*const c_char) -> *mut c_void;
type Start = unsafe extern "C" fn(*mut c_void, *const Attributes) -> u64;
type End = unsafe extern "C" fn(*mut c_void, u64);

/// The table of callbacks, as a tool asks for it.
#[repr(C)]
struct Callbacks {
    size: usize,
    table: extern "C" fn(c_int, Option<&mut *const Table>, Option<&mut u32>) -> c_int,
}

/// The table of versions.
#[repr(C)]
struct Versions {
    size: usize,
    version: u32,
    reserved: u32,
    set: extern "C" fn(u32),
}

type GetTable = extern "C" fn(u32) -> *const c_void;
/// A tool's own entry.
type Initialize = unsafe extern "C" fn(GetTable) -> c_int;

static CALLBACKS: Callbacks = Callbacks {
    size: size_of::<Callbacks>(),
    table,
};
static VERSIONS: Versions = Versions {
    size: size_of::<Versions>(),
    version: NVTX_3 as u32,
    reserved: 0,
    set: set_version,
};

/// A tool asks for a table.
extern "C" fn export(number: u32) -> *const c_void {
    match number {
        1 => (&raw const CALLBACKS).cast(),
        3 => (&raw const VERSIONS).cast(),
        _ => null(),
    }
}

/// A tool asks for the functions of a module.
extern "C" fn table(
    module: c_int,
    table: Option<&mut *const Table>,
    size: Option<&mut u32>,
) -> c_int {
    let module = usize::try_from(module).unwrap_or(0);
    let known = TABLES.get(module).zip(SIZES.get(module));
    let Some((own, count)) = known.filter(|_| module > 0) else {
        return 0;
    };
    if let Some(table) = table {
        *table = own;
    }
    if let Some(size) = size {
        *size = *count;
    }
    1
}

extern "C" fn set_version(_: u32) {}

/// What the tool has, and what ranges are called.
struct Tool {
    start: Start,
    end: End,
    domain: AtomicPtr<c_void>,
    version: u16,
    send: CString,
    /// Names of receives by the numbers of their protocols.
    receives: Vec<CString>,
    states: States,
}

/// Numbers of the states at which ranges begin and end.
#[derive(Clone, Copy, Debug)]
pub struct States {
    /// The payload is on its way.
    pub moving: u8,
    /// It has arrived.
    pub landed: u8,
    /// Nothing is left to do.
    pub done: u8,
}

/// A message that is not done.
struct Open {
    side: Side,
    bytes: u64,
    /// Its range, once that has begun.
    range: Option<u64>,
}

static TOOL: OnceLock<Tool> = OnceLock::new();
static OPEN: Mutex<Option<HashMap<u32, Open>>> = Mutex::new(None);
/// Ranges are made.
static ON: AtomicBool = AtomicBool::new(false);

/// Why there are no ranges.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// No tool has left anything.
    #[error("NVTX_INJECTION64_PATH is not set, and there is no libnvToolsExt.so.1: run the program under a tool that takes NVTX ranges, Nsight Systems for example")]
    NoTool,
    /// A library cannot be loaded.
    #[error("{}: {why}", path.display())]
    Library {
        /// Which one.
        path: PathBuf,
        /// Why.
        why: libloading::Error,
    },
    /// The tool says that it cannot begin.
    #[error("{}: it refuses to begin", .0.display())]
    Refused(PathBuf),
    /// The tool takes no ranges.
    #[error("the tool takes no ranges")]
    NoRanges,
}

/// Messages are ranges from now on. `protocols` are the names of protocols from number 1 on.
///
/// # Errors
/// There is no tool that takes them.
pub fn open(protocols: &[&str], states: States) -> Result<(), Unavailable> {
    let (functions, version) = match std::env::var_os(INJECTION) {
        Some(path) if !path.is_empty() => (inject(Path::new(&path))?, NVTX_3),
        _ => (legacy()?, NVTX_2),
    };
    let [create, start, end] = functions;
    if start.is_null() || end.is_null() {
        return Err(Unavailable::NoRanges);
    }
    let domain = match create.is_null() {
        true => null_mut(),
        false => {
            // SAFETY: NVTX gives the function of this name this type.
            let create = unsafe { transmute::<*mut c_void, Create>(create) };
            // SAFETY: a text that ends with NUL.
            unsafe { create(DOMAIN.as_ptr()) }
        }
    };
    let name = |protocol: &&str| CString::new(format!("receive {protocol}")).unwrap_or_default();
    let tool = Tool {
        // SAFETY: NVTX gives the function of this name this type.
        start: unsafe { transmute::<*mut c_void, Start>(start) },
        // SAFETY: as above.
        end: unsafe { transmute::<*mut c_void, End>(end) },
        domain: AtomicPtr::new(domain),
        version,
        send: c"send".into(),
        receives: protocols.iter().map(name).collect(),
        states,
    };
    if TOOL.set(tool).is_ok() {
        super::open::start();
        *OPEN.lock() = Some(HashMap::new());
        ON.store(true, Ordering::Release);
        super::ON.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// Hands tables to a tool's library, and takes from them what it has put there.
fn inject(path: &Path) -> Result<[*mut c_void; 3], Unavailable> {
    let initialize = symbols(path.as_os_str(), RTLD_LAZY, [c"InitializeInjectionNvtx2"])?;
    for ((table, handlers), size) in TABLES.iter().zip(&HANDLERS).zip(SIZES) {
        let slots = table.iter().zip(handlers).take(size as usize).skip(1);
        for (entry, handler) in slots {
            entry.store((&raw const *handler).cast_mut(), Ordering::Release);
        }
    }
    // SAFETY: NVTX gives the function of this name this type.
    let initialize = unsafe { transmute::<*mut c_void, Initialize>(initialize[0]) };
    // SAFETY: the tables that `export` returns are laid out as NVTX says, and stay.
    if unsafe { initialize(export) } == 0 {
        return Err(Unavailable::Refused(path.into()));
    }
    let put = |number: usize| HANDLERS[CORE2][number].load(Ordering::Acquire);
    Ok([DOMAIN_CREATE, RANGE_START, RANGE_END].map(put))
}

fn legacy() -> Result<[*mut c_void; 3], Unavailable> {
    let names = [
        c"nvtxDomainCreateA",
        c"nvtxDomainRangeStartEx",
        c"nvtxDomainRangeEnd",
    ];
    symbols(OsStr::new(LEGACY), RTLD_NOW, names).map_err(|_| Unavailable::NoTool)
}

/// Functions of a library, which stays loaded.
fn symbols<const N: usize>(
    library: &OsStr,
    flags: c_int,
    names: [&CStr; N],
) -> Result<[*mut c_void; N], Unavailable> {
    let failed = |why| Unavailable::Library {
        path: library.into(),
        why,
    };
    // SAFETY: what the tool runs when it is loaded is the tool's, which the user has chosen.
    let opened = unsafe { Library::open(Some(library), flags | RTLD_LOCAL) }.map_err(failed)?;
    let mut found = [null_mut(); N];
    for (found, name) in found.iter_mut().zip(names) {
        // SAFETY: only its address is taken here.
        let symbol = unsafe { opened.get::<*mut c_void>(name.to_bytes_with_nul()) };
        *found = *symbol.map_err(failed)?;
    }
    std::mem::forget(opened);
    Ok(found)
}

impl Tool {
    fn start(&self, open: &Open, protocol: u8) -> u64 {
        let by = usize::from(protocol).checked_sub(1);
        let name = match open.side {
            Side::Sender => &self.send,
            Side::Receiver => by
                .and_then(|by| self.receives.get(by))
                .unwrap_or(&self.send),
        };
        let attributes = Attributes {
            version: self.version,
            size: size_of::<Attributes>() as u16,
            category: 0,
            color_type: 0,
            color: 0,
            payload_type: UNSIGNED_64,
            reserved: 0,
            payload: open.bytes,
            message_type: ASCII,
            message: name.as_ptr(),
        };
        let domain = self.domain.load(Ordering::Relaxed);
        // SAFETY: the tool's function; the domain is the one that it has made, and attributes and name are there until it
        // returns, by when it has copied them.
        unsafe { (self.start)(domain, &raw const attributes) }
    }

    fn end(&self, range: u64) {
        let domain = self.domain.load(Ordering::Relaxed);
        // SAFETY: a range that the tool has begun in its domain, and that has not been ended.
        unsafe { (self.end)(domain, range) }
    }
}

fn tool() -> Option<&'static Tool> {
    TOOL.get().filter(|_| ON.load(Ordering::Relaxed))
}

/// A side of a message begins.
pub(super) fn begin(id: u32, message: &Message) {
    let Some(tool) = tool() else { return };
    let mut open = Open {
        side: message.side,
        bytes: message.bytes,
        range: None,
    };
    if open.side == Side::Sender {
        open.range = Some(tool.start(&open, 0));
    }
    keep(tool, id, open);
}

/// The tool is not called while the list is locked: it may take its time. Once the list is closed, the range ends.
fn keep(tool: &Tool, id: u32, open: Open) {
    let range = open.range;
    let is_kept = match OPEN.lock().as_mut() {
        Some(all) => {
            all.insert(id, open);
            true
        }
        None => false,
    };
    if let Some(range) = range.filter(|_| !is_kept) {
        tool.end(range);
    }
}

/// A message enters a state.
pub(super) fn change(id: u32, state: u8, protocol: u8) {
    let Some(tool) = tool() else { return };
    let States {
        moving,
        landed,
        done,
    } = tool.states;
    if ![moving, landed, done].contains(&state) {
        return;
    }
    let Some(mut open) = OPEN.lock().as_mut().and_then(|all| all.remove(&id)) else {
        return;
    };
    // Of what was cancelled before its payload moved there is no receive.
    if open.range.is_none() && protocol != 0 {
        open.range = Some(tool.start(&open, protocol));
    }
    match open.range {
        Some(range) if state == done => tool.end(range),
        _ if state == done => {}
        _ => keep(tool, id, open),
    }
}

/// What is under way ends here, and nothing begins any more.
pub(super) fn close() {
    if !ON.swap(false, Ordering::Relaxed) {
        return;
    }
    let (Some(tool), Some(all)) = (TOOL.get(), OPEN.lock().take()) else {
        return;
    };
    for range in all.into_values().filter_map(|open| open.range) {
        tool.end(range);
    }
}
