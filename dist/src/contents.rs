//! What is in every package, and where each kind of package has it.

use crate::build::Built;
use anabranch_dist::release::Release;
use anabranch_dist::tree::Tree;
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;

/// Where a package puts its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Below one folder, wherever that is.
    Prefix,
    /// Below `/usr`, as Debian has it.
    Debian,
    /// Below `/usr`, as distributions with RPM have it.
    Rpm,
    /// Below the folder of a Python environment; it has no symbolic links.
    Python,
}

/// The files of a release.
pub struct Contents<'a> {
    release: &'a Release,
    built: &'a Built,
    sbom: String,
}

/// The document that lists what was linked.
const SBOM: &str = "anabranch.cdx.json";

impl<'a> Contents<'a> {
    /// Everything, with a list of what was linked.
    pub fn gather(release: &'a Release, built: &'a Built, sbom: String) -> Result<Contents<'a>> {
        Ok(Contents {
            release,
            built,
            sbom,
        })
    }

    /// The list of what was linked.
    pub fn sbom(&self) -> &str {
        &self.sbom
    }

    /// All files, below the prefix of a package.
    pub fn tree(&self, place: Place) -> Result<Tree> {
        let lib = self.lib(place);
        let mut tree = Tree::default();
        tree.add_program("bin/anabranch", &self.built.command, true)?;
        self.libraries(&mut tree, place, &lib)?;
        tree.add_copy("include/anabranch.h", &self.file("include/anabranch.h"))?;
        tree.add(
            format!("{lib}/pkgconfig/anabranch.pc"),
            self.pkg_config(&lib),
        );
        self.topologies(&mut tree)?;
        self.shells(&mut tree, place);
        for page in sorted(&self.built.manual)? {
            tree.add_copy(
                format!("share/man/man1/{page}"),
                &self.built.manual.join(&page),
            )?;
        }
        if place != Place::Python {
            self.documents(&mut tree)?;
            let module = format!(
                "share/anabranch/modulefiles/anabranch/{}",
                self.release.version
            );
            tree.add(module, self.filled(include_str!("../files/modulefile")));
        }
        Ok(tree)
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.release.root.join(name)
    }

    /// A template with the release's version, commit and machine.
    pub fn filled(&self, template: &str) -> String {
        let release = self.release;
        template
            .replace("@VERSION@", &release.version)
            .replace("@COMMIT@", &release.commit)
            .replace("@MACHINE@", release.machine.name())
            .replace("@DEBIAN@", release.machine.debian())
    }

    fn lib(&self, place: Place) -> String {
        match place {
            Place::Prefix | Place::Python => "lib".into(),
            Place::Debian => format!("lib/{}", self.release.machine.multiarch()),
            Place::Rpm => "lib64".into(),
        }
    }

    /// The library under its versioned name, and the simulator. Links lead to files of the same name, so that no process loads
    /// two copies of one.
    fn libraries(&self, tree: &mut Tree, place: Place, lib: &str) -> Result<()> {
        let built = self.built;
        let private = match place {
            Place::Rpm => "lib64/anabranch/simcuda",
            _ => "lib/anabranch/simcuda",
        };
        tree.add_copy(format!("{private}/libcuda.so.1"), &built.simcuda)?;
        tree.add_copy(format!("{lib}/libanabranch_ucx.so"), &built.ucx)?;
        if place == Place::Python {
            return tree.add_copy(format!("{lib}/libanabranch.so"), &built.library);
        }
        tree.link(format!("{private}/libcuda.so"), "libcuda.so.1");
        tree.link(format!("{private}/libnvidia-ml.so.1"), "libcuda.so.1");
        let version = &self.release.version;
        let major = version.split('.').next().unwrap_or_default();
        let (soname, file) = (
            format!("libanabranch.so.{major}"),
            format!("libanabranch.so.{version}"),
        );
        tree.add_copy(format!("{lib}/{file}"), &built.library)?;
        tree.link(format!("{lib}/{soname}"), file);
        tree.link(format!("{lib}/libanabranch.so"), soname);
        Ok(())
    }

    fn pkg_config(&self, lib: &str) -> String {
        let up = "/..".repeat(lib.split('/').count() + 1);
        self.filled(include_str!("../files/anabranch.pc"))
            .replace("@UP@", &up)
            .replace("@LIB@", lib)
    }

    fn topologies(&self, tree: &mut Tree) -> Result<()> {
        let folder = self.file("simcuda/topologies");
        for name in sorted(&folder)? {
            tree.add_copy(
                format!("share/anabranch/topologies/{name}"),
                &folder.join(&name),
            )?;
        }
        Ok(())
    }

    fn shells(&self, tree: &mut Tree, place: Place) {
        let [bash, zsh, fish] = self.built.completions.clone();
        tree.add("share/bash-completion/completions/anabranch", bash);
        let zsh_folder = match place {
            Place::Debian => "share/zsh/vendor-completions",
            _ => "share/zsh/site-functions",
        };
        tree.add(format!("{zsh_folder}/_anabranch"), zsh);
        tree.add("share/fish/vendor_completions.d/anabranch.fish", fish);
    }

    fn documents(&self, tree: &mut Tree) -> Result<()> {
        let folder = "share/doc/anabranch";
        for name in ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            tree.add_copy(format!("{folder}/{name}"), &self.file(name))?;
        }
        for name in [
            "packages.md",
            "recipes.md",
            "troubleshooting.md",
            "statistics.md",
            "tracing.md",
        ] {
            tree.add_copy(
                format!("{folder}/docs/{name}"),
                &self.file(&format!("docs/{name}")),
            )?;
        }
        tree.add(format!("{folder}/{SBOM}"), self.sbom.clone());
        Ok(())
    }
}

/// Names in a folder, sorted.
fn sorted(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}
