//! What is wrong with a topology file that is no TOML, or lacks something. The command compiles this file, too, which reads the same
//! files and does not link the simulated driver.

/// Where in the file the parser stopped, by line and field, and why.
pub fn broken(text: &str, e: &toml::de::Error) -> String {
    let at = e.span().map_or(0, |s| s.start.min(text.len()));
    let message = e.message().lines().next().unwrap_or("not valid TOML");
    let number = text[..at].matches('\n').count();
    let is_header = |line: &&str| line.starts_with('[');
    let header = text.lines().take(number + 1).filter(is_header).last();
    let line = text.lines().nth(number).unwrap_or("");
    let key = line.split_once('=').map(|(key, _)| key.trim());
    let place = match (header, key) {
        (Some(header), Some(key)) => format!(", {key} of {header}"),
        (None, Some(key)) => format!(", {key}"),
        (Some(header), None) => format!(", {header}"),
        (None, None) => String::new(),
    };
    let remedy = if message.starts_with("missing field") {
        "add it"
    } else {
        "correct it"
    };
    format!(
        "line {}{place}: {message}; {remedy}, as in simcuda/topologies",
        number + 1
    )
}
