//! The counters of the preloaded library, through the C interface in `include/anabranch.h`.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};

/// More counters than any version has: their number comes from the library.
const MOST: c_uint = 256;

/// The library in this process.
pub struct Counters {
    read: unsafe extern "C" fn(*const c_char) -> u64,
    aside: unsafe extern "C" fn(c_int) -> c_int,
    paths: unsafe extern "C" fn(*const c_char) -> c_int,
    names: Vec<&'static CStr>,
    /// Its version.
    pub version: String,
}

/// Values at one time, in the order of the names.
pub type Values = Vec<u64>;

impl Counters {
    /// The library's counters; `None` if it is not preloaded.
    pub fn find() -> Option<Counters> {
        let version = symbol(c"anabranch_version")?;
        let read = symbol(c"anabranch_counter")?;
        let name = symbol(c"anabranch_counter_name")?;
        let aside = symbol(c"anabranch_aside")?;
        let paths = symbol(c"anabranch_paths")?;
        // SAFETY: include/anabranch.h gives the functions of these names these signatures.
        let (version, read, name, aside, paths) = unsafe {
            (
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *const c_char>(
                    version,
                ),
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> u64>(
                    read,
                ),
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_uint) -> *const c_char>(
                    name,
                ),
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int) -> c_int>(aside),
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> c_int>(
                    paths,
                ),
            )
        };
        // SAFETY: strings of the library are never freed.
        let text = |text: *const c_char| (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
        let names = (0..MOST)
            // SAFETY: any index may be asked for.
            .map_while(|index| text(unsafe { name(index) }))
            .collect();
        // SAFETY: no arguments.
        let version = text(unsafe { version() })?.to_string_lossy().into_owned();
        Some(Counters {
            read,
            aside,
            paths,
            names,
            version,
        })
    }

    /// Has the library stand aside, or take messages again; where messages are in the way, how many.
    pub fn stand_aside(&self, on: bool) -> c_int {
        // SAFETY: any thread may call it; that no message is under way is checked there, and ranks meet around it.
        unsafe { (self.aside)(on.into()) }
    }

    /// Has messages that this process receives take these paths only, or all; false if they cannot be chosen.
    pub fn choose_paths(&self, list: Option<&CStr>) -> bool {
        let list = list.map_or(std::ptr::null(), CStr::as_ptr);
        // SAFETY: null, or a string.
        unsafe { (self.paths)(list) == 0 }
    }

    /// The present values of this process.
    pub fn read(&self) -> Values {
        let read = |name: &&CStr| {
            // SAFETY: the name is a string of the library's own.
            unsafe { (self.read)(name.as_ptr()) }
        };
        self.names.iter().map(read).collect()
    }

    /// Names and values of what is not zero.
    pub fn named(&self, values: &[u64]) -> BTreeMap<String, u64> {
        let named = self.names.iter().zip(values);
        named
            .filter(|(_, value)| **value != 0)
            .map(|(name, value)| (name.to_string_lossy().into_owned(), *value))
            .collect()
    }
}

fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: dlsym reads the name only.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}
