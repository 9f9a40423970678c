// Format numbers for the page. A missing number becomes a dash.

/** Format as 12,345. */
export function whole(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

/** Format with a fixed number of decimals. */
export function fixed(value, digits = 4) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : value.toFixed(digits);
}

/** Format as 12.3 %. */
export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  const value = 100 * share;
  return `${value !== 0 && value < 0.1 ? value.toPrecision(1) : value.toFixed(1)} %`;
}

/** Format as 1, 10, 1k, or 2.5M. */
export function compact(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e3) return `${+(value / 1e3).toPrecision(3)}k`;
  return String(+value.toPrecision(3));
}

/** Format as "1 rollout" or "2 rollouts". */
export function count(number, noun) {
  return `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
}
