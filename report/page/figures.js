// Figures with a slider over steps, drawn from their numbers; one without numbers is its SVG.

/** The figures that are looked at first: those of toys. */
const FIRST = ["causal_importances", "uv_matrices"];
const chosenSteps = {};
const asked = new Map();

/** What `ask` answers, asked once for a key; `null` until then, when each `then` gets it. */
function once(key, ask, then) {
  if (!asked.has(key)) {
    const kept = { found: null, waiting: new Set() };
    asked.set(key, kept);
    ask().then(found => {
      kept.found = found;
      if (found) kept.waiting.forEach(one => one(found));
      kept.waiting.clear();
    }).catch(() => asked.delete(key));
  }
  const { found, waiting } = asked.get(key);
  if (found === null) waiting.add(then);
  return found;
}

/** Gives `use` the text of a figure: its numbers as JSON, or SVG. At once in a page that is a file. */
function withFigure(run, step, name, use) {
  if (run.pictures) return use(run.pictures.figures[step]?.[name]);
  const key = `figure/${run.id}/${step}/${encodeURIComponent(name)}`;
  const found = once(`${run.generation}/${key}`, () => fetch(key).then(answer => answer.ok ? answer.text() : null), use);
  if (found) use(found);
}

/** The numbers of a figure at the newest step that has it, parsed once; null while they are on their way. */
function newestNumbers(run, name) {
  const [step] = run?.head?.figures.findLast(([, names]) => names.includes(name)) ?? [];
  if (step === undefined) return null;
  const key = `${run.generation}/${step}/${name}`;
  run.numbers ??= {};
  if (run.numbers[name]?.key === key) return run.numbers[name].found;
  const kept = run.numbers[name] = { key, found: null };
  let isLate = false;
  withFigure(run, step, name, text => {
    kept.found = parsed(text);
    if (isLate) show(true);
  });
  isLate = true;
  return kept.found;
}

/** Numbers as text, parsed; null for another text. */
function parsed(text) {
  try { return JSON.parse(text); } catch { return null; }
}

/** Steps of the run in focus for which the page has one of these figures. */
function stepsOf(run, wanted) {
  const has = ([step, names]) => names.some(name => wanted(name) && (!run.pictures || run.pictures.figures[step]?.[name] !== undefined));
  return run?.head ? run.head.figures.filter(has) : [];
}

const widened = new Set();

/** A figure, with a button for page width. */
function picture(title, inside) {
  const button = el("button", { type: "button", "aria-label": `${title}, larger`, title: "Larger" }, "⤢");
  const card = el("figure", { class: "picture" }, el("figcaption", {}, title, button), inside);
  const set = () => button.setAttribute("aria-pressed", card.classList.toggle("wide", widened.has(title)));
  button.addEventListener("click", () => {
    if (!widened.delete(title)) widened.add(title);
    set();
    // Its place among the others has changed.
    card.scrollIntoView({ block: card.offsetHeight > innerHeight / 2 ? "start" : "nearest" });
  });
  set();
  return card;
}

/** Fills a place with a figure. */
function drawFigure(place, text, name, step) {
  const title = spoken(name);
  if (typeof text !== "string") return place.replaceChildren(el("p", { class: "none" }, "It is left out here."));
  if (/^\s*[[{]/.test(text)) return place.replaceChildren(...panels(parsed(text), name));
  // Its space is reserved before it is drawn, so links lead to the right place.
  const [, width, height] = /^[^>]*?<svg[^>]*\sviewBox="\S+ \S+ ([\d.]+) ([\d.]+)"/.exec(text) ?? [];
  const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  place.replaceChildren(el("img", { decoding: "async", width, height, alt: `${title}, step ${step}`, src: address, onload: () => URL.revokeObjectURL(address) }));
}

/** The panels of a figure, by the form of its numbers: a matrix, a histogram, values in their order, or active components. */
function panels(found, name) {
  const fail = () => [el("p", { class: "none" }, "Its numbers have a form that this page does not draw; the SVG beside them in the run directory shows it.")];
  if (found?.sites && found.groups) return [activeRows([...found.groups, ...found.sites])];
  if (!Array.isArray(found)) return fail();
  const made = found.map(one => {
    if (one.rows && one.order) return new Heat(one, name).card;
    const bars = new Bars(`/${one.site}`);
    if (one.counts) {
      const edge = i => one.low + (one.high - one.low) * i / one.counts.length;
      bars.show({ edges: Array.from({ length: one.counts.length + 1 }, (_, i) => edge(i)), counts: one.counts });
    } else if (one.order && (one.means ?? one.frequencies)) bars.rank(one.order, one.means ?? one.frequencies);
    else return null;
    return bars.card;
  });
  if (!made.length || made.includes(null)) return fail();
  return [el("div", { class: found.every(one => one.rows) ? "panels" : "grid bars" }, made)];
}

/** Active components of sites and groups, as bars of all that they have. */
function activeRows(all) {
  const row = ({ name, components, l0 }) => el("tr", {}, el("td", {}, breakable(name)), el("td", { class: "number" }, short(l0)), el("td", { class: "number" }, components.toLocaleString("en")),
    el("td", { class: "part" }, el("i", { style: `width:${Math.min(100 * l0 / components, 100)}%` })));
  return el("div", { class: "scroll" }, el("table", { class: "active" }, el("thead", {}, el("tr", {}, ["site", "active", "of", "part"].map((title, i) => el("th", { class: i === 1 || i === 2 ? "number" : null }, title)))), el("tbody", {}, all.map(row))));
}

/** Colours of a matrix: from that of 0 to that of the greatest magnitude, negative and positive. */
const HEAT = { light: [[247, 248, 250], [0, 90, 160], [200, 70, 0]], dark: [[31, 35, 40], [110, 190, 255], [255, 150, 80]] };

/** A matrix with components in its columns. */
class Heat {
  constructor({ site, order, each, rows }, name) {
    Object.assign(this, { order, each: each ?? [1, 1], rows });
    this.of = name.startsWith("causal") ? "feature" : / U$/.test(site) ? "output" : "input";
    const [high, wide] = [rows.length, rows[0]?.length ?? 0];
    const size = rows.flat().reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    this.said = el("span", { class: "value" });
    const canvas = el("canvas", { width: wide, height: high, role: "img", "aria-label": `${site}: ${high} rows of ${this.of}s, ${order.length} components`, style: `width:${wide * Math.min(28, Math.max(440 / high, 3))}px` });
    canvas.paint = () => {
      if (!wide || !high) return;
      const draw = canvas.getContext("2d"), image = draw.createImageData(wide, high);
      const [zero, below, above] = HEAT[isDark() ? "dark" : "light"];
      rows.forEach((row, y) => row.forEach((value, x) => {
        const part = size ? Math.abs(value) / size : 0, end = value < 0 ? below : above;
        image.data.set([...zero.map((from, i) => from + (end[i] - from) * part), 255], 4 * (y * wide + x));
      }));
      draw.putImageData(image, 0, 0);
    };
    canvas.paint();
    canvas.addEventListener("pointermove", event => this.say(Math.floor(event.offsetX / canvas.clientWidth * wide), Math.floor(event.offsetY / canvas.clientHeight * high)));
    canvas.addEventListener("pointerleave", () => this.say(-1, -1));
    this.ends = rows.flat().some(value => value < 0) ? `±${short(size)}` : `0 to ${short(size)}`;
    this.card = el("figure", { class: "panel" }, el("figcaption", {}, el("span", { class: "name" }, breakable(site)), this.said), canvas, el("small", {}, `component →, ${this.of} ↓`));
    this.say(-1, -1);
  }

  /** Shows the value of a cell; the range without one. */
  say(x, y) {
    const value = this.rows[y]?.[x];
    if (value === undefined) return void (this.said.textContent = this.ends);
    const [rows, columns] = this.each;
    const span = (first, count, all) => count > 1 ? `${first}–${Math.min(first + count, all) - 1}` : first;
    const component = `#${this.order[x * columns]}${columns > 1 ? " and others" : ""}`;
    this.said.textContent = `${this.of} ${span(y * rows, rows, Infinity)}, ${component}: ${short(value)}`;
  }
}

function figuresPart(part, wanted, histograms) {
  const run = focused();
  const drawn = new Map(stepsOf(run, wanted));
  const all = new Set([...drawn.keys(), ...histograms ? histogramSteps(run) : []]);
  const steps = [...all].sort((one, other) => one - other).map(step => [step, drawn.get(step)]);
  if (!steps.length) return null;
  const bars = histograms?.(run);
  const shown = el("div", { class: "figures" });
  const said = el("output", {});
  // Untouched, the slider follows the newest step.
  const start = Math.max(chosenSteps[part] === undefined ? -1 : steps.findIndex(([step]) => step === chosenSteps[part]), -1);
  const places = new Map();
  const draw = index => {
    const [step, names] = steps[index];
    said.textContent = `step ${step.toLocaleString("en")}`;
    said.dataset.step = step;
    bars?.draw(step);
    shown.hidden = !names;
    for (const name of (names ?? []).filter(wanted)) {
      if (!places.has(name)) {
        places.set(name, el("div", {}));
        shown.append(picture(spoken(name), places.get(name)));
      }
      const place = places.get(name);
      withFigure(run, step, name, text => Number(said.dataset.step) === step && drawFigure(place, text, name, step));
    }
  };
  const move = event => {
    const index = Number(event.target.value);
    chosenSteps[part] = index === steps.length - 1 ? undefined : steps[index][0];
    draw(index);
  };
  const at = start < 0 ? steps.length - 1 : start;
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, step: 1, value: at, "aria-label": "Step of the figures", oninput: move });
  draw(at);
  const left = run.pictures?.figures_left_out;
  return [
    el("div", { class: "choose" }, runSelect(), steps.length > 1 ? el("label", {}, el("span", {}, "Step"), slider) : null, said),
    left ? el("p", { class: "hint" }, `${left} figures are left out of this file to keep it small; they are in ${run.head.path}/figures, and in spd-launch watch.`) : null,
    bars?.part,
    shown,
  ];
}

const figuresSection = () => figuresPart("figures", name => !FIRST.includes(name), histogramsPart);
const uvSection = () => figuresPart("uv", name => FIRST.includes(name));
