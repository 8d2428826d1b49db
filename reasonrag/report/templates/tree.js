// A question's tree. d3-hierarchy places the nodes that are shown: the best path and its siblings first. Loaded after
// page.js and d3-hierarchy.min.js. Styles are set as properties, which the page's policy allows.
"use strict";

const { nodes, best, pairs, whole, messages, passages } = JSON.parse(document.getElementById("details").textContent);
const [scroll, tree, panel, shown, merge, outline] = ["scroll", "tree", "panel", "shown", "merge", "outline"].map((id) => document.getElementById(id));
const WIDTH = [168, 320]; // of a box: the least, the most
const HEIGHT = 76;
const ROWS = [25, 41]; // heights in an outline: of a line, and of the best path's two lines where a line is short
const GAP = { x: 22, y: 10, row: 1 };
const MARGIN = 6;
const SIBLINGS = 2; // of a step of the best path that are shown at first: those with most visits
const highest = Math.max(0, ...nodes.map((node) => node.spre ?? 0));
const onBest = new Set(best);
const open = new Set(); // ids of nodes whose children are shown
const few = new Set(); // ids of those of which at first only the best path's child and some siblings are
const state = { zoom: 1, focus: 0, chosen: null, items: [], boxes: new Map() };

document.getElementById("most").textContent = number(highest);

// Equal siblings are one item, under the id of the oldest; `below` counts the nodes under it.
function itemsOf() {
  const items = [];
  for (const node of nodes) {
    const id = merge.checked ? node.drawn : node.node_id;
    if (!items[id]) {
      items[id] = { id, members: [], children: [], visits: 0, below: 0, best: false };
      if (node.parent_id >= 0) items[itemId(node.parent_id)].children.push(items[id]);
    }
    items[id].members.push(node);
    items[id].visits += node.visits;
    items[id].best ||= onBest.has(node.node_id);
  }
  for (const node of nodes.slice(1).reverse()) {
    if (itemId(node.node_id) !== node.node_id) continue;
    items[itemId(node.parent_id)].below += items[node.node_id].members.length + items[node.node_id].below;
  }
  return items;
}

function itemId(id) {
  return merge.checked && id !== null ? nodes[id].drawn : id;
}

// Which of equal siblings an item opens: the one on the best path, or that of the highest SPRE.
function leadOf(item) {
  const better = (lead, node) => ((node.spre ?? -1) > (lead.spre ?? -1) ? node : lead);
  return item.members.find((node) => onBest.has(node.node_id)) ?? item.members.reduce(better);
}

function isOpen(item) {
  return item.members.some((node) => open.has(node.node_id));
}

function childrenOf(item) {
  if (!isOpen(item)) return [];
  if (!item.members.some((node) => few.has(node.node_id))) return item.children;
  const visited = item.children.filter((child) => !child.best).sort((a, b) => b.visits - a.visits).slice(0, SIBLINGS);
  return item.children.filter((child) => child.best || visited.includes(child));
}

// --- Drawing ---

function draw() {
  const root = d3.hierarchy(state.items[0], childrenOf);
  const all = [];
  root.eachBefore((node) => all.push(node));
  if (outline.checked) {
    const short = room() < 600;
    let top = 0;
    for (const node of all) {
      const left = node.depth * (short ? 8 : 14);
      const height = ROWS[Number(short && node.data.best)];
      Object.assign(node, { left, top, height, width: Math.max(room() - left, 200), short });
      top += height + GAP.row;
    }
  } else {
    const width = Math.min(WIDTH[1], Math.max(WIDTH[0], columnWidth(root.height)));
    d3.tree().nodeSize([HEIGHT + GAP.y, width + GAP.x]).separation((a, b) => (a.parent === b.parent ? 1 : 1.15))(root);
    const top = Math.min(...all.map((node) => node.x));
    for (const node of all) Object.assign(node, { left: node.y, top: node.x - top, height: HEIGHT, width, short: width < 200 });
  }
  const size = [Math.max(...all.map((node) => node.left + node.width)), Math.max(...all.map((node) => node.top + node.height))];
  state.boxes = new Map(all.map((node) => [node.data.id, box(node)]));
  tree.replaceChildren(edges(root, size), ...state.boxes.values());
  tree.classList.toggle("outlined", outline.checked);
  tree.style.width = `${size[0] + 2 * MARGIN}px`;
  tree.style.height = `${size[1] + 2 * MARGIN}px`;
  state.size = size;
  const drawn = all.reduce((sum, node) => sum + node.data.members.length, 0);
  document.getElementById("count").textContent = `${drawn} of ${nodes.length} nodes shown`;
}

function room() {
  return scroll.clientWidth - 2 * MARGIN - 16; // a bar may come
}

// The width of a box if so many columns follow the first.
function columnWidth(height) {
  return Math.floor((room() + GAP.x) / (height + 1)) - GAP.x;
}

// Lines from each parent to its children: from its right side, or from under it in an outline.
function edges(root, size) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", size[0] + 2 * MARGIN);
  svg.setAttribute("height", size[1] + 2 * MARGIN);
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", "edges");
  for (const { source, target } of root.links()) {
    const path = document.createElementNS(svg.namespaceURI, "path");
    const y = MARGIN + target.top + target.height / 2;
    const x = MARGIN + target.left;
    if (outline.checked) {
      const from = MARGIN + source.left + 5;
      path.setAttribute("d", `M${from} ${MARGIN + source.top + source.height}V${y}H${x}`);
    } else {
      const from = MARGIN + source.left + source.width;
      const middle = (from + x) / 2;
      const above = MARGIN + source.top + source.height / 2;
      path.setAttribute("d", `M${from} ${above}C${middle} ${above} ${middle} ${y} ${x} ${y}`);
    }
    path.setAttribute("class", classes("edge", target.data));
    svg.append(path);
  }
  return svg;
}

function classes(kind, item) {
  return [kind, ...(item.best ? ["best"] : []), ...(fading(item) ? ["dead"] : [])].join(" ");
}

// Why an item is faded: no trajectory below it has a final answer, so that it has no reward.
function fading(item) {
  if (item.members[0].action === "malformed") return "malformed";
  return item.members.every((node) => node.spre === null) ? "no answer" : "";
}

function box(node) {
  const item = node.data;
  const lead = leadOf(item);
  const rewards = item.members.map((member) => member.spre).filter((spre) => spre !== null);
  const made = element("div", "", classes("node", item));
  const title = `${lead.node_id} ${lead.action || "question"}${item.members.length > 1 ? ` ×${item.members.length}` : ""}`;
  const worth = lead.grade ? `outcome ${number(lead.grade.value)}` : `F1 ${number(lead.f1)}`;
  const values = [...(lead.f1 === null ? [] : [worth]), `SPRE ${range(rewards)}`, `N ${item.visits}`];
  const shownValues = node.short && values.join().length > 20 ? values.slice(0, -1) : values;
  const quote = lead.parent_id < 0 ? document.querySelector("h1").textContent : lead.content;
  made.append(element("span", title, "title"), element("span", shownValues.join(" · "), "figures"), element("span", quote, "quote"));
  if (item.children.length) {
    const shownChildren = childrenOf(item);
    const closed = shownChildren.length < item.children.length;
    const count = shownChildren.reduce((left, child) => left - child.members.length - child.below, item.below);
    const fold = element("button", closed ? `+${count}` : "−", "fold");
    fold.type = "button";
    fold.tabIndex = -1;
    fold.setAttribute("aria-label", closed ? `show ${count} nodes below` : "hide the nodes below");
    made.append(fold);
    made.setAttribute("aria-expanded", String(isOpen(item)));
  }
  const marks = [...(item.best ? ["best path"] : []), ...(fading(item) ? [fading(item)] : [])].join(", ");
  made.setAttribute("role", "treeitem");
  made.setAttribute("aria-level", node.depth + 1);
  made.setAttribute("aria-label", `${marks ? `${marks}: ` : ""}Node ${title}, ${values.join(" · ")}: ${quote}`);
  made.setAttribute("aria-selected", String(itemId(state.chosen) === item.id));
  made.classList.toggle("tall", node.height > ROWS[0]);
  made.tabIndex = itemId(state.focus) === item.id ? 0 : -1;
  made.dataset.id = item.id;
  Object.assign(made.style, { left: `${MARGIN + node.left}px`, top: `${MARGIN + node.top}px`, width: `${node.width}px`, height: `${node.height}px` });
  if (rewards.length) made.style.setProperty("--spre", Math.max(...rewards) / (highest || 1));
  return made;
}

function number(value) {
  return value === null ? "–" : value.toFixed(3);
}

function range(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)].map((value) => number(Number.isFinite(value) ? value : null));
  return least === most ? least : `${least}–${most}`;
}

// --- What is shown ---

function fill() {
  const depths = nodes.map((node) => node.depth);
  const deepest = Math.max(...depths);
  const add = (value, text) => shown.append(new Option(text, value));
  if (best.length) add("best", "best path and its siblings");
  for (let depth = 1; depth < deepest; depth += 1) add(depth, `${depth} ${depth > 1 ? "steps" : "step"}: ${depths.filter((at) => at <= depth).length} nodes`);
  add("all", `everything: ${nodes.length} nodes`);
  shown.append(new Option("as opened by hand", "", false, false));
  shown.lastChild.hidden = true;
}

function expand(what) {
  open.clear();
  few.clear();
  for (const node of nodes) {
    const wanted = what === "best" ? onBest.has(node.node_id) : what === "all" || node.depth < Number(what);
    if (wanted) open.add(node.node_id);
    if (wanted && what === "best") few.add(node.node_id);
  }
  draw();
  show(visible(state.focus) ?? 0, false);
}

// Return the node, or the nearest one above it that is drawn.
function visible(id) {
  let at = id;
  while (at >= 0 && !state.boxes.has(itemId(at))) at = nodes[at].parent_id;
  return at < 0 ? null : itemId(at);
}

function toggle(item) {
  if (!item.children.length) return;
  const before = state.boxes.get(item.id).getBoundingClientRect();
  const closed = childrenOf(item).length < item.children.length;
  for (const node of item.members) {
    few.delete(node.node_id);
    if (!closed) open.delete(node.node_id);
  }
  if (closed) open.add(item.id);
  shown.value = "";
  state.focus = item.id;
  draw();
  const after = state.boxes.get(item.id).getBoundingClientRect();
  scroll.scrollBy(after.left - before.left, after.top - before.top); // it stays where it was
  state.boxes.get(item.id).focus({ preventScroll: true });
}

function reveal(id) {
  if (!state.boxes.has(itemId(id))) {
    for (let at = nodes[id].parent_id; at >= 0; at = nodes[at].parent_id) {
      open.add(at);
      for (const node of state.items[itemId(at)].members) few.delete(node.node_id);
    }
    shown.value = "";
    draw();
  }
}

// Bring a box into the frame, and only the frame: the page stays where it is.
function show(id, smooth = true) {
  const [to, frame] = [state.boxes.get(itemId(id)).getBoundingClientRect(), scroll.getBoundingClientRect()];
  const by = (start, end, low, high) => (start < low || end - start > high - low ? start - low - MARGIN : Math.max(0, end - high + MARGIN));
  scroll.scrollBy({ left: by(to.left, to.right, frame.left, frame.right), top: by(to.top, to.bottom, frame.top, frame.bottom), behavior: smooth ? "auto" : "instant" });
}

function focus(id) {
  state.boxes.get(itemId(state.focus))?.setAttribute("tabindex", "-1");
  state.focus = itemId(id);
  const made = state.boxes.get(state.focus);
  made.tabIndex = 0;
  made.focus({ preventScroll: true });
  show(id);
}

function zoom(factor) {
  const at = [scroll.scrollLeft + scroll.clientWidth / 2, scroll.scrollTop + scroll.clientHeight / 2].map((place) => place / state.zoom);
  state.zoom = Math.min(2, Math.max(0.02, factor));
  tree.style.zoom = state.zoom;
  scroll.scrollTo(at[0] * state.zoom - scroll.clientWidth / 2, at[1] * state.zoom - scroll.clientHeight / 2);
}

function fit() {
  zoom(Math.min(1, scroll.clientWidth / (state.size[0] + 2 * MARGIN), scroll.clientHeight / (state.size[1] + 2 * MARGIN)));
}

// --- Details of a node ---

function choose(id) {
  reveal(id);
  state.boxes.get(itemId(state.chosen))?.setAttribute("aria-selected", "false");
  state.chosen = id;
  state.boxes.get(itemId(id)).setAttribute("aria-selected", "true");
  const node = nodes[id];
  document.getElementById("panel-title").textContent = `Node ${id}`;
  history.replaceState(null, "", `#node-${id}`); // a copied address opens the node
  document.getElementById("panel-body").replaceChildren(...equals(node), facts(node), ...text(node), ...found(node), ...pairsOf(node), ...prompt(node));
  if (panel.hidden) {
    panel.hidden = false;
    if (outline.checked) draw(); // its lines are as long as the frame
  }
  panel.scrollTop = 0;
  focus(id);
  // In a narrow window the panel is below the tree, where its change would go unnoticed.
  if (getComputedStyle(panel).position === "static") panel.scrollIntoView();
}

function link(id) {
  const button = element("button", `node ${id}`);
  button.type = "button";
  button.addEventListener("click", () => choose(id));
  return button;
}

function equals(node) {
  const others = nodes.filter((other) => other.drawn === node.drawn && other !== node);
  if (!others.length) return [];
  const made = element("details");
  made.append(element("summary", `the same step as ${others.length} others`), ...others.flatMap((other) => [link(other.node_id), " "]));
  return [made];
}

function facts(node) {
  const table = element("table", "", "facts");
  table.createCaption().textContent = "Values of the search";
  const values = {
    step: node.action || "the question",
    "next stage": node.stage,
    ended: node.stop_reason,
    origin: node.origin,
    "visits N": node.visits,
    "visits with a value": node.valued,
    "value Q": number(node.value),
    SPRE: number(node.spre),
    "outcome of the answer": node.grade ? number(node.grade.value) : null,
    "error of the outcome": node.grade?.error || null,
    "reason of the outcome": node.grade?.reason || null,
    "F1 of the answer": node.f1?.toFixed(3),
    "exact match": node.em?.toFixed(3),
    "prompt tokens": node.prompt_tokens,
    "completion tokens": node.completion_tokens,
    "finish reason": node.finish_reason,
  };
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined) continue;
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

function found(node) {
  if (!node.passages.length) return [];
  return [element("h3", "Passages, best first"), ...node.passages.map(([index, score]) => folded(`${passages[index].id}, score ${score ?? "–"}`, passages[index].contents))];
}

function pairsOf(node) {
  const sides = [["chosen", "rejected"], ["rejected", "chosen"]];
  const items = pairs.flatMap((pair, place) => sides.filter(([side]) => pair[`${side}_node_id`] === node.node_id).map(([side, other]) => {
    const item = element("li", side === "chosen" ? "chosen over " : "rejected for ");
    const shared = whole ? `, as whole trajectories that share ${pair.depth} steps` : "";
    const why = `: reward ${number(pair[`${side}_reward`])} against ${number(pair[`${other}_reward`])}, margin ${number(pair.margin)} (${pair.split})${shared}, `;
    const texts = element("a", "both texts");
    texts.href = `#pair-${place}`;
    item.append(link(pair[`${other}_node_id`]), why, texts);
    return item;
  }));
  if (!items.length) return [];
  const list = element("ul");
  list.append(...items);
  return [element("h3", "Pairs"), list];
}

function prompt(node) {
  const elements = node.prompt.map((index) => folded(messages[index].role, messages[index].content));
  if (node.prefix) elements.push(folded("turn so far", node.prefix));
  return elements.length ? [element("h3", "Prompt"), ...elements] : [];
}

// --- Pairs of the question ---

function path(id) {
  const steps = [];
  for (let at = id; at > 0; at = nodes[at].parent_id) steps.unshift({ ...nodes[at], id: at });
  return steps;
}

function pairDetails(pair, place) {
  const [chosen, rejected] = [path(pair.chosen_node_id), path(pair.rejected_node_id)];
  const made = element("details", "", "pair");
  made.id = `pair-${place}`;
  const confidence = pair.confidence === null ? "" : `, confidence ${number(pair.confidence)}`;
  const title = `${chosen.at(-1).action} > ${rejected.at(-1).action}: node ${pair.chosen_node_id} over node ${pair.rejected_node_id}, margin ${number(pair.margin)}${confidence} (${pair.split})`;
  made.append(element("summary", title));
  made.addEventListener("toggle", () => {
    if (made.childElementCount > 1) return;
    const notes = ["chosen", "rejected"].map((side) => `reward ${number(pair[`${side}_reward`])}`);
    const links = element("p");
    links.append(link(pair.chosen_node_id), " ", link(pair.rejected_node_id));
    made.append(...comparison(chosen, rejected, pair.depth, ...notes), links);
  });
  return made;
}

// --- Keys, mouse, address ---

function neighbour(id, key) {
  const [item, order] = [state.items[id], [...state.boxes.keys()]];
  const level = outline.checked ? order : order.filter((other) => nodes[other].depth === nodes[id].depth);
  const beside = [...level].sort((a, b) => state.boxes.get(a).offsetTop - state.boxes.get(b).offsetTop);
  const moves = {
    ArrowLeft: () => nodes[id].parent_id,
    ArrowRight: () => childrenOf(item)[0]?.id,
    ArrowUp: () => beside[beside.indexOf(id) - 1],
    ArrowDown: () => beside[beside.indexOf(id) + 1],
    Home: () => 0,
    End: () => order.at(-1),
  };
  const next = moves[key]?.();
  return next >= 0 ? itemId(next) : undefined;
}

tree.addEventListener("click", (event) => {
  const made = event.target.closest(".node");
  if (!made) return;
  const id = Number(made.dataset.id);
  if (event.target.closest(".fold")) toggle(state.items[id]);
  else choose(leadOf(state.items[id]).node_id);
});
tree.addEventListener("keydown", (event) => {
  const id = Number(event.target.closest(".node")?.dataset.id ?? state.focus);
  const item = state.items[id];
  const next = neighbour(id, event.key);
  if (event.key === "Enter") choose(leadOf(item).node_id);
  else if (event.key === " " || (event.key === "ArrowRight" && !isOpen(item) && item.children.length)) toggle(item);
  else if (next !== undefined) focus(next);
  else return;
  event.preventDefault();
});
scroll.addEventListener("pointerdown", (event) => {
  if (event.pointerType !== "mouse" || event.button || event.target.closest(".node")) return;
  const move = (moved) => scroll.scrollBy({ left: -moved.movementX, top: -moved.movementY, behavior: "instant" });
  scroll.addEventListener("pointermove", move);
  window.addEventListener("pointerup", () => scroll.removeEventListener("pointermove", move), { once: true });
  event.preventDefault();
});
scroll.addEventListener("wheel", (event) => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  zoom(state.zoom * Math.exp(-event.deltaY / 300));
}, { passive: false });
document.getElementById("closer").addEventListener("click", () => zoom(state.zoom * 1.25));
document.getElementById("farther").addEventListener("click", () => zoom(state.zoom / 1.25));
document.getElementById("fit").addEventListener("click", fit);
shown.addEventListener("change", () => expand(shown.value));
outline.addEventListener("change", () => expand(shown.value || "best"));
merge.addEventListener("change", () => {
  state.items = itemsOf();
  draw();
});
window.addEventListener("resize", draw);

function restore() {
  const [, kind, place] = /^#(node|pair)-(\d+)$/.exec(location.hash) ?? [];
  if (kind === "node" && nodes[place]) choose(Number(place));
  const pair = kind === "pair" && document.getElementById(`pair-${place}`);
  if (pair) {
    pair.open = true;
    pair.scrollIntoView();
  }
}

state.items = itemsOf();
fill();
// Columns that are too narrow for their texts become an outline, which fits a phone too.
outline.checked = columnWidth(Math.max(best.length - 1, 1)) < WIDTH[0];
document.getElementById("pairs").append(...pairs.map(pairDetails));
expand(shown.value);
window.addEventListener("hashchange", restore);
restore();
