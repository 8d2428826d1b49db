// All attempts at a question: their scores, and two of them side by side, step by step. Loaded after page.js.
"use strict";

const { attempts, facts, messages, passages } = JSON.parse(document.getElementById("details").textContent);
const choices = ["left", "right"].map((id) => document.getElementById(id)).filter(Boolean);

for (const { steps } of attempts) {
  steps.forEach((step, index) => {
    step.turn = step.continues ? steps[index - 1].turn + steps[index - 1].text + step.prefix : step.prefix;
  });
}

function show() {
  const chosen = choices.length ? choices.map((select) => attempts[select.value]) : [attempts[0]];
  const length = Math.max(...chosen.map((attempt) => attempt.steps.length));
  const fork = chosen.length > 1 ? forkOf(...chosen) : length;
  scores(chosen);
  document.getElementById("difference").textContent = summary(chosen, fork, length);
  const rows = Array.from({ length }, (_, index) => row(chosen, index, fork));
  document.getElementById("steps").replaceChildren(...rows);
  if (choices.length) {
    const hash = `#${choices.map((select) => select.value).join(",")}`;
    history.replaceState(null, "", hash);
    for (const link of document.querySelectorAll("a[rel]")) link.hash = hash;
  }
}

// Return the index of the first step whose action or passages differ, or the number of steps if none does. Words around
// the action, and the tags of another format, are ignored.
function forkOf(first, second) {
  const length = Math.max(first.steps.length, second.steps.length);
  for (let index = 0; index < length; index += 1) {
    if (signature(first.steps[index]) !== signature(second.steps[index])) return index;
  }
  return length;
}

function signature(step) {
  if (!step) return "";
  const what = step.action === "malformed" ? step.text : step.content.trim();
  return JSON.stringify([step.action, what, step.passages.map(([index]) => index)]);
}

function summary(chosen, fork, length) {
  if (chosen.length === 1) return `${length} steps`;
  const failed = chosen.find((attempt) => attempt.cause);
  if (failed) return `${failed.label} was set aside: ${failed.cause}`;
  return fork === length ? `Both take the same ${length} steps.` : `They first differ in step ${fork + 1} of ${length}.`;
}

// The attempts that are compared are marked, and so are the rows in which they differ.
function scores(chosen) {
  const table = document.getElementById("scores");
  table.deleteTHead();
  const head = table.createTHead().insertRow();
  head.append(element("td"));
  for (const attempt of attempts) {
    const heading = element("th", "", chosen.includes(attempt) ? "chosen" : "");
    heading.scope = "col";
    heading.append(element("bdi", attempt.label));
    head.append(heading);
  }
  const rows = facts.map((name, index) => {
    const line = element("tr");
    const heading = element("th", name);
    heading.scope = "row";
    line.append(heading, ...attempts.map((attempt) => cell(word(attempt, index))));
    if (new Set(chosen.map((attempt) => word(attempt, index))).size > 1) line.className = "differs";
    return line;
  });
  const known = (line) => [...line.cells].slice(1).some((value) => value.textContent !== "–");
  table.tBodies[0].replaceChildren(...rows.filter(known));
}

function word(attempt, index) {
  if (attempt.cause) return index ? "–" : `set aside: ${attempt.cause}`;
  return attempt.facts[index] || "–";
}

function cell(value) {
  const made = element("td");
  made.append(element("bdi", value));
  return made;
}

function row(chosen, index, fork) {
  const item = element("li", "", index === fork ? "fork" : "");
  item.append(element("h3", `Step ${index + 1}${chosen.length > 1 ? mark(chosen, index, fork) : ""}`));
  const sides = element("div", "", chosen.length > 1 ? "sides" : "");
  sides.append(...chosen.map((attempt) => side(attempt, index)));
  item.append(sides);
  return item;
}

function mark([first, second], index, fork) {
  if (index === fork) return ": here they first differ";
  if (index > fork) return "";
  return first.steps[index].text === second.steps[index].text ? ": the same" : ": the same, in other words";
}

function side(attempt, index) {
  const made = element("article");
  const name = element("h4");
  const step = attempt.steps[index];
  name.append(element("bdi", attempt.label), step?.action ? `: ${step.action}` : "");
  made.append(name);
  if (!step) {
    made.append(element("p", index ? "has ended" : "no attempt", "note"));
    return made;
  }
  made.append(element("pre", step.text));
  if (step.action === "malformed") made.append(element("p", `could not be read: ${step.content}`, "aside"));
  made.append(...step.passages.map(([at, score]) => folded(`${passages[at].id ? `passage ${passages[at].id}` : "passages"}${score === null ? "" : `, score ${score}`}`, passages[at].contents)));
  if (step.finish_reason !== "stop") made.append(element("p", `ended by: ${step.finish_reason}`, "note"));
  if (step.prompt.length) made.append(asked(step));
  return made;
}

function asked(step) {
  const made = element("details");
  made.append(element("summary", "prompt"), ...step.prompt.map((at) => folded(messages[at].role, messages[at].content)));
  if (step.turn) made.append(folded("turn so far", step.turn));
  return made;
}

function restore() {
  const wanted = location.hash.slice(1).split(",");
  choices.forEach((select, index) => {
    if ([...select.options].some((option) => option.value === wanted[index])) select.value = wanted[index];
  });
  show();
}

for (const select of choices) select.addEventListener("change", show);
window.addEventListener("hashchange", restore);
restore();
