//! Panels of figures: heat maps, histograms, sorted values and bars, side by side in one SVG.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::anyhow;
use plotters::prelude::*;

use super::axes::{Area, Axes, Drawn, FONT, INK, Labels, Ticks, mesh, titled};
use super::bars::Bars;
use super::histogram::Histogram;
use super::matrix::Matrix;
use crate::fault::Fault;

/// Width and height of a panel, in pixels.
const PANEL: (u32, u32) = (420, 300);
/// Height of the title.
const TITLE: u32 = 36;
/// Width of the scale of colours beside a heat map.
const SCALE: i32 = 64;
/// Colours from white to the darkest.
const SHADES: f32 = 64.0;
/// Smallest mean that a log scale reaches down to.
const FLOOR: f64 = 1e-6;

/// Width of a line, in pixels: pages show figures at half their size.
const LINE: u32 = 2;
/// Most points of a line.
const POINTS: usize = 150;

/// One plot.
pub(super) enum Panel {
    Heat(Axes, Heat),
    Steps(Axes, Histogram),
    /// Values in the order to be shown.
    Trace(Axes, Vec<f64>),
    Bars(Axes, Bars),
}

/// A matrix in colours, row 0 on top.
pub(super) struct Heat {
    cells: Vec<Vec<f32>>,
    /// Rows and columns of the matrix that a cell stands for.
    each: [usize; 2],
    low: f32,
    high: f32,
}

impl Heat {
    /// White is 0, and the largest value is darkest.
    pub(super) fn from_zero(matrix: &Matrix) -> Self {
        let heat = Self::new(matrix);
        let high = heat.largest().max(1.0);
        Self { high, ..heat }
    }

    /// White is 0, red is above and blue below.
    pub(super) fn around_zero(matrix: &Matrix) -> Self {
        let heat = Self::new(matrix);
        let high = heat.largest().max(f32::MIN_POSITIVE);
        Self {
            low: -high,
            high,
            ..heat
        }
    }

    fn new(matrix: &Matrix) -> Self {
        Self {
            cells: matrix.rows.clone(),
            each: matrix.each,
            low: 0.0,
            high: 1.0,
        }
    }

    fn largest(&self) -> f32 {
        let values = self.cells.iter().flatten();
        values.fold(0.0, |largest, value| value.abs().max(largest))
    }

    /// One of [`SHADES`] colours a side, so that cells of one colour can be drawn together.
    fn colour(&self, value: f32) -> RGBColor {
        const GROUND: [f32; 3] = [255.0, 255.0, 255.0];
        const BLUE: [[f32; 3]; 3] = [GROUND, [107.0, 174.0, 214.0], [8.0, 48.0, 107.0]];
        const RED: [[f32; 3]; 3] = [GROUND, [244.0, 128.0, 96.0], [153.0, 10.0, 32.0]];
        let part = ((value / self.high).clamp(-1.0, 1.0) * SHADES).round() / SHADES;
        let stops = if self.low < 0.0 && part > 0.0 {
            RED
        } else {
            BLUE
        };
        let place = 2.0 * part.abs();
        let (from, to, part) = if place < 1.0 {
            (stops[0], stops[1], place)
        } else {
            (stops[1], stops[2], place - 1.0)
        };
        #[expect(clippy::cast_possible_truncation, reason = "between 0 and 255")]
        let mix = |index: usize| (from[index] + part * (to[index] - from[index])).round() as u8;
        RGBColor(mix(0), mix(1), mix(2))
    }

    /// Draws all but the cells, which it adds to `to`.
    fn draw(&self, area: &Area<'_>, axes: &Axes, to: &mut String) -> Drawn {
        let (width, height) = area.dim_in_pixel();
        let (plot, scale) = area.split_horizontally(width.cast_signed() - SCALE);
        let rows = (self.cells.len() * self.each[0]) as f64;
        let columns = (self.cells.first().map_or(0, Vec::len) * self.each[1]) as f64;
        // The middle of a row or column is its number.
        let (x, y) = (-0.5..columns - 0.5, rows - 0.5..-0.5);
        let mut chart = titled(&plot, axes).build_cartesian_2d(x, y)?;
        mesh(&mut chart, axes, (Labels::Whole, Labels::Whole))?;
        let corners = [(-0.5, -0.5), (columns - 0.5, rows - 0.5)];
        let frame = Rectangle::new(corners, BLACK.stroke_width(1));
        chart.draw_series([frame])?;
        let place = |row: usize, column: usize| {
            let (x, y) = (column * self.each[1], row * self.each[0]);
            chart.backend_coord(&(x as f64 - 0.5, y as f64 - 0.5))
        };
        self.draw_cells(place, to);
        self.draw_scale(&scale, height.cast_signed())
    }

    /// One path a colour: a rectangle for each cell would be a file of megabytes.
    ///
    /// - `place`: pixels of the upper left corner of a row and column
    fn draw_cells(&self, place: impl Fn(usize, usize) -> (i32, i32), to: &mut String) {
        // The path of a colour, and the start of its last rectangle, to which the next one is
        // relative.
        let mut paths: BTreeMap<(u8, u8, u8), (String, i32, i32)> = BTreeMap::new();
        for (row, cells) in self.cells.iter().enumerate() {
            let mut column = 0;
            for run in cells.chunk_by(|a, b| self.colour(*a) == self.colour(*b)) {
                let ((x, y), (right, below)) =
                    (place(row, column), place(row + 1, column + run.len()));
                column += run.len();
                let RGBColor(red, green, blue) = self.colour(run[0]);
                // The ground is white.
                if RGBColor(red, green, blue) != WHITE {
                    let (path, from_x, from_y) = paths.entry((red, green, blue)).or_default();
                    let (width, height) = (right - x, below - y);
                    let (by, down) = (x - *from_x, y - *from_y);
                    let _ = write!(path, "m{by} {down}h{width}v{height}h{}z", -width);
                    (*from_x, *from_y) = (x, y);
                }
            }
        }
        for ((red, green, blue), (path, ..)) in paths {
            let _ = writeln!(
                to,
                "<path fill=\"#{red:02X}{green:02X}{blue:02X}\" d=\"{path}\"/>"
            );
        }
    }

    fn draw_scale(&self, area: &Area<'_>, height: i32) -> Drawn {
        const STEPS: i32 = 48;
        let (top, bottom) = (34, height - 46);
        let at = |step: i32| top + (bottom - top) * step / STEPS;
        for step in 0..STEPS {
            let part = 1.0 - (step as f32 + 0.5) / STEPS as f32;
            let value = self.low + part * (self.high - self.low);
            let corners = [(2, at(step)), (16, at(step + 1))];
            area.draw(&Rectangle::new(corners, self.colour(value).filled()))?;
        }
        area.draw(&Rectangle::new(
            [(2, top), (16, bottom)],
            BLACK.stroke_width(1),
        ))?;
        let [high, low] = [self.high, self.low].map(f64::from);
        let values = [high, (high + low) / 2.0, low];
        // Values of weights have more digits than there is room for.
        let texts = Ticks::within(0.02, &values);
        for (value, y) in values.into_iter().zip([top, (top + bottom) / 2, bottom]) {
            area.draw(&Text::new(texts.text(value), (20, y - 6), (FONT, 11)))?;
        }
        Ok(())
    }
}

impl Histogram {
    fn draw(&self, area: &Area<'_>, axes: &Axes) -> Drawn {
        let most = self.counts.iter().copied().max().unwrap_or(0).max(1) as f64;
        let width = (self.high - self.low) / self.counts.len() as f64;
        let ground = if axes.log { 0.5 } else { 0.0 };
        let bars = || {
            let bars = self
                .counts
                .iter()
                .enumerate()
                .filter(|(_, count)| **count > 0);
            bars.map(|(bin, &count)| {
                let x = self.low + bin as f64 * width;
                Rectangle::new([(x, ground), (x + width, count as f64)], INK.filled())
            })
        };
        let mut builder = titled(area, axes);
        if axes.log {
            let y = (ground..most * 2.0).log_scale();
            let mut chart = builder.build_cartesian_2d(self.low..self.high, y)?;
            mesh(&mut chart, axes, (Labels::Numbers, Labels::Numbers))?;
            chart.draw_series(bars())?;
        } else {
            let mut chart = builder.build_cartesian_2d(self.low..self.high, 0.0..most * 1.05)?;
            mesh(&mut chart, axes, (Labels::Numbers, Labels::Numbers))?;
            chart.draw_series(bars())?;
        }
        Ok(())
    }
}

fn draw_trace(values: &[f64], area: &Area<'_>, axes: &Axes) -> Drawn {
    let most = values.iter().copied().fold(FLOOR, f64::max);
    let least = values.iter().copied().fold(most, f64::min).max(FLOOR);
    let last = values.len() as f64;
    let count = values.len();
    let shown = count.min(POINTS);
    // Of more values than pixels, some; the first and the last are among them.
    let rank = |point: usize| point * (count - 1) / (shown - 1).max(1);
    let points = || {
        (0..shown).map(rank).map(|rank| {
            let floor = if axes.log { FLOOR } else { 0.0 };
            (rank as f64 + 0.5, values[rank].max(floor))
        })
    };
    let dots = || {
        let few = points().take(if count > shown { 0 } else { shown });
        few.map(|point| Circle::new(point, 2, INK.filled()))
    };
    let mut builder = titled(area, axes);
    if axes.log {
        // From one power of ten to another, so that both ends have a tick.
        let decade = |value: f64, round: fn(f64) -> f64| 10_f64.powf(round(value.log10()));
        let (low, high) = (decade(least, f64::floor), decade(most, f64::ceil));
        let y = (low..high.max(10.0 * low)).log_scale();
        let mut chart = builder.build_cartesian_2d(0.0..last, y)?;
        mesh(&mut chart, axes, (Labels::Whole, Labels::Numbers))?;
        chart.draw_series(LineSeries::new(points(), INK.stroke_width(LINE)))?;
        chart.draw_series(dots())?;
    } else {
        let mut chart = builder.build_cartesian_2d(0.0..last, 0.0..most * 1.05)?;
        mesh(&mut chart, axes, (Labels::Whole, Labels::Numbers))?;
        chart.draw_series(LineSeries::new(points(), INK.stroke_width(LINE)))?;
        chart.draw_series(dots())?;
    }
    Ok(())
}

/// The panels under a title, as the text of an SVG file: a picture about as wide as it is high.
///
/// - `together`: so many that follow each other are of one site, and side by side
pub(super) fn grid(title: &str, panels: &[Panel], together: usize) -> Result<String, Fault> {
    let sites = panels.len().div_ceil(together);
    // Two panels are wider than one is high.
    let beside = (1..=sites).find(|beside| beside * beside * together >= sites);
    let columns = together * beside.unwrap_or(1);
    let rows = panels.len().div_ceil(columns).max(1);
    let pixels = |count: usize, each: u32| {
        u32::try_from(count)
            .unwrap_or(u32::MAX)
            .saturating_mul(each)
    };
    let size = (
        pixels(columns, PANEL.0),
        pixels(rows, PANEL.1).saturating_add(TITLE),
    );
    let (mut svg, mut cells) = (String::new(), String::new());
    let mut drawn = || -> Drawn {
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE)?;
        let (head, body) = root.split_vertically(TITLE.cast_signed());
        head.draw(&Text::new(title, (14, 11), (FONT, 17)))?;
        for (area, panel) in body.split_evenly((rows, columns)).iter().zip(panels) {
            match panel {
                Panel::Heat(axes, heat) => heat.draw(area, axes, &mut cells),
                Panel::Steps(axes, steps) => steps.draw(area, axes),
                Panel::Trace(axes, values) => draw_trace(values, area, axes),
                Panel::Bars(axes, bars) => bars.draw(area, axes),
            }?;
        }
        root.present()
    };
    drawn().map_err(|error| Fault::Failed(anyhow!("a figure cannot be drawn: {error}")))?;
    // Over the ground, which is the first that was drawn, and under the frames.
    if let Some((ground, _)) = svg.match_indices("/>\n").next() {
        svg.insert_str(ground + "/>\n".len(), &cells);
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(row: &[f32]) -> Matrix {
        Matrix {
            site: "a".into(),
            order: (0..row.len()).collect(),
            each: [1, 1],
            rows: vec![row.to_vec()],
        }
    }

    #[test]
    fn colours_go_from_white_to_both_ends() {
        let heat = Heat::around_zero(&matrix(&[1.0, -1.0]));
        assert_eq!(heat.colour(0.0), WHITE);
        assert_eq!(heat.colour(1.0), RGBColor(153, 10, 32));
        assert_eq!(heat.colour(-1.0), RGBColor(8, 48, 107));
        assert_eq!(
            Heat::from_zero(&matrix(&[0.5])).colour(1.0),
            RGBColor(8, 48, 107)
        );
    }

    #[test]
    fn cells_of_one_colour_are_one_path() {
        const AT: [i32; 5] = [0, 1, 2, 3, 4];
        let mut heat = Heat::from_zero(&matrix(&[1.0, 1.0, 0.0, 1.0]));
        heat.cells.push(vec![0.5, 0.0, 0.0, 1.0]);
        let mut path = String::new();
        let corner = |row: usize, column: usize| (10 * AT[column], 5 * AT[row]);
        heat.draw_cells(corner, &mut path);
        assert_eq!(
            path,
            "<path fill=\"#08306B\" d=\"m0 0h20v5h-20zm30 0h10v5h-10zm0 5h10v5h-10z\"/>\n\
             <path fill=\"#6BAED6\" d=\"m0 5h10v5h-10z\"/>\n"
        );
    }

    #[test]
    fn every_panel_is_drawn_and_foreign_text_is_escaped() {
        let trace = |log: bool| {
            let axes = Axes::new("a <b> & c", "x", "y");
            let axes = if log { axes.log() } else { axes };
            Panel::Trace(axes, vec![1.0, 0.5, 0.0])
        };
        let steps = Histogram {
            site: "a".into(),
            low: 0.0,
            high: 1.0,
            counts: vec![0, 3],
        };
        let panels = [
            trace(false),
            trace(true),
            Panel::Steps(Axes::new("s", "x", "y").log(), steps),
            Panel::Heat(
                Axes::new("h", "x", "y"),
                Heat::from_zero(&matrix(&[0.0, 1.0])),
            ),
        ];
        let svg = grid("all of them", &panels, 3).unwrap();
        assert!(
            svg.contains("width=\"1260\" height=\"636\""),
            "{}",
            &svg[..200]
        );
        assert!(svg.contains("a &lt;b&gt; &amp; c") && svg.contains("all of them"));
        assert!(svg.trim_end().ends_with("</svg>"));
        // The second cell, under the frame of its panel.
        let cell = svg.find("<path fill=\"#08306B\" d=\"m").unwrap();
        assert!(cell < svg.find("<text").unwrap(), "{svg}");
        // No panels, no figure, and no panic.
        assert!(grid("none", &[], 3).is_ok());
    }
}
