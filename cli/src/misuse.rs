//! What is said of a command line that is wrong, beyond what clap says by itself.

use std::ffi::OsString;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Error};

use crate::run::program::{in_path, is_program};
use crate::Cli;

/// The error with a hint at what was meant.
pub fn with_hints(mut error: Error, words: &[OsString]) -> Error {
    match error.kind() {
        ErrorKind::InvalidSubcommand => hint_at_command(&mut error),
        ErrorKind::UnknownArgument => hint_at_dashes(&mut error, words),
        _ => {}
    }
    error
}

fn word_of(error: &Error, kind: ContextKind) -> Option<String> {
    match error.get(kind)? {
        ContextValue::String(word) => Some(word.clone()),
        _ => None,
    }
}

fn tip(error: &mut Error, text: String) {
    let text = ContextValue::StyledStrs(vec![StyledStr::from(text)]);
    error.insert(ContextKind::Suggested, text);
}

/// Commands that help does not list are not suggested; a program in place of a command is for `run`.
fn hint_at_command(error: &mut Error) {
    let suggested = match error.get(ContextKind::SuggestedSubcommand) {
        Some(ContextValue::Strings(names)) => names.clone(),
        Some(ContextValue::String(name)) => vec![name.clone()],
        _ => Vec::new(),
    };
    let cli = Cli::command();
    let is_listed = |name: &String| {
        cli.find_subcommand(name)
            .is_some_and(|command| !command.is_hide_set())
    };
    let listed: Vec<String> = suggested.into_iter().filter(is_listed).collect();
    let is_meant = !listed.is_empty();
    match is_meant {
        true => error.insert(
            ContextKind::SuggestedSubcommand,
            ContextValue::Strings(listed),
        ),
        false => error.remove(ContextKind::SuggestedSubcommand),
    };
    let Some(word) = word_of(error, ContextKind::InvalidSubcommand) else {
        return;
    };
    if !is_meant && (is_program(word.as_ref()) || in_path(&word).is_some()) {
        tip(
            error,
            format!("to run a program: anabranch run -np N -- {word} ..."),
        );
    }
}

/// `run -np 2 ./app` lacks the `--` before the program.
fn hint_at_dashes(error: &mut Error, words: &[OsString]) {
    if words.get(1).is_none_or(|command| command != "run") {
        return;
    }
    let Some(word) = word_of(error, ContextKind::InvalidArg) else {
        return;
    };
    if word.starts_with('-') {
        return;
    }
    let shown = |word: &OsString| {
        let word = word.to_string_lossy();
        if word == "--np" {
            "-np".to_owned()
        } else {
            word.into_owned()
        }
    };
    let at = words.iter().position(|other| *other == *word);
    let (before, after) = words.split_at(at.unwrap_or(words.len()));
    let after = after.iter().filter(|word| *word != "--");
    let line = before
        .iter()
        .skip(1)
        .map(shown)
        .chain(["--".to_owned()])
        .chain(after.map(shown));
    let line: Vec<String> = line.collect();
    tip(
        error,
        format!(
            "the program and its arguments stand behind --: anabranch {}",
            line.join(" ")
        ),
    );
}
