// The page as a whole: its sections, its controls, and where the data comes from.

const given = JSON.parse(byId("data").textContent);
const isLive = given.live === true;

/** Sections in their order: name, title, what makes its content (nothing where there is none), and what it is made of. */
const SECTIONS = [
  ["overview", "Overview", overviewSection],
  ["curves", "Curves", curvesSection],
  ["sites", "L0 by site", sitesSection],
  ["components", "Components", componentsSection],
  ["uv", "U and V", uvSection],
  ["figures", "Figures", figuresSection],
  ["speed", "Speed", speedSection],
  ["machine", "Machine", machineSection],
  ["config", "Config", configSection],
  ["events", "Events", eventsSection],
];

/** Makes sections anew: those of charts where there are other charts than before, or `all` that are not of charts alone. */
function show(all, isByItself = false) {
  const signature = JSON.stringify([keys(() => true), view.filter, runs.length]);
  const isOther = signature !== show.signature;
  show.signature = signature;
  const ofCharts = ["curves", "machine"];
  const ofRun = ["sites", "speed"];
  for (const [name, title, make] of SECTIONS) {
    if (ofCharts.includes(name) ? !isOther : !all && !isOther) continue;
    if (ofRun.includes(name) && !isOther && show.focus === view.focus) continue;
    // What somebody has in hand is not taken away.
    if (isByItself && byId(name)?.contains(document.activeElement) && /SELECT|INPUT/.test(document.activeElement.tagName)) continue;
    fillSection(name, title, make);
  }
  show.focus = view.focus;
  showHead();
  // The bar covers no heading, also where no frame was drawn since it has its links.
  clearBar();
  // A link may have led here before there was the section that it names.
  if (!show.wasHere) byId(location.hash.slice(1))?.scrollIntoView();
  show.wasHere = true;
}

function fillSection(name, title, make) {
  const main = byId("main");
  let section = byId(name);
  const open = new Map([...section?.querySelectorAll("details.group") ?? []].map(one => [one.firstChild.firstChild.textContent, one.open]));
  for (const card of section?.querySelectorAll(".chart") ?? []) card.chart?.remove();
  let made;
  try {
    made = make();
  } catch (error) {
    // What one file of a run holds that nobody expects is not to hide all the rest.
    made = [el("p", { class: "failed" }, `This cannot be shown: ${error.message}`)];
  }
  if (!section) {
    section = el("section", { id: name, "aria-label": title });
    main.append(section);
  }
  // A filter opens what it finds; without one what was folded stays so.
  const inHand = [...section.querySelectorAll("select, input, button")].indexOf(document.activeElement);
  const scroll = section.querySelector(".scroll")?.scrollLeft ?? 0;
  section.hidden = !made;
  section.replaceChildren(...made ? [el("h2", {}, title), ...made.flat(Infinity).filter(Boolean)] : []);
  if (!view.filter) {
    for (const one of section.querySelectorAll("details.group")) one.open = open.get(one.firstChild.firstChild.textContent) ?? one.open;
  }
  const scrolled = section.querySelector(".scroll");
  if (scrolled) scrolled.scrollLeft = scroll;
  if (inHand >= 0) section.querySelectorAll("select, input, button")[inHand]?.focus({ preventScroll: true });
}

function showHead() {
  saySmoothing();
  document.title = byId("title").textContent = book.title || "…";
  const links = SECTIONS.filter(([name]) => byId(name) && !byId(name).hidden).map(([name, title]) => el("a", { href: `#${name}` }, title));
  byId("sections").replaceChildren(...links);
  const all = runs.filter(Boolean);
  const toggle = run => () => {
    view.hidden = view.hidden.includes(run.id) ? view.hidden.filter(id => id !== run.id) : [...view.hidden, run.id];
    showHead();
    redraw();
  };
  const chip = run => el("button", { type: "button", class: "chip", "aria-pressed": !view.hidden.includes(run.id), onclick: toggle(run), title: run.head?.path }, dotOf(run), book.names[run.id]);
  byId("chips").replaceChildren(...all.length > 1 ? all.map(chip) : []);
  if (!isLive) byId("state").textContent = `as of ${clockTime(given.made)}`;
}

/** Has headings that are scrolled to stand below the bar. */
function clearBar() {
  document.documentElement.style.scrollPaddingTop = `${byId("bar").offsetHeight + 4}px`;
}

/** Says over how many steps curves are smoothed: more, as a run gets longer than planned. */
function saySmoothing() {
  const steps = smoothing();
  byId("smoothness").textContent = steps ? `~ ${steps.toLocaleString("en")} step${steps === 1 ? "" : "s"}` : "off";
}

/** Does something once before the next picture, however often it is asked for. */
function soon(what) {
  soon.waiting ??= new Set();
  if (!soon.waiting.size) {
    requestAnimationFrame(() => {
      const all = [...soon.waiting];
      soon.waiting.clear();
      all.forEach(one => one());
    });
  }
  soon.waiting.add(what);
}

function setTheme() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  byId("theme").textContent = isDark() ? "☀" : "☾";
}

function changeTheme() {
  view.theme = isDark() ? "light" : "dark";
  remember();
  setTheme();
  redraw();
  show(true);
}

function connect() {
  const filter = byId("filter"), smooth = byId("smooth");
  smooth.value = view.smooth;
  filter.addEventListener("input", () => {
    view.filter = filter.value.trim();
    soon(() => show(false));
  });
  smooth.addEventListener("input", () => {
    view.smooth = Number(smooth.value);
    saySmoothing();
    remember();
    redraw();
  });
  for (const name of ["x", "y"]) {
    for (const radio of document.getElementsByName(name)) {
      radio.checked = radio.value === view[name];
      radio.addEventListener("change", () => {
        view[name] = radio.value;
        remember();
        if (name === "x") zoom("step", null);
        redraw();
      });
    }
  }
  byId("whole").addEventListener("click", () => zoom("step", null));
  byId("theme").addEventListener("click", changeTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    setTheme();
    redraw();
    showHead();
  });
  document.addEventListener("keydown", event => {
    if (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") {
      byId("view").open = true;
      filter.focus();
      event.preventDefault();
    } else if (event.key === "t") changeTheme();
  });
  new ResizeObserver(clearBar).observe(byId("bar"));
  new ResizeObserver(() => soon(() => charts.forEach(chart => chart.resize()))).observe(byId("main"));
  if (innerWidth < 700) byId("view").open = false;
}

/** Asks for what is new once a second, and less often where there is no answer. */
async function follow(wait = 1000) {
  let next = wait;
  if (!document.hidden || !runs.length) {
    try {
      const answer = await fetch(`news?since=${places()}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const news = await answer.json();
      const rows = news.runs.some(part => part.curves.length);
      const isNews = take(news);
      if (isNews) show(true, true);
      else if (show.state !== states()) fillSection(...SECTIONS[0]);
      if (rows) redraw();
      show.state = states();
      byId("state").textContent = "live";
      byId("state").className = "live";
      next = 1000;
    } catch (error) {
      if (!(error instanceof TypeError) && !/^\d+$/.test(error.message)) throw error;
      byId("state").textContent = "no answer; trying again";
      byId("state").className = "lost";
      next = Math.min(wait * 1.5, 15000);
    }
  }
  setTimeout(follow, next, next);
}

const states = () => runs.map(run => run && stateOf(run) + Math.floor(stepOf(run) / 100)).join();

addEventListener("error", event => trouble(event.message));
addEventListener("unhandledrejection", event => trouble(event.reason?.message ?? event.reason));

function trouble(text) {
  byId("trouble").hidden = false;
  byId("trouble").textContent = `This page met an error of its own: ${text}`;
}

recall();
setTheme();
connect();
if (isLive) follow();
else {
  take(given);
  show(true);
}
const thinned = runs.some(run => [...run.curves.values()].some(curve => curve.of > curve.x.length));
byId("foot").textContent = thinned ? "Curves of very many points are drawn by the least and the greatest of each stretch." : "";
