//! Which MPI the process uses, by three marks that must agree: the soname, the version string, characteristic symbols.

use super::constants::{Abi, Family};
use super::library::{self, Library};
use std::ffi::{c_char, c_int, CStr};
use std::sync::OnceLock;

/// The outcome of looking at the MPI library in this process.
struct Detected {
    abi: Option<Abi>,
    version: String,
}

static DETECTED: OnceLock<Detected> = OnceLock::new();

/// The ABI of the MPI library in this process; `None` while there is none, and for good where it is not a known one.
#[inline]
pub fn abi() -> Option<&'static Abi> {
    match DETECTED.get() {
        Some(detected) => detected.abi.as_ref(),
        None => detected()?.abi.as_ref(),
    }
}

/// First line of what `MPI_Get_library_version` says, if an MPI library is in the process.
pub fn library_version() -> Option<&'static str> {
    detected().and_then(|detected| detected.version.lines().next())
}

#[cold]
fn detected() -> Option<&'static Detected> {
    let library = library::find()?;
    Some(DETECTED.get_or_init(|| detect(library)))
}

fn detect(library: &Library) -> Detected {
    let version = version(library);
    let abi = identify(library, &version);
    match &abi {
        Ok(abi) => log::debug!("MPI library {} ({:?}): {}", library.path, abi.family, first_line(&version)),
        Err(reason) => log::warn!(
            "MPI library {} ({}) is not a known one: {reason}; every message stays native. \
             Known are Open MPI 4 and 5 (libmpi.so.40), the MPICH family (libmpi.so.12) and the MPI 5 ABI \
             (libmpi_abi.so.1); ANABRANCH=off silences this",
            library.path,
            first_line(&version)
        ),
    }
    Detected {
        abi: abi.ok(),
        version,
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or("no version string")
}

/// The family that a soname promises.
pub fn known_soname(soname: &str) -> Option<Family> {
    let (stem, version) = soname.split_once(".so.")?;
    if !stem.contains("mpi") {
        return None;
    }
    match version {
        "1" if stem.ends_with("_abi") => Some(Family::Standard),
        "12" => Some(Family::Mpich),
        "40" => Some(Family::OpenMpi),
        _ => None,
    }
}

/// What a version string says of the family. A library of the standard ABI may be anyone's.
fn family_of_version(version: &str) -> Option<Family> {
    const OPEN_MPI: [&str; 2] = ["Open MPI", "IBM Spectrum MPI"];
    const MPICH: [&str; 4] = ["MPICH", "Intel(R) MPI", "MVAPICH", "ParaStation"];
    if OPEN_MPI.iter().any(|name| version.contains(name)) {
        Some(Family::OpenMpi)
    } else if MPICH.iter().any(|name| version.contains(name)) {
        Some(Family::Mpich)
    } else {
        None
    }
}

fn identify(library: &Library, version: &str) -> Result<Abi, String> {
    let promised =
        known_soname(&library.soname).ok_or_else(|| format!("soname {}", library.soname))?;
    let said = family_of_version(version);
    if promised != Family::Standard && said != Some(promised) {
        return Err(format!(
            "soname {} is that of {promised:?}, the version string is not",
            library.soname
        ));
    }
    match promised {
        Family::Mpich => Ok(Abi::MPICH),
        Family::Standard => match abi_version(library) {
            Some(1) => Ok(Abi::STANDARD),
            Some(other) => Err(format!("version {other} of the standard ABI")),
            None => Err("soname of the standard ABI, but no MPI_Abi_get_version".to_owned()),
        },
        Family::OpenMpi => Abi::open_mpi(|name| library.data_symbol(name).map(<*mut _>::addr))
            .map_err(|symbol| format!("soname of Open MPI, but no symbol {symbol}")),
    }
}

/// What `MPI_Get_library_version` says; it may be called before MPI_Init (MPI 3.0, section 8.1.1).
fn version(library: &Library) -> String {
    // The largest MPI_MAX_LIBRARY_VERSION_STRING of the known ABIs is 8192; an unknown one may write more.
    const ROOM: usize = 65536;
    let Some(function) = library.symbol(c"PMPI_Get_library_version") else {
        return String::new();
    };
    let mut text = vec![0_u8; ROOM];
    let mut length: c_int = 0;
    // SAFETY: every MPI gives this function this C signature (MPI 3.0, section 8.1.1).
    let function = unsafe {
        std::mem::transmute::<*mut _, unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int>(
            function,
        )
    };
    // SAFETY: the buffer is at least MPI_MAX_LIBRARY_VERSION_STRING bytes long.
    unsafe { function(text.as_mut_ptr().cast(), &raw mut length) };
    match CStr::from_bytes_until_nul(&text) {
        Ok(version) => version.to_string_lossy().into_owned(),
        Err(_) => String::new(),
    }
}

/// Major version of the standard ABI that the library implements.
fn abi_version(library: &Library) -> Option<c_int> {
    let function = library.symbol(c"PMPI_Abi_get_version")?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: MPI 5.0 gives this function this C signature.
    let function = unsafe {
        std::mem::transmute::<*mut _, unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(
            function,
        )
    };
    // SAFETY: both results are local variables; the function may be called at any time (MPI 5.0).
    let code = unsafe { function(&raw mut major, &raw mut minor) };
    (code == 0).then_some(major)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sonames() {
        for (soname, family) in [
            ("libmpi.so.40", Some(Family::OpenMpi)),
            ("libmpi.so.12", Some(Family::Mpich)),
            ("libmpich.so.12", Some(Family::Mpich)),
            ("libmpi_cray.so.12", Some(Family::Mpich)),
            ("libmpi_abi.so.1", Some(Family::Standard)),
            ("libmpi.so.1", None),
            ("libmpi.so.20", None),
            ("libmpi.so", None),
            ("libfabric.so.12", None),
        ] {
            assert_eq!(known_soname(soname), family, "{soname}");
        }
    }

    #[test]
    fn version_strings_as_libraries_print_them() {
        for (version, family) in [
            ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022", Some(Family::OpenMpi)),
            ("MPICH Version:\t4.0.2\nMPICH Release date:\tThu Apr  7 12:34:45 CDT 2022", Some(Family::Mpich)),
            ("Intel(R) MPI Library 2021.9 for Linux* OS", Some(Family::Mpich)),
            ("MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)", Some(Family::Mpich)),
            ("MVAPICH2 Version      :\t2.3.7", Some(Family::Mpich)),
            ("Fujitsu MPI Library 4.0.1", None),
        ] {
            assert_eq!(family_of_version(version), family, "{version}");
        }
    }
}
