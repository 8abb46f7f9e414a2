// Ranks with their memory, nodes with the tiers of their caches, saves with their bytes.

import { $, bytes, counted, grouped, hostCell, rows, say } from "./dom.js";

const OVER = new Set(["failed", "released"]);
const SILENT_S = 10; // a save that says nothing for so long
const ORDER = ["ready", "loading", "starting", "waiting", "lost"];

export function showRanks({ progress, ranks }) {
  const over = OVER.has(progress.state);
  const largest = Math.max(1, ...ranks.map((rank) => rank.own_bytes));
  rows($("ranks").tBodies[0], ranks.map((rank) => {
    const state = over && rank.state !== "lost" ? "ended" : rank.state;
    const part = rank.state === "ready" ? 1 : rank.total_bytes ? rank.placed_bytes / rank.total_bytes : null;
    return [
      { text: rank.rank, kind: "" }, hostCell(rank.host || "-"), rank.device, { text: state, kind: `rank-${state}` },
      rank.incarnation ? `replaced ${counted(rank.incarnation, "time")}` : "first",
      { text: bytes(rank.placed_bytes), part, kind: "" },
      { text: rank.total_bytes ? bytes(rank.total_bytes) : "-", kind: "n" },
      memoryOf(rank, over || ranks.length < 2 ? 0 : largest, over),
    ];
  }));
  const counts = ORDER.map((state) => [state, ranks.filter((rank) => rank.state === state).length]);
  const words = counts.filter(([, count]) => count).map(([state, count]) => `${count} ${state}`).join(", ");
  const sum = ranks.reduce((all, rank) => all + rank.own_bytes, 0);
  const most = ranks.length > 1 ? `, the largest ${bytes(largest)}` : "";
  const memory = sum ? `; own memory of their workers ${bytes(sum)}${most}, arenas not counted` : "";
  say($("ranks-words"), over ? "Its workers are gone." : `${counted(ranks.length, "rank")}: ${words}${memory}.`);
}

/** What a rank's process holds, beside the largest: there is no other whole that it would be a part of. */
function memoryOf({ own_bytes: own }, largest, over) {
  const there = own && !over;
  return { text: there ? bytes(own) : "-", part: there && largest ? own / largest : null, kind: "memory" };
}

export function showNodes({ nodes = [], worker_groups = [] }) {
  $("tiers").hidden = !nodes.length;
  const share = (used, limit) => (limit ? used / limit : null);
  const number = (value) => ({ text: value, kind: "n" });
  rows($("nodes").tBodies[0], nodes.map((node) => [
    hostCell(node.host),
    { text: bytes(node.used_bytes), part: share(node.used_bytes, node.arena_bytes), kind: "" },
    number(bytes(node.arena_bytes)), number(bytes(node.window_bytes)), number(grouped(node.evicted_chunks)),
    node.disk_budget_bytes
      ? { text: bytes(node.disk_used_bytes), part: share(node.disk_used_bytes, node.disk_budget_bytes), kind: "disk" }
      : { text: "none", part: null, kind: "disk" },
    number(node.disk_budget_bytes ? bytes(node.disk_budget_bytes) : "-"),
    number(grouped(node.disk_evicted_chunks)), number(grouped(node.disk_unkept_chunks)),
    number(node.leased_slots), number(node.quarantined_slots), number(`${node.heartbeat_age_s.toFixed(1)} s ago`),
  ]));
  const sum = (name) => nodes.reduce((all, node) => all + node[name], 0);
  const disk = sum("disk_budget_bytes")
    ? `, on disk ${bytes(sum("disk_used_bytes"))} of ${bytes(sum("disk_budget_bytes"))}`
    : ", no disk tier";
  say($("tiers-words"), `Verified chunks kept in arenas: ${bytes(sum("used_bytes"))}, ${bytes(sum("arena_bytes"))} at most; windows: ${bytes(sum("window_bytes"))}${disk}.`);
  say($("worker-groups"), worker_groups.length ? `Workers of ${counted(worker_groups.length, "released model")} wait for the next load.` : "");
}

export function showSaves({ saves = [] }) {
  $("saved").hidden = !saves.length;
  const number = (value) => ({ text: value, kind: "n" });
  rows($("saves").tBodies[0], saves.map(({ progress: save, silent_s: silent }) => {
    const done = save.written_bytes + save.copied_bytes + save.reused_bytes;
    const quiet = silent > SILENT_S ? `no report for ${Math.floor(silent)} s` : "";
    return [
      save.save_id, { text: save.state, kind: `save-${save.state}` }, number(save.ranks),
      { text: bytes(done), part: save.total_bytes ? done / save.total_bytes : null, kind: "" },
      number(save.total_bytes ? bytes(save.total_bytes) : "-"),
      number(bytes(save.written_bytes)), number(bytes(save.copied_bytes)), number(bytes(save.reused_bytes)),
      number(`${save.elapsed_s.toFixed(1)} s`),
      { text: save.source ? `${save.uri} from ${save.source}` : save.uri, kind: "long" },
      { text: save.message || (save.revision ? `revision ${save.revision.slice(0, 16)}` : quiet || "-"), kind: "long" },
    ];
  }));
}
