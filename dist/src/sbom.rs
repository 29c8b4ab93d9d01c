//! The software bill of materials: every crate that is linked into the packages, as CycloneDX JSON.

use anabranch_dist::release::Release;
use anyhow::{Context, Result};
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package, PackageId};
use serde_json::{json, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// What is built.
const ROOTS: [&str; 4] = [
    "anabranch-preload",
    "anabranch-ucx",
    "anabranch-cli",
    "simcuda",
];

/// The document.
pub fn make(release: &Release) -> Result<String> {
    let mut command = MetadataCommand::new();
    command.current_dir(&release.root);
    let target = release.machine.target();
    command.other_options(["--locked".into(), "--filter-platform".into(), target]);
    let metadata = command.exec().context("cargo metadata")?;
    let linked = linked(&metadata)?;
    let sums = checksums(&fs::read_to_string(release.root.join("Cargo.lock"))?);
    let packages: BTreeMap<&PackageId, &Package> = metadata
        .packages
        .iter()
        .map(|package| (&package.id, package))
        .collect();
    let named = |id: &PackageId| packages.get(id).map(|package| purl(package));
    let mut components: Vec<Value> = Vec::new();
    let mut dependencies: Vec<Value> = Vec::new();
    for (id, uses) in &linked {
        let package = packages
            .get(id)
            .context("a package without a description")?;
        components.push(component(package, &sums));
        let uses: BTreeSet<String> = uses.iter().filter_map(named).collect();
        dependencies.push(json!({ "ref": purl(package), "dependsOn": uses }));
    }
    let by =
        |key: &'static str| move |value: &Value| value[key].as_str().unwrap_or_default().to_owned();
    components.sort_by_key(by("purl"));
    dependencies.sort_by_key(by("ref"));
    let own = json!({
        "type": "application", "name": "anabranch", "version": release.version, "bom-ref": "anabranch",
        "licenses": [{ "expression": "MIT OR Apache-2.0" }],
        "properties": [{ "name": "commit", "value": release.commit }],
    });
    let document = json!({
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": { "timestamp": format!("{}T00:00:00Z", release.date), "component": own },
        "components": components, "dependencies": dependencies,
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

/// Which packages are linked, each with those that it uses: not what only builds or tests it.
fn linked(metadata: &Metadata) -> Result<BTreeMap<PackageId, Vec<PackageId>>> {
    let graph = metadata
        .resolve
        .as_ref()
        .context("cargo metadata resolved nothing")?;
    let is_root = |package: &&Package| ROOTS.contains(&package.name.as_str());
    let roots = metadata.packages.iter().filter(is_root);
    let mut open: Vec<PackageId> = roots.map(|package| package.id.clone()).collect();
    let mut found = BTreeMap::new();
    while let Some(id) = open.pop() {
        let node = graph.nodes.iter().find(|node| node.id == id);
        let node = node.context("a package that was not resolved")?;
        let is_normal = |kind: &cargo_metadata::DepKindInfo| kind.kind == DependencyKind::Normal;
        let used = node
            .deps
            .iter()
            .filter(|dep| dep.dep_kinds.iter().any(is_normal));
        // Code that runs in the compiler is not linked.
        let is_macro = |id: &PackageId| {
            let package = metadata.packages.iter().find(|package| package.id == *id);
            package
                .is_some_and(|package| package.targets.iter().any(|target| target.is_proc_macro()))
        };
        let used: Vec<PackageId> = used
            .map(|dep| dep.pkg.clone())
            .filter(|id| !is_macro(id))
            .collect();
        open.extend(used.iter().filter(|id| !found.contains_key(*id)).cloned());
        found.insert(id, used);
    }
    Ok(found)
}

fn purl(package: &Package) -> String {
    format!("pkg:cargo/{}@{}", package.name, package.version)
}

fn component(package: &Package, sums: &BTreeMap<(String, String), String>) -> Value {
    let mut component = json!({
        "type": "library", "name": package.name.as_str(), "version": package.version.to_string(),
        "purl": purl(package), "bom-ref": purl(package),
    });
    if let Some(license) = &package.license {
        // Some crates still write a slash for "or".
        let license = license.replace('/', " OR ");
        component["licenses"] = json!([{ "expression": license }]);
    }
    let key = (package.name.to_string(), package.version.to_string());
    if let Some(sum) = sums.get(&key) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
    }
    component
}

/// The sums of `Cargo.lock`, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let mut sums = BTreeMap::new();
    for package in lock.split("[[package]]") {
        let field = |name: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(name));
            line.map(|value| value.trim_matches(['=', ' ', '"']).to_owned())
        };
        if let (Some(name), Some(version), Some(sum)) =
            (field("name "), field("version "), field("checksum "))
        {
            sums.insert((name, version), sum);
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_lock_file() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"ff\"\n\n[[package]]\nname = \"own\"\nversion = \"2.0.0\"\n";
        let key = ("a".to_owned(), "1.0.0".to_owned());
        assert_eq!(checksums(lock), BTreeMap::from([(key, "ff".to_owned())]));
    }
}
