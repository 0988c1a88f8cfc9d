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

    /// The table in Markdown, its first row as the head; each line is ended by a newline.
    pub(crate) fn markdown(&self) -> String {
        let is_right = |column| self.alignments.get(column) == Some(&Align::Right);
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let mut text = String::new();
        for (number, row) in self.rows.iter().enumerate() {
            let cells = row.iter().map(|cell| cell.replace('|', "\\|"));
            text.push_str(&line(cells.collect()));
            if number == 0 {
                let rule = |column| if is_right(column) { "--:" } else { ":--" };
                let rules = (0..row.len()).map(|column| rule(column).to_owned());
                text.push_str(&line(rules.collect()));
            }
        }
        text
    }

    /// The table in HTML, its first row as the head.
    pub(crate) fn html(&self) -> String {
        let mut text = String::from("<table>\n");
        for (number, row) in self.rows.iter().enumerate() {
            let tag = if number == 0 { "th" } else { "td" };
            text.push_str("<tr>");
            for (column, cell) in row.iter().enumerate() {
                let align = match self.alignments.get(column) {
                    Some(Align::Right) => "right",
                    _ => "left",
                };
                let cell = cell.replace('&', "&amp;").replace('<', "&lt;");
                let cell = cell.replace('>', "&gt;");
                text.push_str(&format!("<{tag} align=\"{align}\">{cell}</{tag}>"));
            }
            text.push_str("</tr>\n");
        }
        text + "</table>\n"
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
    fn in_markdown_its_first_row_is_the_head() {
        let mut table = Table::new(&[Align::Right, Align::Left]);
        table.row(["C", "site"]);
        table.row(["20", "a|b"]);
        assert_eq!(
            table.markdown(),
            "| C | site |\n| --: | :-- |\n| 20 | a\\|b |\n"
        );
        assert_eq!(Table::default().markdown(), "");
    }

    #[test]
    fn an_empty_table_is_no_text() {
        assert_eq!(Table::default().text(), "");
    }
}
