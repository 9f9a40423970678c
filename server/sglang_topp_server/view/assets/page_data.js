// Read the data that is embedded in the page: the statistics of all rollouts, and one compressed block for each
// rollout that the page shows token by token.

const OVERVIEW = JSON.parse(document.getElementById("overview").textContent);
const ARRAYS = { int32: Int32Array, float32: Float32Array };
const opened = new Map();

export function overview() {
  return OVERVIEW;
}

export function isDetailed(row) {
  return document.getElementById(`detail-${row}`) !== null;
}

/** Decode the tokens of rollout number `row`. `view/token_view_data.py` describes the encoding. */
export async function openDetail(row) {
  if (!opened.has(row)) opened.set(row, decode(document.getElementById(`detail-${row}`).textContent));
  return opened.get(row);
}

async function decode(text) {
  const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const headLength = new DataView(buffer).getUint32(0, true);
  const detail = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headLength)));
  let start = 4 + headLength;
  for (const [name, kind, length] of detail.arrays) {
    detail[name] = new ARRAYS[kind](buffer, start, length);
    start += 4 * length;
  }
  if (detail.listed) detail.listedEnds = runningSum(detail.listed);
  return detail;
}

function runningSum(lengths) {
  let sum = 0;
  return Int32Array.from(lengths, (length) => (sum += length));
}

/** Return the candidates that the page holds for a position, `[{ id, logprob }, …]`, in the order of the candidate
 * set. */
export function candidatesAt(detail, position) {
  if (!detail.listed) return [];
  const end = detail.listedEnds[position];
  const start = end - detail.listed[position];
  const logprobs = detail.candidate_logprobs;
  return Array.from(detail.candidates.subarray(start, end), (id, i) => ({
    id,
    logprob: logprobs ? logprobs[start + i] : null,
  }));
}

/** Return the first position at which two rollouts differ, or null if one is a prefix of the other. */
export function partingOf(some, other) {
  const shorter = Math.min(some.ids.length, other.ids.length);
  for (let t = 0; t < shorter; t++) if (some.ids[t] !== other.ids[t]) return t;
  return null;
}
