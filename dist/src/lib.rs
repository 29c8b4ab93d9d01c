//! What packages are made of, and where what they hold can be loaded. `cargo xtask dist` is the program that makes them; it needs the
//! feature `packages`.

pub mod packed;
pub mod release;
pub mod symbols;
pub mod tree;
