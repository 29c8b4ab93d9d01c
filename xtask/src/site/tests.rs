use super::*;

const CONTENTS_OF_TWO: &str =
    "[Start](../README.md)\n\n- [All](all/README.md)\n- [Last](last.md)\n";

fn site() -> Site {
    let read = |name: &str| match name {
        "README.md" => Ok("# Start\n".to_owned()),
        "docs/all/README.md" => Ok("[`one` thing](one.md), [last](../last.md)\n".to_owned()),
        "docs/all/one.md" => Ok("# One\n\n## What `it` does: all\n\n## One\n".to_owned()),
        "docs/last.md" => Ok("# Last\n".to_owned()),
        other => Err(format!("cannot read {other}")),
    };
    Site::read(CONTENTS_OF_TWO, &read).expect("a site")
}

/// The page `docs/last.md` with this text, and the files that it needs.
fn page(text: &str) -> Result<(String, Vec<String>), Vec<String>> {
    let there = ["src/lib.rs", "docs/a.svg", "docs/SUMMARY.md"];
    let mut copied = BTreeSet::new();
    let exists = |path: &str| there.contains(&path);
    let page = site().page("docs/last.md", text, &exists, &mut copied)?;
    Ok((page, copied.into_iter().collect()))
}

#[test]
fn contents_have_what_an_index_lists() {
    let summary = site().summary(CONTENTS_OF_TWO).expect("contents");
    let wanted = "[Start](index.md)\n\n- [All](docs/all/index.md)\n  - [`one` thing](docs/all/one.md)\n- [Last](docs/last.md)\n";
    assert_eq!(summary, wanted);
}

#[test]
fn links_lead_to_places_of_the_site() {
    let text = "[a](../README.md) [b](all/README.md#x) ![c](a.svg)\n`[d](gone.md)`\n";
    // The index has no heading x.
    assert_eq!(page(text).unwrap_err().len(), 1);
    let (shown, copied) = page(&text.replace("#x", "")).expect("a page");
    assert_eq!(
        shown,
        "[a](../index.md) [b](all/index.md) ![c](a.svg)\n`[d](gone.md)`\n"
    );
    assert_eq!(copied, ["docs/a.svg"]);
    let headings = "[a](all/one.md#what-it-does-all) [b](all/one.md#one-1) [c](https://x.org/y#z)";
    assert_eq!(page(headings).expect("a page").0, headings);
}

#[test]
fn sources_become_code() {
    let (shown, copied) =
        page("[the library](../src/lib.rs) [`src/lib.rs`](../src/lib.rs)").expect("a page");
    assert_eq!(shown, "the library (`src/lib.rs`) `src/lib.rs`");
    assert!(copied.is_empty());
    let (shown, copied) = page("[contents](SUMMARY.md)").expect("a page");
    assert_eq!(shown, "contents (`docs/SUMMARY.md`)");
    assert!(copied.is_empty());
}

#[test]
fn dead_links_are_named_with_their_line() {
    let faults =
        page("# Last\n\n| a |\n| --- |\n| [x](gone.md) |\n\n[y](../../out.md)\n").unwrap_err();
    let wanted = [
        "docs/last.md:5: gone.md leads nowhere",
        "docs/last.md:7: ../../out.md leads out of the repository",
    ];
    assert_eq!(faults, wanted);
    let fault = page("[x][y]\n\n[y]: gone.md\n").unwrap_err();
    assert!(
        fault[0].starts_with("docs/last.md:1: write the link as"),
        "{fault:?}"
    );
}
