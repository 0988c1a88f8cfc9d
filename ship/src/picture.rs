//! Figures as PNG, for trackers that cannot show SVG.
//!
//! It draws the elements that our figures use and refuses others. Text is drawn with a font of
//! ours, so a figure is the same on every machine, also on a node without fonts. The font has
//! Latin, Greek, Cyrillic and mathematical letters; others are left out.

use std::str::FromStr;

use roxmltree::{Document, Node};
use tiny_skia::{Color, FillRule, Paint, Path, PathBuilder, Pixmap, Rect, Stroke, Transform};
use ttf_parser::{Face, OutlineBuilder};

/// DejaVu Sans; its licence lies beside it.
const FONT: &[u8] = include_bytes!("../assets/DejaVuSans.ttf");

/// Most pixels of a picture: a quarter of a gigabyte while it is drawn.
const MOST_PIXELS: u64 = 1 << 26;

#[cfg(test)]
thread_local! {
    /// Number of figures that this thread has drawn.
    pub(crate) static DRAWN: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// A picture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Png {
    /// The bytes of the file.
    pub(crate) bytes: Vec<u8>,
    /// Width in pixels.
    pub(crate) width: u32,
    /// Height in pixels.
    pub(crate) height: u32,
}

/// Draws a figure on white.
///
/// # Errors
///
/// The fault of the figure, or that it is too large for memory.
pub(crate) fn png(svg: &[u8]) -> Result<Png, String> {
    #[cfg(test)]
    DRAWN.set(DRAWN.get() + 1);
    let (pixels, width, height) = draw(svg)?;
    let bytes = pixels.encode_png();
    let bytes = bytes.map_err(|found| format!("no PNG: {found}"))?;
    Ok(Png {
        bytes,
        width,
        height,
    })
}

fn draw(svg: &[u8]) -> Result<(Pixmap, u32, u32), String> {
    let text = std::str::from_utf8(svg).map_err(|found| format!("no figure: {found}"))?;
    let document = Document::parse(text).map_err(|found| format!("no figure: {found}"))?;
    let root = Element(document.root_element());
    if root.name() != "svg" {
        return Err(format!("no figure: it is a <{}>", root.name()));
    }
    let face = Face::parse(FONT, 0).map_err(|found| format!("no font: {found}"))?;
    let (width, height) = (root.number("width", 0)?, root.number("height", 0)?);
    let large = || format!("a figure of {width} x {height} pixels is too large");
    if u64::from(width) * u64::from(height) > MOST_PIXELS {
        return Err(large());
    }
    let mut pixels = Pixmap::new(width, height).ok_or_else(large)?;
    pixels.fill(Color::WHITE);
    for node in root.0.children().filter(Node::is_element) {
        Element(node).draw(&face, &mut pixels)?;
    }
    Ok((pixels, width, height))
}

/// An element of a figure.
struct Element<'a>(Node<'a, 'a>);

impl Element<'_> {
    fn name(&self) -> &str {
        self.0.tag_name().name()
    }

    fn draw(&self, face: &Face<'_>, pixels: &mut Pixmap) -> Result<(), String> {
        let (Some(path), transform) = (self.outline(face)?, self.transform()?) else {
            return Ok(());
        };
        if let Some(fill) = self.paint("fill", "#000000")? {
            pixels.fill_path(&path, &fill, FillRule::Winding, transform, None);
        }
        if let Some(paint) = self.paint("stroke", "none")? {
            let width = self.number("stroke-width", 1.0)?;
            let stroke = Stroke {
                width,
                ..Stroke::default()
            };
            pixels.stroke_path(&path, &paint, &stroke, transform, None);
        }
        Ok(())
    }

    /// Its outline; `None` if it is empty.
    fn outline(&self, face: &Face<'_>) -> Result<Option<Path>, String> {
        let number = |name| self.number(name, 0.0);
        Ok(match self.name() {
            "rect" => {
                let size = (number("width")?, number("height")?);
                let rect = Rect::from_xywh(number("x")?, number("y")?, size.0, size.1);
                rect.map(PathBuilder::from_rect)
            }
            "circle" => PathBuilder::from_circle(number("cx")?, number("cy")?, number("r")?),
            "line" => {
                let mut line = PathBuilder::new();
                line.move_to(number("x1")?, number("y1")?);
                line.line_to(number("x2")?, number("y2")?);
                line.finish()
            }
            "polyline" => self.read("points", |points| polyline(points, false))?,
            "polygon" => self.read("points", |points| polyline(points, true))?,
            "path" => self.read("d", path)?,
            "text" => self.text(face)?,
            name => return Err(format!("no figure: <{name}> is not drawn")),
        })
    }

    /// The outline of its text, on one line.
    fn text(&self, face: &Face<'_>) -> Result<Option<Path>, String> {
        let size: f32 = self.number("font-size", 16.0)?;
        let down = self.read("dy", |dy| match dy.strip_suffix("em") {
            _ if dy.is_empty() => Some(0.0),
            Some(dy) => Some(dy.parse::<f32>().ok()? * size),
            None => Some(dy.strip_suffix("ex")?.parse::<f32>().ok()? * size / 2.0),
        })?;
        let mut text = Text {
            path: PathBuilder::new(),
            scale: size / f32::from(face.units_per_em()),
            x: 0.0,
        };
        for letter in self.0.text().unwrap_or_default().trim().chars() {
            if let Some(glyph) = face.glyph_index(letter) {
                face.outline_glyph(glyph, &mut text);
                let advance = face.glyph_hor_advance(glyph).unwrap_or_default();
                text.x += f32::from(advance) * text.scale;
            }
        }
        let left = match self.attribute("text-anchor") {
            "middle" => text.x / 2.0,
            "end" => text.x,
            _ => 0.0,
        };
        let (x, y) = (self.number("x", 0.0)? - left, self.number("y", 0.0)? + down);
        let path = text.path.finish();
        Ok(path.and_then(|path| path.transform(Transform::from_translate(x, y))))
    }

    /// `rotate(DEGREES, X, Y)`, or empty.
    fn transform(&self) -> Result<Transform, String> {
        self.read("transform", |text| {
            if text.is_empty() {
                return Some(Transform::identity());
            }
            let inside = text.strip_prefix("rotate(")?.strip_suffix(')')?;
            match numbers(inside)?[..] {
                [degrees, x, y] => Some(Transform::from_rotate_at(degrees, x, y)),
                _ => None,
            }
        })
    }

    /// `none` or `#RRGGBB`, with `opacity`.
    fn paint(&self, name: &str, default: &str) -> Result<Option<Paint<'static>>, String> {
        let opacity: f32 = self.number("opacity", 1.0)?;
        self.read(name, |text| {
            let text = if text.is_empty() { default } else { text };
            if text == "none" {
                return Some(None);
            }
            let digits = text.strip_prefix('#').filter(|digits| digits.len() == 6)?;
            let [_, red, green, blue] = u32::from_str_radix(digits, 16).ok()?.to_be_bytes();
            let mut colour = Color::from_rgba8(red, green, blue, 255);
            colour.apply_opacity(opacity);
            let mut paint = Paint::default();
            paint.set_color(colour);
            Some(Some(paint))
        })
    }

    fn number<T: FromStr>(&self, name: &str, default: T) -> Result<T, String> {
        match self.attribute(name) {
            "" => Ok(default),
            _ => self.read(name, |text| text.parse().ok()),
        }
    }

    /// - `read`: the meaning of a value, if it has one
    fn read<T>(&self, name: &str, read: impl FnOnce(&str) -> Option<T>) -> Result<T, String> {
        let text = self.attribute(name);
        let shown: String = text.chars().take(80).collect();
        read(text).ok_or_else(|| format!("no figure: {name}={shown:?}"))
    }

    /// The value of an attribute; empty if it is not set.
    fn attribute(&self, name: &str) -> &str {
        self.0.attribute(name).unwrap_or_default()
    }
}

/// Outlines of letters side by side, from x = 0 on.
struct Text {
    path: PathBuilder,
    /// Pixels of a unit of the font.
    scale: f32,
    /// Left edge of the next letter.
    x: f32,
}

impl Text {
    /// A point of a letter in pixels, with y downwards.
    fn at(&self, x: f32, y: f32) -> (f32, f32) {
        (self.x + x * self.scale, -y * self.scale)
    }
}

impl OutlineBuilder for Text {
    fn move_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.path.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.path.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let ((x1, y1), (x, y)) = (self.at(x1, y1), self.at(x, y));
        self.path.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let ((x1, y1), (x2, y2), (x, y)) = (self.at(x1, y1), self.at(x2, y2), self.at(x, y));
        self.path.cubic_to(x1, y1, x2, y2, x, y);
    }

    fn close(&mut self) {
        self.path.close();
    }
}

/// Numbers between spaces, commas and minus signs.
fn numbers(text: &str) -> Option<Vec<f32>> {
    let text = text.replace('-', " -");
    let words = text.split([' ', ',', '\n']).filter(|word| !word.is_empty());
    words.map(|word| word.parse().ok()).collect()
}

/// The outline of `points`; the outer `None` if they cannot be parsed.
fn polyline(points: &str, is_closed: bool) -> Option<Option<Path>> {
    let mut line = PathBuilder::new();
    for (index, point) in numbers(points)?.chunks(2).enumerate() {
        match *point {
            [x, y] if index == 0 => line.move_to(x, y),
            [x, y] => line.line_to(x, y),
            _ => return None,
        }
    }
    if is_closed {
        line.close();
    }
    Some(line.finish())
}

/// The outline of `d`, which has moves and straight lines; the outer `None` for anything else.
fn path(d: &str) -> Option<Option<Path>> {
    let mut path = PathBuilder::new();
    let ((mut x, mut y), mut start) = ((0.0, 0.0), (0.0, 0.0));
    let mut rest = d.trim();
    while let Some(command) = rest.chars().next() {
        let behind = rest.get(1..)?;
        let end = behind.find(|letter: char| letter.is_ascii_alphabetic());
        let (inside, next) = behind.split_at(end.unwrap_or(behind.len()));
        let (numbers, from) = match command.is_ascii_lowercase() {
            true => (numbers(inside)?, 1.0),
            false => (numbers(inside)?, 0.0),
        };
        match (command.to_ascii_lowercase(), numbers.len()) {
            ('m', 2) => {
                (x, y) = (from * x + numbers[0], from * y + numbers[1]);
                start = (x, y);
                path.move_to(x, y);
            }
            ('l', _) => {
                for point in numbers.chunks(2) {
                    let &[right, down] = point else { return None };
                    (x, y) = (from * x + right, from * y + down);
                    path.line_to(x, y);
                }
            }
            ('h', 1) => {
                x = from * x + numbers[0];
                path.line_to(x, y);
            }
            ('v', 1) => {
                y = from * y + numbers[0];
                path.line_to(x, y);
            }
            ('z', 0) => {
                (x, y) = start;
                path.close();
            }
            _ => return None,
        }
        rest = next;
    }
    Some(path.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(inside: &str) -> String {
        format!(
            r#"<svg width="60" height="20" viewBox="0 0 60 20" xmlns="http://www.w3.org/2000/svg">{inside}</svg>"#
        )
    }

    fn pixels(inside: &str) -> Pixmap {
        let found = png(figure(inside).as_bytes()).unwrap();
        assert_eq!((found.width, found.height), (60, 20));
        Pixmap::decode_png(&found.bytes).unwrap()
    }

    /// Pixels that are not white.
    fn drawn(inside: &str) -> usize {
        let white =
            |pixel: &&tiny_skia::PremultipliedColorU8| (pixel.red(), pixel.alpha()) == (255, 255);
        let pixels = pixels(inside);
        pixels.pixels().len() - pixels.pixels().iter().filter(white).count()
    }

    #[test]
    fn a_figure_is_drawn_on_white() {
        assert_eq!(drawn(""), 0);
        let square = r##"<rect x="2" y="3" width="4" height="5" fill="#000000"/>"##;
        assert_eq!(drawn(square), 20);
    }

    #[test]
    fn every_element_of_a_figure_is_drawn() {
        for (element, least) in [
            (
                r##"<rect width="9" height="9" stroke="#0000FF" fill="none"/>"##,
                30,
            ),
            (
                r##"<line x1="1" y1="1" x2="50" y2="15" stroke="#0080FF" stroke-width="2"/>"##,
                90,
            ),
            (
                r##"<polyline fill="none" stroke="#000000" points="1,1 20,1 20,9 "/>"##,
                20,
            ),
            (
                r##"<polygon opacity="0.5" fill="#123456" points="0,0 10,0 10,10 "/>"##,
                45,
            ),
            (
                r##"<circle cx="9" cy="9" r="4" fill="#1F5896" stroke="none"/>"##,
                40,
            ),
        ] {
            assert!(drawn(element) >= least, "{element}: {}", drawn(element));
        }
        let path =
            r##"<path fill="#33679A" d="m2 3h4v5h-4zm10-1h2v2h-2z M20,0 L30,0 30,5 H20 V0 Z"/>"##;
        assert_eq!(drawn(path), 20 + 4 + 50);
    }

    #[test]
    fn text_is_drawn_at_its_anchor() {
        let left_and_right = |anchor: &str, more: &str| {
            let text = format!(
                r#"<text x="30" y="10" dy="0.5ex" text-anchor="{anchor}" font-size="9"{more}>ab</text>"#
            );
            let pixels = pixels(&text);
            let is_drawn = |index: &usize| pixels.pixels()[*index].red() < 255;
            let (left, right): (Vec<_>, Vec<_>) = (0..60 * 20)
                .filter(is_drawn)
                .partition(|index| index % 60 < 30);
            (left.len(), right.len())
        };
        let (left, right) = left_and_right("start", "");
        assert!(left == 0 && right > 30, "{left} {right}");
        let (left, right) = left_and_right("end", "");
        assert!(left > 30 && right == 0, "{left} {right}");
        let (left, right) = left_and_right("middle", "");
        assert!(left > 15 && right > 15, "{left} {right}");
        let (left, right) = left_and_right("start", r#" transform="rotate(180, 30, 10)""#);
        assert!(left > 30 && right == 0, "{left} {right}");
    }

    #[test]
    fn text_is_drawn_without_fonts_of_the_machine() {
        for family in ["sans-serif", "monospace", "Helvetica"] {
            for text in ["step 300", "ΔW · 10⁻³", "Ж"] {
                let text = format!(
                    r#"<text x="2" y="15" font-family="{family}" font-size="12">{text}</text>"#
                );
                assert!(drawn(&text) > 10, "{text}");
            }
        }
    }

    #[test]
    fn bad_figures_are_refused() {
        for (bytes, reason) in [
            (&b""[..], "no figure: "),
            (b"\x89PNG", "no figure: "),
            (b"<html/>", "no figure: it is a <html>"),
            (br#"<svg width="9" height="x"/>"#, "no figure: height=\"x\""),
            (
                br#"<svg width="9" height="9"><g/></svg>"#,
                "no figure: <g> is not drawn",
            ),
            (
                br#"<svg width="9" height="9"><path d="M1 1C2 2"/></svg>"#,
                "no figure: d=\"M1 1C2 2\"",
            ),
            (
                br#"<svg width="99999" height="99999" xmlns="http://www.w3.org/2000/svg"></svg>"#,
                "99999 x 99999 pixels is too large",
            ),
        ] {
            let found = png(bytes).unwrap_err();
            assert!(found.contains(reason), "{found}");
        }
    }

    /// Draws `SPD_FIGURE=in.svg` as `SPD_PICTURE=out.png`, for inspection.
    #[test]
    fn a_figure_to_look_at() {
        let (Some(from), Some(to)) = (
            std::env::var_os("SPD_FIGURE"),
            std::env::var_os("SPD_PICTURE"),
        ) else {
            return spd_testing::skip("SPD_FIGURE and SPD_PICTURE");
        };
        let begun = std::time::Instant::now();
        let found = png(&spd_files::read(from.as_ref()).unwrap()).unwrap();
        let (bytes, elapsed) = (found.bytes.len(), begun.elapsed());
        eprintln!(
            "{} x {}, {bytes} bytes, {elapsed:?}",
            found.width, found.height
        );
        spd_files::atomic::write_file(to.as_ref(), &[&found.bytes]).unwrap();
    }
}
