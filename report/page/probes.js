// Prompts that were probed: a heat map of components by tokens.

/** Rows that are shown at first, and more with each press. */
const OF_PROBE = 40;

/** Width and height of a cell, in pixels. */
const CELL = [20, 22];

/** What is chosen: a prompt, a site (all without), and the number of rows. */
const probed = { name: null, site: null, rows: OF_PROBE };

/** Gives `use` a probe of a run; from this file, or from the server. Null if it is left out. */
function withProbe(run, name, use) {
  const at = run.head.probes.findIndex(one => one.name === name);
  if (!isLive) {
    run.probes ??= (byId(`probes-${run.id}`)?.textContent ?? "").split("\n");
    return use(parsed(run.probes[at] || "null"));
  }
  const address = `probe/${run.id}/${encodeURIComponent(name)}`;
  const found = once(`${run.generation}/${run.head.probes[at].written}/${address}`, () => fetch(address).then(answer => answer.ok ? answer.json() : null), use);
  if (found) use(found);
}

function probesSection() {
  const run = focused(), all = run?.head?.probes ?? [];
  if (!all.length) return null;
  if (!all.some(one => one.name === probed.name)) probed.name = all[0].name;
  const place = el("div", {});
  const fill = () => withProbe(run, probed.name, found => place.replaceChildren(...probeParts(found, run, fill)));
  const option = ({ name }) => el("option", { value: name, selected: name === probed.name }, name);
  const select = el("select", { "aria-label": "Prompt", onchange: event => (Object.assign(probed, { name: event.target.value, site: null, rows: OF_PROBE }), fill()) }, all.map(option));
  fill();
  return [el("div", { class: "choose" }, runSelect(), all.length > 1 ? el("label", {}, el("span", {}, "Prompt"), select) : null), place];
}

function probeParts(found, run, fill) {
  if (!found) return [el("p", { class: "none" }, "It is left out of this file, which has 8 MiB of prompts at most; spd-launch watch shows it.")];
  if (found.problem) return [el("p", { class: "hint" }, found.problem)];
  const names = found.tokens.length ? found.tokens.map(({ text }) => visible(text)) : found.features.map(number => `feature ${number}`);
  const sites = found.sites.filter(one => one.components.length);
  const kept = new Set((found.smallest.components ?? []).flatMap(set => set.components.map(index => `${set.site}:${index}`)));
  const rows = sites.filter(one => probed.site === null || one.site === probed.site).flatMap(({ site, components }) => components.map(one => ({ ...one, site })));
  rows.sort((one, other) => other.largest - one.largest);
  const change = set => (Object.assign(probed, set), fill());
  const option = name => el("option", { value: name ?? "", selected: name === probed.site }, name ?? "all sites");
  const select = el("select", { "aria-label": "Site of the prompt", onchange: event => change({ site: event.target.value || null, rows: OF_PROBE }) }, option(null), sites.map(one => option(one.site)));
  const said = el("output", { class: "hint" }), nothing = `${rows.length.toLocaleString("en")} components, the strongest first; step ${found.step.toLocaleString("en")}${kept.size ? `; • marks the ${kept.size.toLocaleString("en")} that keep the prediction` : ""}`;
  said.textContent = nothing;
  const row = one => {
    const label = componentAt(run, one.site, one.component)?.label, is = kept.has(`${one.site}:${one.component}`);
    const name = `${one.site} #${one.component}`;
    const say = event => {
      const at = Math.floor(event.offsetX / CELL[0]);
      if (at in names) said.textContent = `${name} at ${at}: ${names[at]}  importance ${short(one.importances[at])}`;
    };
    const canvas = el("canvas", { width: names.length, height: 1, role: "img", "aria-label": `${name}: importance of ${names.length} tokens, ${short(one.largest)} at most`, style: `width:${names.length * CELL[0]}px;height:${CELL[1] - 2}px`, onpointermove: say, onpointerdown: say, onpointerleave: () => { said.textContent = nothing; } });
    paintRow(canvas, one.importances);
    return el("tr", {}, el("th", {}, is ? "• " : "", componentLink(one.site, one.component, name), label ? el("small", {}, ` ${label}`) : null), el("td", {}, canvas));
  };
  const more = rows.length - probed.rows;
  return [
    el("div", { class: "choose" }, sites.length > 1 ? el("label", {}, el("span", {}, "Site"), select) : null, said),
    el("div", { class: "scroll rows heat" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}), el("th", {}, el("div", { class: "names" }, names.map(name => el("span", { title: name }, name)))))), el("tbody", {}, rows.slice(0, probed.rows).map(row)))),
    more > 0 ? el("p", {}, el("button", { type: "button", onclick: () => change({ rows: probed.rows + OF_PROBE }) }, `${Math.min(more, OF_PROBE)} more of ${more.toLocaleString("en")}`)) : "",
  ];
}

/** Paints importances from 0 to 1, a pixel for each. */
function paintRow(canvas, importances) {
  if (!importances.length || !canvas.width) return;
  const draw = canvas.getContext("2d"), image = draw.createImageData(canvas.width, 1);
  const [zero, , one] = HEAT[isDark() ? "dark" : "light"];
  importances.slice(0, canvas.width).forEach((value, x) => {
    const part = Math.min(Math.max(value ?? 0, 0), 1);
    image.data.set([...zero.map((from, i) => from + (one[i] - from) * part), 255], 4 * x);
  });
  draw.putImageData(image, 0, 0);
}
