// The first screen: the verdict, the distribution of each metric, and the table of rollouts. `rollout.js` follows
// in the same script.

const data = JSON.parse(document.getElementById("overview").textContent);
const byId = (id) => document.getElementById(id);

/** Create an element. Strings among the children become text nodes, never HTML. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

// For a missing number, these functions return a dash.
const isMissing = (value) => value === null || value === undefined;
const whole = (value) => (isMissing(value) ? "–" : Math.round(value).toLocaleString("en-US"));
const fixed = (value, digits = 4) => (isMissing(value) ? "–" : value.toFixed(digits));
const count = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Format a share from 0 to 1, such as 12.3 %. */
function percent(share) {
  if (isMissing(share)) return "–";
  const value = 100 * share;
  return `${value !== 0 && value < 0.1 ? value.toPrecision(1) : value.toFixed(1)} %`;
}

// -- metrics -------------------------------------------------------------------------------------------

const LABELS = {
  mass: "kept mass",
  sizes: "set size",
  entropy: "entropy (nats)",
  ratio: "ratio without replay",
  replayed: "ratio with replay",
};

/** Return the CSS class of a level's color. A small kept mass and a large set are dark; ratios have two hues. */
function levelClass(metric, level) {
  if (metric === "ratio" || metric === "replayed") return `d${level}`;
  return `c${metric === "mass" ? 6 - level : level}`;
}

function colorClass(metric, value) {
  if (isMissing(value)) return "unknown";
  return levelClass(metric, data.metrics[metric].bounds.filter((bound) => value > bound).length);
}

/** Return a list item with a name, a bar of `share / most` of the width, and a value. */
function bar(kind, name, share, most, value, attributes = {}) {
  const filled = el("i", { class: kind });
  // The page's security policy blocks style attributes.
  filled.style.width = `${(100 * share) / most}%`;
  const parts = [el("span", { class: "name" }, name), el("span", { class: "bar" }, filled)];
  return el("li", { class: kind, ...attributes }, parts, el("span", { class: "value" }, value));
}

// -- verdict and distributions ---------------------------------------------------------------------------

function names(pairs, most = 4) {
  const shown = pairs.slice(0, most).map(([name, number]) => `${name || "(empty)"}: ${whole(number)}`);
  return shown.join(" · ") + (pairs.length > most ? ` · ${pairs.length - most} more` : "");
}

function sentence({ missing, off, mean_mass: mass, ratios_known: ratios }) {
  if (missing) {
    return ["bad", `${count(missing, "generated token")} without a candidate set. Do not train on them.`];
  }
  if (off === null) return ["neutral", "Every generated token has its set. The kept mass is unknown."];
  const given = ratios ? "" : " for a trainer with the same weights";
  const share = `the mean kept mass is ${fixed(mass)}, and ${percent(off)} of the ratios are off by more than 10 %${given}`;
  const needsReplay = off >= 0.01 || mass < 0.99;
  const end = needsReplay ? ": replay the sets." : ".";
  return [needsReplay ? "warn" : "good", `Every generated token has its set. Without replay, ${share}${end}`];
}

function drawVerdict(facts) {
  const [kind, text] = sentence(facts);
  const unknown = facts.without_logprobs ? `, ${count(facts.without_logprobs, "set")} without log-probs` : "";
  const sizes = `median ${whole(facts.median_size)}, p99 ${whole(facts.p99_size)}`;
  const ratios = facts.ratios_known
    ? `by the trainer's log-probs for ${count(facts.ratios_known, "token")}, else by the kept mass`
    : "by the kept mass: a trainer with the same weights";
  const tiles = [
    ["rollouts", whole(facts.rollouts), names(facts.reasons)],
    ["tokens", whole(facts.tokens), facts.appended ? `${whole(facts.appended)} of them from tools` : "all generated"],
    ["mean set size", fixed(data.metrics.sizes.of_all?.mean, 1), sizes],
    ["mean kept mass", fixed(facts.mean_mass), `over ${count(facts.sets, "set")}${unknown}`],
    ["off by > 10 %", percent(facts.off), ratios],
    ["missing sets", whole(facts.missing), "must be 0"],
    ["weight versions", whole(facts.versions.length), `tokens of ${names(facts.versions, 3)}`],
  ];
  byId("verdict").replaceChildren(
    el("p", { class: `sentence ${kind}` }, text),
    el("dl", { class: "tiles" }, tiles.map(([name, value, note]) =>
      el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value), el("p", {}, note)))));
}

function drawDistribution(metric) {
  const { levels, of_all: all } = data.metrics[metric];
  if (!all) return null;
  const total = all.counts.reduce((sum, each) => sum + each, 0);
  const most = Math.max(...all.counts);
  const bars = levels.map((level, i) =>
    bar(levelClass(metric, i), level, all.counts[i], most, percent(all.counts[i] / total),
      { title: count(all.counts[i], "token"), "data-count": all.counts[i] }));
  const digits = metric === "sizes" ? 0 : 4;
  const range = `mean ${fixed(all.mean, digits || 1)}, from ${fixed(all.least, digits)} to ${fixed(all.largest, digits)}`;
  return el("figure", { "data-metric": metric },
    el("h3", {}, LABELS[metric]), el("p", { class: "hint" }, range), el("ol", { class: "bars" }, bars));
}

// -- the table of rollouts -------------------------------------------------------------------------------

const ROWS_AT_ONCE = 100;
const COLUMNS = [
  { name: "prompt", show: whole },
  { name: "sample", show: whole },
  { name: "tokens", show: whole, falls: true },
  { name: "finish" },
  { name: "mass", label: "mean mass", show: fixed },
  { name: "least", label: "least mass", show: fixed },
  { name: "largest", label: "largest set", show: whole, falls: true },
  { name: "worst_ratio", label: "worst ratio", show: fixed, isOptional: true },
  { name: "off", label: "off > 10 %", show: percent, falls: true, minor: true },
  { name: "missing", show: whole, falls: true, minor: true },
  { name: "reward", show: (value) => (value === null ? "–" : String(+value.toPrecision(4))), falls: true, isOptional: true },
  { name: "versions", label: "weights", minor: true },
  { name: "text", wide: true, minor: true },
];

const isDetailed = (row) => byId(`detail-${row}`) !== null;
const linkTo = (row, position = null) => `#/rollout/${row}${position === null ? "" : `/${position}`}`;

function drawTable({ table, verdict, metrics }) {
  const columns = COLUMNS.filter(({ name, isOptional }) => !isOptional || table[name].some((value) => value !== null));
  const classOf = ({ show, minor, wide }) => [show && "number", minor && "minor", wide && "wide"].filter(Boolean).join(" ");
  const searched = table.prompt.map((prompt, row) =>
    `prompt:${prompt} sample:${table.sample[row]} ${table.finish[row]} ${table.versions[row]} ${table.text[row]} `.toLowerCase());
  let sorting = { name: null, factor: 1 };
  let rows = [];

  const body = el("tbody");
  const matches = el("output", { class: "hint" });
  const more = el("button", { type: "button", onclick: () => drawMore() }, `Show ${ROWS_AT_ONCE} more`);
  const search = el("input", { type: "search", placeholder: "words, abort, prompt:3, a weight version", "aria-label": "Search the rollouts", oninput: () => refresh() });
  const heads = columns.map((column) =>
    el("th", { scope: "col", class: classOf(column), "data-column": column.name },
      el("button", { type: "button", onclick: () => sortBy(column) }, column.label ?? column.name)));

  function sortBy({ name, falls }) {
    sorting = { name, factor: sorting.name === name ? -sorting.factor : falls ? -1 : 1 };
    for (const head of heads) {
      const direction = sorting.factor > 0 ? "ascending" : "descending";
      head.setAttribute("aria-sort", head.dataset.column === name ? direction : "none");
    }
    refresh();
  }

  /** Compare two values of the sorted column. A null comes last, in ascending and in descending order. */
  function compare(a, b) {
    if (a === null || b === null) return (a === null) - (b === null);
    // A ratio is as bad as its inverse.
    if (sorting.name === "worst_ratio") [a, b] = [-Math.abs(Math.log(a)), -Math.abs(Math.log(b))];
    return sorting.factor * (a < b ? -1 : a > b ? 1 : 0);
  }

  function refresh() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    // `prompt:3` does not match prompt 30.
    const matchesWord = (text, word) => text.includes(/^(prompt|sample):\d+$/.test(word) ? `${word} ` : word);
    rows = searched.flatMap((text, row) => (words.every((word) => matchesWord(text, word)) ? [row] : []));
    if (sorting.name) {
      const values = table[sorting.name];
      rows.sort((a, b) => compare(values[a], values[b]) || a - b);
    }
    matches.textContent = `${whole(rows.length)} of ${count(table.prompt.length, "rollout")}`;
    body.replaceChildren();
    drawMore();
  }

  function drawMore() {
    const shown = body.childElementCount;
    body.append(...rows.slice(shown, shown + ROWS_AT_ONCE).map(drawRow));
    more.hidden = body.childElementCount === rows.length;
  }

  function drawRow(row) {
    const cells = columns.map((column) => {
      const value = table[column.name][row];
      const text = column.show ? column.show(value) : value;
      // The numbers of a worst token link to this token.
      const at = table[`${column.name}_at`]?.[row];
      const isLink = isDetailed(row) && (column.name === "prompt" || !isMissing(at));
      const attributes = { class: classOf(column), title: column.wide ? value : null };
      return el("td", attributes, isLink ? el("a", { href: linkTo(row, at ?? null) }, text) : text);
    });
    return el("tr", { "data-row": row }, cells);
  }

  const left = verdict.rollouts - table.prompt.length;
  const hint = "Linked rollouts are shown token by token. The least mass, the largest set, and the worst ratio link to their tokens.";
  byId("table").replaceChildren(
    el("h2", {}, "Rollouts"),
    el("p", { class: "hint" }, hint + (left > 0 ? ` ${count(left, "more rollout")} are in the statistics alone.` : "")),
    el("div", { class: "tools" }, search, matches),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of rollouts" },
      el("table", {}, el("thead", {}, el("tr", {}, heads)), body)),
    more);
  refresh();
}

function notes({ verdict, detailed, wanted, texts, num_other_texts: others, max_listed: listed, version }) {
  const all = detailed.length === verdict.rollouts;
  return [
    `The numbers above are exact, and cover all ${count(verdict.rollouts, "rollout")}. ` +
      (all
        ? "This page shows all of them token by token."
        : `This page shows ${detailed.length} of them token by token: those with the worst tokens (--rollouts ${wanted}).`) +
      (detailed.length < wanted ? ` ${count(wanted - detailed.length, "more rollout")} would exceed the limit of 50 MB.` : ""),
    `A position lists its first ${listed} candidates and the sampled token, and the number and the mass of the others.`,
    texts === null
      ? "Rollouts hold token ids and whole texts. The texts of single tokens need the model's tokenizer (--tokenizer PATH)."
      : others
        ? `The tokenizer decodes ${count(others, "rollout")} to other texts than the engine returned: it may be another model's.`
        : null,
    verdict.ratios_known
      ? "A ratio without replay divides the trainer's probability over the whole vocabulary by the rollout's probability within the set."
      : "Importance ratios need the trainer's log-probs: add_trainer_columns writes them. Without them, a ratio is the kept mass, as for a trainer with the same weights.",
    `sglang-topp ${version}`,
  ].filter(Boolean);
}

byId("title").textContent = data.title;
drawVerdict(data.verdict);
byId("distributions").append(...Object.keys(LABELS).map(drawDistribution).filter(Boolean));
drawTable(data);
byId("notes").append(...notes(data).map((text) => el("p", {}, text)));
