// Active components against what masking with importances costs: a point for each run, or for each evaluation of one run.

/** The cost that a run has: KL, CE or MSE with importances as masks. */
const COSTS = ["eval/kl/ci_masked", "eval/ce/ci_masked", "eval/mse/ci_masked"];

/** The evaluations of a run as `[step, L0 of all sites, cost]`. */
function evaluations(run, cost) {
  const sites = [...run.curves.keys()].filter(key => isOfSite(run, key)).map(key => run.curves.get(key));
  const at = curve => new Map(curve.x.map((step, i) => [step, curve.y[i]]));
  const counts = sites.map(at);
  const sum = step => counts.reduce((sum, of) => of.has(step) && of.get(step) !== null ? sum + of.get(step) : NaN, 0);
  return sites.length ? [...at(run.curves.get(cost))].map(([step, value]) => [step, sum(step), value]).filter(([, l0, value]) => l0 > 0 && value > 0) : [];
}

/** Draws it again, with the newest evaluations. */
const drawTradeoff = () => byId("tradeoff")?.replaceChildren(scatterCard() ?? "");

/** A card with both on log scales; null with fewer than two points. */
function scatterCard() {
  const all = shownRuns();
  const cost = COSTS.find(key => all.some(run => run.curves.has(key)));
  if (!cost) return null;
  const having = all.filter(run => run.curves.has(cost));
  const isOne = all.length === 1;
  const dots = having.flatMap(run => {
    const found = evaluations(run, cost);
    const dot = ([step, l0, value], i) => ({ l0, value, name: isOne ? `step ${step.toLocaleString("en")}` : book.names[run.id], color: isOne ? ordered(i, found.length) : colorOf(run.id) });
    return isOne ? found.map(dot) : found.slice(-1).map(dot);
  });
  if (dots.length < 2) return null;
  const scale = pick => {
    const [low, high] = [Math.min(...dots.map(pick)), Math.max(...dots.map(pick))], room = Math.max((high / low) ** 0.08, 1.05);
    const ends = [low / room, high * room], [from, to] = ends.map(Math.log);
    return { ticks: logTicks(...ends), part: value => 100 * (Math.log(value) - from) / (to - from) };
  };
  const x = scale(one => one.l0), y = scale(one => one.value);
  const name = worded(cost).name;
  const dot = one => el("i", { class: "dot at-place", "data-tip": `${one.name}: L0 ${short(one.l0)}, ${name} ${short(one.value)}`, style: `left:${x.part(one.l0)}%;bottom:${y.part(one.value)}%;background:${one.color}` });
  const trail = document.createElementNS(SVG, "svg");
  trail.setAttribute("viewBox", "0 0 100 100");
  trail.setAttribute("preserveAspectRatio", "none");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", isOne ? dots.map((one, i) => `${i ? "L" : "M"}${x.part(one.l0)} ${100 - y.part(one.value)}`).join("") : "");
  trail.append(path);
  return el("figure", { class: "chart scatter" },
    el("figcaption", {}, el("span", { class: "name" }, `active components (L0) against ${name}`), el("small", {}, `${isOne ? "a point an evaluation, from violet to yellow" : "a point a run"}; down and to the left is better`)),
    el("div", { class: "plane", role: "img", "aria-label": `${name} against L0, ${dots.length} points` },
      x.ticks.map(value => el("span", { class: "tick x", style: `left:${x.part(value)}%` }, tick(value))), y.ticks.map(value => el("span", { class: "tick y", style: `bottom:${y.part(value)}%` }, tick(value))),
      trail, dots.map(dot)));
}
