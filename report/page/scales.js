// Numbers as text, ticks, colours, and elements.

/** A number in four digits. */
function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return decimal.format(Number.isInteger(value) ? value : Number(value.toPrecision(4)));
}

/** One for all numbers: making it takes longer than writing a hundred numbers. */
const decimal = new Intl.NumberFormat("en", { maximumFractionDigits: 8 });

/** A number for an axis. */
function tick(value) {
  const size = Math.abs(value);
  if (size >= 1e12 || size < 1e-3 && size > 0) return value.toExponential().replace("e+", "e");
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return +(value / (name === "k" ? 1e3 : unit)).toPrecision(4) + name;
  }
  return String(+value.toPrecision(6));
}

/** A duration as text. */
function lasting(seconds) {
  if (seconds === null || !isFinite(seconds)) return "–";
  if (seconds < 100) return `${+seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.round(minutes % 1440 / 60)} h`;
}

/** Steps of an axis of time. */
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800].concat([1, 2, 3, 6, 12, 24, 48, 96, 192, 384].map(hours => 3600 * hours));

/** Seconds on an axis: `0:30`, `12:00`, `3 h`, `2:30 h`. */
function timeTick(seconds) {
  const size = Math.abs(seconds), two = number => String(number).padStart(2, "0"), sign = seconds < 0 ? "-" : "";
  if (size < 3600) return `${sign}${Math.floor(size / 60)}:${two(Math.round(size % 60))}`;
  const minutes = Math.round(size % 3600 / 60);
  return `${sign}${Math.floor(size / 3600)}${minutes ? `:${two(minutes)}` : ""} h`;
}

/** Ticks as text, with enough digits to be distinct if the format takes a number of digits. */
function apart(values, format) {
  for (let digits = 3; ; digits++) {
    const all = values.map(value => format(value, digits));
    if (digits > 7 || new Set(all).size === all.length) return all;
  }
}

function bytes(value, digits = 3) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < 4) {
    value /= 1024;
    unit++;
  }
  return `${+value.toPrecision(digits)} ${units[unit]}`;
}

const clockTime = time => new Date(time * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });

/** The powers of ten in a range, with ticks between them if they are few; evenly spaced ticks if these are few too. */
function logTicks(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.ceil((last - first) / 6) || 1;
  for (const parts of [[1], [1, 3], [1, 2, 3, 5, 7]]) {
    const found = [];
    for (let power = first; power <= last; power += every) {
      found.push(...parts.map(part => Number(`${part}e${power}`)).filter(value => value >= low && value <= high));
    }
    if (found.length > 2) return found;
  }
  const least = (high - low) / 5, power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map(part => part * power).find(step => step >= least);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

// Okabe and Ito's colours, distinct for colour-blind people, darkened on white and lightened on black for contrast.
const COLORS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b5568f", "#b07d00", "#3aa0d8", "#5b5ea6", "#6b6b6b"],
  dark: ["#56a8e8", "#ff8a3d", "#2ec4a0", "#e58fc3", "#e6b422", "#8fd3ff", "#a5a8f0", "#b8b8b8"],
};

const isDark = () => !paper.isOn && (view.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const colorOf = index => COLORS[isDark() ? "dark" : "light"][index % 8];
/** Beyond eight, lines are dashed too. */
const dashOf = index => [[], [6, 3], [2, 2], [8, 3, 2, 3]][Math.floor(index / 8) % 4];

/** A colour of an ordered scale, from violet over green to yellow. */
function ordered(index, count) {
  const part = count > 1 ? index / (count - 1) : 0;
  return `hsl(${Math.round(275 - 225 * part)} ${isDark() ? "65% 65%" : "70% 40%"})`;
}

const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** An element. Strings inside are text, never HTML. */
function el(tag, set = {}, ...inside) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(set)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...inside.flat(Infinity).filter(one => one != null && one !== false));
  return node;
}

/** A long name with line breaks allowed after its parts. */
const breakable = name => name.split(/(?<=[./])/).flatMap(part => [part, el("wbr")]);

const byId = id => document.getElementById(id);

/** A note beside the pointer, of what it is on. */
function connectTips() {
  const tip = el("div", { id: "tip", hidden: true });
  document.body.append(tip);
  document.addEventListener("pointerover", event => {
    const said = event.target.closest?.("[data-tip]")?.dataset.tip;
    tip.hidden = !said;
    if (!said) return;
    tip.textContent = said;
    const box = event.target.getBoundingClientRect();
    tip.style.left = `${Math.max(Math.min(box.left, innerWidth - tip.offsetWidth - 8), 8)}px`;
    tip.style.top = `${box.top > tip.offsetHeight + 8 ? box.top - tip.offsetHeight - 4 : box.bottom + 4}px`;
  });
}
