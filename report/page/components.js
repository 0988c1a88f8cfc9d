// Components: a map of sites by layers, and a table of each site or of all. Their texts are lines of JSON that are parsed when they are shown.

const showAll = () => show(true);

/** The list of components of a run: its head, and a line of text for each. From this file, or from the server, which is asked once a version. */
function listOf(run) {
  const version = run?.head?.components;
  if (version === null || version === undefined) return null;
  const { id, generation } = run;
  if (!isLive) run.list ??= listIn(byId(`list-${id}`)?.textContent);
  else run.list = once(`list/${id}/${generation}/${version}`, () => fetch(`components/${id}`).then(answer => answer.ok ? answer.text() : null).then(listIn), showAll) ?? run.list ?? null;
  return run.list;
}

function listIn(text) {
  if (!text) return null;
  const [head, ...lines] = text.split("\n");
  return { ...JSON.parse(head), lines };
}

/** The strongest text of a component, a few tokens of it; null if it has none. */
function textOf(one, list) {
  if (one.text === undefined) one.text = one.line === null ? null : parsed(list.lines[one.line] || "null");
  return one.text;
}

/** A token with visible blanks. */
function visible(token) {
  if (/^ +$/.test(token)) return "·".repeat(token.length);
  return token.replace(/\r/g, "␍").replace(/\n/g, "↵").replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f\u007f]/g, letter => `\\x${letter.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

/** Tokens, with the component's importance as the strength of the background. */
function marked(context, from = 0, to = context.tokens.length) {
  const token = (text, i) => {
    const importance = context.importances[i] ?? 0;
    const set = { "data-tip": `${visible(text)}  importance ${short(importance)}`, class: i === context.position ? "token peak" : "token" };
    if (importance > 0.005) set.style = `--part:${Math.round(100 * Math.min(importance, 1))}%`;
    return el("span", set, visible(text));
  };
  return context.tokens.map(token).slice(Math.max(from, 0), to);
}

/** What is chosen: a site (all without), an order, words, and the component that is open. */
const chosen = { site: null, sort: "mean", up: false, words: "", open: null, top: 0 };

/** Height of a row, in pixels. */
const ROW = 31;

const COLUMNS = [
  { key: "index", title: "component", value: one => one.index },
  { key: "mean", title: "mean importance", value: one => one.mean, bar: true },
  { key: "density", title: "density", value: one => one.density, tip: "part of the rows in which it is active" },
  { key: "kl", title: "KL if removed", value: one => one.kl },
  { key: "activation", title: "length it adds", value: one => one.activation, tip: "of its output where it is active" },
];

/** Every site of a run with all of its components: their numbers from the list and the figures, their labels. */
function sitesWithComponents(run) {
  const list = listOf(run), means = newestNumbers(run, "mean_importance"), densities = newestNumbers(run, "activation_frequency");
  const made = sitesWithComponents.made;
  if (made && made.list === list && made.means === means && made.densities === densities) return made.sites;
  const sites = new Map();
  const component = (site, index) => {
    if (!sites.has(site)) sites.set(site, new Map());
    const of = sites.get(site);
    if (!of.has(index)) of.set(index, { site, index, mean: null, density: null, kl: null, activation: null, label: "", line: null, text: undefined });
    return of.get(index);
  };
  for (const [all, column, key] of [[means, "means", "mean"], [densities, "frequencies", "density"]]) {
    for (const one of Array.isArray(all) ? all : []) (one[column] ?? []).forEach((value, i) => component(one.site, one.order[i])[key] = value);
  }
  // Those of a harvest are of more text than the figures.
  const isOfMore = list && list.positions !== null;
  let line = 0;
  for (const { name, index, mean, density, kl, activation } of list?.sites ?? []) {
    index.forEach((index, i) => {
      const one = component(name, index);
      Object.assign(one, { kl: kl[i], activation: activation[i], line: line++ });
      one.mean = isOfMore ? mean[i] : one.mean ?? mean[i];
      one.density = isOfMore ? density[i] : one.density ?? density[i];
    });
  }
  for (const [key, label] of Object.entries(list?.labels ?? {})) {
    const at = key.lastIndexOf(":"), one = sites.get(key.slice(0, at))?.get(Number(key.slice(at + 1)));
    if (one) one.label = label;
  }
  const found = [...sites].map(([name, all]) => ({ name, components: [...all.values()] })).sort((one, other) => inOrder(one.name, other.name));
  sitesWithComponents.made = { list, means, densities, sites: found };
  return found;
}

/** A component of a run that the page knows, by its site and number. */
const componentAt = (run, site, index) => sitesWithComponents(run).find(one => one.name === site)?.components.find(one => one.index === index);

/** A link that opens a component. */
function componentLink(site, index, ...inside) {
  const focus = view.focus ? `run=${view.focus}&` : "";
  return el("a", { href: `#${focus}component=${encodeURIComponent(`${site}:${index}`)}`, title: "A link to this component" }, ...inside);
}

/** How many components of a site are active anywhere, and their sum of densities. */
function countsOf(site) {
  if (!site.counts) {
    const known = site.components.filter(one => one.density !== null);
    site.counts = { all: site.components.length, known: known.length, alive: known.filter(one => one.density > 0).length, l0: known.reduce((sum, one) => sum + one.density, 0) };
  }
  return site.counts;
}

function componentsSection() {
  const run = focused();
  const sites = run ? sitesWithComponents(run) : [];
  const list = listOf(run), problems = (list?.problems ?? []).map(line => el("p", { class: "hint" }, line));
  const isComing = isLive && run?.head && run.head.components !== null && !list;
  if (!sites.length) return isComing ? [runSelect(), el("p", { class: "none" }, "The components are on their way.")] : problems.length ? [runSelect(), problems] : null;
  if (!sites.some(one => one.name === chosen.site)) chosen.site = null;
  const step = list?.positions ? list.step : (run.head.figures.findLast(([, names]) => names.includes("mean_importance")) ?? [list?.step])[0];
  const of = list?.positions ? `harvest of ${list.positions.toLocaleString("en")} positions, ` : "";
  const search = el("input", { type: "search", placeholder: "number, site, label or words of its text", "aria-label": "Search components", value: chosen.words, autocomplete: "off", spellcheck: "false" });
  const option = name => el("option", { value: name ?? "", selected: name === chosen.site }, name ?? `all ${sites.length} sites`);
  const select = el("select", { "aria-label": "Site", onchange: event => choose(event.target.value || null) }, sites.length > 1 ? option(null) : null, sites.map(one => option(one.name)));
  const said = el("p", { class: "hint" });
  const rows = new Rows(sites, list, said);
  const map = siteMap(sites, choose);
  const detail = el("div", { id: "component" });
  function choose(name) {
    Object.assign(chosen, { site: name, top: 0 });
    select.value = name ?? "";
    map?.mark();
    rows.fill();
  }
  search.addEventListener("input", () => {
    Object.assign(chosen, { words: search.value.trim(), top: 0 });
    soon(() => rows.fill());
  });
  const open = () => {
    const one = chosen.open && sites.find(site => site.name === chosen.open.site)?.components.find(one => one.index === chosen.open.index);
    detail.replaceChildren(...one ? [componentDetail(one, run, list)] : []);
  };
  rows.open = one => {
    const isSame = chosen.open?.site === one.site && chosen.open?.index === one.index;
    chosen.open = isSame ? null : { site: one.site, index: one.index };
    open();
    rows.drawAnew();
    writeAddress();
    if (!isSame) detail.scrollIntoView({ block: "nearest" });
  };
  rows.fill();
  open();
  // Made again, it stands where it was.
  if (chosen.top) soon(() => { rows.node.scrollTop = chosen.top; });
  return [
    el("div", { class: "choose" }, runSelect(), sites.length > 1 ? el("label", {}, el("span", {}, "Site"), select) : null, el("label", {}, el("span", {}, "Search"), search), step === null || step === undefined ? null : el("span", { class: "hint" }, `${of}step ${step.toLocaleString("en")}`)),
    map?.node,
    said,
    problems,
    leftOut(list),
    rows.node,
    detail,
  ];
}

/** A line about what the list leaves out. */
function leftOut(list) {
  const [texts, details] = list?.left_out ?? [0, 0];
  const parts = [[texts, "strongest text"], [details, "details"]].filter(([count]) => count);
  const words = parts.map(([count, what]) => `the ${what} of ${count.toLocaleString("en")}`).join(" and ");
  return words ? el("p", { class: "hint" }, `Of the components that are active least, ${words} ${isLive ? "are left out" : "are left out of this file, which has 32 MiB of them at most; spd-launch watch shows all"}.`) : null;
}

/** A map of sites: a row for each layer, a column for each kind of site, the part that is alive as the strength of a cell. */
function siteMap(sites, choose) {
  const place = name => [name.replace(/\d+/, "*"), Number(/\d+/.exec(name)?.[0] ?? 0)];
  const kinds = [...new Set(sites.map(one => place(one.name)[0]))], layers = [...new Set(sites.map(one => place(one.name)[1]))].sort((one, other) => one - other);
  if (sites.length < 4 || kinds.length * layers.length > 3 * sites.length) return null;
  const shared = kinds.length > 1 ? kinds.reduce((one, other) => one.slice(0, [...one].findIndex((letter, i) => letter !== other[i]) >>> 0)).replace(/[^.]*$/, "") : "";
  const cells = new Map();
  const cell = (kind, layer) => {
    const site = sites.find(one => place(one.name).join() === [kind, layer].join());
    if (!site) return el("td", {});
    const { all, known, alive, l0 } = countsOf(site), part = known ? alive / known : 0;
    const tip = known ? `${site.name}: ${alive} of ${all} alive, ${short(l0)} active at a position` : `${site.name}: ${all} components`;
    const press = () => choose(chosen.site === site.name ? null : site.name);
    const button = el("button", { type: "button", "data-tip": tip, style: `--part:${Math.round(70 * part)}%`, onclick: press }, known ? alive.toLocaleString("en") : all.toLocaleString("en"));
    cells.set(site.name, button);
    return el("td", {}, button);
  };
  const node = el("div", { class: "scroll" }, el("table", { class: "map" },
    el("thead", {}, el("tr", {}, el("th", {}, "layer"), kinds.map(kind => el("th", { title: kind }, kind.slice(shared.length) || kind)))),
    el("tbody", {}, layers.map(layer => el("tr", {}, el("th", {}, layer), kinds.map(kind => cell(kind, layer)))))));
  const mark = () => cells.forEach((button, name) => button.setAttribute("aria-pressed", name === chosen.site));
  mark();
  return { node, mark };
}

/** The table: only the rows in sight are in the page. */
class Rows {
  constructor(sites, list, said) {
    Object.assign(this, { sites, list, said });
    const space = () => el("tr", { class: "space", hidden: true });
    Object.assign(this, { above: space(), below: space(), inSight: new Map(), head: el("tr", {}) });
    this.body = el("tbody", {}, this.above, this.below);
    this.node = el("div", { class: "scroll rows", tabindex: -1, onscroll: () => (chosen.top = this.node.scrollTop, soon(this.drawn ??= () => this.draw())) }, el("table", { class: "components" }, el("thead", {}, this.head), this.body));
  }

  /** Finds and sorts the rows. */
  fill() {
    const words = chosen.words.toLowerCase().split(/\s+/).filter(Boolean);
    const text = one => one.words ??= `#${one.index} ${one.site} ${one.label} ${textOf(one, this.list)?.tokens.join("") ?? ""}`.toLowerCase();
    const fits = one => words.every(word => /^#?\d+$/.test(word) ? String(one.index) === word.replace("#", "") : text(one).includes(word));
    const sites = this.sites.filter(one => chosen.site === null || one.name === chosen.site);
    const all = sites.flatMap(one => one.components);
    this.isOfAll = sites.length > 1;
    const column = COLUMNS.find(one => one.key === chosen.sort), sign = chosen.up ? 1 : -1;
    const value = one => column.value(one) ?? -Infinity;
    const valued = (words.length ? all.filter(fits) : all).map(one => [sign * value(one), one]);
    this.found = valued.sort(([first, one], [second, other]) => first < second ? -1 : first > second ? 1 : one.index - other.index).map(([, one]) => one);
    this.most = all.reduce((most, one) => Math.max(most, one.mean ?? 0), 1e-12);
    const sum = key => sites.reduce((sum, one) => sum + countsOf(one)[key], 0), known = sum("known"), alive = sum("alive");
    this.said.textContent = [
      known ? `${alive.toLocaleString("en")} of ${known.toLocaleString("en")} components alive, ${(known - alive).toLocaleString("en")} dead; ${short(sum("l0"))} active at a position` : `${all.length.toLocaleString("en")} components`,
      words.length ? `${this.found.length.toLocaleString("en")} fit the search` : "",
    ].filter(Boolean).join("; ");
    const sort = key => () => {
      Object.assign(chosen, { up: chosen.sort === key ? !chosen.up : key === "index", sort: key, top: 0 });
      this.fill();
    };
    const active = [...this.head.children].findIndex(one => one.contains(document.activeElement));
    const head = one => el("th", { class: "number", title: one.tip, "aria-sort": one.key !== chosen.sort ? "none" : chosen.up ? "ascending" : "descending" }, el("button", { type: "button", onclick: sort(one.key) }, one.title));
    this.columns = COLUMNS.filter(one => one.key === "index" || all.some(row => one.value(row) !== null));
    this.hasText = all.some(one => one.line !== null && this.list.lines[one.line]);
    this.hasLabel = all.some(one => one.label);
    this.head.replaceChildren(...[...this.columns.map(head), this.hasLabel ? el("th", {}, "label") : null, this.isOfAll ? el("th", {}, "site") : null, this.hasText ? el("th", { class: "text" }, "strongest activation") : null].filter(Boolean));
    this.head.children[active]?.querySelector("button")?.focus();
    this.node.scrollTop = chosen.top;
    this.node.style.setProperty("--rows", Math.max(this.found.length, 1));
    this.drawAnew();
  }

  /** Makes all rows in sight again. */
  drawAnew() {
    const active = this.body.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.inSight.forEach(row => row.remove());
    this.inSight.clear();
    this.draw();
    if (active) [...this.body.querySelectorAll(".open")].find(one => one.textContent === active)?.focus({ preventScroll: true });
  }

  /** Puts the rows in sight into the table, and space for the others. Rows that stay in sight are not touched, so that scrolling keeps to 60 frames a second. */
  draw() {
    const count = this.found.length, high = this.node.clientHeight || 480;
    const first = Math.max(Math.min(Math.floor(this.node.scrollTop / ROW), count) - 4, 0), last = Math.min(first + Math.ceil(high / ROW) + 8, count);
    const inSight = new Map(this.found.slice(first, last).map(one => [one, this.inSight.get(one)]));
    this.inSight.forEach((row, one) => inSight.has(one) || row.remove());
    let above = this.above;
    inSight.forEach((row, one) => {
      if (!row) above.after(row = this.row(one));
      inSight.set(one, above = row);
    });
    this.inSight = inSight;
    for (const [space, rows] of [[this.above, first], [this.below, count - last]]) {
      space.hidden = rows === 0;
      space.style.height = `${rows * ROW}px`;
    }
  }

  row(one) {
    const isOpen = chosen.open?.site === one.site && chosen.open?.index === one.index;
    const best = textOf(one, this.list);
    const cell = column => {
      const value = column.value(one);
      const bar = column.bar && value !== null ? { style: `--bar:${Math.round(100 * value / this.most)}%`, class: "number bar" } : { class: "number" };
      return el("td", bar, short(value));
    };
    const around = best ? el("div", { class: "aligned" }, el("span", {}, marked(best, best.position - 24, best.position)), el("span", {}, marked(best, best.position, best.position + 40))) : "–";
    const button = el("button", { type: "button", class: "open", "aria-expanded": isOpen, onclick: event => (event.stopPropagation(), this.open(one)) }, `#${one.index}`);
    return el("tr", { class: [isOpen ? "chosen" : "", one.density === 0 ? "dead" : ""].join(" "), onclick: () => this.open(one) }, el("td", { class: "number" }, button), this.columns.slice(1).map(cell),
      this.hasLabel ? el("td", { class: "label" }, one.label) : null, this.isOfAll ? el("td", { class: "of" }, one.site) : null, this.hasText ? el("td", { class: "text one" }, around) : null);
  }
}
