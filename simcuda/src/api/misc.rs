//! Errors, entry points by name, profiler, and the project's own extension.

use super::{generated, maybe, out, text};
use crate::driver::driver;
use crate::errors::*;
use crate::types::*;
use core::ffi::{c_char, c_int, c_void};

/// CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.
const PER_THREAD: u64 = 2;

/// Versions at which the form of a function changed, where the highest suffix alone does not tell: (name, version, form).
const FORMS: &[(&str, c_int, &str)] = &[
    ("cuCtxCreate", 12050, "cuCtxCreate_v4"),
    ("cuCtxCreate", 11040, "cuCtxCreate_v3"),
    ("cuCtxCreate", 0, "cuCtxCreate_v2"),
    ("cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"),
    ("cuStreamGetCaptureInfo", 11030, "cuStreamGetCaptureInfo_v2"),
    ("cuStreamGetCaptureInfo", 0, "cuStreamGetCaptureInfo"),
    (
        "cuStreamUpdateCaptureDependencies",
        12030,
        "cuStreamUpdateCaptureDependencies_v2",
    ),
    (
        "cuStreamUpdateCaptureDependencies",
        0,
        "cuStreamUpdateCaptureDependencies",
    ),
    ("cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"),
    ("cuGraphInstantiate", 0, "cuGraphInstantiate_v2"),
    ("cuGraphExecUpdate", 12000, "cuGraphExecUpdate_v2"),
    ("cuGraphExecUpdate", 0, "cuGraphExecUpdate"),
    ("cuGraphAddKernelNode", 12000, "cuGraphAddKernelNode_v2"),
    ("cuGraphAddKernelNode", 0, "cuGraphAddKernelNode"),
    (
        "cuGraphKernelNodeGetParams",
        12000,
        "cuGraphKernelNodeGetParams_v2",
    ),
    (
        "cuGraphKernelNodeGetParams",
        0,
        "cuGraphKernelNodeGetParams",
    ),
    (
        "cuGraphKernelNodeSetParams",
        12000,
        "cuGraphKernelNodeSetParams_v2",
    ),
    (
        "cuGraphKernelNodeSetParams",
        0,
        "cuGraphKernelNodeSetParams",
    ),
    (
        "cuGraphExecKernelNodeSetParams",
        12000,
        "cuGraphExecKernelNodeSetParams_v2",
    ),
    (
        "cuGraphExecKernelNodeSetParams",
        0,
        "cuGraphExecKernelNodeSetParams",
    ),
    ("cuGraphAddDependencies", 12030, "cuGraphAddDependencies_v2"),
    ("cuGraphAddDependencies", 0, "cuGraphAddDependencies"),
    ("cuGraphRemoveDependencies", 0, "cuGraphRemoveDependencies"),
    ("cuGraphGetEdges", 0, "cuGraphGetEdges"),
    (
        "cuGraphNodeGetDependencies",
        0,
        "cuGraphNodeGetDependencies",
    ),
    (
        "cuGraphNodeGetDependentNodes",
        0,
        "cuGraphNodeGetDependentNodes",
    ),
    ("cuGraphAddNode", 12030, "cuGraphAddNode_v2"),
    ("cuMemcpyBatchAsync", 13000, "cuMemcpyBatchAsync_v2"),
    ("cuMemcpyBatchAsync", 0, "cuMemcpyBatchAsync"),
    ("cuCtxGetDevice", 13000, "cuCtxGetDevice_v2"),
    ("cuCtxGetDevice", 0, "cuCtxGetDevice"),
    ("cuCtxSynchronize", 13000, "cuCtxSynchronize_v2"),
    ("cuCtxSynchronize", 0, "cuCtxSynchronize"),
    ("cuDeviceGetUuid", 0, "cuDeviceGetUuid_v2"),
    ("cuGetProcAddress", 12000, "cuGetProcAddress_v2"),
    ("cuGetProcAddress", 0, "cuGetProcAddress"),
    ("cuStreamGetCtx", 0, "cuStreamGetCtx"),
    ("cuEventElapsedTime", 0, "cuEventElapsedTime"),
];

/// The entry of that exact name.
pub fn exact(name: &str) -> Option<*const c_void> {
    let table = generated::TABLE;
    table
        .binary_search_by(|s| s.name.cmp(name))
        .ok()
        .map(|i| table[i].address)
}

/// The form of a function that a program built for `version` means by its unversioned name.
pub fn by_base_name(name: &str, version: c_int, per_thread: bool) -> Option<*const c_void> {
    let listed = FORMS
        .iter()
        .find(|(n, from, _)| *n == name && version >= *from)
        .map(|(_, _, form)| (*form).to_string());
    let suffixed = || {
        (2..=4)
            .rev()
            .map(|v| format!("{name}_v{v}"))
            .find(|n| exact(n).is_some())
    };
    let form = listed.or_else(suffixed).unwrap_or_else(|| name.to_string());
    let variant = |suffix: &str| exact(&format!("{form}{suffix}"));
    if per_thread {
        if let Some(address) = variant("_ptsz").or_else(|| variant("_ptds")) {
            return Some(address);
        }
    }
    exact(&form)
}

unsafe fn proc_address(
    symbol: CString,
    to: *mut *const c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> Res {
    // SAFETY: the caller's string and pointers.
    unsafe {
        let name = text(symbol)?;
        match by_base_name(&name, version, flags & PER_THREAD != 0) {
            Some(address) => {
                maybe(status, 0);
                out(to, address)
            }
            None => {
                maybe(status, 1);
                out(to, core::ptr::null())?;
                Err(NOT_FOUND)
            }
        }
    }
}

driver! {
    fn cuGetProcAddress(symbol: CString, pfn: *mut *const c_void, version: c_int, flags: u64) {
        proc_address(symbol, pfn, version, flags, core::ptr::null_mut())
    }

    fn cuGetProcAddress_v2(symbol: CString, pfn: *mut *const c_void, version: c_int, flags: u64, status: *mut c_int) {
        proc_address(symbol, pfn, version, flags, status)
    }

    fn cuGetErrorName(error: CUresult, name: *mut *const c_char) {
        let found = crate::errors::name(error);
        out(name, found.map_or(core::ptr::null(), |n| n.as_ptr()))?;
        found.map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn cuGetErrorString(error: CUresult, string: *mut *const c_char) {
        let found = crate::errors::describe(error);
        out(string, found.map_or(core::ptr::null(), |n| n.as_ptr()))?;
        found.map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn cuGetExportTable(_table: *mut *const c_void, _id: *const CUuuid) {
        Err(NOT_FOUND)
    }

    fn cuProfilerStart() {
        driver()?;
        Ok(())
    }

    fn cuProfilerStop() {
        driver()?;
        Ok(())
    }
}

/// Virtual time in nanoseconds as this process's host code sees it; 0 before cuInit.
///
/// An extension of this driver, found by `dlsym`: benchmarks read it in place of a wall clock.
#[no_mangle]
pub extern "C" fn simcuda_clock_ns() -> u64 {
    std::panic::catch_unwind(|| driver().map_or(0, |d| d.host_now())).unwrap_or(0)
}

/// Virtual nanoseconds by which host code of the node has reacted too late, because time had moved on meanwhile;
/// a measurement in which they are more than 2 % of the time is void. 0 before cuInit.
///
/// An extension of this driver, found by `dlsym`.
#[no_mangle]
pub extern "C" fn simcuda_late_ns() -> u64 {
    let late = || {
        driver().map_or(0, |d| {
            let late = &d.job.shared().late;
            late.load(std::sync::atomic::Ordering::Relaxed)
        })
    };
    std::panic::catch_unwind(late).unwrap_or(0)
}

/// Races and uses of freed memory found in this process so far.
///
/// An extension of this driver, found by `dlsym`.
#[no_mangle]
pub extern "C" fn simcuda_findings() -> u64 {
    let count = || {
        driver().map_or(0, |d| {
            d.report.findings.load(std::sync::atomic::Ordering::Relaxed)
        })
    };
    std::panic::catch_unwind(count).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_resolve_to_the_form_of_the_version() {
        let f = |n| exact(n).map(|p| p as usize);
        let g = |n, v, p| by_base_name(n, v, p).map(|p| p as usize);
        assert!(f("cuMemAlloc_v2").is_some());
        assert_eq!(g("cuMemAlloc", 12000, false), f("cuMemAlloc_v2"));
        assert_eq!(g("cuCtxCreate", 11000, false), f("cuCtxCreate_v2"));
        assert_eq!(g("cuCtxCreate", 12080, false), f("cuCtxCreate_v4"));
        assert_eq!(g("cuMemcpyAsync", 12000, true), f("cuMemcpyAsync_ptsz"));
        assert_eq!(g("cuMemcpyHtoD", 12000, true), f("cuMemcpyHtoD_v2_ptds"));
        assert_eq!(g("cuNoSuch", 12000, false), None);
        assert!(f("cuMulticastCreate").is_some(), "a stub");
    }
}
