//! Options by the names that they had before: accepted in this release, and told of once a job
//! (`docs/names.md`).

use std::ffi::OsString;

/// A former name, the present one, and words that were renamed with it.
struct Former {
    name: &'static str,
    now: &'static str,
    words: &'static [(&'static str, &'static str)],
}

const fn former(name: &'static str, now: &'static str) -> Former {
    Former {
        name,
        now,
        words: &[],
    }
}

const FORMER: &[Former] = &[
    former("ANABRANCH_INVITE", "ANABRANCH_RTR"),
    former("ANABRANCH_FORESEE", "ANABRANCH_EARLY_MATCH"),
    Former {
        name: "ANABRANCH_ASSIGN",
        now: "ANABRANCH_OWNER",
        words: &[("own", "two")],
    },
    former("ANABRANCH_ORDER", "ANABRANCH_LAUNCH_ORDER"),
    former("ANABRANCH_PATH_STAGING", "ANABRANCH_MULTIPATH_STAGING"),
    former("ANABRANCH_GPU_RING", "ANABRANCH_GPU_PIPELINE"),
    former("ANABRANCH_PUSH", "ANABRANCH_PUT"),
];

/// Whether an option had this name.
pub fn is_known(name: &str) -> bool {
    FORMER.iter().any(|former| former.name == name)
}

/// The value of an option: under its present name, or else under its former one.
pub fn look_up(name: &str, by: impl Fn(&str) -> Option<OsString>) -> Option<OsString> {
    let value = |name: &str| by(name).filter(|value| !value.is_empty());
    let former = FORMER.iter().find(|former| former.now == name);
    let (Some(former), None) = (former, value(name)) else {
        return by(name);
    };
    let value = value(former.name)?;
    let renamed = former.words.iter().find(|(word, _)| value == **word);
    Some(renamed.map_or(value, |(_, now)| OsString::from(*now)))
}

/// One line that tells which options are set by their former names.
pub fn notice(by: impl Fn(&str) -> Option<OsString>) -> Option<String> {
    let is_set = |name: &str| by(name).is_some_and(|value| !value.is_empty());
    let used = FORMER.iter().filter(|former| is_set(former.name));
    let renamed: Vec<String> = used
        .map(|former| format!("{} is now {}", former.name, former.now))
        .collect();
    (!renamed.is_empty()).then(|| {
        let list = renamed.join(", ");
        format!("{list}: the former names work in this release only (docs/names.md)")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Owner, NAMES};

    fn given(set: &[(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
        let set: Vec<(String, OsString)> = set
            .iter()
            .map(|(name, value)| ((*name).into(), (*value).into()))
            .collect();
        move |name| {
            let found = set.iter().find(|(known, _)| known == name);
            found.map(|(_, value)| value.clone())
        }
    }

    #[test]
    fn options_are_read_by_their_former_names() {
        let set = [
            ("ANABRANCH_INVITE", "off"),
            ("ANABRANCH_ASSIGN", "one"),
            ("ANABRANCH_PUSH", "1M"),
        ];
        let (config, warnings) = Config::from_lookup(given(&set));
        assert_eq!(
            (config.rtr, config.owner, config.put),
            (false, Owner::One, 1 << 20)
        );
        assert!(warnings.is_empty(), "{warnings:?}");
        let (config, warnings) = Config::from_lookup(given(&[("ANABRANCH_ASSIGN", "own")]));
        assert_eq!(config.owner, Owner::Two);
        assert!(warnings.is_empty(), "{warnings:?}");
    }

    #[test]
    fn the_present_name_counts_where_both_are_set() {
        let set = [("ANABRANCH_PUT", "2M"), ("ANABRANCH_PUSH", "1M")];
        assert_eq!(Config::from_lookup(given(&set)).0.put, 2 << 20);
        let set = [("ANABRANCH_PUT", ""), ("ANABRANCH_PUSH", "1M")];
        assert_eq!(Config::from_lookup(given(&set)).0.put, 1 << 20);
    }

    #[test]
    fn one_line_tells_of_all() {
        assert_eq!(notice(given(&[("ANABRANCH_RTR", "off")])), None);
        let set = [("ANABRANCH_INVITE", "off"), ("ANABRANCH_ORDER", "x")];
        let text = notice(given(&set)).expect("a notice");
        assert!(
            text.contains("ANABRANCH_INVITE is now ANABRANCH_RTR"),
            "{text}"
        );
        assert!(
            text.contains("ANABRANCH_ORDER is now ANABRANCH_LAUNCH_ORDER"),
            "{text}"
        );
        assert!(!text.contains('\n'), "{text}");
    }

    #[test]
    fn every_present_name_is_an_option() {
        for former in FORMER {
            assert!(NAMES.contains(&former.now) && !NAMES.contains(&former.name));
        }
    }
}
