//! Errors on demand: `SIMCUDA_FAULT="cuMemcpyDtoDAsync:3=CUDA_ERROR_ILLEGAL_ADDRESS,..."` makes the
//! third call of that function return that error. The version suffix of a name may be left out.
//!
//! `*` in the place of a name counts the calls of all functions together, `*!` of those that do something: not such that
//! ask how far copies are, or enter and leave contexts. `N+` makes that call and all later ones
//! fail, `@RANK` behind the name leaves the other ranks of a job alone (`*@1:40+=CUDA_ERROR_UNKNOWN`), and `#GPU` behind
//! that counts calls in a context of this GPU only, by its number in the process (`cuMemAlloc@1#2:1+=...`). A call that
//! fails does nothing else. With `SIGSTOP` in the place of an error the process stops itself in that call, which goes on when
//! somebody lets the process go on. A test program plans errors itself, for a part of its run, by [`simcudaFaults`].

use crate::types::CUresult;
use core::ffi::{c_char, c_int, c_ulonglong, CStr};
use parking_lot::RwLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering::Relaxed};

/// One planned error.
struct Fault {
    /// `*` for any, `*!` for any that does something.
    function: String,
    /// Only where a context of this GPU is current.
    gpu: Option<usize>,
    at: u64,
    lasting: bool,
    effect: Effect,
    calls: AtomicU64,
}

/// What is planned for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    /// It returns this error.
    Error(CUresult),
    /// The process is stopped in it.
    Stop,
}

impl Fault {
    /// What is planned for this call, if it is one that is meant.
    fn hit(&self, function: &str, base: &str, gpu: impl Fn() -> Option<usize>) -> Option<Effect> {
        let is_meant = match self.function.as_str() {
            "*" => true,
            "*!" => !AROUND.contains(&function),
            name => name == function || name == base,
        };
        if !is_meant {
            return None;
        }
        if self.gpu.is_some() && self.gpu != gpu() {
            return None;
        }
        let call = self.calls.fetch_add(1, Relaxed) + 1;
        (call == self.at || (self.lasting && call > self.at)).then_some(self.effect)
    }
}

/// All planned errors.
#[derive(Default)]
pub struct Faults {
    /// Whether calls are looked at.
    armed: AtomicBool,
    planned: RwLock<Vec<Fault>>,
    calls: AtomicU64,
    /// Name of the function that an error hit first, NUL-terminated and never freed.
    first: AtomicPtr<c_char>,
}

/// Calls that do nothing by themselves: questions about copies, and what is around them and all others.
const AROUND: [&str; 7] = [
    "cuEventQuery",
    "cuStreamQuery",
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxGetId",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
];

/// Calls that only translate a code: no operation of the device's depends on them, and they are not counted.
const TRANSLATORS: [&str; 2] = ["cuGetErrorName", "cuGetErrorString"];

impl Faults {
    /// Parses the variable; the error is one line that names the part that is wrong.
    pub fn parse(text: &str) -> Result<Faults, String> {
        let planned = plan(text, launched_rank())?;
        Ok(Faults {
            armed: AtomicBool::new(!planned.is_empty()),
            planned: RwLock::new(planned),
            ..Faults::default()
        })
    }

    /// The error planned for this call of `function`, if any; `gpu` tells whose context is current.
    pub fn hit(&self, function: &'static str, gpu: impl Fn() -> Option<usize>) -> Option<CUresult> {
        if !self.armed.load(Relaxed) || TRANSLATORS.contains(&function) {
            return None;
        }
        self.calls.fetch_add(1, Relaxed);
        let base = function
            .rsplit_once("_v")
            .map_or(function, |(base, _)| base);
        let planned = self.planned.read();
        // Every plan counts, whichever gives the error.
        let (mut code, mut stops) = (None, false);
        for fault in planned.iter() {
            match fault.hit(function, base, &gpu) {
                Some(Effect::Error(error)) => code = code.or(Some(error)),
                Some(Effect::Stop) => stops = true,
                None => {}
            }
        }
        if stops {
            // SAFETY: no preconditions; all threads of this process stand still until somebody continues it.
            unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
        }
        if code.is_some() && self.first.load(Relaxed).is_null() {
            if let Ok(name) = std::ffi::CString::new(function) {
                self.first.store(name.into_raw(), Relaxed);
            }
        }
        code
    }

    fn replace(&self, text: Option<&str>) -> Result<(), String> {
        let planned = plan(text.unwrap_or(""), launched_rank())?;
        *self.planned.write() = planned;
        self.calls.store(0, Relaxed);
        self.first.store(core::ptr::null_mut(), Relaxed);
        self.armed.store(text.is_some(), Relaxed);
        Ok(())
    }
}

/// The errors of a plan that are for this rank.
fn plan(text: &str, rank: Option<u64>) -> Result<Vec<Fault>, String> {
    let one = |part: &str| {
        let bad = || {
            format!("SIMCUDA_FAULT: \"{part}\" is not FUNCTION[@RANK][#GPU]:N[+]=CUDA_ERROR_NAME or =SIGSTOP")
        };
        let (call, code) = part.split_once('=').ok_or_else(bad)?;
        let (function, at) = call.split_once(':').unwrap_or((call, "1"));
        let (function, gpu) = match function.split_once('#') {
            Some((function, gpu)) => (function, Some(gpu.trim().parse().map_err(|_| bad())?)),
            None => (function, None),
        };
        let (function, for_rank) = match function.split_once('@') {
            Some((function, rank)) => (function, Some(rank.trim().parse().map_err(|_| bad())?)),
            None => (function, None),
        };
        let at = at.trim();
        let lasting = at.ends_with('+');
        let at = at.trim_end_matches('+').parse().ok();
        let at = at.filter(|n| *n > 0).ok_or_else(bad)?;
        let code = code.trim();
        let error = || crate::errors::by_name(code).or_else(|| code.parse().ok());
        let effect = match code {
            "SIGSTOP" => Effect::Stop,
            _ => Effect::Error(error().ok_or_else(bad)?),
        };
        let fault = Fault {
            function: function.trim().to_string(),
            gpu,
            at,
            lasting,
            effect,
            calls: AtomicU64::new(0),
        };
        Ok((for_rank, fault))
    };
    let all = text
        .split(',')
        .filter(|p| !p.trim().is_empty())
        .map(one)
        .collect::<Result<Vec<(Option<u64>, Fault)>, String>>()?;
    Ok(all
        .into_iter()
        .filter(|(for_rank, _)| for_rank.is_none() || *for_rank == rank)
        .map(|(_, fault)| fault)
        .collect())
}

/// The rank that the launcher gave this process.
fn launched_rank() -> Option<u64> {
    [
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "PMI_RANK",
        "SLURM_PROCID",
    ]
    .iter()
    .find_map(|name| std::env::var(name).ok()?.parse().ok())
}

fn faults() -> Option<&'static Faults> {
    crate::driver::driver()
        .ok()
        .map(crate::driver::Driver::faults)
}

/// For test programs: plans the errors of a text as `SIMCUDA_FAULT` has it from now on, in the place of those planned
/// before, and counts calls from 0; null ends that. 0 unless the text is wrong.
///
/// # Safety
/// `text` is null or NUL-terminated.
#[no_mangle]
#[allow(non_snake_case)]
pub unsafe extern "C" fn simcudaFaults(text: *const c_char) -> c_int {
    let Some(faults) = faults() else { return -1 };
    let text = if text.is_null() {
        None
    } else {
        // SAFETY: not null, and terminated by the caller's word.
        match unsafe { CStr::from_ptr(text) }.to_str() {
            Ok(text) => Some(text),
            Err(_) => return -1,
        }
    };
    match faults.replace(text) {
        Ok(()) => 0,
        Err(why) => {
            crate::report::complain(&why);
            -1
        }
    }
}

/// For test programs: driver calls since [`simcudaFaults`].
#[no_mangle]
#[allow(non_snake_case)]
pub extern "C" fn simcudaFaultCalls() -> c_ulonglong {
    faults().map_or(0, |faults| faults.calls.load(Relaxed))
}

/// For test programs: the function that a planned error hit first since [`simcudaFaults`]; null if none.
#[no_mangle]
#[allow(non_snake_case)]
pub extern "C" fn simcudaFaultHit() -> *const c_char {
    faults().map_or(core::ptr::null(), |faults| {
        faults.first.load(Relaxed).cast_const()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_fails_and_no_other() {
        let f = Faults::parse("cuMemcpyDtoDAsync:3=CUDA_ERROR_ILLEGAL_ADDRESS").unwrap();
        let calls: Vec<_> = (0..4)
            .map(|_| f.hit("cuMemcpyDtoDAsync_v2", || None))
            .collect();
        assert_eq!(calls, [None, None, Some(700), None]);
        assert_eq!(f.hit("cuMemcpyAsync", || None), None);
        assert!(Faults::parse("cuMemAlloc:0=CUDA_ERROR_UNKNOWN").is_err());
        assert!(Faults::parse("cuMemAlloc:1=NO_SUCH").is_err());
    }

    #[test]
    fn any_function_and_all_later_calls() {
        let f = Faults::parse("*:2=1, cuEventQuery:2+=2").unwrap();
        assert_eq!(f.hit("cuMemAlloc_v2", || None), None);
        assert_eq!(f.hit("cuGetErrorName", || None), None, "does not count");
        assert_eq!(f.hit("cuMemFree_v2", || None), Some(1));
        let calls: Vec<_> = (0..3).map(|_| f.hit("cuEventQuery", || None)).collect();
        assert_eq!(calls, [None, Some(2), Some(2)]);
        f.replace(Some("cuEventQuery:1=3")).unwrap();
        assert_eq!(f.hit("cuEventQuery", || None), Some(3));
        assert_eq!(f.calls.load(Relaxed), 1);
        f.replace(None).unwrap();
        assert_eq!(f.hit("cuEventQuery", || None), None);
    }

    #[test]
    fn what_does_something() {
        let f = Faults::parse("*!:2=2").unwrap();
        let names = [
            "cuMemAlloc_v2",
            "cuCtxPushCurrent_v2",
            "cuEventQuery",
            "cuMemFree_v2",
        ];
        let calls = names.map(|name| f.hit(name, || None));
        assert_eq!(calls, [None, None, None, Some(2)]);
    }

    #[test]
    fn a_gpu_of_its_own() {
        let f = Faults::parse("cuMemAlloc#2:2+=2").unwrap();
        let on = |gpu| f.hit("cuMemAlloc_v2", || gpu);
        let calls = [Some(2), Some(1), None, Some(2), Some(1), Some(2)].map(on);
        assert_eq!(calls, [None, None, None, Some(2), None, Some(2)]);
        assert!(Faults::parse("cuMemAlloc#x:1=2").is_err());
    }

    #[test]
    fn a_call_in_which_the_process_stops() {
        let planned = plan("cuMemAlloc:2=SIGSTOP, cuMemAlloc:2=2", None).unwrap();
        let hit = |fault: &Fault| fault.hit("cuMemAlloc_v2", "cuMemAlloc", || None);
        assert_eq!([0, 1].map(|at| hit(&planned[at])), [None, None]);
        let both = [Effect::Stop, Effect::Error(2)].map(Some);
        assert_eq!([0, 1].map(|at| hit(&planned[at])), both);
    }

    #[test]
    fn a_rank_of_its_own() {
        let of = |rank| plan("cuMemAlloc@1:1=2", rank).unwrap().len();
        assert_eq!([of(Some(0)), of(Some(1)), of(None)], [0, 1, 0]);
        assert!(plan("cuMemAlloc@x:1=2", None).is_err());
    }
}
