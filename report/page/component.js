// A component: what it does in text, what it reads and writes, what is active with it, and the effect of its removal.

/** Gives `use` the details of a component, `{}` if there are none. They are parsed when it is opened, or asked of the server. */
function withDetails(run, one, use) {
  if (one.line === null) return use({});
  if (!isLive) {
    run.details ??= (byId(`details-${run.id}`)?.textContent ?? "").split("\n");
    return use(parsed(run.details[one.line] || "{}") ?? {});
  }
  const address = `component/${run.id}/${encodeURIComponent(one.site)}/${one.index}`;
  const found = once(`${run.generation}/${run.head.components}/${address}`, () => fetch(address).then(answer => answer.ok ? answer.json() : {}), use);
  if (found) use(found);
}

function componentDetail(one, run, list) {
  const facts = COLUMNS.slice(1).filter(column => column.value(one) !== null).map(column => `${column.title} ${short(column.value(one))}`);
  const inside = el("div", {}, el("p", { class: "none" }, "It is on its way."));
  withDetails(run, one, found => inside.replaceChildren(...[detailsOf(one, found, list)].flat(Infinity).filter(Boolean)));
  return el("article", { class: "card detail", "aria-label": `${one.site} #${one.index}` },
    el("h3", {}, componentLink(one.site, one.index, `${one.site} #${one.index}`), one.label ? el("span", {}, one.label) : null, el("small", {}, facts.join(" · "))), inside);
}

function detailsOf(one, found, list) {
  const { contexts = [], removal = null, input = [], next = [], together = [] } = found;
  const isLeftOut = !isLive && found.index === undefined && one.line !== null && one.density !== 0;
  const nothing = isLeftOut ? "Its details are left out of this file; spd-launch watch shows them." : one.line === null ? "its text was not collected" : "nowhere in the text that was read";
  const hasLogit = contexts[0]?.logit !== null && contexts[0]?.logit !== undefined;
  const isOfParts = contexts.some(context => context.part);
  return [
    histogramsOf(found, list),
    el("h4", {}, isOfParts ? "where it is active, by its logit: the importance before it is clipped" : hasLogit ? "where it is most active, in held-out text, by its logit: the importance before it is clipped" : "where it is most active, in held-out text"),
    contexts.length ? el("div", { class: "scroll" }, el("ol", { class: "contexts" }, contextRows(contexts, isOfParts))) : el("p", { class: "none" }, nothing),
    input.length || next.length || together.length ? el("div", { class: "facets" },
      facet("tokens it is active on", "information in nats: above 0, more often than by chance", signedBars(input, ({ pmi }) => pmi)),
      facet("tokens the target expects there", "likewise, by the probability of the next token", signedBars(next, ({ pmi }) => pmi)),
      facet("active together with it", "part of its positions, and how many times more than by chance", togetherRows(together))) : null,
    removal ? el("div", { class: "removal" }, el("p", { class: "hint" }, measuredAt(removal)), changes("more likely without it", removal.up, removal), changes("less likely without it", removal.down, removal)) : null,
  ];
}

/** The histograms of its importance and its activation at all positions. */
function histogramsOf({ importance_histogram: importances, activation_histogram: activations, active }, list) {
  const bars = (name, histogram) => {
    const made = new Bars(`/${name}`);
    made.show({ ...histogram, step: list.step });
    return made.card;
  };
  const all = [];
  if (importances?.some(Boolean)) all.push(bars("importance", { edges: Array.from({ length: importances.length + 1 }, (_, i) => i / importances.length), counts: importances }));
  if (activations?.some(Boolean)) {
    // Two bins an octave, the first of which has all below.
    const edge = bin => bin ? short((bin % 2 ? 1.5 : 1) * 2 ** (Math.floor(bin / 2) - 24)) : "0";
    const first = activations.findIndex(Boolean), counts = activations.slice(first, activations.findLastIndex(Boolean) + 1);
    all.push(bars("length of its output", { edges: Array.from({ length: counts.length + 1 }, (_, i) => first + i), counts, edge }));
  }
  const said = active !== null && active !== undefined && list?.positions ? el("p", { class: "hint" }, `active at ${active.toLocaleString("en")} of ${list.positions.toLocaleString("en")} positions; counts on a log scale`) : null;
  return all.length ? [said, el("div", { class: "grid bars" }, all)] : null;
}

/** Its texts, aligned at the peak; those of a harvest below the part of its logits. */
function contextRows(contexts, isOfParts) {
  const strength = context => context.logit ?? Math.max(...context.importances.map(value => value ?? 0), 0);
  const place = ({ sample, sample_position, token }) => sample === null || sample === undefined ? {}
    : { title: `sample ${sample} of the dataset, position ${sample_position}: token ${token} from its beginning` };
  const percent = part => `${Math.round(100 * part)}`;
  const named = ({ part }) => part ? `${percent(part[0])} to ${percent(part[1])} % of its positions` : "the strongest";
  return contexts.map((context, i) => [
    isOfParts && (i === 0 || named(context) !== named(contexts[i - 1])) ? el("li", { class: "part" }, named(context)) : null,
    el("li", {}, el("b", place(context), short(strength(context))),
      el("span", { class: "text aligned" }, el("span", {}, marked(context, 0, context.position)), el("span", {}, marked(context, context.position))),
      context.token === null || context.token === undefined ? null : el("span", { class: "hint" }, `token ${context.token.toLocaleString("en")}`)),
  ]);
}

const facet = (title, tip, inside) => el("div", {}, el("h4", { title: tip }, title), inside);

/** Tokens with a bar from the middle: to the right above 0, to the left below. */
function signedBars(all, value) {
  if (!all.length) return el("p", { class: "none" }, "–");
  const most = Math.max(...all.map(one => Math.abs(value(one) ?? 0)), 1e-12);
  const row = one => {
    const part = 50 * (value(one) ?? 0) / most;
    return el("li", { class: part > 0 ? "up" : "down", style: `--from:${50 + Math.min(part, 0)}%;--bar:${50 + Math.max(part, 0)}%`, "data-tip": `${visible(one.token)}  ${short(one.count)} times` }, el("span", { class: "token" }, visible(one.token)), el("b", {}, signed(value(one))));
  };
  return el("ul", { class: "changes" }, all.map(row));
}

const signed = value => `${value > 0 ? "+" : ""}${short(value)}`;

function togetherRows(all) {
  if (!all.length) return el("p", { class: "none" }, "–");
  const label = ({ site, index }) => componentAt(focused(), site, index)?.label;
  const row = one => el("li", { class: "up", style: `--bar:${Math.round(100 * (one.part ?? 0))}%`, "data-tip": `at ${one.both.toLocaleString("en")} positions, ${short(one.times)} times more than by chance` },
    componentLink(one.site, one.index, `${one.site} #${one.index}`, label(one) ? ` ${label(one)}` : ""), el("b", {}, `${short(100 * (one.part ?? 0))} %`));
  return el("ul", { class: "changes" }, all.map(row));
}

/** The samples that the effect of a removal is averaged over. */
function measuredAt({ rows, positions }) {
  if (positions === null || positions === undefined) return "measured at the first of these";
  const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
  const within = rows === null || rows === undefined ? "" : ` in ${count(rows, "sample")}`;
  return `mean over ${count(positions, "position")}${within}, drawn among those where it is active`;
}

/** Tokens whose log-probability its removal moves. */
function changes(title, all, { up, down }) {
  const most = Math.max(...[...up ?? [], ...down ?? []].map(({ change }) => Math.abs(change ?? 0)), 1e-12);
  const row = ({ token, change }) => el("li", { style: `--bar:${Math.round(100 * Math.abs(change) / most)}%`, class: change > 0 ? "up" : "down" }, el("span", { class: "token" }, visible(token)), el("b", {}, signed(change)));
  return facet(title, null, all?.length ? el("ul", { class: "changes" }, all.map(row)) : el("p", { class: "none" }, "–"));
}
