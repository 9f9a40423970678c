// Show tokens as text in which whitespace, control characters, and invalid UTF-8 are visible.

import { el } from "./dom.js";
import { overview } from "./page_data.js";

// Control characters, special spaces such as the no-break space, characters without a width, and characters
// that change the direction of the text.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00a0\u00ad\u061c\u115f\u180e\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\ufffc]/u;
const RUNS = /(\n+| +|\t+|[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00a0\u00ad\u061c\u115f\u180e\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\ufffc])/u;

export function hasTexts() {
  return overview().texts !== null;
}

function textOf(id) {
  return overview().texts?.[id];
}

function hex(number, digits) {
  return number.toString(16).toUpperCase().padStart(digits, "0");
}

function visible(run) {
  if (run[0] === "\t") return "⇥\t".repeat(run.length);
  if (run[0] === "\n") return "↵".repeat(run.length);
  return `U+${hex(run.codePointAt(0), 4)}`;
}

/** Return the DOM nodes that show `length` spaces as dots. The last node holds a space, so that a line can break
 * there, and CSS draws a dot in this space. */
function blank(length) {
  const dots = length > 1 ? [el("span", { class: "space" }, "·".repeat(length - 1))] : [];
  return [...dots, el("span", { class: "blank" }, " ")];
}

/** Return the DOM nodes that show a token's text. If `breaks` is true, the nodes contain the token's line feeds, so
 * that the line breaks there. */
export function tokenNodes(id, breaks = false) {
  const text = textOf(id);
  if (text === undefined) return [el("span", { class: hasTexts() ? "raw" : "id" }, hasTexts() ? `#${id}` : String(id))];
  if (Array.isArray(text)) return [el("span", { class: "raw" }, text.map((byte) => hex(byte, 2)).join(" "))];
  if (text === "") return [el("span", { class: "raw" }, "empty")];
  return text.split(RUNS).filter(Boolean).map((run) => {
    if (run[0] === " ") return blank(run.length);
    if (!HIDDEN.test(run)) return run;
    const mark = el("span", { class: "space" }, visible(run));
    return breaks && run[0] === "\n" ? [mark, run] : mark;
  }).flat();
}

/** Return a token as one line of plain text. */
export function tokenLabel(id) {
  const text = textOf(id);
  if (text === undefined) return `id ${id}`;
  return Array.isArray(text) ? `bytes ${text.map((byte) => hex(byte, 2)).join(" ")}` : JSON.stringify(text);
}
