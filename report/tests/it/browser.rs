//! A real browser draws the page, and is clicked through it.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};
use spd_report::page;

use crate::chromium::Chromium;
use crate::sample::{run, sweep};

/// What scripts of tests call.
const HELPERS: &str = "
    const rest = async () => { for (let i = 0; i < 12; i++) await new Promise(done => requestAnimationFrame(done)); };
    const hasInk = one => one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some(Boolean);
    const drawn = () => [...document.querySelectorAll('canvas')].filter(hasInk).length;
    await rest();";

/// Opens the page of some runs, runs `script` in it, and returns what that returns; none where there is no browser.
fn in_browser(test: &str, runs: &[PathBuf], script: &str) -> Option<Value> {
    in_window((1400, 5000), test, runs, script)
}

fn in_window(size: (u32, u32), test: &str, runs: &[PathBuf], script: &str) -> Option<Value> {
    let mut chromium = Chromium::start(test)?;
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
        const text = id => document.querySelector(id).textContent;
        return { title: document.title, drawn: drawn(), canvases: document.querySelectorAll('canvas').length,
            sections: [...document.querySelectorAll('nav a')].map(one => one.textContent),
            early: [...document.querySelectorAll('#curves td')].map(one => one.textContent),
            odd: text('[aria-label^=\"loss/total\"] .odd'), images: document.querySelectorAll('.picture img').length,
            loaded: [...document.images].every(one => one.naturalWidth > 0),
            sites: [...document.querySelectorAll('#sites em')].map(one => one.textContent),
            rows: document.querySelectorAll('.components .open').length, events: document.querySelectorAll('#events tbody tr').length };";
    let Some(found) = in_browser("a_run_is_drawn", &[run], script) else {
        return;
    };
    assert_eq!(found["title"], "x");
    // Two losses, an evaluation, two sites, L0, speed and its parts, two of the machine.
    assert_eq!(
        (&found["canvases"], &found["drawn"]),
        (&json!(10), &json!(10))
    );
    let sections = [
        "Overview",
        "Curves",
        "L0 by site",
        "Components",
        "U and V",
        "Figures",
        "Speed",
        "Machine",
        "Config",
        "Events",
    ];
    assert_eq!(found["sections"], json!(sections));
    // What was measured once is no curve.
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
        const type = (id, value) => { document.getElementById(id).value = value; document.getElementById(id).dispatchEvent(new Event('input')); };
        for (const name of ['log', 'time', 'step', 'linear', 'auto']) {
            document.querySelector(`input[value=${name}]`).click();
            await rest();
            found[name] = drawn();
        }
        document.querySelectorAll('input[value=log]')[1].click();
        type('smooth', 0.9);
        document.getElementById('theme').click();
        await rest();
        found.theme = drawn();
        type('filter', 'KL masked');
        await rest();
        found.filtered = [...document.querySelectorAll('#curves .name')].map(one => one.textContent);
        type('filter', '');
        await rest();
        const card = document.querySelector('[aria-label^=\"loss/kl\"]');
        for (const key of ['Home', 'ArrowRight', '+', 'Escape', 'End', '0', 'Home', 'ArrowRight']) {
            card.dispatchEvent(new KeyboardEvent('keydown', { key }));
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
        const slider = document.querySelector('#uv input[type=range]');
        slider.value = 0;
        slider.dispatchEvent(new Event('input'));
        found.figure = document.querySelector('#uv output').textContent;
        const larger = document.querySelector('#figures .picture button');
        found.width = [larger, larger].map(one => { one.click(); return [one.getAttribute('aria-pressed'), one.closest('.picture').clientWidth > 800]; });
        document.querySelectorAll('summary').forEach(one => one.click());
        await rest();
        return found;";
    let Some(found) = in_browser("everything_that_can_be_clicked_is_clicked", &[run], script)
    else {
        return;
    };
    for name in ["log", "time", "step", "linear", "auto", "theme"] {
        assert_eq!(found[name], 10, "{name}");
    }
    assert_eq!(found["filtered"], json!(["ci_masked"]));
    assert_eq!(found["at"], "step 1 · 1 s");
    // Of 100 and 50: (0.9 * 100 + 50) / (0.9 + 1).
    assert_eq!(found["read"], "73.68");
    assert_eq!(found["tokens"], json!(["The", " cat", "↵"]));
    assert_eq!(found["changes"], json!([" dog+0.8", " mat-1.2"]));
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
    let Some(found) = in_browser(
        "histograms_are_bars_at_the_step_of_the_slider",
        &[run],
        script,
    ) else {
        return;
    };
    // A step of figures alone has the bars before it, and a step of bars alone no figures.
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
    let Some(found) = in_browser("a_sweep_is_drawn_as_one", &[sweep], script) else {
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
    let script = "
        document.querySelectorAll('details').forEach(one => { one.open = true; });
        document.querySelectorAll('.components .open').forEach(one => one.click());
        await rest();
        return [document.documentElement.scrollWidth, drawn() > 0];";
    let Some(found) = in_window(
        (390, 844),
        "a_phone_scrolls_in_one_direction",
        &[run],
        script,
    ) else {
        return;
    };
    assert_eq!(found, json!([390, true]));
}

#[test]
fn what_nobody_expects_hides_no_more_than_itself() {
    let (_dir, run) = run("x");
    fs::write(run.join("summary.json"), "{\"tables\":7,\"lines\":[3]}").unwrap();
    let Some(mut chromium) = Chromium::start("what_nobody_expects_hides_no_more_than_itself")
    else {
        return;
    };
    let file = run.join("report.html");
    fs::write(&file, page(std::slice::from_ref(&run)).unwrap()).unwrap();
    chromium.open(&format!("file://{}", file.display()), (1400, 5000));
    let found = chromium.run(&format!(
        "{HELPERS} return [document.querySelectorAll('.failed').length, drawn()];"
    ));
    assert_eq!(found, json!([1, 10]));
}
