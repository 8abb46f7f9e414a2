// Bytes a second of each model, now and over the last minutes, from what its progress says.

import { $, bytes, rate, say } from "./dom.js";

const KEPT_S = 300;
const NOW_S = 3; // the rate that is shown as that of now
const SHORTEST_S = 30; // of the axis
const NAMES = ["store", "placed"];
const histories = new Map(); // model id -> [{ at, store, placed }]

export function remember(models, now) {
  for (const { progress } of models) {
    const history = histories.get(progress.model_id) ?? [];
    history.push({ at: now, store: progress.store_bytes, placed: progress.placed_bytes });
    while (history.length > 2 && now - history[0].at > KEPT_S) history.shift();
    histories.set(progress.model_id, history);
  }
  const there = new Set(models.map(({ progress }) => progress.model_id));
  for (const model of histories.keys()) if (!there.has(model)) histories.delete(model);
}

/** [[seconds, bytes per second]]; a counter that fell (a rank was replaced) is no rate. */
function rates(history, name) {
  const points = [];
  for (let index = 1; index < history.length; index += 1) {
    const spent = history[index].at - history[index - 1].at;
    if (spent > 0) points.push([history[index].at, Math.max(0, history[index][name] - history[index - 1][name]) / spent]);
  }
  return points;
}

function lately(history, name) {
  const last = history.at(-1);
  const first = history.find(({ at }) => last.at - at <= NOW_S + 0.5);
  return last.at > first.at ? Math.max(0, last[name] - first[name]) / (last.at - first.at) : 0;
}

/** The next of 1, 2, 5 × 10ⁿ: an axis that does not move with every second. */
function roundedUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 2, 5, 10].find((step) => step * power >= value * 0.999) ?? 10);
}

export function showRate({ progress }) {
  const history = histories.get(progress.model_id);
  if (!history?.length) return;
  const points = Object.fromEntries(NAMES.map((name) => [name, rates(history, name)]));
  const highest = Math.max(0, ...NAMES.flatMap((name) => points[name].map(([, value]) => value)));
  const most = roundedUp(Math.max(highest, 1e6));
  const end = history.at(-1).at;
  const start = Math.min(end - SHORTEST_S, history[0].at);
  say($("rate-store"), rate(lately(history, "store")));
  say($("rate-placed"), rate(lately(history, "placed")));
  say($("rate-most"), rate(most));
  say($("rate-since"), `${Math.round((end - start) / 10) * 10} s ago`);
  const seconds = progress.elapsed_s;
  const average = seconds > 0
    ? `; over the whole load ${rate(progress.store_bytes / seconds)} from the store, ${rate(progress.placed_bytes / seconds)} placed`
    : "";
  say($("rate-words"), highest > 0
    ? `Highest while this page watched: ${rate(highest)}${average}.`
    : `No byte has moved while this page watched${progress.placed_bytes ? average : ""}.`);
  for (const name of NAMES) {
    const text = points[name]
      .map(([at, value]) => `${(600 * (at - start) / (end - start)).toFixed(1)},${(118 - 114 * value / most).toFixed(1)}`)
      .join(" ");
    line(name).setAttribute("points", text);
  }
}

function line(name) {
  const svg = $("rate");
  const found = svg.querySelector(`.${name}`);
  if (found) return found;
  const make = (kind) => document.createElementNS("http://www.w3.org/2000/svg", kind);
  if (!svg.childElementCount) {
    for (const y of [4, 61]) {
      const rule = make("line");
      for (const [key, value] of Object.entries({ x1: 0, x2: 600, y1: y, y2: y })) rule.setAttribute(key, value);
      svg.append(rule);
    }
  }
  const made = make("polyline");
  made.setAttribute("class", name);
  svg.append(made);
  return made;
}

export const moved = (progress) => (progress.total_bytes
  ? `${bytes(progress.placed_bytes)} of ${bytes(progress.total_bytes)}`
  : "not known yet");
