// The first screen: the verdict, the distributions, and the table of rollouts. `rollout.js` follows in the same
// script.

const data = JSON.parse(document.getElementById("overview").textContent);
const byId = (id) => document.getElementById(id);

/** Create an element. Strings among the children become text nodes, never HTML. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    // The page's security policy blocks style attributes.
    else if (name === "style") for (const [side, share] of Object.entries(value)) node.style[side] = `${100 * share}%`;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// For a missing number, these functions return a dash.
const isMissing = (value) => value === null || value === undefined;
const whole = (value) => (isMissing(value) ? "–" : Math.round(value).toLocaleString("en-US"));
const fixed = (value, digits = 4) => (isMissing(value) ? "–" : value.toFixed(digits));
const short = (value) => (isMissing(value) ? "–" : Number.isInteger(value) ? whole(value) : String(+value.toPrecision(4)));
const count = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);

/** Format a share from 0 to 1, such as 12.3 %. */
function percent(share) {
  if (isMissing(share)) return "–";
  const value = 100 * share;
  return `${value !== 0 && value < 0.1 ? value.toPrecision(1) : value.toFixed(1)}\u00a0%`;
}

// -- metrics -------------------------------------------------------------------------------------------

const LABELS = {
  entropy: "entropy (nats)",
  mass: "kept mass",
  sizes: "set size",
  ratio: "ratio without replay",
  replayed: "ratio with replay",
};
const isRatio = (metric) => metric === "ratio" || metric === "replayed";

// The bounds between seven levels, which have colors. The kept mass is at least the threshold p of the sets.
const RATIO_BOUNDS = [0.5, 0.9, 0.99, 1.01, 1.1, 2];
const leastMass = Math.min(0.999, ...data.runs.map((run) => run.p ?? run.metrics.mass?.least ?? 1));
const BOUNDS = {
  entropy: [0.01, 0.1, 0.5, 1, 2, 4],
  mass: [0, 1, 2, 3, 4, 5].map((k) => leastMass + ((1 - leastMass) * k) / 6),
  sizes: [1, 2, 4, 10, 50, 500],
  ratio: RATIO_BOUNDS,
  replayed: RATIO_BOUNDS,
};

function levelNames(metric) {
  const bounds = BOUNDS[metric];
  const ranges = bounds.map((high, i) => {
    const low = i && bounds[i - 1] + (metric === "sizes" ? 1 : 0);
    return i === 0 ? `≤ ${short(high)}` : low === high ? short(high) : `${short(low)}–${short(high)}`;
  });
  return [...ranges, `> ${short(bounds[5])}`];
}

/** Return the CSS class of a level's color. A small kept mass and a large set are dark; ratios have two hues. */
function levelClass(metric, level) {
  return isRatio(metric) ? `d${level}` : `c${metric === "mass" ? 6 - level : level}`;
}

function colorClass(metric, value) {
  if (isMissing(value)) return "unknown";
  return levelClass(metric, BOUNDS[metric].filter((bound) => value > bound).length);
}

const swatch = (kind, text) => el("li", {}, el("span", { class: `swatch ${kind}` }), text);
const runClass = (i) => `run${i % 4}`;
const runMark = (i) => data.runs.length > 1 && el("span", { class: `swatch ${runClass(i)}` });

/** Return a list item with a name, a bar of `share / most` of the width, and a value. */
function bar(kind, name, share, most, value, attributes = {}) {
  const filled = el("i", { style: { width: share / most } });
  const parts = [el("span", { class: "name" }, name), el("span", { class: "bar" }, filled)];
  return el("li", { class: kind, ...attributes }, parts, el("span", { class: "value" }, value));
}

// -- the verdict -----------------------------------------------------------------------------------------

function names(pairs, total, most = 4) {
  const shown = pairs.slice(0, most).map(([name, number]) => `${name || "(empty)"}: ${percent(number / total)}`);
  return shown.join(" · ") + (pairs.length > most ? ` · ${pairs.length - most} more` : "");
}

function sentence({ missing, off_1: off1, off_10: off10, ratios_known: known }, { start, replayed }) {
  if (missing) {
    return ["bad", `${count(missing, "generated token")} without a candidate set. Do not train on them.`];
  }
  if (!start) return ["neutral", "Every generated token has its set. The kept mass is unknown."];
  const given = known ? "" : " for a trainer with the same weights";
  const shares = `${percent(off1)} are off by more than 1\u00a0%, and ${percent(off10)} by more than 10\u00a0%`;
  const after = replayed ? ` With replay, they start at ${fixed(replayed.mean, 3)}.` : "";
  const needsReplay = off1 >= 0.01;
  const text = `Without replay, ratios start at ${fixed(start.mean, 3)} on average${given} (should be 1): ${shares}.`;
  return [needsReplay ? "warn" : "good", text + after + (needsReplay ? " Replay the sets." : "")];
}

/** Return how many groups (the samples of a prompt) have known rewards, and in how many all rewards are equal. */
function equalGroups(run) {
  const groups = new Map();
  data.table.reward.forEach((reward, row) => {
    if (reward === null || data.table.run[row] !== run.name) return;
    const prompt = data.table.prompt[row];
    groups.set(prompt, [...(groups.get(prompt) ?? []), reward]);
  });
  const several = [...groups.values()].filter((rewards) => rewards.length > 1);
  return [several.filter((rewards) => new Set(rewards).size === 1).length, several.length];
}

function verdictOf(run) {
  const { verdict: facts, metrics } = run;
  const [kind, text] = sentence(facts, metrics);
  const unknown = facts.without_logprobs ? `, ${count(facts.without_logprobs, "set")} without log-probs` : "";
  const ratios = facts.ratios_known ? `by the trainer's log-probs for ${count(facts.ratios_known, "token")}` : "by the kept mass";
  const [equal, groups] = equalGroups(run);
  const tiles = [
    ["rollouts", whole(facts.rollouts), names(facts.reasons, facts.rollouts)],
    ["tokens", whole(facts.tokens), facts.appended ? `${whole(facts.appended)} of them from tools` : "all generated"],
    groups > 0 && ["equal rewards", `${whole(equal)} of ${whole(groups)}`, "groups without an advantage"],
    ["mean set size", fixed(metrics.sizes?.mean, 1), `median ${whole(facts.median_size)}, p99 ${whole(facts.p99_size)}`],
    ["mean kept mass", fixed(metrics.mass?.mean), `over ${count(facts.sets, "set")}${unknown}`],
    ["off by > 1 %", percent(facts.off_1), ratios],
    ["missing sets", whole(facts.missing), "must be 0"],
    ["weight versions", whole(facts.versions.length), `tokens of ${names(facts.versions, sum(facts.versions.map(([, number]) => number)), 3)}`],
  ].filter(Boolean);
  return el("section", { "aria-label": run.name },
    data.runs.length > 1 && el("h2", {}, runMark(data.runs.indexOf(run)), run.name),
    el("p", { class: `sentence ${kind}` }, text),
    el("dl", { class: "tiles" }, tiles.map(([name, value, note]) =>
      el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value), el("p", {}, note)))));
}

// -- histograms and scatter plots ------------------------------------------------------------------------

const BARS = 40;
const MAX_POINTS = 3000;

/**
 * Draw the histograms of all runs over each other. Bin k has the values above `edges[k - 1]`, up to `edges[k]`.
 * The chart spans the bins of 99 % of the values, and `mark`; the others count in its first and last bar.
 */
function histogram(edges, countsOfRuns, noun, mark = null) {
  // A run may have no values, such as the ratios of a file without a trainer's log-probs.
  const totals = countsOfRuns.map((counts) => sum(counts) || 1);
  const numKnown = countsOfRuns.filter((counts) => sum(counts)).length;
  const shares = edges.concat(0).map((_, k) => sum(countsOfRuns.map((counts, i) => counts[k] / totals[i])) / numKnown);
  const binAt = (share) => { let seen = 0; return shares.findIndex((each) => (seen += each) >= share); };
  const marked = mark === null ? [] : [edges.findIndex((edge) => edge >= mark)];
  const first = Math.min(binAt(0.005), ...marked);
  const last = Math.max(binAt(0.995), ...marked, first);
  const perBar = Math.ceil((last - first + 1) / BARS);
  const numBars = Math.ceil((last - first + 1) / perBar);
  const bars = countsOfRuns.map((counts) => Array(numBars).fill(0).map((_, i) =>
    sum(counts.slice(i === 0 ? 0 : first + i * perBar, i === numBars - 1 ? undefined : first + (i + 1) * perBar))));
  const most = Math.max(...bars.flatMap((each, i) => each.map((number) => number / totals[i])));
  const range = (i) => [i === 0 ? null : edges[first + i * perBar - 1], i === numBars - 1 ? null : edges[first + (i + 1) * perBar - 1]];
  const label = ([low, high]) => (low === null && high === null ? "all" : low === null ? `≤ ${short(high)}` : high === null ? `> ${short(low)}` : `${short(low)}–${short(high)}`);
  const drawn = bars.flatMap((each, run) => each.map((number, i) => number > 0 && el("i", {
    class: runClass(run), title: `${label(range(i))}: ${count(number, noun)} (${percent(number / totals[run])})`, "data-count": number,
    style: { left: i / numBars, width: 1 / numBars, height: number / totals[run] / most },
  })));
  const [low, high] = [edges[Math.max(0, first - 1)], edges[Math.min(last, edges.length - 1)]];
  const line = mark !== null && el("b", { class: "mark", title: `${mark}`, style: { left: (marked[0] - first + 1) / (numBars * perBar) } });
  return [el("div", { class: "chart" }, drawn, line), el("p", { class: "axis" }, el("span", {}, short(low)), el("span", {}, short(high)))];
}

function drawDistribution(metric) {
  const known = data.runs.map((run) => run.metrics[metric]);
  if (!known.some(Boolean)) return null;
  const edges = data.edges[metric];
  const digits = metric === "sizes" ? 0 : 4;
  const hints = known.map((all, i) => all &&
    el("p", { class: "hint" }, runMark(i), `mean ${fixed(all.mean, digits || 1)}, from ${fixed(all.least, digits)} to ${fixed(all.largest, digits)}`));
  const counts = known.map((all) => all?.counts ?? Array(edges.length + 1).fill(0));
  return el("figure", { "data-metric": metric }, el("h3", {}, LABELS[metric] + (metric === "sizes" ? ", log scale" : "")), hints, histogram(edges, counts, "token", isRatio(metric) ? 1 : null));
}

const isNumeric = (name) => data.table[name].every((value) => value === null || typeof value === "number") && data.table[name].some((value) => value !== null);
const boundsOf = (values) => values.reduce(([low, high], value) => (value === null ? [low, high] : [Math.min(low, value), Math.max(high, value)]), [Infinity, -Infinity]);

/** Draw the histogram of one column of the table. */
function columnHistogram(name) {
  const [low, high] = boundsOf(data.table[name]);
  const edges = low === high ? [low] : Array.from({ length: BARS + 1 }, (_, k) => low + ((high - low) * k) / BARS);
  const counts = data.runs.map(() => Array(edges.length + 1).fill(0));
  data.table[name].forEach((value, row) => {
    const k = low === high ? 0 : Math.ceil(((value - low) / (high - low)) * BARS);
    if (value !== null) counts[runOf(row)][k] += 1;
  });
  return histogram(edges, counts, "rollout");
}

const runOf = (row) => data.runs.findIndex((run) => run.name === data.table.run[row]);

/** Return a function that maps a row to a color class, and the legend. */
function coloring(name) {
  const values = data.table[name];
  if (!isNumeric(name)) {
    const kinds = [...new Set(values)];
    return [(row) => runClass(kinds.indexOf(values[row])), kinds.slice(0, 4).map((kind, i) => swatch(runClass(i), kind || "(empty)"))];
  }
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  const bounds = [...new Set([1, 2, 3, 4, 5, 6].map((k) => sorted[Math.floor((k * (sorted.length - 1)) / 7)]))];
  const level = (value) => (isMissing(value) ? "unknown" : `c${bounds.filter((bound) => value > bound).length}`);
  return [(row) => level(values[row]), [...bounds, sorted.at(-1)].map((bound) => swatch(level(bound), `≤ ${short(bound)}`))];
}

function scatter(x, y, color) {
  const [xs, ys] = [data.table[x], data.table[y]];
  const [[left, right], [low, high]] = [boundsOf(xs), boundsOf(ys)];
  const [classOf, legend] = coloring(color);
  const known = xs.map((_, row) => row).filter((row) => xs[row] !== null && ys[row] !== null);
  const step = Math.ceil(known.length / MAX_POINTS) || 1;
  const at = (value, from, to) => (to === from ? 0.5 : (value - from) / (to - from));
  const points = known.filter((_, i) => i % step === 0).map((row) => el("a", {
    class: classOf(row), href: isDetailed(row) ? linkTo(row) : null, "data-row": row,
    title: `rollout ${row}: ${x} ${short(xs[row])}, ${y} ${short(ys[row])}, ${color} ${data.table[color][row]}`,
    style: { left: at(xs[row], left, right), bottom: at(ys[row], low, high) },
  }));
  return [
    el("p", { class: "hint" }, `${y}, from ${short(low)} to ${short(high)}${step > 1 ? `; one point in ${step}` : ""}`),
    el("div", { class: "chart points" }, el("div", {}, points)),
    el("p", { class: "axis" }, el("span", {}, short(left)), el("span", {}, x), el("span", {}, short(right))),
    el("ul", { class: "scale" }, legend),
  ];
}

function drawColumns() {
  const numeric = Object.keys(data.table).filter((name) => isNumeric(name) && name !== "prompt" && name !== "sample");
  const chosen = { x: "tokens", y: numeric.includes("reward") ? "reward" : numeric.includes("mass") ? "mass" : "tokens", color: data.runs.length > 1 ? "run" : "finish" };
  const figures = [el("figure", { "data-chart": "histogram" }), el("figure", { "data-chart": "scatter" })];
  const choice = (axis, options) => el("label", {}, `${axis} `, el("select", { name: axis, onchange: (event) => { chosen[axis] = event.target.value; draw(); } },
    options.map((name) => el("option", { value: name, selected: name === chosen[axis] }, name))));

  function draw() {
    figures[0].replaceChildren(el("h3", {}, chosen.y), ...columnHistogram(chosen.y));
    figures[1].replaceChildren(el("h3", {}, `${chosen.y} by ${chosen.x}`), ...scatter(chosen.x, chosen.y, chosen.color));
  }

  byId("columns").replaceChildren(
    el("h2", {}, "Rewards and lengths"),
    el("div", { class: "tools" }, choice("y", numeric), choice("x", numeric), choice("color", [...numeric, "finish", "versions", "run"])),
    el("div", { class: "figures" }, figures));
  draw();
}

// -- the table of rollouts -------------------------------------------------------------------------------

const ROWS_AT_ONCE = 100;
const COLUMNS = [
  { name: "run" },
  { name: "prompt", show: whole },
  { name: "sample", show: whole },
  { name: "asked", label: "prompt's end", wide: true, minor: true },
  { name: "tokens", show: whole, falls: true },
  { name: "finish" },
  { name: "reward", show: short, falls: true },
  { name: "entropy", label: "mean entropy", show: fixed, falls: true, minor: true },
  { name: "mass", label: "mean mass", show: fixed },
  { name: "least", label: "least mass", show: fixed },
  { name: "largest", label: "largest set", show: whole, falls: true },
  { name: "worst_ratio", label: "worst ratio", show: fixed },
  { name: "off", label: "off > 10 %", show: percent, falls: true, minor: true },
  { name: "missing", show: whole, falls: true, minor: true },
  { name: "versions", label: "weights", minor: true },
  { name: "text", wide: true, minor: true },
];

const isDetailed = (row) => byId(`detail-${row}`) !== null;
const linkTo = (row, position = null) => `#/rollout/${row}${position === null ? "" : `/${position}`}`;

function drawTable() {
  const table = { ...data.table, asked: data.table.prompt.map((prompt) => data.prompts[prompt]) };
  const known = new Set(COLUMNS.map(({ name }) => name));
  const others = Object.keys(table).filter((name) => !known.has(name));
  const columns = [...COLUMNS.slice(0, -1), ...others.map((name) => ({ name, show: short, falls: true, minor: true })), COLUMNS.at(-1)]
    .filter(({ name }) => (name === "run" ? data.runs.length > 1 : table[name].some((value) => value !== null)));
  const classOf = ({ show, minor, wide }) => [show && "number", minor && "minor", wide && "wide"].filter(Boolean).join(" ");
  const searched = table.prompt.map((prompt, row) =>
    `prompt:${prompt} sample:${table.sample[row]} ${["run", "finish", "versions", "asked", "text"].map((name) => table[name][row]).join(" ")} `.toLowerCase());
  let sorting = { name: null, factor: 1 };
  let rows = [];

  const body = el("tbody");
  const matches = el("output", { class: "hint" });
  const more = el("button", { type: "button", onclick: () => drawMore() }, `Show ${ROWS_AT_ONCE} more`);
  const search = el("input", { type: "search", placeholder: "words, abort, prompt:3, a version", "aria-label": "Search the rollouts", oninput: () => refresh() });
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
    if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
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
      const text = column.show ? column.show(value) : textNodes(value);
      // The numbers of a worst token link to this token.
      const at = data.positions[column.name]?.[row];
      const isLink = isDetailed(row) && (column.name === "prompt" || !isMissing(at));
      const attributes = { class: classOf(column), title: column.wide ? value : null };
      return el("td", attributes, isLink ? el("a", { href: linkTo(row, at ?? null) }, text) : text);
    });
    return el("tr", { "data-row": row }, cells);
  }

  const left = sum(data.runs.map((run) => run.verdict.rollouts)) - table.prompt.length;
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

function notes({ runs, table, texts, megabytes, num_other_texts: others, max_listed: listed, version }) {
  const total = sum(runs.map((run) => run.verdict.rollouts));
  const detailed = table.prompt.filter((_, row) => isDetailed(row)).length;
  return [
    `The verdict and the distributions of tokens are exact, and cover all ${count(total, "rollout")}. ` +
      (detailed === total
        ? "This page shows all of them token by token."
        : `This page shows ${whole(detailed)} of them token by token: those with the worst tokens, up to ${megabytes} MB (--megabytes).`),
    `A position lists its first ${listed} candidates and the sampled token, and the number and the mass of the others.`,
    texts === null
      ? "Rollouts hold token ids and whole texts. The texts of single tokens need the model's tokenizer (--tokenizer PATH)."
      : others
        ? `The tokenizer decodes ${count(others, "rollout")} to other texts than the engine returned: it may be another model's.`
        : null,
    runs.some((run) => run.verdict.ratios_known)
      ? "A ratio without replay divides the trainer's probability over the whole vocabulary by the rollout's probability within the set."
      : "Importance ratios need the trainer's log-probs: add_trainer_columns writes them. Without them, a ratio is the kept mass, as for a trainer with the same weights.",
    `sglang-topp ${version}`,
  ].filter(Boolean);
}

function drawOverview() {
  byId("title").textContent = data.runs.map((run) => run.name).join(" and ");
  byId("verdict").replaceChildren(...data.runs.map(verdictOf));
  byId("distributions").append(...Object.keys(LABELS).map(drawDistribution).filter(Boolean));
  drawColumns();
  drawTable();
  byId("notes").append(...notes(data).map((text) => el("p", {}, text)));
}
