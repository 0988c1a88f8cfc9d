//! Parts of all panels: a title, axes with ticks and labels, and numbers in few letters.

use plotters::coord::Shift;
use plotters::coord::ranged1d::{BoldPoints, Ranged, ValueFormatter};
use plotters::prelude::*;

pub(super) const FONT: &str = "sans-serif";
pub(super) const INK: RGBColor = RGBColor(31, 88, 150);

pub(super) type Area<'s> = DrawingArea<SVGBackend<'s>, Shift>;
pub(super) type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Title, what the axes are, and whether the vertical one is logarithmic.
pub(super) struct Axes {
    pub(super) title: String,
    pub(super) x: &'static str,
    pub(super) y: &'static str,
    pub(super) log: bool,
}

impl Axes {
    pub(super) fn new(title: &str, x: &'static str, y: &'static str) -> Self {
        Self {
            title: title.to_owned(),
            x,
            y,
            log: false,
        }
    }

    /// With a logarithmic vertical axis.
    pub(super) fn log(self) -> Self {
        Self { log: true, ..self }
    }
}

/// A chart with its title, and room for the labels of its axes.
pub(super) fn titled<'a, 'b>(
    area: &'a Area<'b>,
    axes: &Axes,
) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder
        .caption(&axes.title, (FONT, 14))
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(56);
    builder
}

/// The texts at the ticks of an axis.
#[derive(Clone, Copy)]
pub(super) enum Labels {
    /// Numbers of rows or columns.
    Whole,
    /// Numbers.
    Numbers,
}

/// Ticks of an axis, about.
pub(super) const TICKS: [usize; 2] = [8, 7];

/// Frame, ticks and labels; no lines across.
pub(super) fn mesh<'s, X, Y>(
    chart: &mut ChartContext<'_, SVGBackend<'s>, Cartesian2d<X, Y>>,
    axes: &Axes,
    (x, y): (Labels, Labels),
) -> Drawn
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let both = chart.as_coord_spec();
    let x_ticks = Ticks::of_axis(both.x_spec(), TICKS[0]);
    let y_ticks = Ticks::of_axis(both.y_spec(), TICKS[1]);
    let label = |labels: Labels, ticks: Ticks| {
        move |place: &f64| match labels {
            Labels::Whole => whole(place),
            Labels::Numbers => ticks.text(*place),
        }
    };
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc(axes.x)
        .y_desc(axes.y)
        .x_labels(TICKS[0])
        .y_labels(TICKS[1])
        .label_style((FONT, 11))
        .axis_desc_style((FONT, 12))
        .x_label_formatter(&label(x, x_ticks))
        .y_label_formatter(&label(y, y_ticks))
        .draw()
}

/// The number of a row or column, which lies at whole numbers alone.
pub(super) fn whole(place: &f64) -> String {
    if place.fract() == 0.0 {
        format!("{place:.0}")
    } else {
        String::new()
    }
}

/// Numbers beside each other, in few letters each, and in as many as tell them apart.
#[derive(Clone, Copy)]
pub(super) struct Ticks {
    /// Digits behind the point, where a number needs so many.
    digits: usize,
}

impl Ticks {
    /// The ticks of an axis that is asked for about so many.
    pub(super) fn of_axis(axis: &impl Ranged<ValueType = f64>, about: usize) -> Self {
        // A thousandth of the way between two ticks cannot be seen.
        Self::within(1e-3, &axis.key_points(BoldPoints(about)))
    }

    /// Numbers whose texts differ from them by at most a part of the smallest difference of two
    /// neighbours.
    pub(super) fn within(part: f64, ticks: &[f64]) -> Self {
        let gaps = ticks.windows(2).map(|pair| (pair[1] - pair[0]).abs());
        let smallest = gaps.filter(|gap| *gap > 0.0).fold(f64::INFINITY, f64::min);
        let is_read_back = |ticks: Self, value: f64| {
            let read = ticks.text(value).parse::<f64>();
            read.is_ok_and(|read| (read - value).abs() <= part * smallest)
        };
        let mut enough = (0..DIGITS).map(|digits| Self { digits });
        let enough = enough.find(|enough| ticks.iter().all(|&value| is_read_back(*enough, value)));
        enough.unwrap_or(Self { digits: 0 })
    }

    /// The text of one of them.
    pub(super) fn text(self, value: f64) -> String {
        let digits = self.digits;
        let (number, power) = match value.abs() {
            size if size < 1e-12 => return "0".to_owned(),
            size if !size.is_finite() => return value.to_string(),
            size if !(1e-2..1e4).contains(&size) => {
                let text = format!("{value:.digits$e}");
                let (number, power) = text.split_once('e').unwrap_or((&text, ""));
                (number.to_owned(), format!("e{power}"))
            }
            size if size < 1.0 => (format!("{value:.0$}", digits.max(2)), String::new()),
            size if size < 10.0 => (format!("{value:.0$}", digits.max(1)), String::new()),
            _ => (format!("{value:.digits$}"), String::new()),
        };
        let short = match number.contains('.') {
            true => number.trim_end_matches('0').trim_end_matches('.'),
            false => &number,
        };
        format!("{short}{power}")
    }
}

/// The most digits behind a point: no two of f64 need more.
const DIGITS: usize = 17;

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(ticks: &[f64]) -> Vec<String> {
        let digits = Ticks::within(1e-3, ticks);
        ticks.iter().map(|&tick| digits.text(tick)).collect()
    }

    #[test]
    fn numbers_are_short() {
        let found = texts(&[0.0, 0.5, 1.0, 2.5, 130.0, 20_000.0]);
        assert_eq!(found, ["0", "0.5", "1", "2.5", "130", "2e4"]);
        assert_eq!(texts(&[1e-4, 1e-3, 1e-2]), ["1e-4", "1e-3", "0.01"]);
        assert_eq!((whole(&3.0), whole(&2.5)), ("3".to_owned(), String::new()));
    }

    #[test]
    fn each_tick_has_a_label() {
        let found = texts(&[0.0, 0.005, 0.01, 0.015, 0.02]);
        assert_eq!(found, ["0", "5e-3", "0.01", "0.015", "0.02"]);
        assert_eq!(texts(&[0.975, 1.0, 1.025]), ["0.975", "1", "1.025"]);
        assert_eq!(texts(&[12.25, 12.5, 12.75]), ["12.25", "12.5", "12.75"]);
        assert_eq!(
            texts(&[10_000.0, 10_500.0, 11_000.0]),
            ["1e4", "1.05e4", "1.1e4"]
        );
        // Of what cannot be told apart, or is no number, there is no more to say.
        assert_eq!(texts(&[1.5, 1.5]), ["1.5", "1.5"]);
        assert_eq!(texts(&[f64::NAN])[0], "NaN");
    }

    #[test]
    fn ticks_have_distinct_labels_at_every_chart_size() {
        for most in (-80..80).map(|i| 1.37_f64.powi(i)) {
            for about in TICKS {
                let axis: plotters::coord::types::RangedCoordf64 = (0.0..most).into();
                let digits = Ticks::of_axis(&axis, about);
                let mut found: Vec<String> = axis
                    .key_points(BoldPoints(about))
                    .into_iter()
                    .map(|tick| digits.text(tick))
                    .collect();
                assert!(found.iter().all(|text| text.len() < 9), "{found:?}");
                let ticks = found.len();
                found.dedup();
                assert!(found.len() == ticks && ticks > 1, "{most}: {found:?}");
            }
        }
    }
}
