// The address: the section, the run, the component that is open, the filter and the range, as in `#curves&filter=kl&zoom=step:10-90`.

/** Writes what is chosen into the address, without a step in the history. */
function writeAddress() {
  const { open } = chosen, [domain, range] = Object.entries(view.ranges)[0] ?? [];
  const parts = [
    address.section,
    view.focus ? `run=${view.focus}` : "",
    open ? `component=${encodeURIComponent(`${open.site}:${open.index}`)}` : "",
    view.filter ? `filter=${encodeURIComponent(view.filter)}` : "",
    range ? `zoom=${domain}:${range.map(x => Number(x.toPrecision(7))).join("-")}` : "",
  ];
  history.replaceState(null, "", `#${parts.filter(Boolean).join("&")}`);
}

const address = { section: "" };

/** Takes what the address says. */
function readAddress() {
  const parts = location.hash.slice(1).split("&");
  const value = name => {
    const part = parts.find(part => part.startsWith(`${name}=`));
    try { return part && decodeURIComponent(part.slice(name.length + 1)); } catch { return undefined; }
  };
  address.section = parts[0].includes("=") ? "" : parts[0];
  view.focus = Number(value("run")) || 0;
  const [, site, index] = /^(.+):(\d+)$/.exec(value("component") ?? "") ?? [];
  chosen.open = site === undefined ? null : { site, index: Number(index) };
  view.filter = byId("filter").value = value("filter") ?? "";
  const [, domain, low, high] = /^(step|time):([-\d.e]+?)-([\d.e+-]+)$/.exec(value("zoom") ?? "") ?? [];
  view.ranges = Number(low) < Number(high) ? { [domain]: [Number(low), Number(high)] } : {};
  byId("whole").hidden = !domain;
}

/** Shows the range that the address gave, on both x axes. */
function zoomAsAddressed() {
  const [domain, range] = Object.entries(view.ranges)[0] ?? [];
  if (range) zoom(domain, range);
  else redraw();
}

/** Goes where the address leads; returns whether that place exists. */
function goThere() {
  const place = chosen.open ? document.querySelector(".detail") : byId(address.section);
  place?.scrollIntoView();
  return Boolean(place ?? !(chosen.open || address.section));
}
