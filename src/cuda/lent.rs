//! Host memory that an operation has been lent.

/// Bytes of host memory, one after the other.
///
/// Invariant: they are valid for reads until the operation is over that they are lent to or made for, and for writes if they
/// are to be written. Of those who hold the value, one at a time uses it: whoever holds the lock of what the operation is part
/// of. The MPI library may write there at the same time only where what it writes is checked afterwards.
#[derive(Clone, Copy, Debug)]
pub struct Lent {
    start: Start,
    bytes: u64,
}

/// Where memory begins that an operation has been lent.
#[derive(Clone, Copy, Debug)]
pub struct Start(*mut u8);

// SAFETY: an address; the memory is that of an operation, not of a thread.
unsafe impl Send for Start {}

impl Start {
    /// This address.
    #[inline]
    pub const fn of(start: *mut u8) -> Start {
        Start(start)
    }

    /// The address.
    #[inline]
    pub fn as_ptr(self) -> *mut u8 {
        self.0
    }

    /// So many bytes from there on.
    ///
    /// # Safety
    /// They are as the invariant of [`Lent`] has them.
    #[inline]
    pub unsafe fn lent(self, bytes: u64) -> Lent {
        Lent { start: self, bytes }
    }
}

impl Lent {
    /// No bytes.
    pub const NONE: Lent = Lent {
        start: Start(std::ptr::null_mut()),
        bytes: 0,
    };

    /// So many bytes from an address on.
    ///
    /// # Safety
    /// They are as the type's invariant has them.
    #[inline]
    pub unsafe fn new(start: *mut u8, bytes: u64) -> Lent {
        Lent {
            start: Start(start),
            bytes,
        }
    }

    /// Where they begin.
    #[inline]
    pub fn as_ptr(self) -> *mut u8 {
        self.start.0
    }

    /// The address of the first one.
    #[inline]
    pub fn address(self) -> usize {
        self.start.0.addr()
    }

    /// How many there are.
    #[inline]
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// Some of them.
    #[inline]
    pub fn part(self, from: u64, bytes: u64) -> Lent {
        let end = from.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "beyond what was lent"
        );
        Lent {
            start: Start(self.start.0.wrapping_add(from as usize)),
            bytes,
        }
    }

    /// All of them, copied.
    pub fn to_vec(self) -> Vec<u8> {
        let mut copy = Vec::with_capacity(usize::try_from(self.bytes).unwrap_or(usize::MAX));
        self.append_to(&mut copy);
        copy
    }

    /// Copies them to the end of a vector.
    pub fn append_to(self, copy: &mut Vec<u8>) {
        // SAFETY: readable by the invariant; the slice ends with the statement.
        copy.extend_from_slice(unsafe { self.as_slice() });
    }

    /// The first so many of them.
    #[inline]
    pub fn first<const N: usize>(self) -> [u8; N] {
        let mut copy = [0; N];
        self.part(0, N as u64).read(&mut copy);
        copy
    }

    /// Copies as many of them as there is room for.
    #[inline]
    pub fn read(self, to: &mut [u8]) {
        let from = self.part(0, to.len() as u64).as_ptr();
        // SAFETY: readable by the invariant; what is written to is ours alone.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from, to.len()) };
    }

    /// Writes to the first of them.
    #[inline]
    pub fn write(self, from: &[u8]) {
        let to = self.part(0, from.len() as u64).as_ptr();
        // SAFETY: writable by the invariant; a slice that may be read is not lent for writing.
        unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
    }

    /// Writes what another range holds to the first of them.
    #[inline]
    pub fn copy_from(self, from: Lent) {
        let to = self.part(0, from.bytes).as_ptr();
        // SAFETY: readable, and writable, by the invariant.
        unsafe { to.copy_from(from.as_ptr(), from.bytes as usize) };
    }

    /// All of them.
    ///
    /// # Safety
    /// Nobody writes to them while the slice lives.
    #[inline]
    pub unsafe fn as_slice<'a>(self) -> &'a [u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: readable by the invariant.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.bytes as usize) }
    }
}
