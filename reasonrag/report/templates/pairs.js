// The list of a run's pairs: the smallest margin first; a pair opens with both texts side by side. Their texts come from
// data/texts-*.js, which call `registerTexts`. Loaded after page.js and list.js.
"use strict";

const TEXTS_PER_FILE = 20; // questions, as run_pages.py writes them
const contradictory = new Set(JSON.parse(document.getElementById("contradictory").textContent));
const texts = new Map(); // by file, a promise of its questions; of each the steps by node
const plain = view;
let arrived;

view = (row) => {
  const line = plain(row);
  if (contradictory.has(row[0])) line.marks = [...line.marks, "contradiction"];
  return { ...line, opened: row[kinds.length + 2] };
};

decorate = (tr, line) => {
  const button = element("button", line.cells[0] + 1);
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => toggle(tr, button, line));
  tr.cells[0].replaceChildren(button);
};

function registerTexts(questions) {
  arrived = questions;
}

function textsOf(file) {
  if (!texts.has(file)) {
    texts.set(file, new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `data/texts-${String(file).padStart(3, "0")}.js`;
      script.addEventListener("load", () => resolve(arrived)); // runs before the next script does
      script.addEventListener("error", () => reject(new Error(`${script.src} cannot be loaded`)));
      document.head.append(script);
    }));
  }
  return texts.get(file);
}

async function toggle(tr, button, line) {
  const open = button.getAttribute("aria-expanded") === "true";
  button.setAttribute("aria-expanded", String(!open));
  if (open) return tr.nextSibling.remove();
  const row = element("tr", "", "opened");
  const cell = row.insertCell();
  cell.colSpan = tr.cells.length;
  tr.after(row);
  const [question, chosen, rejected, depth] = line.opened;
  const steps = (await textsOf(Math.floor(question / TEXTS_PER_FILE)))[question % TEXTS_PER_FILE];
  const path = (node) => {
    const found = [];
    for (let at = node; steps[at]; [at] = steps[at]) found.unshift({ id: at, action: steps[at][1], content: steps[at][2], text: steps[at][3] });
    return found;
  };
  cell.append(...comparison(path(chosen), path(rejected), depth, `reward ${line.cells[7].toFixed(3)}`, `reward ${line.cells[8].toFixed(3)}`));
}

if (!location.hash) {
  state.column = kinds.length - 2; // margin
  markSorted();
}
