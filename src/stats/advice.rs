//! What a user can do about messages that were not taken.

use super::Reason;

impl Reason {
    /// What to do if there are many of these, in one line.
    pub const fn advice(self) -> &'static str {
        match self {
            Reason::TooSmall => "lower ANABRANCH_THRESHOLD, unless it was raised on purpose",
            Reason::NotOnNode => "nothing: messages between nodes are the MPI library's",
            Reason::NotRegistered => {
                "give every rank the same library, one PID and IPC namespace and one /dev/shm (`anabranch doctor`)"
            }
            Reason::NotReady => {
                "nothing if they are the first messages of a rank; otherwise let each rank use its device before it receives"
            }
            Reason::HelperOff => "take ANABRANCH_HELPER=off away",
            Reason::UnknownComm => {
                "make communicators after MPI_Init by MPI's own functions; those of sessions are not known"
            }
            Reason::Intercomm => "merge the groups (MPI_Intercomm_merge), and send on that communicator",
            Reason::UnknownType => "send types that are made of MPI's own, or packed bytes",
            Reason::NoSlot => {
                "receive sooner, raise ANABRANCH_SLOTS, or give the job more shared memory"
            }
            Reason::NoCell => {
                "post receives before short messages are sent; more than ANABRANCH_EAGER completes without a cell"
            }
            Reason::NotExportable => {
                "take buffers from cudaMalloc: pools and managed memory cannot be mapped by other processes"
            }
            Reason::MappingFailed => {
                "see `anabranch doctor` for which GPUs can map each other's memory, and which memory it is (docs/limits.md)"
            }
            Reason::NonContiguous => "pack on the device before the send, or send contiguous types",
            Reason::Mixed => "send each allocation by itself",
            Reason::Buffered => "use MPI_Send or MPI_Isend in place of buffered sends",
            Reason::Replace => "use MPI_Sendrecv with two buffers",
            Reason::NoContext => {
                "keep the memory's CUDA context until its messages are through"
            }
            Reason::DriverError => "run with ANABRANCH_LOG=info, which says what the driver reported",
            Reason::OutOfMemory => {
                "leave host memory for ANABRANCH_LANDING and staging, or lower ANABRANCH_STAGING"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_a_line_for_each_reason() {
        for reason in Reason::ALL {
            let advice = reason.advice();
            assert!((10..130).contains(&advice.len()), "{advice}");
            assert!(!advice.contains('\n') && !advice.ends_with('.'), "{advice}");
        }
    }
}
