//! The functions of OTF2's library that write an archive, opened at run time.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::fmt::Display;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;

use anyhow::{anyhow, bail, Context, Result};
use libloading::os::unix::{Library as Opened, RTLD_LOCAL, RTLD_NOW};

/// The library of OTF2 3 as its makers name it, and as Debian does. Functions of other numbers have other parameters.
const NAMES: [&str; 2] = ["libotf2.so.10", "libopen-trace-format2.so.10"];

/// Something of the library's: an archive, or what writes a part of it.
type Handle = *mut c_void;
/// 0, or what went wrong.
type Code = c_int;

/// No such thing.
pub const NONE: u32 = u32::MAX;
/// No such time.
pub const NO_TIME: u64 = u64::MAX;

/// OTF2's numbers for what is written here.
const WRITE: u8 = 0;
const POSIX: u8 = 1;
const NOT_COMPRESSED: u8 = 1;
const MPI: u8 = 4;
const OF_PROCESSES: u8 = 0;
const PROCESS: u8 = 1;
const CPU_THREAD: u8 = 1;
const COMM_LOCATIONS: u8 = 4;
const COMM_GROUP: u8 = 5;
const GLOBAL_MEMBERS: u32 = 1;
/// Bytes of a piece of memory for events, and for definitions.
const CHUNK: u64 = 1 << 20;
const DEFINITIONS_CHUNK: u64 = 4 << 20;

/// What a node of the tree of machines is.
#[derive(Clone, Copy)]
pub enum Domain {
    Machine = 0,
    SharedMemory = 1,
}

/// What a function is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Function = 1,
    Barrier = 15,
    OneToAll = 23,
    AllToOne = 24,
    AllToAll = 25,
    Collective = 26,
    PointToPoint = 28,
}

macro_rules! functions {
    ($( $name:ident : $symbol:literal ( $($argument:ty),* ) -> $result:ty; )*) => {
        /// The library's functions.
        pub struct Library {
            $( $name: unsafe extern "C" fn($($argument),*) -> $result, )*
        }

        impl Library {
            fn of(library: &Opened) -> Result<Library, libloading::Error> {
                Ok(Library {
                    $(
                        // SAFETY: the headers of OTF2 3 give the function of this name this type, and its library is
                        // never closed.
                        $name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }?,
                    )*
                })
            }
        }
    };
}

functions! {
    describe: "OTF2_Error_GetDescription"(Code) -> *const c_char;
    open: "OTF2_Archive_Open"(*const c_char, *const c_char, u8, u64, u64, u8, u8) -> Handle;
    close: "OTF2_Archive_Close"(Handle) -> Code;
    set_flush: "OTF2_Archive_SetFlushCallbacks"(Handle, &'static Flush, Handle) -> Code;
    set_serial: "OTF2_Archive_SetSerialCollectiveCallbacks"(Handle) -> Code;
    set_creator: "OTF2_Archive_SetCreator"(Handle, *const c_char) -> Code;
    open_events: "OTF2_Archive_OpenEvtFiles"(Handle) -> Code;
    close_events: "OTF2_Archive_CloseEvtFiles"(Handle) -> Code;
    open_location: "OTF2_Archive_GetEvtWriter"(Handle, u64) -> Handle;
    close_location: "OTF2_Archive_CloseEvtWriter"(Handle, Handle) -> Code;
    open_locals: "OTF2_Archive_OpenDefFiles"(Handle) -> Code;
    close_locals: "OTF2_Archive_CloseDefFiles"(Handle) -> Code;
    open_local: "OTF2_Archive_GetDefWriter"(Handle, u64) -> Handle;
    close_local: "OTF2_Archive_CloseDefWriter"(Handle, Handle) -> Code;
    open_definitions: "OTF2_Archive_GetGlobalDefWriter"(Handle) -> Handle;
    clock: "OTF2_GlobalDefWriter_WriteClockProperties"(Handle, u64, u64, u64, u64) -> Code;
    paradigm: "OTF2_GlobalDefWriter_WriteParadigm"(Handle, u8, u32, u8) -> Code;
    string: "OTF2_GlobalDefWriter_WriteString"(Handle, u32, *const c_char) -> Code;
    region: "OTF2_GlobalDefWriter_WriteRegion"(Handle, u32, u32, u32, u32, u8, u8, u32, u32, u32, u32) -> Code;
    node: "OTF2_GlobalDefWriter_WriteSystemTreeNode"(Handle, u32, u32, u32, u32) -> Code;
    domain: "OTF2_GlobalDefWriter_WriteSystemTreeNodeDomain"(Handle, u32, u8) -> Code;
    location_group: "OTF2_GlobalDefWriter_WriteLocationGroup"(Handle, u32, u32, u8, u32, u32) -> Code;
    location: "OTF2_GlobalDefWriter_WriteLocation"(Handle, u64, u32, u8, u64, u32) -> Code;
    group: "OTF2_GlobalDefWriter_WriteGroup"(Handle, u32, u32, u8, u8, u32, u32, *const u64) -> Code;
    comm: "OTF2_GlobalDefWriter_WriteComm"(Handle, u32, u32, u32, u32, u32) -> Code;
    enter: "OTF2_EvtWriter_Enter"(Handle, Handle, u64, u32) -> Code;
    leave: "OTF2_EvtWriter_Leave"(Handle, Handle, u64, u32) -> Code;
    send: "OTF2_EvtWriter_MpiSend"(Handle, Handle, u64, u32, u32, u32, u64) -> Code;
    receive: "OTF2_EvtWriter_MpiRecv"(Handle, Handle, u64, u32, u32, u32, u64) -> Code;
    isend: "OTF2_EvtWriter_MpiIsend"(Handle, Handle, u64, u32, u32, u32, u64, u64) -> Code;
    isend_complete: "OTF2_EvtWriter_MpiIsendComplete"(Handle, Handle, u64, u64) -> Code;
    irecv_request: "OTF2_EvtWriter_MpiIrecvRequest"(Handle, Handle, u64, u64) -> Code;
    irecv: "OTF2_EvtWriter_MpiIrecv"(Handle, Handle, u64, u32, u32, u32, u64, u64) -> Code;
}

/// What the library asks when its memory for events is full, and at the end.
#[repr(C)]
struct Flush {
    before: extern "C" fn(Handle, u8, u64, Handle, bool) -> u8,
    after: Option<extern "C" fn(Handle, u8, u64) -> u64>,
}

/// The events go to the file, and no event says so.
static FLUSH: Flush = Flush {
    before: flush,
    after: None,
};

extern "C" fn flush(_: Handle, _: u8, _: u64, _: Handle, _: bool) -> u8 {
    1
}

/// Calls a function of an archive's, which may refuse.
macro_rules! call {
    ($archive:expr, $name:ident($($argument:expr),*)) => {{
        let archive: &Archive = $archive;
        // SAFETY: the library's own type of this function; its handles are of this archive and not closed yet, and texts
        // and lists are there until it returns, by when it has copied them.
        let code = unsafe { (archive.library.$name)($($argument),*) };
        archive.check(stringify!($name), code)
    }};
}

/// An archive that is being written.
pub struct Archive {
    library: Library,
    handle: Handle,
}

impl Archive {
    /// Begins one in a folder that is empty.
    pub fn create(library: Library, folder: &Path) -> Result<Archive> {
        let path = CString::new(folder.as_os_str().as_bytes())?;
        let name = c"traces";
        // SAFETY: the texts end with NUL and are there until it returns.
        let handle = unsafe {
            (library.open)(
                path.as_ptr(),
                name.as_ptr(),
                WRITE,
                CHUNK,
                DEFINITIONS_CHUNK,
                POSIX,
                NOT_COMPRESSED,
            )
        };
        if handle.is_null() {
            bail!("{}: OTF2 makes no archive there", folder.display());
        }
        let archive = Archive { library, handle };
        call!(&archive, set_flush(handle, &FLUSH, null_mut()))?;
        call!(&archive, set_serial(handle))?;
        let creator = text(concat!("Anabranch ", env!("CARGO_PKG_VERSION")));
        call!(&archive, set_creator(handle, creator.as_ptr()))?;
        Ok(archive)
    }

    fn check(&self, what: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: it takes any number.
        let described = unsafe { (self.library.describe)(code) };
        if described.is_null() {
            bail!("OTF2: {what}: error {code}");
        }
        // SAFETY: a text of the library's own, which is never freed.
        let described = unsafe { CStr::from_ptr(described) };
        bail!("OTF2: {what}: {}", described.to_string_lossy())
    }

    /// Writes the events of each location, one after the other.
    pub fn events(
        &self,
        locations: impl Iterator<Item = u64> + Clone,
        mut write: impl FnMut(&Events) -> Result<()>,
    ) -> Result<()> {
        call!(self, open_events(self.handle))?;
        for location in locations.clone() {
            // SAFETY: the archive is open, and so are its files of events.
            let handle = unsafe { (self.library.open_location)(self.handle, location) };
            let archive = self;
            let events = Events { archive, handle };
            write(events.is_there(location)?)?;
            call!(self, close_location(self.handle, handle))?;
        }
        call!(self, close_events(self.handle))?;
        // Nothing is numbered otherwise in a location than in all of the archive, but readers look for these files.
        call!(self, open_locals(self.handle))?;
        for location in locations {
            // SAFETY: the archive is open, and so are its files of definitions.
            let handle = unsafe { (self.library.open_local)(self.handle, location) };
            call!(self, close_local(self.handle, handle))?;
        }
        call!(self, close_locals(self.handle))
    }

    /// Begins to define what events name.
    pub fn definitions(&self) -> Result<Definitions<'_>> {
        // SAFETY: the archive is open.
        let handle = unsafe { (self.library.open_definitions)(self.handle) };
        if handle.is_null() {
            bail!("OTF2: there is no room for definitions");
        }
        let archive = self;
        let mut definitions = Definitions {
            archive,
            handle,
            strings: 0,
        };
        // Readers take the first one for none.
        definitions.string("")?;
        let name = definitions.string("MPI")?;
        call!(self, paradigm(handle, MPI, name, OF_PROCESSES))?;
        Ok(definitions)
    }

    /// Ends the archive.
    pub fn close(self) -> Result<()> {
        call!(&self, close(self.handle))
    }
}

impl Library {
    /// Opens it.
    pub fn open() -> Result<Library> {
        // SAFETY: OTF2's library runs nothing of its own when it is loaded.
        let open = |name: &&str| unsafe { Opened::open(Some(*name), RTLD_NOW | RTLD_LOCAL) };
        let opened = NAMES.iter().find_map(|name| open(name).ok());
        let opened = opened.ok_or_else(|| {
            anyhow!(
                "--otf2 needs the library of OTF2 3, {}: install the package libopen-trace-format2-10 (Debian), or name its folder in LD_LIBRARY_PATH",
                NAMES.join(" or ")
            )
        })?;
        let library = Library::of(&opened).context("the library of OTF2 lacks a function")?;
        // It stays loaded for as long as the process runs.
        std::mem::forget(opened);
        Ok(library)
    }
}

/// As C has it.
fn text(text: impl Display) -> CString {
    let text = text.to_string().replace('\0', "?");
    CString::new(text).unwrap_or_default()
}

/// What passes between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    pub peer: u32,
    pub comm: u32,
    pub tag: u32,
    pub bytes: u64,
}

/// Something that happens in a thread. Numbers are those of regions and of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Enter(u32),
    Leave(u32),
    Send(Traffic),
    Receive(Traffic),
    Isend(Traffic, u64),
    IsendComplete(u64),
    IrecvRequest(u64),
    Irecv(Traffic, u64),
}

/// Writes the events of a location.
pub struct Events<'a> {
    archive: &'a Archive,
    handle: Handle,
}

impl Events<'_> {
    fn is_there(&self, location: u64) -> Result<&Self> {
        match self.handle.is_null() {
            true => bail!("OTF2: there is no room for the events of location {location}"),
            false => Ok(self),
        }
    }

    /// Writes one, which is not earlier than the one before.
    pub fn put(&self, at: u64, event: Event) -> Result<()> {
        let Events { archive, handle } = *self;
        let no = null_mut();
        match event {
            Event::Enter(region) => call!(archive, enter(handle, no, at, region)),
            Event::Leave(region) => call!(archive, leave(handle, no, at, region)),
            Event::Send(t) => {
                call!(
                    archive,
                    send(handle, no, at, t.peer, t.comm, t.tag, t.bytes)
                )
            }
            Event::Receive(t) => {
                call!(
                    archive,
                    receive(handle, no, at, t.peer, t.comm, t.tag, t.bytes)
                )
            }
            Event::Isend(t, request) => call!(
                archive,
                isend(handle, no, at, t.peer, t.comm, t.tag, t.bytes, request)
            ),
            Event::IsendComplete(request) => {
                call!(archive, isend_complete(handle, no, at, request))
            }
            Event::IrecvRequest(request) => call!(archive, irecv_request(handle, no, at, request)),
            Event::Irecv(t, request) => call!(
                archive,
                irecv(handle, no, at, t.peer, t.comm, t.tag, t.bytes, request)
            ),
        }
    }
}

/// Writes what events name.
pub struct Definitions<'a> {
    archive: &'a Archive,
    handle: Handle,
    strings: u32,
}

impl Definitions<'_> {
    fn string(&mut self, of: impl Display) -> Result<u32> {
        let number = self.strings;
        self.strings += 1;
        let of = text(of);
        call!(self.archive, string(self.handle, number, of.as_ptr()))?;
        Ok(number)
    }

    /// Times are nanoseconds, from 0 to `span`; `real` is the time of day at 0, ns since 1970.
    pub fn clock(&self, span: u64, real: u64) -> Result<()> {
        call!(
            self.archive,
            clock(self.handle, 1_000_000_000, 0, span, real)
        )
    }

    /// A function of MPI's.
    pub fn region(&mut self, number: u32, name: &str, role: Role) -> Result<()> {
        let name = self.string(name)?;
        let role = role as u8;
        call!(
            self.archive,
            region(self.handle, number, name, name, 0, role, MPI, 0, 0, 0, 0)
        )
    }

    /// A machine, or a part of one.
    pub fn node(&mut self, number: u32, name: &str, domain: Domain, parent: u32) -> Result<()> {
        let class = self.string(match domain {
            Domain::Machine => "machine",
            Domain::SharedMemory => "node",
        })?;
        let name = self.string(name)?;
        call!(self.archive, node(self.handle, number, name, class, parent))?;
        call!(self.archive, domain(self.handle, number, domain as u8))
    }

    /// A rank on a node.
    pub fn rank(&mut self, number: u32, node: u32) -> Result<()> {
        let name = self.string(format_args!("rank {number}"))?;
        call!(
            self.archive,
            location_group(self.handle, number, name, PROCESS, node, NONE)
        )
    }

    /// A thread of a rank.
    pub fn thread(&mut self, location: u64, thread: u64, events: u64, rank: u32) -> Result<()> {
        let name = self.string(format_args!("thread {thread}"))?;
        call!(
            self.archive,
            location(self.handle, location, name, CPU_THREAD, events, rank)
        )
    }

    /// All ranks, by the locations that stand for them: groups 0 and 1, of which communicators are.
    pub fn world(&mut self, locations: &[u64]) -> Result<()> {
        let (locations_name, ranks_name) = (self.string("MPI locations")?, self.string("ranks")?);
        let ranks: Vec<u64> = (0..locations.len() as u64).collect();
        for (number, name, kind, flags, members) in [
            (0, locations_name, COMM_LOCATIONS, 0, locations),
            (1, ranks_name, COMM_GROUP, GLOBAL_MEMBERS, &ranks[..]),
        ] {
            let count = members.len() as u32;
            call!(
                self.archive,
                group(
                    self.handle,
                    number,
                    name,
                    kind,
                    MPI,
                    flags,
                    count,
                    members.as_ptr()
                )
            )?;
        }
        Ok(())
    }

    /// A communicator, in which ranks are those of the world.
    pub fn communicator(&mut self, number: u32, name: impl Display) -> Result<()> {
        let name = self.string(name)?;
        call!(self.archive, comm(self.handle, number, name, 1, NONE, 0))
    }
}
