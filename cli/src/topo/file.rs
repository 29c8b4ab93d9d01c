//! Topology files: those that come with the command, by name, and others by path. One that was written from a measured node
//! has its numbers, too.

use anabranch_engine::config::nearest;
use anabranch_engine::model::{Model, ASSUMED};
use anabranch_engine::topology::file::File;
use anabranch_engine::topology::Topology;
use serde::{Deserialize, Serialize};

use super::source::Source;
use crate::Failure;

#[path = "../../../simcuda/src/broken.rs"]
mod broken;

/// What a file has beside the topology.
#[derive(Serialize, Deserialize)]
struct Numbers {
    /// What was measured of it.
    model: Option<Model>,
}

/// A node as a file that [`read`] reads.
///
/// # Errors
/// It cannot be written as TOML.
pub fn text(source: &Source) -> anyhow::Result<String> {
    let mut text = toml::to_string(&File::of(&source.topology))?;
    if source.measured {
        let model = Some(source.model.clone());
        text += &format!(
            "\n# Measured, but for what is assumed: {}.\n{}",
            ASSUMED.join(", "),
            toml::to_string(&Numbers { model })?
        );
    }
    Ok(text)
}

/// The nodes that the simulated driver ships.
const SHIPPED: [(&str, &str); 4] = [
    (
        "beluga",
        include_str!("../../../simcuda/topologies/beluga.toml"),
    ),
    (
        "narval",
        include_str!("../../../simcuda/topologies/narval.toml"),
    ),
    (
        "dgx1-v100",
        include_str!("../../../simcuda/topologies/dgx1-v100.toml"),
    ),
    (
        "hgx-h200",
        include_str!("../../../simcuda/topologies/hgx-h200.toml"),
    ),
];

/// Names of the nodes that come with the command.
pub fn names() -> [&'static str; SHIPPED.len()] {
    SHIPPED.map(|(name, _)| name)
}

/// What is said of a name that is none of these, and no file for this reason.
pub fn unknown(which: &str, why: &str) -> String {
    let give = format!("give a file or one of {}", names().join(", "));
    match nearest(which, names()) {
        Some(meant) => format!("{why}; did you mean {meant}? Or {give}"),
        None => format!("{why}; {give}"),
    }
}

/// Reads a topology that was named by an option on the command line, and what was measured of it if the file says so.
///
/// # Errors
/// There is no such file, or something is wrong with it; one line.
pub fn read(option: &str, which: &str) -> Result<(Topology, Option<Model>), Failure> {
    let failed = |why: String| Failure::new(2, format!("{option} {which}: {why}"));
    let text = match SHIPPED.iter().find(|(name, _)| *name == which) {
        Some((_, text)) => (*text).to_owned(),
        None => std::fs::read_to_string(which)
            .map_err(|error| failed(unknown(which, &error.to_string())))?,
    };
    let broken = |error: toml::de::Error| failed(broken::broken(&text, &error));
    let file: File = toml::from_str(&text).map_err(broken)?;
    let Numbers { model } = toml::from_str(&text).map_err(broken)?;
    let topology = file.topology().map_err(|error| failed(error.to_string()))?;
    if let Some(model) = &model {
        let checked = model.check_for(&topology);
        checked.map_err(|why| failed(format!("[model]: {why}")))?;
    }
    Ok((topology, model))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_ones_go_by_name() {
        for (name, _) in SHIPPED {
            assert_eq!(read("--topology", name).expect(name).0.name, name);
        }
        let error = read("--topology", "no-such");
        let error = error.expect_err("no file").to_string();
        assert!(
            error.contains("--topology no-such") && error.contains("one of beluga"),
            "{error}"
        );
    }
}
