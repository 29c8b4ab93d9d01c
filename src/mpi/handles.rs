//! What is passed to MPI calls and comes back from them, as types: handles, and pointers to handles, numbers and
//! statuses.
//!
//! Every type has the layout of the C parameter that it stands for, so a value of it is made where a C parameter is of
//! that type: at the boundary, by the program's call. What else makes one is `unsafe`, or takes a Rust reference. What is
//! done with it is safe.
//!
//! **Architecture invariant:** a handle is one that the program has passed to a call that is under way, or whose
//! operation is, or one that the MPI library has given the engine and its owner has not ended (see [`owned`](super::owned)).
//! MPI forbids the program to free what it has passed meanwhile. A [`Request`] alone may have ended: it tells requests
//! apart, and calls that take one are `unsafe`. What a call ends it takes by its [`Slot`].
//!
//! Which thread may call MPI, and when, is no property of these types: the helper makes no MPI call, and the engine
//! exists between `MPI_Init` and `MPI_Finalize` only.

use super::constants::Abi;
use super::Status;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;

/// A handle of any kind: a machine word. On the MPICH ABI only the low 32 bits count; see [`Abi::normalize`].
pub trait Handle: Copy + PartialEq {
    /// The word.
    fn word(self) -> usize;

    /// The handle that is this word.
    ///
    /// # Safety
    /// It is one: see the [module](self).
    unsafe fn from_word(word: usize) -> Self;
}

macro_rules! handles {
    ($($name:ident $what:literal;)*) => {$(
        #[doc = concat!("A handle of ", $what, ".")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(usize);

        impl $name {
            /// One of the constants of an ABI.
            #[allow(dead_code, reason = "sessions have none")]
            pub(super) const fn constant(word: usize) -> $name {
                $name(word)
            }
        }

        impl Handle for $name {
            #[inline(always)]
            fn word(self) -> usize {
                self.0
            }

            #[inline(always)]
            unsafe fn from_word(word: usize) -> $name {
                $name(word)
            }
        }
    )*};
}

handles! {
    Comm "a communicator";
    Datatype "a datatype";
    Request "a request";
    Message "a message that a matched probe has found";
    Group "a group";
    Info "hints";
    Errhandler "an error handler";
    Op "a reduction";
    Win "a window";
    File "a file";
    Session "a session";
}

/// Where one handle lies that a call reads, writes or ends. It may be aligned to 4 bytes only, and have no more.
///
/// Invariant: the place is one that the program names in its call, which is under way and does with the handle what the
/// program wishes, or that of an owner in [`owned`](super::owned).
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Slot<'a, H>(*mut H, PhantomData<&'a mut H>);

impl<'a, H: Handle> Slot<'a, H> {
    /// # Safety
    /// The place is valid for `'a`, as the type's invariant has it.
    #[inline(always)]
    pub unsafe fn new(place: *mut H) -> Slot<'a, H> {
        Slot(place, PhantomData)
    }

    /// The variable of an owner. It has room for a handle of any ABI.
    #[inline(always)]
    pub(super) fn of(handle: &'a mut H) -> Slot<'a, H> {
        Slot(std::ptr::from_mut(handle), PhantomData)
    }

    /// The handle.
    #[inline(always)]
    pub fn read(self, abi: &Abi) -> H {
        // SAFETY: an array of one, by the type's invariant.
        unsafe { abi.load(self.0.cast_const().cast(), 0) }
    }

    /// Puts a handle there, and no more bytes than one of this ABI has.
    #[inline(always)]
    pub fn write(self, abi: &Abi, handle: H) {
        // SAFETY: an array of one, by the type's invariant.
        unsafe { abi.store(self.0.cast(), 0, handle) }
    }
}

/// Where a call writes a number.
///
/// Invariant: as that of [`Slot`].
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Out<'a, T>(*mut T, PhantomData<&'a mut T>);

impl<'a, T: Copy> Out<'a, T> {
    /// A variable of the library's own.
    #[inline(always)]
    pub fn of(number: &'a mut T) -> Out<'a, T> {
        Out(std::ptr::from_mut(number), PhantomData)
    }

    /// The number, once it has been written.
    #[inline(always)]
    pub fn read(self) -> T {
        // SAFETY: the place is valid by the type's invariant.
        unsafe { self.0.read() }
    }

    /// Writes it.
    #[inline(always)]
    pub fn write(self, number: T) {
        // SAFETY: the place is valid by the type's invariant.
        unsafe { self.0.write(number) }
    }
}

/// Where a call puts a status, or `MPI_STATUS_IGNORE`.
///
/// Invariant: as that of [`Slot`], for a status of this process's ABI, unless it is `MPI_STATUS_IGNORE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct StatusOut<'a>(*mut c_void, PhantomData<&'a mut Status>);

/// As [`StatusOut`], and not `MPI_STATUS_IGNORE`.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct StatusAt<'a>(*mut c_void, PhantomData<&'a mut Status>);

/// A status to be read: one that the MPI library has filled, or storage of our own.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct StatusRef<'a>(*const c_void, PhantomData<&'a Status>);

impl<'a> StatusOut<'a> {
    /// # Safety
    /// The place is valid for `'a`, as the type's invariant has it.
    #[inline(always)]
    pub(super) unsafe fn new(place: *mut c_void) -> StatusOut<'a> {
        StatusOut(place, PhantomData)
    }

    /// `MPI_STATUS_IGNORE` of an ABI.
    #[inline(always)]
    pub(super) fn ignored(abi: &Abi) -> StatusOut<'a> {
        StatusOut(
            std::ptr::without_provenance_mut(abi.status_ignore),
            PhantomData,
        )
    }

    /// Storage of our own.
    #[inline(always)]
    pub fn of(status: &'a mut Status) -> StatusOut<'a> {
        StatusAt::of(status).out()
    }

    /// Whether it is `MPI_STATUS_IGNORE`.
    #[inline(always)]
    pub fn is_ignored(self, abi: &Abi) -> bool {
        self.0.addr() == abi.status_ignore
    }

    /// The status, if there is one.
    #[inline(always)]
    pub fn at(self, abi: &Abi) -> Option<StatusAt<'a>> {
        (!self.is_ignored(abi)).then_some(StatusAt(self.0, PhantomData))
    }

    /// The status, or storage of our own where the program wants none.
    #[inline(always)]
    pub fn or(self, abi: &Abi, own: &'a mut Status) -> StatusAt<'a> {
        self.at(abi).unwrap_or(StatusAt::of(own))
    }
}

impl<'a> StatusAt<'a> {
    /// Storage of our own.
    #[inline(always)]
    pub fn of(status: &'a mut Status) -> StatusAt<'a> {
        StatusAt(status.as_mut_ptr(), PhantomData)
    }

    /// To be filled by a call.
    #[inline(always)]
    pub fn out(self) -> StatusOut<'a> {
        StatusOut(self.0, PhantomData)
    }

    /// To be read, once it is filled.
    #[inline(always)]
    pub fn seen(self) -> StatusRef<'a> {
        StatusRef(self.0.cast_const(), PhantomData)
    }

    #[inline(always)]
    pub(super) fn as_ptr(self) -> *mut c_void {
        self.0
    }
}

impl<'a> StatusRef<'a> {
    /// Storage of our own.
    #[inline(always)]
    pub fn of(status: &'a Status) -> StatusRef<'a> {
        StatusRef(status.as_ptr(), PhantomData)
    }

    #[inline(always)]
    pub(super) fn as_ptr(self) -> *const c_void {
        self.0
    }
}

/// How many entries an array has of which the program says so.
#[inline(always)]
fn length(count: c_int) -> usize {
    usize::try_from(count).unwrap_or(0)
}

/// An array of handles that a call reads, writes or ends.
///
/// Invariant: as that of [`Slot`], for so many handles of this process's ABI, one behind the other.
#[derive(Debug)]
pub struct Slots<'a, H> {
    array: *mut c_void,
    count: c_int,
    handles: PhantomData<&'a mut H>,
}

impl<H> Clone for Slots<'_, H> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<H> Copy for Slots<'_, H> {}

impl<'a, H: Handle> Slots<'a, H> {
    /// # Safety
    /// There are so many handles, as the type's invariant has it. None for a negative count.
    #[inline(always)]
    pub unsafe fn new(array: *mut c_void, count: c_int) -> Slots<'a, H> {
        Slots {
            array,
            count,
            handles: PhantomData,
        }
    }

    /// An array of ours. It has room for as many handles of any ABI.
    #[inline]
    pub(super) fn of(handles: &'a mut [H]) -> Slots<'a, H> {
        Slots {
            array: handles.as_mut_ptr().cast(),
            count: handles.len() as c_int,
            handles: PhantomData,
        }
    }

    /// How many there are.
    #[inline(always)]
    pub fn len(self) -> usize {
        length(self.count)
    }

    /// Whether there are none.
    #[inline(always)]
    pub fn is_empty(self) -> bool {
        self.count <= 0
    }

    /// To be passed to a call together with [`Slots::count`].
    #[inline(always)]
    pub fn as_ptr(self) -> *mut c_void {
        self.array
    }

    /// As the program gave it.
    #[inline(always)]
    pub fn count(self) -> c_int {
        self.count
    }

    /// Handle `i`.
    #[inline(always)]
    pub fn get(self, abi: &Abi, i: usize) -> H {
        assert!(i < self.len(), "beyond an array of handles");
        // SAFETY: there are more handles, by the type's invariant.
        unsafe { abi.load(self.array, i) }
    }

    /// Puts a handle into the place of handle `i`.
    #[inline(always)]
    pub fn set(self, abi: &Abi, i: usize, handle: H) {
        assert!(i < self.len(), "beyond an array of handles");
        // SAFETY: there are more handles, by the type's invariant.
        unsafe { abi.store(self.array, i, handle) }
    }

    /// Where handle `i` lies.
    #[inline(always)]
    pub fn slot(self, abi: &Abi, i: usize) -> Slot<'a, H> {
        assert!(i < self.len(), "beyond an array of handles");
        let place = self.array.wrapping_byte_add(i * abi.handle_bytes);
        Slot(place.cast(), PhantomData)
    }

    /// Copies the array as it is now.
    #[inline]
    pub fn copy_to(self, abi: &Abi, copy: &mut Copied<H>) {
        copy.bytes.clear();
        copy.count = self.len();
        // An empty array may be a null pointer.
        if copy.count > 0 {
            let length = copy.count * abi.handle_bytes;
            // SAFETY: that long by the type's invariant, and nobody writes to it meanwhile.
            let bytes = unsafe { std::slice::from_raw_parts(self.array.cast(), length) };
            copy.bytes.extend_from_slice(bytes);
        }
    }
}

impl<'a> Slots<'a, Datatype> {
    /// An array of ours, which no call frees types in.
    #[inline]
    pub fn of_types(types: &'a mut [Datatype]) -> Slots<'a, Datatype> {
        Slots::of(types)
    }
}

/// Handles as an array held them. Invariant: they are in the layout of this process's ABI.
#[derive(Debug)]
pub struct Copied<H> {
    bytes: Vec<u8>,
    count: usize,
    handles: PhantomData<H>,
}

impl<H> Default for Copied<H> {
    fn default() -> Self {
        Copied {
            bytes: Vec::new(),
            count: 0,
            handles: PhantomData,
        }
    }
}

impl<H: Handle> Copied<H> {
    /// How many there are.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes that it keeps.
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Handle `i`.
    #[inline(always)]
    pub fn get(&self, abi: &Abi, i: usize) -> H {
        assert!(i < self.count, "beyond a copy of handles");
        // SAFETY: there are more, by the type's invariant.
        unsafe { abi.load(self.bytes.as_ptr().cast(), i) }
    }
}

/// An array of statuses that a call fills, one for each of its requests, or `MPI_STATUSES_IGNORE`.
///
/// Invariant: as that of [`StatusOut`], for so many statuses, one behind the other.
#[derive(Clone, Copy, Debug)]
pub struct Statuses<'a> {
    array: *mut c_void,
    count: c_int,
    statuses: PhantomData<&'a mut Status>,
}

impl<'a> Statuses<'a> {
    /// # Safety
    /// There are so many statuses, as the type's invariant has it. None for a negative count.
    #[inline(always)]
    pub unsafe fn new(array: *mut c_void, count: c_int) -> Statuses<'a> {
        Statuses {
            array,
            count,
            statuses: PhantomData,
        }
    }

    /// One.
    #[inline(always)]
    pub fn one(status: StatusOut<'a>) -> Statuses<'a> {
        Statuses {
            array: status.0,
            count: 1,
            statuses: PhantomData,
        }
    }

    /// Room in a buffer, with the content that is there: a call writes the statuses of what it completes.
    #[inline]
    pub fn within(abi: &Abi, buffer: &'a mut Vec<u8>, count: usize) -> Statuses<'a> {
        buffer.clear();
        buffer.reserve(abi.status_bytes * count);
        Statuses {
            array: buffer.as_mut_ptr().cast(),
            count: count as c_int,
            statuses: PhantomData,
        }
    }

    /// To be passed to a call.
    #[inline(always)]
    pub fn as_ptr(self) -> *mut c_void {
        self.array
    }

    /// Whether it is `MPI_STATUSES_IGNORE`.
    #[inline(always)]
    pub fn is_ignored(self, abi: &Abi) -> bool {
        self.array.addr() == abi.statuses_ignore
    }

    /// The statuses, once a call has filled them; none if they are ignored.
    #[inline(always)]
    pub fn seen(self, abi: &Abi) -> Filled<'a> {
        Filled {
            array: self.array,
            count: match self.is_ignored(abi) {
                true => 0,
                false => length(self.count),
            },
            statuses: PhantomData,
        }
    }

    /// Status `i`; `MPI_STATUSES_IGNORE` stays `MPI_STATUS_IGNORE`.
    #[inline(always)]
    pub fn get(self, abi: &Abi, i: usize) -> StatusOut<'a> {
        if self.is_ignored(abi) {
            return StatusOut::ignored(abi);
        }
        assert!(i < length(self.count), "beyond an array of statuses");
        let offset = i * abi.status_bytes;
        // SAFETY: there are more statuses, by the type's invariant.
        unsafe { StatusOut::new(self.array.wrapping_byte_add(offset)) }
    }
}

/// Statuses of an array to be read. Invariant: as that of [`Statuses`], for so many that are there.
#[derive(Clone, Copy, Debug)]
pub struct Filled<'a> {
    array: *const c_void,
    count: usize,
    statuses: PhantomData<&'a Status>,
}

impl<'a> Filled<'a> {
    /// None.
    pub const NONE: Filled<'static> = Filled {
        array: std::ptr::null(),
        count: 0,
        statuses: PhantomData,
    };

    /// Status `i`, if it is there.
    #[inline(always)]
    pub fn get(self, abi: &Abi, i: usize) -> Option<StatusRef<'a>> {
        let place = self.array.wrapping_byte_add(i * abi.status_bytes);
        (i < self.count).then_some(StatusRef(place, PhantomData))
    }
}

/// An array of numbers that a call fills.
///
/// Invariant: as that of [`Out`], for so many numbers.
#[derive(Clone, Copy, Debug)]
pub struct Outs<'a, T> {
    array: *mut T,
    count: c_int,
    numbers: PhantomData<&'a mut T>,
}

impl<'a, T: Copy> Outs<'a, T> {
    /// # Safety
    /// There is room for so many numbers, as the type's invariant has it.
    #[inline(always)]
    pub unsafe fn new(array: *mut T, count: c_int) -> Outs<'a, T> {
        Outs {
            array,
            count,
            numbers: PhantomData,
        }
    }

    /// An array of the library's own.
    #[inline]
    pub fn of(numbers: &'a mut [T]) -> Outs<'a, T> {
        Outs {
            array: numbers.as_mut_ptr(),
            count: numbers.len() as c_int,
            numbers: PhantomData,
        }
    }

    /// To be passed to a call.
    #[inline(always)]
    pub fn as_ptr(self) -> *mut T {
        self.array
    }

    /// Number `i`, once it has been written.
    #[inline(always)]
    pub fn read(self, i: usize) -> T {
        assert!(i < length(self.count), "beyond an array of numbers");
        // SAFETY: there are more, by the type's invariant.
        unsafe { self.array.add(i).read() }
    }

    /// Writes number `i`.
    #[inline(always)]
    pub fn write(self, i: usize, number: T) {
        assert!(i < length(self.count), "beyond an array of numbers");
        // SAFETY: there are more, by the type's invariant.
        unsafe { self.array.add(i).write(number) }
    }
}
