//! Tables for people: columns as wide as they must be.

use comfy_table::{presets, CellAlignment, ContentArrangement, Table};

/// Rows as a table without lines, each ended by a newline. Columns are left-aligned, but for those whose letter
/// in `alignment` is `>`.
pub fn text<R>(alignment: &str, rows: impl IntoIterator<Item = R>) -> String
where
    R: IntoIterator<Item = String>,
{
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    for row in rows {
        // What is found may hold anything; a row stays one line.
        let cells = row
            .into_iter()
            .map(|cell| cell.replace(char::is_control, "?"));
        table.add_row(cells);
    }
    let letters = alignment.chars().chain(std::iter::repeat('<'));
    for (column, letter) in table.column_iter_mut().zip(letters) {
        column.set_padding((0, 2));
        if letter == '>' {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut text = String::new();
    for line in table.lines() {
        text += line.trim_end();
        text.push('\n');
    }
    text
}

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
    use super::text;

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
