//! Reading and writing handles and statuses in the layout of the MPI library in this process.

use super::constants::{Abi, Family};
use super::Handle;
use std::ffi::{c_int, c_void};

impl Abi {
    /// The part of a machine word that is the handle. A C `int` passed in a register leaves the upper half undefined.
    #[inline]
    pub fn normalize(&self, handle: Handle) -> Handle {
        if self.handle_bytes == 4 {
            handle & 0xffff_ffff
        } else {
            handle
        }
    }

    /// Reads entry `i` of an array of handles.
    ///
    /// # Safety
    /// `array` holds more than `i` handles of this ABI.
    #[inline]
    pub unsafe fn load(&self, array: *const c_void, i: usize) -> Handle {
        if self.handle_bytes == 4 {
            // SAFETY: the caller's array holds more than `i` handles of 4 bytes.
            unsafe { array.cast::<u32>().add(i).read_unaligned() as Handle }
        } else {
            // SAFETY: the caller's array holds more than `i` handles of a machine word.
            unsafe { array.cast::<Handle>().add(i).read_unaligned() }
        }
    }

    /// Writes entry `i` of an array of handles.
    ///
    /// # Safety
    /// `array` is writable and has room for more than `i` handles of this ABI.
    #[inline]
    pub unsafe fn store(&self, array: *mut c_void, i: usize, handle: Handle) {
        if self.handle_bytes == 4 {
            #[allow(clippy::cast_possible_truncation)]
            // SAFETY: the caller's array has room for more than `i` handles of 4 bytes.
            unsafe {
                array.cast::<u32>().add(i).write_unaligned(handle as u32);
            }
        } else {
            // SAFETY: the caller's array has room for more than `i` handles of a machine word.
            unsafe { array.cast::<Handle>().add(i).write_unaligned(handle) }
        }
    }

    /// Reads one handle through a pointer that the program passed (which may be aligned to 4 bytes only).
    ///
    /// # Safety
    /// `handle` points to a handle of this ABI.
    #[inline]
    pub unsafe fn read(&self, handle: *const Handle) -> Handle {
        // SAFETY: the caller's pointer is an array of one.
        unsafe { self.load(handle.cast(), 0) }
    }

    /// Writes one handle through a pointer that the program passed, and no more bytes than a handle of this ABI has.
    ///
    /// # Safety
    /// `place` points to a writable handle of this ABI.
    #[inline]
    pub unsafe fn write(&self, place: *mut Handle, handle: Handle) {
        // SAFETY: the caller's pointer is an array of one.
        unsafe { self.store(place.cast(), 0, handle) }
    }

    /// Whether a status pointer is `MPI_STATUS_IGNORE` or `MPI_STATUSES_IGNORE`.
    #[inline]
    pub fn ignores_status(&self, status: *const c_void) -> bool {
        // Both constants have one value in every ABI.
        status.addr() == self.status_ignore
    }

    /// Status `i` of an array; `MPI_STATUSES_IGNORE` stays `MPI_STATUS_IGNORE`.
    ///
    /// # Safety
    /// `statuses` holds more than `i` statuses of this ABI, or is `MPI_STATUSES_IGNORE`.
    #[inline]
    pub unsafe fn status_at(&self, statuses: *mut c_void, i: usize) -> *mut c_void {
        if self.ignores_status(statuses) {
            return statuses;
        }
        // SAFETY: the caller's array holds more than `i` statuses.
        unsafe { statuses.byte_add(i * self.status_bytes) }
    }

    /// `MPI_SOURCE` of a status.
    ///
    /// # Safety
    /// `status` points to a status of this ABI (not `MPI_STATUS_IGNORE`).
    #[inline]
    pub unsafe fn status_source(&self, status: *const c_void) -> c_int {
        // SAFETY: the field lies inside the caller's status.
        unsafe { field(status, self.source_offset) }
    }

    /// `MPI_TAG` of a status.
    ///
    /// # Safety
    /// As for [`Abi::status_source`].
    #[inline]
    pub unsafe fn status_tag(&self, status: *const c_void) -> c_int {
        // SAFETY: the field lies inside the caller's status.
        unsafe { field(status, self.tag_offset) }
    }

    /// `MPI_ERROR` of a status.
    ///
    /// # Safety
    /// As for [`Abi::status_source`].
    #[inline]
    pub unsafe fn status_error(&self, status: *const c_void) -> c_int {
        // SAFETY: the field lies inside the caller's status.
        unsafe { field(status, self.error_offset) }
    }

    /// Length in bytes of the message of a status, where the layout of its private part is known: Open MPI has a
    /// `size_t` (`_ucount` in its mpi.h); MPICH and those of its ABI two `int`, of which the lowest bit of the second
    /// says whether the operation was cancelled (`count_lo`, `count_hi_and_cancelled`).
    ///
    /// # Safety
    /// As for [`Abi::status_source`]; the status is that of a receive.
    #[inline]
    pub unsafe fn status_length(&self, status: *const c_void) -> Option<u64> {
        // SAFETY: the fields lie inside the caller's status.
        unsafe {
            match self.family {
                Family::OpenMpi => Some(status.byte_add(16).cast::<u64>().read_unaligned()),
                Family::Mpich => {
                    let word = status.cast::<u64>().read_unaligned();
                    Some((word & 0xffff_ffff) | ((word >> 33) << 32))
                }
                Family::Standard => None,
            }
        }
    }

    /// Sets `MPI_SOURCE` of a status.
    ///
    /// # Safety
    /// `status` points to a writable status of this ABI (not `MPI_STATUS_IGNORE`).
    #[inline]
    pub unsafe fn set_status_source(&self, status: *mut c_void, source: c_int) {
        // SAFETY: the field lies inside the caller's status.
        unsafe { set_field(status, self.source_offset, source) }
    }

    /// Sets `MPI_TAG` of a status.
    ///
    /// # Safety
    /// As for [`Abi::set_status_source`].
    #[inline]
    pub unsafe fn set_status_tag(&self, status: *mut c_void, tag: c_int) {
        // SAFETY: the field lies inside the caller's status.
        unsafe { set_field(status, self.tag_offset, tag) }
    }

    /// Sets `MPI_ERROR` of a status.
    ///
    /// # Safety
    /// As for [`Abi::set_status_source`].
    #[inline]
    pub unsafe fn set_status_error(&self, status: *mut c_void, error: c_int) {
        // SAFETY: the field lies inside the caller's status.
        unsafe { set_field(status, self.error_offset, error) }
    }

    /// `MPI_STATUS_IGNORE` as a pointer to pass on.
    #[inline]
    pub fn no_status(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.status_ignore)
    }
}

/// Reads an `int` field of a status.
///
/// # Safety
/// `offset` bytes past `status` lies a readable `int`.
#[inline]
unsafe fn field(status: *const c_void, offset: usize) -> c_int {
    // SAFETY: as the caller says.
    unsafe { status.byte_add(offset).cast::<c_int>().read_unaligned() }
}

/// Writes an `int` field of a status.
///
/// # Safety
/// `offset` bytes past `status` lies a writable `int`.
#[inline]
unsafe fn set_field(status: *mut c_void, offset: usize, value: c_int) {
    // SAFETY: as the caller says.
    unsafe {
        status
            .byte_add(offset)
            .cast::<c_int>()
            .write_unaligned(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mpi::Status;

    #[test]
    fn handles_of_four_bytes_lie_densely() {
        let mut array = [0x4400_0000_u32, 0x2c00_0000, 7];
        let abi = &Abi::MPICH;
        // SAFETY: the array has three entries of 4 bytes.
        unsafe {
            assert_eq!(abi.load(array.as_ptr().cast(), 1), 0x2c00_0000);
            abi.store(array.as_mut_ptr().cast(), 1, 0x9800_0001);
        }
        assert_eq!(array, [0x4400_0000, 0x9800_0001, 7]);
        assert_eq!(abi.normalize(0xdead_beef_4400_0000), 0x4400_0000);
        assert_eq!(
            Abi::STANDARD.normalize(0x7f00_1234_4400_0000),
            0x7f00_1234_4400_0000
        );
    }

    #[test]
    fn statuses_ignored_stay_ignored() {
        for abi in [&Abi::MPICH, &Abi::STANDARD] {
            let ignored = abi.no_status();
            // SAFETY: MPI_STATUSES_IGNORE is passed, nothing is dereferenced.
            assert_eq!(unsafe { abi.status_at(ignored, 5) }, ignored);
        }
    }

    #[test]
    fn lengths_lie_where_the_headers_have_them() {
        // Statuses as MPI_Status_set_elements_x leaves them: 0x12_3456_789a bytes.
        let open_mpi = [0u64, 0, 0x12_3456_789a];
        let mpich = [0x3456_789a_u32, 0x12 << 1, 0, 0, 0];
        let cancelled = [61u32, 1, 0, 0, 0];
        // SAFETY: as long as a status of the ABI asked.
        unsafe {
            let like_open_mpi = Abi {
                family: Family::OpenMpi,
                ..Abi::MPICH
            };
            assert_eq!(
                like_open_mpi.status_length(open_mpi.as_ptr().cast()),
                Some(0x12_3456_789a)
            );
            assert_eq!(
                Abi::MPICH.status_length(mpich.as_ptr().cast()),
                Some(0x12_3456_789a)
            );
            assert_eq!(
                Abi::MPICH.status_length(cancelled.as_ptr().cast()),
                Some(61)
            );
            assert_eq!(Abi::STANDARD.status_length(open_mpi.as_ptr().cast()), None);
        }
    }

    #[test]
    fn fields_of_a_status_are_those_of_the_abi() {
        let mut status = Status::new();
        let p = status.as_mut_ptr();
        // SAFETY: the storage is large enough for any ABI.
        unsafe {
            Abi::MPICH.set_status_source(p, 3);
            Abi::MPICH.set_status_tag(p, 4);
            Abi::MPICH.set_status_error(p, 5);
            assert_eq!(
                std::slice::from_raw_parts(p.cast::<i32>(), 5),
                [0, 0, 3, 4, 5]
            );
            assert_eq!(Abi::MPICH.status_tag(p), 4);
        }
    }
}
