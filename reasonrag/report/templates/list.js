// The list of the first page. Its rows come from data/rows-*.js, which call `registerRows`. Foreign text is only ever set
// as text content.
"use strict";

const PAGE_ROWS = 50;
const list = document.getElementById("list");
const headings = [...list.querySelectorAll("button[data-kind]")];
const kinds = headings.map((heading) => heading.dataset.kind); // index, text, list, link, note (below the cell before) or number
const scripts = JSON.parse(list.dataset.scripts);
const search = document.getElementById("search");
const filter = document.getElementById("filter");
const controls = [...document.querySelectorAll(".controls :is(input, select)")];
const state = { rows: [], lines: [], found: [], column: 0, direction: 1, page: 0, parts: 0, waiting: false };

// Return a row's cells, the page of its link, and the marks for the filter. A page whose columns depend on a choice
// replaces this function and calls `arrange`.
let view = (row) => ({ cells: row.slice(0, kinds.length), page: row[kinds.length], marks: row[kinds.length + 1] });

function registerRows(rows) {
  state.rows.push(...rows);
  state.lines.push(...rows.map(view));
  state.parts += 1;
  if (state.parts === 1) {
    update();
    scripts.slice(1).forEach(load);
  } else if (!state.waiting) {
    state.waiting = true; // parts that arrive in quick succession are shown together
    requestAnimationFrame(() => {
      state.waiting = false;
      update();
    });
  }
}

function arrange() {
  state.lines = state.rows.map(view);
  update();
}

// What a search looks through, made at the first one.
function textOf(line) {
  line.text ??= line.cells.filter((_, column) => !isNumber(column)).flat().join("\n").toLowerCase();
  return line.text;
}

function load(source) {
  const script = document.createElement("script");
  script.src = source;
  script.async = false; // in order
  script.addEventListener("error", () => {
    document.getElementById("status").textContent = `${source} cannot be loaded: the list is incomplete`;
  });
  document.head.append(script);
}

function update() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const mark = filter?.value;
  state.found = state.lines.filter((line) => (!mark || line.marks.includes(mark)) && words.every((word) => textOf(line).includes(word)));
  state.found.sort((a, b) => state.direction * compare(a.cells, b.cells) || a.cells[0] - b.cells[0]);
  if (state.parts === scripts.length) state.page = Math.min(state.page, Math.max(0, pages() - 1));
  show();
}

function compare(a, b) {
  const column = state.column;
  if (isNumber(column)) {
    const [left, right] = [a[column] ?? -Infinity, b[column] ?? -Infinity];
    return left < right ? -1 : Number(left > right);
  }
  return order(String(a[column] ?? ""), String(b[column] ?? ""));
}

const order = new Intl.Collator("en", { numeric: true }).compare;

function isNumber(column) {
  return kinds[column] === "number" || kinds[column] === "index";
}

function pages() {
  return Math.ceil(state.found.length / PAGE_ROWS);
}

function show() {
  const start = state.page * PAGE_ROWS;
  list.tBodies[0].replaceChildren(...state.found.slice(start, start + PAGE_ROWS).map(drawn));
  const loading = state.parts < scripts.length ? ", loading more" : "";
  document.getElementById("status").textContent = `${state.found.length} of ${state.rows.length} ${list.dataset.unit}${loading}`;
  document.getElementById("page").textContent = `Page ${pages() ? state.page + 1 : 0} of ${pages()}`;
  document.getElementById("previous").disabled = state.page === 0;
  document.getElementById("next").disabled = state.page + 1 >= pages();
}

function drawn(line) {
  const tr = document.createElement("tr");
  line.cells.forEach((value, column) => {
    if (kinds[column] === "note") {
      const note = document.createElement("small");
      note.textContent = value;
      tr.lastChild.append(note);
      return;
    }
    const cell = tr.insertCell();
    cell.dataset.name = headings[column].textContent; // shown where there is no room for columns
    if (isNumber(column)) cell.className = "n";
    const shown = document.createElement(kinds[column] === "link" && line.page ? "a" : "bdi");
    if (kinds[column] === "link" && line.page) {
      shown.href = line.page;
      shown.dir = "auto";
    }
    shown.textContent = text(value, kinds[column]);
    cell.append(shown);
  });
  return tr;
}

function text(value, kind) {
  if (value === null || value === undefined || value === "") return "–";
  if (kind === "index") return value + 1;
  if (kind === "list") return value.join(", ");
  return Number.isInteger(value) || typeof value === "string" ? value : value.toFixed(3);
}

function sortBy(heading) {
  const column = headings.indexOf(heading);
  state.direction = column === state.column ? -state.direction : 1;
  state.column = column;
  markSorted();
  update();
  remember();
}

function markSorted() {
  for (const th of list.tHead.rows[0].cells) th.removeAttribute("aria-sort");
  headings[state.column].parentElement.setAttribute("aria-sort", state.direction > 0 ? "ascending" : "descending");
}

function turn(by) {
  state.page += by;
  show();
  remember();
}

function restart() {
  state.page = 0;
  update();
}

// Search, choice and sorting are kept in the address, so that going back, the pages' link to the list (page.js) and a
// copied address restore them.
function remember() {
  const kept = new URLSearchParams(controls.map((control) => [control.id, control.value]));
  for (const name of ["column", "direction", "page"]) kept.set(name, state[name]);
  history.replaceState(null, "", `#${kept}`);
  try {
    sessionStorage.setItem(location.pathname, location.hash);
  } catch {
    // Some browsers store nothing for pages from disk.
  }
}

function restore() {
  const kept = new URLSearchParams(location.hash.slice(1));
  for (const control of controls) {
    const value = kept.get(control.id);
    if (value !== null && (control === search || [...control.options].some((option) => option.value === value))) control.value = value;
  }
  const column = Number(kept.get("column"));
  if (headings[column]) state.column = column;
  if (kept.get("direction") === "-1") state.direction = -1;
  state.page = Math.max(0, Math.trunc(kept.get("page")) || 0);
  if (kept.has("page")) search.scrollIntoView(); // the way back leads to the list, not to the figures above it
  markSorted();
}

search.addEventListener("input", restart);
filter?.addEventListener("change", restart);
for (const control of controls) control.addEventListener("change", remember);
document.getElementById("previous").addEventListener("click", () => turn(-1));
document.getElementById("next").addEventListener("click", () => turn(1));
for (const heading of headings) heading.addEventListener("click", () => sortBy(heading));
restore();
show();
