// Shared by the pages behind a list: the link back to the list as it was, and functions that turn text into elements.
"use strict";

// Foreign text is only ever set as text content.
function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function folded(title, content) {
  const made = element("details");
  made.append(element("summary", title), element("pre", content));
  return made;
}

// Return the elements of a pair: the steps before, then both sides. Paths are steps from the first one, as
// { id, action, content, text }; `depth` of them are the same.
function comparison(chosen, rejected, depth, ...notes) {
  const before = chosen.slice(0, depth).map((step) => element("li", `${step.action}: ${step.content}`));
  const list = element("ol", "", "before");
  list.append(...before);
  const sides = element("div", "", "sides");
  for (const [index, [name, path]] of [["chosen", chosen], ["rejected", rejected]].entries()) {
    const side = element("article", "", name);
    side.append(element("h4", `${name}: ${notes[index]}`));
    for (const step of path.slice(depth)) side.append(element("p", `node ${step.id}, ${step.action}`, "note"), element("pre", step.text));
    sides.append(side);
  }
  return before.length ? [element("p", "after the steps", "note"), list, sides] : [sides];
}

for (const link of document.querySelectorAll("nav a[href='../index.html']")) {
  try {
    link.hash = sessionStorage.getItem(link.pathname) ?? ""; // written by list.js
  } catch {
    // Some browsers store nothing for pages from disk: the link leads to the list from its start.
  }
}
