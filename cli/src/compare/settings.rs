//! The configurations that are compared: what each is called, whether it has the library, and its variables.

use std::collections::BTreeMap;

/// Variables of a configuration.
pub type Variables = BTreeMap<String, String>;

/// What the library can be told while it runs, too.
pub const PATHS: &str = "ANABRANCH_PATHS";

/// The configuration whose variables a sweep chooses for each row.
pub const BEST: &str = "best";

/// Configurations of the library that go by a name: which paths a long message may take, and who makes the copies. Those given
/// by the user take the place of these.
const PRESETS: [&str; 5] = [
    "one=ANABRANCH_PATHS=direct",
    "relays=ANABRANCH_PATHS=direct,relay",
    "host=ANABRANCH_PATHS=direct,host",
    "all=ANABRANCH_PATHS=direct,relay,host",
    "driven=ANABRANCH_OWNER=one,ANABRANCH_PATHS=direct,relay,host",
];

/// One configuration.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Setting {
    /// Its name in every table.
    pub name: String,
    /// Whether the ranks have the library preloaded.
    pub preload: bool,
    /// What is set in the ranks.
    pub variables: Variables,
}

impl Setting {
    fn new(name: &str, preload: bool) -> Setting {
        Setting {
            name: name.into(),
            preload,
            variables: Variables::new(),
        }
    }

    /// Its variables but for those that the library can be told while it runs.
    pub fn without_paths(&self) -> Variables {
        let mut variables = self.variables.clone();
        variables.remove(PATHS);
        variables
    }

    /// Whether its variables come from the sweep.
    pub fn is_best(&self) -> bool {
        self.name.strip_suffix('2').unwrap_or(&self.name) == BEST
    }

    /// What it is, in one line.
    pub fn describe(&self) -> String {
        let what = match (self.preload, self.is_best()) {
            (true, _) => "with the library",
            (false, true) => "without the library, the best of the sweep for each row",
            (false, false) => "without the library",
        };
        let variables: String = self
            .variables
            .iter()
            .map(|(name, value)| format!(" {name}={value}"))
            .collect();
        format!("{what}{variables}")
    }
}

/// Reads `NAME=VAR=VALUE,VAR=VALUE`. A piece without `=` belongs to the value before it, which may so be a list.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn parse(text: &str) -> Result<(String, Variables), String> {
    let wrong = || format!("{text:?}: write NAME=VAR=VALUE,VAR=VALUE");
    let (name, rest) = text.split_once('=').ok_or_else(wrong)?;
    let is_name = |name: &str| {
        !name.is_empty()
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "_-.+".contains(c))
    };
    if !is_name(name) {
        return Err(wrong());
    }
    let mut variables = Variables::new();
    let mut last: Option<String> = None;
    for piece in rest.split(',') {
        match (piece.split_once('='), &last) {
            (Some((variable, value)), _) if is_name(variable) => {
                variables.insert(variable.into(), value.into());
                last = Some(variable.into());
            }
            (None, Some(variable)) => {
                if let Some(value) = variables.get_mut(variable) {
                    value.push(',');
                    value.push_str(piece);
                }
            }
            _ => return Err(wrong()),
        }
    }
    Ok((name.into(), variables))
}

/// The configurations in the order in which they take turns.
///
/// # Errors
/// A name that means nothing, or means two things.
pub fn choose(
    names: &[String],
    with: &[(String, Variables)],
    without: &[(String, Variables)],
) -> Result<Vec<Setting>, String> {
    let mut known = vec![
        Setting::new("vanilla", false),
        Setting::new(BEST, false),
        Setting::new("anabranch", true),
    ];
    let is_given = |name: &String| with.iter().chain(without).any(|given| given.0 == *name);
    let presets = PRESETS.iter().filter_map(|text| parse(text).ok());
    known.extend(
        presets
            .filter(|(name, _)| !is_given(name))
            .map(|(name, variables)| Setting {
                variables,
                ..Setting::new(&name, true)
            }),
    );
    let given = with
        .iter()
        .map(|given| (given, true))
        .chain(without.iter().map(|given| (given, false)));
    let mut chosen = Vec::new();
    for ((name, variables), preload) in given {
        if known.iter().any(|setting| setting.name == *name) {
            return Err(format!("two configurations are called {name}"));
        }
        let setting = Setting {
            variables: variables.clone(),
            ..Setting::new(name, preload)
        };
        known.push(setting.clone());
        chosen.push(setting);
    }
    let mut settings: Vec<Setting> = Vec::new();
    for name in names {
        let find = |name: &str| known.iter().find(|setting| setting.name == name);
        let twin = name.strip_suffix('2').and_then(find);
        let setting = find(name).or(twin).ok_or_else(|| {
            let names: Vec<&str> = known.iter().map(|setting| setting.name.as_str()).collect();
            format!(
                "no configuration {name}: {}, or one of them with a 2 for the same once more",
                names.join(", ")
            )
        })?;
        settings.push(Setting {
            name: name.clone(),
            ..setting.clone()
        });
    }
    let left = chosen
        .into_iter()
        .filter(|setting| !names.contains(&setting.name));
    settings.extend(left);
    Ok(settings)
}

/// What the sweep of UCX's own settings tries; the first is what UCX does by itself.
pub fn ucx() -> Vec<(String, Variables)> {
    [
        "default=UCX_RNDV_SCHEME=auto",
        "get=UCX_RNDV_SCHEME=get_zcopy",
        "put=UCX_RNDV_SCHEME=put_zcopy",
        "thresh1K=UCX_RNDV_THRESH=1024",
        "thresh64K=UCX_RNDV_THRESH=65536",
        "proto1=UCX_PROTO_ENABLE=n",
        "proto1-put=UCX_PROTO_ENABLE=n,UCX_RNDV_SCHEME=put_zcopy",
        "frag-cuda=UCX_RNDV_FRAG_MEM_TYPES=cuda",
        "zcopy1=UCX_ZCOPY_THRESH=1",
    ]
    .iter()
    .filter_map(|text| parse(text).ok())
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_may_be_lists() {
        let (name, variables) =
            parse("two=ANABRANCH_PATHS=direct,host,ANABRANCH_LANES=2").expect("well formed");
        assert_eq!(name, "two");
        assert_eq!(variables["ANABRANCH_PATHS"], "direct,host");
        assert_eq!(variables["ANABRANCH_LANES"], "2");
        for text in ["", "x", "=A=1", "x=", "x=A", "a b=A=1", "x=A=1,=2"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!(ucx().len(), 9);
    }

    fn described(chosen: &[Setting]) -> Vec<String> {
        let rows = chosen.iter();
        rows.map(|setting| format!("{}: {}", setting.name, setting.describe()))
            .collect()
    }

    #[test]
    fn a_name_of_ones_own_is_ones_own() {
        let with = [
            parse("all=A=1").expect("well formed"),
            parse("x=A=2").expect("well formed"),
        ];
        let names: Vec<String> = ["all", "one2"].map(String::from).into();
        let chosen = choose(&names, &with, &[]).expect("known");
        assert_eq!(
            described(&chosen),
            [
                "all: with the library A=1",
                "one2: with the library ANABRANCH_PATHS=direct",
                "x: with the library A=2"
            ]
        );
    }

    #[test]
    fn a_two_is_the_same_once_more() {
        let names = |list: &[&str]| -> Vec<String> { list.iter().map(|&n| n.into()).collect() };
        let with = [parse("x=A=1").expect("well formed")];
        let chosen = choose(&names(&["vanilla", "x2", "vanilla2"]), &with, &[]).expect("known");
        assert_eq!(
            described(&chosen),
            [
                "vanilla: without the library",
                "x2: with the library A=1",
                "vanilla2: without the library",
                "x: with the library A=1"
            ]
        );
        let unknown = choose(&names(&["nothing"]), &[], &[]).expect_err("unknown");
        let all = "vanilla, best, anabranch, one, relays, host, all, driven, or one";
        assert!(unknown.contains(all), "{unknown}");
        assert!(choose(&[], &[parse("best=A=1").expect("well formed")], &[]).is_err());
    }
}
