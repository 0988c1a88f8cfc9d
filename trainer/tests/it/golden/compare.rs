//! Ours against theirs, and what was worst.

use std::fmt::Write as _;

use crate::harness::Compared;

/// All comparisons of a test. Errors are relative to the largest magnitude of the tensor.
pub(super) struct Comparison {
    name: String,
    tolerance: f64,
    /// Per group: its name, number of comparisons, worst error and where.
    groups: Vec<(String, usize, f64, String)>,
    /// Each begins with its group.
    pub(super) faults: Vec<String>,
    notes: Vec<String>,
}

/// Differences below this are rounding whatever the tensor's magnitude: its elements are sums of
/// terms of order one, each rounded by up to 6e-8.
pub(super) const FLOOR: f64 = 1e-7;

impl Comparison {
    pub(super) fn new(name: &str, tolerance: f64) -> Self {
        Self {
            name: name.to_owned(),
            tolerance,
            groups: Vec::new(),
            faults: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Starts a group: a term, a step.
    pub(super) fn group(&mut self, name: impl Into<String>) {
        self.groups.push((name.into(), 0, 0.0, "-".to_owned()));
    }

    pub(super) fn tensor(&mut self, what: &str, ours: &[f32], theirs: &[f64]) {
        self.within(self.tolerance, what, ours, theirs);
    }

    pub(super) fn number(&mut self, what: &str, ours: f64, theirs: f64) {
        self.add(self.tolerance, what, (ours - theirs).abs(), theirs.abs());
    }

    /// A number of which so much is uncertain beside rounding.
    pub(super) fn number_to(&mut self, uncertain: f64, what: &str, ours: f64, theirs: f64) {
        let beyond = (ours - theirs).abs() - uncertain;
        // `f64::max` would drop a NaN.
        let beyond = if beyond < 0.0 { 0.0 } else { beyond };
        self.add(self.tolerance, what, beyond, theirs.abs());
    }

    /// Says something in the report.
    pub(super) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// A tensor with a bound of its own.
    pub(super) fn within(&mut self, tolerance: f64, what: &str, ours: &[f32], theirs: &[f64]) {
        let worst = self.worst(what, ours, theirs);
        self.add(tolerance, what, worst, largest(theirs));
    }

    /// A tensor that is a difference of numbers of a larger scale.
    pub(super) fn at_scale(&mut self, scale: f64, what: &str, ours: &[f32], theirs: &[f64]) {
        let worst = self.worst(what, ours, theirs);
        self.add(self.tolerance, what, worst, scale);
    }

    /// The largest difference; NaN if there is one.
    fn worst(&mut self, what: &str, ours: &[f32], theirs: &[f64]) -> f64 {
        if ours.len() != theirs.len() {
            let lengths = format!("{} elements, theirs has {}", ours.len(), theirs.len());
            self.faults.push(format!("{what}: {lengths}"));
        }
        // `f64::max` would drop a NaN.
        let mut worst = 0.0;
        for (&ours, theirs) in ours.iter().zip(theirs) {
            let difference = (f64::from(ours) - theirs).abs();
            if difference.is_nan() || difference > worst {
                worst = difference;
            }
        }
        worst
    }

    /// Up to which magnitude an element of a tensor of this scale may be nothing but rounding.
    pub(super) fn rounding_at(&self, scale: f64) -> f64 {
        self.tolerance * scale.max(FLOOR / self.tolerance)
    }

    /// A tensor that must be the same to the last bit, except where `excused`. Gives the number of
    /// elements that differ.
    pub(super) fn exact(
        &mut self,
        what: &str,
        ours: &[f32],
        theirs: &[f32],
        excused: impl Fn(usize) -> bool,
    ) -> usize {
        assert_eq!(ours.len(), theirs.len(), "{what}");
        let differs = |&at: &usize| ours[at].to_bits() != theirs[at].to_bits();
        let different: Vec<usize> = (0..ours.len()).filter(differs).collect();
        if let Some(&at) = different.iter().find(|&&at| !excused(at)) {
            let (ours, theirs) = (ours[at], theirs[at]);
            self.faults.push(format!(
                "{what}, element {at}: ours {ours}, theirs {theirs}"
            ));
        }
        self.groups.last_mut().expect("a group is open").1 += 1;
        different.len()
    }

    fn add(&mut self, tolerance: f64, what: &str, difference: f64, scale: f64) {
        let error = difference / scale.max(FLOOR / tolerance);
        if error.is_nan() || error > tolerance {
            let group = self.groups.last().map_or("", |(group, ..)| group.as_str());
            self.faults.push(format!(
                "{group}, {what}: off by {difference:.2e}, {error:.2e} of {scale:.2e}, more than {tolerance:e}"
            ));
        }
        let (_, count, worst, place) = self.groups.last_mut().expect("a group is open");
        *count += 1;
        if error.is_nan() || error > *worst {
            (*worst, *place) = (error, what.to_owned());
        }
    }

    /// All of it: a line for all and one a group.
    ///
    /// # Panics
    ///
    /// When anything was out of tolerance, naming all of it.
    pub(super) fn finish(self) -> Compared {
        let mut report = String::new();
        let (mut total, mut most, mut at) = (0, 0.0, "-");
        for (group, count, worst, place) in &self.groups {
            writeln!(
                report,
                "  {group:<18} {count:>4} compared, worst {worst:.1e} at {place}"
            )
            .expect("memory");
            total += count;
            if worst.is_nan() || *worst > most {
                (most, at) = (*worst, place);
            }
        }
        for note in &self.notes {
            writeln!(report, "  {note}").expect("memory");
        }
        let Self {
            name, tolerance, ..
        } = &self;
        let head =
            format!("golden {name}: {total} compared, worst {most:.1e} of {tolerance:e} at {at}");
        assert!(
            self.faults.is_empty(),
            "{head}\n{report}{} out of tolerance:\n{}",
            self.faults.len(),
            self.faults.join("\n")
        );
        let report = format!("{head}\n{report}");
        Compared {
            report,
            left_out: Vec::new(),
        }
    }
}

/// The largest magnitude of a tensor.
pub(super) fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most: f64, x| most.max(x.abs()))
}
