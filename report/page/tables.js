// Tables: results of the runs, their settings, events.

const sorted = {};

/** A table. With a name, its columns that have a `value` sort it. */
function table(columns, rows, name) {
  const cell = (tag, column, set, inside) => el(tag, { class: column.number ? "number" : null, ...set }, inside);
  const row = one => el("tr", {}, columns.map(column => cell("td", column, {}, column.show(one))));
  const by = sorted[name] && columns.find(column => column.key === sorted[name].key);
  const compare = (one, other) => one === other ? 0 : one === null ? 1 : other === null ? -1 : (one < other ? -1 : 1) * (sorted[name].up ? 1 : -1);
  const shown = by ? [...rows].sort((one, other) => compare(by.value(one), by.value(other))) : rows;
  const sort = key => event => {
    sorted[name] = { key, up: sorted[name]?.key === key ? !sorted[name].up : true };
    const made = table(columns, rows, name);
    event.target.closest(".scroll").replaceWith(made);
    [...made.querySelectorAll("th button")].find(one => one.textContent === event.target.textContent)?.focus();
  };
  const head = column => name && column.value
    ? cell("th", column, { "aria-sort": by !== column ? "none" : sorted[name].up ? "ascending" : "descending" }, el("button", { type: "button", onclick: sort(column.key) }, column.title)) : cell("th", column, {}, column.title);
  return el("div", { class: "scroll" }, el("table", { class: name ? "sortable" : null }, el("thead", {}, el("tr", {}, columns.map(head))), el("tbody", {}, shown.map(row))));
}

const dotOf = run => el("i", { class: "dot", style: `background:${colorOf(run.id)}` });

/** The state of a run; a page that is a file has the state of its time. */
const stateOf = run => isLive || run.head?.state !== "running" ? run.head?.state : "not finished";

const stepOf = run => Math.max(run.clock.at(-1)?.[0] ?? 0, run.curves.get("loss/total")?.x.at(-1) ?? 0);
const timeOf = run => run.last !== null && run.last !== undefined ? run.last - run.zero : null;

function l0Of(run) {
  const all = [...run.curves.keys()].filter(key => isOfSite(run, key));
  return all.length ? all.reduce((sum, key) => sum + (lastOf(run, key) ?? 0), 0) : null;
}

/** The most telling metrics; the ones that a run has are columns. */
const TELLING = [
  ["loss", "loss/total"], ["CI error", "eval/ci_error"], ["matched", "eval/matched"], ["MMCS", "eval/mmcs"], ["ML2R", "eval/ml2r"],
  ["CE CI-masked", "eval/ce/ci_masked"], ["KL CI-masked", "eval/kl/ci_masked"], ["KL stochastic", "eval/kl/stochastic"],
  ["MSE stochastic", "eval/mse/stochastic"],
];

/** Whether a run found the known solution, if there is one. */
function solvedOf(run) {
  const solved = run.head?.summary?.solved;
  return solved ? solved.found ? "yes" : "no" : null;
}

function overviewSection() {
  const all = runs.filter(Boolean);
  return [...banners(all), ...all.length === 1 ? overviewOfOne(all[0]) : overviewOfMany(all)];
}

function overviewOfOne(run) {
  const fact = (name, value) => value === null || value === undefined ? null : el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, value));
  const planned = run.head?.planned;
  const telling = TELLING.filter(([, key]) => run.curves.has(key)).slice(0, 6);
  const l0 = l0Of(run);
  const facts = el("dl", { class: "facts" },
    fact("state", stateMark(run)),
    fact("step", `${stepOf(run).toLocaleString("en")}${planned ? ` of ${planned.toLocaleString("en")}` : ""}`),
    fact("time", lasting(timeOf(run))),
    telling.map(([name, key]) => fact(name, short(lastOf(run, key) ?? null))),
    l0 === null ? null : fact("L0", short(l0)),
    run.head?.versions.length ? fact("spd-launch", run.head.versions.join(", then ")) : null);
  // The note of a run that is over is in its banner.
  const note = run.head?.note && run.head.state === "running" && isLive ? el("p", { class: "hint" }, run.head.note) : null;
  return [verdictOf(run), facts, note];
}

/** The summary of a finished run. */
function resultsSection() {
  const summary = focused()?.head?.summary;
  if (!runs.some(run => run?.head?.summary)) return null;
  const tables = (summary?.tables ?? []).map(one => el("div", { class: "card" }, el("h3", {}, one.title),
    table((one.columns ?? []).map((title, i) => ({ title, number: i > 0, show: row => row[i] })), one.rows ?? [])));
  const lines = summary?.lines?.length ? el("div", { class: "card" }, el("h3", {}, "at the end"),
    el("dl", { class: "lines" }, summary.lines.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]))) : null;
  return [runSelect(), summary ? el("div", { class: "cards" }, tables, lines) : el("p", { class: "none" }, "This run is not finished.")];
}

function overviewOfMany(all) {
  const member = new Map(book.sweeps.flatMap(sweep => sweep.runs ?? []).filter(one => one.run !== null).map(one => [one.run, one]));
  const swept = [...new Set([...member.values()].flatMap(one => Object.keys(one.values ?? {})))];
  const setting = key => run => member.get(run.id)?.values?.[key] ?? null;
  const number = (title, value) => ({ key: title, title, number: true, value, show: run => short(value(run)) });
  const measured = [
    ...TELLING.filter(([, key]) => all.some(run => run.curves.has(key))).map(([title, key]) => number(title, run => lastOf(run, key) ?? null)),
    number("L0", l0Of),
  ];
  const columns = [
    { key: "run", title: "run", value: run => run.id, show: run => [dotOf(run), book.names[run.id]] },
    ...swept.map(key => ({ key, title: key, number: true, value: setting(key), show: run => String(setting(key)(run) ?? "–") })),
    { key: "state", title: "state", value: run => stateOf(run) ?? "", show: stateMark },
    { key: "step", title: "step", number: true, value: stepOf, show: run => stepOf(run).toLocaleString("en") },
    { key: "time", title: "time", number: true, value: timeOf, show: run => lasting(timeOf(run)) },
    ...measured,
    ...all.some(run => run.head?.verdict) ? [{ title: "verdict", show: run => el("span", { class: "said" }, run.head?.verdict?.text ?? "–") }] : [],
    ...all.some(solvedOf) ? [{ key: "solved", title: "solved", value: run => solvedOf(run), show: run => solvedOf(run) ?? "–" }] : [],
  ];
  const waiting = book.sweeps.flatMap(sweep => sweep.runs ?? []).filter(one => one.run === null);
  // With several sweeps, or a sweep beside other runs, a line names its runs.
  const isOne = book.sweeps.length === 1 && all.every(run => member.has(run.id));
  const solved = book.sweeps.filter(sweep => sweep.solved).map(sweep => isOne ? sweep.solved : `${sweep.name}: ${sweep.solved}`);
  return [
    solved.map(line => el("p", { class: "sentence" }, line)),
    el("div", { class: "card" }, table(columns, all, "runs")),
    waiting.length ? el("p", { class: "hint" }, `Not begun: ${waiting.map(one => one.directory).join(", ")}`) : null,
    isOne && swept.includes("seed") ? overSeeds(all, swept.filter(key => key !== "seed"), setting, measured) : null,
  ];
}

/** The mean and the range of each metric over runs that differ in the seed only. */
function overSeeds(all, swept, setting, measured) {
  const groups = Map.groupBy(all, run => JSON.stringify(swept.map(key => setting(key)(run))));
  if (![...groups.values()].some(runs => runs.length > 1)) return null;
  const values = ({ value }, runs) => runs.map(value).filter(value => value !== null);
  const column = measure => ({ title: measure.title, number: true, show: runs => {
    const of = values(measure, runs);
    if (!of.length) return "–";
    return [short(of.reduce((sum, value) => sum + value, 0) / of.length), el("span", { class: "range" }, ` ${short(Math.min(...of))} to ${short(Math.max(...of))}`)];
  } });
  const columns = [...swept.map(key => ({ title: key, number: true, show: runs => String(setting(key)(runs[0]) ?? "–") })), { title: "seeds", number: true, show: runs => runs.length }, ...measured.map(column)];
  return el("div", { class: "card" }, el("h3", {}, "mean over seeds, and the range"), table(columns, [...groups.values()]));
}

function configSection() {
  const all = runs.filter(run => run?.head);
  if (!all.length) return null;
  const run = focused();
  return [
    all.length > 1 ? differences(all) : null,
    folded("config.toml", run.head.path, all.length === 1, runSelect(), el("pre", {}, run.head.config || "There is none.")),
  ];
}

/** Settings that differ between runs. */
function differences(all) {
  const of = new Map(all.map(run => [run, new Map(run.head.settings)]));
  // The trackers do not change a run.
  const names = [...new Set(all.flatMap(run => run.head.settings.map(([key]) => key)))].filter(key => !key.startsWith("tracker."));
  const differ = names.filter(key => new Set(all.map(run => of.get(run).get(key))).size > 1);
  if (!differ.length) return el("p", { class: "none" }, "All runs have the same settings.");
  const column = run => ({ title: [dotOf(run), book.names[run.id]], number: true, show: key => of.get(run).get(key) ?? "–" });
  return el("div", { class: "card" }, el("h3", {}, "what differs"), table([{ title: "setting", show: key => el("code", {}, key) }, ...all.map(column)], differ));
}

function eventsSection() {
  const all = runs.filter(run => run?.head);
  const events = all.flatMap(run => run.head.events.map(event => ({ ...event, run }))).sort((one, other) => (other.time ?? 0) - (one.time ?? 0));
  const problems = all.flatMap(run => run.head.problems.map(line => el("li", {}, line)));
  const unread = all.reduce((sum, run) => sum + run.head.unread, 0);
  const columns = [
    all.length > 1 ? { title: "run", show: event => [dotOf(event.run), book.names[event.run.id]] } : null,
    { title: "time", show: event => event.time === null ? "–" : clockTime(event.time) },
    { title: "step", number: true, show: event => event.step.toLocaleString("en") },
    { title: "what happened", show: event => event.note },
  ].filter(Boolean);
  return [
    events.length ? el("div", { class: "card tight" }, table(columns, events)) : el("p", { class: "none" }, "Nothing happened but steps."),
    unread ? el("div", { class: "card" }, el("h3", {}, `${unread} lines could not be read`), el("ul", {}, problems)) : null,
  ];
}
