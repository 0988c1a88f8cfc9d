// Components: a map of sites by layers, a table of each site or of all, and a component with its text and the effect of its removal.

const showAll = () => show(true);

/** The components of a run with their text: from this file, or from the server, which is asked once a step. */
function componentsOf(run) {
  if (run?.pictures) return run.pictures.components;
  const step = run?.head?.components;
  if (step === null || step === undefined) return null;
  return once(`${run.id}/${run.generation}/${step}`, () => fetch(`components/${run.id}`).then(answer => answer.ok ? answer.json() : null), showAll);
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
  { key: "kl", title: "KL if removed", value: one => one.text?.removal?.kl ?? null },
  { key: "activation", title: "length it adds", value: one => one.text?.removal?.activation ?? null },
];

/** Every site of a run with all of its components: their numbers from the figures, their text where there is one. */
function sitesWithComponents(run) {
  const texts = componentsOf(run), means = newestNumbers(run, "mean_importance"), densities = newestNumbers(run, "activation_frequency");
  const made = sitesWithComponents.made;
  if (made && made.texts === texts && made.means === means && made.densities === densities) return made.sites;
  const sites = new Map();
  const component = (site, index) => {
    if (!sites.has(site)) sites.set(site, new Map());
    const of = sites.get(site);
    if (!of.has(index)) of.set(index, { site, index, mean: null, density: null, text: null });
    return of.get(index);
  };
  for (const [all, column, key] of [[means, "means", "mean"], [densities, "frequencies", "density"]]) {
    for (const one of Array.isArray(all) ? all : []) (one[column] ?? []).forEach((value, i) => component(one.site, one.order[i])[key] = value);
  }
  for (const site of texts?.sites ?? []) {
    for (const text of site.components) {
      const one = component(site.name, text.index);
      one.text = text;
      one.mean ??= text.mean_importance;
      one.density ??= text.density;
    }
  }
  const found = [...sites].map(([name, all]) => ({ name, components: [...all.values()] })).sort((one, other) => inOrder(one.name, other.name));
  sitesWithComponents.made = { texts, means, densities, sites: found };
  return found;
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
  const isComing = run?.head && run.head.components !== null;
  if (!sites.length) return isComing ? [runSelect(), el("p", { class: "none" }, run.pictures?.problem ?? "The components are on their way.")] : null;
  if (!sites.some(one => one.name === chosen.site)) chosen.site = null;
  const step = (run.head.figures.findLast(([, names]) => names.includes("mean_importance")) ?? [run.head.components])[0] ?? run.head.components;
  const left = run.pictures?.components?.left_out;
  const search = el("input", { type: "search", placeholder: "number, site or words of its text", "aria-label": "Search components", value: chosen.words, autocomplete: "off", spellcheck: "false" });
  const option = name => el("option", { value: name ?? "", selected: name === chosen.site }, name ?? `all ${sites.length} sites`);
  const select = el("select", { "aria-label": "Site", onchange: event => choose(event.target.value || null) }, sites.length > 1 ? option(null) : null, sites.map(one => option(one.name)));
  const said = el("p", { class: "hint" });
  const list = new Rows(sites, said);
  const map = siteMap(sites, choose);
  const detail = el("div", { id: "component" });
  function choose(name) {
    Object.assign(chosen, { site: name, top: 0 });
    select.value = name ?? "";
    map?.mark();
    list.fill();
  }
  search.addEventListener("input", () => {
    Object.assign(chosen, { words: search.value.trim(), top: 0 });
    soon(() => list.fill());
  });
  const open = () => {
    const one = chosen.open && sites.find(site => site.name === chosen.open.site)?.components.find(one => one.index === chosen.open.index);
    detail.replaceChildren(...one ? [componentDetail(one, run)] : []);
  };
  list.open = one => {
    const isSame = chosen.open?.site === one.site && chosen.open?.index === one.index;
    chosen.open = isSame ? null : { site: one.site, index: one.index };
    open();
    list.draw();
    writeAddress();
    if (!isSame) detail.scrollIntoView({ block: "nearest" });
  };
  list.fill();
  open();
  // Made again, it stands where it was.
  if (chosen.top) soon(() => { list.node.scrollTop = chosen.top; });
  return [
    el("div", { class: "choose" }, runSelect(), sites.length > 1 ? el("label", {}, el("span", {}, "Site"), select) : null, el("label", {}, el("span", {}, "Search"), search), step === null ? null : el("span", { class: "hint" }, `step ${step.toLocaleString("en")}`)),
    map?.node,
    said,
    run.pictures?.problem ? el("p", { class: "hint" }, run.pictures.problem) : null,
    left ? el("p", { class: "hint" }, `The text of ${left.toLocaleString("en")} less important components is left out of this file to keep it small; spd-launch watch shows all.`) : null,
    list.node,
    detail,
  ];
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
  constructor(sites, said) {
    Object.assign(this, { sites, said });
    this.body = el("tbody", {});
    this.head = el("tr", {});
    this.node = el("div", { class: "scroll rows", tabindex: -1, onscroll: () => (chosen.top = this.node.scrollTop, soon(this.drawn ??= () => this.draw())) }, el("table", { class: "components" }, el("thead", {}, this.head), this.body));
  }

  /** Finds and sorts the rows. */
  fill() {
    const words = chosen.words.toLowerCase().split(/\s+/).filter(Boolean);
    const text = one => one.words ??= `#${one.index} ${one.site} ${(one.text?.contexts ?? []).map(context => context.tokens.join("")).join(" ")}`.toLowerCase();
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
    this.hasText = all.some(one => one.text?.contexts?.length);
    this.head.replaceChildren(...[...this.columns.map(head), this.isOfAll ? el("th", {}, "site") : null, this.hasText ? el("th", { class: "text" }, "strongest activation") : null].filter(Boolean));
    this.head.children[active]?.querySelector("button")?.focus();
    this.node.scrollTop = chosen.top;
    this.draw();
  }

  /** Puts the rows in sight into the table, and space for the others. */
  draw() {
    const count = this.found.length, high = this.node.clientHeight || 480;
    const first = Math.max(Math.min(Math.floor(this.node.scrollTop / ROW), count) - 8, 0), last = Math.min(first + Math.ceil(high / ROW) + 16, count);
    const space = rows => rows > 0 ? [el("tr", { class: "space", style: `height:${rows * ROW}px` })] : [];
    const active = this.body.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.body.replaceChildren(...space(first), ...this.found.slice(first, last).map(one => this.row(one)), ...space(count - last));
    if (active) [...this.body.querySelectorAll(".open")].find(one => one.textContent === active)?.focus({ preventScroll: true });
    this.node.style.setProperty("--rows", Math.max(count, 1));
  }

  row(one) {
    const isOpen = chosen.open?.site === one.site && chosen.open?.index === one.index;
    const best = one.text?.contexts?.[0];
    const cell = column => {
      const value = column.value(one);
      const bar = column.bar && value !== null ? { style: `--bar:${Math.round(100 * value / this.most)}%`, class: "number bar" } : { class: "number" };
      return el("td", bar, short(value));
    };
    const around = best ? el("div", { class: "aligned" }, el("span", {}, marked(best, best.position - 24, best.position)), el("span", {}, marked(best, best.position, best.position + 40))) : "–";
    const button = el("button", { type: "button", class: "open", "aria-expanded": isOpen, onclick: event => (event.stopPropagation(), this.open(one)) }, `#${one.index}`);
    return el("tr", { class: [isOpen ? "chosen" : "", one.density === 0 ? "dead" : ""].join(" "), onclick: () => this.open(one) }, el("td", { class: "number" }, button), this.columns.slice(1).map(cell),
      this.isOfAll ? el("td", { class: "of" }, one.site) : null, this.hasText ? el("td", { class: "text one" }, around) : null);
  }
}

/** The samples that the effect of a removal is averaged over. */
function measuredAt({ rows, positions }) {
  if (positions === null || positions === undefined) return "measured at the first of these";
  const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
  return `mean over ${count(positions, "position")} in ${count(rows, "sample")}, drawn among those where it is active`;
}

function componentDetail(one, run) {
  const { contexts = [], removal = null } = one.text ?? {};
  const strength = context => context.logit ?? Math.max(...context.importances.map(value => value ?? 0), 0);
  const place = ({ sample, sample_position, token }) => sample === null || sample === undefined ? {}
    : { title: `sample ${sample} of the dataset, position ${sample_position}: token ${token} from its beginning` };
  const text = context => el("li", {}, el("b", place(context), short(strength(context))),
    el("span", { class: "text aligned" }, el("span", {}, marked(context, 0, context.position)), el("span", {}, marked(context, context.position))),
    context.token === null || context.token === undefined ? null : el("span", { class: "hint" }, `token ${context.token.toLocaleString("en")}`));
  const most = Math.max(...[...removal?.up ?? [], ...removal?.down ?? []].map(({ change }) => Math.abs(change ?? 0)), 1e-12);
  const change = ({ token, change }) => el("li", { style: `--bar:${Math.round(100 * Math.abs(change) / most)}%`, class: change > 0 ? "up" : "down" }, el("span", { class: "token" }, visible(token)), el("b", {}, `${change > 0 ? "+" : ""}${short(change)}`));
  const list = (title, all) => el("div", {}, el("h4", {}, title), all?.length ? el("ul", { class: "changes" }, all.map(change)) : el("p", { class: "none" }, "–"));
  const facts = COLUMNS.slice(1).filter(column => column.value(one) !== null).map(column => `${column.title} ${short(column.value(one))}`);
  const hasLogit = contexts[0]?.logit !== null && contexts[0]?.logit !== undefined;
  return el("article", { class: "card detail", "aria-label": `${one.site} #${one.index}` },
    el("h3", {}, el("a", { href: `#component=${encodeURIComponent(`${one.site}:${one.index}`)}`, title: "A link to this component" }, `${one.site} #${one.index}`), el("small", {}, facts.join(" · "))),
    el("h4", {}, hasLogit ? "where it is most active, in held-out text, by its logit: the importance before it is clipped" : "where it is most active, in held-out text"),
    contexts.length ? el("div", { class: "scroll" }, el("ol", { class: "contexts" }, contexts.map(text))) : el("p", { class: "none" }, !one.text && run.head.components !== null ? "its text was not collected" : "nowhere in the text that was read"),
    removal ? el("div", { class: "removal" }, el("p", { class: "hint" }, measuredAt(removal)), list("more likely without it", removal.up), list("less likely without it", removal.down)) : null);
}
