//! Bars of named things, one below the other.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::axes::{Area, Axes, Drawn, FONT, INK, Ticks};

/// Width of a letter of a name, in pixels, about.
const LETTER: usize = 6;
/// Most pixels that names take.
const NAMES: usize = 190;

/// Ticks of the axis, about.
const TICKS: usize = 5;

/// Named values, none below 0.
pub(super) struct Bars {
    pub(super) bars: Vec<(String, f64)>,
    /// The end of the axis.
    pub(super) most: f64,
}

impl Bars {
    pub(super) fn draw(&self, area: &Area<'_>, axes: &Axes) -> Drawn {
        let letters = self.bars.iter().map(|(name, _)| name.chars().count());
        let names = (letters.max().unwrap_or(0) * LETTER).min(NAMES) + 12;
        let most = self.most.max(f64::MIN_POSITIVE) * 1.15;
        let mut chart = ChartBuilder::on(area)
            .caption(&axes.title, (FONT, 14))
            .margin(8)
            .x_label_area_size(36)
            .y_label_area_size(u32::try_from(names).unwrap_or(u32::MAX))
            .build_cartesian_2d(0.0..most, self.bars.len() as f64..0.0)?;
        let ticks = Ticks::of_axis(chart.as_coord_spec().x_spec(), TICKS);
        chart
            .configure_mesh()
            .disable_mesh()
            .x_desc(axes.x)
            .x_labels(TICKS)
            .y_labels(0)
            .label_style((FONT, 11))
            .axis_desc_style((FONT, 12))
            .x_label_formatter(&|x| ticks.text(*x))
            .draw()?;
        let style = |side| {
            let style = (FONT, 10).into_font().into_text_style(area);
            style.pos(Pos::new(side, VPos::Center))
        };
        let (right, left) = (style(HPos::Right), style(HPos::Left));
        for (number, (name, value)) in self.bars.iter().enumerate() {
            let (top, middle) = (number as f64 + 0.15, number as f64 + 0.5);
            let bar = Rectangle::new([(0.0, top), (*value, top + 0.7)], INK.filled());
            chart.draw_series([bar])?;
            let said = Text::new(name.clone(), (-6, 0), right.clone());
            chart.draw_series([EmptyElement::at((0.0, middle)) + said])?;
            let said = Text::new(format!("{value:.2}"), (4, 0), left.clone());
            chart.draw_series([EmptyElement::at((*value, middle)) + said])?;
        }
        Ok(())
    }
}
