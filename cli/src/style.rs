//! Colours, where stdout is a terminal that shows them: `anstream` heeds NO_COLOR, CLICOLOR and TERM.

use std::fmt::Display;

use anstyle::{AnsiColor, Style};

/// What is well.
pub const GOOD: Style = AnsiColor::Green.on_default().bold();
/// What is wrong.
pub const BAD: Style = AnsiColor::Red.on_default().bold();
/// Headings.
pub const HEAD: Style = Style::new().bold();

/// The text in a style.
pub fn paint(style: Style, text: impl Display) -> String {
    format!("{style}{text}{style:#}")
}
