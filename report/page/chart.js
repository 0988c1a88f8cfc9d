// One chart, and what all of them share: the crosshair and the range.

const charts = new Set();
const cursor = { x: null, domain: "step" };

/** The same place on the other x axis (steps or seconds). */
function translated(x, from, to) {
  const run = focused();
  if (from === to || x === null || !run) return x;
  return from === "step" ? stepToTime(run, x) : timeToStep(run, x);
}

/** The crosshair on an x axis; null if it is on the other axis, after the end of the run in focus. */
function pointed(domain) {
  const run = focused();
  if (cursor.domain !== domain && cursor.x !== null && run && cursor.x > endOf(run, cursor.domain)) return null;
  return translated(cursor.x, cursor.domain, domain);
}

/** Moves the crosshair of all charts that are drawn. */
function pointAt(x, domain, source) {
  Object.assign(cursor, { x, domain });
  requestAnimationFrame.pending ??= requestAnimationFrame(() => {
    requestAnimationFrame.pending = null;
    for (const chart of charts) if (chart.plot) chart.point(chart === source);
    sayWhere();
  });
}

function sayWhere() {
  const run = focused();
  const step = pointed("step"), time = pointed("time");
  const words = [step !== null && `step ${Math.round(step).toLocaleString("en")}`, time !== null && run && lasting(time)];
  byId("at").textContent = cursor.x === null ? "" : words.filter(Boolean).join(" · ");
}

/** Shows a range of x in all charts; the whole range without an argument. */
function zoom(domain, range) {
  view.ranges = range ? { [domain]: range } : {};
  const other = domain === "step" ? "time" : "step";
  const mapped = range?.map(x => translated(x, domain, other));
  if (mapped && mapped[1] > mapped[0]) view.ranges[other] = mapped;
  byId("whole").hidden = !range;
  writeAddress();
  redraw();
}

const waiting = new Set();

/** Redraws charts, a few in each frame to keep it short: visible charts first, the longest waiting one before others. */
function redraw(some = charts) {
  for (const chart of some) if (chart.isNear) waiting.add(chart);
  redraw.frame ??= requestAnimationFrame(async () => {
    const until = performance.now() + 6;
    for (const chart of waiting) chart.isOff = chart.isOffScreen();
    for (const chart of [...waiting].sort((one, other) => one.isOff - other.isOff || one.drawn - other.drawn)) {
      waiting.delete(chart);
      chart.refresh();
      // uPlot draws while this function waits.
      await null;
      if (chart.plot) chart.point(false);
      if (performance.now() > until) break;
    }
    redraw.frame = undefined;
    if (waiting.size) redraw([]);
  });
}

const nearby = new IntersectionObserver(all => {
  for (const one of all) one.target.chart.see(one.isIntersecting);
}, { rootMargin: "300px" });

class Chart {
  /**
   * @param spec `title`; `lines()`: the lines, each `{label, color, dash, run, curve}`; optional:
   *   `mark` and `is` (which way is better, and a definition), `full` (the name in the rows), `domain`, `named` (shows values with their labels), `stacked`, `linear`, `format`, `incrs` (steps of ticks), `tall`
   */
  constructor(spec) {
    this.spec = spec;
    this.value = el("span", { class: "value" });
    this.odd = el("span", { class: "odd" });
    this.host = el("div", { class: "plot" });
    this.readout = el("div", { class: spec.named ? "readout named" : "readout" });
    const name = el("figcaption", { title: [spec.full ?? spec.title, spec.is].filter(Boolean).join(": ") },
      el("span", { class: "name" }, breakable(spec.title), spec.mark ? el("span", { class: "better" }, ` ${spec.mark}`) : null), this.odd, this.value, spec.is ? el("small", {}, spec.is) : null);
    this.card = el("figure", { class: spec.tall ? "chart tall" : "chart", tabindex: 0, "aria-label": `${spec.full ?? spec.title}: chart; arrow keys read it` }, name, this.host, this.readout);
    this.card.chart = this;
    this.card.addEventListener("keydown", event => this.key(event));
    this.drawn = 0;
    // Its space is reserved from the start: drawing it moves nothing below.
    this.lines = spec.lines();
    this.tell();
    charts.add(this);
    nearby.observe(this.card);
  }

  remove() {
    this.see(false);
    nearby.unobserve(this.card);
    charts.delete(this);
    waiting.delete(this);
    this.card.remove();
  }

  /** Draws a chart that is near the window, and clears any other. */
  see(isNear) {
    this.isNear = isNear;
    if (isNear) redraw([this]);
    else this.clear();
  }

  isOffScreen() {
    const { top, bottom } = this.card.getBoundingClientRect();
    return bottom < 0 || top > innerHeight;
  }

  clear() {
    this.plot?.destroy();
    this.plot = null;
  }

  get domain() {
    return this.spec.domain ?? (view.x === "time" ? "time" : "step");
  }

  /** Draws the current data. */
  refresh() {
    if (!this.isNear && !paper.isOn || !this.card.isConnected) return;
    this.drawn = performance.now();
    const prepared = this.prepare();
    const form = JSON.stringify([prepared.lines.map(line => [line.label, line.color]), prepared.isLog, view.x, prepared.lines.map(line => line.isSmooth), this.domain, isDark()]);
    if (this.plot && form === this.form) {
      this.lines = prepared.lines;
      this.plot.setData(prepared.data);
    } else {
      this.clear();
      this.form = form;
      this.lines = prepared.lines;
      this.plot = new uPlot(this.options(prepared), prepared.data, this.host);
      this.follow();
    }
    this.tell();
  }

  /** The table that uPlot draws. */
  prepare() {
    const isLogX = view.x === "log" && this.domain === "step";
    const lines = this.spec.lines().map(line => ({ ...line, points: points(line.run, line.curve, this.domain) }))
      .filter(line => line.points.x.length);
    const isLog = !this.spec.stacked && (view.y === "log" || view.y === "auto" && !this.spec.linear && spread(lines) > 50);
    const steps = this.spec.stacked ? 0 : smoothing();
    const tables = [];
    let place = 0;
    for (const line of lines) {
      const isBelow = value => value !== null && value <= 0;
      line.isSmooth = steps > 0 && line.curve.smooth;
      line.below = isLog && extent(line.points).low <= 0 ? line.points.y.reduce((count, value) => count + isBelow(value), 0) : 0;
      const shown = ({ x, y }) => {
        const first = isLogX && x[0] <= 0 ? x.findIndex(step => step > 0) : 0;
        if (first) [x, y] = first < 0 ? [[], []] : [x.slice(first), y.slice(first)];
        return [x, line.below ? y.map(value => isBelow(value) ? null : value) : y];
      };
      const raw = shown(line.points), soft = line.isSmooth && shown(smoothed(line.run, line.curve, this.domain, steps));
      // Without thinning, all rows have the same x and need no join.
      tables.push(...!soft ? [raw] : line.curve.means ? [raw, soft] : [[...raw, soft[1]]]);
      line.raw = ++place;
      line.soft = soft ? ++place : 0;
    }
    let data = tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[], []];
    if (this.spec.stacked) data = this.stack(data);
    return { lines, data, isLog, isLogX };
  }

  /** Stacks each line on the ones before it. */
  stack([x, ...parts]) {
    // Each part was thinned by itself: between its points a part keeps its last value.
    const held = part => {
      let last = 0;
      return part.map(value => last = value ?? last);
    };
    this.parts = parts.map(held);
    const sums = new Float64Array(x.length);
    return [x, ...this.parts.map(part => part.map((value, i) => sums[i] += value))];
  }

  options({ lines, isLog, isLogX }) {
    const [ink, grid] = [style("--muted"), style("--grid")];
    const font = `${11 * paper.finer}px system-ui, sans-serif`;
    const isTime = this.domain === "time";
    const axis = { stroke: ink, font, ticks: { show: false }, grid: { stroke: grid, width: paper.finer } };
    const logAxis = { splits: (u, i, low, high) => logTicks(low, high), filter: (u, splits) => splits };
    const { width, height } = this.size();
    const format = this.spec.format ?? tick;
    return {
      width, height, padding: [10, 18, 0, 0].map(side => side * paper.finer), legend: { show: false },
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false },
        dataIdx: (u, series, index, x) => !series ? index : this.at(this.lines.find(line => line.raw === series || line.soft === series), u.data[series], index, x),
        points: { size: 7, width: 2, fill: style("--card"), stroke: (u, i) => u.series[i].hover ?? u.series[i].stroke() },
        bind: { dblclick: () => () => (zoom(this.domain, null), null) },
      },
      scales: {
        x: { time: false, distr: isLogX ? 3 : 1, range: (u, low, high) => view.ranges[this.domain] ?? wide(low, high, isLogX) },
        y: { distr: isLog ? 3 : 1, range: (u, low, high) => this.rangeOfY(low, high, isLog) },
      },
      axes: [
        { ...axis, size: 26 * paper.finer, space: 60 * paper.finer, values: (u, all) => all.map(isTime ? timeTick : tick), ...(isTime ? { incrs: SECONDS } : {}), ...(isLogX ? logAxis : {}) },
        { ...axis, size: 58 * paper.finer, space: 28 * paper.finer, values: (u, all) => apart(all, format), ...(isLog ? logAxis : {}), ...(this.spec.incrs ? { incrs: this.spec.incrs } : {}) },
      ],
      series: [{}, ...lines.flatMap((line, i) => this.series(line, i))],
      bands: this.spec.stacked ? lines.slice(1).map((line, i) => ({ series: [i + 2, i + 1], fill: faint(line.color) })) : [],
      hooks: {
        draw: [u => this.mark(u)],
        setSelect: [u => {
          const { left, width } = u.select;
          if (width > 3) zoom(this.domain, [u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
      },
    };
  }

  series(line, i) {
    const solid = { stroke: line.color, width: 1.5 * paper.finer, dash: line.dash, points: { size: 4 * paper.finer, stroke: line.color, fill: line.color } };
    if (this.spec.stacked) return [{ ...solid, width: paper.finer, fill: i ? undefined : faint(line.color), points: { show: false } }];
    const pale = { ...solid, stroke: faint(line.color), hover: "transparent", points: { show: false } };
    return line.isSmooth ? [pale, solid] : [solid];
  }

  rangeOfY(low, high, isLog) {
    if (low === null || low === undefined || !isFinite(low)) return isLog ? [1, 10] : [0, 1];
    if (this.spec.stacked) return [0, high * 1.05 || 1];
    if (!isLog && low === 0 && high === 0) return [0, 1];
    if (!isLog) return low === high ? [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)] : uPlot.rangeNum(low, high, 0.08, true);
    const part = Math.max(Math.pow(high / low, 0.06), 1.15);
    return [low / part, high * part];
  }

  size() {
    if (paper.isOn) return { width: (this.spec.tall ? 700 : 320) * paper.finer, height: (this.spec.tall ? 300 : 190) * paper.finer };
    return { width: Math.max(this.host.clientWidth, 120), height: this.spec.tall ? 300 : 190 };
  }

  resize() {
    this.plot?.setSize(this.size());
  }

  /** Marks values that are not finite: a triangle at the edge for infinities, a cross for NaN. */
  mark(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.font = `bold ${11 * devicePixelRatio * paper.finer}px system-ui`;
    ctx.textAlign = "center";
    for (const line of this.lines) {
      ctx.fillStyle = line.color;
      for (const [x, kind] of line.points.strange) {
        const left = u.valToPos(x, "x", true);
        if (left < bbox.left || left > bbox.left + bbox.width) continue;
        const isUp = kind === "Infinity";
        ctx.fillText(isUp ? "▲" : kind === "NaN" ? "×" : "▼", left, isUp ? bbox.top + 10 * devicePixelRatio : bbox.top + bbox.height - 3);
      }
    }
    ctx.restore();
  }

  /** Touches and the pointer move the crosshair of all charts. */
  follow() {
    const { over } = this.plot;
    const at = event => {
      const box = over.getBoundingClientRect();
      const left = event.clientX - box.left;
      if (left >= 0 && left <= box.width) pointAt(this.plot.posToVal(left, "x"), this.domain, this);
    };
    over.addEventListener("pointermove", at);
    over.addEventListener("pointerdown", at);
    over.addEventListener("pointerleave", () => pointAt(null, this.domain, this));
  }

  key(event) {
    const u = this.plot;
    const x = u?.data[0] ?? [];
    if (!x.length) return;
    const now = pointed(this.domain) ?? x.at(-1);
    const many = event.shiftKey ? Math.ceil(x.length / 20) : 1;
    const index = u.valToIdx(now);
    const to = { ArrowLeft: index - many, ArrowRight: index + many, Home: 0, End: x.length - 1 }[event.key];
    const { min, max } = u.scales.x;
    if (to !== undefined) pointAt(x[Math.min(Math.max(to, 0), x.length - 1)], this.domain);
    else if (event.key === "Escape") pointAt(null, this.domain);
    else if (event.key === "+") zoom(this.domain, [now - (now - min) / 2, now + (max - now) / 2]);
    else if (event.key === "-" || event.key === "0") zoom(this.domain, null);
    else return;
    event.preventDefault();
  }

  /** Moves this chart's crosshair to the common place, and shows the values there; the last values without a place. */
  point(isSource) {
    const u = this.plot;
    const x = pointed(this.domain);
    if (!isSource || x === null) u.setCursor(x === null ? { left: -10, top: -10 } : { left: u.valToPos(x, "x"), top: 1 }, false);
    const index = x === null ? null : u.valToIdx(x);
    const format = this.spec.format ?? short;
    this.lines.forEach((line, i) => {
      const said = values => format(values[this.at(line, values, index ?? values.length - 1, x)] ?? null);
      line.said.textContent = said(this.spec.stacked ? this.parts[i] : u.data[line.raw]);
      line.smoothed.textContent = line.isSmooth ? ` ~ ${said(u.data[line.soft])}` : "";
    });
  }

  /** The index nearest to `index` at which a line has a value; none if `x` is before the line or after its run. */
  at(line, values, index, x) {
    const { x: all } = line.points;
    if (x !== null && (x < all[0] || x > Math.max(all.at(-1), endOf(line.run, this.domain)))) return null;
    return nearest(values, index);
  }

  /** Reserves space for the values. */
  tell() {
    const counts = new Map();
    for (const line of this.lines) {
      line.said = el("b");
      line.smoothed = el("small", { title: "smoothed" });
      for (const [, kind] of line.points?.strange ?? []) counts.set(kind, (counts.get(kind) ?? 0) + 1);
      if (line.below) counts.set("≤ 0", (counts.get("≤ 0") ?? 0) + line.below);
    }
    this.odd.textContent = [...counts].map(([kind, count]) => `${count} × ${kind.replace("Infinity", "∞")}`).join(", ");
    const isAlone = this.lines.length === 1 && !this.spec.named;
    const dot = line => el("i", { style: `background:${line.color}` });
    this.value.replaceChildren(...isAlone ? [this.lines[0].said, this.lines[0].smoothed] : []);
    const entry = line => el("span", { title: line.label }, dot(line), this.spec.named ? el("em", {}, line.label) : null, line.said, line.smoothed);
    this.readout.replaceChildren(...isAlone ? [] : this.lines.map(entry));
  }
}

/** Prints all charts in the light theme, with enough pixels to be sharp. */
function toPaper(isOn) {
  Object.assign(paper, { isOn, finer: isOn ? 2 : 1 });
  setTheme();
  for (const canvas of document.querySelectorAll(".panel canvas")) canvas.paint();
  for (const chart of charts) {
    chart.clear();
    if (isOn) chart.refresh();
    else if (chart.isNear) redraw([chart]);
  }
  // uPlot draws after this function returns.
  if (isOn) queueMicrotask(() => charts.forEach(chart => chart.plot && chart.point(false)));
}

addEventListener("beforeprint", () => toPaper(true));
addEventListener("afterprint", () => toPaper(false));

/** The ratio of the greatest to the least value, if all are above 0. */
function spread(lines) {
  const low = Math.min(...lines.map(line => extent(line.points).low)), high = Math.max(...lines.map(line => extent(line.points).high));
  return low > 0 ? high / low : 1;
}

/** The least and the greatest value of some points. */
function extent(points) {
  if (points.extent) return points.extent;
  let low = Infinity, high = -Infinity;
  for (const value of points.y) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return points.extent = { low, high };
}

function wide(low, high, isLog) {
  if (low === null || low === undefined) return [isLog ? 1 : 0, isLog ? 10 : 1];
  if (low < high) return [low, high];
  return isLog ? [low / 2, high * 2] : [low - 1, high + 1];
}

/** The index nearest to `index` that has a value; `index` if none has. */
function nearest(values, index) {
  for (let away = 0; away < values.length; away++) {
    if (values[index - away] != null) return index - away;
    if (values[index + away] != null) return index + away;
  }
  return index;
}

/** A translucent colour. */
const faint = color => color.startsWith("#") ? `${color}48` : color.replace(")", " / 0.3)");
