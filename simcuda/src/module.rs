//! Modules: any text that names kernels. Functions run the host twins of the project's kernels.

use crate::types::Handle;
use anabranch_kernels::Twin;
use std::collections::HashMap;

/// A loaded module or library.
pub struct Module {
    /// Names of the kernels in the image.
    pub kernels: Vec<String>,
    /// Functions handed out, by name.
    pub functions: HashMap<String, Handle>,
    /// Context it was loaded in, 0 for a library.
    pub context: Handle,
}

/// A kernel of a module.
pub struct Function {
    /// Name, NUL-terminated for cuFuncGetName.
    pub name: std::ffi::CString,
    /// Module.
    pub module: Handle,
    /// Its host twin; without one it cannot be launched.
    pub twin: Option<&'static Twin>,
    /// Largest dynamic shared memory, as set.
    pub dynamic_shared: i32,
}

/// Names that follow `.entry` in PTX text.
pub fn entries(ptx: &str) -> Vec<String> {
    let after = ptx.split(".entry").skip(1);
    let name = |s: &str| {
        let end = s
            .find(|c: char| !(c.is_alphanumeric() || "_$%".contains(c)))
            .unwrap_or(s.len());
        s[..end].to_string()
    };
    after
        .map(|s| name(s.trim_start()))
        .filter(|n| !n.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_the_kernels_of_the_ptx() {
        let names = entries(".version 7.8\n.visible .entry a_1(\n.param)\n{ret;}\n.entry\tb{}");
        assert_eq!(names, ["a_1", "b"]);
        let all = entries(anabranch_kernels::PTX);
        assert!(anabranch_kernels::TWINS
            .iter()
            .all(|t| all.iter().any(|n| n == t.name)));
    }
}
