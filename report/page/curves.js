// The sections of charts: every metric by its group, L0 by site, speed, the machine.

/** The line of a metric for each run that is shown. */
const perRun = key => () => shownRuns().filter(run => run.curves.has(key))
  .map(run => ({ label: book.names[run.id], color: colorOf(run.id), dash: dashOf(run.id), run, curve: run.curves.get(key) }));

/** A line for each of several metrics of the run in focus. */
const perKey = (belongs, label, many = false) => () => {
  const run = focused();
  const all = run ? [...run.curves.keys()].filter(belongs).sort(inOrder) : [];
  const color = i => many && all.length > 8 ? ordered(i, all.length) : colorOf(i);
  return all.map((key, i) => ({ label: label(key), color: color(i), run, curve: run.curves.get(key) }));
};

const nameIn = (group, key) => key.startsWith(`${group}/`) ? key.slice(group.length + 1) : key;

/** Values that were measured once, before the first step. */
const isEarly = key => key.startsWith("start/");

/** Groups of metrics in their order: a title, whether it is open, and the names in it; a metric belongs to the first that fits. */
const GROUPS = [
  ["losses, on the batch of the step", true, /^loss\//],
  ["more", false, /_0p2|^eval\/(l0_above|hidden_acts|site_outputs|subset|ce_difference)|\/(random|zero|target|rounded|unmasked)$|^(?!eval\/)/],
  ["the output, held out", true, /^eval\/((ce|kl|mse)|(ce|kl|mse)_unrecovered|loss|adversary|ladder)\//],
  ["components, held out", true, /^/],
];

/** The order in a group: the total first, what is asked for most before the rest. */
const leading = key => [/^loss\/total$/, /ci_masked$/, /stochastic$/, /l0$/, /ci_error|matched/].findIndex(pattern => pattern.test(key)) >>> 0;

/** Whether a name contains all words of the filter. */
function passes(key) {
  const all = `${key} ${worded(key).name}`.toLowerCase();
  return view.filter.toLowerCase().split(/\s+/).every(word => all.includes(word));
}

/** A foldable section of charts. */
function folded(title, count, isOpen, ...inside) {
  return el("details", { class: "group", open: isOpen }, el("summary", {}, el("span", {}, title), el("small", {}, count)), ...inside);
}

const grid = specs => el("div", { class: "grid" }, specs.map(spec => new Chart(spec).card));

/** The sites of all runs: those of which the active components are counted. */
function sitesOf() {
  return [...new Set(runs.flatMap(run => run ? [...run.curves.keys()].filter(key => isOfSite(run, key)) : []))].map(key => key.slice(L0.length));
}

function curvesSection() {
  const sites = new Set(sitesOf());
  const site = key => [...key.matchAll(/\//g)].map(({ index }) => key.slice(index + 1)).find(end => sites.has(end));
  // One chart for a metric over all sites.
  const charts = new Map();
  for (const key of keys(key => !key.startsWith("system:")).filter(passes)) {
    const of = site(key);
    const name = of === undefined || isEarly(key) ? key : `${key.slice(0, -of.length - 1)} by site`;
    charts.set(name, [...charts.get(name) ?? [], key]);
  }
  // Of a metric of one site only, its total says the same.
  for (const [name, keys] of charts) if (keys.length === 1 && charts.has(name.replace(" by site", "")) && name.endsWith(" by site")) charts.delete(name);
  if (!charts.size) return [el("p", { class: "none" }, view.filter ? "No metric has these words in its name." : "No rows yet.")];
  const all = [...charts.keys()];
  const isIn = (group, key) => !isEarly(key) && GROUPS.find(([, , names]) => names.test(key)) === group;
  const spec = name => {
    const [key] = charts.get(name), said = worded(key);
    const common = { title: said.name, mark: BETTER[said.better], is: defined(key), full: name };
    if (!name.endsWith(" by site")) return { ...common, lines: perRun(key) };
    const base = name.slice(0, -"by site".length - 1);
    const lines = perKey(one => one.startsWith(`${base}/`) && site(one) === one.slice(base.length + 1), one => one.slice(base.length + 1), true);
    return { ...common, title: `${said.name}, by site`, lines, named: true };
  };
  const order = (one, other) => leading(one.replace(" by site", "")) - leading(other.replace(" by site", "")) || inOrder(one, other);
  const shown = GROUPS.map(group => [group, all.filter(key => isIn(group, key)).sort(order)]).filter(([, names]) => names.length);
  shown.sort(([[, one]], [[, other]]) => other - one);
  const [first, ...others] = shown.map(([[title, isOpen], names]) => folded(title, names.length, isOpen || view.filter !== "", grid(names.map(spec))));
  return [
    all.some(name => name.endsWith(" by site")) ? runSelect() : null,
    first,
    view.filter ? null : el("div", { id: "tradeoff" }, scatterCard()),
    ...others,
    early(all.filter(isEarly)),
  ];
}

/** Single values, without curves. */
function early(all) {
  if (!all.length) return null;
  const column = run => ({ title: runs.filter(Boolean).length > 1 ? [dotOf(run), book.names[run.id]] : "value", number: true, show: key => short(lastOf(run, key) ?? null) });
  const columns = [{ title: "metric", show: key => breakable(nameIn("start", key)) }, ...runs.filter(Boolean).map(column)];
  return folded("before the first step", all.length, view.filter !== "", el("div", { class: "card" }, table(columns, all)));
}

const L0 = "eval/l0/";

/** Whether a metric belongs to a site. Groups of sites (`[[eval.subset]]`) have such metrics too, and would be counted twice. */
function isOfSite(run, key) {
  run.groups ??= new Set((run.head?.settings ?? []).filter(([setting]) => /^eval\.subset\[\d+\]\.name$/.test(setting)).map(([, name]) => L0 + name));
  return key.startsWith(L0) && !run.groups.has(key);
}

/** Whether it is a time of a training step. Times of other phases are prefixed with the phase. */
const isOfStep = key => /^system:time_ms\/[^/]+$/.test(key);

function speedSection() {
  const parts = keys(key => isOfStep(key));
  const speeds = keys(key => key.startsWith("system:steps_per_s/"));
  const trained = speeds.filter(key => key.endsWith("/train") || key.endsWith("/target"));
  if (!parts.length && !speeds.length) return null;
  // Steps of the target and of the run count separately; both share only the time axis.
  const speed = key => ({ title: `steps a second, ${key.split("/").at(-1)}`, lines: perRun(key), domain: key.endsWith("/train") ? undefined : "time" });
  const part = key => key.slice("system:time_ms/".length);
  const isPart = key => isOfStep(key) && part(key) !== "step";
  return [
    trained.length ? grid(trained.map(speed)) : null,
    parts.length ? runSelect() : null,
    parts.length ? new Chart({ title: "parts of a step, ms", lines: perKey(isPart, part), named: true, tall: true, stacked: true }).card : null,
    parts.includes("system:time_ms/step") && runs.length > 1 ? grid([{ title: "a step, ms", lines: perRun("system:time_ms/step") }]) : null,
  ];
}

/** Steps of an axis of bytes. */
const POWERS = Array.from({ length: 60 }, (_, power) => 2 ** power);

function machineSection() {
  const all = keys(key => key.startsWith("system:") && !/^system:(time_ms|steps_per_s)\//.test(key)).filter(key => passes(nameOf(key)));
  if (!all.length) return null;
  const spec = key => {
    const name = nameOf(key);
    const ofBytes = /bytes/.test(name) ? { format: (value, digits) => value === null ? "–" : bytes(value, digits), incrs: POWERS } : {};
    return { title: nameIn("system", name), full: name, lines: perRun(key), domain: "time", linear: true, ...ofBytes };
  };
  return [grid(all.map(spec))];
}

const nameOf = key => key.slice("system:".length);

/** Chooses the run of what shows one run at a time. */
function runSelect() {
  if (runs.filter(Boolean).length < 2) return null;
  const option = run => el("option", { value: run.id, selected: run === focused() }, book.names[run.id]);
  const choose = event => {
    view.focus = Number(event.target.value);
    writeAddress();
    show(true);
  };
  return el("label", { class: "of-run" }, el("span", {}, "Run"), el("select", { onchange: choose }, runs.filter(Boolean).map(option)));
}
