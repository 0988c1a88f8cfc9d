// The page as a whole: its sections, its controls, and the source of the data.

const given = JSON.parse(byId("data").textContent);
const isLive = given.live === true;

/** Sections in order: name, title, and the function that makes the content. Those that do not fit a run are not shown. */
const SECTIONS = [
  ["overview", "Verdict", overviewSection],
  ["uv", "Importances, U and V", uvSection],
  ["components", "Components", componentsSection],
  ["probes", "Prompts", probesSection],
  ["curves", "Curves", curvesSection],
  ["figures", "Figures", figuresSection],
  ["results", "Results", resultsSection],
  ["speed", "Speed", speedSection],
  ["machine", "Machine", machineSection],
  ["config", "Config", configSection],
  ["events", "Events", eventsSection],
];

/** Rebuilds the sections of charts if there are other charts than before, and with `all` the other sections. */
function show(all, isByItself = false) {
  const signature = JSON.stringify([keys(() => true), view.filter, runs.length]);
  const isOther = signature !== show.signature;
  show.signature = signature;
  const ofCharts = ["curves", "speed", "machine"];
  for (const [name, title, make] of SECTIONS) {
    if (!isOther && (ofCharts.includes(name) ? show.focus === view.focus : !all)) continue;
    // An element in use is not replaced.
    if (isByItself && byId(name)?.contains(document.activeElement) && /SELECT|INPUT/.test(document.activeElement.tagName)) continue;
    fillSection(name, title, make);
  }
  show.focus = view.focus;
  drawTradeoff();
  showHead();
  // The bar has its links now, and headings stand below it.
  clearBar();
  show.wasHere ||= goThere();
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
    // An unexpected file of a run must not hide the rest.
    made = [el("p", { class: "failed" }, `This cannot be shown: ${error.message}`)];
  }
  if (!section) {
    section = el("section", { id: name, "aria-label": title });
    main.append(section);
  }
  // A filter opens its matches; without one folded sections stay folded.
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
  const go = name => event => {
    event.preventDefault();
    address.section = name;
    writeAddress();
    byId(name).scrollIntoView();
  };
  const links = SECTIONS.filter(([name]) => byId(name) && !byId(name).hidden).map(([name, title]) => el("a", { href: `#${name}`, onclick: go(name) }, title));
  byId("sections").replaceChildren(...links);
  markSection();
  const all = runs.filter(Boolean);
  const toggle = run => () => {
    view.hidden = view.hidden.includes(run.id) ? view.hidden.filter(id => id !== run.id) : [...view.hidden, run.id];
    showHead();
    redraw();
    drawTradeoff();
  };
  const chip = run => el("button", { type: "button", class: "chip", "aria-pressed": !view.hidden.includes(run.id), onclick: toggle(run), title: run.head?.path }, dotOf(run), book.names[run.id]);
  byId("chips").replaceChildren(...all.length > 1 ? all.map(chip) : []);
  if (!isLive) byId("state").textContent = `as of ${clockTime(given.made)}`;
}

/** Marks the link of the section that is in sight. */
function markSection() {
  const top = byId("bar").offsetHeight + innerHeight / 4;
  const [here] = SECTIONS.filter(([name]) => byId(name) && !byId(name).hidden && byId(name).getBoundingClientRect().top <= top).at(-1) ?? [];
  for (const link of byId("sections").children) {
    const isHere = link.hash === `#${here}`;
    if (isHere === (link.getAttribute("aria-current") === "true")) continue;
    link.setAttribute("aria-current", isHere);
    // On a phone the bar scrolls sideways.
    if (isHere) byId("sections").scrollLeft = link.offsetLeft - byId("sections").offsetLeft - 40;
  }
}

/** Makes headings that are scrolled to stand below the bar. */
function clearBar() {
  document.documentElement.style.scrollPaddingTop = `${byId("bar").offsetHeight + 4}px`;
}

/** Shows the number of steps of smoothing, which grows as a run gets longer than planned. */
function saySmoothing() {
  const steps = smoothing();
  byId("smoothness").textContent = steps ? `~ ${steps.toLocaleString("en")} step${steps === 1 ? "" : "s"}` : "off";
}

/** Runs a function once before the next frame, for any number of calls. */
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
  connectTips();
  const filter = byId("filter"), smooth = byId("smooth");
  smooth.value = view.smooth;
  filter.addEventListener("input", () => {
    view.filter = filter.value.trim();
    writeAddress();
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
    show(true);
  });
  document.addEventListener("keydown", event => {
    if (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") {
      byId("view").open = true;
      filter.focus();
      event.preventDefault();
    } else if (event.key === "t") changeTheme();
  });
  addEventListener("scroll", () => soon(markSection), { passive: true });
  addEventListener("hashchange", () => {
    readAddress();
    show(true);
    zoomAsAddressed();
    goThere();
  });
  new ResizeObserver(clearBar).observe(byId("bar"));
  new ResizeObserver(() => soon(() => charts.forEach(chart => chart.resize()))).observe(byId("main"));
  if (innerWidth < 700) byId("view").open = false;
}

/** Polls for new data once a second, and less often without an answer. */
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
      if (rows) {
        redraw();
        drawTradeoff();
      }
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

const states = () => runs.map(run => run && stateOf(run) + run.head?.verdict?.text + Math.floor(stepOf(run) / 100)).join();

addEventListener("error", event => trouble(event.message));
addEventListener("unhandledrejection", event => trouble(event.reason?.message ?? event.reason));

function trouble(text) {
  byId("trouble").hidden = false;
  byId("trouble").textContent = `This page has an error: ${text}`;
}

recall();
setTheme();
connect();
readAddress();
if (isLive) follow();
else {
  take(given);
  show(true);
  zoomAsAddressed();
}
const thinned = runs.some(run => [...run.curves.values()].some(curve => curve.of > curve.x.length));
byId("foot").textContent = thinned ? "Curves of very many points are drawn by the least and the greatest of each stretch." : "";
