//! The functions of `include/anabranch.h`.

use anabranch_engine::engine::{aside, choice, inquiry};
use anabranch_engine::mpi::Slot;
use anabranch_engine::stats;
use anabranch_engine::transfer::story::{self, Path, Story};
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::panic::catch_unwind;
use std::ptr::null;

/// What `anabranch_counter` gives for a name that no counter has.
const NO_SUCH_COUNTER: u64 = u64::MAX;

/// The version again, which the command reads from the file without loading it: a library of another version is not preloaded.
#[no_mangle]
#[used]
#[allow(non_upper_case_globals)]
pub static anabranch_release: [u8; 24] = {
    let version = stats::version::VERSION.as_bytes();
    let mut text = [0; 24];
    let mut at = 0;
    while at < version.len() {
        text[at] = version[at];
        at += 1;
    }
    text
};

/// Version of the library, as in "0.1.0".
#[no_mangle]
pub extern "C" fn anabranch_version() -> *const c_char {
    stats::version().as_ptr()
}

/// Present value of a counter of this process, or UINT64_MAX if no counter has this name.
///
/// # Safety
/// `name` is null or a C string.
#[no_mangle]
pub unsafe extern "C" fn anabranch_counter(name: *const c_char) -> u64 {
    if name.is_null() {
        return NO_SUCH_COUNTER;
    }
    // SAFETY: not null, so a C string, as the caller says.
    let name = unsafe { CStr::from_ptr(name) };
    let value = catch_unwind(|| name.to_str().ok().and_then(stats::counter_by_name));
    value.ok().flatten().unwrap_or(NO_SUCH_COUNTER)
}

/// Name of counter number `index`; null past the last one.
#[no_mangle]
pub extern "C" fn anabranch_counter_name(index: c_uint) -> *const c_char {
    let name = catch_unwind(|| usize::try_from(index).ok().and_then(stats::name_by_index));
    name.ok().flatten().map_or(null(), CStr::as_ptr)
}

/// What a counter counts, in words; null for a name that no counter has.
///
/// # Safety
/// `name` is null or a C string.
#[no_mangle]
pub unsafe extern "C" fn anabranch_counter_text(name: *const c_char) -> *const c_char {
    if name.is_null() {
        return null();
    }
    // SAFETY: not null, so a C string, as the caller says.
    let name = unsafe { CStr::from_ptr(name) };
    let text = catch_unwind(|| name.to_str().ok().and_then(stats::text_by_name));
    text.ok().flatten().map_or(null(), CStr::as_ptr)
}

/// Name of reason number `index`; null past the last one.
#[no_mangle]
pub extern "C" fn anabranch_reason_name(index: c_uint) -> *const c_char {
    let name = catch_unwind(|| usize::try_from(index).ok().and_then(stats::reason_by_index));
    name.ok().flatten().map_or(null(), CStr::as_ptr)
}

/// Name of a path; null for a number that no path has.
#[no_mangle]
pub extern "C" fn anabranch_path_name(path: c_int) -> *const c_char {
    let path = usize::try_from(path)
        .ok()
        .and_then(|path| Path::ALL.get(path));
    path.map_or(null(), |path| path.c_name().as_ptr())
}

/// Paths for which the C structure has room.
const PATHS: usize = 16;

/// `anabranch_message`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Message {
    is_send: c_int,
    is_complete: c_int,
    is_taken: c_int,
    path: c_int,
    bytes: u64,
    bytes_by_path: [u64; PATHS],
    reason: *const c_char,
}

impl From<Story> for Message {
    fn from(story: Story) -> Message {
        let mut bytes_by_path = [0; PATHS];
        let known = story.bytes_by_path();
        bytes_by_path[..known.len()].copy_from_slice(&known);
        Message {
            is_send: story.is_send.into(),
            is_complete: story.is_complete.into(),
            is_taken: story.path.is_taken().into(),
            path: story.path as c_int,
            bytes: story.bytes,
            bytes_by_path,
            reason: story.told_reason().map_or(null(), |reason| {
                stats::reason_by_index(reason as usize).map_or(null(), CStr::as_ptr)
            }),
        }
    }
}

/// Writes as much of an answer as the caller has room for.
///
/// # Safety
/// `message` is null or has room for `size` bytes.
unsafe fn answer(story: Option<Story>, message: *mut Message, size: usize) -> c_int {
    let (Some(story), false) = (story, message.is_null()) else {
        return 0;
    };
    let whole = Message::from(story);
    let bytes = size.min(size_of::<Message>());
    // SAFETY: room for `size` bytes, as the caller says.
    unsafe {
        message
            .cast::<u8>()
            .copy_from_nonoverlapping((&raw const whole).cast(), bytes);
    }
    1
}

/// What is known of a request that the program has not completed.
///
/// # Safety
/// `request` is null or points to an `MPI_Request`; `message` is null or has room for `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn anabranch_request(
    request: *const c_void,
    message: *mut Message,
    size: usize,
) -> c_int {
    let story = catch_unwind(|| {
        // SAFETY: not null, so a request, as the caller says.
        let request = (!request.is_null()).then(|| unsafe { Slot::new(request.cast_mut().cast()) });
        request.and_then(inquiry::of_request)
    });
    // SAFETY: as the caller says.
    unsafe { answer(story.ok().flatten(), message, size) }
}

/// What is known of the latest operation that the engine has completed on this thread, once.
///
/// # Safety
/// `message` is null or has room for `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn anabranch_last(message: *mut Message, size: usize) -> c_int {
    let story = catch_unwind(story::take_last);
    // SAFETY: as the caller says.
    unsafe { answer(story.ok().flatten(), message, size) }
}

/// What `anabranch_simulated_ns` gives where no node is simulated.
const NOT_SIMULATED: u64 = u64::MAX;

/// The clock of the simulated node, ns, or UINT64_MAX where no node is simulated.
#[no_mangle]
pub extern "C" fn anabranch_simulated_ns() -> u64 {
    let now = catch_unwind(inquiry::simulated_ns);
    now.ok().flatten().unwrap_or(NOT_SIMULATED)
}

/// Has this process's messages passed on to the MPI library (not 0), or taken again (0). Gives how many messages and requests
/// are in the way, in which case nothing has changed.
#[no_mangle]
pub extern "C" fn anabranch_aside(on: c_int) -> c_int {
    let left = catch_unwind(|| aside::set(on != 0)).unwrap_or(1);
    c_int::try_from(left).unwrap_or(c_int::MAX)
}

/// Has messages that this process receives from now on take these paths only, or, for null, those of `ANABRANCH_PATHS` again. 0, or
/// -1 if it has refused.
///
/// # Safety
/// `list` is null or a string.
#[no_mangle]
pub unsafe extern "C" fn anabranch_paths(list: *const c_char) -> c_int {
    let chosen = catch_unwind(|| {
        // SAFETY: a string, as the caller says.
        let list = (!list.is_null()).then(|| unsafe { CStr::from_ptr(list) });
        choice::choose(list.map(CStr::to_string_lossy).as_deref())
    });
    if chosen.unwrap_or(false) {
        0
    } else {
        -1
    }
}
