// The map of chunks: a picture for each node, a row for each shard, a colour for each state; and the same in numbers.
// Then, for each node, where its bytes came from.
// A picture is painted only when its node's chunks have changed and it can be seen.

import { $, bytes, counted, element, grouped, hostCell, rows, say, set } from "./dom.js";

// From what is least done to what is most: where a pixel stands for several chunks it shows the least done of them.
const STATES = [
  ["p", "pending"], ["w", "waiting for another load's fetch"], ["l", "being fetched"],
  ["c", "verified, in the arena"], ["d", "placed"], ["-", "not needed on this node"],
];
const CODE = Object.fromEntries(STATES.map(([letter], code) => [letter, code]));
const [PLACED, FETCHED, UNNEEDED] = [CODE.d, CODE.l, CODE["-"]];
const NO_CHUNK = 255;
const NAMED_SENDERS = 4; // of those that sent chunks to a node, the table names so many
const GAP_PX = 6; // cells at least so wide and high have a gap between them

let shards = [];
let chosen = 0; // 0: all shards; else the number of one, from 1 on
const views = new Map(); // node id -> { host, runs, letters, totals, box, title, canvas, frame, mark, seen, stale }
let paints = 0; // asked for, for the next frame

const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const view = [...views.values()].find(({ frame }) => frame === entry.target);
    if (view) view.seen = entry.isIntersecting;
  }
  paintSoon();
}, { rootMargin: "600px" });
const sizes = new ResizeObserver(() => repaint());

export function begin() {
  for (const [letter, words] of STATES) {
    const item = element("li");
    item.append(element("span", undefined, { class: `swatch c-${letter}`, "aria-hidden": "true" }), words);
    $("legend").append(item);
  }
  const head = $("counts").tHead.rows[0];
  head.append(element("th", "host", { scope: "col" }));
  for (const [, words] of STATES) head.append(element("th", words, { scope: "col", class: "n" }));
  $("shard").addEventListener("input", () => choose(Number($("shard").value)));
  sizes.observe($("maps"));
}

export function clear() {
  shards = [];
  chosen = 0;
  for (const node of [...views.keys()]) drop(node);
  $("counts").tBodies[0].replaceChildren();
  $("counts-frame").hidden = true;
  $("shard-choice").hidden = true;
  $("sources-frame").hidden = true;
  say($("sources-words"), "");
  note("No chunk is on its way yet.");
}

export const note = (text) => say($("chunks-note"), text);

/** Of a load that has ended nobody says any more where its chunks are. */
export function over(state) {
  const said = state === "failed" ? "the load has failed" : `the model is ${state}`;
  note(views.size ? `Chunks as last seen: ${said}.` : `Where chunks were is not kept: ${said}.`);
}

/** Every picture anew, as in other colours. */
export function repaint() {
  for (const view of views.values()) view.stale = true;
  paintSoon();
}

export function show(map) {
  const others = shards.length !== map.shards.length || shards.at(-1)?.key !== map.shards.at(-1)?.key;
  shards = map.shards;
  const there = new Set(map.nodes.map(({ node }) => node));
  for (const node of [...views.keys()]) if (!there.has(node)) drop(node);
  for (const { node, host, runs } of map.nodes) {
    const view = views.get(node) ?? add(node, host);
    if (!others && same(view.runs, runs)) continue;
    Object.assign(view, { runs, stale: true }, read(runs, map.chunk_count));
    const needed = map.chunk_count - view.totals[UNNEEDED];
    say(view.title, `${name(node)}: ${grouped(view.totals[PLACED])} of ${grouped(needed)} placed, ${grouped(view.totals[FETCHED])} being fetched`);
    set(view.canvas, "aria-label", `Chunks on ${name(node)}, a row for each shard: ${worded(view.totals)}`);
  }
  $("maps").className = views.size > 4 ? "many" : views.size > 1 ? "several" : "";
  $("shard-choice").hidden = shards.length < 2;
  $("counts-frame").hidden = !views.size;
  set($("shard"), "max", shards.length);
  const silent = map.silent_nodes.length ? ` No answer from ${map.silent_nodes.join(", ")}.` : "";
  note(`${counted(map.chunk_count, "chunk")} in ${counted(shards.length, "shard")} on ${counted(views.size, "node")}.${silent}`);
  choose(Math.min(chosen, shards.length), others);
  showSources(map.nodes);
  paintSoon();
}

const sum = (counts) => Object.values(counts).reduce((all, count) => all + count, 0);

/** Bytes of the load on a node, by where it had them from. */
function sourcesOf({ traffic: { bytes_by_source: of } }) {
  return {
    "from the store": (of.store_via_arena ?? 0) + (of.store_direct ?? 0),
    "from disk": of.disk ?? 0, "from the arena": of.arena ?? 0, "from other nodes": of.peer ?? 0,
  };
}

function showSources(nodes) {
  const totals = {};
  rows($("sources").tBodies[0], nodes.map((node) => {
    const sources = sourcesOf(node);
    for (const [source, count] of Object.entries(sources)) totals[source] = (totals[source] ?? 0) + count;
    return [
      hostCell(name(node.node)), ...Object.values(sources).map((count) => ({ text: bytes(count), kind: "n" })),
      { text: senders(node.traffic.peer_bytes_from), kind: "long" }, { text: bytes(node.traffic.sent_bytes), kind: "n" },
    ];
  }));
  $("sources-frame").hidden = !nodes.length;
  const words = Object.entries(totals).filter(([, count]) => count).map(([source, count]) => `${bytes(count)} ${source}`);
  say($("sources-words"), words.length ? `${bytes(sum(totals))} in all: ${words.join(", ")}.` : "No byte has come yet.");
}

/** Hosts that sent chunks, each with its bytes, the most first. */
function senders(bytesFrom) {
  const found = Object.entries(bytesFrom).sort(([, one], [, other]) => other - one);
  const named = found.slice(0, NAMED_SENDERS).map(([host, count]) => `${host} ${bytes(count)}`).join(", ");
  const more = found.length - NAMED_SENDERS;
  return more > 0 ? `${named} and ${counted(more, "other")}` : named || "-";
}

function same(was, now) {
  return was?.length === now.length && was.every(([count, letter], at) => count === now[at][0] && letter === now[at][1]);
}

/** Runs as a code for each chunk, and how many of each code there are. */
function read(runs, count) {
  const letters = new Uint8Array(count);
  const totals = new Uint32Array(STATES.length);
  let at = 0;
  for (const [length, letter] of runs) {
    letters.fill(CODE[letter], at, at + length);
    totals[CODE[letter]] += length;
    at += length;
  }
  return { letters, totals };
}

function worded(totals) {
  return STATES.map(([, words], code) => [totals[code], words]).filter(([count]) => count).map(([count, words]) => `${grouped(count)} ${words}`).join(", ");
}

/** The host; with the node's id where several nodes are on one host. */
function name(node) {
  const { host } = views.get(node);
  const alone = [...views.values()].filter((view) => view.host === host).length === 1;
  return alone ? host : `${host} (${node.slice(0, 8)})`;
}

function add(node, host) {
  const box = element("div", undefined, { class: "map" });
  const title = element("h4");
  const frame = element("div", undefined, { class: "frame" });
  const canvas = element("canvas", undefined, { role: "img" });
  const mark = element("div", undefined, { class: "chosen" });
  mark.hidden = true;
  frame.append(canvas, mark);
  box.append(title, frame);
  $("maps").append(box);
  canvas.addEventListener("click", (event) => {
    const row = 1 + Math.floor((event.offsetY / canvas.clientHeight) * shards.length);
    choose(row === chosen ? 0 : Math.max(1, Math.min(shards.length, row)));
  });
  const view = { host, runs: null, box, title, canvas, frame, mark, seen: false, stale: true };
  views.set(node, view);
  sight.observe(frame);
  return view;
}

function drop(node) {
  const { box, frame } = views.get(node);
  sight.unobserve(frame);
  box.remove();
  views.delete(node);
}

// -- one shard, or all -----------------------------------------------------------------------------------------

function choose(number, anew = true) {
  const slider = $("shard");
  const moved = number !== chosen || anew;
  chosen = number;
  const shard = shards[chosen - 1];
  if (Number(slider.value) !== chosen) slider.value = chosen;
  if (moved) {
    const text = shard ? `${shard.key}, ${bytes(shard.size_bytes)}, ${counted(shard.chunk_count, "chunk")}` : "all";
    say($("shard-name"), text);
    set(slider, "aria-valuetext", text);
    say($("counts-title"), `Chunks of ${shard ? shard.key : "all shards"}, by node and state`);
  }
  for (const { mark } of views.values()) {
    mark.hidden = !shard;
    if (!shard) continue;
    mark.style.top = `calc(${(100 * (chosen - 1)) / shards.length}% - 2px)`;
    mark.style.height = `calc(${100 / shards.length}% + 4px)`;
  }
  rows($("counts").tBodies[0], [...views].map(([node, view]) => {
    const counts = shard ? countsOf(view.letters, shard) : view.totals;
    return [hostCell(name(node)), ...Array.from(counts, (count) => ({ text: grouped(count), kind: "n" }))];
  }));
}

function countsOf(letters, { first_chunk: first, chunk_count: count }) {
  const counts = new Uint32Array(STATES.length);
  for (let chunk = first; chunk < first + count; chunk += 1) counts[letters[chunk]] += 1;
  return counts;
}

// -- painting --------------------------------------------------------------------------------------------------

function paintSoon() {
  if (paints || ![...views.values()].some((view) => view.stale && view.seen)) return;
  paints = requestAnimationFrame(() => {
    paints = 0;
    const colours = coloursNow();
    for (const view of views.values()) {
      if (!view.stale || !view.seen || !view.letters) continue;
      view.stale = false;
      paint(view, colours);
    }
  });
}

/** Of each state in this theme, as a pixel's four bytes. */
function coloursNow() {
  return [...document.querySelectorAll("#legend .swatch")].map((swatch) => {
    const [red, green, blue] = getComputedStyle(swatch).backgroundColor.match(/\d+/g).map(Number);
    return new Uint32Array(new Uint8Array([red, green, blue, 255]).buffer)[0];
  });
}

function paint({ canvas, letters }, colours) {
  const most = Math.max(1, ...shards.map((shard) => shard.chunk_count));
  const room = views.size === 1 ? 360 : views.size <= 4 ? 240 : views.size <= 16 ? 120 : 72;
  const row = Math.max(1, Math.min(16, Math.floor(room / Math.max(1, shards.length))));
  const tall = Math.max(12, Math.min(room, row * shards.length));
  const width = Math.max(50, Math.floor(canvas.clientWidth * devicePixelRatio));
  const height = Math.floor(tall * devicePixelRatio);
  canvas.style.height = `${tall}px`;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const line = new Uint8Array(width).fill(NO_CHUNK);
  shards.forEach((shard, index) => {
    const top = Math.floor((index * height) / shards.length);
    const next = Math.floor(((index + 1) * height) / shards.length);
    lay(line, letters, shard, (width * shard.chunk_count) / most);
    if (next === top) return; // more shards than rows of pixels: this row goes on with the next one
    const end = next - top >= GAP_PX ? next - 1 : next;
    for (let x = 0; x < width; x += 1) {
      if (line[x] === NO_CHUNK) continue;
      for (let y = top; y < end; y += 1) pixels[y * width + x] = colours[line[x]];
    }
    line.fill(NO_CHUNK);
  });
  pen.putImageData(image, 0, 0);
}

/** Lays a shard's chunks along a row of pixels, `wide` of them, over what is there: the least done stays. */
function lay(line, letters, { first_chunk: first, chunk_count: count }, wide) {
  const pixels = Math.max(1, Math.floor(wide));
  if (count >= pixels) {
    for (let x = 0; x < pixels; x += 1) {
      const end = first + Math.max(Math.floor((x * count) / pixels) + 1, Math.floor(((x + 1) * count) / pixels));
      for (let chunk = first + Math.floor((x * count) / pixels); chunk < end; chunk += 1) {
        if (letters[chunk] < line[x]) line[x] = letters[chunk];
      }
    }
    return;
  }
  for (let chunk = 0; chunk < count; chunk += 1) {
    const start = Math.floor((chunk * wide) / count);
    const next = Math.floor(((chunk + 1) * wide) / count);
    const end = next - start >= GAP_PX ? next - 1 : next;
    for (let x = start; x < end; x += 1) line[x] = Math.min(line[x], letters[first + chunk]);
  }
}
