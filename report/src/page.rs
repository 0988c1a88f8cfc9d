//! The page as one text: HTML, styles and scripts of `page/`, uPlot, and the data.

/// The contents of the places in `index.html`, in their order.
const PARTS: [(&str, &[&str]); 2] = [
    (
        "/* styles */",
        &[
            include_str!("../vendor/uPlot.min.css"),
            include_str!("../page/style.css"),
        ],
    ),
    (
        "/* scripts */",
        &[
            include_str!("../vendor/uPlot.iife.min.js"),
            include_str!("../page/runs.js"),
            include_str!("../page/scales.js"),
            include_str!("../page/names.js"),
            include_str!("../page/chart.js"),
            include_str!("../page/curves.js"),
            include_str!("../page/histograms.js"),
            include_str!("../page/figures.js"),
            include_str!("../page/components.js"),
            include_str!("../page/scatter.js"),
            include_str!("../page/verdict.js"),
            include_str!("../page/tables.js"),
            include_str!("../page/address.js"),
            include_str!("../page/main.js"),
        ],
    ),
];

const TEMPLATE: &str = include_str!("../page/index.html");

/// The page of some data, given as JSON.
pub(crate) fn page(title: &str, data: &str) -> String {
    // A script element has no escapes, and only `<` could end it. In JSON `<` stands only in
    // strings.
    let data = data.replace('<', "\\u003c");
    let mut page = String::with_capacity(data.len() + (200 << 10));
    let mut rest = TEMPLATE;
    let title = escaped(title);
    let mut fill = |place: &str, texts: &[&str]| {
        if let Some((before, after)) = rest.split_once(place) {
            page.push_str(before);
            texts.iter().for_each(|text| {
                page.push_str(text);
                page.push('\n');
            });
            rest = after;
        }
    };
    fill("<!-- title -->", &[&title]);
    fill(PARTS[0].0, PARTS[0].1);
    fill("/* data */", &[&data]);
    fill(PARTS[1].0, PARTS[1].1);
    page.push_str(rest);
    page
}

/// A text as HTML that shows it.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_breaks_out() {
        let evil = "</script><script>alert(1)</script><!--";
        let page = page(evil, &format!("{{\"config\":\"{evil}\"}}"));
        assert!(!page.contains("alert(1)</script>"));
        assert!(page.contains("&lt;/script&gt;") && page.contains("\\u003c/script>"));
        let places = [
            "<!-- title -->",
            "/* styles */",
            "/* data */",
            "/* scripts */",
        ];
        assert!(
            places
                .iter()
                .all(|place| TEMPLATE.matches(place).count() == 1)
        );
        assert!(places.iter().all(|place| !page.contains(place)));
    }
}
