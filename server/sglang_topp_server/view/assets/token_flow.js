// The tokens of one rollout as colored text, in blocks of 100 tokens. The page has DOM elements only for the tokens
// in blocks near the visible part.

import { el } from "./dom.js";
import { whole } from "./number_format.js";
import { colorClass } from "./token_colors.js";
import { hasTexts, tokenNodes } from "./token_names.js";

const TOKENS_PER_BLOCK = 100;
const GUESSED_HEIGHT_PX = 130;

export class TokenFlow {
  /** A click on a token calls `onSelect(position)`. */
  constructor(detail, onSelect, partsAt = null) {
    this.detail = detail;
    this.metric = "mass";
    this.selected = null;
    this.ticks = ticksOf(detail, partsAt);
    const count = Math.ceil(detail.ids.length / TOKENS_PER_BLOCK);
    this.blocks = Array.from({ length: count }, (_, i) => {
      const block = el("div", { class: "token-block", "data-start": whole(i * TOKENS_PER_BLOCK) });
      block.style.minHeight = `${GUESSED_HEIGHT_PX}px`;
      return block;
    });
    this.element = el("div", { class: hasTexts() ? "flow" : "flow ids", tabindex: 0, role: "listbox", "aria-label": "Tokens" }, this.blocks);
    this.element.addEventListener("click", (event) => {
      const token = event.target.closest("[data-t]");
      if (token) onSelect(Number(token.dataset.t));
    });
    this.observer = new IntersectionObserver((entries) => entries.forEach((entry) => this.#show(entry)), { rootMargin: "600px 0px" });
    for (const block of this.blocks) this.observer.observe(block);
  }

  /** Stop observing the blocks, so that scrolling no longer draws or removes tokens. `element` stays on the
   * page until the caller removes `element`. */
  close() {
    this.observer.disconnect();
  }

  /** Color the tokens by the given metric. */
  colorBy(metric) {
    this.metric = metric;
    for (const token of this.element.querySelectorAll("[data-t]")) token.className = this.#classOf(Number(token.dataset.t));
  }

  /** Mark the token at `position` as selected, and scroll to the token. */
  select(position, align = "nearest") {
    this.tokenAt(this.selected)?.removeAttribute("aria-selected");
    this.selected = position;
    const block = this.blocks[Math.floor(position / TOKENS_PER_BLOCK)];
    if (!block) return;
    if (!block.firstChild) {
      // Also draw the neighboring blocks of tokens: the browser must know their heights before it scrolls.
      const at = this.blocks.indexOf(block);
      for (const near of this.blocks.slice(Math.max(0, at - 6), at + 7)) if (!near.firstChild) this.#draw(near);
    }
    const token = this.tokenAt(position);
    token.setAttribute("aria-selected", "true");
    this.element.setAttribute("aria-activedescendant", token.id);
    token.scrollIntoView({ block: align, inline: "nearest" });
  }

  tokenAt(position) {
    return position === null ? null : this.element.querySelector(`[data-t="${position}"]`);
  }

  /** Return the position of the token on an adjacent line that is horizontally closest to the selected token.
   * If `direction` is -1, search the line above the selected token. If `direction` is 1, search below it. */
  tokenOnAdjacentLine(direction) {
    const from = startOf(this.tokenAt(this.selected));
    if (!from) return this.selected;
    let line = null;
    let best = this.selected;
    let distance = Infinity;
    for (let t = this.selected + direction; t >= 0 && t < this.detail.ids.length; t += direction) {
      const token = this.tokenAt(t);
      if (!token) return t;
      const { top, left, height } = startOf(token);
      if (Math.abs(top - from.top) < height / 2) continue;
      line ??= top;
      if (Math.abs(top - line) > height / 2) break;
      if (Math.abs(left - from.left) < distance) [best, distance] = [t, Math.abs(left - from.left)];
    }
    return best;
  }

  /** Draw the tokens of all blocks, so that a printed page shows every token. */
  drawAll() {
    this.close();
    for (const block of this.blocks) if (!block.firstChild) this.#draw(block);
  }

  #show({ target, isIntersecting, boundingClientRect }) {
    if (isIntersecting && !target.firstChild) this.#draw(target);
    if (!isIntersecting && target.firstChild) {
      // A block whose tokens are removed keeps its height, so that the text below does not move.
      target.style.minHeight = `${boundingClientRect.height}px`;
      target.replaceChildren();
    }
  }

  #draw(block) {
    const first = this.blocks.indexOf(block) * TOKENS_PER_BLOCK;
    const last = Math.min(first + TOKENS_PER_BLOCK, this.detail.ids.length);
    const nodes = [];
    for (let t = first; t < last; t++) {
      for (const [kind, text] of this.ticks.get(t) ?? []) nodes.push(el("span", { class: `tick ${kind}` }, text));
      nodes.push(el("span", { class: this.#classOf(t), "data-t": t, id: `${this.id ?? "main"}-${t}`, role: "option", "aria-selected": t === this.selected ? "true" : null }, tokenNodes(this.detail.ids[t], true)));
    }
    block.style.minHeight = "";
    block.replaceChildren(...nodes);
  }

  #classOf(t) {
    const { appended, sizes } = this.detail;
    if (appended.some(([start, end]) => start <= t && t < end)) return "t tool";
    if (sizes[t] === 0) return "t missing";
    return `t ${colorClass(this.metric, this.detail[this.metric][t])}`;
  }
}

/** Return the rectangle of a token on the screen. For a token that spans several lines, return the rectangle of its
 * part on the first line. */
function startOf(token) {
  return token?.getClientRects()[0];
}

/** Return a map from a token's position to the labels that the page shows before the token. A label marks a change of
 * weights, the start or the end of a tool's tokens, or the first difference from another sample. */
function ticksOf({ weights, appended }, partsAt) {
  const ticks = new Map();
  const add = (position, kind, text) => ticks.set(position, [...(ticks.get(position) ?? []), [kind, text]]);
  let end = 0;
  let before = null;
  for (const [version, length] of weights ?? []) {
    if (version && before !== null && version !== before) add(end, "weights", `weights ${version}`);
    if (version) before = version;
    end += length;
  }
  for (const [start, after] of appended) {
    add(start, "tool", "tool");
    add(after, "resumed", "resumed");
  }
  if (partsAt !== null) add(partsAt, "parts", "parts here");
  return ticks;
}
