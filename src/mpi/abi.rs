//! Reading and writing handles and statuses in the layout of the MPI library in this process.

use super::constants::{Abi, Family};
use super::handles::{Handle, StatusAt, StatusOut, StatusRef};
use std::ffi::{c_int, c_void};

impl Abi {
    /// The word of a handle, without what a register may hold beside it: a C `int` passed in a register leaves the upper
    /// half undefined.
    #[inline(always)]
    fn word<H: Handle>(&self, handle: H) -> usize {
        if self.handle_bytes == 4 {
            handle.word() & 0xffff_ffff
        } else {
            handle.word()
        }
    }

    /// The handle alone: see [`Abi::word`].
    #[inline(always)]
    pub fn normalize<H: Handle>(&self, handle: H) -> H {
        // SAFETY: the same handle.
        unsafe { H::from_word(self.word(handle)) }
    }

    /// Whether two handles are the same.
    #[inline(always)]
    pub fn are_same<H: Handle>(&self, one: H, other: H) -> bool {
        self.word(one) == self.word(other)
    }

    /// Reads entry `i` of an array of handles.
    ///
    /// # Safety
    /// `array` holds more than `i` handles of this ABI.
    #[inline(always)]
    pub unsafe fn load<H: Handle>(&self, array: *const c_void, i: usize) -> H {
        // SAFETY: the caller's array holds more than `i` handles, of 4 bytes or of a machine word.
        unsafe {
            H::from_word(if self.handle_bytes == 4 {
                array.cast::<u32>().add(i).read_unaligned() as usize
            } else {
                array.cast::<usize>().add(i).read_unaligned()
            })
        }
    }

    /// Writes entry `i` of an array of handles.
    ///
    /// # Safety
    /// `array` is writable and has room for more than `i` handles of this ABI.
    #[inline(always)]
    pub unsafe fn store<H: Handle>(&self, array: *mut c_void, i: usize, handle: H) {
        let word = handle.word();
        #[allow(clippy::cast_possible_truncation)]
        // SAFETY: the caller's array has room for more than `i` handles, of 4 bytes or of a machine word.
        unsafe {
            if self.handle_bytes == 4 {
                array.cast::<u32>().add(i).write_unaligned(word as u32);
            } else {
                array.cast::<usize>().add(i).write_unaligned(word);
            }
        }
    }

    /// `MPI_SOURCE` of a status.
    #[inline]
    pub fn status_source(&self, status: StatusRef<'_>) -> c_int {
        field(status, self.source_offset)
    }

    /// `MPI_TAG` of a status.
    #[inline]
    pub fn status_tag(&self, status: StatusRef<'_>) -> c_int {
        field(status, self.tag_offset)
    }

    /// `MPI_ERROR` of a status.
    #[inline]
    pub fn status_error(&self, status: StatusRef<'_>) -> c_int {
        field(status, self.error_offset)
    }

    /// Length in bytes of the message of a receive's status, where the layout of its private part is known: Open MPI has
    /// a `size_t` (`_ucount` in its mpi.h); MPICH and those of its ABI two `int`, of which the lowest bit of the second
    /// says whether the operation was cancelled (`count_lo`, `count_hi_and_cancelled`).
    #[inline]
    pub fn status_length(&self, status: StatusRef<'_>) -> Option<u64> {
        match self.family {
            Family::OpenMpi => Some(field(status, 16)),
            Family::Mpich => {
                let word: u64 = field(status, 0);
                Some((word & 0xffff_ffff) | ((word >> 33) << 32))
            }
            Family::Standard => None,
        }
    }

    /// Sets `MPI_SOURCE` of a status.
    #[inline]
    pub fn set_status_source(&self, status: StatusAt<'_>, source: c_int) {
        set_field(status, self.source_offset, source);
    }

    /// Sets `MPI_TAG` of a status.
    #[inline]
    pub fn set_status_tag(&self, status: StatusAt<'_>, tag: c_int) {
        set_field(status, self.tag_offset, tag);
    }

    /// Sets `MPI_ERROR` of a status.
    #[inline]
    pub fn set_status_error(&self, status: StatusAt<'_>, error: c_int) {
        set_field(status, self.error_offset, error);
    }

    /// Copies a status.
    #[inline]
    pub fn copy_status(&self, from: StatusRef<'_>, to: StatusAt<'_>) {
        let (from, to) = (from.as_ptr().cast::<u8>(), to.as_ptr().cast::<u8>());
        // SAFETY: both are statuses of the process's ABI, by the invariants of their types; they may be one.
        unsafe { to.copy_from(from, self.status_bytes) };
    }

    /// An ABI where none is known: nothing of it is used then.
    pub fn any() -> &'static Abi {
        static ANY: Abi = Abi::STANDARD;
        &ANY
    }

    /// `MPI_STATUS_IGNORE` as a pointer to pass on.
    #[inline]
    pub fn no_status(&self) -> StatusOut<'static> {
        StatusOut::ignored(self)
    }
}

/// Reads a field of a status: the ABIs' offsets lie inside.
#[inline(always)]
fn field<T: Copy>(status: StatusRef<'_>, offset: usize) -> T {
    // SAFETY: the field lies inside a status of the ABI, which the type's invariant has there.
    unsafe {
        status
            .as_ptr()
            .byte_add(offset)
            .cast::<T>()
            .read_unaligned()
    }
}

/// Writes an `int` field of a status.
#[inline(always)]
fn set_field(status: StatusAt<'_>, offset: usize, value: c_int) {
    // SAFETY: as in `field`; it is writable.
    unsafe {
        status
            .as_ptr()
            .byte_add(offset)
            .cast::<c_int>()
            .write_unaligned(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mpi::handles::{Request, Slots, Statuses};
    use crate::mpi::Status;

    fn request(word: usize) -> Request {
        Request::constant(word)
    }

    #[test]
    fn handles_of_four_bytes_lie_densely() {
        let mut array = [0x4400_0000_u32, 0x2c00_0000, 7];
        let abi = &Abi::MPICH;
        // SAFETY: the array has three entries of 4 bytes.
        let slots = unsafe { Slots::<Request>::new(array.as_mut_ptr().cast(), 3) };
        assert_eq!(slots.get(abi, 1), request(0x2c00_0000));
        slots.set(abi, 1, request(0x9800_0001));
        assert_eq!(array, [0x4400_0000, 0x9800_0001, 7]);
        let wide = request(0xdead_beef_4400_0000);
        assert_eq!(abi.normalize(wide), request(0x4400_0000));
        assert!(abi.are_same(wide, request(0x4400_0000)));
        assert_eq!(Abi::STANDARD.normalize(wide), wide);
    }

    #[test]
    fn statuses_ignored_stay_ignored() {
        for abi in [&Abi::MPICH, &Abi::STANDARD] {
            let ignored = Statuses::one(abi.no_status());
            assert_eq!(ignored.get(abi, 5), abi.no_status());
        }
    }

    #[test]
    fn lengths_lie_where_the_headers_have_them() {
        // Statuses as MPI_Status_set_elements_x leaves them: 0x12_3456_789a bytes.
        let open_mpi = Status::of([0, 0, 0x12_3456_789a, 0]);
        let mpich = Status::of([0x24_3456_789a, 0, 0, 0]);
        let cancelled = Status::of([61 | 1 << 32, 0, 0, 0]);
        let like_open_mpi = Abi {
            family: Family::OpenMpi,
            ..Abi::MPICH
        };
        let length = |abi: &Abi, status| abi.status_length(StatusRef::of(status));
        assert_eq!(length(&like_open_mpi, &open_mpi), Some(0x12_3456_789a));
        assert_eq!(length(&Abi::MPICH, &mpich), Some(0x12_3456_789a));
        assert_eq!(length(&Abi::MPICH, &cancelled), Some(61));
        assert_eq!(length(&Abi::STANDARD, &open_mpi), None);
    }

    #[test]
    fn fields_of_a_status_are_those_of_the_abi() {
        let mut status = Status::new();
        let at = StatusAt::of(&mut status);
        Abi::MPICH.set_status_source(at, 3);
        Abi::MPICH.set_status_tag(at, 4);
        Abi::MPICH.set_status_error(at, 5);
        assert_eq!(Abi::MPICH.status_tag(at.seen()), 4);
        assert_eq!(status, Status::of([0, 3 | 4 << 32, 5, 0]));
    }
}
