//! The arguments and the shape of a launch.

use crate::twins::Twin;
use std::ffi::c_void;

/// Shape of a launch: `cuLaunchKernel`'s grid and block dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
}

/// The arguments of one launch, copied: a kernel node keeps them, and a launch may run after its caller's variables are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Params(Vec<u64>);

impl Params {
    /// Copies what `cuLaunchKernel`'s `kernelParams` points to.
    ///
    /// # Safety
    /// `pointers` must hold one pointer for each of the twin's parameters, to readable memory of that parameter's size.
    pub unsafe fn from_pointers(twin: &Twin, pointers: *const *mut c_void) -> Params {
        let read = |(i, &size): (usize, &usize)| {
            let mut bytes = [0u8; 8];
            // SAFETY: the caller promises pointer `i` and `size` readable bytes behind it; no parameter exceeds 8 bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    (*pointers.add(i)).cast::<u8>(),
                    bytes.as_mut_ptr(),
                    size,
                )
            };
            u64::from_le_bytes(bytes)
        };
        Params(twin.params.iter().enumerate().map(read).collect())
    }

    /// Takes them from a packed argument buffer (`CU_LAUNCH_PARAM_BUFFER_POINTER`), each at its natural alignment.
    /// `None` where the buffer is too short.
    pub fn from_packed(twin: &Twin, buffer: &[u8]) -> Option<Params> {
        let mut at = 0usize;
        let mut values = Vec::with_capacity(twin.params.len());
        for &size in twin.params {
            at = at.next_multiple_of(size);
            let mut bytes = [0u8; 8];
            bytes[..size].copy_from_slice(buffer.get(at..at + size)?);
            values.push(u64::from_le_bytes(bytes));
            at += size;
        }
        Some(Params(values))
    }

    /// Makes them from values, zero-extended to 64 bits.
    pub fn from_values(values: &[u64]) -> Params {
        Params(values.to_vec())
    }

    /// Argument `i`, zero-extended.
    ///
    /// # Panics
    /// If the kernel has no such parameter.
    pub fn u64(&self, i: usize) -> u64 {
        self.0[i]
    }

    /// Argument `i` as a signed number.
    pub fn i64(&self, i: usize) -> i64 {
        self.0[i] as i64
    }

    /// Argument `i`, its low 32 bits.
    pub fn u32(&self, i: usize) -> u32 {
        self.0[i] as u32
    }

    /// All arguments, zero-extended.
    pub fn values(&self) -> &[u64] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_arguments_agree() {
        let twin = crate::twin("fill_bytes").unwrap();
        let (dst, bytes, value) = (0x1000u64, 77u64, 0xabu32);
        let at =
            |p: &dyn std::any::Any| (p as *const dyn std::any::Any).cast::<c_void>().cast_mut();
        let pointers = [at(&dst), at(&bytes), at(&value)];
        // SAFETY: three pointers to variables of the sizes that the twin lists.
        let a = unsafe { Params::from_pointers(twin, pointers.as_ptr()) };
        let mut packed = [dst.to_le_bytes(), bytes.to_le_bytes()].concat();
        packed.extend_from_slice(&value.to_le_bytes());
        assert_eq!(Some(a.clone()), Params::from_packed(twin, &packed));
        assert_eq!(a.values(), [0x1000, 77, 0xab]);
        assert_eq!(Params::from_packed(twin, &packed[..19]), None);
    }
}
