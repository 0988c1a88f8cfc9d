// Figures with a slider over steps; U and V have a section of their own.

const UV = "uv_matrices";
const chosenSteps = {};

/** The address of a figure; in a page that is a file, it is made from the text. */
function figureAddress(run, step, name) {
  if (!run.pictures) return `figure/${run.id}/${step}/${encodeURIComponent(name)}`;
  const text = run.pictures.figures[step]?.[name];
  const key = `${run.id}/${step}/${name}`;
  if (text === undefined) return null;
  return figureAddress.made[key] ??= URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
}
figureAddress.made = {};

/** Steps of the run in focus for which the page has one of these figures. */
function stepsOf(run, wanted) {
  const has = ([step, names]) => names.some(name => wanted(name) && figureAddress(run, step, name));
  return run?.head ? run.head.figures.filter(has) : [];
}

/** Width and height of a figure in a page that is a file: its space is reserved before it is drawn, so links lead to the right place. */
function figureSize(run, step, name) {
  const [, width, height] = /^[^>]*?<svg[^>]*\sviewBox="\S+ \S+ ([\d.]+) ([\d.]+)"/.exec(run.pictures?.figures[step]?.[name] ?? "") ?? [];
  return { width, height };
}

const widened = new Set();

/** A figure, with a button for page width. */
function picture(title, image) {
  const button = el("button", { type: "button", "aria-label": `${title}, larger`, title: "Larger" }, "⤢");
  const card = el("figure", { class: "picture" }, el("figcaption", {}, title, button), image);
  const set = () => button.setAttribute("aria-pressed", card.classList.toggle("wide", widened.has(title)));
  button.addEventListener("click", () => {
    if (!widened.delete(title)) widened.add(title);
    set();
    // Its place among the others has changed.
    card.scrollIntoView({ block: card.offsetHeight > innerHeight / 2 ? "start" : "nearest" });
  });
  set();
  return card;
}

function figuresPart(part, wanted, histograms) {
  const run = focused();
  const drawn = new Map(stepsOf(run, wanted));
  const all = new Set([...drawn.keys(), ...histograms ? histogramSteps(run) : []]);
  const steps = [...all].sort((one, other) => one - other).map(step => [step, drawn.get(step)]);
  if (!steps.length) return null;
  const bars = histograms?.(run);
  const shown = el("div", { class: "figures" });
  const said = el("output", {});
  // Untouched, the slider follows the newest step.
  const start = Math.max(chosenSteps[part] === undefined ? -1 : steps.findIndex(([step]) => step === chosenSteps[part]), -1);
  const draw = index => {
    const [step, names] = steps[index];
    said.textContent = `step ${step.toLocaleString("en")}`;
    bars?.draw(step);
    shown.hidden = !names;
    (names ?? []).filter(wanted).forEach((name, i) => {
      const title = name.replaceAll("_", " ");
      let image = shown.children[i]?.querySelector("img");
      if (!image) shown.append(picture(title, image = el("img", { decoding: "async", ...figureSize(run, step, name) })));
      image.alt = `${title}, step ${step}`;
      image.src = figureAddress(run, step, name) ?? "data:,";
    });
  };
  const move = event => {
    const index = Number(event.target.value);
    chosenSteps[part] = index === steps.length - 1 ? undefined : steps[index][0];
    draw(index);
  };
  const at = start < 0 ? steps.length - 1 : start;
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, step: 1, value: at, "aria-label": "Step of the figures", oninput: move });
  draw(at);
  const left = run.pictures?.figures_left_out;
  return [
    el("div", { class: "choose" }, runSelect(), steps.length > 1 ? el("label", {}, el("span", {}, "Step"), slider) : null, said),
    left ? el("p", { class: "hint" }, `${left} figures are left out of this file to keep it small; they are in ${run.head.path}/figures, and in spd-launch watch.`) : null,
    bars?.part,
    shown,
  ];
}

const figuresSection = () => figuresPart("figures", name => name !== UV, histogramsPart);
const uvSection = () => figuresPart("uv", name => name === UV);
