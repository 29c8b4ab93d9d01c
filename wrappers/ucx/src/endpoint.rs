//! Endpoints by number, and the transports that UCX names for them.

use std::collections::HashMap;
use std::ffi::{c_char, c_void, CStr, CString};
use std::mem::{offset_of, size_of};
use std::sync::{Mutex, PoisonError};

use crate::real::Function;
use crate::told;

/// Endpoints that get a number.
const MOST: usize = 1 << 16;
/// Transports that are asked for.
const LANES: usize = 16;

static QUERY: Function = Function::of_ucx(c"ucp_ep_query");
static KNOWN: Mutex<Option<HashMap<usize, Endpoint>>> = Mutex::new(None);

struct Endpoint {
    number: u32,
    /// Calls with it.
    calls: u64,
    lanes: Vec<CString>,
}

/// Number of an endpoint, from 1 on; 0: there is none, or there are too many. An endpoint connects itself while it is used, so
/// UCX is asked for its transports at its first call, its second, its fourth and so on.
pub fn number(endpoint: *mut c_void) -> u32 {
    if endpoint.is_null() {
        return 0;
    }
    let counted = with(|known| {
        let next = known.len();
        if next >= MOST && !known.contains_key(&endpoint.addr()) {
            return None;
        }
        let about = known.entry(endpoint.addr()).or_insert_with(|| Endpoint {
            number: next as u32 + 1,
            calls: 0,
            lanes: Vec::new(),
        });
        about.calls += 1;
        Some((about.number, about.calls.is_power_of_two()))
    });
    let Some((number, is_asked)) = counted else {
        return 0;
    };
    if is_asked {
        // UCX may have to wait for a thread that is in it, and comes here in a callback: nothing is locked meanwhile.
        let lanes = lanes(endpoint);
        let is_new = with(|known| match known.get_mut(&endpoint.addr()) {
            Some(about) if about.lanes != lanes => {
                about.lanes.clone_from(&lanes);
                true
            }
            _ => false,
        });
        for (at, name) in lanes.iter().enumerate().filter(|_| is_new) {
            told::lane(number, (at as u32, lanes.len() as u32), name);
        }
    }
    number
}

fn with<T>(act: impl FnOnce(&mut HashMap<usize, Endpoint>) -> T) -> T {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    act(known.get_or_insert_default())
}

/// `ucp_transport_entry_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    transport: *const c_char,
    device: *const c_char,
}

/// `ucp_ep_attr_t` as of UCX 1.14.
#[repr(C)]
struct Attributes {
    mask: u64,
    name: [u8; 32],
    addresses: [libc::sockaddr_storage; 2],
    entries: *mut Entry,
    count: u32,
    entry_size: usize,
    user: *mut c_void,
    /// Later versions have more, which are not asked for.
    more: [u64; 16],
}

/// `UCP_EP_ATTR_FIELD_TRANSPORTS`.
const TRANSPORTS: u64 = 1 << 3;

// As gcc lays the structure out.
const _: () = assert!(offset_of!(Attributes, entries) == 296);

/// The transports, each with its device; none before UCX 1.14, which leaves unknown bits of the mask alone.
fn lanes(endpoint: *mut c_void) -> Vec<CString> {
    let address = QUERY.address();
    if address.is_null() {
        return Vec::new();
    }
    let none = Entry {
        transport: std::ptr::null(),
        device: std::ptr::null(),
    };
    let mut entries = [none; LANES];
    // SAFETY: all zeros are a value of it: numbers, and pointers that are null.
    let mut attributes: Attributes = unsafe { std::mem::zeroed() };
    attributes.mask = TRANSPORTS;
    attributes.entries = entries.as_mut_ptr();
    attributes.count = LANES as u32;
    attributes.entry_size = size_of::<Entry>();
    // SAFETY: UCX's function, which is of this type.
    let query: unsafe extern "C" fn(*mut c_void, *mut Attributes) -> i32 =
        unsafe { std::mem::transmute(address) };
    // SAFETY: the program has just used the endpoint on this thread, and there is room for what is asked.
    if unsafe { query(endpoint, &raw mut attributes) } != 0 {
        return Vec::new();
    }
    let there = entries
        .iter()
        .take(attributes.count as usize)
        .take_while(|entry| !entry.transport.is_null() && !entry.device.is_null());
    let name = |entry: &Entry| {
        // SAFETY: C strings of UCX's, which keeps them with the endpoint.
        let (transport, device) = unsafe {
            (
                CStr::from_ptr(entry.transport),
                CStr::from_ptr(entry.device),
            )
        };
        CString::new([transport.to_bytes(), b"/", device.to_bytes()].concat()).ok()
    };
    there.filter_map(name).collect()
}
