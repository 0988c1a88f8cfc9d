// Tables: results of the runs, their settings, events.

function table(columns, rows) {
  const cell = (tag, column, inside) => el(tag, { class: column.number ? "number" : null }, inside);
  const row = one => el("tr", {}, columns.map(column => cell("td", column, column.show(one))));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, columns.map(column => cell("th", column, column.title)))), el("tbody", {}, rows.map(row))));
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
    l0 === null ? null : fact("L0", short(l0)));
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
  const columns = [
    { title: "run", show: run => [dotOf(run), book.names[run.id]] },
    ...swept.map(key => ({ title: key, number: true, show: run => String(member.get(run.id)?.values?.[key] ?? "–") })),
    { title: "state", show: stateMark },
    { title: "step", number: true, show: run => stepOf(run).toLocaleString("en") },
    { title: "time", number: true, show: run => lasting(timeOf(run)) },
    ...TELLING.filter(([, key]) => all.some(run => run.curves.has(key))).map(([title, key]) => ({ title, number: true, show: run => short(lastOf(run, key) ?? null) })),
    { title: "L0", number: true, show: run => short(l0Of(run)) },
    ...all.some(run => run.head?.verdict) ? [{ title: "verdict", show: run => run.head?.verdict?.text ?? "–" }] : [],
    ...all.some(solvedOf) ? [{ title: "solved", show: run => solvedOf(run) ?? "–" }] : [],
  ];
  const waiting = book.sweeps.flatMap(sweep => sweep.runs ?? []).filter(one => one.run === null);
  // With several sweeps, or a sweep beside other runs, a line names its runs.
  const isOne = book.sweeps.length === 1 && all.every(run => member.has(run.id));
  const solved = book.sweeps.filter(sweep => sweep.solved).map(sweep => isOne ? sweep.solved : `${sweep.name}: ${sweep.solved}`);
  return [
    solved.map(line => el("p", { class: "sentence" }, line)),
    el("div", { class: "card" }, table(columns, all)),
    waiting.length ? el("p", { class: "hint" }, `Not begun: ${waiting.map(one => one.directory).join(", ")}`) : null,
  ];
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
