//! What can go wrong below the engine's CUDA part.

use super::driver;
use super::types::{code, Code};
use std::ffi::CStr;
use std::fmt;

/// Result of the CUDA part.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call into the CUDA part did not do what it was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    /// The process has no CUDA driver, or is a forked child that must leave it alone.
    NoDriver,
    /// The driver lacks this function (C name).
    Missing(&'static str),
    /// A driver function (C name) returned this code.
    Driver {
        /// C name of the function that failed.
        function: &'static str,
        /// Its `CUresult`.
        code: Code,
    },
    /// The allocation cannot be exported to another process.
    NotExportable(NotExportable),
    /// The handle is open in this process already, and not by the engine.
    AlreadyMapped,
    /// Attempts have shown that memory of that device of the peer's cannot be opened on this one.
    PairRefused,
    /// An allocation of a peer's is shorter than the peer says.
    Shorter,
    /// The context in which the object was made is gone.
    ContextLost,
    /// No context for this device exists, and none is made behind the user's back.
    NoContext,
    /// A bound of the engine's own is reached (which one); later it may work.
    Exhausted(&'static str),
}

/// Why legacy IPC does not cover an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotExportable {
    /// From a memory pool (`cuMemAllocAsync`, `cudaMallocAsync`).
    Pool,
    /// Mapped by the virtual memory functions (`cuMemMap`), or another kind that the driver calls not
    /// capable.
    Virtual,
    /// Managed memory.
    Managed,
    /// The driver refused a handle for it: memory imported from another process, for one.
    Refused,
}

impl Error {
    /// Makes an error out of a function's result.
    pub(super) fn check(function: &'static str, code: Code) -> Result<()> {
        match code {
            code::SUCCESS => Ok(()),
            code => Err(Error::Driver { function, code }),
        }
    }

    /// The driver's code, if the driver was asked.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            Error::Driver { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the driver returned this code.
    #[must_use]
    pub fn is(&self, code: Code) -> bool {
        self.code() == Some(code)
    }

    /// Whether the context, and all that was made in it, is gone.
    #[must_use]
    pub fn context_is_gone(&self) -> bool {
        match self {
            Error::ContextLost | Error::NoDriver => true,
            Error::Driver { code, .. } => matches!(
                *code,
                code::NOT_INITIALIZED
                    | code::DEINITIALIZED
                    | code::INVALID_CONTEXT
                    | code::CONTEXT_IS_DESTROYED
            ),
            _ => false,
        }
    }

    /// Whether every further call in this context will fail, for example because a kernel of the user's
    /// faulted.
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        // 214 ECC, 220 NVLink, 700..=720 the asynchronous failures of kernels and copies, except the few
        // codes in between that answer a wrong call.
        self.code().is_some_and(|code| {
            matches!(code, 214 | 220 | 700 | 702 | 714..=719) || code == code::UNKNOWN
        })
    }

    /// Whether it says that the machine, or its administrator, does not allow the call: this is no fault.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        // No device, invalid device (hidden from this process), no peer access, not permitted, not supported.
        self.code()
            .is_some_and(|code| matches!(code, 100 | 101 | 217 | 800 | 801))
    }

    /// Name of the driver's code, as `cuGetErrorName` has it.
    #[must_use]
    pub fn name(&self) -> Option<String> {
        self.code().map(|code| {
            driver::error_text(code, driver::Text::Name)
                .unwrap_or_else(|| format!("CUresult {code}"))
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoDriver => write!(f, "no cuda driver in this process"),
            Error::Missing(name) => write!(f, "the cuda driver has no {name}"),
            Error::Driver { function, code } => {
                write!(f, "{function}: {}", self.name().unwrap_or_default())?;
                match driver::error_text(*code, driver::Text::Description) {
                    Some(text) => write!(f, " ({text})"),
                    None => Ok(()),
                }
            }
            Error::NotExportable(why) => write!(f, "memory cannot be exported: {why}"),
            Error::AlreadyMapped => write!(f, "the handle is already open in this process"),
            Error::PairRefused => write!(f, "device memory of that peer cannot be mapped here"),
            Error::Shorter => write!(
                f,
                "the memory of the peer's is shorter than its message says"
            ),
            Error::ContextLost => write!(f, "the cuda context is gone"),
            Error::NoContext => write!(f, "no cuda context on the device"),
            Error::Exhausted(what) => write!(f, "bound reached: {what}"),
        }
    }
}

impl fmt::Display for NotExportable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NotExportable::Pool => "from a memory pool",
            NotExportable::Virtual => "mapped by virtual memory management",
            NotExportable::Managed => "managed memory",
            NotExportable::Refused => "refused by the driver",
        })
    }
}

impl std::error::Error for Error {}

/// Copies a driver-owned string.
///
/// # Safety
/// `text` is null or a NUL-terminated string that lives for the call.
pub(super) unsafe fn owned_text(text: *const libc::c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, and terminated by the caller's promise.
    Some(
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_without_a_driver_names_function_and_code() {
        let error = Error::Driver {
            function: "cuMemAlloc",
            code: 2,
        };
        let text = error.to_string();
        assert!(text.starts_with("cuMemAlloc: "), "{text}");
        assert!(
            text.contains('2') || text.contains("OUT_OF_MEMORY"),
            "{text}"
        );
    }

    #[test]
    fn lost_contexts_are_told_from_other_failures() {
        let of = |code| Error::Driver {
            function: "f",
            code,
        };
        assert!(of(code::CONTEXT_IS_DESTROYED).context_is_gone());
        assert!(!of(code::NOT_READY).context_is_gone());
        assert!(of(code::ILLEGAL_ADDRESS).is_sticky());
        assert!(!of(code::PEER_ACCESS_ALREADY_ENABLED).is_sticky());
        assert!(!of(code::HOST_MEMORY_ALREADY_REGISTERED).is_sticky());
    }
}
