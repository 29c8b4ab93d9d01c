//! Generates what follows from the table of MPI functions.

#[cfg(test)]
mod headers_test;
mod large;
mod table;
mod write;

use std::path::{Path, PathBuf};

/// The files that follow from the table, by path below the repository root.
fn generate() -> Result<Vec<(&'static str, String)>, String> {
    let sections = read_table()?;
    Ok(vec![
        ("src/mpi/generated.rs", write::engine(&sections)?),
        ("src/mpi/large/generated.rs", large::functions(&sections)?),
        (
            "src/entry/persistent_collectives.rs",
            large::persistent(&sections)?,
        ),
        ("wrappers/src/generated.rs", write::wrappers(&sections)?),
        ("docs/mpi-coverage.md", write::coverage(&sections)),
    ])
}

/// Writes the generated files; with `--check`, only compares them and fails when one is stale; with `--entries`, prints
/// the signatures that the engine's entry points must have.
pub fn run(arguments: &[String]) -> Result<(), String> {
    match arguments
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .as_slice()
    {
        [] => generate()?
            .into_iter()
            .try_for_each(|(path, text)| update(&root().join(path), &text)),
        ["--check"] => check(),
        ["--entries"] => {
            print!("{}", write::entries(&read_table()?)?);
            Ok(())
        }
        other => Err(format!(
            "codegen does not know {other:?}; use --check, --entries or nothing"
        )),
    }
}

fn check() -> Result<(), String> {
    for (path, expected) in generate()? {
        let present = std::fs::read_to_string(root().join(path)).unwrap_or_default();
        if present != expected {
            return Err(format!("{path} is not current; run cargo xtask codegen"));
        }
    }
    Ok(())
}

fn read_table() -> Result<Vec<table::Section>, String> {
    let path = root().join("src/mpi/functions.txt");
    let text =
        std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    table::parse(&text).map_err(|error| error.to_string())
}

/// Writes a file only if it changes, so that nothing is rebuilt for nothing.
fn update(path: &Path, text: &str) -> Result<(), String> {
    if std::fs::read_to_string(path).is_ok_and(|present| present == text) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

#[cfg(test)]
mod tests {
    #[test]
    fn generated_files_are_current() {
        assert_eq!(super::check(), Ok(()));
    }
}
