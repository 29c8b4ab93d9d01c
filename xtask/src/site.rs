//! `cargo xtask site`: stages the documents of the repository for mdBook. They keep their places, so that links between them
//! stay as they are; the contents are `docs/SUMMARY.md`, and what the index of a folder lists.

use pulldown_cmark::{Event, LinkType, Options, Parser, Tag, TagEnd};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::Path;
use xtask::layout::Layout;

const CONTENTS: &str = "docs/SUMMARY.md";
const SETTINGS: &str = "docs/book.toml";
/// Folders whose documents are all pages.
const FOLDERS: [&str; 3] = ["docs", "docs/decisions", "docs/results"];
/// Files that are no pages, and are part of the site where a page links them.
const COPIED: [&str; 2] = ["docs/", "LICENSE"];

/// Stages the pages in `target/site-staged`, and prints that folder.
///
/// # Errors
/// A link leads nowhere, a page is not in the contents, or a file cannot be read or written.
pub fn run(arguments: &[String]) -> Result<(), String> {
    if !arguments.is_empty() {
        return Err(format!("site takes no arguments, and not {arguments:?}"));
    }
    let layout = Layout::new(false);
    let root = &layout.root;
    let read = |name: &str| read(root, name);
    let contents = read(CONTENTS)?;
    let site = Site::read(&contents, &read)?;
    site.without_place(root)?;
    let staged = layout.target.join("site-staged");
    if staged.exists() {
        fs::remove_dir_all(&staged).map_err(|e| format!("cannot remove a former site: {e}"))?;
    }
    let (mut faults, mut copied) = (Vec::new(), BTreeSet::new());
    for (name, text) in &site.pages {
        match site.page(name, text, &|path| root.join(path).exists(), &mut copied) {
            Ok(page) => write(&staged, &format!("src/{}", place(name)), page.as_bytes())?,
            Err(more) => faults.extend(more),
        }
    }
    if !faults.is_empty() {
        return Err(faults.join("\nxtask: "));
    }
    for name in &copied {
        let bytes = fs::read(root.join(name)).map_err(|e| format!("cannot read {name}: {e}"))?;
        write(&staged, &format!("src/{name}"), &bytes)?;
    }
    write(
        &staged,
        "src/SUMMARY.md",
        site.summary(&contents)?.as_bytes(),
    )?;
    write(&staged, "book.toml", read(SETTINGS)?.as_bytes())?;
    println!("{}", staged.display());
    Ok(())
}

fn read(root: &Path, name: &str) -> Result<String, String> {
    fs::read_to_string(root.join(name)).map_err(|e| format!("cannot read {name}: {e}"))
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), String> {
    let path = folder.join(name);
    path.parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(&path, bytes))
        .map_err(|e| format!("cannot write {}: {e}", path.display()))
}

/// Where a page lies on the site: the page of a folder is its index.
fn place(name: &str) -> String {
    match name.strip_suffix("README.md") {
        Some(folder) => format!("{folder}index.md"),
        None => name.to_owned(),
    }
}

/// Whether a file that is no page is part of the site. A document without a page of its own is not.
fn is_copied(file: &str) -> bool {
    COPIED.iter().any(|start| file.starts_with(start)) && !file.ends_with(".md")
}

/// A link of a document.
struct Link {
    line: usize,
    /// From the first bracket to the last.
    whole: Range<usize>,
    /// What is shown.
    shown: Range<usize>,
    /// Where it leads.
    target: Range<usize>,
}

fn parser(text: &str) -> Parser<'_> {
    Parser::new_ext(text, Options::ENABLE_TABLES | Options::ENABLE_FOOTNOTES)
}

/// The links and pictures of a document that lead into the repository.
fn links(name: &str, text: &str) -> Result<Vec<Link>, String> {
    let mut found = Vec::new();
    for (event, whole) in parser(text).into_offset_iter() {
        #[rustfmt::skip]
        let Event::Start(Tag::Link { link_type, dest_url, .. } | Tag::Image { link_type, dest_url, .. }) = event
        else {
            continue;
        };
        if dest_url.contains("://") || dest_url.starts_with("mailto:") {
            continue;
        }
        let line = 1 + text[..whole.start].matches('\n').count();
        let middle = text[whole.clone()]
            .rfind("](")
            .map(|at| whole.start + at)
            .filter(|at| link_type == LinkType::Inline && text[at + 2..].starts_with(&*dest_url));
        let Some(middle) = middle else {
            return Err(format!(
                "{name}:{line}: write the link as [text](target), so that it can be followed"
            ));
        };
        let target = middle + 2..middle + 2 + dest_url.len();
        let shown = whole.start + 1..middle;
        found.push(Link {
            line,
            whole,
            shown,
            target,
        });
    }
    Ok(found)
}

/// The file that a link of the document `name` means, seen from the root; none if it is outside of the repository.
fn meant(name: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = name.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// The pages that a document links, in its order, each after what is shown of it.
fn listed(name: &str, text: &str) -> Result<Vec<(String, String)>, String> {
    let links = links(name, text)?.into_iter();
    let pages = links.filter_map(|link| {
        let page = meant(name, &text[link.target])?;
        Some((text[link.shown].to_owned(), page)).filter(|(_, page)| page.ends_with(".md"))
    });
    Ok(pages.collect())
}

/// The names by which a page's headings are reached, as mdBook makes them.
fn headings(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut heading: Option<String> = None;
    for event in parser(text) {
        match (event, &mut heading) {
            (Event::Start(Tag::Heading { .. }), _) => heading = Some(String::new()),
            (Event::Text(text) | Event::Code(text), Some(heading)) => *heading += &text,
            (Event::End(TagEnd::Heading(_)), Some(text)) => {
                let words = text.trim().to_lowercase();
                let kept = words.chars().filter_map(|letter| match letter {
                    _ if letter.is_whitespace() => Some('-'),
                    _ if letter.is_alphanumeric() || letter == '_' || letter == '-' => Some(letter),
                    _ => None,
                });
                let one: String = kept.collect();
                let more = (1..).map(|number| format!("{one}-{number}"));
                let mut all = std::iter::once(one.clone()).chain(more);
                names.extend(all.find(|name| !names.contains(name)));
                heading = None;
            }
            _ => {}
        }
    }
    names
}

#[derive(Default)]
struct Site {
    /// The text of each page by its name in the repository.
    pages: BTreeMap<String, String>,
    /// For the index of a folder, what it lists of that folder and the contents do not.
    nested: BTreeMap<String, Vec<(String, String)>>,
}

impl Site {
    /// Reads the pages that the contents name, and those that they lead to.
    fn read(contents: &str, read: &dyn Fn(&str) -> Result<String, String>) -> Result<Site, String> {
        let mut site = Site::default();
        for (_, name) in listed(CONTENTS, contents)? {
            site.pages.insert(name.clone(), read(&name)?);
        }
        for (name, text) in site.pages.clone() {
            let Some(folder) = name.strip_suffix("README.md").filter(|it| !it.is_empty()) else {
                continue;
            };
            let mut inside = listed(&name, &text)?;
            inside.retain(|(_, page)| page.starts_with(folder) && !site.pages.contains_key(page));
            for (_, page) in &inside {
                site.pages.insert(page.clone(), read(page)?);
            }
            site.nested.insert(name, inside);
        }
        Ok(site)
    }

    /// Fails if a document is in no contents, as nobody would find it.
    fn without_place(&self, root: &Path) -> Result<(), String> {
        for folder in FOLDERS {
            let entries = fs::read_dir(root.join(folder))
                .map_err(|e| format!("cannot read the folder {folder}: {e}"))?;
            for entry in entries.flatten() {
                let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
                if name.ends_with(".md") && name != CONTENTS && !self.pages.contains_key(&name) {
                    return Err(format!(
                        "{name} is not in the contents: add it to {CONTENTS}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// A page as it lies on the site. Files that it needs are added to `copied`.
    fn page(
        &self,
        name: &str,
        text: &str,
        exists: &dyn Fn(&str) -> bool,
        copied: &mut BTreeSet<String>,
    ) -> Result<String, Vec<String>> {
        let mut page = text.to_owned();
        let mut faults = Vec::new();
        for link in links(name, text).map_err(|fault| vec![fault])?.iter().rev() {
            let target = &text[link.target.clone()];
            let (path, heading) = target.split_once('#').unwrap_or((target, ""));
            let file = match path {
                "" => Some(name.to_owned()),
                path => meant(name, path),
            };
            let mut fault =
                |what: &str| faults.push(format!("{name}:{}: {target} {what}", link.line));
            match file {
                Some(file) if self.pages.contains_key(&file) => {
                    let place = place(path) + &target[path.len()..];
                    page.replace_range(link.target.clone(), &place);
                    if !heading.is_empty() && !headings(&self.pages[&file]).contains(heading) {
                        fault("names a heading that is not there");
                    }
                }
                Some(file) if !exists(&file) => fault("leads nowhere"),
                Some(file) if is_copied(&file) => {
                    copied.insert(file);
                }
                // Sources are not on the site.
                Some(file) => {
                    let shown = &text[link.shown.clone()];
                    let plain = match shown.trim_matches('`') == file {
                        true => format!("`{file}`"),
                        false => format!("{shown} (`{file}`)"),
                    };
                    page.replace_range(link.whole.clone(), &plain);
                }
                None => fault("leads out of the repository"),
            }
        }
        faults.reverse();
        faults.is_empty().then_some(page).ok_or(faults)
    }

    /// The contents as mdBook reads them, with what indexes list below them.
    fn summary(&self, contents: &str) -> Result<String, String> {
        let mut summary = contents.to_owned();
        for link in links(CONTENTS, contents)?.iter().rev() {
            let name = meant(CONTENTS, &contents[link.target.clone()]).unwrap_or_default();
            let rest = contents[link.whole.end..].find('\n');
            let end = rest.map_or(contents.len(), |at| link.whole.end + at);
            for (shown, page) in self.nested.get(&name).into_iter().flatten().rev() {
                summary.insert_str(end, &format!("\n  - [{shown}]({page})"));
            }
            summary.replace_range(link.target.clone(), &place(&name));
        }
        Ok(summary)
    }
}

#[cfg(test)]
mod tests;
