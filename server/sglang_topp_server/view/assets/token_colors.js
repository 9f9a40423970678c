// Token colors: the metrics that color tokens, the levels of each metric, and the CSS class of each level.

/** The metrics that color tokens, by name. A metric's function `level` maps a token's value to a color level
 * from 0 to 6, and the CSS classes `c0` to `c6` color the tokens of these levels. Level 0 has no color. If a
 * value equals the bound between two levels, the lower of the two levels applies. A metric with `diverging`
 * has no function `level`. Its levels follow `DIVERGING_BOUNDS`, and its CSS classes are `d0` to `d6`. */
export const METRICS = {
  mass: {
    label: "kept mass",
    levels: ["> 0.999", "0.99–0.999", "0.95–0.99", "0.9–0.95", "0.8–0.9", "0.5–0.8", "< 0.5"],
    level: (value) => [0.999, 0.99, 0.95, 0.9, 0.8, 0.5].filter((bound) => value < bound).length,
  },
  sizes: {
    label: "set size",
    levels: ["1", "2", "3–4", "5–10", "11–50", "51–500", "> 500"],
    level: (value) => [1, 2, 4, 10, 50, 500].filter((bound) => value > bound).length,
  },
  entropy: {
    label: "entropy",
    unit: "nats",
    levels: ["< 0.01", "0.01–0.1", "0.1–0.5", "0.5–1", "1–2", "2–4", "> 4"],
    level: (value) => [0.01, 0.1, 0.5, 1, 2, 4].filter((bound) => value > bound).length,
  },
  ratio: { label: "log ratio without replay", diverging: true },
  replayed: { label: "log ratio with replay", diverging: true },
};

const DIVERGING_BOUNDS = [-0.5, -0.1, -0.01, 0.01, 0.1, 0.5];
const DIVERGING_LEVELS = ["< −0.5", "−0.5…−0.1", "−0.1…−0.01", "±0.01", "0.01…0.1", "0.1…0.5", "> 0.5"];

/** Return the CSS class of a token's color. */
export function colorClass(metric, value) {
  if (value === undefined || Number.isNaN(value)) return "unknown";
  const { diverging, level } = METRICS[metric];
  return diverging ? `d${DIVERGING_BOUNDS.filter((bound) => value > bound).length}` : `c${level(value)}`;
}

/** Return the legend of a metric: a list of `[class, text]`, each level's CSS class and value range. */
export function legendOf(metric) {
  const { diverging, levels } = METRICS[metric];
  return (diverging ? DIVERGING_LEVELS : levels).map((text, i) => [`${diverging ? "d" : "c"}${i}`, text]);
}
