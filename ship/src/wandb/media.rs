//! Files of history rows: W&B stores them beside the run, and the row names them.

use std::path::Path;

use ring::digest::{SHA256, digest};

use super::json::{number, object, string};
use crate::run::RunInfo;

/// The first bytes of a PNG: its signature, and the head of the chunk with its width and height.
const PNG: [u8; 16] = *b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR";

/// A file in W&B's form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Media {
    /// Its name there.
    pub(super) name: String,
    /// Its relative path in the run directory.
    pub(super) from: String,
    /// The encoded value of the row.
    pub(super) value: String,
    /// Its bytes, if they were drawn and differ from the file's.
    pub(super) drawn: Option<Vec<u8>>,
}

/// A file of the run directory, for the value `key` of the line `step`; `None` if it is gone or
/// outside of the directory.
///
/// A PNG is an image, a figure in SVG is drawn as one, and HTML is shown as a page. Any other file
/// is only named.
pub(super) fn read(run: &RunInfo, from: &str, key: &str, step: u64) -> Option<Media> {
    let bytes = run.file(from).ok()?;
    let end = Path::new(from).extension()?.to_str()?.to_ascii_lowercase();
    match end.as_str() {
        "svg" => match picture(&bytes).and_then(|png| Some((size(&png)?, png))) {
            Some((size, png)) => {
                let image = image(from, key, step, &png, size);
                let drawn = Some(png);
                Some(Media { drawn, ..image })
            }
            None => Some(html(from, key, step, &bytes)),
        },
        "png" => {
            let size = size(&bytes)?;
            Some(image(from, key, step, &bytes, size))
        }
        "html" => Some(html(from, key, step, &bytes)),
        _ => Some(Media {
            name: from.into(),
            from: from.into(),
            value: string(from),
            drawn: None,
        }),
    }
}

/// The bytes to upload under `name`.
pub(super) fn bytes(run: &RunInfo, from: &str, name: &str) -> Option<Vec<u8>> {
    let bytes = run.file(from).ok()?;
    if from.ends_with(".svg") && name.ends_with(".png") {
        return picture(&bytes);
    }
    Some(bytes)
}

/// A figure as PNG, if it can be drawn.
fn picture(svg: &[u8]) -> Option<Vec<u8>> {
    Some(crate::picture::png(svg).ok()?.bytes)
}

fn image(from: &str, key: &str, step: u64, bytes: &[u8], (width, height): (u32, u32)) -> Media {
    let more = [
        ("format", string("png")),
        ("width", number(f64::from(width))),
        ("height", number(f64::from(height))),
    ];
    let kind = Kind {
        name: "image-file",
        folder: "images",
        end: "png",
    };
    kind.media(from, &place(key, step), bytes, &more)
}

fn html(from: &str, key: &str, step: u64, bytes: &[u8]) -> Media {
    let kind = Kind {
        name: "html-file",
        folder: "html",
        end: "html",
    };
    kind.media(from, &place(key, step), bytes, &[])
}

/// A kind of file at W&B.
struct Kind {
    name: &'static str,
    folder: &'static str,
    end: &'static str,
}

impl Kind {
    fn media(&self, from: &str, place: &str, bytes: &[u8], more: &[(&str, String)]) -> Media {
        let hash = hex(bytes);
        let short = &hash[..20];
        let name = format!("media/{}/{place}_{short}.{}", self.folder, self.end);
        let mut values = vec![
            ("_type", string(self.name)),
            ("path", string(&name)),
            ("sha256", string(&hash)),
            ("size", bytes.len().to_string()),
        ];
        values.extend(more.iter().cloned());
        Media {
            name,
            from: from.into(),
            value: object(values.iter().map(|(key, value)| (*key, value.as_str()))),
            drawn: None,
        }
    }
}

/// The name of a value as a safe path, with the number of its line.
fn place(key: &str, step: u64) -> String {
    let parts = key.split(['/', '\\']);
    let parts: Vec<&str> = parts
        .filter(|part| !part.trim_matches('.').is_empty())
        .collect();
    format!("{}_{step}", parts.join("/"))
}

/// SHA-256 as 64 digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    let hash = digest(&SHA256, bytes);
    hash.as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Width and height of a PNG.
fn size(png: &[u8]) -> Option<(u32, u32)> {
    let (width, rest) = png.strip_prefix(&PNG)?.split_first_chunk()?;
    let height = rest.first_chunk()?;
    Some((u32::from_be_bytes(*width), u32::from_be_bytes(*height)))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The head of a PNG of 6 by 4; the rest is not read.
    pub(in crate::wandb) const SMALL: &[u8] =
        b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\0\x06\0\0\0\x04\x08\x02\0\0\0";

    #[test]
    fn an_image_is_named_by_its_key_line_and_hash() {
        let folder = tempfile::tempdir().unwrap();
        crate::wandb::tests::put(folder.path().join("a.png"), SMALL).unwrap();
        let media = read(
            &crate::run::tests::run(folder.path()),
            "a.png",
            "figures/../uv",
            12,
        )
        .unwrap();
        let hash = hex(SMALL);
        let name = format!("media/images/figures/uv_12_{}.png", &hash[..20]);
        assert_eq!(media.name, name);
        assert_eq!(
            media.value,
            format!(
                r#"{{"_type":"image-file","path":"{name}","sha256":"{hash}","size":{},"format":"png","width":6,"height":4}}"#,
                SMALL.len()
            )
        );
    }

    // `printf abc | sha256sum`.
    #[test]
    fn the_hash_is_sha256() {
        assert_eq!(
            hex(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn missing_and_outside_files_are_no_media() {
        let folder = tempfile::tempdir().unwrap();
        crate::wandb::tests::put(folder.path().join("short.png"), b"\x89PNG").unwrap();
        for path in [
            "gone.png",
            "../a.png",
            "/etc/hostname",
            "short.png",
            "",
            ".",
        ] {
            assert_eq!(
                read(&crate::run::tests::run(folder.path()), path, "a", 0),
                None,
                "{path}"
            );
        }
    }
}
