//! Tables for people: columns as wide as they must be.

use std::io::IsTerminal;

use comfy_table::{presets, CellAlignment, ColumnConstraint, ContentArrangement, Table, Width};

/// Rows as a table without lines, each ended by a newline. Columns are left-aligned, but for those whose letter
/// in `alignment` is `>`.
pub fn text<R>(alignment: &str, rows: impl IntoIterator<Item = R>) -> String
where
    R: IntoIterator<Item = String>,
{
    let mut table = filled(rows, ContentArrangement::Disabled);
    let letters = alignment.chars().chain(std::iter::repeat('<'));
    for (column, letter) in table.column_iter_mut().zip(letters) {
        column.set_padding((0, 2));
        if letter == '>' {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    lines(&table)
}

/// A table without lines that has these rows.
fn filled<R>(rows: impl IntoIterator<Item = R>, arrangement: ContentArrangement) -> Table
where
    R: IntoIterator<Item = String>,
{
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(arrangement);
    for row in rows {
        // What is found may hold anything; a row stays one line.
        let cells = row
            .into_iter()
            .map(|cell| cell.replace(char::is_control, "?"));
        table.add_row(cells);
    }
    table
}

fn lines(table: &Table) -> String {
    let mut text = String::new();
    for line in table.lines() {
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// `1,234,567`
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// How many columns the terminal has, if stdout is one.
pub fn terminal_width() -> Option<u16> {
    let stdout = std::io::stdout();
    let told = terminal_size::terminal_size_of(&stdout).map(|(width, _)| width.0);
    told.or(stdout.is_terminal().then_some(80))
}

/// Rows as [`text`] has them, whose last column is broken into lines so that none is longer than `width`.
pub fn wrapped<R>(rows: impl IntoIterator<Item = R>, width: Option<u16>) -> String
where
    R: IntoIterator<Item = String>,
{
    let Some(width) = width else {
        return text("", rows);
    };
    let mut table = filled(rows, ContentArrangement::Dynamic);
    let widths = table.column_max_content_widths();
    let Some((_, others)) = widths.split_last() else {
        return String::new();
    };
    let taken: u16 = others.iter().map(|width| width + 2).sum();
    let rest = width.saturating_sub(taken).max(NARROWEST);
    let last = others.len();
    for (at, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, if at == last { 0 } else { 2 }));
        column.set_constraint(match at == last {
            true => ColumnConstraint::UpperBoundary(Width::Fixed(rest)),
            false => ColumnConstraint::ContentWidth,
        });
    }
    table.set_width(taken + rest);
    lines(&table)
}

/// A last column is not broken into shorter pieces than these.
const NARROWEST: u16 = 20;

/// A table with its title and heads of columns, behind an empty line; nothing if it has no rows.
pub fn titled(
    title: &str,
    alignment: &str,
    head: &[&str],
    rows: impl Iterator<Item = Vec<String>>,
) -> String {
    let mut rows = rows.peekable();
    if rows.peek().is_none() {
        return String::new();
    }
    let head = head.iter().map(|word| (*word).to_owned()).collect();
    let table = text(alignment, std::iter::once(head).chain(rows));
    format!("\n{title}\n{table}")
}

#[cfg(test)]
mod tests {
    use super::{grouped, text, wrapped};

    #[test]
    fn digits_stand_in_groups() {
        let groups = [0, 999, 1000, 170_030_848].map(grouped);
        assert_eq!(groups, ["0", "999", "1,000", "170,030,848"]);
    }

    #[test]
    fn the_last_column_is_broken_into_lines() {
        let rows = [["a", "one two three four five six"], ["long one", "seven"]];
        let rows = rows.map(|row| row.map(str::to_owned));
        let expected = "a         one two three four\n          five six\nlong one  seven\n";
        assert_eq!(wrapped(rows.clone(), Some(30)), expected);
        assert_eq!(
            wrapped(rows, None),
            "a         one two three four five six\nlong one  seven\n"
        );
    }

    #[test]
    fn columns_are_as_wide_as_they_must_be() {
        let rows = [["size", "µs", ""], ["1K", "12.5", "a\nb"], ["1", "9", "c"]];
        let rows = rows.map(|row| row.map(str::to_owned));
        assert_eq!(
            text("<>", rows),
            "size    µs\n1K    12.5  a?b\n1        9  c\n"
        );
        assert_eq!(text("", Vec::<Vec<String>>::new()), "");
    }
}
