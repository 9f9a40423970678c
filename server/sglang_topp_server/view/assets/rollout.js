// The view of one rollout: its tokens, and the candidates of the selected token. Then the page's routes and keys.

const TOKENS_PER_BLOCK = 100;
let shown = null;
let metric = "entropy";

// -- tokens as text --------------------------------------------------------------------------------------

// Line feeds, spaces, tabs, and each other character that is not seen: control and format characters (which have no
// width, or change the direction of the text), special spaces such as the no-break space, and Hangul's fillers.
const IS_HIDDEN = /[\p{Cc}\p{Cf}\p{Z}\u115f\u1160\u3164\uffa0]/u;
const RUNS = new RegExp(`(\\n+| +|\\t+|${IS_HIDDEN.source})`, "u");

const hasTexts = data.texts !== null;
const hex = (number, digits) => number.toString(16).toUpperCase().padStart(digits, "0");
const raw = (text) => el("span", { class: "raw" }, text);

/** Return the nodes that show a text, with visible whitespace. */
function textNodes(text) {
  return text.split(RUNS).filter(Boolean).flatMap((run) => {
    // CSS draws a dot in each space, so that the text keeps its spaces, and lines break at them.
    if (run[0] === " ") return [...run].map((space) => el("span", { class: "blank" }, space));
    if (run[0] === "\t") return [el("span", { class: "space" }, "⇥\t".repeat(run.length))];
    if (run[0] === "\n") return [el("span", { class: "space" }, "↵".repeat(run.length)), run];
    return IS_HIDDEN.test(run) ? [raw(`U+${hex(run.codePointAt(0), 4)}`)] : [run];
  });
}

function tokenNodes(id) {
  const text = data.texts?.[id];
  if (!hasTexts) return [el("span", { class: "id" }, String(id))];
  if (text === undefined) return [raw(`#${id}`)];
  if (Array.isArray(text)) return [raw(text.map((byte) => hex(byte, 2)).join(" "))];
  return text === "" ? [raw("empty")] : textNodes(text);
}

// A token does not break in the middle, so the line breaks after it.
const lineFeed = (id) => (String(data.texts?.[id]).includes("\n") ? "\n" : "");

function tokenLabel(id) {
  const text = data.texts?.[id];
  if (text === undefined) return `id ${id}`;
  const literal = Array.isArray(text) ? `bytes ${text.map((byte) => hex(byte, 2)).join(" ")}` : JSON.stringify(text);
  return `${literal}, id ${id}`;
}

// -- the tokens of the shown rollout -----------------------------------------------------------------------

const isAppended = ({ appended }, t) => appended.some(([start, end]) => start <= t && t < end);
const tokenAt = (position) => byId(`t${position}`);

/** Return the labels before tokens, by position: changes of weights, and the ends of a tool's tokens. */
function labelsOf({ weights, appended }) {
  const labels = new Map();
  const add = (position, kind, text) =>
    labels.set(position, [...(labels.get(position) ?? []), el("span", { class: `tick ${kind}` }, text)]);
  let end = 0;
  let before = null;
  for (const [version, length] of weights) {
    if (version && before !== null && version !== before) add(end, "weights", `weights ${version}`);
    if (version) before = version;
    end += length;
  }
  for (const [start, after] of appended) {
    add(start, "tool", "tool");
    add(after, "resumed", "resumed");
  }
  return labels;
}

function tokenClass(detail, t) {
  if (isAppended(detail, t)) return "t tool";
  return detail.sizes[t] === 0 ? "t missing" : `t ${colorClass(metric, detail[metric]?.[t])}`;
}

/** Return the tokens in blocks. The browser lays out only the blocks near the visible part. */
function flowOf(detail) {
  const labels = labelsOf(detail);
  const blocks = [];
  for (let first = 0; first < detail.ids.length; first += TOKENS_PER_BLOCK) {
    const ids = detail.ids.slice(first, first + TOKENS_PER_BLOCK);
    blocks.push(el("div", { class: "token-block", "data-start": whole(first) }, ids.map((id, i) => {
      const t = first + i;
      const attributes = { class: tokenClass(detail, t), id: `t${t}`, "data-t": t, role: "option" };
      return [labels.get(t) ?? [], el("span", attributes, tokenNodes(id)), lineFeed(id)];
    })));
  }
  const flow = el("div", { class: hasTexts ? "flow" : "flow ids", tabindex: 0, role: "listbox", "aria-label": "Tokens" }, blocks);
  flow.addEventListener("click", (event) => {
    const token = event.target.closest("[data-t]");
    if (token) select(Number(token.dataset.t));
  });
  return flow;
}

function select(position, align = "nearest") {
  const { row, detail, flow, panel } = shown;
  if (!detail.ids.length) return;
  tokenAt(shown.position)?.removeAttribute("aria-selected");
  shown.position = Math.max(0, Math.min(position, detail.ids.length - 1));
  // On a phone, the candidates are below the tokens. Draw them first, because they change the page's height.
  drawCandidates(panel, detail, shown.position);
  const token = tokenAt(shown.position);
  token.setAttribute("aria-selected", "true");
  flow.setAttribute("aria-activedescendant", token.id);
  token.scrollIntoView({ block: align, inline: "nearest" });
  if (location.hash.split("/")[2] === String(row)) history.replaceState(null, "", linkTo(row, shown.position));
}

function colorBy(name) {
  metric = name;
  for (const token of shown.flow.querySelectorAll("[data-t]")) token.className = tokenClass(shown.detail, Number(token.dataset.t));
  const levels = levelNames(name).map((level, i) => swatch(levelClass(name, i), level));
  shown.legend.replaceChildren(...levels, swatch("tool", "tool"));
}

/** Return the token on the line above (-1) or below (1) that is horizontally closest to the selected token. */
function onAdjacentLine(direction) {
  const { detail, position } = shown;
  const startOf = (t) => tokenAt(t).getClientRects()[0];
  const from = startOf(position);
  let [best, distance, line] = [position, Infinity, null];
  for (let t = position + direction; t >= 0 && t < detail.ids.length; t += direction) {
    const { top, left, height } = startOf(t);
    if (Math.abs(top - from.top) < height / 2) continue;
    line ??= top;
    if (Math.abs(top - line) > height / 2) break;
    if (Math.abs(left - from.left) < distance) [best, distance] = [t, Math.abs(left - from.left)];
  }
  return best;
}

// -- the candidates of one position ------------------------------------------------------------------------

function drawCandidates(panel, detail, position) {
  const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
  const probability = (share) => fixed(share, share < 0.001 ? 6 : 4);
  const id = detail.ids[position];
  const size = detail.sizes[position];
  const mass = detail.mass?.[position] ?? null;
  const isTool = isAppended(detail, position);
  const listed = detail.candidates[position].map(([candidate, logprob]) => [candidate, logprob === null ? null : Math.exp(logprob)]);
  const rest = Math.max(0, (mass ?? 0) - listed.reduce((sum, [, share]) => sum + share, 0));
  const outside = Math.max(0, 1 - (mass ?? 1));
  const most = Math.max(...listed.map(([, share]) => share ?? 0), outside, 1e-9);
  const rows = listed.map(([candidate, share]) => {
    const isSampled = candidate === id;
    const note = { "data-id": candidate, "aria-current": isSampled ? "true" : null, title: `id ${candidate}${isSampled ? ", sampled" : ""}` };
    return bar(isSampled ? "sampled" : "", tokenNodes(candidate), share ?? 0, most, share === null ? "" : probability(share), note);
  });
  if (size > listed.length) {
    rows.push(bar("rest", `${whole(size - listed.length)} more in the set`, rest, most, mass === null ? "" : probability(rest)));
  }
  if (mass !== null) rows.push(bar("outside", "outside the set", outside, most, probability(outside)));
  let end = 0;
  const weights = detail.weights.find(([, length]) => position < (end += length))?.[0];
  const facts = [
    fact("token", tokenLabel(id)),
    size > 0 && fact("set", count(size, "candidate")),
    mass !== null && fact("kept mass", fixed(mass, 6)),
    mass !== null && fact("entropy", `${fixed(detail.entropy[position], 3)} nats`),
    !isTool && fact("log-prob", fixed(detail.logprobs[position], 4)),
    ...["ratio", "replayed"].map((name) => detail[name] && fact(LABELS[name], fixed(detail[name][position]))),
    weights && fact("weights", weights),
  ].filter(Boolean);
  const hint = isTool
    ? el("p", { class: "hint" }, "A token of a tool or an environment. It has no candidate set and no loss.")
    : size === 0 && el("p", { class: "warning" }, "This generated token has no candidate set.");
  panel.replaceChildren(
    el("h3", {}, `Position ${whole(position)}`),
    el("dl", { class: "facts" }, facts),
    hint || "",
    el("ol", { class: "bars", "aria-label": `Candidates at position ${position}` }, rows));
}

// -- the view ----------------------------------------------------------------------------------------------

async function read(row) {
  const packed = Uint8Array.from(atob(byId(`detail-${row}`).textContent), (char) => char.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

function factsOf(row, detail) {
  const { table } = data;
  const parts = [count(detail.ids.length, "token"), `finish ${table.finish[row]}`, `mean mass ${fixed(table.mass[row])}`, `${percent(table.off[row])} off by > 10 %`];
  if (!isMissing(table.reward[row])) parts.unshift(`reward ${short(table.reward[row])}`);
  parts.push(detail.source === "distribution" && detail.p !== null ? `threshold p ${detail.p}` : `source ${detail.source ?? "unknown"}`);
  parts.push(`${fixed(detail.latency_s, 2)} s`, `request ${detail.request_id || "without an id"}`);
  return parts.join(" · ");
}

function promptNodes(detail) {
  const hidden = detail.num_prompt_tokens - detail.prompt_ids.length;
  const nodes = detail.prompt_ids.map((id) => [el("span", { class: "t tool" }, tokenNodes(id)), lineFeed(id)]);
  return hidden > 0 ? [el("span", { class: "hint" }, `… ${whole(hidden)} tokens before … `), ...nodes] : nodes;
}

async function drawRollout(row, position) {
  const view = byId("rollout-view");
  if (shown?.row === row) return shown.detail && select(position ?? shown.position, "center");
  const { table } = data;
  const here = (shown = { row });
  const place = table.prompt[row] === undefined ? `Rollout ${whole(row)}` : `Prompt ${whole(table.prompt[row])}, sample ${table.sample[row]}`;
  const of = data.runs.length > 1 && table.run[row] ? ` of ${table.run[row]}` : "";
  const head = el("header", {}, el("nav", {}, el("a", { href: "#/" }, "← all rollouts")), el("h2", {}, place + of));
  view.replaceChildren(head);
  if (!isDetailed(row)) {
    view.append(el("p", { class: "warning" }, `This page does not show rollout ${row} token by token. Make a page with more rollouts (--megabytes).`));
    return;
  }
  const detail = await read(row);
  // The user may have opened another rollout meanwhile.
  if (shown !== here) return;
  if (!detail[metric]) metric = "entropy";
  const panel = el("aside", { class: "candidates", "aria-live": "polite" });
  const legend = el("ul", { class: "scale", "aria-label": "Colors" });
  Object.assign(shown, { detail, position: 0, panel, legend, flow: flowOf(detail) });
  const choices = Object.entries(LABELS).filter(([name]) => detail[name]).map(([name, label]) =>
    el("label", {}, el("input", { type: "radio", name: "metric", value: name, checked: name === metric, onchange: () => colorBy(name) }), ` ${label}`));
  head.append(el("fieldset", {}, el("legend", {}, "color by"), choices), legend);
  view.append(
    el("p", { class: "hint" }, factsOf(row, detail)),
    hasTexts ? "" : el("p", { class: "hint" }, "Numbers are token ids: this page was made without a tokenizer (--tokenizer PATH)."),
    el("details", { open: true }, el("summary", {}, `Prompt: ${count(detail.num_prompt_tokens, "token")}`), el("div", { class: hasTexts ? "flow" : "flow ids" }, promptNodes(detail))),
    el("details", {}, el("summary", {}, "Text that the engine returned"), el("pre", {}, textNodes(detail.text))),
    el("div", { class: "split" }, el("section", { class: "tokens" }, shown.flow), panel));
  // The title and the controls stay in view above the tokens.
  document.documentElement.style.setProperty("--head", `${head.offsetHeight}px`);
  colorBy(metric);
  select(position ?? 0, position === null ? "nearest" : "center");
  shown.flow.focus({ preventScroll: true });
}

function route() {
  const [, kind, row, position] = location.hash.split("/");
  const isNumber = (text) => /^\d+$/.test(text ?? "");
  const isRollout = kind === "rollout" && isNumber(row);
  byId("overview-view").hidden = isRollout;
  byId("rollout-view").hidden = !isRollout;
  if (isRollout) return drawRollout(Number(row), isNumber(position) ? Number(position) : null);
  shown = null;
}

drawOverview();
addEventListener("hashchange", route);
addEventListener("keydown", (event) => {
  if (!shown?.detail || event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = {
    ArrowLeft: () => shown.position - 1,
    ArrowRight: () => shown.position + 1,
    ArrowUp: () => onAdjacentLine(-1),
    ArrowDown: () => onAdjacentLine(1),
    Home: () => 0,
    End: () => shown.detail.ids.length - 1,
  };
  if (event.key === "Escape") location.hash = "#/";
  if (!moves[event.key] || event.target.matches("input")) return;
  event.preventDefault();
  select(moves[event.key]());
});
route();
document.documentElement.dataset.ready = "true";
