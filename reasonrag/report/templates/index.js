// The list of questions: rows come from data/questions-*.js, which call `registerQuestions`.
"use strict";

const PAGE_ROWS = 50;
const [PLACE, DATASET, ID, QUESTION, ANSWERS] = [0, 1, 2, 3, 4];
const FIRST_NUMBER = 5; // columns from here on, and the place, are numbers

const list = document.getElementById("list");
const scripts = JSON.parse(list.dataset.scripts);
const state = { rows: [], found: [], column: PLACE, direction: 1, page: 0, parts: 0 };

function registerQuestions(rows) {
  for (const row of rows) {
    row.text = [row[DATASET], row[ID], row[QUESTION], ...row[ANSWERS]].join("\n").toLowerCase();
    state.rows.push(row);
  }
  state.parts += 1;
  update();
  if (state.parts < scripts.length) requestAnimationFrame(() => load(scripts[state.parts]));
}

function load(source) {
  const script = document.createElement("script");
  script.src = source;
  script.addEventListener("error", () => {
    document.getElementById("status").textContent = `${source} cannot be loaded: the list is not whole`;
  });
  document.head.append(script);
}

function update() {
  const words = document.getElementById("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  state.found = state.rows.filter((row) => words.every((word) => row.text.includes(word)));
  state.found.sort((a, b) => state.direction * compare(a, b) || a[PLACE] - b[PLACE]);
  state.page = Math.min(state.page, Math.max(0, pages() - 1));
  show();
}

function compare(a, b) {
  const column = state.column;
  if (column === PLACE || column >= FIRST_NUMBER) return (a[column] ?? -1) - (b[column] ?? -1);
  return order(String(a[column]), String(b[column]));
}

const order = new Intl.Collator("en", { numeric: true }).compare;

function pages() {
  return Math.ceil(state.found.length / PAGE_ROWS);
}

function show() {
  const start = state.page * PAGE_ROWS;
  list.tBodies[0].replaceChildren(...state.found.slice(start, start + PAGE_ROWS).map(line));
  const loading = state.parts < scripts.length ? ", more are being loaded" : "";
  document.getElementById("status").textContent = `${state.found.length} of ${state.rows.length} questions${loading}`;
  document.getElementById("page").textContent = `Page ${pages() ? state.page + 1 : 0} of ${pages()}`;
  document.getElementById("previous").disabled = state.page === 0;
  document.getElementById("next").disabled = state.page + 1 >= pages();
}

function line(row) {
  const tr = document.createElement("tr");
  row.forEach((value, column) => {
    const cell = tr.insertCell();
    if (column === PLACE || column >= FIRST_NUMBER) cell.className = "n";
    const shown = document.createElement(column === QUESTION ? "a" : "bdi");
    if (column === QUESTION) {
      shown.href = `questions/${String(row[PLACE]).padStart(5, "0")}.html`;
      shown.dir = "auto";
    }
    shown.textContent = text(value, column);
    cell.append(shown);
  });
  return tr;
}

function text(value, column) {
  if (value === null || value === "") return "–";
  if (column === PLACE) return value + 1;
  if (column === ANSWERS) return value.join(", ");
  return Number.isInteger(value) || typeof value === "string" ? value : value.toFixed(3);
}

function sortBy(heading) {
  const column = Number(heading.dataset.column);
  state.direction = column === state.column ? -state.direction : 1;
  state.column = column;
  for (const th of list.tHead.rows[0].cells) th.removeAttribute("aria-sort");
  heading.parentElement.setAttribute("aria-sort", state.direction > 0 ? "ascending" : "descending");
  update();
}

function turn(by) {
  state.page += by;
  show();
}

document.getElementById("search").addEventListener("input", () => { state.page = 0; update(); });
document.getElementById("previous").addEventListener("click", () => turn(-1));
document.getElementById("next").addEventListener("click", () => turn(1));
for (const heading of list.querySelectorAll("button[data-column]")) heading.addEventListener("click", () => sortBy(heading));
show();
