//! Where the figures of a node come from that was measured before.

use std::path::Path;

use crate::cuda::{self, uuid_text, Uuid};
use crate::model::cache::{self, CacheError};
use crate::transfer::Env;

/// What `anabranch topo --measure` kept of a node that has these GPUs. A process may see only one of them, so
/// the file is found by the GPUs that it lists, not by those seen here.
pub(super) fn kept(file: Option<&Path>, gpus: &[Uuid]) -> Result<cache::Measured, CacheError> {
    let gpus: Vec<String> = gpus.iter().map(uuid_text).collect();
    let driver = cache::driver_text(cuda::version(), cuda::is_simulated());
    match (file, cache::folder()) {
        (Some(file), _) => cache::load_with(file, &gpus, &driver),
        (None, Some(folder)) => cache::find(&folder, &gpus, &driver),
        (None, None) => Err(CacheError::Absent("$HOME/.cache/anabranch".into())),
    }
}

/// Says once a node why there is nothing. It is no fault if nobody has measured.
pub(super) fn tell(env: &Env, is_named: bool, why: &CacheError) {
    let peers = env.node.peers();
    let is_first = peers
        .first()
        .is_none_or(|peer| peer.world_rank() == env.world_rank);
    let level = match why {
        CacheError::Absent(_) if !is_named => log::Level::Info,
        _ if is_first => log::Level::Warn,
        _ => log::Level::Debug,
    };
    log::log!(level, "paths are measured while the program runs: {why}");
}

/// The identity that [`uuid_text`] has turned into this text.
pub(super) fn uuid(text: &str) -> Option<Uuid> {
    let digits: String = text.strip_prefix("GPU-")?.split('-').collect();
    let is_hex = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let number = is_hex.then(|| u128::from_str_radix(&digits, 16));
    Some(number?.ok()?.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_read_as_they_are_written() {
        let known: Uuid = std::array::from_fn(|at| at as u8 * 17);
        assert_eq!(
            uuid_text(&known),
            "GPU-00112233-4455-6677-8899-aabbccddeeff"
        );
        assert_eq!(uuid(&uuid_text(&known)), Some(known));
        for bad in [
            "",
            "GPU-",
            "GPU-00112233",
            "MIG-0",
            "GPU-+0112233-4455-6677-8899-aabbccddeeff",
        ] {
            assert_eq!(uuid(bad), None, "{bad}");
        }
    }
}
