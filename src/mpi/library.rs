//! Finding the MPI library among the loaded objects, whenever and however it was loaded.
//!
//! Three cases: the program links it (it comes after this object in the global scope), a plugin brought it in with
//! RTLD_GLOBAL, or with RTLD_LOCAL (as Python does with mpi4py), when no look-up by scope finds it.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

/// A loaded object that defines the MPI functions.
#[derive(Debug)]
pub(super) struct Library {
    handle: Opened,
    object: Object,
    /// Path that it was loaded from.
    pub path: String,
    /// DT_SONAME, or the file name where it has none.
    pub soname: String,
}

/// What `dlopen` gave. It stays open, unless it is closed by who opened it.
#[derive(Clone, Copy, Debug)]
struct Opened(*mut c_void);

/// A loaded object.
///
/// Invariant: glibc keeps its link map, as it is not unloaded: this library has a reference to it, or code of it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Object(*const LinkMap);

// SAFETY: the link map of an object that stays does not change.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}
// SAFETY: a handle of `dlopen` is good in any thread.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

/// The public head of glibc's `struct link_map`.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const Dyn,
}

/// An entry of the dynamic section (`Elf64_Dyn`).
#[repr(C)]
struct Dyn {
    tag: i64,
    value: u64,
}

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SONAME: i64 = 14;
const RTLD_DL_LINKMAP: c_int = 2;

extern "C" {
    fn dladdr1(
        address: *const c_void,
        info: *mut libc::Dl_info,
        extra: *mut *mut c_void,
        flags: c_int,
    ) -> c_int;
}

/// The library once found: it is kept for the life of the process.
static FOUND: OnceLock<Library> = OnceLock::new();
/// How many objects had ever been loaded when nothing was found, so that one look-up is made after each new one only.
static LOADED_WHEN_MISSED: AtomicU64 = AtomicU64::new(0);

/// The MPI library in this process. Cheap once found, and cheap again until another object is loaded.
pub(super) fn find() -> Option<&'static Library> {
    if let Some(found) = FOUND.get() {
        return Some(found);
    }
    let (objects, loaded) = loaded_objects(false);
    debug_assert!(objects.is_empty());
    if loaded != 0 && loaded == LOADED_WHEN_MISSED.load(Ordering::Relaxed) {
        return None;
    }
    let Some(library) = search() else {
        LOADED_WHEN_MISSED.store(loaded, Ordering::Relaxed);
        return None;
    };
    // Another thread may have been first.
    let _ = FOUND.set(library);
    FOUND.get()
}

/// Address of a symbol in what `dlopen` gave, or one of its special handles; null if there is none.
fn look_up(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the handle is open or special; a look-up calls nothing but a resolver of the object itself.
    unsafe { libc::dlsym(handle, name.as_ptr()) }
}

/// Address of the next symbol of this name behind the object that this code is in; null if there is none.
pub(super) fn next_symbol(name: &CStr) -> *mut c_void {
    look_up(libc::RTLD_NEXT, name)
}

impl Opened {
    /// Takes a reference on an object that is loaded already, so that it stays.
    fn again(name: &CStr) -> Option<Opened> {
        // SAFETY: nothing is loaded, and no initializer runs.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
        (!handle.is_null()).then_some(Opened(handle))
    }

    fn object(self) -> Option<Object> {
        let mut object = null_mut::<LinkMap>();
        // SAFETY: the handle is open; the address of a link map is written to a local.
        let code = unsafe { libc::dlinfo(self.0, libc::RTLD_DI_LINKMAP, (&raw mut object).cast()) };
        (code == 0).then_some(Object(object))
    }
}

/// The first object with the name of a known MPI library, else the first that has MPI at all.
fn search() -> Option<Library> {
    search_by(c"PMPI_Init").or_else(|| search_by(c"PMPI_Init_thread"))
}

/// As [`search`], by the function that makes a library one of MPI.
fn search_by(init: &'static CStr) -> Option<Library> {
    let mut first = None;
    let next = next_symbol(init);
    let global = if next.is_null() {
        None
    } else {
        Library::defining(next)
    };
    let (mut objects, _) = loaded_objects(true);
    objects.sort_by_key(|name| !file_name(&name.to_string_lossy()).contains("mpi"));
    let scanned = objects.iter().filter_map(|name| Library::among(name, init));
    for library in global.into_iter().chain(scanned) {
        if super::detect::known_soname(&library.soname).is_some() {
            return Some(library);
        }
        first.get_or_insert(library);
    }
    first
}

impl Library {
    /// The object in which `address` lies, unless it is this one or another copy of Anabranch.
    pub(super) fn defining(address: *mut c_void) -> Option<Library> {
        let object = object_of(address)?;
        if Some(object) == own_object() {
            return None;
        }
        let name = object.name();
        if name.is_empty() {
            return None; // The executable itself: MPI linked statically, which no preload library can interpose.
        }
        let library = Library::new(Opened::again(name)?, object, name);
        (!library.is_copy()).then_some(library)
    }

    fn new(handle: Opened, object: Object, name: &CStr) -> Library {
        let path = name.to_string_lossy().into_owned();
        let soname = object.soname();
        Library {
            handle,
            object,
            soname: soname.unwrap_or_else(|| file_name(&path).to_owned()),
            path,
        }
    }

    /// The loaded object of this name.
    fn loaded_as(name: &CStr) -> Option<Library> {
        let handle = Opened::again(name)?;
        Some(Library::new(handle, handle.object()?, name))
    }

    /// Whether it is this library, or another copy of it.
    pub(super) fn is_copy(&self) -> bool {
        self.own_symbol(c"anabranch_version").is_some()
    }

    /// The object that gives `symbol` to the loaded object of this name.
    fn among(name: &CStr, symbol: &CStr) -> Option<Library> {
        let opened = Opened::again(name)?;
        let address = look_up(opened.0, symbol);
        let library = if address.is_null() {
            None
        } else {
            Library::defining(address)
        };
        // SAFETY: gives back the reference taken above, which nobody else has.
        unsafe { libc::dlclose(opened.0) };
        library
    }

    /// Address of a symbol of the library or of what it was linked with.
    pub fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        let address = look_up(self.handle.0, name);
        (!address.is_null()).then_some(address)
    }

    /// As [`Library::symbol`], defined in this very object.
    pub(super) fn own_symbol(&self, name: &CStr) -> Option<*mut c_void> {
        self.symbol(name)
            .filter(|&address| object_of(address) == Some(self.object))
    }

    /// Address of a data symbol as the program sees it: an executable that is not position independent holds the
    /// library's data in copies of its own, which only a look-up in the global scope finds.
    pub fn data_symbol(&self, name: &CStr) -> Option<*mut c_void> {
        global_symbol(name).or_else(|| self.symbol(name))
    }
}

/// Address of a symbol in the global scope.
pub(super) fn global_symbol(name: &CStr) -> Option<*mut c_void> {
    let address = look_up(libc::RTLD_DEFAULT, name);
    (!address.is_null()).then_some(address)
}

pub(super) fn object_of(address: *mut c_void) -> Option<Object> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    let mut object = null_mut();
    // SAFETY: both results are written to local storage; any address may be asked for.
    let known = unsafe { dladdr1(address, info.as_mut_ptr(), &raw mut object, RTLD_DL_LINKMAP) };
    (known != 0 && !object.is_null()).then_some(Object(object.cast::<LinkMap>().cast_const()))
}

/// The object that this code is part of: the preload library, or an executable that uses the engine.
pub(super) fn own_object() -> Option<Object> {
    let here = own_object as fn() -> Option<Object>;
    object_of(here as *mut c_void)
}

impl Object {
    fn map(self) -> &'static LinkMap {
        // SAFETY: glibc keeps it, by the type's invariant.
        unsafe { &*self.0 }
    }

    /// The name that it was loaded under; empty for the executable.
    pub(super) fn name(self) -> &'static CStr {
        // SAFETY: a C string that is kept with the link map.
        unsafe { CStr::from_ptr(self.map().name) }
    }

    /// The value of an entry of its dynamic section.
    fn entry(self, tag: i64) -> Option<usize> {
        let mut entry = self.map().dynamic;
        loop {
            // SAFETY: the dynamic section of a loaded object ends with DT_NULL.
            let Dyn { tag: found, value } = unsafe { entry.as_ref() }?;
            match *found {
                DT_NULL => return None,
                found if found == tag => return usize::try_from(*value).ok(),
                _ => entry = entry.wrapping_add(1),
            }
        }
    }

    /// The address that an entry of its dynamic section names.
    pub(super) fn address_of(self, tag: i64) -> Option<*const c_void> {
        let mut address = self.entry(tag)?;
        let base = self.map().base;
        // glibc relocates the entry in place, but not on every machine.
        if address < base {
            address += base;
        }
        Some(std::ptr::with_exposed_provenance(address))
    }

    fn soname(self) -> Option<String> {
        let strings = self.address_of(DT_STRTAB)?;
        let name = strings.wrapping_byte_add(self.entry(DT_SONAME)?);
        // SAFETY: a C string in the object's string table.
        let name = unsafe { CStr::from_ptr(name.cast()) };
        Some(name.to_string_lossy().into_owned())
    }
}

/// The objects loaded after this one, in the order of the global scope, other copies of this library left out. They stay.
pub(super) fn objects_behind() -> Vec<Library> {
    let own = own_object();
    let (names, _) = loaded_objects(true);
    let opened = names.iter().filter_map(|name| Library::loaded_as(name));
    let behind = opened.skip_while(|library| Some(library.object) != own);
    let others = behind.skip(1);
    others.filter(|library| !library.is_copy()).collect()
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Names of the loaded objects (if asked for), and how many were ever loaded.
fn loaded_objects(with_names: bool) -> (Vec<CString>, u64) {
    struct Visit {
        names: Vec<CString>,
        loaded: u64,
        with_names: bool,
    }

    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: `data` is the `Visit` below, and glibc passes a filled-in `info` whose name is null or a C string.
        let (visit, info) = unsafe { (&mut *data.cast::<Visit>(), &*info) };
        visit.loaded = info.dlpi_adds;
        if !visit.with_names {
            return 1;
        }
        if !info.dlpi_name.is_null() {
            // SAFETY: as above.
            let name = unsafe { CStr::from_ptr(info.dlpi_name) };
            if !name.is_empty() {
                visit.names.push(name.to_owned());
            }
        }
        0
    }

    let mut result = Visit {
        names: Vec::new(),
        loaded: 0,
        with_names,
    };
    // SAFETY: the callback gets a pointer to `result`, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut result).cast()) };
    (result.names, result.loaded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_by_its_soname() {
        // The C library stands for a library that this executable links.
        let (names, loaded) = loaded_objects(true);
        assert!(loaded > 0);
        assert!(names
            .iter()
            .any(|name| name.to_string_lossy().contains("libc.so.6")));
        let Some(address) = global_symbol(c"getpid") else {
            panic!("getpid is in every process")
        };
        let Some(library) = Library::defining(address) else {
            panic!("getpid is defined by an object")
        };
        assert_eq!(library.soname, "libc.so.6");
        assert!(library.own_symbol(c"getpid").is_some());
    }

    #[test]
    fn this_executable_has_no_mpi() {
        assert!(find().is_none());
        assert!(find().is_none());
    }
}
