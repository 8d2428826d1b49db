// A question's attempts next to each other, step by step. Loaded behind page.js.
"use strict";

const { attempts, facts, messages, passages } = JSON.parse(document.getElementById("details").textContent);
const choices = ["left", "right"].map((id) => document.getElementById(id)).filter(Boolean);

for (const { steps } of attempts) {
  steps.forEach((step, place) => {
    step.turn = step.goes_on ? steps[place - 1].turn + steps[place - 1].text + step.prefix : step.prefix;
  });
}

function show() {
  const chosen = choices.length ? choices.map((select) => attempts[select.value]) : [attempts[0]];
  const length = Math.max(...chosen.map((attempt) => attempt.steps.length));
  const fork = chosen.length > 1 ? forkOf(...chosen) : length;
  scores(chosen);
  document.getElementById("told").textContent = told(chosen, fork, length);
  const rows = Array.from({ length }, (_, place) => row(chosen, place, fork));
  document.getElementById("steps").replaceChildren(...rows);
  if (choices.length) {
    const hash = `#${choices.map((select) => select.value).join(",")}`;
    history.replaceState(null, "", hash);
    for (const link of document.querySelectorAll("a[rel]")) link.hash = hash;
  }
}

// The first step in which what was done or found differs; the number of steps where none does. The words around it, and
// the tags of another format, make no difference.
function forkOf(first, second) {
  const length = Math.max(first.steps.length, second.steps.length);
  for (let place = 0; place < length; place += 1) {
    if (done(first.steps[place]) !== done(second.steps[place])) return place;
  }
  return length;
}

function done(step) {
  if (!step) return "";
  const what = step.action === "malformed" ? step.text : step.content.trim();
  return JSON.stringify([step.action, what, step.passages.map(([place]) => place)]);
}

function told(chosen, fork, length) {
  if (chosen.length === 1) return `${length} steps`;
  const failed = chosen.find((attempt) => attempt.cause);
  if (failed) return `${failed.label} was set aside: ${failed.cause}`;
  return fork === length ? `Both take the same ${length} steps.` : `They first differ in step ${fork + 1} of ${length}.`;
}

function scores(chosen) {
  const table = document.getElementById("scores");
  table.deleteTHead();
  const head = table.createTHead().insertRow();
  head.append(element("td"));
  for (const attempt of chosen) {
    const heading = element("th");
    heading.scope = "col";
    heading.append(element("bdi", attempt.label));
    head.append(heading);
  }
  const rows = facts.map((name, place) => {
    const line = element("tr");
    const heading = element("th", name);
    heading.scope = "row";
    const values = chosen.map((attempt) => word(attempt, place));
    line.append(heading, ...values.map(cell));
    if (new Set(values).size > 1) line.className = "differs";
    return line;
  });
  table.tBodies[0].replaceChildren(...rows);
}

function word(attempt, place) {
  if (attempt.cause) return place ? "–" : `set aside: ${attempt.cause}`;
  return attempt.facts[place] || "–";
}

function cell(value) {
  const made = element("td");
  made.append(element("bdi", value));
  return made;
}

function row(chosen, place, fork) {
  const item = element("li", "", place === fork ? "fork" : "");
  item.append(element("h3", `Step ${place + 1}${chosen.length > 1 ? mark(chosen, place, fork) : ""}`));
  const sides = element("div", "", chosen.length > 1 ? "sides" : "");
  sides.append(...chosen.map((attempt) => side(attempt, place)));
  item.append(sides);
  return item;
}

function mark([first, second], place, fork) {
  if (place === fork) return ": here they first differ";
  if (place > fork) return "";
  return first.steps[place].text === second.steps[place].text ? ": the same" : ": the same, in other words";
}

function side(attempt, place) {
  const made = element("article");
  const name = element("h4");
  const step = attempt.steps[place];
  name.append(element("bdi", attempt.label), step ? `: ${step.action}` : "");
  made.append(name);
  if (!step) {
    made.append(element("p", place ? "has ended" : "no attempt", "note"));
    return made;
  }
  made.append(element("pre", step.text));
  if (step.action === "malformed") made.append(element("p", `could not be read: ${step.content}`, "aside"));
  made.append(...step.passages.map(([at, score]) => folded(`passage ${passages[at].id}${score === null ? "" : `, score ${score}`}`, passages[at].contents)));
  if (step.finish !== "stop") made.append(element("p", `ended by: ${step.finish}`, "note"));
  made.append(asked(step));
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
  choices.forEach((select, place) => {
    if ([...select.options].some((option) => option.value === wanted[place])) select.value = wanted[place];
  });
  show();
}

for (const select of choices) select.addEventListener("change", show);
window.addEventListener("hashchange", restore);
restore();
