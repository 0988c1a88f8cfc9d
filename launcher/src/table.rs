//! Text tables.

/// The alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

/// Spaces before a column.
const GAP: usize = 2;

/// Characters of a text column below which it is not worth showing.
const WORDS: usize = 16;

/// The end of a truncated line.
const CUT: &str = "...";

/// A table, printed with two spaces before and between columns.
#[derive(Debug, Default)]
pub(crate) struct Table {
    alignments: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these alignments; further columns are aligned left.
    pub(crate) fn new(alignments: &[Align]) -> Self {
        Self {
            alignments: alignments.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row, which may have fewer cells.
    pub(crate) fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// Whether it has no rows.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The table as lines without trailing spaces.
    pub(crate) fn text(&self) -> String {
        let all: Vec<usize> = (0..self.widths().len()).collect();
        self.text_of(&all, usize::MAX)
    }

    /// The table in lines of at most `columns` characters: columns are left out, in the order of
    /// the numbers in `least`, until the others fit; a last column of words is first truncated.
    pub(crate) fn text_within(&self, columns: usize, least: &[usize]) -> String {
        let widths = self.widths();
        let mut kept: Vec<usize> = (0..widths.len()).collect();
        let mut least = least.iter();
        loop {
            let of = |kept: &[usize]| {
                kept.iter()
                    .map(|&column| GAP + widths[column])
                    .sum::<usize>()
            };
            let is_words = |column: &usize| self.alignments.get(*column) != Some(&Align::Right);
            let fits = match kept.split_last() {
                Some((last, others)) if !others.is_empty() && is_words(last) => {
                    of(others) + GAP + widths[*last].min(WORDS) <= columns
                }
                _ => of(&kept) <= columns,
            };
            match least.next() {
                Some(next) if !fits => kept.retain(|column| column != next),
                _ => return self.text_of(&kept, columns),
            }
        }
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width_of = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| width(cell)).max().unwrap_or(0)
        };
        (0..columns).map(width_of).collect()
    }

    /// The lines of the `kept` columns, truncated after `most` characters.
    fn text_of(&self, kept: &[usize], most: usize) -> String {
        let widths = self.widths();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            let cells = kept
                .iter()
                .filter_map(|&column| Some((column, row.get(column)?)));
            for (column, cell) in cells {
                let gap = " ".repeat(widths[column] - width(cell));
                line.push_str(&" ".repeat(GAP));
                match self.alignments.get(column) {
                    Some(Align::Right) => line.extend([gap.as_str(), cell]),
                    _ => line.extend([cell.as_str(), &gap]),
                }
            }
            match line.trim_end().char_indices().nth(most) {
                Some(_) => {
                    text.extend(line.chars().take(most.saturating_sub(CUT.len())));
                    text.push_str(CUT);
                }
                None => text.push_str(line.trim_end()),
            }
            text.push('\n');
        }
        text
    }

    /// The table in Markdown, its first row as the head.
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
    fn columns_are_aligned() {
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
    fn a_narrow_table_drops_columns_and_truncates_words() {
        use Align::{Left, Right};
        let mut table = Table::new(&[Left, Right, Right, Left]);
        table.row(["run", "step", "loss", "note"]);
        table.row([
            "runs/x",
            "10/20",
            "1.000e-3",
            "drawing figures, and more than that",
        ]);
        let within = |columns| table.text_within(columns, &[1, 3, 2]);
        assert_eq!(within(62), table.text());
        assert_eq!(
            within(46),
            "  run      step      loss  note\n  runs/x  10/20  1.000e-3  drawing figures,...\n"
        );
        assert_eq!(
            within(36),
            "  run         loss  note\n  runs/x  1.000e-3  drawing figur...\n"
        );
        assert_eq!(within(30), "  run         loss\n  runs/x  1.000e-3\n");
        assert_eq!(within(9), "  run\n  runs/x\n");
        assert_eq!(within(7), "  run\n  ru...\n");
    }

    #[test]
    fn markdown_has_the_first_row_as_its_head() {
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
    fn an_empty_table_has_no_text() {
        assert_eq!(Table::default().text(), "");
    }
}
