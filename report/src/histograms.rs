//! The histograms of a name as the page gets them.

use serde::Serialize;

use crate::curve::Number;
use crate::figures::spaced;
use crate::run::Rows;
use crate::series::Histograms;

/// Histograms of a name, thinned.
#[derive(Serialize)]
pub(crate) struct Bars<'a> {
    name: &'a str,
    /// Steps.
    x: Vec<u64>,
    /// The edges of each step; of the first step only, if all are equal.
    edges: Vec<Vec<Number>>,
    counts: Vec<Vec<Number>>,
}

impl<'a> Bars<'a> {
    /// At most `most` histograms from row `first` on, evenly spaced, including the last; `None` if
    /// there are none.
    pub(crate) fn of(found: &'a Histograms, rows: &Rows, first: u32, most: usize) -> Option<Self> {
        let begin = found.rows.partition_point(|&row| row < first);
        let count = found.all.len() - begin;
        let kept: Vec<usize> = spaced(count, count.min(most))
            .map(|index| begin + index)
            .collect();
        let first = &found.all.get(*kept.first()?)?.edges;
        let all = || kept.iter().map(|&index| &found.all[index]);
        let is_one = all().all(|histogram| histogram.edges == *first);
        let numbers = |values: &[f64]| values.iter().copied().map(Number).collect();
        let edges = all().take(if is_one { 1 } else { usize::MAX });
        let steps = kept.iter().map(|&index| found.rows[index]);
        Some(Self {
            name: &found.name,
            x: steps.map(|row| rows.at[row as usize].0).collect(),
            edges: edges.map(|of| numbers(&of.edges)).collect(),
            counts: all().map(|of| numbers(&of.counts)).collect(),
        })
    }
}

/// The number of histograms of each name that fit into so many bins of a page, over all runs.
pub(crate) fn that_fit<'a>(all: impl Iterator<Item = &'a Histograms>, bins: usize) -> usize {
    let of_a_step = all.filter_map(|found| Some(found.all.last()?.counts.len()));
    (bins / of_a_step.sum::<usize>().max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use spd_tracker::Histogram;

    use super::*;

    fn some(steps: u32) -> (Rows, Histograms) {
        let mut rows = Rows::of(std::path::Path::new("/nowhere"), 0);
        rows.at = (0..steps)
            .map(|step| (u64::from(step) * 10, f64::NAN))
            .collect();
        let histogram = |step| Histogram {
            edges: vec![0.0, 0.5, 1.0],
            counts: vec![f64::from(step), 2.0],
        };
        let found = Histograms {
            name: "importance/a".to_owned(),
            rows: (0..steps).collect(),
            all: (0..steps).map(histogram).collect(),
        };
        (rows, found)
    }

    #[test]
    fn edges_that_all_share_are_sent_once_and_the_last_step_always() {
        let (rows, mut found) = some(5);
        let json = |found: &Histograms, first, most| {
            serde_json::to_value(Bars::of(found, &rows, first, most)).unwrap()
        };
        let all = json(&found, 3, 9);
        let expected = serde_json::json!({"name": "importance/a", "x": [30, 40], "edges": [[0, 0.5, 1]], "counts": [[3, 2], [4, 2]]});
        assert_eq!(all, expected);
        assert_eq!(json(&found, 0, 2)["x"], serde_json::json!([0, 40]));
        assert_eq!(json(&found, 0, 1)["x"], serde_json::json!([40]));
        assert_eq!(json(&found, 5, 9), serde_json::Value::Null);
        found.all[4].edges[2] = 2.0;
        assert_eq!(json(&found, 3, 9)["edges"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn a_page_has_room_for_so_many_bins() {
        let (_, found) = some(5);
        assert_eq!(that_fit([&found, &found].into_iter(), 10), 2);
        assert_eq!(that_fit([&found].into_iter(), 1), 1);
        assert_eq!(that_fit(std::iter::empty(), 10), 10);
    }
}
