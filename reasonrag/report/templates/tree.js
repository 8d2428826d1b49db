// A question's tree: arrow keys move between nodes, a click or Enter shows a node's details. Loaded after page.js.
"use strict";

const { nodes: details, messages, passages } = JSON.parse(document.getElementById("details").textContent);
const nodes = [...document.querySelectorAll(".node")];
const byId = new Map(nodes.map((node) => [node.dataset.id, node]));
const scroll = document.getElementById("scroll");

function focus(node) {
  if (!node) return;
  for (const other of nodes) other.setAttribute("tabindex", other === node ? "0" : "-1");
  node.focus({ preventScroll: true });
  node.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function neighbour(node, key) {
  const level = node.getAttribute("aria-level");
  const column = nodes.filter((other) => other.getAttribute("aria-level") === level);
  const moves = {
    ArrowLeft: () => byId.get(node.dataset.parent),
    ArrowRight: () => nodes.find((other) => other.dataset.parent === node.dataset.id),
    ArrowUp: () => column[column.indexOf(node) - 1],
    ArrowDown: () => column[column.indexOf(node) + 1],
    Home: () => nodes[0],
    End: () => nodes.at(-1),
  };
  return moves[key]?.();
}

function show(node) {
  for (const other of nodes) other.setAttribute("aria-selected", String(other === node));
  const shown = details[node.dataset.id];
  document.getElementById("panel-title").textContent = `Node ${shown.id}`;
  history.replaceState(null, "", `#node-${shown.id}`); // a copied address opens the node
  document.getElementById("panel-body").replaceChildren(facts(shown), ...text(shown), ...passageTexts(shown), ...pairs(shown), ...prompt(shown));
  const panel = document.getElementById("panel");
  panel.scrollTop = 0;
  // In a narrow window the panel is below the tree, where its change would go unnoticed.
  if (getComputedStyle(panel).position === "static") panel.scrollIntoView();
}

function facts(node) {
  const table = element("table", "", "facts");
  table.createCaption().textContent = "Values of the search";
  for (const [name, value] of node.facts) {
    const row = table.insertRow();
    const heading = element("th", name);
    heading.scope = "row";
    row.append(heading, element("td", value));
  }
  return table;
}

function text(node) {
  return node.text ? [element("h3", "Text by the policy"), element("pre", node.text)] : [];
}

function passageTexts(node) {
  if (!node.passages.length) return [];
  return [element("h3", "Passages, best first"), ...node.passages.map(([index, score]) => folded(`${passages[index].id}, score ${score}`, passages[index].contents))];
}

function pairs(node) {
  if (!node.pairs.length) return [];
  const list = element("ul");
  for (const pair of node.pairs) {
    const item = element("li", pair.preferred ? "chosen over " : "rejected for ");
    const button = element("button", `node ${pair.other}`);
    button.type = "button";
    button.addEventListener("click", () => choose(byId.get(String(pair.other))));
    item.append(button, `: ${pair.reason}`);
    list.append(item);
  }
  return [element("h3", "Pairs"), list];
}

function prompt(node) {
  const elements = node.prompt.map((index) => folded(messages[index].role, messages[index].content));
  if (node.prefix) elements.push(folded("turn so far", node.prefix));
  return elements.length ? [element("h3", "Prompt"), ...elements] : [];
}

function choose(node) {
  focus(node);
  show(node);
}

document.getElementById("whole").addEventListener("click", (event) => {
  event.currentTarget.setAttribute("aria-pressed", String(scroll.classList.toggle("whole")));
});
for (const node of nodes) {
  node.addEventListener("click", () => choose(node));
  node.addEventListener("keydown", (event) => {
    const next = neighbour(node, event.key);
    if (event.key === "Enter" || event.key === " ") show(node);
    else if (next) focus(next);
    else return;
    event.preventDefault();
  });
}
// The root is in the middle of its rows, which may be below the visible part.
const root = nodes[0].querySelector("rect").getBoundingClientRect();
scroll.scrollTop = root.top - scroll.getBoundingClientRect().top - scroll.clientHeight / 2;

function restore() {
  const node = byId.get(location.hash.replace("#node-", ""));
  if (node) choose(node);
}
window.addEventListener("hashchange", restore);
restore();
