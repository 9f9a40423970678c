// The view of one rollout: its tokens, the candidates of the selected token, and other samples of its prompt.

import { el } from "./dom.js";
import { drawCandidates } from "./candidate_bars.js";
import { count, fixed, percent, whole } from "./number_format.js";
import { isDetailed, openDetail, overview, partingOf } from "./page_data.js";
import { METRICS, legendOf } from "./token_colors.js";
import { linkTo } from "./rollout_table.js";
import { TokenFlow } from "./token_flow.js";
import { hasTexts, tokenNodes } from "./token_names.js";

let flows = [];
let shown = null;
let wanted = null;
let metric = "mass";

/** Return an object that describes and controls the rollout on screen, or null if no rollout is on screen.
 * The object is `{ row, detail, position, select, tokenOnAdjacentLine }`. */
export function shownRollout() {
  return shown;
}

export function closeRollout() {
  for (const flow of flows) flow.close();
  flows = [];
  shown = null;
  wanted = null;
}

/** Draw all tokens, for printing. On the screen, the page draws only the tokens near the visible part. */
export function drawAllTokens() {
  for (const flow of flows) flow.drawAll();
}

export async function drawRollout(view, row, position) {
  if (shown?.row === row) return shown.select(position ?? shown.position, "center");
  closeRollout();
  wanted = row;
  if (!isDetailed(row)) {
    view.replaceChildren(el("p", { class: "warning" }, `This page does not show rollout ${row} token by token. Make a page with more rollouts (--rollouts).`));
    return;
  }
  view.replaceChildren(el("p", { class: "hint" }, "Reading the tokens…"));
  const detail = await openDetail(row);
  // Do not draw this rollout if the user opened another rollout or the overview while `openDetail` decoded the tokens.
  if (wanted !== row) return;
  const columns = el("div", { class: "columns" });
  const panel = el("aside", { class: "candidates", "aria-live": "polite" });
  const legend = el("ul", { class: "scale", "aria-label": "Colors" });
  const { table } = overview();
  const place = table.prompt[row] === undefined ? `Rollout ${whole(row)}` : `Prompt ${whole(table.prompt[row])}, sample ${table.sample[row]}`;

  function select(next, block = "nearest") {
    shown.position = Math.max(0, Math.min(next, detail.ids.length - 1));
    if (!detail.ids.length) return;
    // On a phone, the candidate panel is below the tokens. A new panel height changes the height of the page,
    // and the browser may then scroll. Draw the panel before scrolling to the token.
    drawCandidates(panel, detail, shown.position);
    for (const flow of flows) if (shown.position < flow.detail.ids.length) flow.select(shown.position, block);
    // The page's address may already name another rollout, although the hashchange event has not arrived yet.
    // Update the page's address only if the address still names this rollout.
    if (location.hash.split("/")[2] === String(row)) history.replaceState(null, "", linkTo(row, shown.position));
  }

  function colorBy(name) {
    metric = name;
    for (const flow of flows) flow.colorBy(name);
    legend.replaceChildren(
      ...legendOf(name).map(([kind, text]) => el("li", {}, el("span", { class: `swatch ${kind}` }), text)),
      el("li", {}, el("span", { class: "swatch tool" }), "tool"));
  }

  const choices = Object.entries(METRICS).filter(([name]) => detail[name]).map(([name, { label, unit }]) =>
    el("label", {}, el("input", { type: "radio", name: "metric", value: name, onchange: () => colorBy(name) }), ` ${label}${unit ? ` (${unit})` : ""}`));
  if (!detail[metric]) metric = "mass";
  for (const choice of choices) choice.firstChild.checked = choice.firstChild.value === metric;

  view.replaceChildren(
    el("nav", {}, el("a", { href: "#/" }, "← all rollouts")),
    el("h2", {}, place),
    el("p", { class: "hint" }, factsOf(row, detail)),
    el("fieldset", { class: "metrics" }, el("legend", {}, "color by"), choices), legend,
    samplesOf(row, (other, box) => (box.checked ? addColumn(other, null, box) : removeColumn(other))),
    hasTexts() ? "" : el("p", { class: "hint" }, "Numbers are token ids: this page was made without a tokenizer (--tokenizer PATH)."),
    el("details", { class: "prompt" }, el("summary", {}, `Prompt: ${count(detail.prompt_tokens, "token")}`), el("div", { class: hasTexts() ? "flow" : "flow ids" }, promptNodes(detail))),
    el("details", { class: "prompt" }, el("summary", {}, "Text that the engine returned"), el("pre", {}, detail.text)),
    el("div", { class: "split" }, columns, panel));

  async function addColumn(other, name = null, box = null) {
    const otherDetail = other === row ? detail : await openDetail(other);
    // While `openDetail` decoded the tokens, the user may have cleared the sample's checkbox or left this
    // rollout.
    if (wanted !== row || box?.checked === false) return;
    const partsAt = other === row ? null : partingOf(detail, otherDetail);
    const flow = new TokenFlow(otherDetail, (t) => select(t), partsAt);
    flow.id = `r${other}`;
    flow.row = other;
    flow.metric = metric;
    flows.push(flow);
    const head = other === row ? name : `Sample ${table.sample[other]}: ${partsAt === null ? "never parts" : `parts at position ${whole(partsAt)}`}`;
    columns.append(el("section", { class: "sample" }, el("h3", {}, head), flow.element));
    if (partsAt !== null) select(partsAt, "center");
  }

  function removeColumn(other) {
    const flow = flows.find((each) => each.row === other);
    flow?.close();
    flow?.element.parentElement.remove();
    flows = flows.filter((each) => each !== flow);
  }

  shown = { row, detail, position: 0, select, tokenOnAdjacentLine: (direction) => flows[0].tokenOnAdjacentLine(direction) };
  await addColumn(row, table.sample[row] === undefined ? "This rollout" : `Sample ${table.sample[row]}`);
  colorBy(metric);
  select(position ?? 0, position === null ? "nearest" : "center");
  flows[0].element.focus({ preventScroll: true });
}

function factsOf(row, detail) {
  const { table } = overview();
  const parts = [count(detail.ids.length, "token")];
  if (table.finish[row] !== undefined) parts.push(`finish ${table.finish[row]}`, `mean mass ${fixed(table.mass[row])}`, `${percent(table.off[row])} off by > 10 %`);
  if (table.reward[row] !== null && table.reward[row] !== undefined) parts.push(`reward ${table.reward[row]}`);
  parts.push(detail.source === "distribution" && detail.p !== null ? `threshold p ${detail.p}` : `source ${detail.source ?? "unknown"}`);
  if (detail.weights) parts.push(`weights ${[...new Set(detail.weights.map(([version]) => version).filter(Boolean))].join(", ") || "unknown"}`);
  parts.push(`${fixed(detail.latency_s, 2)} s`, `request ${detail.request_id || "without an id"}`);
  return parts.join(" · ");
}

function promptNodes(detail) {
  const hidden = detail.prompt_tokens - detail.prompt_ids.length;
  const nodes = Array.from(detail.prompt_ids, (id) => el("span", { class: "t tool" }, tokenNodes(id, true)));
  return hidden > 0 ? [el("span", { class: "hint" }, `… ${whole(hidden)} tokens before … `), ...nodes] : nodes;
}

/** Return the checkboxes that show other samples of the same prompt. */
function samplesOf(row, toggle) {
  const { table } = overview();
  const prompt = table.prompt[row];
  const others = table.prompt.flatMap((each, other) => (each === prompt && other !== row ? [other] : []));
  if (prompt === undefined || !others.length) return "";
  const switches = others.map((other) => {
    const title = isDetailed(other) ? null : "this page does not show it token by token";
    const box = el("input", { type: "checkbox", value: other, disabled: !isDetailed(other), onchange: (event) => toggle(other, event.target) });
    return el("label", { title }, box, ` sample ${table.sample[other]}`);
  });
  return el("fieldset", { class: "samples" }, el("legend", {}, "beside it"), switches);
}
