//! Result codes of the driver API with their names.

use crate::types::CUresult;
use core::ffi::CStr;

/// What a driver entry returns inside the crate.
pub type Res<T = ()> = Result<T, CUresult>;

#[allow(missing_docs)]
pub const SUCCESS: CUresult = 0;
#[allow(missing_docs)]
pub const INVALID_VALUE: CUresult = 1;
#[allow(missing_docs)]
pub const OUT_OF_MEMORY: CUresult = 2;
#[allow(missing_docs)]
pub const NOT_INITIALIZED: CUresult = 3;
#[allow(missing_docs)]
pub const DEINITIALIZED: CUresult = 4;
#[allow(missing_docs)]
pub const PROFILER_DISABLED: CUresult = 5;
#[allow(missing_docs)]
pub const PROFILER_NOT_INITIALIZED: CUresult = 6;
#[allow(missing_docs)]
pub const PROFILER_ALREADY_STARTED: CUresult = 7;
#[allow(missing_docs)]
pub const PROFILER_ALREADY_STOPPED: CUresult = 8;
#[allow(missing_docs)]
pub const STUB_LIBRARY: CUresult = 34;
#[allow(missing_docs)]
pub const CALL_REQUIRES_NEWER_DRIVER: CUresult = 36;
#[allow(missing_docs)]
pub const DEVICE_UNAVAILABLE: CUresult = 46;
#[allow(missing_docs)]
pub const MULTICAST_RESOURCE_FULL: CUresult = 47;
#[allow(missing_docs)]
pub const NO_DEVICE: CUresult = 100;
#[allow(missing_docs)]
pub const INVALID_DEVICE: CUresult = 101;
#[allow(missing_docs)]
pub const DEVICE_NOT_LICENSED: CUresult = 102;
#[allow(missing_docs)]
pub const INVALID_IMAGE: CUresult = 200;
#[allow(missing_docs)]
pub const INVALID_CONTEXT: CUresult = 201;
#[allow(missing_docs)]
pub const CONTEXT_ALREADY_CURRENT: CUresult = 202;
#[allow(missing_docs)]
pub const MAP_FAILED: CUresult = 205;
#[allow(missing_docs)]
pub const UNMAP_FAILED: CUresult = 206;
#[allow(missing_docs)]
pub const ARRAY_IS_MAPPED: CUresult = 207;
#[allow(missing_docs)]
pub const ALREADY_MAPPED: CUresult = 208;
#[allow(missing_docs)]
pub const NO_BINARY_FOR_GPU: CUresult = 209;
#[allow(missing_docs)]
pub const ALREADY_ACQUIRED: CUresult = 210;
#[allow(missing_docs)]
pub const NOT_MAPPED: CUresult = 211;
#[allow(missing_docs)]
pub const NOT_MAPPED_AS_ARRAY: CUresult = 212;
#[allow(missing_docs)]
pub const NOT_MAPPED_AS_POINTER: CUresult = 213;
#[allow(missing_docs)]
pub const ECC_UNCORRECTABLE: CUresult = 214;
#[allow(missing_docs)]
pub const UNSUPPORTED_LIMIT: CUresult = 215;
#[allow(missing_docs)]
pub const CONTEXT_ALREADY_IN_USE: CUresult = 216;
#[allow(missing_docs)]
pub const PEER_ACCESS_UNSUPPORTED: CUresult = 217;
#[allow(missing_docs)]
pub const INVALID_PTX: CUresult = 218;
#[allow(missing_docs)]
pub const INVALID_GRAPHICS_CONTEXT: CUresult = 219;
#[allow(missing_docs)]
pub const NVLINK_UNCORRECTABLE: CUresult = 220;
#[allow(missing_docs)]
pub const JIT_COMPILER_NOT_FOUND: CUresult = 221;
#[allow(missing_docs)]
pub const UNSUPPORTED_PTX_VERSION: CUresult = 222;
#[allow(missing_docs)]
pub const JIT_COMPILATION_DISABLED: CUresult = 223;
#[allow(missing_docs)]
pub const UNSUPPORTED_EXEC_AFFINITY: CUresult = 224;
#[allow(missing_docs)]
pub const UNSUPPORTED_DEVSIDE_SYNC: CUresult = 225;
#[allow(missing_docs)]
pub const CONTAINED: CUresult = 226;
#[allow(missing_docs)]
pub const INSUFFICIENT_LOADER_VERSION: CUresult = 227;
#[allow(missing_docs)]
pub const INVALID_SOURCE: CUresult = 300;
#[allow(missing_docs)]
pub const FILE_NOT_FOUND: CUresult = 301;
#[allow(missing_docs)]
pub const SHARED_OBJECT_SYMBOL_NOT_FOUND: CUresult = 302;
#[allow(missing_docs)]
pub const SHARED_OBJECT_INIT_FAILED: CUresult = 303;
#[allow(missing_docs)]
pub const OPERATING_SYSTEM: CUresult = 304;
#[allow(missing_docs)]
pub const INVALID_HANDLE: CUresult = 400;
#[allow(missing_docs)]
pub const ILLEGAL_STATE: CUresult = 401;
#[allow(missing_docs)]
pub const LOSSY_QUERY: CUresult = 402;
#[allow(missing_docs)]
pub const NOT_FOUND: CUresult = 500;
#[allow(missing_docs)]
pub const NOT_READY: CUresult = 600;
#[allow(missing_docs)]
pub const ILLEGAL_ADDRESS: CUresult = 700;
#[allow(missing_docs)]
pub const LAUNCH_OUT_OF_RESOURCES: CUresult = 701;
#[allow(missing_docs)]
pub const LAUNCH_TIMEOUT: CUresult = 702;
#[allow(missing_docs)]
pub const LAUNCH_INCOMPATIBLE_TEXTURING: CUresult = 703;
#[allow(missing_docs)]
pub const PEER_ACCESS_ALREADY_ENABLED: CUresult = 704;
#[allow(missing_docs)]
pub const PEER_ACCESS_NOT_ENABLED: CUresult = 705;
#[allow(missing_docs)]
pub const PRIMARY_CONTEXT_ACTIVE: CUresult = 708;
#[allow(missing_docs)]
pub const CONTEXT_IS_DESTROYED: CUresult = 709;
#[allow(missing_docs)]
pub const ASSERT: CUresult = 710;
#[allow(missing_docs)]
pub const TOO_MANY_PEERS: CUresult = 711;
#[allow(missing_docs)]
pub const HOST_MEMORY_ALREADY_REGISTERED: CUresult = 712;
#[allow(missing_docs)]
pub const HOST_MEMORY_NOT_REGISTERED: CUresult = 713;
#[allow(missing_docs)]
pub const HARDWARE_STACK_ERROR: CUresult = 714;
#[allow(missing_docs)]
pub const ILLEGAL_INSTRUCTION: CUresult = 715;
#[allow(missing_docs)]
pub const MISALIGNED_ADDRESS: CUresult = 716;
#[allow(missing_docs)]
pub const INVALID_ADDRESS_SPACE: CUresult = 717;
#[allow(missing_docs)]
pub const INVALID_PC: CUresult = 718;
#[allow(missing_docs)]
pub const LAUNCH_FAILED: CUresult = 719;
#[allow(missing_docs)]
pub const COOPERATIVE_LAUNCH_TOO_LARGE: CUresult = 720;
#[allow(missing_docs)]
pub const TENSOR_MEMORY_LEAK: CUresult = 721;
#[allow(missing_docs)]
pub const NOT_PERMITTED: CUresult = 800;
#[allow(missing_docs)]
pub const NOT_SUPPORTED: CUresult = 801;
#[allow(missing_docs)]
pub const SYSTEM_NOT_READY: CUresult = 802;
#[allow(missing_docs)]
pub const SYSTEM_DRIVER_MISMATCH: CUresult = 803;
#[allow(missing_docs)]
pub const COMPAT_NOT_SUPPORTED_ON_DEVICE: CUresult = 804;
#[allow(missing_docs)]
pub const MPS_CONNECTION_FAILED: CUresult = 805;
#[allow(missing_docs)]
pub const MPS_RPC_FAILURE: CUresult = 806;
#[allow(missing_docs)]
pub const MPS_SERVER_NOT_READY: CUresult = 807;
#[allow(missing_docs)]
pub const MPS_MAX_CLIENTS_REACHED: CUresult = 808;
#[allow(missing_docs)]
pub const MPS_MAX_CONNECTIONS_REACHED: CUresult = 809;
#[allow(missing_docs)]
pub const MPS_CLIENT_TERMINATED: CUresult = 810;
#[allow(missing_docs)]
pub const CDP_NOT_SUPPORTED: CUresult = 811;
#[allow(missing_docs)]
pub const CDP_VERSION_MISMATCH: CUresult = 812;
#[allow(missing_docs)]
pub const STREAM_CAPTURE_UNSUPPORTED: CUresult = 900;
#[allow(missing_docs)]
pub const STREAM_CAPTURE_INVALIDATED: CUresult = 901;
#[allow(missing_docs)]
pub const STREAM_CAPTURE_MERGE: CUresult = 902;
#[allow(missing_docs)]
pub const STREAM_CAPTURE_UNMATCHED: CUresult = 903;
#[allow(missing_docs)]
pub const STREAM_CAPTURE_UNJOINED: CUresult = 904;
#[allow(missing_docs)]
pub const STREAM_CAPTURE_ISOLATION: CUresult = 905;
#[allow(missing_docs)]
pub const STREAM_CAPTURE_IMPLICIT: CUresult = 906;
#[allow(missing_docs)]
pub const CAPTURED_EVENT: CUresult = 907;
#[allow(missing_docs)]
pub const STREAM_CAPTURE_WRONG_THREAD: CUresult = 908;
#[allow(missing_docs)]
pub const TIMEOUT: CUresult = 909;
#[allow(missing_docs)]
pub const GRAPH_EXEC_UPDATE_FAILURE: CUresult = 910;
#[allow(missing_docs)]
pub const EXTERNAL_DEVICE: CUresult = 911;
#[allow(missing_docs)]
pub const INVALID_CLUSTER_SIZE: CUresult = 912;
#[allow(missing_docs)]
pub const FUNCTION_NOT_LOADED: CUresult = 913;
#[allow(missing_docs)]
pub const INVALID_RESOURCE_TYPE: CUresult = 914;
#[allow(missing_docs)]
pub const INVALID_RESOURCE_CONFIGURATION: CUresult = 915;
#[allow(missing_docs)]
pub const KEY_ROTATION: CUresult = 916;
#[allow(missing_docs)]
pub const STREAM_DETACHED: CUresult = 917;
#[allow(missing_docs)]
pub const GRAPH_RECAPTURE_FAILURE: CUresult = 918;
#[allow(missing_docs)]
pub const FABRIC_NOT_READY: CUresult = 919;
#[allow(missing_docs)]
pub const UNKNOWN: CUresult = 999;

static NAMES: &[(CUresult, &CStr)] = &[
    (0, c"CUDA_SUCCESS"),
    (1, c"CUDA_ERROR_INVALID_VALUE"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED"),
    (4, c"CUDA_ERROR_DEINITIALIZED"),
    (5, c"CUDA_ERROR_PROFILER_DISABLED"),
    (6, c"CUDA_ERROR_PROFILER_NOT_INITIALIZED"),
    (7, c"CUDA_ERROR_PROFILER_ALREADY_STARTED"),
    (8, c"CUDA_ERROR_PROFILER_ALREADY_STOPPED"),
    (34, c"CUDA_ERROR_STUB_LIBRARY"),
    (36, c"CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER"),
    (46, c"CUDA_ERROR_DEVICE_UNAVAILABLE"),
    (47, c"CUDA_ERROR_MULTICAST_RESOURCE_FULL"),
    (100, c"CUDA_ERROR_NO_DEVICE"),
    (101, c"CUDA_ERROR_INVALID_DEVICE"),
    (102, c"CUDA_ERROR_DEVICE_NOT_LICENSED"),
    (200, c"CUDA_ERROR_INVALID_IMAGE"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT"),
    (202, c"CUDA_ERROR_CONTEXT_ALREADY_CURRENT"),
    (205, c"CUDA_ERROR_MAP_FAILED"),
    (206, c"CUDA_ERROR_UNMAP_FAILED"),
    (207, c"CUDA_ERROR_ARRAY_IS_MAPPED"),
    (208, c"CUDA_ERROR_ALREADY_MAPPED"),
    (209, c"CUDA_ERROR_NO_BINARY_FOR_GPU"),
    (210, c"CUDA_ERROR_ALREADY_ACQUIRED"),
    (211, c"CUDA_ERROR_NOT_MAPPED"),
    (212, c"CUDA_ERROR_NOT_MAPPED_AS_ARRAY"),
    (213, c"CUDA_ERROR_NOT_MAPPED_AS_POINTER"),
    (214, c"CUDA_ERROR_ECC_UNCORRECTABLE"),
    (215, c"CUDA_ERROR_UNSUPPORTED_LIMIT"),
    (216, c"CUDA_ERROR_CONTEXT_ALREADY_IN_USE"),
    (217, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"),
    (218, c"CUDA_ERROR_INVALID_PTX"),
    (219, c"CUDA_ERROR_INVALID_GRAPHICS_CONTEXT"),
    (220, c"CUDA_ERROR_NVLINK_UNCORRECTABLE"),
    (221, c"CUDA_ERROR_JIT_COMPILER_NOT_FOUND"),
    (222, c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
    (223, c"CUDA_ERROR_JIT_COMPILATION_DISABLED"),
    (224, c"CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY"),
    (225, c"CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC"),
    (226, c"CUDA_ERROR_CONTAINED"),
    (227, c"CUDA_ERROR_INSUFFICIENT_LOADER_VERSION"),
    (300, c"CUDA_ERROR_INVALID_SOURCE"),
    (301, c"CUDA_ERROR_FILE_NOT_FOUND"),
    (302, c"CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND"),
    (303, c"CUDA_ERROR_SHARED_OBJECT_INIT_FAILED"),
    (304, c"CUDA_ERROR_OPERATING_SYSTEM"),
    (400, c"CUDA_ERROR_INVALID_HANDLE"),
    (401, c"CUDA_ERROR_ILLEGAL_STATE"),
    (402, c"CUDA_ERROR_LOSSY_QUERY"),
    (500, c"CUDA_ERROR_NOT_FOUND"),
    (600, c"CUDA_ERROR_NOT_READY"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS"),
    (701, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    (702, c"CUDA_ERROR_LAUNCH_TIMEOUT"),
    (703, c"CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING"),
    (704, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"),
    (705, c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED"),
    (708, c"CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED"),
    (710, c"CUDA_ERROR_ASSERT"),
    (711, c"CUDA_ERROR_TOO_MANY_PEERS"),
    (712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
    (713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"),
    (714, c"CUDA_ERROR_HARDWARE_STACK_ERROR"),
    (715, c"CUDA_ERROR_ILLEGAL_INSTRUCTION"),
    (716, c"CUDA_ERROR_MISALIGNED_ADDRESS"),
    (717, c"CUDA_ERROR_INVALID_ADDRESS_SPACE"),
    (718, c"CUDA_ERROR_INVALID_PC"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED"),
    (720, c"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"),
    (721, c"CUDA_ERROR_TENSOR_MEMORY_LEAK"),
    (800, c"CUDA_ERROR_NOT_PERMITTED"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED"),
    (802, c"CUDA_ERROR_SYSTEM_NOT_READY"),
    (803, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    (804, c"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"),
    (805, c"CUDA_ERROR_MPS_CONNECTION_FAILED"),
    (806, c"CUDA_ERROR_MPS_RPC_FAILURE"),
    (807, c"CUDA_ERROR_MPS_SERVER_NOT_READY"),
    (808, c"CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"),
    (809, c"CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED"),
    (810, c"CUDA_ERROR_MPS_CLIENT_TERMINATED"),
    (811, c"CUDA_ERROR_CDP_NOT_SUPPORTED"),
    (812, c"CUDA_ERROR_CDP_VERSION_MISMATCH"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    (901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
    (902, c"CUDA_ERROR_STREAM_CAPTURE_MERGE"),
    (903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"),
    (904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED"),
    (905, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION"),
    (906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
    (907, c"CUDA_ERROR_CAPTURED_EVENT"),
    (908, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"),
    (909, c"CUDA_ERROR_TIMEOUT"),
    (910, c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"),
    (911, c"CUDA_ERROR_EXTERNAL_DEVICE"),
    (912, c"CUDA_ERROR_INVALID_CLUSTER_SIZE"),
    (913, c"CUDA_ERROR_FUNCTION_NOT_LOADED"),
    (914, c"CUDA_ERROR_INVALID_RESOURCE_TYPE"),
    (915, c"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"),
    (916, c"CUDA_ERROR_KEY_ROTATION"),
    (917, c"CUDA_ERROR_STREAM_DETACHED"),
    (918, c"CUDA_ERROR_GRAPH_RECAPTURE_FAILURE"),
    (919, c"CUDA_ERROR_FABRIC_NOT_READY"),
    (999, c"CUDA_ERROR_UNKNOWN"),
];

/// The constant's name, NUL-terminated, or `None` for a code the driver does not have.
pub fn name(code: CUresult) -> Option<&'static CStr> {
    NAMES.iter().find(|(c, _)| *c == code).map(|(_, n)| *n)
}

/// The code called `name` (with or without the `CUDA_ERROR_` prefix).
pub fn by_name(name: &str) -> Option<CUresult> {
    NAMES.iter().find_map(|(c, n)| {
        let full = n.to_str().ok()?;
        (full == name || full.strip_prefix("CUDA_ERROR_") == Some(name)).then_some(*c)
    })
}

/// A sentence for the code: the name in lower case words, with few exceptions.
pub fn describe(code: CUresult) -> Option<&'static CStr> {
    use std::sync::OnceLock;
    static TEXTS: OnceLock<Vec<(CUresult, std::ffi::CString)>> = OnceLock::new();
    let texts = TEXTS.get_or_init(|| {
        let sentence = |n: &CStr| {
            let n = n.to_string_lossy();
            let n = n
                .trim_start_matches("CUDA_ERROR_")
                .trim_start_matches("CUDA_");
            std::ffi::CString::new(n.to_lowercase().replace('_', " ")).unwrap_or_default()
        };
        let text = |code: CUresult, n: &CStr| match code {
            ALREADY_MAPPED => c"resource already mapped".to_owned(),
            _ => sentence(n),
        };
        NAMES.iter().map(|(c, n)| (*c, text(*c, n))).collect()
    });
    texts
        .iter()
        .find(|(c, _)| *c == code)
        .map(|(_, t)| t.as_c_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_header() {
        assert_eq!(
            name(700).unwrap().to_str(),
            Ok("CUDA_ERROR_ILLEGAL_ADDRESS")
        );
        assert_eq!(by_name("CUDA_ERROR_OUT_OF_MEMORY"), Some(2));
        assert_eq!(by_name("NOT_READY"), Some(600));
        assert_eq!(describe(600).unwrap().to_str(), Ok("not ready"));
        assert!(name(12345).is_none());
    }
}
