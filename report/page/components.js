// Components: a table for each site, and for each component its text and the effect of its removal.

/** The components of a run: from this file, or from the server, which is asked once a step. */
function componentsOf(run) {
  if (run?.pictures) return run.pictures.components;
  const step = run?.head?.components;
  if (step === null || step === undefined) return null;
  const key = `${run.id}/${run.generation}/${step}`;
  if (!asked.has(key)) {
    asked.set(key, null);
    fetch(`components/${run.id}`).then(answer => answer.ok ? answer.json() : null).then(found => {
      asked.set(key, found);
      if (found) show(true);
    }).catch(() => asked.delete(key));
  }
  return asked.get(key);
}

/** A token with visible blanks. */
function visible(token) {
  if (/^ +$/.test(token)) return "·".repeat(token.length);
  return token.replace(/\r/g, "␍").replace(/\n/g, "↵").replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f\u007f]/g, letter => `\\x${letter.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

/** Tokens, with the component's importance as the strength of the background. */
function marked(context, from = 0, to = context.tokens.length) {
  const token = (text, i) => {
    const importance = context.importances[i] ?? 0;
    const set = { title: `${visible(text)}  ${short(importance)}`, class: i === context.position ? "token peak" : "token" };
    if (importance > 0.005) set.style = `--part:${Math.round(100 * Math.min(importance, 1))}%`;
    return el("span", set, visible(text));
  };
  return context.tokens.map(token).slice(Math.max(from, 0), to);
}

const view0 = { site: null, sort: "mean_importance", up: false, most: 50, open: new Set() };

const COMPONENT_COLUMNS = [
  { key: "index", title: "component", value: one => one.index, show: one => `#${one.index}` },
  { key: "mean_importance", title: "mean importance", value: one => one.mean_importance, bar: true },
  { key: "density", title: "density", value: one => one.density },
  { key: "kl", title: "KL if removed", value: one => one.removal?.kl ?? null },
  { key: "activation", title: "length it adds", value: one => one.removal?.activation ?? null },
];

function componentsSection() {
  const run = focused();
  const all = componentsOf(run);
  if (!all?.sites?.length) {
    return run?.head && run.head.components !== null ? [runSelect(), el("p", { class: "none" }, run.pictures?.problem ?? "The components are on their way.")] : null;
  }
  const site = all.sites.find(one => one.name === view0.site) ?? all.sites[0];
  const choose = event => {
    Object.assign(view0, { site: event.target.value, most: 50, open: new Set() });
    show(true);
  };
  const option = one => el("option", { value: one.name, selected: one === site }, `${one.name} (${one.components.length})`);
  return [
    el("div", { class: "choose" }, runSelect(), el("label", {}, el("span", {}, "Site"), el("select", { onchange: choose }, all.sites.map(option))),
      el("span", { class: "hint" }, `step ${all.step.toLocaleString("en")}`)),
    all.left_out ? el("p", { class: "hint" }, `${all.left_out} less important components are left out of this file to keep it small; spd-launch watch shows all.`) : null,
    el("div", { class: "scroll" }, componentTable(site)),
  ];
}

function componentTable(site) {
  const column = COMPONENT_COLUMNS.find(one => one.key === view0.sort);
  const order = (one, other) => ((column.value(one) ?? -Infinity) - (column.value(other) ?? -Infinity)) * (view0.up ? 1 : -1) || one.index - other.index;
  const sorted = [...site.components].sort(order);
  const most = Math.max(...site.components.map(one => one.mean_importance ?? 0), 1e-12);
  const sort = key => () => {
    view0.up = view0.sort === key ? !view0.up : key === "index";
    view0.sort = key;
    show(true);
  };
  const head = one => el("th", { class: "number", "aria-sort": one.key !== view0.sort ? "none" : view0.up ? "ascending" : "descending" },
    el("button", { type: "button", onclick: sort(one.key) }, one.title));
  const table = el("table", { class: "components" }, el("thead", {}, el("tr", {}, COMPONENT_COLUMNS.map(head), el("th", {}, "strongest activation"))));
  for (const one of sorted.slice(0, view0.most)) table.append(componentRows(one, most));
  if (sorted.length > view0.most) {
    const more = () => {
      view0.most = Infinity;
      show(true);
    };
    table.append(el("tbody", {}, el("tr", {}, el("td", { colspan: 5 }, el("button", { type: "button", onclick: more }, `Show all ${sorted.length}`)))));
  }
  return table;
}

/** The row of a component, and its details below once it is opened. */
function componentRows(one, most) {
  const best = one.contexts[0];
  const body = el("tbody", {});
  const toggle = () => {
    if (!view0.open.delete(one.index)) view0.open.add(one.index);
    fill();
  };
  const button = isOpen => el("button", { type: "button", class: "open", "aria-expanded": isOpen, onclick: toggle }, `#${one.index}`);
  const cell = column => {
    const value = column.value(one);
    const bar = column.bar && value !== null ? { style: `--bar:${Math.round(100 * value / most)}%`, class: "number bar" } : { class: "number" };
    return el("td", bar, short(value));
  };
  const fill = () => {
    const isOpen = view0.open.has(one.index);
    const around = best ? el("div", { class: "aligned" }, el("span", {}, marked(best, best.position - 24, best.position)), el("span", {}, marked(best, best.position, best.position + 40))) : "–";
    const row = el("tr", {}, el("td", { class: "number" }, button(isOpen)), COMPONENT_COLUMNS.slice(1).map(cell), el("td", { class: "text one" }, around));
    body.replaceChildren(row, ...isOpen ? [el("tr", {}, el("td", { colspan: 5 }, componentDetail(one)))] : []);
  };
  fill();
  return body;
}

/** The samples that the effect of a removal is averaged over. */
function measuredAt({ rows, positions }) {
  if (positions === null || positions === undefined) return "measured at the first of these";
  const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
  return `mean over ${count(positions, "position")} in ${count(rows, "sample")}, drawn among those where it is active`;
}

function componentDetail(one) {
  const strength = context => context.logit ?? Math.max(...context.importances.map(value => value ?? 0), 0);
  const place = ({ sample, sample_position, token }) => sample === null || sample === undefined ? {}
    : { title: `sample ${sample} of the dataset, position ${sample_position}: token ${token} from its beginning` };
  const text = context => el("li", {}, el("b", place(context), short(strength(context))), el("span", { class: "text" }, marked(context)),
    context.token === null || context.token === undefined ? null : el("span", { class: "hint" }, `token ${context.token.toLocaleString("en")}`));
  const change = ({ token, change }) => el("li", {}, el("span", { class: "token" }, visible(token)), el("b", {}, `${change > 0 ? "+" : ""}${short(change)}`));
  const list = (title, all) => el("div", {}, el("h4", {}, title), all?.length ? el("ul", { class: "changes" }, all.map(change)) : el("p", { class: "none" }, "–"));
  return el("div", { class: "detail" },
    el("div", {}, el("h4", {}, one.contexts[0]?.logit === null || one.contexts[0]?.logit === undefined ? "where it is most active, in held-out text"
      : "where it is most active, in held-out text, by its logit: the importance before it is clipped"),
      one.contexts.length ? el("ol", { class: "contexts" }, one.contexts.map(text)) : el("p", { class: "none" }, "nowhere in the text that was read")),
    one.removal ? el("div", { class: "removal" }, el("p", { class: "hint" }, measuredAt(one.removal)), list("more likely without it", one.removal.up), list("less likely without it", one.removal.down)) : null);
}
