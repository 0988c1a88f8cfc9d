//! What all panels share: a title, axes with ticks and labels, and numbers in few letters.

use plotters::coord::Shift;
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
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

/// What stands at the ticks of both axes.
pub(super) type Labels<'l> = (&'l dyn Fn(&f64) -> String, &'l dyn Fn(&f64) -> String);

/// Frame, ticks and labels; no lines across.
pub(super) fn mesh<'s, X, Y>(
    chart: &mut ChartContext<'_, SVGBackend<'s>, Cartesian2d<X, Y>>,
    axes: &Axes,
    (x, y): Labels<'_>,
) -> Drawn
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc(axes.x)
        .y_desc(axes.y)
        .x_labels(8)
        .y_labels(7)
        .label_style((FONT, 11))
        .axis_desc_style((FONT, 12))
        .x_label_formatter(&x)
        .y_label_formatter(&y)
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

/// A number in few letters.
pub(super) fn short(value: f64) -> String {
    match value.abs() {
        size if size < 1e-12 => "0".to_owned(),
        size if !(1e-2..1e4).contains(&size) => format!("{value:.0e}"),
        size if size < 1.0 => format!("{value:.2}"),
        size if size < 10.0 && value.fract() != 0.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let texts = [0.0, 0.5, 1.0, 2.5, 130.0, 20_000.0, 1e-4].map(short);
        assert_eq!(texts, ["0", "0.50", "1", "2.5", "130", "2e4", "1e-4"]);
        assert_eq!((whole(&3.0), whole(&2.5)), ("3".to_owned(), String::new()));
    }
}
