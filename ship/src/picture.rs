//! Figures as PNG, for the trackers that show no SVG.
//!
//! Text is drawn by a font of ours, so that a figure is the same on every machine, and a cluster node without fonts draws it too. It has
//! Latin, Greek, Cyrillic and mathematical letters; others are left out.

use std::sync::{Arc, LazyLock};

use resvg::tiny_skia::{Color, Pixmap, Transform};
use resvg::usvg::{self, Tree, fontdb::Database};

/// DejaVu Sans; its licence lies beside it.
const FONT: &[u8] = include_bytes!("../assets/DejaVuSans.ttf");

/// Pixels a picture has at most: a quarter of a gigabyte while it is drawn.
const MOST_PIXELS: u64 = 1 << 26;

static FONTS: LazyLock<Arc<Database>> = LazyLock::new(|| {
    let mut fonts = Database::new();
    fonts.load_font_data(FONT.to_vec());
    let names: Vec<String> = fonts
        .faces()
        .flat_map(|face| face.families.iter().map(|(name, _)| name.clone()))
        .collect();
    if let Some(name) = names.first() {
        fonts.set_sans_serif_family(name);
        fonts.set_serif_family(name);
        fonts.set_monospace_family(name);
    }
    Arc::new(fonts)
});

#[cfg(test)]
thread_local! {
    /// How many figures this thread has drawn.
    pub(crate) static DRAWN: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// A picture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Png {
    /// The file.
    pub(crate) bytes: Vec<u8>,
    /// Pixels from left to right.
    pub(crate) width: u32,
    /// Pixels from top to bottom.
    pub(crate) height: u32,
}

/// Draws a figure on white.
///
/// # Errors
///
/// What is wrong with the figure, or that it is larger than memory should hold.
pub(crate) fn png(svg: &[u8]) -> Result<Png, String> {
    #[cfg(test)]
    DRAWN.set(DRAWN.get() + 1);
    let options = usvg::Options {
        fontdb: Arc::clone(&FONTS),
        font_family: "sans-serif".to_owned(),
        ..usvg::Options::default()
    };
    let tree = Tree::from_data(svg, &options).map_err(|found| format!("no figure: {found}"))?;
    let size = tree.size().to_int_size();
    let (width, height) = (size.width(), size.height());
    let large = || format!("a figure of {width} x {height} pixels is too large");
    if u64::from(width) * u64::from(height) > MOST_PIXELS {
        return Err(large());
    }
    let mut pixels = Pixmap::new(width, height).ok_or_else(large)?;
    pixels.fill(Color::WHITE);
    resvg::render(&tree, Transform::identity(), &mut pixels.as_mut());
    let bytes = pixels.encode_png();
    let bytes = bytes.map_err(|found| format!("no PNG: {found}"))?;
    Ok(Png {
        bytes,
        width,
        height,
    })
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
        let white = |pixel: &&resvg::tiny_skia::PremultipliedColorU8| {
            (pixel.red(), pixel.alpha()) == (255, 255)
        };
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
    fn text_is_drawn_whatever_fonts_the_machine_has() {
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
    fn what_is_no_figure_is_refused() {
        for (bytes, reason) in [
            (&b""[..], "no figure: "),
            (b"\x89PNG", "no figure: "),
            (
                br#"<svg width="99999" height="99999" xmlns="http://www.w3.org/2000/svg"></svg>"#,
                "99999 x 99999 pixels is too large",
            ),
        ] {
            let found = png(bytes).unwrap_err();
            assert!(found.contains(reason), "{found}");
        }
    }

    /// `SPD_FIGURE=in.svg SPD_PICTURE=out.png` to look at one.
    #[test]
    fn a_figure_to_look_at() {
        let (Some(from), Some(to)) = (
            std::env::var_os("SPD_FIGURE"),
            std::env::var_os("SPD_PICTURE"),
        ) else {
            eprintln!("skipped: a_figure_to_look_at: SPD_FIGURE and SPD_PICTURE name no files");
            return;
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
