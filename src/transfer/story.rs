//! How a message went, for a program that asks (`include/anabranch.h`).

use std::cell::Cell;
use std::ffi::CStr;

use crate::stats::Reason;

/// The path that a message took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(usize)]
pub enum Path {
    /// Not known yet.
    #[default]
    Unknown = 0,
    /// The MPI library's own.
    Native = 1,
    /// By bcopy: copied to or from host memory by the engine, carried by the MPI library.
    Bcopy = 2,
    /// Straight from the sender's device memory.
    Direct = 3,
    /// From a rank to itself, copied in place.
    Own = 4,
    /// A pipeline in host memory.
    HostPipeline = 5,
    /// From a cell in host memory into which the sender had copied it.
    Eager = 6,
    /// By several paths at once (multipath).
    Multipath = 7,
    /// Over other GPUs: a part of a multipath message.
    Relay = 8,
    /// A pipeline in memory of the sender's GPU.
    GpuPipeline = 9,
}

impl Path {
    /// All paths, in the order of the C interface.
    pub const ALL: [Path; 10] = [
        Path::Unknown,
        Path::Native,
        Path::Bcopy,
        Path::Direct,
        Path::Own,
        Path::HostPipeline,
        Path::Eager,
        Path::Multipath,
        Path::Relay,
        Path::GpuPipeline,
    ];

    /// Name, as in the counters where there is one.
    pub fn name(self) -> &'static str {
        self.c_name().to_str().unwrap_or_default()
    }

    /// As [`Path::name`], for C.
    pub const fn c_name(self) -> &'static CStr {
        match self {
            Path::Unknown => c"unknown",
            Path::Native => c"native",
            Path::Bcopy => c"bcopy",
            Path::Direct => c"direct",
            Path::Own => c"self",
            Path::HostPipeline => c"host_pipeline",
            Path::Eager => c"eager",
            Path::Multipath => c"multipath",
            Path::Relay => c"relay",
            Path::GpuPipeline => c"gpu_pipeline",
        }
    }

    /// Whether the engine has moved the payload all the way.
    pub const fn is_taken(self) -> bool {
        !matches!(self, Path::Unknown | Path::Native | Path::Bcopy)
    }
}

/// Bytes of a multipath message that did not come straight from the sender's device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Over other GPUs.
    pub relay: u64,
    /// Through host memory.
    pub host: u64,
    /// By no path: a later message, received in the same place, was there already.
    pub overtaken: u64,
}

/// What is known of a message on one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Story {
    /// This rank sent it; otherwise it received it.
    pub is_send: bool,
    /// The path that it took.
    pub path: Path,
    /// Payload, bytes.
    pub bytes: u64,
    /// The parts of a multipath message, once they are known.
    pub parts: Option<Parts>,
    /// Why it was not taken, or not by the direct path.
    pub reason: Option<Reason>,
    /// The operation is complete.
    pub is_complete: bool,
}

impl Story {
    /// The payload by the path that each part of it took; all zero while that is not known.
    pub fn bytes_by_path(&self) -> [u64; Path::ALL.len()] {
        let mut by_path = [0; Path::ALL.len()];
        match (self.path, self.parts) {
            (Path::Unknown, _) | (Path::Multipath, None) => {}
            (Path::Multipath, Some(parts)) => {
                let others = parts.relay + parts.host + parts.overtaken;
                by_path[Path::Direct as usize] = self.bytes.saturating_sub(others);
                by_path[Path::Relay as usize] = parts.relay;
                by_path[Path::HostPipeline as usize] = parts.host;
                by_path[Path::Unknown as usize] = parts.overtaken;
            }
            (path, _) => by_path[path as usize] = self.bytes,
        }
        by_path
    }

    /// The reason, if it has had an effect: memory that cannot be exported matters to other ranks only.
    pub fn told_reason(&self) -> Option<Reason> {
        let is_quickest = !matches!(
            self.path,
            Path::Bcopy | Path::HostPipeline | Path::GpuPipeline
        );
        self.reason.filter(|_| !is_quickest)
    }
}

thread_local! {
    static LAST: Cell<Option<Story>> = const { Cell::new(None) };
}

/// An engine operation is complete towards the program.
pub fn tell(story: Story) {
    let told = Story {
        is_complete: true,
        ..story
    };
    // A thread that is ending has nobody to ask.
    let _ = LAST.try_with(|last| last.set(Some(told)));
}

/// The latest operation that the engine has completed on this thread, once.
pub fn take_last() -> Option<Story> {
    LAST.try_with(Cell::take).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_numbered_and_named_as_in_the_interface() {
        for (number, path) in Path::ALL.into_iter().enumerate() {
            assert_eq!(path as usize, number);
        }
        let taken: Vec<_> = Path::ALL.iter().filter(|path| path.is_taken()).collect();
        assert_eq!(taken.len(), 7);
    }

    #[test]
    fn each_byte_is_counted_on_its_path_once_that_is_known() {
        let mut story = Story {
            path: Path::Multipath,
            bytes: 100,
            ..Story::default()
        };
        assert_eq!(story.bytes_by_path(), [0; Path::ALL.len()]);
        story.parts = Some(Parts {
            relay: 40,
            host: 15,
            overtaken: 5,
        });
        assert_eq!(story.bytes_by_path(), [5, 0, 0, 40, 0, 15, 0, 0, 40, 0]);
        story.path = Path::Eager;
        assert_eq!(story.bytes_by_path(), [0, 0, 0, 0, 0, 0, 100, 0, 0, 0]);
    }

    #[test]
    fn the_last_operation_is_told_once() {
        assert_eq!(take_last(), None);
        let story = Story {
            path: Path::Direct,
            bytes: 5,
            ..Story::default()
        };
        tell(story);
        let told = take_last().expect("told");
        assert_eq!(
            (told.path, told.bytes, told.is_complete),
            (Path::Direct, 5, true)
        );
        assert_eq!(take_last(), None);
    }
}
