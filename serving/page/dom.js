// Small things that every part of the page uses.

export const $ = (id) => document.getElementById(id);

export function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** Writes only what is new: a page that is left alone does nothing, and a screen reader keeps its place. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function set(node, attribute, value) {
  if (node.getAttribute(attribute) !== String(value)) node.setAttribute(attribute, value);
}

export function bytes(count) {
  const steps = ["B", "kB", "MB", "GB", "TB", "PB"];
  let step = 0;
  let value = count;
  while (value >= 999.5 && step < steps.length - 1) { value /= 1000; step += 1; }
  const digits = step === 0 || value >= 99.5 ? 0 : value >= 9.95 ? 1 : 2;
  return `${value.toFixed(digits)} ${steps[step]}`;
}

/** Rates in GB/s, however small: numbers that are to be compared have one unit. */
export function rate(bytesPerSecond) {
  const value = bytesPerSecond / 1e9;
  return `${value.toFixed(value >= 99.5 ? 0 : value >= 9.95 ? 1 : value >= 0.1 || value === 0 ? 2 : 3)} GB/s`;
}

/** 100000 as 100,000: what has many digits is read in groups. */
export const grouped = (count) => count.toLocaleString("en");

export const counted = (count, word) => `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;

/** A cell with the name of a host; what a scheduler made up may be long, and is not to push the rest aside. */
export const hostCell = (host) => ({ text: host, kind: host.length > 24 ? "long" : "" });

/** Cells are texts, or { text, kind: "n" | class } for numbers, or { text, part, kind } for a gauge filled to `part`. */
export function rows(body, data) {
  while (body.rows.length > data.length) body.deleteRow(-1);
  data.forEach((cells, index) => {
    const row = body.rows[index] ?? body.insertRow();
    cells.forEach((cell, column) => fill(row.cells[column] ?? row.insertCell(), cell));
  });
}

function fill(place, cell) {
  if (typeof cell !== "object") {
    say(place, String(cell));
    return;
  }
  if (cell.part === undefined) {
    say(place, String(cell.text));
    if (place.className !== (cell.kind ?? "")) place.className = cell.kind ?? "";
    return;
  }
  if (!place.querySelector(".bar")) {
    place.className = "gauge";
    const bar = element("div", undefined, { class: `bar ${cell.kind ?? ""}`, "aria-hidden": "true" });
    bar.append(element("div"));
    place.replaceChildren(element("span", "", { class: "words" }), bar);
  }
  say(place.firstElementChild, String(cell.text));
  place.lastElementChild.hidden = cell.part === null;
  place.lastElementChild.firstElementChild.style.width = `${Math.round(100 * Math.max(0, Math.min(1, cell.part ?? 0)))}%`;
}

const QUIET_MS = 5000;
let pending = [];
let timer = 0;

/** For who does not see the page: what matters, and not more often than somebody can listen. */
export function announce(text) {
  pending.push(text);
  if (!timer) timer = setTimeout(speak, 200);
}

function speak() {
  timer = 0;
  if (!pending.length) return;
  const more = pending.length - 3;
  say($("news"), `${pending.slice(0, 3).join(". ")}${more > 0 ? `. And ${counted(more, "more event")}` : ""}.`);
  pending = [];
  timer = setTimeout(speak, QUIET_MS);
}
