//! What an ELF file says of itself. Only the parts that are asked for are read, so that a library of
//! gigabytes costs no more than a small one, and a damaged file is an error.

use std::ffi::CStr;
use std::fs::File;
use std::path::Path;

use object::elf;
use object::read::elf::{Dyn, FileHeader, ProgramHeader, Sym};
use object::read::{FileKind, ReadCache, StringTable};
use object::Endianness;

/// A program or a shared library.
#[derive(Clone, Debug, Default)]
pub struct Elf {
    /// 32 or 64.
    pub bits: u8,
    /// `EM_*`.
    pub machine: u16,
    /// The dynamic loader that it asks for: none in a static program or a library.
    pub interpreter: Option<String>,
    /// Whether it has a dynamic section.
    pub is_dynamic: bool,
    /// `DT_SONAME`.
    pub soname: Option<String>,
    /// `DT_NEEDED`, in order.
    pub needed: Vec<String>,
    /// `DT_RPATH`, as it is written.
    pub rpath: Option<String>,
    /// `DT_RUNPATH`, as it is written.
    pub runpath: Option<String>,
    /// Whether the loader shall not look in its default places (`DF_1_NODEFLIB`).
    pub no_default_places: bool,
    /// Names of the versions that it needs of other libraries, as `GLIBC_2.34`.
    pub versions: Vec<String>,
}

/// Functions that a file defines.
#[derive(Clone, Debug, Default)]
pub struct Definitions {
    /// Which of the names asked for are defined.
    pub found: Vec<&'static str>,
    /// Whether the file has no table of the symbols that it does not export.
    pub stripped: bool,
}

impl Elf {
    /// Reads the header and the dynamic section.
    ///
    /// # Errors
    /// The file cannot be read, or is no ELF file that makes sense.
    pub fn read(path: &Path) -> Result<Elf, String> {
        with_file(
            path,
            parse::<elf::FileHeader32<_>>,
            parse::<elf::FileHeader64<_>>,
        )
    }

    /// Whether a process of this command's kind can load it.
    pub fn is_native(&self) -> bool {
        u32::from(self.bits) == usize::BITS && self.machine == own_machine()
    }

    /// Class and machine in words.
    pub fn kind(&self) -> String {
        kind(self.bits, self.machine)
    }

    /// The same of this command.
    pub fn own_kind() -> String {
        kind(u8::try_from(usize::BITS).unwrap_or(0), own_machine())
    }

    /// The newest version of the C library that it needs.
    pub fn glibc(&self) -> Option<GlibcVersion> {
        let versions = self.versions.iter();
        versions
            .filter_map(|name| GlibcVersion::parse(name.strip_prefix("GLIBC_")?))
            .max()
    }
}

fn kind(bits: u8, machine: u16) -> String {
    let name = match elf::Machine(machine) {
        elf::EM_X86_64 => "x86-64",
        elf::EM_386 => "x86",
        elf::EM_AARCH64 => "aarch64",
        elf::EM_ARM => "arm",
        elf::EM_PPC64 => "powerpc64",
        elf::EM_RISCV => "riscv",
        elf::EM_S390 => "s390",
        other => return format!("{bits}-bit, machine {}", other.0),
    };
    format!("{bits}-bit {name}")
}

/// A version of the C library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GlibcVersion(u32, u32, u32);

impl GlibcVersion {
    /// From `2.34` or `2.2.5`.
    pub fn parse(text: &str) -> Option<GlibcVersion> {
        let mut parts = text.trim().split('.').map(str::parse);
        let major = parts.next()?.ok()?;
        let minor = parts.next()?.ok()?;
        Some(GlibcVersion(
            major,
            minor,
            parts.next().map_or(Some(0), Result::ok)?,
        ))
    }
}

impl std::fmt::Display for GlibcVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)?;
        match self.2 {
            0 => Ok(()),
            patch => write!(f, ".{patch}"),
        }
    }
}

/// The version of glibc that this process runs with.
pub fn own_glibc() -> GlibcVersion {
    // SAFETY: takes nothing and returns a static string.
    let version = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) };
    GlibcVersion::parse(&version.to_string_lossy()).unwrap_or(GlibcVersion(0, 0, 0))
}

/// Why a library that needs this version of glibc does not load where there is that one.
pub fn too_old(needed: Option<GlibcVersion>, has: GlibcVersion) -> Option<String> {
    let needed = needed.filter(|needed| *needed > has)?;
    Some(format!(
        "the library needs glibc {needed}, here is {has}: take a package of Anabranch, which needs 2.28, or build it on this \
         machine, with cargo xtask build --release"
    ))
}

/// The `EM_*` of this command.
pub fn own_machine() -> u16 {
    match std::env::consts::ARCH {
        "aarch64" => elf::EM_AARCH64.0,
        "powerpc64" => elf::EM_PPC64.0,
        "riscv64" => elf::EM_RISCV.0,
        _ => elf::EM_X86_64.0,
    }
}

/// Which of the functions `wanted` are defined in the file.
///
/// # Errors
/// As [`Elf::read`].
pub fn definitions(path: &Path, wanted: &'static [&'static str]) -> Result<Definitions, String> {
    with_file(
        path,
        |data| find::<elf::FileHeader32<_>>(data, wanted),
        |data| find::<elf::FileHeader64<_>>(data, wanted),
    )
}

/// Whether the file exports the symbol `name`, so that a program that is linked with it finds it.
///
/// # Errors
/// As [`Elf::read`].
pub fn exports(path: &Path, name: &str) -> Result<bool, String> {
    with_file(
        path,
        |data| exports_of::<elf::FileHeader32<_>>(data, name),
        |data| exports_of::<elf::FileHeader64<_>>(data, name),
    )
}

fn exports_of<H: FileHeader<Endian = Endianness>>(
    data: &ReadCache<File>,
    name: &str,
) -> object::Result<bool> {
    let header = H::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
    let is_found = symbols.iter().any(|symbol| {
        !symbol.is_undefined(endian)
            && symbols
                .symbol_name(endian, symbol)
                .is_ok_and(|found| found == name.as_bytes())
    });
    Ok(is_found)
}

/// The text that a constant `name` holds, up to its first NUL: read from the file, which is not loaded.
///
/// # Errors
/// As [`Elf::read`].
pub fn constant(path: &Path, name: &str) -> Result<Option<String>, String> {
    with_file(
        path,
        |data| constant_of::<elf::FileHeader32<_>>(data, name),
        |data| constant_of::<elf::FileHeader64<_>>(data, name),
    )
}

fn constant_of<H: FileHeader<Endian = Endianness>>(
    data: &ReadCache<File>,
    name: &str,
) -> object::Result<Option<String>> {
    let header = H::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
    let wanted = symbols.iter().find(|symbol| {
        let found = symbols.symbol_name(endian, symbol);
        !symbol.is_undefined(endian) && found.is_ok_and(|found| found == name.as_bytes())
    });
    let Some(symbol) = wanted else {
        return Ok(None);
    };
    let (address, size) = (
        symbol.st_value(endian).into(),
        symbol.st_size(endian).into(),
    );
    let segments = header.program_headers(endian, data)?;
    for segment in segments {
        if let Ok(Some(bytes)) = segment.data_range(endian, data, address, size) {
            let end = bytes.iter().position(|byte| *byte == 0);
            return Ok(Some(text(&bytes[..end.unwrap_or(bytes.len())])));
        }
    }
    Ok(None)
}

/// What a file has to do with MPI's profiling interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Profiling {
    /// It exports functions `MPI_X` as an MPI library does, and is none: it exports no `PMPI_X`.
    pub wraps: bool,
    /// It imports functions `PMPI_X`.
    pub uses_pmpi: bool,
}

/// Whether a file is a tool that wraps MPI functions.
///
/// # Errors
/// As [`Elf::read`].
pub fn profiling(path: &Path) -> Result<Profiling, String> {
    with_file(
        path,
        profiling_of::<elf::FileHeader32<_>>,
        profiling_of::<elf::FileHeader64<_>>,
    )
}

fn profiling_of<H: FileHeader<Endian = Endianness>>(
    data: &ReadCache<File>,
) -> object::Result<Profiling> {
    let header = H::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
    let mut found = Profiling::default();
    let mut is_library = false;
    for symbol in symbols.iter() {
        let name = symbols.symbol_name(endian, symbol).unwrap_or_default();
        match (name, symbol.is_undefined(endian)) {
            ([b'M', b'P', b'I', b'_', ..], false) => found.wraps = true,
            ([b'P', b'M', b'P', b'I', b'_', ..], false) => is_library = true,
            ([b'P', b'M', b'P', b'I', b'_', ..], true) => found.uses_pmpi = true,
            _ => {}
        }
    }
    found.wraps &= !is_library;
    Ok(found)
}

fn with_file<T>(
    path: &Path,
    narrow: impl Fn(&ReadCache<File>) -> object::Result<T>,
    wide: impl Fn(&ReadCache<File>) -> object::Result<T>,
) -> Result<T, String> {
    // Opening a pipe would wait for its other end.
    let meta = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if !meta.is_file() {
        return Err("not a regular file".into());
    }
    let file = File::open(path).map_err(|error| format!("it cannot be read ({error})"))?;
    let data = ReadCache::new(file);
    match FileKind::parse(&data) {
        Ok(FileKind::Elf32) => narrow(&data),
        Ok(FileKind::Elf64) => wide(&data),
        _ => return Err("not an ELF file".into()),
    }
    .map_err(|error| format!("a damaged ELF file ({error})"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn parse<H: FileHeader<Endian = Endianness>>(data: &ReadCache<File>) -> object::Result<Elf> {
    let header = H::parse(data)?;
    let endian = header.endian()?;
    let mut found = Elf {
        bits: if header.is_class_64() { 64 } else { 32 },
        machine: header.e_machine(endian).0,
        ..Elf::default()
    };
    let segments = header.program_headers(endian, data)?;
    for segment in segments {
        if let Some(name) = segment.interpreter(endian, data)? {
            found.interpreter = Some(text(name));
        }
        let Some(entries) = segment.dynamic(endian, data)? else {
            continue;
        };
        found.is_dynamic = true;
        let strings = strings::<H>(segments, entries, endian, data);
        for entry in entries {
            let tag = entry.d_tag(endian);
            if tag == elf::DT_NULL {
                break;
            }
            if tag == elf::DT_FLAGS_1 {
                let flags: u64 = entry.d_val(endian).into();
                found.no_default_places = flags & NO_DEFAULT_LIBRARIES != 0;
                continue;
            }
            let known = [
                elf::DT_NEEDED,
                elf::DT_SONAME,
                elf::DT_RPATH,
                elf::DT_RUNPATH,
            ];
            if !known.contains(&tag) {
                continue;
            }
            let value = text(entry.string(endian, strings)?);
            match tag {
                elf::DT_NEEDED => found.needed.push(value),
                elf::DT_SONAME => found.soname = Some(value),
                elf::DT_RPATH => found.rpath = Some(value),
                _ => found.runpath = Some(value),
            }
        }
    }
    let sections = header.sections(endian, data)?;
    if let Some((mut needs, link)) = sections.gnu_verneed(endian, data)? {
        let strings = sections.strings(endian, data, link)?;
        while let Some((_, mut versions)) = needs.next()? {
            while let Some(version) = versions.next()? {
                found.versions.push(text(version.name(endian, strings)?));
            }
        }
    }
    Ok(found)
}

/// `DF_1_NODEFLIB` of the generic ABI's `DT_FLAGS_1`.
const NO_DEFAULT_LIBRARIES: u64 = 0x800;

/// The dynamic section's strings; it names them by address, and the segments tell where in the file that is.
fn strings<'d, H: FileHeader<Endian = Endianness>>(
    segments: &[H::ProgramHeader],
    entries: &[H::Dyn],
    endian: Endianness,
    data: &'d ReadCache<File>,
) -> StringTable<'d, &'d ReadCache<File>> {
    let value = |tag| -> u64 {
        let entry = entries.iter().find(|entry| entry.d_tag(endian) == tag);
        entry.map_or(0, |entry| entry.d_val(endian).into())
    };
    let (address, size) = (value(elf::DT_STRTAB), value(elf::DT_STRSZ));
    let offset = segments
        .iter()
        .filter(|segment| segment.p_type(endian) == elf::PT_LOAD)
        .find_map(|segment| {
            let start: u64 = segment.p_vaddr(endian).into();
            let inside = address.checked_sub(start)?;
            let stored: u64 = segment.p_filesz(endian).into();
            let offset: u64 = segment.p_offset(endian).into();
            (inside < stored).then(|| offset.checked_add(inside))?
        });
    match offset {
        Some(offset) => StringTable::new(data, offset, offset.saturating_add(size)),
        None => StringTable::default(),
    }
}

fn find<H: FileHeader<Endian = Endianness>>(
    data: &ReadCache<File>,
    wanted: &'static [&'static str],
) -> object::Result<Definitions> {
    let header = H::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let mut found = Definitions::default();
    for kind in [elf::SHT_SYMTAB, elf::SHT_DYNSYM] {
        let symbols = sections.symbols(endian, data, kind)?;
        if kind == elf::SHT_SYMTAB {
            found.stripped = symbols.is_empty();
        }
        for symbol in symbols.iter() {
            if symbol.is_undefined(endian) {
                continue;
            }
            // A name that cannot be read is none of those that are looked for.
            let name = symbols.symbol_name(endian, symbol).unwrap_or_default();
            let known = wanted.iter().find(|known| known.as_bytes() == name);
            found.found.extend(known);
        }
    }
    found.found.sort_unstable();
    found.found.dedup();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_is_a_program_that_needs_the_c_library() {
        let own = std::env::current_exe().expect("own path");
        let elf = Elf::read(&own).expect("an ELF file");
        assert!(elf.is_native() && elf.is_dynamic);
        assert!(
            elf.needed.iter().any(|name| name == "libc.so.6"),
            "{:?}",
            elf.needed
        );
        assert!(elf
            .interpreter
            .is_some_and(|path| Path::new(&path).exists()));
        let defined = definitions(&own, &["main", "PMPI_Init"]).expect("an ELF file");
        assert_eq!(defined.found, ["main"]);
    }

    #[test]
    fn versions_are_numbers() {
        let version = |text| GlibcVersion::parse(text).expect(text);
        assert!(version("2.34") > version("2.4") && version("2.2.5") < version("2.3"));
        assert_eq!(
            (version("2.34").to_string(), version("2.2.5").to_string()),
            ("2.34".into(), "2.2.5".into())
        );
        assert_eq!(GlibcVersion::parse("PRIVATE"), None);
    }

    #[test]
    fn an_older_c_library_is_refused() {
        let version = |text| GlibcVersion::parse(text).expect(text);
        let refused = |needed, has| too_old(Some(version(needed)), version(has));
        assert_eq!(refused("2.34", "2.36"), None);
        assert_eq!(refused("2.34", "2.34"), None);
        assert_eq!(too_old(None, version("2.17")), None);
        let why = refused("2.34", "2.17").expect("too old");
        assert!(why.contains("needs glibc 2.34, here is 2.17"), "{why}");
        assert!(own_glibc() > version("2.17"), "{}", own_glibc());
    }

    #[test]
    fn every_cut_of_a_file_is_an_error_or_a_part() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = std::fs::read(std::env::current_exe().expect("own path")).expect("read");
        let cut = folder.path().join("cut");
        for length in [0, 1, 4, 16, 20, 63, 64, 100, 200, 700, 1000, 5000, 100_000] {
            std::fs::write(&cut, &own[..length.min(own.len())]).expect("written");
            assert!(Elf::read(&cut).is_err(), "{length} bytes");
        }
        assert!(Elf::read(folder.path()).is_err_and(|why| why.contains("regular")));
    }
}
