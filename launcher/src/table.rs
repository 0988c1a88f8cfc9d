//! Text in columns.

/// Where a cell is put in its column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// A table; printed with two spaces before and between the columns.
#[derive(Debug, Default)]
pub(crate) struct Table {
    alignments: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table whose columns are aligned as given; further columns to the left.
    pub(crate) fn new(alignments: &[Align]) -> Self {
        Self {
            alignments: alignments.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row; short ones end early.
    pub(crate) fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// Whether a row was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The lines, each ended by a newline and none by a space.
    pub(crate) fn text(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                self.rows
                    .iter()
                    .filter_map(|row| row.get(column))
                    .map(|cell| width(cell))
                    .max()
            })
            .map(Option::unwrap_or_default)
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let gap = " ".repeat(widths[column] - width(cell));
                line.push_str("  ");
                match self.alignments.get(column) {
                    Some(Align::Right) => line.extend([gap.as_str(), cell]),
                    _ => line.extend([cell.as_str(), &gap]),
                }
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

fn width(cell: &str) -> usize {
    cell.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_numbers_lean_right() {
        let mut table = Table::new(&[Align::Left, Align::Right]);
        table.row(["site", "C"]);
        table.row(["linear1", "20"]);
        table.row(["é", "1,000", "note"]);
        assert_eq!(
            table.text(),
            "  site         C\n  linear1     20\n  é        1,000  note\n"
        );
    }

    #[test]
    fn an_empty_table_is_no_text() {
        assert_eq!(Table::default().text(), "");
    }
}
