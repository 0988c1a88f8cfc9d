//! One curve: the values of a name by row, and the few of them that a screen can show; and the
//! histograms of a name.

use spd_tracker::Histogram;

/// Whether values are part of the run's mathematics, or differ between two runs of one config.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    Metrics,
    System,
}

/// The values of a name in reading order.
#[derive(Debug)]
pub(crate) struct Series {
    pub(crate) source: Source,
    pub(crate) name: String,
    /// Whether the page may smooth it: true for rows of training steps, false for evaluations and
    /// machines.
    pub(crate) smooths: bool,
    /// Row number of each value, ascending.
    pub(crate) rows: Vec<u32>,
    pub(crate) values: Vec<f64>,
}

impl Series {
    /// The index of the first value from row `first` on.
    pub(crate) fn from(&self, first: u32) -> usize {
        self.rows.partition_point(|&row| row < first)
    }
}

/// The histograms of a name in reading order.
#[derive(Debug)]
pub(crate) struct Histograms {
    pub(crate) name: String,
    /// Row number of each, ascending.
    pub(crate) rows: Vec<u32>,
    pub(crate) all: Vec<Histogram>,
}

/// Length of a stretch, of which [`thinned`] keeps two or three values.
pub(crate) fn stretch(values: usize, most: usize) -> usize {
    values.div_ceil((most / 2).max(1))
}

/// The indices of the values to show: all, if they are at most `most`; otherwise the least and the
/// greatest of each stretch, its first that is not finite, and both ends. At most 1.5 times `most`,
/// ascending.
pub(crate) fn thinned(values: &[f64], most: usize) -> Vec<usize> {
    if values.len() <= most.max(2) {
        return (0..values.len()).collect();
    }
    let stretch = stretch(values.len(), most);
    let mut kept = Vec::with_capacity(most + most / 2);
    for (number, part) in values.chunks(stretch).enumerate() {
        let finite = || {
            part.iter()
                .enumerate()
                .filter(|(_, value)| value.is_finite())
        };
        let least = finite().min_by(|(_, one), (_, other)| one.total_cmp(other));
        let most = finite().max_by(|(_, one), (_, other)| one.total_cmp(other));
        let strange = part.iter().position(|value| !value.is_finite());
        let mut found: Vec<usize> = least
            .into_iter()
            .chain(most)
            .map(|(index, _)| index)
            .chain(strange)
            .map(|index| number * stretch + index)
            .collect();
        found.sort_unstable();
        kept.extend(found);
    }
    kept.insert(0, 0);
    kept.push(values.len() - 1);
    kept.dedup();
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_values_are_all_kept() {
        assert_eq!(thinned(&[3.0, 1.0, 2.0], 3), [0, 1, 2]);
        assert_eq!(thinned(&[], 0), [0_usize; 0]);
    }

    #[test]
    fn thinning_keeps_ends_extremes_and_non_finite_values() {
        let mut values = vec![1.0; 1000];
        values[400] = 9.0;
        values[603] = -9.0;
        values[777] = f64::NAN;
        values[778] = f64::NAN;
        let kept = thinned(&values, 20);
        assert!(kept.len() <= 30 && kept.is_sorted(), "{kept:?}");
        for index in [0, 400, 603, 777, 999] {
            assert!(kept.contains(&index), "{index}");
        }
        assert!(!kept.contains(&778));
    }

    #[test]
    fn nothing_but_nan_is_thinned_too() {
        let kept = thinned(&[f64::NAN; 100], 10);
        assert_eq!(kept.first(), Some(&0));
        assert!(kept.len() <= 15, "{kept:?}");
    }
}
