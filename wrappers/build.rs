//! Link options of the preload library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(native_entries)");
    // Helper threads run its code, so it must stay even where something closes it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // A symbol that no library has is an error here, and not in a job: the loader would leave the library out.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
    // Its interface (include/anabranch.h) changes with the major version only.
    let soname = format!("libanabranch.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{soname}");
}
