// Histograms of rows, as bars at the step of the figures' slider.

/** The histograms of a run by name, each a list of `{step, edges, counts}` with ascending steps. */
function takeHistograms(run, pieces = []) {
  for (const { name, x, edges, counts } of pieces) {
    if (!run.histograms.has(name)) run.histograms.set(name, []);
    const all = run.histograms.get(name);
    x.forEach((step, i) => {
      while (all.length && all.at(-1).step >= step) all.pop();
      all.push({ step, edges: edges[i] ?? edges[0], counts: counts[i] });
    });
  }
  return pieces.length > 0;
}

/** Steps of a run that have histograms. */
const histogramSteps = run => [...new Set([...run?.histograms.values() ?? []].flat().map(one => one.step))];

/** A section with bars for each name, and the function that draws them at a step. */
function histogramsPart(run) {
  const names = [...run.histograms.keys()].sort(inOrder);
  if (!names.length) return { part: null, draw: () => {} };
  const all = names.map(name => new Bars(name));
  const draw = step => all.forEach(bars => bars.show(run.histograms.get(bars.name).findLast(one => one.step <= step)));
  const part = folded("importances of all rows and components", `${names.length}, counts on a log scale`, true, el("div", { class: "grid bars" }, all.map(bars => bars.card)));
  return { part, draw };
}

const SVG = "http://www.w3.org/2000/svg";

class Bars {
  constructor(name) {
    this.name = name;
    this.said = el("span", { class: "value" });
    this.plot = document.createElementNS(SVG, "svg");
    this.path = document.createElementNS(SVG, "path");
    this.plot.setAttribute("preserveAspectRatio", "none");
    this.plot.append(this.path);
    this.axis = el("div", { class: "ends" });
    this.card = el("figure", { class: "chart" }, el("figcaption", { title: name }, el("span", { class: "name" }, breakable(name.slice(name.indexOf("/") + 1))), this.said), this.plot, this.axis);
    this.plot.addEventListener("pointermove", event => this.say(event.offsetX / this.plot.clientWidth));
    this.plot.addEventListener("pointerleave", () => this.say(null));
  }

  show(histogram) {
    this.shown = histogram;
    this.card.hidden = !histogram;
    if (!histogram) return;
    const { edges, counts, edge = edge => tick(Number(edge.toPrecision(3))) } = histogram;
    const [low, high] = [edges[0], edges.at(-1)], most = Math.log1p(Math.max(...counts, 1));
    const height = count => count > 0 ? Math.max(100 * Math.log1p(count) / most, 1.5) : 0;
    this.plot.setAttribute("viewBox", `${low} 0 ${high - low} 100`);
    this.path.setAttribute("d", counts.map((count, i) => `M${edges[i]} 100V${100 - height(count)}H${edges[i + 1]}V100Z`).join(""));
    this.axis.replaceChildren(...[low, histogram.edge ? Math.round((low + high) / 2) : (low + high) / 2, high].map(at => el("span", {}, edge(at))));
    this.plot.setAttribute("role", "img");
    this.plot.setAttribute("aria-label", `${this.name}: histogram, step ${histogram.step}`);
    this.say(null);
  }

  /** Shows values in descending order, those of components, on a log scale. */
  rank(order, values) {
    const most = values[0] ?? 0, least = Math.max(values.findLast(value => value > 0) ?? 1, most * 1e-6);
    const count = values.length, every = Math.ceil(count / 600);
    const height = value => value > 0 ? 6 + 94 * (most > least ? Math.max(Math.log(value / least), 0) / Math.log(most / least) : 1) : 0;
    const alive = values.filter(value => value > 0).length;
    this.plot.setAttribute("viewBox", `0 0 ${count || 1} 100`);
    this.path.setAttribute("d", values.map((value, i) => i % every ? "" : `M${i} 100V${100 - height(value)}H${Math.min(i + every, count)}V100Z`).join(""));
    this.axis.replaceChildren(el("span", {}, `${alive.toLocaleString("en")} of ${count.toLocaleString("en")} above 0`), el("span", {}, `${tick(Number(least.toPrecision(2)))} to ${tick(Number(most.toPrecision(2)))}, log`));
    this.say = part => {
      const at = part === null ? null : Math.min(Math.floor(part * count), count - 1);
      this.said.textContent = at === null ? "" : `#${order[at]}: ${short(values[at])}`;
    };
  }

  /** Shows the count of the bin at a fraction of the width; the total without a pointer. */
  say(part) {
    const { edges, counts, edge = tick } = this.shown;
    const at = part === null ? -1 : edges[0] + part * (edges.at(-1) - edges[0]);
    const bin = part === null ? -1 : Math.max(edges.findLastIndex(edge => edge <= at), 0);
    const sum = counts.reduce((sum, count) => sum + count, 0);
    this.said.textContent = bin in counts ? `${edge(edges[bin])} to ${edge(edges[bin + 1])}: ${counts[bin].toLocaleString("en")}` : `${sum.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 })} values`;
  }
}
