//! Tables and bars for people.

use comfy_table::{presets, CellAlignment, ContentArrangement, Table};

/// Rows in columns, each ended by a newline. The first `left` columns are left-aligned, all others right-aligned.
pub fn table(left: usize, rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    table.add_rows(rows);
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if number >= left {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines = table.lines().map(|line| line.trim_end().to_owned() + "\n");
    lines.collect()
}

/// As many marks as a value has of the largest one.
pub fn bar(value: f64, largest: f64, width: u32) -> String {
    let share = (value / largest).clamp(0.0, 1.0);
    let marks = (share * f64::from(width)).round();
    // At most `width`.
    "#".repeat(marks as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_right_aligned_and_bars_are_shares() {
        let rows = [["run", "s"], ["a", "10.5"], ["longer", "9"]];
        let rows = rows.map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(
            table(1, rows.to_vec()),
            "run        s\na       10.5\nlonger     9\n"
        );
        assert_eq!(bar(5.0, 10.0, 8), "####");
        assert_eq!(bar(10.0, 10.0, 3), "###");
        assert_eq!(bar(0.0, 10.0, 3), "");
        assert_eq!(bar(f64::NAN, 10.0, 3), "");
    }
}
