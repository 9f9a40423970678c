// Bar charts and percentile bands, drawn as SVG in the available width.

import { el, svg } from "./dom.js";
import { compact } from "./number_format.js";

const MARGIN = { left: 52, right: 12, top: 10, bottom: 34 };

/** Return a figure: a caption, a line of text with the value under the pointer, and a chart. */
export function figure({ title, note, label, height = 210, draw, legend = [] }) {
  const readout = el("output", { class: "readout" }, note);
  const holder = el("div", { class: "chart", role: "img", "aria-label": label });
  const keys = legend.map(([kind, text]) => el("span", { class: `key key-${kind}` }, text));
  const caption = el("figcaption", {}, el("h3", {}, title), el("div", { class: "legend" }, keys), readout);
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (!width || width === Number(holder.dataset.width)) return;
    holder.dataset.width = width;
    const area = { left: MARGIN.left, top: MARGIN.top, width: width - MARGIN.left - MARGIN.right };
    area.height = height - MARGIN.top - MARGIN.bottom;
    const parts = draw(area, (text) => (readout.textContent = text ?? note));
    holder.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": true }, parts));
  }).observe(holder);
  return el("figure", {}, caption, holder);
}

/** Return a linear scale: a function that maps `low` to the pixel `start`, and `high` to `start + length`. */
export function linear(low, high, start, length) {
  return (value) => start + ((value - low) / (high - low || 1)) * length;
}

/** Return round numbers between `low` and `high`, for an axis's ticks. Their count is close to `wanted`. */
export function niceTicks(low, high, wanted = 4) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}

/** Draw grid lines with their values at the left. */
export function yAxis(area, ticks, y, format = compact) {
  return ticks.map((tick) =>
    svg("g", { class: "axis" },
      svg("line", { x1: area.left, x2: area.left + area.width, y1: y(tick), y2: y(tick) }),
      svg("text", { x: area.left - 8, y: y(tick) + 4, "text-anchor": "end" }, format(tick))));
}

/** Draw the horizontal axis: a line, the axis title, and the text of each tick.
 * Each entry of the list `ticks` is `[x, text]`, where `x` is the horizontal pixel of the tick. */
export function xAxis(area, ticks, title) {
  const bottom = area.top + area.height;
  const texts = ticks.map(([x, text]) => svg("text", { x, y: bottom + 15, "text-anchor": "middle" }, text));
  const name = svg("text", { x: area.left + area.width / 2, y: bottom + 31, "text-anchor": "middle", class: "title" }, title);
  const line = svg("line", { x1: area.left, x2: area.left + area.width, y1: bottom, y2: bottom, class: "base" });
  return svg("g", { class: "axis" }, line, texts, name);
}

/**
 * Draw a bar chart of counts on a log axis, so that small counts are visible. A count of 0 gets no bar.
 * Each entry of the list `slots` gives the bars at one place on the horizontal axis: `{ text, count, kind }` for one
 * bar, or `{ text, bars: [{ count, kind }, …] }` for several bars side by side. `kind` is a bar's
 * CSS class. While the pointer is over the place, the function `say` shows `text`.
 */
export function logBars(area, slots, say) {
  const barsOf = (slot) => slot.bars ?? [slot];
  const most = Math.max(1, ...slots.flatMap(barsOf).map((bar) => bar.count));
  const y = linear(-0.25, Math.log10(most) || 1, area.top + area.height, -area.height);
  const every = Math.ceil((Math.floor(Math.log10(most)) + 1) / 6);
  const ticks = [];
  for (let power = 0; 10 ** power <= most; power += every) ticks.push(power);
  const bottom = area.top + area.height;
  const width = area.width / slots.length;
  const drawn = slots.map((slot, i) => {
    const bars = barsOf(slot);
    const x = area.left + i * width;
    const gap = Math.min(2, width / 5);
    const each = (width - gap) / bars.length;
    const rects = bars.map((bar, k) => {
      const top = bar.count ? y(Math.log10(bar.count)) : bottom;
      return svg("rect", { class: bar.kind, x: x + gap / 2 + k * each, y: top, width: each, height: bottom - top });
    });
    return svg("g", { class: "bar", onpointerenter: () => say(slot.text), onpointerleave: () => say(null) },
      svg("rect", { class: "hit", x, y: area.top, width, height: area.height }), rects);
  });
  return [yAxis(area, ticks, y, (power) => compact(10 ** power)), drawn];
}

/** Draw a line through the points' medians, over a shaded band from each point's p10 to its p90. */
export function band(area, points, y, say) {
  const slot = area.width / points.length;
  const x = (i) => area.left + (i + 0.5) * slot;
  const known = points.map((point, i) => ({ ...point, i })).filter((point) => point.p50 !== null);
  const path = (side) => known.map((point) => `${x(point.i).toFixed(1)},${y(point[side]).toFixed(1)}`);
  const hits = points.map((point, i) =>
    svg("rect", { class: "hit", x: area.left + i * slot, y: area.top, width: slot, height: area.height,
      onpointerenter: () => say(point.text), onpointerleave: () => say(null) }));
  return [
    svg("polygon", { class: "spread", points: [...path("p90"), ...path("p10").reverse()].join(" ") }),
    svg("polyline", { class: "median", points: path("p50").join(" ") }),
    hits,
  ];
}
