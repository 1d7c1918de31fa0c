// The rollout viewer. Every text of the run is set with textContent, never as HTML.
"use strict";

const CHUNK = 512; // tokens that are drawn at a time; the rest follows as one scrolls
const POLL = 3000; // milliseconds between looks at a run that goes on
const SCALES = {
  logprob: { title: "log-probability", low: -6, high: 0, colour: "high", turned: true },
  log_ratio: { title: "ratio", low: -0.5, high: 0.5, colour: null },
  entropy: { title: "entropy", low: 0, high: 3, colour: "heat" },
  advantage: { title: "advantage", low: -1, high: 1, colour: null },
};
const $ = (id) => document.getElementById(id);
const state = { run: null, file: "", rows: [], groups: [], group: null, by: "logprob", shown: [], asked: 0 };

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

const short = (x) => (x === null || x === undefined ? "–" : String(Number(x.toPrecision(3))));

async function get(path, query = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`);
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error);
  return value;
}

// ---- the run and its files

async function look() {
  try {
    state.run = await get("/api/run");
  } catch (error) {
    $("state").textContent = "the server does not answer";
    return;
  }
  const { name, folder, finished, files } = state.run;
  $("name").textContent = `${name} · ${folder}`;
  document.title = `${name}: rollouts`;
  $("state").textContent = finished ? "finished" : "not finished";
  const select = $("file");
  if (select.options.length !== files.length || select.options[0]?.value !== files[0]?.name) {
    select.replaceChildren(...files.map((f) => {
      const option = element("option", f.label + (f.reward === null || f.reward === undefined ? "" : `  (reward ${short(f.reward)})`));
      option.value = f.name;
      return option;
    }));
    select.value = state.file;
  }
  if (!files.length) return;
  const newest = files.findLast((f) => f.name.startsWith("step_")) ?? files.at(-1);
  const wanted = new URLSearchParams(location.hash.slice(1)).get("file");
  if (!state.file) await open(files.some((f) => f.name === wanted) ? wanted : newest.name);
  else if ($("follow").checked && state.file !== newest.name) await open(newest.name);
}

async function open(file, group) {
  state.file = file;
  $("file").value = file;
  const hash = new URLSearchParams(location.hash.slice(1));
  if (group === undefined && hash.get("file") === file) group = Number(hash.get("group"));
  await search(group);
}

function move(by) {
  const files = state.run?.files ?? [];
  const next = files[files.findIndex((f) => f.name === state.file) + by];
  if (next) open(next.name);
}

// ---- the list of groups

async function search(group) {
  const asked = ++state.asked;
  let found;
  try {
    found = await get("/api/rows", { file: state.file, q: $("q").value });
  } catch (error) {
    $("main").replaceChildren(element("p", error.message, "quiet"));
    return;
  }
  if (asked !== state.asked) return; // a later question has been put
  state.rows = found.rows;
  const sources = [...new Set(found.rows.map((r) => r.source))].sort();
  const source = $("source").value;
  $("source").replaceChildren(new Option("every source", ""), ...sources.filter(Boolean).map((s) => new Option(s, s)));
  $("source").value = sources.includes(source) ? source : "";
  $("source").hidden = sources.length < 2;
  const by = found.tokens.includes("advantage") ? found.tokens : [...found.tokens, "advantage"];
  $("by").replaceChildren(...Object.keys(SCALES).map((name) => {
    const option = new Option(SCALES[name].title + (by.includes(name) ? "" : " (not recorded)"), name);
    option.disabled = !by.includes(name);
    return option;
  }));
  if (!by.includes(state.by)) state.by = "logprob";
  $("by").value = state.by;
  const widest = Math.max(0, ...found.rows.map((r) => Math.abs(r.advantage ?? 0)));
  SCALES.advantage.high = widest || 1;
  SCALES.advantage.low = -SCALES.advantage.high;
  filter(group);
}

function kept(row) {
  const least = $("least").value, most = $("most").value, only = $("only").value;
  if (least !== "" && !(row.reward !== null && row.reward >= Number(least))) return false;
  if (most !== "" && !(row.reward !== null && row.reward <= Number(most))) return false;
  if ($("source").value && row.source !== $("source").value) return false;
  return { "": true, trained: row.trained, untrained: !row.trained, length: row.finish_reason === "length", failed: row.reward === null }[only];
}

function filter(group) {
  const groups = new Map();
  for (const row of state.rows) if (kept(row)) groups.set(row.group_id, [...(groups.get(row.group_id) ?? []), row]);
  const rewards = (rows) => rows.map((r) => r.reward).filter((r) => r !== null);
  const mean = (rows) => { const r = rewards(rows); return r.length ? r.reduce((a, b) => a + b) / r.length : -Infinity; };
  const keys = {
    high: (rows) => -mean(rows), low: mean, long: (rows) => -Math.max(...rows.map((r) => r.length)),
    spread: (rows) => { const r = rewards(rows); return r.length ? Math.min(...r) - Math.max(...r) : 0; },
  };
  state.groups = [...groups.values()];
  const key = keys[$("sort").value];
  if (key) state.groups.sort((a, b) => key(a) - key(b));
  const all = state.rows.map((r) => r.reward ?? 0), low = Math.min(0, ...all), high = Math.max(low + 1e-9, ...all);
  $("groups").replaceChildren(...state.groups.map((rows) => {
    const button = element("button", undefined, "group");
    button.dataset.group = rows[0].group_id;
    button.append(element("b", rows[0].task_id), element("span", `reward ${short(mean(rows) === -Infinity ? null : mean(rows))} · ${rows.length} rollouts`, "quiet"));
    const bars = element("div", undefined, "bars");
    for (const row of rows.slice(0, 64)) {
      const bar = element("i", undefined, row.reward === null ? "failed" : row.trained ? "" : "unused");
      if (row.reward !== null) bar.style.height = `${(100 * (row.reward - low)) / (high - low)}%`;
      bars.append(bar);
    }
    button.append(bars);
    button.onclick = () => choose(rows[0].group_id);
    return button;
  }));
  const count = state.groups.reduce((sum, rows) => sum + rows.length, 0);
  $("count").textContent = `${count} of ${state.rows.length} rollouts, ${state.groups.length} groups`;
  const wanted = state.groups.some((rows) => rows[0].group_id === group) ? group : state.groups[0]?.[0].group_id;
  if (wanted === undefined) $("main").replaceChildren(element("p", "No rollout fits.", "quiet"));
  else choose(wanted);
}

// ---- one group, its rollouts side by side

async function choose(group) {
  state.group = group;
  for (const button of $("groups").children) button.setAttribute("aria-current", String(Number(button.dataset.group) === group));
  document.querySelector('.group[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
  history.replaceState(null, "", `#${new URLSearchParams({ file: state.file, group })}`);
  const rows = state.groups.find((found) => found[0].group_id === group).slice(0, 64);
  const file = state.file;
  let found;
  try {
    found = await get("/api/rollouts", { file, rows: rows.map((r) => r.row).join() });
  } catch (error) {
    $("main").replaceChildren(element("p", error.message, "quiet"));
    return;
  }
  if (file !== state.file || group !== state.group) return;
  state.shown = found.map((rollout, i) => ({ ...rows[i], ...rollout }));
  draw();
}

function heading(r) {
  const line = element("h2");
  const fact = (name, value, bad) => { line.append(`${name} `, element("b", value, bad ? "bad" : ""), "  "); };
  fact("#", String(r.index));
  fact("reward", short(r.reward), r.reward === null);
  for (const [name, value] of Object.entries(r.reward_parts)) if (name !== "reward") fact(name, short(value));
  if (r.reward !== r.outcome && r.outcome !== null) fact("outcome", short(r.outcome));
  for (const [name, value] of Object.entries(r.measures)) fact(name, short(value));
  if (r.extracted) fact("extracted", r.extracted.slice(0, 80));
  if (r.advantage !== null) fact("advantage", short(r.advantage));
  fact("tokens", String(r.length));
  fact("finish", r.finish_reason ?? "unknown", r.finish_reason === "length");
  if (!r.trained) line.append("not trained  ");
  if (r.versions.length) fact("version", r.versions.map(([v]) => v).join(", "));
  if (r.error) line.append(element("span", r.error, "bad"));
  return line;
}

function value(r, by, i) {
  if (by === "advantage" && !r.tokens.advantage) return r.advantage;
  return r.tokens[by]?.[i] ?? null;
}

function colour(by, x) {
  if (x === null) return "";
  const scale = SCALES[by];
  if (scale.colour === null) {
    const share = Math.min(1, Math.abs(x) / scale.high);
    return `rgb(var(${x > 0 ? "--low" : "--high"}) / ${(0.75 * share).toFixed(2)})`;
  }
  const share = Math.min(1, Math.max(0, (x - scale.low) / (scale.high - scale.low)));
  return `rgb(var(--${scale.colour}) / ${(0.75 * (scale.turned ? 1 - share : share)).toFixed(2)})`;
}

function tokens(r) {
  const box = element("pre");
  box.dataset.row = r.row;
  if (!r.tokens.text) { // no tokenizer.json
    box.textContent = r.completion;
    return box;
  }
  let drawn = 0;
  const more = () => {
    const end = Math.min(r.tokens.text.length, drawn + CHUNK), piece = document.createDocumentFragment();
    for (; drawn < end; drawn++) {
      const span = element("span", r.tokens.text[drawn] || "\u2025");
      span.dataset.i = drawn;
      if (r.tokens.sampled[drawn]) span.style.backgroundColor = colour(state.by, value(r, state.by, drawn));
      else span.className = "given";
      piece.append(span);
    }
    box.append(piece);
  };
  more();
  // as far as one sees, and a screen more
  box.onscroll = () => { while (drawn < r.tokens.text.length && box.scrollTop + 2 * box.clientHeight > box.scrollHeight) more(); };
  return box;
}

function draw() {
  const scale = SCALES[state.by], ratio = state.by === "log_ratio";
  const end = (x) => (ratio ? short(Math.exp(x)) : short(x));
  $("low").textContent = (state.by === "logprob" ? "≤ " : "") + end(scale.low);
  $("high").textContent = (state.by === "entropy" ? "≥ " : "") + end(scale.high);
  const stops = [0, 0.25, 0.5, 0.75, 1].map((s) => colour(state.by, scale.low + s * (scale.high - scale.low)) || "transparent");
  $("bar").style.background = `linear-gradient(to right, ${stops.join()})`;
  if (!state.shown.length) return;
  const first = state.shown[0], task = element("div", undefined, "task");
  const text = (name, content) => {
    const card = element("div", undefined, "card"), title = element("h2");
    title.append(element("b", name));
    card.append(title, element("pre", content || "(empty)"));
    return card;
  };
  task.append(text(`prompt of ${first.task_id}${first.source ? ` (${first.source})` : ""}`, first.prompt), text("answer", first.answer));
  const columns = element("div", undefined, "columns");
  for (const r of state.shown) {
    const card = element("article", undefined, "card");
    card.append(heading(r), tokens(r));
    columns.append(card);
  }
  $("main").replaceChildren(task, columns);
  for (const box of columns.querySelectorAll("pre")) box.onscroll?.();
}

// ---- what the pointer is on

function tip(event) {
  const span = event.target.closest?.("pre span[data-i]"), box = $("tip");
  box.hidden = !span;
  if (!span) return;
  const r = state.shown.find((shown) => shown.row === Number(span.parentNode.dataset.row)), i = Number(span.dataset.i), t = r.tokens;
  const lines = [`${JSON.stringify(t.text[i])}   id ${t.id[i]}   token ${i + 1} of ${t.id.length}`];
  if (t.sampled[i]) {
    const log = value(r, "logprob", i), moved = value(r, "log_ratio", i);
    if (log !== null) lines.push(`log-probability ${short(log)}   probability ${short(Math.exp(log))}`);
    if (moved !== null) lines.push(`ratio ${short(Math.exp(moved))}`);
    if (value(r, "entropy", i) !== null) lines.push(`entropy ${short(value(r, "entropy", i))}`);
    if (value(r, "advantage", i) !== null) lines.push(`advantage ${short(value(r, "advantage", i))}`);
  } else lines.push("not sampled");
  box.textContent = lines.join("\n");
  const { left, bottom, top } = span.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${bottom + box.offsetHeight + 8 < innerHeight ? bottom + 4 : top - box.offsetHeight - 4}px`;
}

function key(event) {
  if (event.target.matches?.("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], line = { ArrowUp: -1, ArrowDown: 1, k: -1, j: 1 }[event.key];
  if (step) move(step);
  else if (line) {
    const next = state.groups[state.groups.findIndex((rows) => rows[0].group_id === state.group) + line];
    if (next) choose(next[0].group_id);
  } else return;
  event.preventDefault();
}

let typed;
$("q").oninput = () => { clearTimeout(typed); typed = setTimeout(() => search(state.group), 200); };
for (const id of ["least", "most", "source", "only", "sort"]) $(id).oninput = () => filter(state.group);
$("file").onchange = () => { $("follow").checked = false; open($("file").value); };
$("by").onchange = () => { state.by = $("by").value; draw(); };
$("before").onclick = () => move(-1);
$("after").onclick = () => move(1);
$("follow").onchange = look;
document.addEventListener("mouseover", tip);
document.addEventListener("keydown", key);
look();
setInterval(() => { if (!state.run?.finished || !state.run.files.length) look(); }, POLL);
