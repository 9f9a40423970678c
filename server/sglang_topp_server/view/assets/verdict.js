// The verdict at the top of the page. If a generated token lacks its candidate set, the verdict warns against
// training on the token. Otherwise, the verdict says how much top-p changes the importance ratios, and
// therefore whether the trainer must score the policy over the candidate sets (replay).

import { el } from "./dom.js";
import { count, fixed, percent, whole } from "./number_format.js";

function tile(name, value, note, kind = "") {
  return el("div", { class: `tile ${kind}` }, el("dt", {}, name), el("dd", {}, value), el("p", {}, note));
}

function names(pairs, most = 4) {
  const shown = pairs.slice(0, most).map(([name, number]) => `${name || "(empty)"}: ${whole(number)}`);
  return shown.join(" · ") + (pairs.length > most ? ` · ${pairs.length - most} more` : "");
}

function sentence(facts) {
  if (facts.missing) {
    return ["bad", `${count(facts.missing, "generated token")} without a candidate set. Do not train on them.`];
  }
  if (facts.off === null) return ["neutral", "Every generated token has its set. The kept mass is unknown."];
  const mean = facts.mean_mass === null ? "" : `the mean kept mass is ${fixed(facts.mean_mass)}, and `;
  const share = `${mean}${percent(facts.off)} of the ratios are off by more than 10 %`;
  const given = facts.ratios_known ? "" : " for a trainer with the same weights";
  const needsReplay = facts.off >= 0.01 || (facts.mean_mass !== null && facts.mean_mass < 0.99);
  if (!needsReplay) return ["good", `Every generated token has its set. Without replay, ${share}${given}.`];
  return ["warn", `Every generated token has its set. Without replay, ${share}${given}: replay the sets.`];
}

export function drawVerdict(section, { verdict: facts }) {
  const [kind, text] = sentence(facts);
  const offNote = facts.off_from_ratios
    ? "by the trainer's log-probs"
    : facts.ratios_known
      ? `by the trainer's log-probs for ${whole(facts.ratios_known)} tokens, else by the kept mass`
      : "by the kept mass: a trainer with the same weights";
  const unknown = facts.without_logprobs ? `, ${count(facts.without_logprobs, "set")} without log-probs` : "";
  section.replaceChildren(
    el("p", { class: `sentence ${kind}` }, text),
    el("dl", { class: "tiles" },
      tile("rollouts", whole(facts.rollouts), names(facts.reasons)),
      tile("tokens", whole(facts.tokens), facts.appended ? `${whole(facts.appended)} of them from tools` : "all generated"),
      tile("mean kept mass", fixed(facts.mean_mass), `over ${count(facts.sets, "set")}${unknown}`),
      tile("off by > 10 %", percent(facts.off), offNote, facts.off >= 0.01 ? "warn" : ""),
      tile("missing sets", whole(facts.missing), "must be 0", facts.missing ? "bad" : "good"),
      tile("aborts", whole(facts.aborts), "finish reason abort", facts.aborts ? "warn" : ""),
      tile("weight versions", whole(facts.versions.length), `tokens of ${names(facts.versions, 3)}`)));
}
