"use strict";

// The data of the runs, as it arrives: from the page itself, or from its server.

const runs = [];
const book = { version: "", title: "", names: [], sweeps: [] };

/** The reader's settings, kept between visits if the browser has storage. `smooth` is between 0 (off) and 1 (most). */
const view = { x: "step", y: "auto", smooth: 0, filter: "", focus: 0, theme: "", hidden: [], ranges: {} };

/** Whether the page is being printed, and the factor of pixels of its charts then. */
const paper = { isOn: false, finer: 1 };

function remember() {
  const { x, y, smooth, theme } = view;
  try { localStorage.setItem("spd-view", JSON.stringify({ x, y, smooth, theme })); } catch { /* a page of a file may have none */ }
}

function recall() {
  try {
    const kept = JSON.parse(localStorage.getItem("spd-view")) ?? {};
    if (["step", "log", "time"].includes(kept.x)) view.x = kept.x;
    if (["auto", "linear", "log"].includes(kept.y)) view.y = kept.y;
    if (kept.smooth >= 0 && kept.smooth <= 1) view.smooth = kept.smooth;
    if (["light", "dark"].includes(kept.theme)) view.theme = kept.theme;
  } catch { /* nothing was kept */ }
}

/** Adds an answer to the data; returns whether more than rows is new. */
function take(answer) {
  let isNews = false;
  if (answer.book) {
    Object.assign(book, answer.book);
    isNews = true;
  }
  for (const part of answer.runs) {
    const run = runs[part.id] ??= { id: part.id, curves: new Map(), histograms: new Map(), head: null, clock: [] };
    if (part.reset) {
      isNews ||= run.curves.size > 0;
      run.curves = new Map();
      run.histograms = new Map();
    }
    if (part.head) {
      // A verdict changes with every evaluation, and is in the overview only.
      const others = head => JSON.stringify({ ...head, verdict: null });
      isNews ||= !run.head || others(part.head) !== others(run.head);
      run.groups = undefined;
    }
    const { generation, rows, version, zero, last } = part;
    Object.assign(run, { generation, rows, version, zero, last });
    run.clock = part.clock ? rising(part.clock) : run.clock;
    run.head = part.head ?? run.head;
    run.pictures = part.pictures ?? run.pictures;
    isNews = takeHistograms(run, part.histograms) || isNews;
    for (const piece of part.curves) isNews = append(run, piece) || isNews;
  }
  return isNews;
}

/** Adds points to a curve of a run; returns whether the curve is new. */
function append(run, piece) {
  const key = (piece.system ? "system:" : "") + piece.name;
  let curve = run.curves.get(key);
  const isNew = !curve;
  if (isNew) run.curves.set(key, curve = { name: piece.name, system: piece.system, smooth: piece.smooth, x: [], y: [], t: [], means: null, strange: new Map(), of: 0 });
  curve.of += piece.of;
  curve.by = {};
  if (piece.means) curve.means ??= { x: [...curve.x], y: [...curve.y], t: [...curve.t], n: curve.x.map(() => 1) };
  for (let i = 0; i < piece.x.length; i++) {
    const value = piece.y[i];
    if (typeof value === "string") curve.strange.set(curve.x.length, value);
    curve.x.push(piece.x[i]);
    curve.y.push(typeof value === "string" ? null : value);
    curve.t.push(piece.t?.[i] ?? null);
  }
  if (curve.means) {
    // Live, most pieces are complete.
    const last = of => of.slice(of.length - piece.x.length);
    const rows = piece.means ?? { x: piece.x, y: last(curve.y), t: last(curve.t), n: piece.x.map(() => 1) };
    for (const [name, column] of Object.entries(curve.means)) for (const value of rows[name]) column.push(value);
  }
  return isNew;
}

/** The reader's place, for the server. */
function places() {
  const of = run => [run.id, run.generation, run.rows, run.version].join(".");
  return [book.version, ...runs.filter(Boolean).map(of)].join(",");
}

/** Pairs of step and time, without steps that a resumed run did again. */
function rising(pairs) {
  const kept = [];
  for (const pair of pairs) {
    while (kept.length && kept.at(-1)[0] >= pair[0]) kept.pop();
    kept.push(pair);
  }
  return kept;
}

/** The value at `x` by linear interpolation of pairs; beyond the ends, the value of the end. */
function between(pairs, x, from = 0, to = 1) {
  if (!pairs.length) return null;
  let low = 0, high = pairs.length - 1;
  if (x <= pairs[low][from]) return pairs[low][to];
  if (x >= pairs[high][from]) return pairs[high][to];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (pairs[middle][from] <= x) low = middle; else high = middle;
  }
  const [one, other] = [pairs[low], pairs[high]];
  return one[to] + (other[to] - one[to]) * (x - one[from]) / (other[from] - one[from] || 1);
}

const stepToTime = (run, step) => between(run.clock, step, 0, 1);
const timeToStep = (run, time) => between(run.clock, time, 1, 0);

/** The rows of a curve, or means of them, over steps or seconds: ascending x. */
function placed(run, rows, domain) {
  const x = [], y = [], n = rows.n && [], steps = domain === "time" ? [] : x;
  for (let i = 0; i < rows.x.length; i++) {
    const at = domain === "time" ? rows.t[i] ?? stepToTime(run, rows.x[i]) : rows.x[i];
    if (at === null) continue;
    // After a resume a step occurs again: the later one holds.
    while (x.length && x.at(-1) > at) for (const column of new Set([x, y, n ?? x, steps])) column.pop();
    x.push(at);
    y.push(rows.y[i]);
    n?.push(rows.n[i]);
    if (steps !== x) steps.push(rows.x[i]);
  }
  return { x, y, n, steps };
}

/** The points of a curve over steps or seconds, and non-finite values as [x, kind]. */
function points(run, curve, domain) {
  if (curve.by?.[domain]) return curve.by[domain];
  const at = i => domain === "time" ? curve.t[i] ?? stepToTime(run, curve.x[i]) : curve.x[i];
  const strange = [...curve.strange].map(([i, kind]) => [at(i), kind]).filter(([x]) => x !== null);
  return (curve.by ??= {})[domain] = { ...placed(run, curve, domain), strange, of: curve.of };
}

/** Steps of smoothing: from a two-thousandth to a half of the longest run; 0 if it is off. */
function smoothing() {
  const longest = Math.max(1, ...runs.filter(Boolean).map(run => Math.max(run.head?.planned ?? 0, stepOf(run))));
  return view.smooth && Math.max(Number((longest / 2000 * 1000 ** view.smooth).toPrecision(2)), 1);
}

/**
 * A curve smoothed over `over` steps: an exponential moving average, in which a value `over` steps earlier has the weight 1/e. It uses
 * all rows, or the means of all rows, also if the curve is thinned.
 */
function smoothed(run, curve, domain, over) {
  const rows = curve.means ? (curve.by ??= {})[`means ${domain}`] ??= placed(run, curve.means, domain) : points(run, curve, domain);
  const { x, y, n, steps } = rows;
  const found = new Array(y.length);
  let sum = 0, count = 0, before = steps[0], apart = 0, decay = 1;
  for (let i = 0; i < y.length; i++) {
    const value = y[i];
    if (value === null) {
      found[i] = null;
      continue;
    }
    // Mostly rows have the same distance as the ones before.
    if (steps[i] - before !== apart) {
      apart = steps[i] - before;
      decay = Math.exp(-Math.max(apart, 0) / over);
    }
    before = steps[i];
    const weight = n ? n[i] : 1;
    sum = sum * decay + value * weight;
    count = count * decay + weight;
    found[i] = sum / count;
  }
  return { x, y: found };
}

/** The end of a run, in steps or in seconds. */
const endOf = (run, domain) => (domain === "time" ? timeOf(run) : stepOf(run)) ?? Infinity;

const shownRuns = () => runs.filter(run => run && !view.hidden.includes(run.id));
const focused = () => runs[view.focus] ?? runs.find(Boolean);
const lastOf = (run, key) => run.curves.get(key)?.y.findLast(value => value !== null);

/** Names of the curves of all runs, in natural order: `h.2` before `h.10`. */
function keys(belongs) {
  const found = new Set();
  for (const run of runs) for (const key of run?.curves.keys() ?? []) if (belongs(key)) found.add(key);
  return [...found].sort(inOrder);
}

const inOrder = new Intl.Collator("en", { numeric: true }).compare;
