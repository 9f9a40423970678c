// The table of rollouts: sort by a column, filter by words, and draw 100 rows at a time.

import { el } from "./dom.js";
import { count, fixed, percent, whole } from "./number_format.js";
import { isDetailed } from "./page_data.js";

const ROWS_AT_ONCE = 100;
const COLUMNS = [
  { name: "prompt", label: "prompt", show: whole, number: true },
  { name: "sample", label: "sample", show: whole, number: true },
  { name: "tokens", label: "tokens", show: whole, number: true },
  { name: "finish", label: "finish" },
  { name: "mass", label: "mean mass", show: fixed, number: true },
  { name: "least", label: "least mass", show: fixed, number: true, minor: true },
  { name: "largest", label: "largest set", show: whole, number: true },
  { name: "off", label: "off > 10 %", show: percent, number: true, minor: true },
  { name: "missing", label: "missing", show: whole, number: true, minor: true },
  { name: "reward", label: "reward", show: (value) => (value === null ? "–" : String(+value.toPrecision(4))), number: true },
  { name: "versions", label: "weights", minor: true },
  { name: "text", label: "text", wide: true, minor: true },
];

/** Return the link to a rollout, or to the token at `position` in the rollout. */
export function linkTo(row, position = null) {
  return `#/rollout/${row}${position === null ? "" : `/${position}`}`;
}

export function drawTable(section, data) {
  const { table, verdict, max_rows: maxRows } = data;
  const columns = COLUMNS.filter(({ name }) => name !== "reward" || table.reward.some((value) => value !== null));
  const searched = table.prompt.map((prompt, row) =>
    `prompt:${prompt} sample:${table.sample[row]} ${table.finish[row]} ${table.versions[row]} ${table.text[row]}`.toLowerCase());
  let sorting = { name: null, factor: 1 };
  let rows = [];
  let shown = 0;

  const body = el("tbody");
  const matches = el("output", { class: "hint" });
  const more = el("button", { type: "button", onclick: () => drawMore() }, `Show ${ROWS_AT_ONCE} more`);
  const search = el("input", { id: "search", type: "search", placeholder: "words, abort, prompt:3, a weight version", "aria-label": "Search the rollouts", oninput: () => refresh() });
  const onlyDetailed = el("input", { type: "checkbox", id: "only-detailed", onchange: () => refresh() });
  const heads = columns.map((column) =>
    el("th", { scope: "col", class: classOf(column), "data-column": column.name },
      el("button", { type: "button", onclick: () => sortBy(column) }, column.label)));

  function sortBy({ name, number }) {
    const isSame = sorting.name === name;
    sorting = { name, factor: isSame ? -sorting.factor : number && !["prompt", "sample", "mass", "least"].includes(name) ? -1 : 1 };
    for (const head of heads) {
      const direction = sorting.factor > 0 ? "ascending" : "descending";
      head.setAttribute("aria-sort", head.dataset.column === name ? direction : "none");
    }
    refresh();
  }

  function refresh() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows = searched.flatMap((text, row) => (words.every((word) => contains(text, word)) ? [row] : []));
    if (onlyDetailed.checked) rows = rows.filter(isDetailed);
    if (sorting.name) {
      const values = table[sorting.name];
      rows.sort((a, b) => compare(values[a], values[b], sorting.factor) || a - b);
    }
    matches.textContent = `${whole(rows.length)} of ${count(table.prompt?.length ?? 0, "rollout")}`;
    body.replaceChildren();
    shown = 0;
    drawMore();
  }

  function drawMore() {
    body.append(...rows.slice(shown, shown + ROWS_AT_ONCE).map(drawRow));
    shown = Math.min(rows.length, shown + ROWS_AT_ONCE);
    more.hidden = shown === rows.length;
  }

  function drawRow(row) {
    const cells = columns.map((column) => {
      const value = table[column.name][row];
      const kind = column.name === "finish" && value === "abort" ? "abort" : column.name === "missing" && value ? "bad" : "";
      const text = column.show ? column.show(value) : value;
      const isLink = column.name === "prompt" && isDetailed(row);
      return el("td", { class: `${classOf(column)} ${kind}`, title: column.wide ? value : null }, isLink ? el("a", { href: linkTo(row) }, text) : text);
    });
    return el("tr", { "data-row": row, class: isDetailed(row) ? "detailed" : "" }, cells);
  }

  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr.detailed");
    if (row && !event.target.closest("a") && !getSelection().toString()) location.hash = linkTo(row.dataset.row);
  });
  const left = verdict.rollouts - table.prompt.length;
  section.replaceChildren(
    el("h2", {}, "Rollouts"),
    el("p", { class: "hint" }, `The page shows linked rollouts token by token.${left > 0 ? ` The table holds the first ${whole(maxRows)} rollouts; ${whole(left)} more are in the statistics above.` : ""}`),
    el("div", { class: "tools" }, search, el("label", {}, onlyDetailed, " with tokens only"), matches),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of rollouts" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), body)),
    more);
  refresh();
}

function classOf({ number, minor, wide }) {
  return [number && "number", minor && "minor", wide && "wide"].filter(Boolean).join(" ");
}

/** Return whether the text of a table row matches one word of the search field. The words `prompt:3` and `sample:3`
 * match only the number 3, and not 30. Any other word matches every row whose text contains the word. */
function contains(text, word) {
  return /^(prompt|sample):\d+$/.test(word) ? text.split(" ", 2).includes(word) : text.includes(word);
}

/** Compare two values of a table column for sorting. A null comes last, in ascending and in descending order. */
function compare(a, b, factor) {
  if (a === null || b === null) return (a === null) - (b === null);
  return factor * (a < b ? -1 : a > b ? 1 : 0);
}
