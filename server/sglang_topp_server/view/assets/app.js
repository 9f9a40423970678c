// Entry point of the page: switch between the overview and one rollout, handle keys, and set the theme.

import { el } from "./dom.js";
import { count } from "./number_format.js";
import { overview } from "./page_data.js";
import { drawCharts } from "./distribution_charts.js";
import { drawTable, linkTo } from "./rollout_table.js";
import { closeRollout, drawAllTokens, drawRollout, shownRollout } from "./rollout_view.js";
import { drawVerdict } from "./verdict.js";
import { drawWorst } from "./worst_tokens.js";

const KEYS = {
  "← →": "previous, next token",
  "↑ ↓": "token in the line above, below",
  "Home End": "first, last token",
  "Page ↑ ↓": "200 tokens back, on",
  "[ ]": "previous, next rollout with tokens",
  "1 – 5": "color by kept mass, set size, entropy, log ratio",
  "Esc": "all rollouts",
  "/": "search the rollouts",
};
const THEMES = ["auto", "light", "dark"];
const data = overview();
const byId = (id) => document.getElementById(id);

function route() {
  const [, kind, row, position] = location.hash.split("/");
  const isRollout = kind === "rollout" && /^\d+$/.test(row ?? "");
  byId("overview-view").hidden = isRollout;
  byId("rollout-view").hidden = !isRollout;
  if (!isRollout) return closeRollout();
  return drawRollout(byId("rollout-view"), Number(row), /^\d+$/.test(position ?? "") ? Number(position) : null);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches("input[type=search]");
  const rollout = shownRollout();
  if (event.key === "Escape") {
    if (isTyping) event.target.blur();
    else location.hash = "#/";
  } else if (event.key === "/" && !isTyping && !rollout) {
    event.preventDefault();
    byId("search").focus();
  } else if (rollout && !isTyping) {
    const to = target(event.key, rollout);
    if (to !== null) {
      event.preventDefault();
      rollout.select(to);
    } else if (event.key === "[" || event.key === "]") {
      const at = data.detailed.indexOf(rollout.row) + (event.key === "[" ? -1 : 1);
      if (data.detailed[at] !== undefined) location.hash = linkTo(data.detailed[at]);
    } else if (/^[1-5]$/.test(event.key)) {
      document.querySelectorAll("input[name=metric]")[event.key - 1]?.click();
    }
  }
}

function target(key, { position, detail, tokenOnAdjacentLine }) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -200, PageDown: 200 };
  if (key in steps) return position + steps[key];
  if (key === "Home") return 0;
  if (key === "End") return detail.ids.length - 1;
  if (key === "ArrowUp") return tokenOnAdjacentLine(-1);
  if (key === "ArrowDown") return tokenOnAdjacentLine(1);
  return null;
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  byId("theme").onclick = () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
}

function notes() {
  const { detailed, verdict, wanted, detail_order: order, tokenizer, texts, max_listed: listed, version } = data;
  const left = order.length - detailed.length;
  const all = detailed.length === verdict.rollouts;
  return [
    `The numbers above are exact, and cover all ${count(verdict.rollouts, "rollout")}. ` +
      (all
        ? "This page shows all of them token by token."
        : `This page shows ${detailed.length} of them token by token: those of the worst tokens, other samples of their prompts, and those with the next worst tokens (--rollouts ${wanted}).`) +
      (left > 0 ? ` ${count(left, "more rollout")} would exceed the limit of 50 MB.` : ""),
    `Percentiles over positions are exact to steps of 0.0003 (mass), 0.005 nats (entropy), and 1 % (sizes above 1,024). A position lists its first ${listed} candidates and the sampled token. The page gives the number and the mass of the other candidates.`,
    texts === null
      ? "Rollouts hold token ids and whole texts. The texts of single tokens need the model's tokenizer (--tokenizer PATH)."
      : tokenizer.agree < tokenizer.checked
        ? `The tokenizer decodes ${tokenizer.checked - tokenizer.agree} of ${count(tokenizer.checked, "rollout")} to other texts than the engine returned: it may be another model's.`
        : null,
    "A ratio without replay divides the trainer's probability over the whole vocabulary by the rollout's probability within the set. If the trainer's probability is unknown, the ratio is the kept mass, which is the ratio of a trainer with the same weights.",
    `sglang-topp ${version}`,
  ].filter(Boolean);
}

byId("title").textContent = data.title;
byId("keys").append(...Object.entries(KEYS).flatMap(([key, text]) => [el("dt", {}, key), el("dd", {}, text)]));
byId("help").onclick = () => {
  byId("keys").hidden = !byId("keys").hidden;
  byId("help").setAttribute("aria-expanded", String(!byId("keys").hidden));
};
setTheme("auto");
drawVerdict(byId("verdict"), data);
drawCharts(byId("charts"), data);
drawWorst(byId("worst"), data);
drawTable(byId("table"), data);
byId("notes").append(...notes().map((text) => el("p", {}, text)));
byId("status").hidden = true;
addEventListener("hashchange", route);
addEventListener("keydown", onKey);
addEventListener("beforeprint", drawAllTokens);
route();
document.documentElement.dataset.ready = "true";
