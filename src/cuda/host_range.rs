//! Recognizes addresses that cannot be device memory, without the driver.
//!
//! The executable's own image, the heap below the program break and the running thread's stack were mapped by
//! the kernel for host use and stay so: the driver reserves device addresses elsewhere, in gaps of the
//! address space. Only what is certain counts; any other address is left to the driver.

use std::cell::Cell;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::Once;

/// Image of the executable and start of the heap, which do not move. They are found once; before that no
/// address is in them. Each call of a program on host memory looks at them, so nothing else lies between them
/// and that call.
static IMAGE_START: AtomicUsize = AtomicUsize::new(0);
static IMAGE_BYTES: AtomicUsize = AtomicUsize::new(0);
static HEAP_START: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Where glibc keeps the program break; null if it does not say so.
static PROGRAM_BREAK: AtomicPtr<AtomicUsize> = AtomicPtr::new(null_mut());

static FOUND: Once = Once::new();

/// How often the variable is compared with what the kernel says before it is not believed.
const BREAK_LOOKS: u32 = 100;

/// Whether an address is host memory for certain.
#[inline]
#[must_use]
pub fn is_certainly_host(address: *const c_void) -> bool {
    let address = address.addr();
    is_in_image(address)
        || is_in_heap(address, || program_break().unwrap_or(0))
        || is_elsewhere(address)
}

#[inline]
fn is_in_image(address: usize) -> bool {
    address.wrapping_sub(IMAGE_START.load(Ordering::Relaxed)) < IMAGE_BYTES.load(Ordering::Relaxed)
}

#[inline]
fn is_in_heap(address: usize, end: impl FnOnce() -> usize) -> bool {
    address >= HEAP_START.load(Ordering::Relaxed) && address < end()
}

/// End of the heap, if glibc says so.
#[inline]
fn program_break() -> Option<usize> {
    // SAFETY: null, or a variable of the C library, which is never unloaded.
    let variable = unsafe { PROGRAM_BREAK.load(Ordering::Relaxed).as_ref() };
    variable.map(|variable| variable.load(Ordering::Relaxed))
}

/// The full answer, if the first look at image and heap has not found the address.
#[inline(never)]
fn is_elsewhere(address: usize) -> bool {
    FOUND.call_once(find);
    is_in_image(address)
        || is_in_heap(address, || {
            program_break().unwrap_or_else(ask_program_break)
        })
        || is_on_own_stack(address)
}

fn find() {
    let image = image_of_executable();
    IMAGE_START.store(image.start, Ordering::Relaxed);
    IMAGE_BYTES.store(image.len(), Ordering::Relaxed);
    PROGRAM_BREAK.store(variable_of_break(), Ordering::Relaxed);
    HEAP_START.store(heap_start().unwrap_or(usize::MAX), Ordering::Relaxed);
}

/// The kernel's answer. We never use `sbrk(0)`, which may move the break: UCX puts a function in its place
/// that reads the break and then sets it to the value it has read. If another thread's `malloc` raised it in
/// between, the end of its heap is gone (measured: 14 of 1,400 runs with MPICH 5.0.2 over UCX crashed, in
/// which two threads made and freed datatypes).
fn ask_program_break() -> usize {
    // SAFETY: a break of 0 is refused, and the present one returned.
    let kernel = unsafe { libc::syscall(libc::SYS_brk, 0) };
    usize::try_from(kernel).unwrap_or(0)
}

/// glibc's `__curbrk`, which it exports. UCX replaces `sbrk` by a function of its own that makes a system
/// call (measured: 286 ns against 4 ns) and keeps the variable current (measured: while the heap grows and
/// when it is trimmed). So does glibc. Null if it is not what the kernel says.
fn variable_of_break() -> *mut AtomicUsize {
    // SAFETY: a look-up by name in what is loaded.
    let place = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__curbrk".as_ptr()) };
    let place = place.cast::<AtomicUsize>();
    // SAFETY: null, or a pointer variable of the C library, which is never unloaded; it is only read here.
    let Some(variable) = (unsafe { place.as_ref() }) else {
        return null_mut();
    };
    // Another thread may move the break between the two questions.
    let is_current =
        (0..BREAK_LOOKS).any(|_| variable.load(Ordering::Relaxed) == ask_program_break());
    if is_current {
        place
    } else {
        null_mut()
    }
}

/// Start of the heap (`start_brk` of the kernel, field 47 of /proc/self/stat).
fn heap_start() -> Option<usize> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    field_of_stat(&stat, 47).filter(|start| *start != 0)
}

/// A field of /proc/self/stat, counted from 1. The second one, a name in parentheses, may hold anything.
fn field_of_stat(stat: &str, number: usize) -> Option<usize> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name
        .split_ascii_whitespace()
        .nth(number.checked_sub(3)?)?
        .parse()
        .ok()
}

fn image_of_executable() -> Range<usize> {
    let mut image: Range<usize> = 0..0;
    // SAFETY: the call-back is called before the function returns, with the pointer given here.
    unsafe { libc::dl_iterate_phdr(Some(first_object), (&raw mut image).cast()) };
    image
}

/// Stores the extent of the first object reported, which is the executable, and stops.
unsafe extern "C" fn first_object(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    image: *mut c_void,
) -> i32 {
    // SAFETY: the loader passes a valid record whose header table has `dlpi_phnum` rows.
    let (base, headers) = unsafe {
        (
            (*info).dlpi_addr,
            std::slice::from_raw_parts((*info).dlpi_phdr, usize::from((*info).dlpi_phnum)),
        )
    };
    let mut extent: Option<Range<u64>> = None;
    for header in headers
        .iter()
        .filter(|header| header.p_type == libc::PT_LOAD)
    {
        let segment = base + header.p_vaddr..base + header.p_vaddr + header.p_memsz;
        extent = Some(match extent {
            // Segments are in ascending order and the kernel maps them as one block.
            Some(before) => before.start..segment.end,
            None => segment,
        });
    }
    if let (Some(extent), true) = (extent, usize::BITS == 64) {
        let word = |address: u64| usize::try_from(address).unwrap_or(0);
        // SAFETY: the caller passed a pointer to a live range.
        unsafe { *image.cast::<Range<usize>>() = word(extent.start)..word(extent.end) };
    }
    1
}

thread_local! {
    /// Bounds of this thread's stack; (0, 0): not asked yet, (1, 0): unknown.
    static STACK: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Whether an address is on this thread's stack, above the running function. A program that has switched to a
/// stack of its own making is outside the bounds, and gets no answer from here.
#[inline]
fn is_on_own_stack(address: usize) -> bool {
    let here = 0u8;
    let top_of_use = (&raw const here).addr();
    if address < top_of_use {
        return false;
    }
    let (low, high) = STACK.with(|bounds| {
        if bounds.get() == (0, 0) {
            bounds.set(ask_stack_bounds().unwrap_or((1, 0)));
        }
        bounds.get()
    });
    low <= top_of_use && address < high
}

#[cold]
fn ask_stack_bounds() -> Option<(usize, usize)> {
    let mut attributes = std::mem::MaybeUninit::<libc::pthread_attr_t>::uninit();
    let attributes = attributes.as_mut_ptr();
    let (mut low, mut bytes) = (std::ptr::null_mut(), 0);
    // SAFETY: the attributes are initialized by the first call and destroyed by the last, before they leave scope.
    let result = unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), attributes) != 0 {
            return None;
        }
        let result = libc::pthread_attr_getstack(attributes, &raw mut low, &raw mut bytes);
        libc::pthread_attr_destroy(attributes);
        result
    };
    (result == 0).then(|| (low.addr(), low.addr() + bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    static IN_THE_IMAGE: [u8; 64] = [1; 64];

    fn certain<T>(value: *const T) -> bool {
        is_certainly_host(value.cast())
    }

    #[test]
    fn image_and_stack_are_certain_on_any_thread() {
        let here = 0u64;
        assert!(certain(IN_THE_IMAGE.as_ptr()));
        assert!(certain(&raw const here));
        std::thread::spawn(|| {
            let there = 0u64;
            assert!(certain(&raw const there));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_heap_is_certain_up_to_the_break() {
        assert!(!certain(std::ptr::null::<u8>()));
        let end = ask_program_break();
        // The variable of glibc, as here, or none.
        assert!(program_break().is_none_or(|told| told == end));
        assert!(!certain(std::ptr::without_provenance::<u8>(end)));
        if end > HEAP_START.load(Ordering::Relaxed) {
            assert!(certain(std::ptr::without_provenance::<u8>(end - 1)));
        }
    }

    #[test]
    fn mappings_are_not() {
        // SAFETY: a fresh private mapping, unmapped below.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert!(!is_certainly_host(page));
        assert!(!is_certainly_host(std::ptr::null()));
        // SAFETY: the mapping made above.
        unsafe { libc::munmap(page, 4096) };
    }

    #[test]
    fn a_name_with_parentheses_does_not_shift_fields() {
        assert_eq!(field_of_stat("7 (a) b) S 1 22 33", 4), Some(1));
        assert_eq!(field_of_stat("7 (a) b) S 1 22 33", 6), Some(33));
        assert_eq!(field_of_stat("7 (a) b) S 1 22 33", 7), None);
    }
}
