//! Tools that wrap MPI functions by the profiling interface (MPI 4.1 section 15.2): a tool defines `MPI_X`, does what it is
//! for, and goes on by `PMPI_X`, which this library exports, too.
//!
//! In front of this library a tool needs no help. Behind it (linked into the program, or preloaded after it) it would never
//! be called, so `MPI_X` of this library passes the call on to the tool's, with nothing done before, and does its work
//! when the tool calls `PMPI_X`. So a tool sees the calls that it would see without this library, and no others.
//!
//! A tool behind this library that goes on by a look-up of the next `MPI_X` instead reaches the MPI library directly. A
//! message of this library's would then end in the program's buffer as it is: a rank with such a tool stays native.
//!
//! Where this library is loaded twice the first copy does all. A tool behind the second one is behind the first, too.

use super::library::{
    global_symbol, next_symbol, object_of, objects_behind, own_object, Library, Object,
};
use super::{guard, Class, Function};
use std::collections::BTreeMap;
use std::ffi::{c_void, CStr};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Once, OnceLock};

/// Where each call goes on to, if not to this library's own part.
static NEXT: [AtomicPtr<c_void>; Function::COUNT] =
    [const { AtomicPtr::new(null_mut()) }; Function::COUNT];

/// A loaded object that defines `MPI_X` and belongs to nobody's MPI library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tool {
    /// Where it was loaded from; `None` if it is part of the program.
    pub path: Option<PathBuf>,
    /// It imports functions of the profiling interface.
    pub uses_pmpi: bool,
}

/// The tools of this process, as they stood at the first MPI call.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    /// In front: they call this library.
    pub before: Vec<Tool>,
    /// Behind: this library calls them.
    pub behind: Vec<Tool>,
}

impl std::fmt::Display for Tool {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.path {
            Some(path) => path.display().fmt(out),
            None => out.write_str("the program itself"),
        }
    }
}

static TOOLS: OnceLock<Tools> = OnceLock::new();

/// The tools of this process.
pub fn found() -> &'static Tools {
    TOOLS.get_or_init(find)
}

/// Whether a tool may be behind this library: there is one, or nobody has looked yet.
#[inline(always)]
pub fn may_be_behind() -> bool {
    guard::may_have_tools()
}

/// The function of a tool behind this library that the program's call is passed on to.
pub fn next(function: Function) -> Option<*mut c_void> {
    static LOOK: Once = Once::new();
    LOOK.call_once(|| guard::set_tools(!found().behind.is_empty()));
    let next = NEXT[function as usize].load(Ordering::Relaxed);
    (!next.is_null()).then_some(next)
}

fn find() -> Tools {
    let (mut before, mut behind) = (BTreeMap::new(), BTreeMap::new());
    // Asked for once the next definition is that of another copy.
    let mut others = None;
    for function in Function::ALL {
        if function.class() == Class::Native {
            continue;
        }
        // The names are those of the profiling interface: without the first letter.
        let name = &function.symbol()[1..];
        let (next, first) = (next_symbol(name), global_symbol(name));
        let next = match is_copy(next) {
            true => {
                let others: &Vec<Library> = others.get_or_insert_with(objects_behind);
                let definition = others.iter().find_map(|object| object.own_symbol(name));
                definition.unwrap_or(null_mut())
            }
            false => next,
        };
        if let Some((object, tool)) = tool_at(next) {
            NEXT[*function as usize].store(next, Ordering::Relaxed);
            behind.insert(object, tool);
        }
        if let Some((object, tool)) = first.and_then(tool_at) {
            before.insert(object, tool);
        }
    }
    before.retain(|object, _| !behind.contains_key(object));
    Tools {
        before: before.into_values().collect(),
        behind: behind.into_values().collect(),
    }
}

/// Whether a function is that of the next copy of this library.
fn is_copy(address: *mut c_void) -> bool {
    static COPY: OnceLock<Option<Object>> = OnceLock::new();
    if address.is_null() {
        return false;
    }
    // One look-up of a name that no one else defines; another copy, if there is one, is the next that has it.
    let copy = COPY.get_or_init(|| {
        let next = next_symbol(c"anabranch_version");
        (!next.is_null()).then(|| object_of(next))?
    });
    copy.is_some() && object_of(address) == *copy
}

/// The tool that defines a function, if a tool does.
fn tool_at(address: *mut c_void) -> Option<(Object, Tool)> {
    if address.is_null() {
        return None;
    }
    let object = object_of(address)?;
    if Some(object) == own_object() {
        return None;
    }
    let uses_pmpi = imports(object, b"PMPI_");
    let path = object.name().to_string_lossy().into_owned();
    // The program's own object has no name.
    if !path.is_empty() && Library::defining(address).is_none_or(|library| has_pmpi(&library)) {
        // An MPI library, or another copy of this one.
        return None;
    }
    let tool = Tool {
        path: (!path.is_empty()).then(|| path.into()),
        uses_pmpi,
    };
    Some((object, tool))
}

/// Whether a library defines the profiling interface itself. One name of several is enough: a look-up may be hindered.
fn has_pmpi(library: &Library) -> bool {
    [c"PMPI_Init", c"PMPI_Finalize", c"PMPI_Comm_rank"]
        .into_iter()
        .any(|name| library.own_symbol(name).is_some())
}

/// A symbol (`Elf64_Sym`).
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

/// Whether an object imports a symbol whose name begins so.
fn imports(object: Object, prefix: &[u8]) -> bool {
    const DT_HASH: i64 = 4;
    const DT_STRTAB: i64 = 5;
    const DT_SYMTAB: i64 = 6;
    const DT_GNU_HASH: i64 = 0x6fff_fef5;
    let table = |tag| object.address_of(tag);
    let (Some(strings), Some(symbols)) = (table(DT_STRTAB), table(DT_SYMTAB)) else {
        return false;
    };
    let Some(hash) = table(DT_GNU_HASH).or_else(|| table(DT_HASH)) else {
        return false;
    };
    // SAFETY: tables of a loaded object, which stay mapped. Of a GNU hash table the second word is the number of the first
    // symbol that is defined, of a plain one the number of all symbols.
    let symbols = unsafe {
        let count = *hash.cast::<u32>().add(1) as usize;
        std::slice::from_raw_parts(symbols.cast::<Symbol>(), count)
    };
    let mut imported = symbols.iter().skip(1).filter(|symbol| symbol.section == 0);
    imported.any(|symbol| {
        let name = strings.wrapping_byte_add(symbol.name as usize).cast();
        // SAFETY: a name in the object's string table.
        let name = unsafe { CStr::from_ptr(name) };
        name.to_bytes().starts_with(prefix)
    })
}
