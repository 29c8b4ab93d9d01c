//! Errors on demand: `SIMCUDA_FAULT="cuMemcpyDtoDAsync:3=CUDA_ERROR_ILLEGAL_ADDRESS,..."` makes the
//! third call of that function return that error. The version suffix of a name may be left out.

use crate::types::CUresult;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One planned error.
struct Fault {
    function: String,
    at: u64,
    code: CUresult,
    calls: AtomicU64,
}

/// All planned errors.
#[derive(Default)]
pub struct Faults(Vec<Fault>);

impl Faults {
    /// Parses the variable; the error is one line that names the part that is wrong.
    pub fn parse(text: &str) -> Result<Faults, String> {
        let one = |part: &str| {
            let bad = || format!("SIMCUDA_FAULT: \"{part}\" is not FUNCTION:N=CUDA_ERROR_NAME");
            let (call, code) = part.split_once('=').ok_or_else(bad)?;
            let (function, at) = call.split_once(':').unwrap_or((call, "1"));
            let at = at.trim().parse().ok().filter(|n| *n > 0).ok_or_else(bad)?;
            let code = code.trim();
            let code = crate::errors::by_name(code)
                .or_else(|| code.parse().ok())
                .ok_or_else(bad)?;
            Ok(Fault {
                function: function.trim().to_string(),
                at,
                code,
                calls: AtomicU64::new(0),
            })
        };
        text.split(',')
            .filter(|p| !p.trim().is_empty())
            .map(one)
            .collect::<Result<_, String>>()
            .map(Faults)
    }

    /// The error planned for this call of `function`, if any.
    pub fn hit(&self, function: &str) -> Option<CUresult> {
        if self.0.is_empty() {
            return None;
        }
        let base = function
            .rsplit_once("_v")
            .map_or(function, |(base, _)| base);
        let fault = self
            .0
            .iter()
            .find(|f| f.function == function || f.function == base)?;
        (fault.calls.fetch_add(1, Relaxed) + 1 == fault.at).then_some(fault.code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_fails_and_no_other() {
        let f = Faults::parse("cuMemcpyDtoDAsync:3=CUDA_ERROR_ILLEGAL_ADDRESS").unwrap();
        let calls: Vec<_> = (0..4).map(|_| f.hit("cuMemcpyDtoDAsync_v2")).collect();
        assert_eq!(calls, [None, None, Some(700), None]);
        assert_eq!(f.hit("cuMemcpyAsync"), None);
        assert!(Faults::parse("cuMemAlloc:0=CUDA_ERROR_UNKNOWN").is_err());
        assert!(Faults::parse("cuMemAlloc:1=NO_SUCH").is_err());
    }
}
