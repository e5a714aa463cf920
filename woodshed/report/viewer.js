// The rollout browser of a report. Everything it shows was written by a policy, a repository or a log: text enters the
// page as text nodes only, never as markup. Formats are documented in transcripts.py and words.py.
"use strict";

const $ = (id) => document.getElementById(id);
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u0600-\u0605\u061c\u06dd\u070f\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\u{1d173}-\u{1d17a}\u{e0000}-\u{e007f}\u{e0100}-\u{e01ef}]/gu;

/** Text whose control and direction-changing characters can be seen instead of obeyed. */
function visible(text) {
  return String(text).replace(HIDDEN, (c) => {
    const code = c.codePointAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : "\\u" + code.toString(16).padStart(4, "0");
  });
}

/** An element with a class and children; strings become text nodes. */
function make(tag, name, ...children) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  node.append(...children.map((c) => (c instanceof Node ? c : visible(c))));
  return node;
}

async function inflate(id) {
  const text = $(id).textContent.trim();
  const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const decode = (bytes) => new TextDecoder().decode(bytes);
const readJson = async (id) => JSON.parse(decode(await inflate(id)));

// -- what is known: one row per rollout --------------------------------------------------------------------------------

let page = { runs: [], instructions: {} };
let rows = [];
let shown = []; // indices into rows, as filtered
let open = null; // { row, turns, nodes, at }
let wanted = null; // index of the row that is open, or opening
const archives = new Map();

async function loadRows() {
  page = await readJson("rows");
  rows = page.rows.map((values, index) => {
    const row = { index };
    page.columns.forEach((name, i) => (row[name] = values[i]));
    row.faulty = Object.values(row.faults).reduce((a, b) => a + b, 0);
    const said = [row.id, row.result, row.ended, page.runs[row.run], ...Object.keys(row.faults), ...row.hints];
    row.text = [...said, ...row.flags.map((f) => f[0])].join(" ").toLowerCase();
    return row;
  });
}

function archive(number) {
  if (!archives.has(number)) archives.set(number, $("a" + number) ? readJson("a" + number) : Promise.resolve(null));
  return archives.get(number);
}

// -- search ------------------------------------------------------------------------------------------------------------

/** Words of all transcripts and the rollouts that hold them. */
class Words {
  constructor(text, bytes) {
    this.text = "\n" + text;
    this.starts = [];
    for (let at = 0; at >= 0; at = this.text.indexOf("\n", at + 1)) this.starts.push(at);
    const count = text ? this.starts.length : 0;
    const plane = (from, n, i) => bytes[from + i] + 256 * (bytes[from + n + i] + 256 * (bytes[from + 2 * n + i] + 256 * bytes[from + 3 * n + i]));
    this.counts = Uint32Array.from({ length: count }, (_, i) => plane(0, count, i));
    const total = (bytes.length - 4 * count) / 4;
    this.gaps = Uint32Array.from({ length: total }, (_, i) => plane(4 * count, total, i));
    this.offsets = new Uint32Array(count + 1);
    for (let i = 0; i < count; i++) this.offsets[i + 1] = this.offsets[i] + this.counts[i];
  }

  /** A flag per rollout: whether it holds a word that contains `part`. */
  holding(part, numRows) {
    const found = new Uint8Array(numRows);
    for (let at = this.text.indexOf(part); at >= 0; ) {
      let low = 0, high = this.starts.length;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (this.starts[middle] <= at) low = middle; else high = middle;
      }
      let number = 0;
      for (let i = this.offsets[low]; i < this.offsets[low + 1]; i++) found[(number += this.gaps[i])] = 1;
      at = this.text.indexOf(part, this.starts[low + 1] ?? this.text.length);
    }
    return found;
  }
}

let words = null;

const IS = {
  solved: (r) => r.result === "solved",
  partly: (r) => r.result === "partly",
  failed: (r) => r.result === "failed",
  void: (r) => r.result === "void",
  flagged: (r) => r.flags.length > 0 || r.integrity.length > 0,
  hinted: (r) => r.hints.length > 0,
  faulty: (r) => r.faulty > 0,
  targeted: (r) => r.targeted > 0,
};
const HAS = { hint: "hinted", hints: "hinted", flag: "flagged", fault: "faulty", target: "targeted" };
const COMPARE = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "=": (a, b) => a === b };

/** A test of a number: "0.5", ">0.5", "<=3". Undefined for anything else. */
function numeric(name, value) {
  const [, sign, number] = value.match(/^(<=|>=|<|>|=)?(\d*\.?\d+)$/) ?? [];
  return number === undefined ? undefined : (r) => r[name] !== null && COMPARE[sign ?? "="](r[name], Number(number));
}

// Each gives a test on rows, or undefined where the value means nothing to it.
const KEYS = {
  is: (v) => IS[v],
  has: (v) => IS[HAS[v] ?? v],
  reward: (v) => numeric("reward", v),
  turns: (v) => numeric("turns", v),
  tokens: (v) => numeric("tokens", v),
  run: (v) => (r) => page.runs[r.run].toLowerCase().includes(v),
  phase: (v) => (r) => r.phase.toLowerCase() === v,
  step: (v) => (r) => String(r.step) === v,
  task: (v) => (r) => r.task.toLowerCase().includes(v),
  fault: (v) => (r) => Object.keys(r.faults).some((k) => k.toLowerCase().includes(v)),
  hint: (v) => (r) => r.hints.some((k) => k.toLowerCase().includes(v)),
  flag: (v) => (r) => r.flags.some((f) => f[0].toLowerCase().includes(v)),
  ended: (v) => (r) => r.ended.includes(v),
};
const KNOWN = { is: () => Object.keys(IS), has: () => Object.keys(HAS), reward: () => ["0.5", ">0.5", "<=0.5"], turns: () => ["3", ">3"], tokens: () => ["900", ">900"] };

/** A query taken apart: tests on rows, the text to be found in transcripts, and what no filter knows. */
function parse(query) {
  const made = { tests: [], texts: [], unknown: [] };
  for (const part of query.toLowerCase().split(/\s+/).filter(Boolean)) {
    const [, key, value] = part.match(/^([a-z]+):(.*)$/) ?? [];
    if (key in KEYS) {
      const test = value ? KEYS[key](value) : undefined;
      if (test) made.tests.push(test);
      else if (value) made.unknown.push(`${part}: ${key}: takes ${KNOWN[key]().join(", ")}`);
      if (value && !test) made.tests.push(() => false);
      continue;
    }
    if (key && value) made.unknown.push(`${key}: is no filter, so ${part} is searched as text; filters are ${Object.keys(KEYS).join(", ")}`);
    made.texts.push(part);
    const masks = words ? (part.match(/[a-z0-9_]{3,}/g) ?? []).map((word) => words.holding(word, rows.length)) : [];
    made.tests.push((r) => r.text.includes(part) || (masks.length > 0 && masks.every((mask) => mask[r.index])));
  }
  return made;
}

/** Rows by a column, those without a value last; "-reward" has the largest first. */
function ordered(list, by) {
  const name = by.replace("-", ""), sign = by.startsWith("-") ? -1 : 1;
  if (!name) return list;
  return list.toSorted((a, b) => (a[name] === null) - (b[name] === null) || sign * (a[name] - b[name]) || a.index - b.index);
}

function search() {
  const chips = [...document.querySelectorAll(".chips button[aria-pressed=true]")].map((b) => IS[b.value]);
  const query = parse($("query").value);
  const asked = [...query.tests, ...chips];
  for (const name of ["phase", "run"]) {
    const value = $("pick-" + name)?.value;
    if (value) asked.push((r) => String(r[name]) === value);
  }
  shown = ordered(rows.filter((row) => asked.every((test) => test(row))), $("order").value).map((row) => row.index);
  $("count").replaceChildren(`${shown.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rollouts`);
  for (const said of query.unknown) $("count").append(make("span", "bad unknown", said));
  $("list").scrollTop = 0;
  drawList();
  markFound();
}

/** Mark the text of the query in the open transcript; return the first place. Marks need no change to the text. */
function markFound() {
  const texts = parse($("query").value).texts;
  const found = [];
  if (texts.length && globalThis.Highlight) {
    const walker = document.createTreeWalker($("transcript"), NodeFilter.SHOW_TEXT), nodes = [], starts = [];
    let whole = "";
    while (walker.nextNode()) {
      nodes.push(walker.currentNode);
      starts.push(whole.length);
      whole += walker.currentNode.data.toLowerCase();
    }
    const place = (at) => { const n = starts.findLastIndex((start) => start <= at); return [nodes[n], Math.min(at - starts[n], nodes[n].length)]; };
    for (const text of texts)
      for (let at = whole.indexOf(text); at >= 0 && found.length < MOST_MARKS; at = whole.indexOf(text, at + text.length)) {
        const range = new Range(), [last, end] = place(at + text.length - 1);
        range.setStart(...place(at));
        range.setEnd(last, Math.min(end + 1, last.length));
        found.push(range);
      }
  }
  if (globalThis.Highlight) CSS.highlights.set("found", new Highlight(...found));
  return found[0]?.startContainer.parentElement;
}

const MOST_MARKS = 2000;

// -- the list: only the rows in view exist -----------------------------------------------------------------------------

const ROW_HEIGHT = 46;
const SIGNS = { solved: "\u2713", partly: "\u25d0", failed: "\u2717", void: "\u2013", "not judged": "?" };

function drawList() {
  const list = $("list");
  const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 4);
  const last = Math.min(shown.length, first + Math.ceil(list.clientHeight / ROW_HEIGHT) + 8);
  const drawn = [];
  for (let i = first; i < last; i++) drawn.push(drawRow(rows[shown[i]], i));
  $("rows-shown").style.height = shown.length * ROW_HEIGHT + "px";
  $("rows-shown").replaceChildren(...drawn);
  const current = open && drawn.find((node) => node.id === "row-" + open.row.index);
  if (current) list.setAttribute("aria-activedescendant", current.id);
  else list.removeAttribute("aria-activedescendant");
}

function drawRow(row, position) {
  const marks = [];
  if (row.faulty) marks.push(make("span", "bad", `${row.faulty} faulty`));
  if (row.hints.length) marks.push(make("span", "hinted", `${row.hints.length} hint${row.hints.length > 1 ? "s" : ""}`));
  if (IS.flagged(row)) marks.push(make("span", "flagged", "\u2691 flagged"));
  const sign = make("span", "sign " + (row.result === "solved" ? "good" : "quiet"), SIGNS[row.result] ?? "?");
  sign.title = row.result;
  const where = page.runs.length > 1 ? page.runs[row.run] + " " : "";
  const share = row.result === "partly" ? `, reward ${row.reward.toFixed(2)}` : "";
  const small = make("small", "", `${where}${row.phase} ${row.step} #${row.attempt}, ${row.turns} turns${share} `, ...marks.flatMap((m) => [m, " "]));
  const node = make("div", "row", sign, make("span", "name", row.task), small);
  node.id = "row-" + row.index;
  node.role = "option";
  node.style.top = position * ROW_HEIGHT + "px";
  node.ariaSelected = String(open?.row.index === row.index);
  node.addEventListener("click", () => show(row.index));
  return node;
}

function revealRow(index) {
  const position = shown.indexOf(index);
  const list = $("list");
  const top = position * ROW_HEIGHT;
  if (position >= 0 && (top < list.scrollTop || top + ROW_HEIGHT > list.scrollTop + list.clientHeight))
    list.scrollTop = top - list.clientHeight / 3;
  drawList();
}

// -- one transcript ----------------------------------------------------------------------------------------------------

/** Open a rollout; `at` picks a turn: a number, or a test on packed turns. */
async function show(index, at = 0) {
  const row = rows[index];
  wanted = index;
  const found = await archive(row.archive);
  if (wanted !== index) return; // somebody moved on meanwhile
  const packed = found?.r[row.archive_index];
  open = { row, at: -1, nodes: [], turns: packed?.t ?? [] };
  const nodes = [drawHead(row, packed, found?.s)];
  if (!packed) nodes.push(make("p", "note", "This page was full; this transcript stands in rollouts.jsonl: woodshed view shows it."));
  open.turns.forEach((turn, number) => open.nodes.push(drawTurn(turn, number, found.s, row)));
  nodes.push(...open.nodes);
  if (packed) nodes.push(...drawEnd(row, packed, found.s));
  $("transcript").replaceChildren(...nodes);
  $("transcript").scrollTop = 0;
  colour();
  const place = markFound()?.closest(".turn");
  if (at === atText) at = Math.max(open.nodes.indexOf(place), 0);
  revealRow(index);
  history.replaceState(null, "", `#r/${row.run}/${encodeURIComponent(row.id)}`);
  const turn = typeof at === "number" ? at : open.turns.findIndex(at);
  if (turn > 0) return void go(turn);
  mark(0);
  if (matchMedia("(max-width: 60rem)").matches) $("transcript").scrollIntoView();
  else bring();
}

function drawHead(row, packed, texts) {
  const result = make("b", row.result === "solved" ? "good" : "", `${SIGNS[row.result]} ${row.result}`);
  const facts = [result, row.reward === null ? "" : `, reward ${row.reward.toFixed(2)}`, `, ${row.ended} after ${row.turns} turns, ${row.tokens} tokens, ${row.seconds.toFixed(1)} s`];
  const head = make("header", "", make("h3", "", row.id), make("p", "quiet", ...facts));
  for (const [rule, turn, quote, confidence] of row.flags) {
    const link = make("button", "link", `turn ${turn}`);
    link.addEventListener("click", () => go(turn));
    head.append(make("p", "note", make("b", "", `\u2691 ${rule} `), link, ` (${Math.round(100 * confidence)}%): `, make("q", "", quote)));
  }
  for (const check of row.integrity) head.append(make("p", "note", make("b", "", "\u2691 integrity: "), check));
  const instruction = page.instructions[row.task_id];
  if (instruction) head.append(fold("Task", make("pre", "", instruction)));
  return head;
}

function fold(title, ...inside) {
  const node = make("details", "", make("summary", "", title), ...inside);
  return node;
}

const value = (c) => ((c.charCodeAt(0) - 35) / 20) ** 2; // the inverse of transcripts.level
const mean = (values) => values.reduce((a, b) => a + b, 0) / Math.max(values.length, 1);

function drawTurn(turn, number, texts, row) {
  const node = make("section", "turn" + (turn.e ? " faulty" : "") + (turn.h ? " hinted" : ""));
  const flags = row.flags.filter((flag) => flag[1] === number);
  const facts = [`${(turn.l ?? "").length} tokens`];
  if (turn.l) facts.push(`mean log-prob ${(-mean([...turn.l].map(value))).toFixed(2)}`);
  facts.push(`policy ${turn.v}`, `${turn.s[0].toFixed(1)} s sampling, ${turn.s[1].toFixed(1)} s tools`);
  if (turn.p) facts.push(`planted ${turn.p}`);
  if (turn.x) facts.push("cut off");
  if (turn.b) node.append(make("p", "segment", turn.b));
  const fault = turn.e ? [make("span", "bad", `\u26a0 ${turn.e}`), ", "] : [];
  node.append(make("p", "quiet head", make("b", "", `turn ${number} `), ...fault, facts.join(", ")));
  const body = make("div", "body", drawMessage(turn, texts[turn.m]));
  for (const [path, old, made] of turn.c ?? []) body.append(drawEdit(path, texts[old], texts[made]));
  for (const [text, error, seconds] of turn.o ?? []) {
    const seen = make("pre", "seen" + (error ? " error" : ""), texts[text]);
    seen.title = `${error || "ok"}, ${seconds} s`;
    body.append(seen);
  }
  const beside = make("aside", "");
  for (const [detector, text] of turn.h ?? []) beside.append(make("div", "hint", make("b", "", detector), texts[text]));
  if (turn.q) beside.append(drawLesson(turn));
  for (const [rule, , quote] of flags) beside.append(make("div", "flag", make("b", "", `\u2691 ${rule}`), quote));
  node.append(body);
  if (beside.childElementCount) {
    node.classList.add("beside");
    node.append(beside);
  }
  node.addEventListener("click", () => mark(number));
  return node;
}

/** The message, a span per token where the pieces are known. */
function drawMessage(turn, text) {
  const pre = make("pre", "said");
  if (!turn.n || !turn.l) {
    pre.append(visible(text));
    return pre;
  }
  let at = 0;
  [...turn.n].forEach((c, i) => {
    const length = c.codePointAt(0) - 35;
    const token = make("span", "token", length ? text.slice(at, at + length) : "");
    at += length;
    token.p = turn.l[i] === undefined ? null : -value(turn.l[i]);
    if (turn.q && turn.q[i] !== undefined) [token.q, token.w, token.g] = [-value(turn.q[i]), -value(turn.w[i]), value(turn.g[i])];
    if (length) pre.append(token);
  });
  pre.addEventListener("pointerover", (event) => tell(event.target));
  pre.addEventListener("click", (event) => tell(event.target));
  return pre;
}

function drawLesson(turn) {
  const [student, teacher, divergence] = [turn.q, turn.w, turn.g].map((side) => [...side].map(value));
  const gain = student.reduce((a, b) => a + b, 0) - teacher.reduce((a, b) => a + b, 0);
  const rows = [
    ["log-prob of the turn", (-student.reduce((a, b) => a + b, 0)).toFixed(2)],
    ["after the hint", (-teacher.reduce((a, b) => a + b, 0)).toFixed(2)],
    ["hint gain", `${gain >= 0 ? "+" : ""}${gain.toFixed(2)} nats`],
    ["mean divergence", `${mean(divergence).toFixed(3)} nats a token`],
  ];
  const table = make("table", "lesson dense");
  for (const [name, figure] of rows) table.append(make("tr", "", make("th", "", name), make("td", "", figure)));
  return table;
}

/** What an edit changed: common lines at both ends are left out. */
function drawEdit(path, before, after) {
  let [old, made] = [before, after].map((text) => (text === "" ? [] : text.split("\n")));
  while (old.length && made.length && old[0] === made[0]) [old, made] = [old.slice(1), made.slice(1)];
  while (old.length && made.length && old.at(-1) === made.at(-1)) [old, made] = [old.slice(0, -1), made.slice(0, -1)];
  return drawDiff([`edit ${path}`, ...old.map((line) => "-" + line), ...made.map((line) => "+" + line)]);
}

function drawDiff(lines) {
  const pre = make("pre", "diff");
  lines.forEach((line) => {
    const kind = /^(---|\+\+\+|@@|edit )/.test(line) ? "where" : { "+": "added", "-": "removed" }[line[0]] ?? "";
    pre.append(make("span", kind, line + "\n"));
  });
  return pre;
}

function drawEnd(row, packed, texts) {
  const nodes = [];
  const diff = texts[packed.d];
  if (diff) nodes.push(make("h3", "", "Patch"), drawDiff(diff.split("\n")));
  for (const [path, why] of packed.k) nodes.push(make("p", "quiet", `not carried over: ${path} (${why})`));
  if (packed.n === undefined) return nodes;
  nodes.push(make("h3", "", "Verdict"), make("p", "", `${packed.n - packed.N} of ${packed.n} expected tests passed.`));
  if (packed.f.length) {
    const table = make("table", "dense");
    for (const [test, outcome] of packed.f) table.append(make("tr", "", make("td", "bad", outcome), make("td", "", texts[test])));
    nodes.push(table);
    if (packed.N > packed.f.length) nodes.push(make("p", "quiet", `and ${packed.N - packed.f.length} more`));
  }
  if (texts[packed.x]) nodes.push(fold("What the test runner printed last", make("pre", "seen", texts[packed.x])));
  return nodes;
}

// -- colours: what the probabilities say -------------------------------------------------------------------------------

const MODES = {
  none: { says: "", shade: () => "" },
  "log-prob": {
    says: "darker: less likely under the policy that sampled it",
    shade: (t) => (t.p === null ? "" : tint("--doubt", -t.p / 5)),
  },
  hint: {
    says: "after the hint, blue tokens are likelier and orange ones less likely (teacher against student)",
    shade: (t) => (t.q === undefined ? "" : tint(t.w > t.q ? "--one" : "--two", Math.abs(t.w - t.q) / 3)),
  },
  divergence: {
    says: "darker: the targeted divergence pulls more at this token",
    shade: (t) => (t.q === undefined ? "" : tint("--hint", t.g / 2)),
  },
};
let mode = "log-prob";

const tint = (name, share) => `color-mix(in srgb, var(${name}) ${Math.round(75 * Math.min(1, Math.sqrt(share)))}%, transparent)`;

function colour(next = mode) {
  mode = next;
  for (const token of $("transcript").querySelectorAll(".token")) token.style.background = MODES[mode].shade(token);
  for (const input of document.querySelectorAll("input[name=mode]")) input.checked = input.value === mode;
  $("legend").textContent = MODES[mode].says;
}

function tell(token) {
  if (token.p === undefined || token.p === null) return;
  const chance = (logp) => `${(100 * Math.exp(logp)).toFixed(logp > -4.6 ? 1 : 4)}%`;
  const parts = [`\u201c${visible(token.textContent)}\u201d  sampled at ${chance(token.p)} (log-prob ${token.p.toFixed(2)})`];
  if (token.q !== undefined) parts.push(`student ${chance(token.q)}, after the hint ${chance(token.w)}, divergence ${token.g.toFixed(3)} nats`);
  $("token").textContent = parts.join(" \u00b7 ");
}

// -- moving about ------------------------------------------------------------------------------------------------------

function mark(number) {
  if (!open?.nodes[number]) return;
  open.nodes[open.at]?.classList.remove("current");
  open.at = number;
  open.nodes[number].classList.add("current");
}

function go(number) {
  if (!open?.nodes[number]) return false;
  mark(number);
  const reader = $("transcript"), node = open.nodes[number];
  if (getComputedStyle(reader).overflowY === "auto") {
    reader.scrollTop = node.offsetTop - 4;
    bring();
  } else node.scrollIntoView({ block: "start" });
  return true;
}

/** Put the browser of rollouts into view, unless it is. */
function bring() {
  const top = document.querySelector(".explorer").getBoundingClientRect().top;
  if (Math.abs(top) > innerHeight / 4) document.querySelector(".explorer").scrollIntoView();
}

/** The next rollout in the list, in the given direction. */
function step(direction) {
  const at = shown.indexOf(wanted);
  const next = shown[at < 0 ? 0 : at + direction];
  if (next !== undefined) show(next);
}

/** The next turn that passes a test, in this rollout or in the next one that `may` have such a turn. */
function seek(test, may, direction) {
  if (open)
    for (let t = open.at + direction; t >= 0 && t < open.turns.length; t += direction) if (test(open.turns[t])) return void go(t);
  const at = open ? shown.indexOf(open.row.index) : -1;
  for (let i = at + direction; i >= 0 && i < shown.length; i += direction)
    if (may(rows[shown[i]])) return void show(shown[i], test);
}

const atText = Symbol("the first turn that holds the text of the query");
const hinted = (turn) => turn.h !== undefined;
const faulty = (turn) => turn.e !== undefined;
const ACTIONS = {
  j: () => (open ? go(open.at + 1) : step(1)),
  k: () => go((open?.at ?? 0) - 1),
  n: () => step(1),
  p: () => step(-1),
  h: () => seek(hinted, IS.hinted, 1),
  H: () => seek(hinted, IS.hinted, -1),
  f: () => seek(faulty, IS.faulty, 1),
  F: () => seek(faulty, IS.faulty, -1),
  t: () => seek((turn) => turn.q !== undefined, IS.targeted, 1),
  c: () => colour(Object.keys(MODES)[(Object.keys(MODES).indexOf(mode) + 1) % 4]),
  o: () => { $("order").selectedIndex = ($("order").selectedIndex + 1) % $("order").length; search(); },
  "/": () => { bring(); $("query").focus(); $("query").select(); },
  d: () => darken(),
  "?": () => ($("help").open ? $("help").close() : $("help").showModal()),
};

function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input[type=search], select")) {
      if (event.key === "Escape") event.target.blur();
      if (event.key === "Enter" && shown.length) { event.target.blur(); show(shown[0], firstHit()); }
      return;
    }
    if (!rows.length && !"d?".includes(event.key)) return;
    if (!(event.key in ACTIONS)) return;
    event.preventDefault();
    ACTIONS[event.key]();
  });
  if (!$("rows")) return;
  $("keys").addEventListener("click", ACTIONS["?"]);
  $("query").addEventListener("input", search);
  for (const name of ["pick-phase", "pick-run", "order"]) $(name)?.addEventListener("change", (event) => { search(); event.target.blur(); });
  for (const chip of document.querySelectorAll(".chips button"))
    chip.addEventListener("click", () => { chip.ariaPressed = String(chip.ariaPressed !== "true"); search(); });
  for (const input of document.querySelectorAll("input[name=mode]")) input.addEventListener("change", () => { colour(input.value); input.blur(); });
  $("list").addEventListener("scroll", drawList, { passive: true });
  addEventListener("resize", drawList);
  addEventListener("hashchange", follow);
}

/** The first turn whose row says what the query asks for, so that Enter lands there. */
function firstHit() {
  const query = $("query").value.toLowerCase();
  if (/(has:hint|is:hinted|hint:)/.test(query)) return hinted;
  if (/(is:faulty|has:fault|fault:)/.test(query)) return faulty;
  return parse(query).texts.length ? atText : 0;
}

/** Open the rollout that the address names: #r/RUN/ID. */
function follow() {
  const [, run, id] = location.hash.match(/^#r\/(\d+)\/(.+)$/) ?? [];
  const row = rows.find((r) => r.run === Number(run) && r.id === decodeURIComponent(id ?? ""));
  if (!row || open?.row.index === row.index) return;
  show(row.index);
}

async function start() {
  listen();
  if (!$("rows")) return;
  await loadRows();
  search();
  follow();
  const [text, lists] = await Promise.all([inflate("words"), inflate("postings")]);
  words = new Words(decode(text), lists);
  document.documentElement.dataset.ready = "yes";
  if ($("query").value) search();
}
