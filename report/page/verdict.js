// The verdict on a run with what it is measured by, and the banner of one that ended without a result.

/** The state of a run, in its colour. */
const stateMark = run => el("span", { class: "state", "data-state": run.head?.state }, stateOf(run));

/** Most banners: runs of a sweep mostly fail of one cause. */
const BANNERS = 3;

/** A line for each run that did not end by itself, with its cause. */
function banners(all) {
  const isOver = run => ["failed", "killed", "stopped"].includes(run.head?.state);
  const lines = all.filter(isOver).map(run => [run.head.state, all.length > 1 ? `${book.names[run.id]} ${run.head.state}` : run.head.state, run.head.note]);
  // A run of a sweep that could not start has no state of its own.
  const others = book.sweeps.flatMap(sweep => sweep.runs ?? []).filter(one => one.run === null && one.cause);
  lines.push(...others.map(one => ["failed", `${one.directory} failed`, one.cause]));
  const more = lines.length - BANNERS;
  return [
    ...lines.slice(0, BANNERS).map(([state, name, note]) => el("p", { class: "banner", "data-state": state }, el("b", {}, name), ` ${note ?? ""}`)),
    more > 0 ? el("p", { class: "hint" }, `${more} more did not end by themselves; the table names them.`) : null,
  ];
}

/** A value between 0 and 1 on a line whose good part is coloured. */
function gauge({ name, said, value, good: [low, high] }) {
  const percent = part => `${(100 * Math.min(Math.max(part, 0), 1)).toFixed(2)}%`;
  const isGood = value >= low && value <= high;
  // The good part may be thinner than a line.
  const width = `max(${percent(high - low)}, 3px)`;
  const zone = low > 0 ? `right:${percent(1 - high)};width:${width}` : `left:0;width:${width}`;
  const where = low > 0 ? `good from ${short(100 * low)} %` : `good up to ${short(100 * high)} %`;
  return el("div", { class: "gauge", title: where }, el("span", {}, name), el("b", { class: isGood ? "good" : "bad" }, said),
    el("div", { class: "scale", role: "img", "aria-label": `${name}: ${said}, ${where}` }, el("i", { class: "zone", style: zone }), el("i", { class: "at", style: `left:${percent(value)}` })),
    el("small", {}, where));
}

function verdictOf(run) {
  const verdict = run.head?.verdict;
  if (!verdict) return el("p", { class: "none" }, "No evaluation yet, so no verdict.");
  const kind = verdict.is_good === null ? "open" : verdict.is_good ? "good" : "bad";
  return el("div", { class: `card verdict ${kind}` },
    el("p", { class: "sentence" }, el("span", { class: "mark", "aria-label": { open: "open", good: "good", bad: "not good" }[kind] }, { open: "…", good: "✓", bad: "✗" }[kind]), el("span", {}, verdict.text)),
    el("div", { class: "gauges" }, verdict.gauges.map(gauge)),
    verdict.turn.length ? el("div", { class: "turn" }, el("h3", {}, "To turn"), el("ol", {}, verdict.turn.map(line => el("li", {}, line)))) : null);
}
