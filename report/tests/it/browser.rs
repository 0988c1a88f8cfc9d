//! Tests of the page in a real browser.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};
use spd_checkpoint::Lock;
use spd_report::{LastWord, State};
use spd_tracker::{Kind, Mark, Row, Spool};

use crate::chromium::Chromium;
use crate::sample::{EVIL, behind, harvest, page, probe, run, sweep, train};

/// Helpers for the scripts of tests.
const HELPERS: &str = "
    const rest = async () => { for (let i = 0; i < 12; i++) await new Promise(done => requestAnimationFrame(done)); };
    const hasInk = one => one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some(Boolean);
    const drawn = () => [...document.querySelectorAll('canvas')].filter(hasInk).length;
    const type = (id, value) => { document.getElementById(id).value = value; document.getElementById(id).dispatchEvent(new Event('input')); };
    const card = key => document.querySelector(`[aria-label^=\"${key}:\"]`);
    const text = one => one.textContent;
    const all = query => [...document.querySelectorAll(query)];
    await rest();";

/// Opens the page of some runs, runs `script` in it, and returns its result; `None` without a
/// browser.
fn in_browser(runs: &[PathBuf], script: &str) -> Option<Value> {
    in_window((1400, 5000), runs, script)
}

fn in_window(size: (u32, u32), runs: &[PathBuf], script: &str) -> Option<Value> {
    let mut chromium = Chromium::start()?;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("page.html");
    fs::write(&file, page(runs).unwrap()).unwrap();
    chromium.open(&format!("file://{}", file.display()), size);
    let found = chromium.run(&format!("{HELPERS} {script}"));
    let state = chromium.run(
        "return [document.getElementById('trouble').hidden, document.querySelector('.failed')?.textContent ?? null, document.body.dataset.evil ?? null];",
    );
    assert_eq!(
        state,
        json!([true, null, null]),
        "an error of the page, or a text of the run that became part of it"
    );
    assert_eq!(chromium.complaints, [""; 0]);
    Some(found)
}

#[test]
fn a_run_is_drawn() {
    let (_dir, run) = run("x");
    let script = "
        await rest();
        return { title: document.title, drawn: drawn(), canvases: document.querySelectorAll('canvas').length,
            sections: [...document.querySelectorAll('nav a')].map(one => one.textContent),
            early: [...document.querySelectorAll('#curves td')].map(one => one.textContent),
            odd: text(card('loss/total').querySelector('.odd')), images: document.querySelectorAll('.picture img').length,
            loaded: [...document.images].every(one => one.naturalWidth > 0),
            sites: [...document.querySelectorAll('#curves em')].map(one => one.textContent), names: all('#curves .chart .name').map(text),
            rows: document.querySelectorAll('.components .open').length, events: document.querySelectorAll('#events tbody tr').length };";
    let Some(found) = in_browser(&[run], script) else {
        return;
    };
    assert_eq!(found["title"], "x");
    // Two losses, an evaluation, L0 of all sites, speed and its parts, two of the machine.
    assert_eq!(
        (&found["canvases"], &found["drawn"]),
        (&json!(8), &json!(8))
    );
    let names = [
        "total loss ↓",
        "kl ↓",
        "active components (L0) against KL, importance-masked",
        "KL, importance-masked ↓",
        "active components (L0), by site ↓",
    ];
    assert_eq!(found["names"], json!(names));
    let sections = [
        "Verdict",
        "Importances, U and V",
        "Components",
        "Curves",
        "Figures",
        "Speed",
        "Machine",
        "Config",
        "Events",
    ];
    assert_eq!(found["sections"], json!(sections));
    // A value that was measured once is not a curve.
    assert_eq!(found["early"], json!(["ce", "4", "kl/ci_masked", "3.5"]));
    assert_eq!(found["odd"], "1 × NaN, 1 × ∞");
    assert_eq!(
        (&found["images"], &found["loaded"]),
        (&json!(2), &json!(true))
    );
    assert_eq!(found["sites"], json!(["h.2.q", "h.10.q"]));
    assert_eq!((&found["rows"], &found["events"]), (&json!(2), &json!(1)));
}

#[test]
fn everything_that_can_be_clicked_is_clicked() {
    let (_dir, run) = run("x");
    let script = "
        const found = {};
        for (const name of ['log', 'time', 'step', 'linear', 'auto']) {
            document.querySelector(`input[value=${name}]`).click();
            await rest();
            found[name] = drawn();
        }
        document.querySelectorAll('input[value=log]')[1].click();
        // Over 9.491 steps, such that the step before counts 0.9.
        smoothing = () => -1 / Math.log(0.9);
        type('smooth', 0.9);
        document.getElementById('theme').click();
        await rest();
        found.theme = drawn();
        type('filter', 'KL masked');
        await rest();
        found.filtered = [...document.querySelectorAll('#curves .name')].map(one => one.textContent);
        type('filter', '');
        await rest();
        for (const key of ['Home', 'ArrowRight', '+', 'Escape', 'End', '0', 'Home', 'ArrowRight']) {
            card('loss/kl').dispatchEvent(new KeyboardEvent('keydown', { key }));
            await rest();
        }
        found.at = document.getElementById('at').textContent;
        found.read = document.querySelector('[aria-label^=\"loss/total\"] .value').textContent;
        for (const button of [...document.querySelectorAll('.components thead button')]) {
            document.querySelector(`.components thead th:nth-child(${[...document.querySelectorAll('.components thead button')].indexOf(button) + 1}) button`)?.click();
        }
        [...document.querySelectorAll('.components .open')].find(one => one.textContent === '#17').click();
        found.tokens = [...document.querySelectorAll('.contexts .token')].slice(0, 3).map(one => one.textContent);
        found.changes = [...document.querySelectorAll('.changes li')].map(one => one.textContent);
        found.hints = ['.contexts b', '.contexts .hint', '.removal .hint'].map(one => document.querySelector(one).textContent);
        const slider = document.querySelector('#uv input[type=range]');
        slider.value = 0;
        slider.dispatchEvent(new Event('input'));
        found.figure = document.querySelector('#uv output').textContent;
        const larger = document.querySelector('#figures .picture button');
        found.width = [larger, larger].map(one => { one.click(); return [one.getAttribute('aria-pressed'), one.closest('.picture').clientWidth > 800]; });
        document.querySelectorAll('summary').forEach(one => one.click());
        await rest();
        return found;";
    let Some(found) = in_browser(&[run], script) else {
        return;
    };
    for name in ["log", "time", "step", "linear", "auto", "theme"] {
        assert_eq!(found[name], 8, "{name}");
    }
    assert_eq!(found["filtered"], json!(["KL, importance-masked ↓"]));
    assert_eq!(found["at"], "step 1 · 1 s");
    assert_eq!(found["read"], "50 ~ 73.68");
    assert_eq!(found["tokens"], json!(["The", " cat", "↵"]));
    assert_eq!(found["changes"], json!([" dog+0.8", " mat-1.2"]));
    let measured = "mean over 29 positions in 4 samples, drawn among those where it is active";
    assert_eq!(found["hints"], json!(["3.5", "token 1,025", measured]));
    assert_eq!(found["figure"], "step 20");
    assert_eq!(found["width"], json!([["true", true], ["false", false]]));
}

#[test]
fn histograms_are_bars_at_the_step_of_the_slider() {
    let (_dir, run) = run("x");
    let script = "
        const slider = document.querySelector('#figures input[type=range]');
        const bars = document.querySelector('.bars .chart');
        const look = at => {
            slider.value = at;
            slider.dispatchEvent(new Event('input'));
            return [document.querySelector('#figures output').textContent, bars.querySelector('.value').textContent, document.querySelector('#figures .figures').hidden];
        };
        const steps = [0, 1, 2].map(look);
        bars.querySelector('svg').dispatchEvent(new PointerEvent('pointermove', { clientX: bars.querySelector('svg').getBoundingClientRect().right - 3 }));
        return { steps, name: bars.querySelector('.name').textContent, bin: bars.querySelector('.value').textContent,
            path: bars.querySelector('path').getAttribute('d').slice(0, 9), ends: bars.querySelector('.ends').textContent };";
    let Some(found) = in_browser(&[run], script) else {
        return;
    };
    // A step with figures only shows the bars before it, and a step with bars only shows no
    // figures.
    let steps = json!([
        ["step 20", "2.01K values", false],
        ["step 30", "3.01K values", true],
        ["step 40", "3.01K values", false]
    ]);
    assert_eq!(found["steps"], steps);
    assert_eq!(
        (&found["name"], &found["bin"]),
        (&json!("h.2.q"), &json!("0.5 to 1: 7"))
    );
    assert_eq!(
        (&found["path"], &found["ends"]),
        (&json!("M0 100V0H"), &json!("00.51"))
    );
}

#[test]
fn a_sweep_is_drawn_as_one() {
    let (_dir, sweep) = sweep();
    let script = "
        await rest();
        const chip = document.querySelectorAll('.chip')[1];
        const lines = () => document.querySelectorAll('[aria-label^=\"loss/kl\"] .readout span').length;
        const before = lines();
        chip.click();
        await rest();
        const differ = [...document.querySelectorAll('#config td code')].map(one => one.textContent);
        const select = document.querySelector('#uv select');
        select.value = 1;
        select.dispatchEvent(new Event('change'));
        await rest();
        return { before, after: lines(), differ, drawn: drawn() > 5, waiting: document.querySelector('#overview .hint').textContent };";
    let Some(found) = in_browser(&[sweep], script) else {
        return;
    };
    assert_eq!((&found["before"], &found["after"]), (&json!(2), &json!(0)));
    assert_eq!(found["differ"], json!(["seed"]));
    assert_eq!(
        (&found["drawn"], &found["waiting"]),
        (&json!(true), &json!("Not begun: seed=2"))
    );
}

#[test]
fn a_phone_scrolls_in_one_direction() {
    let (_dir, run) = run("x");
    harvest(&run, 1);
    probe(&run);
    let script = "
        document.querySelectorAll('details').forEach(one => { one.open = true; });
        document.querySelectorAll('.components .open').forEach(one => one.click());
        await rest();
        card('loss/total').scrollIntoView({ behavior: 'instant' });
        await rest();
        document.getElementById('view').open = false;
        const height = () => document.getElementById('bar').offsetHeight;
        const before = height();
        pointAt(3, 'step');
        await rest();
        const said = text(document.getElementById('at'));
        const scrolls = one => getComputedStyle(one).overflowX !== 'visible';
        const within = one => one && one !== document.body && (scrolls(one) || within(one.parentElement));
        const wide = all('body *').length && [...document.querySelectorAll('body *')]
          .filter(one => one.getBoundingClientRect().right > 390.5 && !within(one.parentElement))
          .map(one => `${one.tagName}.${one.className}`);
        return [wide, document.documentElement.scrollWidth, drawn() > 0, said, height() - before];";
    let Some(found) = in_window((390, 844), &[run], script) else {
        return;
    };
    // The chart does not move under the pointer.
    assert_eq!(found, json!([[], 390, true, "step 3 · 3 s", 0]));
}

#[test]
fn unexpected_file_hides_only_its_section() {
    let (_dir, run) = run("x");
    fs::write(run.join("summary.json"), "{\"tables\":7,\"lines\":[3]}").unwrap();
    let Some(mut chromium) = Chromium::start() else {
        return;
    };
    let file = run.join("report.html");
    fs::write(&file, page(std::slice::from_ref(&run)).unwrap()).unwrap();
    chromium.open(&format!("file://{}", file.display()), (1400, 5000));
    let found = chromium.run(&format!(
        "{HELPERS} return [document.querySelectorAll('.failed').length, drawn()];"
    ));
    assert_eq!(found, json!([1, 8]));
}

#[test]
fn a_row_says_whether_it_counts_as_solved() {
    let (_dir, sweep) = sweep();
    for seed in 0..2 {
        let summary = json!({"solved": {"found": seed == 1, "means": "CI error 0"}});
        let file = sweep.join(format!("seed={seed}/summary.json"));
        fs::write(file, summary.to_string()).unwrap();
    }
    let (_alone, run) = run("alone");
    let script = "
        return { solved: all('#overview tr').slice(0, 4).map(row => row.lastChild.textContent), said: all('#overview .hint, #overview .sentence').map(text) };";
    let Some(found) = in_browser(&[sweep.clone(), run], script) else {
        return;
    };
    assert_eq!(found["solved"], json!(["solved", "no", "yes", "–"]));
    let said = json!(["x: solved 1 of 2", "Not begun: seed=2"]);
    assert_eq!(found["said"], said);
    let found = in_browser(&[sweep], script).unwrap();
    assert_eq!(found["said"][0], "solved 1 of 2");
}

#[test]
fn the_verdict_comes_first_with_what_to_turn_and_the_cause_of_a_failure() {
    let (_dir, run) = run("x");
    let config = "[[loss]]\nkind = \"importance_minimality\"\ncoeff = 0.001\n";
    fs::write(run.join("config.toml"), config).unwrap();
    let frequencies = json!([{"site": "h.2.q", "order": [0, 1, 2], "frequencies": [0.5, 0.1, 0.0]}, {"site": "h.10.q", "frequencies": vec![0.5; 97]}]);
    let file = run.join("figures/step-00000040/activation_frequency.json");
    fs::write(file, frequencies.to_string()).unwrap();
    let spool = behind(&run);
    let eval = Row::new(40, Kind::Eval).with("eval/kl/ci_masked", 0.5);
    spool.append(eval.with("eval/kl/zero", 2.0));
    spool.sync().unwrap();
    let word = LastWord {
        state: State::Failed,
        note: format!("loss/total is NaN {EVIL}"),
        began: 1e9,
        ended: 1e9,
    };
    let lock = Lock::take(&run.join("logs")).unwrap();
    lock.leave(&word.line()).unwrap();
    drop(lock);
    let script = "
        const gauges = all('.gauge').map(one => [text(one.querySelector('b')), one.querySelector('b').className, one.querySelector('.at').style.left]);
        return { banner: text(document.querySelector('.banner')), state: document.querySelector('.fact .state').dataset.state,
            first: document.querySelector('main section').id, kind: document.querySelector('.verdict').className,
            sentence: text(document.querySelector('.sentence')), gauges, turn: text(document.querySelector('.turn li')) };";
    let Some(found) = in_browser(&[run], script) else {
        return;
    };
    assert_eq!(found["banner"], format!("failed loss/total is NaN {EVIL}"));
    assert_eq!(
        (&found["state"], &found["first"]),
        (&json!("failed"), &json!("overview"))
    );
    let sentence = "✗Importance-masked KL 0.5; 7 of 100 active, 1 never";
    assert_eq!(
        (&found["sentence"], &found["kind"]),
        (&json!(sentence), &json!("card verdict bad"))
    );
    let gauges = json!([["75 %", "bad", "75%"], ["7 of 100", "good", "7%"]]);
    assert_eq!(found["gauges"], gauges);
    let turn = "lower the importance coefficient, as in --set loss.importance_minimality.coeff=3.33e-4 (now 0.001): too few are important to make the output";
    assert_eq!(found["turn"], turn);
}

#[test]
fn figures_are_drawn_from_their_numbers() {
    let (_dir, run) = run("x");
    let dir = run.join("figures/step-00000040");
    let matrix = json!([{"site": "a V", "order": [5, 2], "each": [1, 1], "rows": [[1.0, -0.5], [0.0, 0.25], [0.0, 0.0]]}]);
    let counts = json!([{"site": "a", "low": 0.0, "high": 1.0, "counts": [3, 0]}]);
    let active = json!({"groups": [], "sites": [{"name": "a", "components": 4, "l0": 1.0}]});
    let means = json!([{"site": "a", "order": [5, 2], "means": [0.5, 0.0]}]);
    for (name, numbers) in [
        ("uv_matrices", matrix),
        ("counts", counts),
        ("active", active),
        ("mean_importance", means),
        ("strange", json!([7])),
    ] {
        fs::write(dir.join(format!("{name}.svg")), "<svg>").unwrap();
        fs::write(dir.join(format!("{name}.json")), numbers.to_string()).unwrap();
    }
    let script = "
        dispatchEvent(new Event('beforeprint'));
        dispatchEvent(new Event('afterprint'));
        const canvas = document.querySelector('#uv canvas'), box = canvas.getBoundingClientRect();
        const said = () => text(document.querySelector('#uv .panel .value'));
        const colors = () => [[0, 0], [1, 0], [0, 2]].map(([x, y]) => [...canvas.getContext('2d').getImageData(x, y, 1, 1).data]);
        const before = said();
        canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + 0.75 * box.width, clientY: box.top + 1 }));
        return { before, said: said(), size: [canvas.width, canvas.height], colors: colors(),
            figures: all('#figures .picture').map(one => [one.firstChild.firstChild.textContent, one.querySelector('.ends, .active td, .none').textContent]),
            images: all('#figures .picture img').length };";
    let Some(found) = in_browser(&[run], script) else {
        return;
    };
    assert_eq!(
        (&found["before"], &found["said"]),
        (&json!("±1"), &json!("input 0, #2: -0.5"))
    );
    assert_eq!(found["size"], json!([2, 3]));
    // The greatest magnitude has the whole colour, half of it half of the way, and 0 none.
    let colors = json!([
        [200, 70, 0, 255],
        [124, 169, 205, 255],
        [247, 248, 250, 255]
    ]);
    assert_eq!(found["colors"], colors);
    let strange = "Its numbers have a form that this page does not draw; the SVG beside them in the run directory shows it.";
    let figures = json!([
        ["active", "a"],
        ["counts", "00.51"],
        ["mean importance", "1 of 2 above 00.5 to 0.5, log"],
        ["strange", strange]
    ]);
    assert_eq!((&found["figures"], &found["images"]), (&figures, &json!(0)));
}

#[test]
fn a_harvested_component_shows_what_it_reads_and_writes() {
    let (_dir, run) = run("x");
    harvest(&run, 1);
    let labels = json!({"h.2.q:17": format!("cats {EVIL}"), "h.2.q:3": "dogs", "gone:1": "x"});
    fs::write(run.join("labels.json"), labels.to_string()).unwrap();
    let script = "
        const found = { said: all('#components .choose .hint').map(text), labels: all('.components td.label').map(text) };
        const search = document.querySelector('#components input');
        search.value = 'CATS';
        search.dispatchEvent(new Event('input'));
        await rest();
        document.querySelector('.components .open').click();
        found.rows = all('.components .open').map(text);
        found.head = text(document.querySelector('.detail h3 span'));
        found.parts = all('.contexts .part').map(text);
        found.bars = all('.detail .bars .chart').map(one => [text(one.querySelector('.name')), text(one.querySelector('.ends'))]);
        found.tokens = all('.facets .changes li').map(one => [text(one), one.className, one.getAttribute('style')]);
        found.tip = document.querySelector('.contexts .peak').dataset.tip;
        found.removal = text(document.querySelector('.removal .hint'));
        document.querySelector('.facets a').click();
        await new Promise(done => setTimeout(done, 50));
        await rest();
        found.next = text(document.querySelector('.detail h3 a'));
        found.label = text(document.querySelector('.detail h3 span'));
        return found;";
    let Some(found) = in_browser(&[run], script) else {
        return;
    };
    assert_eq!(
        found["said"],
        json!(["harvest of 1,000 positions, step 40"])
    );
    // By the mean importance, which is the same for all: the lower number comes first.
    assert_eq!(found["labels"], json!(["", "dogs", format!("cats {EVIL}")]));
    assert_eq!(
        (&found["rows"], &found["head"]),
        (&json!(["#17"]), &json!(format!("cats {EVIL}")))
    );
    let parts = [
        "the strongest",
        "75 to 100 % of its positions",
        "0 to 25 % of its positions",
    ];
    assert_eq!(found["parts"], json!(parts));
    assert_eq!(
        found["bars"],
        json!([["importance", "00.51"], ["length of its output", "11.51.5"]])
    );
    // Half of the width is the greatest information.
    let evil_row = json!([format!("{EVIL}-1"), "down", "--from:25%;--bar:50%"]);
    let cat_row = json!([" cat+2", "up", "--from:50%;--bar:100%"]);
    let other = json!(["h.2.q #3 dogs50 %", "up", "--bar:50%"]);
    assert_eq!(
        found["tokens"],
        json!([cat_row, evil_row, cat_row, evil_row, other])
    );
    assert_eq!(found["tip"], " cat  importance 1");
    let removal = "mean over 8 positions, drawn among those where it is active";
    assert_eq!(found["removal"], removal);
    assert_eq!(
        (&found["next"], &found["label"]),
        (&json!("h.2.q #3"), &json!("dogs"))
    );
}

#[test]
fn a_probed_prompt_is_a_heat_map_that_leads_to_components() {
    let (_dir, run) = run("x");
    probe(&run);
    fs::write(run.join("labels.json"), "{\"h.2.q:17\": \"cats\"}").unwrap();
    let script = "
        const names = () => all('#probes tbody th').map(text);
        const canvas = document.querySelectorAll('#probes canvas')[1], box = canvas.getBoundingClientRect();
        const colors = [0, 1].map(x => [...canvas.getContext('2d').getImageData(x, 0, 1, 1).data]);
        canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + 30, clientY: box.top + 2 }));
        const found = { names: names(), tokens: all('#probes .names span').map(text), colors, size: [canvas.width, canvas.clientWidth], said: text(document.querySelector('#probes output')) };
        canvas.dispatchEvent(new PointerEvent('pointerleave'));
        found.before = text(document.querySelector('#probes output'));
        const select = document.querySelector('#probes [aria-label=\"Site of the prompt\"]');
        select.value = 'h.10.q';
        select.dispatchEvent(new Event('change'));
        found.site = names();
        select.value = '';
        document.querySelector('#probes tbody a').click();
        await new Promise(done => setTimeout(done, 50));
        found.hash = location.hash;
        return found;";
    let Some(found) = in_browser(&[run], script) else {
        return;
    };
    let names = json!(["h.10.q #5", "• h.2.q #17 cats", "h.2.q #3"]);
    assert_eq!(found["names"], names);
    assert_eq!(found["tokens"], json!(["The", " cat", EVIL]));
    // Half of the way from no importance to all.
    let colors = json!([[247, 248, 250, 255], [224, 159, 125, 255]]);
    assert_eq!(
        (&found["colors"], &found["size"]),
        (&colors, &json!([3, 60]))
    );
    assert_eq!(found["said"], "h.2.q #17 at 1:  cat  importance 0.5");
    let before =
        "3 components, the strongest first; step 40; • marks the 1 that keep the prediction";
    assert_eq!(
        (&found["before"], &found["site"]),
        (&json!(before), &json!(["h.10.q #5"]))
    );
    assert_eq!(found["hash"], "#component=h.10.q%3A5");
}

#[test]
fn forty_thousand_harvested_components_are_parsed_as_they_are_shown() {
    let (_dir, run) = run("x");
    harvest(&run, 40_000);
    let script = "
        const all40 = sitesWithComponents(runs[0]).flatMap(site => site.components);
        const parsedTexts = () => all40.filter(one => one.text !== undefined).length;
        const found = { all: all40.length, rows: all('.components .open').length, texts: [parsedTexts()], details: [runs[0].details?.length ?? 0] };
        document.querySelector('.components .open').click();
        found.bars = all('.detail .bars .chart').length;
        found.details.push(runs[0].details.length);
        document.querySelector('.rows').scrollTop = 31 * 20000;
        await rest();
        found.texts.push(parsedTexts());
        found.middle = all('.components .open').length;
        found.left = text(all('#components > .hint').at(-1));
        return found;";
    let Some(found) = in_window((1400, 900), &[run], script) else {
        return;
    };
    assert_eq!(
        (&found["all"], &found["bars"], &found["details"]),
        (&json!(40_002), &json!(2), &json!([0, 40_002]))
    );
    // The rows in sight, and some above and below them.
    for few in ["/rows", "/middle", "/texts/0"] {
        let few = found.pointer(few).and_then(Value::as_u64);
        assert!(few.is_some_and(|few| (1..80).contains(&few)), "{found}");
    }
    assert!(found["texts"][1].as_u64() < Some(200), "{found}");
    let left = found["left"].as_str().unwrap();
    assert!(
        left.starts_with("Of the components that are active least, the ")
            && left.contains("details of "),
        "{left}"
    );
}

#[test]
fn forty_thousand_components_are_a_table_of_a_few_rows() {
    let (_dir, run) = run("x");
    let sites: Vec<String> = (0..40)
        .map(|site| format!("h.{}.{}", site / 4, ["q", "k", "v", "o"][site % 4]))
        .collect();
    let order: Vec<u64> = (0..1000).collect();
    let of = |key: &str, value: fn(u64) -> f64| {
        let values: Vec<f64> = order.iter().map(|&index| value(index)).collect();
        let all = sites
            .iter()
            .map(|site| json!({"site": site, "order": order, (key): values}));
        Value::Array(all.collect()).to_string()
    };
    let dir = run.join("figures/step-00000040");
    let means = of("means", |index| 1.0 / (index + 1) as f64);
    let densities = of("frequencies", |index| if index < 900 { 0.5 } else { 0.0 });
    for (name, numbers) in [
        ("mean_importance", means),
        ("activation_frequency", densities),
    ] {
        fs::write(dir.join(format!("{name}.json")), numbers).unwrap();
        fs::write(dir.join(format!("{name}.svg")), "<svg>").unwrap();
    }
    let script = "
        const open = () => all('.components .open').map(text), rows = document.querySelector('.rows');
        const found = { said: text(document.querySelector('#components > .hint:not(.choose *)')), few: open().length < 80, high: rows.scrollHeight, cells: all('.map button').length };
        let made = 0;
        const watch = new MutationObserver(changes => made += changes.reduce((sum, change) => sum + change.addedNodes.length, 0));
        watch.observe(document.body, { childList: true, subtree: true });
        document.querySelector('.components thead button').click();
        found.sorted = open()[0];
        rows.scrollTop = 31 * 20000;
        await rest();
        found.middle = open().includes('#500') && open().length < 80;
        const before = made;
        rows.scrollTop += 31;
        await rest();
        found.next = made - before;
        document.querySelectorAll('.map button')[1].click();
        found.site = document.querySelector('#components select').value;
        const search = document.querySelector('#components input');
        search.value = '#17';
        search.dispatchEvent(new Event('input'));
        await rest();
        found.one = open();
        watch.disconnect();
        found.made = made;
        document.querySelector('.components .open').click();
        found.hash = location.hash;
        found.dead = all('.components .dead').length;
        return found;";
    let Some(found) = in_window((1400, 900), &[run], script) else {
        return;
    };
    let said = "36,000 of 40,000 components alive, 4,000 dead; 18,000 active at a position";
    assert_eq!(found["said"], said);
    assert_eq!(
        (&found["few"], &found["middle"], &found["next"]),
        (&json!(true), &json!(true), &json!(1)),
        "scrolled by a row, only that row is made"
    );
    // Sorting, scrolling, choosing a site and searching draw the rows that are seen, some 40 of 20
    // nodes, a few times, and not 40,000.
    let made = found["made"].as_u64().unwrap();
    assert!((1..4000).contains(&made), "{found}");
    assert!(found["high"].as_u64() > Some(40_000 * 31), "{found}");
    assert_eq!(
        (&found["cells"], &found["sorted"]),
        (&json!(40), &json!("#0"))
    );
    assert_eq!(
        (&found["site"], &found["one"]),
        (&json!("h.0.o"), &json!(["#17"]))
    );
    assert_eq!(
        (&found["hash"], &found["dead"]),
        (&json!("#component=h.0.o%3A17"), &json!(0))
    );
}

#[test]
fn the_address_leads_to_a_component_a_filter_and_a_range() {
    let Some(mut chromium) = Chromium::start() else {
        return;
    };
    let (_dir, run) = run("x");
    let file = run.join("report.html");
    fs::write(&file, page(std::slice::from_ref(&run)).unwrap()).unwrap();
    let address = format!(
        "file://{}#component=h.2.q:17&filter=loss&zoom=step:10-20",
        file.display()
    );
    chromium.open(&address, (1400, 900));
    let look = "
        const { min, max } = card('loss/total').chart.plot?.scales.x ?? {};
        return [document.querySelector('.detail h3 a')?.textContent ?? null, all('#curves .chart .name').map(text), document.getElementById('whole').hidden, min ?? null, max ?? null];";
    let found = chromium.run(&format!("{HELPERS} document.getElementById('curves').scrollIntoView({{ behavior: 'instant' }}); await rest(); {look}"));
    let names = ["total loss ↓", "kl ↓"];
    assert_eq!(found, json!(["h.2.q #17", names, false, 10, 20]));
    let script = "
        document.querySelector('#component h3 a').click();
        await rest();
        document.querySelector('.components .open').click();
        type('filter', 'kl');
        await rest();
        document.querySelector('nav a[href=\"#config\"]').click();
        return [location.hash, document.getElementById('whole').hidden];";
    let found = chromium.run(&format!("{HELPERS} {script}"));
    assert_eq!(found, json!(["#config&filter=kl", true]));
    // An address of something else is a page all the same.
    chromium.open("about:blank", (1400, 900));
    chromium.open(
        &format!(
            "file://{}#component=%E0:&zoom=step:9-1&filter=%",
            file.display()
        ),
        (1400, 900),
    );
    let found = chromium.run(&format!("{HELPERS} return [document.getElementById('trouble').hidden, all('.detail').length, view.filter];"));
    assert_eq!(found, json!([true, 0, ""]));
}

#[test]
fn runs_are_sorted_and_seeds_are_put_together() {
    let (_dir, sweep) = sweep();
    let script = "
        const button = name => all('#overview .sortable button').find(one => text(one) === name);
        const first = () => text(document.querySelector('#overview .sortable tbody td'));
        button('seed').click();
        const up = first();
        button('seed').click();
        return { up, down: first(), seeds: all('#overview .card:not(:first-of-type) td').map(text).slice(0, 2), dots: all('#tradeoff .at-place').length };";
    let Some(found) = in_browser(&[sweep], script) else {
        return;
    };
    assert_eq!(
        (&found["up"], &found["down"]),
        (&json!("seed=0"), &json!("seed=1"))
    );
    assert_eq!(found["dots"], 2);
    assert_eq!(found["seeds"], json!(["2", "2.5 2.5 to 2.5"]));
}

#[test]
fn only_training_curves_are_smoothed() {
    let (_dir, run) = run("x");
    let script = "
        type('smooth', 0.9);
        await rest();
        const read = key => card(key).querySelector('.value').textContent;
        const kl = 'eval/kl/ci_masked';
        card(kl).dispatchEvent(new KeyboardEvent('keydown', { key: 'End' }));
        await rest();
        return [read(kl), read('loss/total'), read('system/cpu_percent'), text(document.getElementById('smoothness')),
            smoothed(runs[0], { x: [0, 10, 30], y: [100, 0, null], strange: new Map() }, 'step', 10).y];";
    let Some(found) = in_browser(&[run], script) else {
        return;
    };
    // 1/31 at the last evaluation, and 100/31 at its step; of 40 steps, 0.02 * 1000^0.9.
    assert_eq!(found[0], "0.03226");
    assert!(
        found[1].as_str().unwrap().starts_with("3.226 ~ "),
        "{found}"
    );
    assert_eq!(found[2], "50");
    assert_eq!(found[3], "~ 10 steps");
    // 100 e^-1 / (e^-1 + 1); no value if none is finite.
    let second = found[4][1].as_f64().unwrap();
    assert!((second - 26.894_142).abs() < 1e-6, "{found}");
    assert_eq!(found[4][2], json!(null));
}

#[test]
fn a_long_run_is_smoothed_from_all_its_rows() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.toml"), "name = \"long\"").unwrap();
    let spool = Spool::start(dir.path(), &Mark::default(), 0).unwrap();
    for step in 0..50_000 {
        let spike = if step % 100 == 50 { 100.0 } else { 0.0 };
        spool.append(Row::new(step, Kind::Train).with("loss/total", spike));
    }
    spool.sync().unwrap();
    let script = "
        type('smooth', 0.8);
        await rest();
        return [...card('loss/total').chart.plot.data.at(-1)].filter(value => value !== undefined).slice(700);";
    let Some(found) = in_browser(&[dir.path().to_path_buf()], script) else {
        return;
    };
    // With the least and the greatest of each stretch only it would be about 40.
    let smooth: Vec<f64> = serde_json::from_value(found).unwrap();
    assert!(smooth.len() > 500);
    let off = smooth.iter().find(|value| (**value - 1.0).abs() > 0.05);
    assert_eq!(off, None);
}

#[test]
fn the_crosshair_says_nothing_of_a_run_that_has_ended() {
    let (_dir, short) = run("short");
    let (_other, long) = run("long");
    let spool = behind(&long);
    (40..80).for_each(|step| spool.append(train(step)));
    spool.sync().unwrap();
    let script = "
        const kl = card('loss/kl');
        const total = () => [...card('loss/total').querySelectorAll('.readout b')].map(text);
        const said = [total()];
        const box = kl.querySelector('.u-over').getBoundingClientRect();
        const at = step => {
            const plot = kl.chart.plot;
            plot.over.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + plot.valToPos(step, 'x'), clientY: box.top + 9 }));
        };
        for (const step of [35, 60]) {
            at(step);
            await rest();
            said.push([...total(), ...[...card('eval/kl/ci_masked').querySelectorAll('.readout b')].map(text)]);
        }
        const points = [...card('loss/total').querySelectorAll('.u-cursor-pt')].map(one => !one.classList.contains('u-off'));
        return { said, points, at: text(document.getElementById('at')) };";
    let Some(found) = in_browser(&[short, long], script) else {
        return;
    };
    let said = json!([
        ["2.5", "1.25"],
        ["2.778", "2.778", "0.03226", "0.03226"],
        ["–", "1.639", "–", "0.03226"]
    ]);
    assert_eq!(found["said"], said);
    assert_eq!(found["points"], json!([false, true]));
    // The clock of the run in focus, the first, has stopped by then.
    assert_eq!(found["at"], "step 60");
}

#[test]
fn a_link_leads_to_its_section_at_once() {
    let Some(mut chromium) = Chromium::start() else {
        return;
    };
    let (_dir, run) = run("x");
    let figure = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"840\" height=\"900\" viewBox=\"0 0 840 900\"></svg>";
    for name in ["a", "b", "uv_matrices"] {
        fs::write(
            run.join(format!("figures/step-00000040/{name}.svg")),
            figure,
        )
        .unwrap();
    }
    let file = run.join("report.html");
    fs::write(&file, page(std::slice::from_ref(&run)).unwrap()).unwrap();
    let url = format!("file://{}", file.display());
    // Distance of the section from the bar's lower edge, except near the end of the page.
    let away = "
        const scroller = document.documentElement;
        for (let still = 0, last = -1; still < 20; last = scroller.scrollTop) {
            await new Promise(done => requestAnimationFrame(done));
            still = last === scroller.scrollTop ? still + 1 : 0;
        }
        const isEnd = scroller.scrollTop + innerHeight > scroller.scrollHeight - 2;
        const top = document.getElementById(name).getBoundingClientRect().top - document.getElementById('bar').getBoundingClientRect().bottom;
        return isEnd && top > 0 && top < innerHeight ? 0 : Math.round(top);";
    for (width, height) in [(1400, 700), (390, 700)] {
        for name in ["components", "uv", "figures", "speed", "machine"] {
            chromium.open("about:blank", (width, height));
            chromium.open(&url, (width, height));
            let follow = format!(
                "{HELPERS} const name = '{name}'; document.querySelector('nav a[href=\"#{name}\"]').click(); await rest(); {away}"
            );
            let found = chromium.run(&follow).as_i64().unwrap();
            assert!((0..80).contains(&found), "{name}: {found}");
        }
        // Opens the address of a section directly.
        chromium.open("about:blank", (width, height));
        chromium.open(&format!("{url}#figures"), (width, height));
        let found = chromium.run(&format!("{HELPERS} const name = 'figures'; {away}"));
        assert!((0..80).contains(&found.as_i64().unwrap()), "{found}");
    }
}

#[test]
fn all_charts_are_on_paper() {
    let (_dir, run) = run("x");
    let script = "
        card('loss/total').scrollIntoView({ behavior: 'instant' });
        document.getElementById('theme').click();
        await rest();
        const look = () => [drawn(), document.documentElement.dataset.theme];
        const before = look();
        dispatchEvent(new Event('beforeprint'));
        await null;
        const printed = [...look(), document.querySelectorAll('canvas').length, text(card('loss/total').querySelector('.value'))];
        dispatchEvent(new Event('afterprint'));
        await rest();
        return { before, printed, after: look(), width: card('loss/total').chart.plot.width <= card('loss/total').clientWidth };";
    let Some(found) = in_window((1400, 400), &[run], script) else {
        return;
    };
    let before = &found["before"];
    assert!(
        before[0].as_u64() < Some(8) && before[1] == "dark",
        "{found}"
    );
    assert_eq!(found["printed"], json!([8, "light", 8, "2.5"]));
    assert_eq!((&found["after"], &found["width"]), (before, &json!(true)));
}

#[test]
fn a_figure_that_is_made_larger_is_on_the_screen() {
    let (_dir, run) = run("x");
    for name in ["a", "b", "c"] {
        let figure = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"840\" height=\"300\" viewBox=\"0 0 840 300\"></svg>";
        fs::write(
            run.join(format!("figures/step-00000040/{name}.svg")),
            figure,
        )
        .unwrap();
    }
    let script = "
        document.documentElement.style.scrollBehavior = 'auto';
        const bar = document.getElementById('bar');
        const inside = [];
        for (const button of [...document.querySelectorAll('#figures .picture button')]) {
            button.scrollIntoView({ block: 'end' });
            await rest();
            for (let i = 0; i < 2; i++) {
                button.click();
                await rest();
                const box = button.closest('.picture').getBoundingClientRect();
                inside.push(box.top >= bar.getBoundingClientRect().bottom - 1 && (box.bottom <= innerHeight || box.top < innerHeight / 3));
            }
        }
        return inside;";
    let Some(found) = in_window((1400, 700), &[run], script) else {
        return;
    };
    assert_eq!(
        found,
        json!([true, true, true, true, true, true, true, true])
    );
}
