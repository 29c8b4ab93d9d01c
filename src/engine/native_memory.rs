//! Device memory that is handed to the MPI library by calls that the engine does not take.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cuda;
use crate::engine::Engine;
use crate::mpi::Function;

/// Which functions have been reported.
static SAID: [AtomicBool; Function::COUNT] = [const { AtomicBool::new(false) }; Function::COUNT];

impl Engine {
    /// Called before the MPI library gets these buffers. If the library does not know device memory and one
    /// of the buffers is in it, says so once for each function. What happens then is up to the MPI library.
    /// With UCX below some calls work.
    #[inline]
    pub fn look_at_buffers(&self, function: Function, buffers: &[*const c_void]) {
        if !self.env.cuda_aware && !buffers.is_empty() && cuda::driver_in_use() {
            self.look_closer_at_buffers(function, buffers);
        }
    }

    #[inline(never)]
    fn look_closer_at_buffers(&self, function: Function, buffers: &[*const c_void]) {
        let said = &SAID[function as usize];
        let in_place = self.env.abi.in_place;
        let is_device =
            |buffer: &*const c_void| buffer.addr() != in_place && cuda::is_device(*buffer);
        if said.load(Ordering::Relaxed) {
            return;
        }
        let Some(buffer) = buffers.iter().copied().find(is_device) else {
            return;
        };
        if said.swap(true, Ordering::Relaxed) {
            return;
        }
        log::warn!(
            "{} is given device memory ({buffer:p}): Anabranch takes point-to-point messages only, and the MPI library says \
             that it does not know device memory, so the call may crash; copy the data to host memory for it, or use an MPI \
             library built with CUDA (ANABRANCH_MPI_CUDA=yes says that this one knows it)",
            function.name()
        );
    }
}
