//! `--vary C=50,100,200`: times a workload at several values of one size.

use spd_trainer::bench::Overrides;

/// A size of a workload, and its values.
#[derive(Debug, Clone)]
pub(crate) struct Vary {
    size: &'static Size,
    values: Vec<usize>,
}

/// The key of a size, and its place among the arguments.
type Size = (
    &'static str,
    for<'o, 'a> fn(&'o mut Overrides<'a>) -> &'o mut Option<usize>,
);

static SIZES: [Size; 5] = [
    ("C", |to| &mut to.components),
    ("batch", |to| &mut to.batch),
    ("seq", |to| &mut to.seq),
    ("sites", |to| &mut to.sites),
    ("samples", |to| &mut to.samples),
];

impl Vary {
    /// `KEY=A,B,C`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let known = SIZES.map(|(key, _)| key).join(", ");
        let (key, values) = text
            .split_once('=')
            .ok_or_else(|| format!("expected KEY=A,B,C, such as C=50,100,200; keys: {known}"))?;
        let size = SIZES
            .iter()
            .find(|(name, _)| *name == key)
            .ok_or_else(|| format!("unknown size `{key}`; known are {known}"))?;
        let values = values
            .split(',')
            .map(|value| match value.trim().parse() {
                Ok(0) | Err(_) => Err(format!("`{value}`: expected a whole number of at least 1")),
                Ok(value) => Ok(value),
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { size, values })
    }

    /// The varied key.
    pub(crate) fn key(&self) -> &'static str {
        self.size.0
    }

    /// Each value, with the arguments for it.
    pub(crate) fn of<'a>(
        &self,
        overrides: Overrides<'a>,
    ) -> impl Iterator<Item = (usize, Overrides<'a>)> {
        self.values.iter().map(move |&value| {
            let mut varied = overrides;
            *(self.size.1)(&mut varied) = Some(value);
            (value, varied)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_overrides_the_argument() {
        let vary = Vary::parse("batch=64,128").unwrap();
        assert_eq!(vary.key(), "batch");
        let asked = Overrides {
            batch: Some(1),
            seq: Some(9),
            ..Overrides::default()
        };
        let found: Vec<_> = vary.of(asked).collect();
        let expected = [64, 128].map(|value| {
            let overrides = Overrides {
                batch: Some(value),
                ..asked
            };
            (value, overrides)
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn invalid_variations_are_refused() {
        let refused = |text| Vary::parse(text).unwrap_err();
        assert_eq!(
            refused("C"),
            "expected KEY=A,B,C, such as C=50,100,200; keys: C, batch, seq, sites, samples"
        );
        assert_eq!(
            refused("c=1"),
            "unknown size `c`; known are C, batch, seq, sites, samples"
        );
        assert_eq!(
            refused("C=1,0"),
            "`0`: expected a whole number of at least 1"
        );
    }
}
