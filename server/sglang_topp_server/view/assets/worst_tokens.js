// The list of the worst tokens: those with the largest set, the least kept mass, or the largest absolute log-ratio.
// The list shows each of these tokens together with the tokens before and after it.

import { el } from "./dom.js";
import { count, fixed, whole } from "./number_format.js";
import { isDetailed } from "./page_data.js";
import { linkTo } from "./rollout_table.js";
import { tokenNodes } from "./token_names.js";

const KINDS = { size: "largest set", mass: "least mass", ratio: "largest |log ratio|" };

export function drawWorst(section, { worst, table }) {
  if (!worst.length) return section.replaceChildren();
  const kinds = Object.keys(KINDS).filter((kind) => worst.some((token) => token.kind === kind));
  const list = el("ol", { class: "worst" });
  const choices = ["all", ...kinds].map((kind) =>
    el("button", { type: "button", "aria-pressed": kind === "all", "data-kind": kind, onclick: () => choose(kind) },
      kind === "all" ? `all ${worst.length}` : KINDS[kind]));

  function choose(kind) {
    for (const choice of choices) choice.setAttribute("aria-pressed", choice.dataset.kind === kind);
    list.replaceChildren(...worst.filter((token) => kind === "all" || token.kind === kind).map(drawToken));
  }

  function drawToken(token) {
    const { row, position, start, ids } = token;
    const words = ids.map((id, i) => el(start + i === position ? "mark" : "span", {}, tokenNodes(id)));
    const numbers = [["set", whole(token.size)], ["mass", fixed(token.mass)], ["log ratio", token.ratio === null ? null : fixed(token.ratio, 3)], ["with replay", token.replayed === null ? null : fixed(token.replayed, 3)]];
    const place = table.prompt[row] === undefined ? `rollout ${whole(row)}` : `prompt ${whole(table.prompt[row])}, sample ${table.sample[row]}`;
    const head = [el("b", { class: `chip ${token.kind}` }, KINDS[token.kind]), el("span", { class: "place" }, `${place}, position ${whole(position)}`)];
    const facts = numbers.filter(([, value]) => value !== null).map(([name, value]) => el("span", { class: "fact" }, `${name} `, el("b", {}, value)));
    const content = [el("span", { class: "head" }, head), el("span", { class: "facts" }, facts), el("span", { class: "context" }, start > 0 ? "… " : "", words, " …")];
    return el("li", {}, isDetailed(row) ? el("a", { href: linkTo(row, position) }, content) : el("div", { title: "this page does not show the rollout token by token" }, content));
  }

  section.replaceChildren(
    el("h2", {}, "Worst tokens"),
    el("p", { class: "hint" }, `The ${count(worst.length, "worst token")} of all rollouts: in turn the ${kinds.map((kind) => KINDS[kind]).join(", the ")}.`),
    el("div", { class: "choices", role: "group", "aria-label": "Kind" }, choices),
    list);
  choose("all");
}
