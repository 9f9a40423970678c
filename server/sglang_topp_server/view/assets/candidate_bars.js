// Bars that show the probabilities of the candidates at one position. One more bar shows the total probability of the
// candidates that the page does not list. The last bar shows the probability of all tokens outside the set.

import { el } from "./dom.js";
import { count, fixed, whole } from "./number_format.js";
import { candidatesAt } from "./page_data.js";
import { tokenLabel, tokenNodes } from "./token_names.js";

function bar(kind, name, share, most, note) {
  const filled = el("i");
  // Set the bar's width in `filled.style`, because the page's security policy blocks style attributes.
  filled.style.width = `${(100 * share) / most}%`;
  return el("li", { class: kind, ...note }, el("span", { class: "name" }, name), el("span", { class: "bar" }, filled), el("span", { class: "value" }, fixed(share, share < 0.001 ? 6 : 4)));
}

function fact(name, value) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value));
}

export function drawCandidates(panel, detail, position) {
  const id = detail.ids[position];
  const size = detail.sizes[position];
  const mass = detail.mass[position];
  const isAppended = detail.appended.some(([start, end]) => start <= position && position < end);
  const listed = candidatesAt(detail, position);
  const shares = listed.map(({ logprob }) => (logprob === null ? null : Math.exp(logprob)));
  const isKnown = size > 0 && !Number.isNaN(mass);
  const rest = isKnown ? Math.max(0, mass - shares.reduce((sum, share) => sum + share, 0)) : 0;
  const outside = isKnown ? Math.max(0, 1 - mass) : 0;
  const most = Math.max(...shares.filter((share) => share !== null), outside, 1e-9);
  const rows = listed.map(({ id: candidate }, i) => {
    const isSampled = candidate === id;
    const note = { "data-id": candidate, "aria-current": isSampled ? "true" : null, title: `id ${candidate}${isSampled ? ", sampled" : ""}` };
    return isKnown
      ? bar(isSampled ? "sampled" : "", tokenNodes(candidate), shares[i], most, note)
      : el("li", { class: isSampled ? "sampled" : "", ...note }, el("span", { class: "name" }, tokenNodes(candidate)));
  });
  if (size > listed.length) {
    const more = `${whole(size - listed.length)} more in the set`;
    rows.push(isKnown ? bar("rest", more, rest, most, {}) : el("li", {}, more));
  }
  if (isKnown) rows.push(bar("outside", "outside the set", outside, most, {}));
  const facts = [
    fact("token", `${tokenLabel(id)}, id ${id}`),
    size > 0 && fact("set", count(size, "candidate")),
    isKnown && fact("kept mass", fixed(mass, 6)),
    isKnown && fact("entropy", `${fixed(detail.entropy[position], 3)} nats`),
    !isAppended && fact("log-prob", fixed(detail.logprobs[position], 4)),
    detail.ratio && fact("ratio without replay", ratio(detail.ratio[position])),
    detail.replayed && fact("ratio with replay", ratio(detail.replayed[position])),
    weightsAt(detail, position) && fact("weights", weightsAt(detail, position)),
  ].filter(Boolean);
  const hint = isAppended ? "A token of a tool or an environment. It has no candidate set and no loss." : size === 0 ? "This generated token has no candidate set." : null;
  panel.replaceChildren(
    el("h3", {}, `Position ${whole(position)}`),
    el("dl", { class: "facts" }, facts),
    ...(hint ? [el("p", { class: isAppended ? "hint" : "warning" }, hint)] : []),
    el("ol", { class: "bars", "aria-label": `Candidates at position ${position}` }, rows));
}

function ratio(log) {
  return Number.isNaN(log) ? "–" : `${fixed(Math.exp(log))} (log ${fixed(log, 3)})`;
}

function weightsAt(detail, position) {
  let end = 0;
  for (const [version, length] of detail.weights ?? []) if (position < (end += length)) return version;
  return null;
}
