//! The page as one text: HTML, styles and scripts of `page/`, uPlot, and the data.

const STYLES: [&str; 2] = [
    include_str!("../vendor/uPlot.min.css"),
    include_str!("../page/style.css"),
];

const SCRIPTS: [&str; 16] = [
    include_str!("../vendor/uPlot.iife.min.js"),
    include_str!("../page/runs.js"),
    include_str!("../page/scales.js"),
    include_str!("../page/names.js"),
    include_str!("../page/chart.js"),
    include_str!("../page/curves.js"),
    include_str!("../page/histograms.js"),
    include_str!("../page/figures.js"),
    include_str!("../page/components.js"),
    include_str!("../page/component.js"),
    include_str!("../page/probes.js"),
    include_str!("../page/scatter.js"),
    include_str!("../page/verdict.js"),
    include_str!("../page/tables.js"),
    include_str!("../page/address.js"),
    include_str!("../page/main.js"),
];

const TEMPLATE: &str = include_str!("../page/index.html");

/// The page of some data, given as JSON, and of texts whose lines are JSON, each with its name.
pub(crate) fn page(title: &str, data: &str, lines: &[(String, String)]) -> String {
    // A script element has no escapes, and only `<` could end it. In JSON `<` stands only in
    // strings.
    let in_script = |json: &str| json.replace('<', "\\u003c");
    let data = in_script(data);
    let lines = lines.iter().map(|(name, text)| {
        let text = in_script(text);
        format!("<script type=\"text/plain\" id=\"{name}\">{text}</script>\n")
    });
    let lines: String = lines.collect();
    let mut page = String::with_capacity(data.len() + lines.len() + (200 << 10));
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
    fill("/* styles */", &STYLES);
    fill("/* data */", &[&data]);
    fill("<!-- lines -->", &[&lines]);
    fill("/* scripts */", &SCRIPTS);
    page.push_str(rest);
    page
}

/// A text as HTML that shows it.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_breaks_out() {
        let evil = "</script><script>alert(1)</script><!--";
        let evil_json = format!("{{\"config\":\"{evil}\"}}");
        let lines = [("list-0".to_owned(), format!("{evil_json}\n{evil_json}"))];
        let page = page(evil, &evil_json, &lines);
        assert!(!page.contains("alert(1)</script>"));
        let (_, list) = page.split_once("id=\"list-0\">").unwrap();
        let list = list.split_once("</script>").unwrap().0;
        assert_eq!(list.lines().count(), 2);
        let parsed: serde_json::Value = serde_json::from_str(list.lines().next().unwrap()).unwrap();
        assert_eq!(parsed["config"], evil);
        assert!(page.contains("&lt;/script&gt;") && page.contains("\\u003c/script>"));
        let places = [
            "<!-- title -->",
            "/* styles */",
            "/* data */",
            "<!-- lines -->",
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
