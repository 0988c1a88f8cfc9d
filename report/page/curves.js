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

/** The group of a metric: its name without the last word, two words at most. */
function groupOf(key) {
  const words = key.split("/");
  return words.length < 2 ? "other" : words.slice(0, Math.min(2, words.length - 1)).join("/");
}

const nameIn = (group, key) => key.startsWith(`${group}/`) ? key.slice(group.length + 1) : key;

/** Values that were measured once, before the first step. */
const isEarly = key => key.startsWith("start/");

/** The order of groups: losses, evaluations from general to specific, the rest. */
function rank(group) {
  return { loss: 0, eval: 1, "eval/kl": 2, "eval/ce": 2, "eval/mse": 2 }[group] ?? (group.startsWith("eval/") ? 3 : 4);
}

/** Whether a name contains all words of the filter. */
function passes(key) {
  return view.filter.toLowerCase().split(/\s+/).every(word => key.toLowerCase().includes(word));
}

/** A foldable section of charts. */
function folded(title, count, isOpen, ...inside) {
  return el("details", { class: "group", open: isOpen }, el("summary", {}, el("span", {}, title), el("small", {}, count)), ...inside);
}

const grid = specs => el("div", { class: "grid" }, specs.map(spec => new Chart(spec).card));

function curvesSection() {
  const all = keys(key => !key.startsWith("system:")).filter(passes);
  const groups = grouped(all.filter(key => !isEarly(key)));
  const names = [...groups.keys()].sort((one, other) => rank(one) - rank(other) || inOrder(one, other));
  const charts = name => grid(groups.get(name).map(key => ({ title: nameIn(name, key), full: key, lines: perRun(key) })));
  if (!all.length) return [el("p", { class: "none" }, view.filter ? "No metric has these words in its name." : "No rows yet.")];
  return [...names.map(name => folded(name, groups.get(name).length, true, charts(name))), early(all.filter(isEarly))];
}

/** Single values, without curves. */
function early(all) {
  if (!all.length) return null;
  const column = run => ({ title: runs.filter(Boolean).length > 1 ? [dotOf(run), book.names[run.id]] : "value", number: true, show: key => short(lastOf(run, key) ?? null) });
  const columns = [{ title: "metric", show: key => breakable(nameIn("start", key)) }, ...runs.filter(Boolean).map(column)];
  return folded("before the first step", all.length, view.filter !== "", el("div", { class: "card" }, table(columns, all)));
}

function grouped(all) {
  const groups = new Map();
  for (const key of all) groups.set(groupOf(key), [...groups.get(groupOf(key)) ?? [], key]);
  return groups;
}

const L0 = "eval/l0/";

/** Whether a metric belongs to a site. Groups of sites (`[[eval.subset]]`) have such metrics too, and would be counted twice. */
function isOfSite(run, key) {
  run.groups ??= new Set((run.head?.settings ?? []).filter(([setting]) => /^eval\.subset\[\d+\]\.name$/.test(setting)).map(([, name]) => L0 + name));
  return key.startsWith(L0) && !run.groups.has(key);
}

function sitesSection() {
  if (!keys(key => key.startsWith(L0)).length) return null;
  const lines = perKey(key => isOfSite(focused(), key), key => key.slice(L0.length), true);
  return [runSelect(), new Chart({ title: "active components (L0), by site", lines, named: true, tall: true }).card];
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
    show(true);
  };
  return el("label", { class: "of-run" }, el("span", {}, "Run"), el("select", { onchange: choose }, runs.filter(Boolean).map(option)));
}
