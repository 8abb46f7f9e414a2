// The page: asks the API once a second, draws what it says. No library, no other server.

import { Later, Refused, ask, follow, hasToken, useToken } from "./api.js";
import * as chunks from "./chunks.js";
import { $, announce, bytes, counted, element, say, set } from "./dom.js";
import { showNodes, showRanks, showSaves } from "./ranks.js";
import { moved, remember, showRate } from "./rate.js";

const LOOK_MS = 1000;
const IDLE_LOOKS = 5; // the chunks of a model at which nothing happens are asked for once in so many looks
const KEPT_EVENTS = 1000;
const FAILURES = new Set(["rank_lost", "moved", "peer_left_out", "retries", "corrupt"]);
const BAD_STATES = new Set(["failed", "degraded"]);
const OVER = new Set(["failed", "released"]);
const THEME = "longshore-theme";

const state = {
  model: "", // that is shown
  models: [],
  coordinator: "",
  stream: null, // of events
  followed: "", // the model whose they are
  states: new Map(), // by model
  looks: 0, // at the chunks since their model came to this state
  lookedAt: "",
  heard: "", // when the cluster last answered
};

// -- looking: one loop, however often it is woken ----------------------------------------------------------------

let looking = false;
let timer = 0;

async function look() {
  clearTimeout(timer);
  if (looking) return; // the look that goes on asks for the next
  looking = true;
  let pause_ms = document.hidden ? 5 * LOOK_MS : LOOK_MS;
  try {
    show(await (await ask("v1/cluster")).json());
    const asked = !$("door").hidden;
    $("door").hidden = true;
    $("view").hidden = false;
    $("trouble").hidden = true;
    if (asked) $("main").focus();
    state.heard = new Date().toLocaleTimeString();
    await lookAtChunks();
  } catch (error) {
    if (error instanceof Refused) refused(error);
    else trouble(error);
    if (error instanceof Later) pause_ms = 1000 * error.seconds;
  } finally {
    looking = false;
    // A token that was refused will be refused again: whoever types the next one wakes us.
    if ($("door").hidden) timer = setTimeout(look, pause_ms);
  }
}

function refused(error) {
  stopFollowing();
  const first = $("door").hidden;
  $("view").hidden = true;
  $("trouble").hidden = true;
  $("door").hidden = false;
  say($("cluster"), "a token is needed");
  say($("door-error"), hasToken() ? error.message : "");
  if (first) $("token").focus();
}

function trouble(error) {
  const old = state.heard ? ` What is shown is of ${state.heard}.` : "";
  say($("trouble"), `The cluster cannot be asked: ${error.message}.${old}`);
  $("trouble").hidden = false;
  if (!state.heard) say($("cluster"), "not reached");
}

async function lookAtChunks() {
  const model = current();
  if (state.lookedAt !== model?.progress.state) state.looks = 0;
  state.lookedAt = model?.progress.state;
  state.looks += 1;
  if (OVER.has(model?.progress.state)) chunks.over(model.progress.state);
  if (!model || OVER.has(model.progress.state) || ["planning", "waiting"].includes(model.progress.state)) return;
  if (model.progress.state === "ready" && state.looks % IDLE_LOOKS !== 1) return;
  const asked = state.model;
  try {
    const map = await (await ask(`v1/loads/${encodeURIComponent(asked)}/chunks`)).json();
    if (asked === state.model) chunks.show(map);
  } catch (error) {
    if (error instanceof Refused || error instanceof Later) throw error;
    if (asked === state.model) chunks.note(error.message);
  }
}

function stopFollowing() {
  state.stream?.abort();
  state.followed = "";
}

function followCurrent() {
  stopFollowing();
  const abort = new AbortController();
  state.stream = abort;
  state.followed = state.model;
  $("events").replaceChildren();
  sayEvents();
  follow(state.model, abort.signal, addEvent).catch(() => { if (state.stream === abort) state.followed = ""; });
}

// -- showing -------------------------------------------------------------------------------------------------------

function current() {
  return state.models.find((model) => model.progress.model_id === state.model);
}

function show(cluster) {
  state.models = [...(cluster.models ?? []), ...(cluster.ended ?? [])];
  const nodes = cluster.nodes ?? [];
  say($("cluster"), cluster.version
    ? `version ${cluster.version}, ${counted(nodes.length, "node")}, ${counted(cluster.models.length, "model")}`
    : "no coordinator runs yet: the first load starts one");
  $("no-models").hidden = state.models.length > 0;
  remember(state.models, performance.now() / 1000);
  tellChanges(cluster.saves ?? []);
  if (!current()) choose(state.models.at(-1)?.progress.model_id ?? "");
  else {
    showModels();
    showLoad(current());
    // Another coordinator numbers its events anew; and after a refused token nobody follows.
    if (state.followed !== state.model || state.coordinator !== cluster.coordinator_incarnation) followCurrent();
  }
  state.coordinator = cluster.coordinator_incarnation;
  showNodes(cluster);
  showSaves(cluster);
}

/** What somebody who listens wants to be told, and nothing that changes every second. */
function tellChanges(saves) {
  for (const { progress } of [...state.models, ...saves]) {
    const id = progress.model_id ?? progress.save_id;
    const before = state.states.get(id);
    if (before && before !== progress.state) announce(`${id} is ${progress.state}`);
    state.states.set(id, progress.state);
  }
}

function showModels() {
  const list = $("models");
  const wanted = state.models.map((model) => model.progress.model_id);
  for (const item of [...list.children]) if (!wanted.includes(item.dataset.id)) item.remove();
  for (const { progress } of state.models) {
    const item = [...list.children].find((child) => child.dataset.id === progress.model_id) ?? addModel(progress.model_id);
    const button = item.firstElementChild;
    set(button, "aria-current", String(progress.model_id === state.model));
    say(button.lastElementChild, progress.state === "loading" ? `loading ${percentOf(progress)} %` : progress.state);
  }
}

function addModel(id) {
  const item = element("li");
  item.dataset.id = id;
  const button = element("button", undefined, { type: "button" });
  button.append(element("strong", id), element("br"), element("span"));
  button.addEventListener("click", () => { choose(id); look(); });
  item.append(button);
  $("models").append(item);
  return item;
}

function percentOf(progress) {
  if (progress.state === "ready") return 100;
  return progress.total_bytes ? Math.min(100, Math.floor((100 * progress.placed_bytes) / progress.total_bytes)) : 0;
}

function choose(model) {
  state.model = model;
  state.lookedAt = "";
  chunks.clear();
  forgetPlan();
  $("load").hidden = !current();
  showModels();
  if (!current()) {
    stopFollowing();
    return;
  }
  showLoad(current());
  followCurrent();
}

function showLoad(model) {
  const { progress } = model;
  say($("load-title"), progress.model_id);
  say($("uri"), progress.uri);
  say($("state"), progress.state);
  set($("state"), "class", `badge ${progress.state}`);
  say($("message"), progress.message || model.taken || "");
  $("error").hidden = !model.error;
  say($("error"), model.error);
  const percent = percentOf(progress);
  set($("placed"), "aria-valuenow", percent);
  $("placed").firstElementChild.style.width = `${percent}%`;
  showUpdate(model);
  showStats({
    "placed": moved(progress),
    "ranks ready": `${progress.ranks_ready} of ${progress.ranks_total}`,
    "time": `${progress.elapsed_s.toFixed(1)} s`,
    "device": model.device,
    "held by": `${counted(model.holders, "client")}${model.keep ? ", kept" : ""}`,
    "revision": model.revision.slice(0, 16) || "-",
    "signed by": model.signed_by || "-",
  });
  showRate(model);
  showRanks(model);
}

function showUpdate({ updating }) {
  $("update").hidden = !updating;
  if (!updating) return;
  const percent = updating.total_bytes ? Math.min(100, Math.floor((100 * updating.read_bytes) / updating.total_bytes)) : 0;
  say($("update-words"), `Update, ${updating.phase}: ${updating.ranks_done} of ${counted(updating.ranks_total, "rank")}, `
    + `${bytes(updating.read_bytes)} of ${bytes(updating.total_bytes)} read`);
  set($("update-read"), "aria-valuenow", percent);
  $("update-read").firstElementChild.style.width = `${percent}%`;
}

function showStats(stats) {
  const list = $("stats");
  for (const name of list.childElementCount ? [] : Object.keys(stats)) {
    const box = element("div");
    box.append(element("dt", name), element("dd"));
    list.append(box);
  }
  Object.values(stats).forEach((value, index) => say(list.children[index].lastElementChild, value));
}

// -- events --------------------------------------------------------------------------------------------------------

function addEvent(event) {
  const list = $("events");
  const failed = FAILURES.has(event.kind) || BAD_STATES.has(event.details?.state);
  const at = new Date(event.at_s * 1000);
  const where = event.rank === null ? "" : `rank ${event.rank}${event.host ? ` on ${event.host}` : ""}: `;
  const item = element("li", undefined, failed ? { class: "failure" } : {});
  item.append(element("time", at.toLocaleTimeString(), { datetime: at.toISOString() }), `${where}${event.message}`);
  const log = $("log");
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 20;
  list.append(item);
  while (list.children.length > KEPT_EVENTS) list.firstElementChild.remove();
  if (atEnd) log.scrollTop = log.scrollHeight;
  if (failed && Date.now() - at < 10_000) announce(`${where}${event.message}`);
  sayEvents();
}

function sayEvents() {
  const count = $("events").children.length;
  const failures = $("events").getElementsByClassName("failure").length;
  say($("events-words"), count ? `${counted(count, "event")}, ${counted(failures, "failure")} among them.` : "None yet.");
}

// -- the plan ------------------------------------------------------------------------------------------------------

function forgetPlan() {
  if ($("plan").src) URL.revokeObjectURL($("plan").src);
  $("plan").removeAttribute("src");
  $("plan-frame").hidden = true;
  $("save-plan").hidden = true;
  say($("plan-words"), "");
}

async function showPlan() {
  const model = state.model;
  forgetPlan();
  say($("plan-words"), "drawing…");
  try {
    const text = await (await ask(`v1/models/${encodeURIComponent(model)}/plan.svg`)).text();
    if (model !== state.model) return;
    const words = new DOMParser().parseFromString(text, "image/svg+xml").querySelector("desc")?.textContent ?? "";
    const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    Object.assign($("plan"), { src: url, alt: `Plan of ${model}. ${words}` });
    Object.assign($("save-plan"), { href: url, hidden: false });
    $("plan-frame").hidden = false;
    say($("plan-words"), words);
  } catch (error) {
    if (model === state.model) say($("plan-words"), error.message);
  }
}

// -- the beginning -------------------------------------------------------------------------------------------------

function applyTheme() {
  if ($("theme").value) document.documentElement.dataset.theme = $("theme").value;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem(THEME, $("theme").value);
  chunks.repaint();
}

$("theme").value = localStorage.getItem(THEME) ?? "";
$("theme").addEventListener("change", applyTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", chunks.repaint);
$("only-failures").addEventListener("change", ({ target }) => $("events").classList.toggle("failures", target.checked));
$("show-plan").addEventListener("click", showPlan);
$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken($("token").value);
  $("token").value = "";
  look();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && $("door").hidden) look(); });
chunks.begin();
applyTheme();
look();
