// The charts of the overview: kept mass, set sizes, importance ratios, and percentiles by position.

import { el, svg } from "./dom.js";
import { band, figure, linear, logBars, niceTicks, xAxis, yAxis } from "./charts.js";
import { compact, count, fixed, percent, whole } from "./number_format.js";

const OFF_MASS = 0.9;

function share(number, total) {
  return `${count(number, "token")}, ${percent(number / total)}`;
}

function massChart({ mass, verdict }) {
  const total = mass.counts.reduce((sum, each) => sum + each, 0);
  if (!total) return null;
  const first = mass.counts.findIndex((each) => each);
  const from = Math.min(first, 40);
  const bars = mass.counts.slice(from).map((number, i) => {
    const [low, high] = [mass.edges[from + i], mass.edges[from + i + 1]];
    return { count: number, kind: high <= OFF_MASS + 1e-9 ? "off" : "fine", text: `${fixed(low, 2)} to ${fixed(high, 2)}: ${share(number, total)}` };
  });
  const note = `mean ${fixed(verdict.mean_mass)}; tokens on a log axis, so that the tail shows`;
  return figure({
    title: "Kept mass", note, legend: [["off", "below 0.9: off by more than 10 %"], ["fine", "0.9 and above"]],
    label: `Histogram of the kept mass of ${whole(total)} tokens, mean ${fixed(verdict.mean_mass)}`,
    draw: (area, say) => {
      const x = linear(mass.edges[from], 1, area.left, area.width);
      const ticks = niceTicks(mass.edges[from], 1, Math.min(8, area.width / 60)).map((tick) => [x(tick), String(tick)]);
      return [...logBars(area, bars, say), xAxis(area, ticks, "kept mass of a token's set")];
    },
  });
}

function sizeChart({ size, verdict }) {
  if (!verdict.sets) return null;
  const p99At = size.tops.findIndex((top) => top >= size.p99);
  const bars = size.counts.map((number, i) => {
    const range = i === 0 ? "1" : size.tops[i - 1] + 1 === size.tops[i] ? `${size.tops[i]}` : `${whole(size.tops[i - 1] + 1)} to ${whole(size.tops[i])}`;
    return { count: number, kind: i === 0 ? "single" : "fine", text: `${range} candidates: ${share(number, verdict.sets)}` };
  });
  const note = `mean ${fixed(size.mean, 1)}, median ${whole(size.median)}, p99 ${whole(size.p99)}, largest ${whole(size.largest)}`;
  return figure({
    title: "Set sizes", note, legend: [["single", `singletons, ${percent(size.counts[0] / verdict.sets)}`], ["fine", "2 and more"], ["mark", `p99: ${whole(size.p99)}`]],
    label: `Histogram of set sizes: ${note}`,
    draw: (area, say) => {
      const slot = area.width / bars.length;
      const every = Math.ceil(bars.length / (area.width / 46));
      const ticks = size.tops.map((top, i) => [area.left + (i + 0.5) * slot, compact(top), i]).filter(([, , i]) => i % every === 0);
      const low = p99At === 0 ? 0 : Math.log2(size.tops[p99At - 1]);
      const within = p99At === 0 ? 0.5 : Math.log2(size.p99) - low;
      const x = area.left + (p99At + within) * slot;
      return [...logBars(area, bars, say), xAxis(area, ticks, "candidates, up to (log axis)"), verticalMark(x, area, "p99")];
    },
  });
}

function verticalMark(x, area, text) {
  const line = svg("line", { x1: x, x2: x, y1: area.top, y2: area.top + area.height });
  return svg("g", { class: "mark" }, line, svg("text", { x: x - 4, y: area.top + 9, "text-anchor": "end" }, text));
}

function ratioChart({ ratios, verdict }) {
  const { without } = ratios;
  const replayed = ratios.with;
  const known = without ?? replayed;
  if (!known) return null;
  const both = [["off", "without replay", without], ["fine", "with replay", replayed]].filter(([, , of]) => of);
  const range = usedRange(both.map(([, , of]) => of.counts));
  const groups = range.map((i) => {
    const [low, high] = [known.edges[i - 1], known.edges[i]].map((edge) => edge === undefined ? null : fixed(Math.exp(edge), 2));
    const ratio = low === null ? `ratio below ${high}` : high === null ? `ratio above ${low}` : `ratio ${low} to ${high}`;
    const texts = both.map(([, name, of]) => `${count(of.counts[i], "token")} (${percent(of.counts[i] / of.tokens)}) ${name}`);
    return { text: `${ratio}: ${texts.join(", ")}`, bars: both.map(([kind, , of]) => ({ kind, count: of.counts[i] })) };
  });
  const said = both.map(([, name, of]) => `${name}: mean ${fixed(of.mean)}, ${percent(of.off)} off by more than 10 %, from ${fixed(of.least)} to ${fixed(of.most)}`).join("; ");
  const note = `${said}. ${replayed ? "" : "The file has no column trainer_masked_logprobs, so the ratios with replay are unknown. "}Tokens on a log axis.`;
  return figure({
    title: "Importance ratios", note, height: 230, legend: both.map(([kind, name]) => [kind, name]),
    label: `Histogram of importance ratios of ${whole(known.tokens)} of ${whole(verdict.tokens)} tokens. ${note}`,
    draw: (area, say) => {
      const slot = area.width / range.length;
      const edge = (i) => area.left + (i - range[0]) * slot;
      const step = known.edges[1] - known.edges[0];
      const x = (ratio) => edge((Math.log(ratio) - known.edges[0]) / step + 1);
      const ticks = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.4, 1.6, 2, 2.5].filter((ratio) => x(ratio) > area.left && x(ratio) < area.left + area.width);
      const fitting = ticks.filter((ratio, i) => area.width / ticks.length > 34 || ratio === 1 || i % 3 === 0);
      return [...logBars(area, groups, say), xAxis(area, fitting.map((ratio) => [x(ratio), String(ratio)]), "importance ratio of a token (log axis)")];
    },
  });
}

/** Return the indices of the histogram bars to draw in the chart of importance ratios: from the first to the last bar
 * with a count above 0. The chart always contains the bars for the ratios 0.8 to 1.25. */
function usedRange(histograms) {
  const { length } = histograms[0];
  const middle = (length - 1) / 2;
  const used = Array.from({ length }, (_, i) => i).filter((i) => Math.abs(i - middle) <= 11 || histograms.some((counts) => counts[i]));
  return Array.from({ length: used.at(-1) - used[0] + 1 }, (_, i) => used[0] + i);
}

function bandChart(name, bands, { title, digits, isLog = false, top = null }) {
  const { width, count: tokens } = bands;
  if (!tokens.length) return null;
  const points = tokens.map((number, i) => {
    const [p10, p50, p90] = [bands.p10[i], bands.p50[i], bands.p90[i]];
    const range = width === 1 ? `position ${i}` : `positions ${whole(i * width)} to ${whole((i + 1) * width - 1)}`;
    const text = p50 === null ? `${range}: no tokens` : `${range}: median ${fixed(p50, digits)}, p10 ${fixed(p10, digits)}, p90 ${fixed(p90, digits)} of ${count(number, "token")}`;
    return { p10, p50, p90, text };
  });
  const values = points.flatMap((point) => [point.p10, point.p90]).filter((value) => value !== null);
  const note = `median, and p10 to p90, of each ${width === 1 ? "position" : `${width} positions`}`;
  const place = isLog ? (value) => Math.log10(value) : (value) => value;
  return figure({
    title, note, label: `${title}: ${note}`, height: 190,
    legend: [["median", "median"], ["spread", "p10 to p90"]],
    draw: (area, say) => {
      const low = isLog ? 0 : name === "entropy" ? 0 : Math.min(...values, 0.9);
      const high = top ?? (Math.max(...values.map(place)) || 1);
      const scale = linear(low, high, area.top + area.height, -area.height);
      const ticks = isLog ? powers(high) : niceTicks(low, high, 4);
      const x = linear(0, points.length * width, area.left, area.width);
      const xTicks = niceTicks(0, points.length * width, Math.min(6, area.width / 60)).map((tick) => [x(tick), compact(tick)]);
      return [
        ...yAxis(area, ticks, scale, isLog ? (power) => compact(10 ** power) : compact),
        ...band(area, points, (value) => scale(place(value)), say),
        xAxis(area, xTicks, "position in the output"),
      ];
    },
  });
}

function powers(high) {
  const every = Math.ceil((high + 1) / 5);
  return Array.from({ length: Math.floor(high / every) + 1 }, (_, i) => i * every);
}

export function drawCharts(section, data) {
  const { bands } = data;
  const wide = [massChart(data), sizeChart(data)];
  const ratios = ratioChart(data);
  const over = [
    bandChart("size", bands.size, { title: "Set size over the position", digits: 0, isLog: true }),
    bandChart("mass", bands.mass, { title: "Kept mass over the position", digits: 4, top: 1 }),
    bandChart("entropy", bands.entropy, { title: "Entropy (nats) over the position", digits: 2 }),
  ];
  const noRatios = el("p", { class: "hint" }, "Importance ratios need the trainer's log-probs: add_trainer_columns writes the columns trainer_logprobs and trainer_masked_logprobs.");
  section.replaceChildren(
    el("div", { class: "pair" }, wide.filter(Boolean)),
    el("div", { class: "triple" }, over.filter(Boolean)),
    ratios ?? noRatios);
}
