// Format numbers as text for the page. For a missing number, all functions but `compact` write a dash.

/** Format a number as a whole number, such as 12,345. */
export function whole(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

/** Format a number with a fixed number of decimals, `digits`. */
export function fixed(value, digits = 4) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : value.toFixed(digits);
}

/** Format a share from 0 to 1 as a percentage, such as 12.3 %. */
export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  const value = 100 * share;
  return `${value !== 0 && value < 0.1 ? value.toPrecision(1) : value.toFixed(1)} %`;
}

/** Format a number in short form, such as 10, 1k, or 2.5M. */
export function compact(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e3) return `${+(value / 1e3).toPrecision(3)}k`;
  return String(+value.toPrecision(3));
}

/** Format a number with its noun, such as "1 rollout" or "2 rollouts". */
export function count(number, noun) {
  return `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
}
