// Layer Ignore List: the model's layers as a grid. Clicking or sweeping writes the patterns; patterns
// that are typed light the grid up. Which layers a pattern names is answered by the server.

import { addPanel, after, ask, escape, follow, grow, make, setWidget, widgetOf } from "./panel.js";
import { modelSource } from "./wiring.js";

const PER_ROW = 20;
const CELL = 16; // in the drawing's own coordinates; CSS scales it
const LABEL = 22;
const WIDTH = LABEL + PER_ROW * CELL;
const HIGHEST = 280;

export function setUpLayers(node) {
  const head = make("div", "head");
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const problems = make("div", "bad selectable");
  const empty = make("div", "faint");
  const element = make("div", "trtllm-layers", head, svg, empty, problems);
  let height = 56;
  addPanel(node, "layers", element, () => height);

  let names = []; // of the layers
  let matches = []; // {pattern, layers: indices} of each pattern
  let asked = ""; // what names and matches were asked for
  let ran = null; // names, as the last run gave them
  let selected = new Set();

  async function refresh() {
    const source = modelSource(node);
    const request = { patterns: String(widgetOf(node, "patterns").value ?? "") };
    if (source?.file) request.file = source.file;
    if (ran) request.layers = ran;
    const key = JSON.stringify(request);
    if (key === asked) return;
    asked = key;
    const answer = source || ran ? await ask("layers", request) : null;
    if (asked !== key) return; // typed on while the server answered
    names = answer?.layers ?? [];
    matches = answer?.matches ?? [];
    selected = new Set(matches.flatMap((match) => match.layers));
    draw(source);
  }

  function draw(source) {
    const count = make("b", selected.size ? "dense" : "", `${selected.size} of ${names.length} layers stay dense`);
    head.replaceChildren(...(names.length ? [count, make("span", "faint", "  click or sweep")] : []));
    const { markup, bottom } = grid(names, selected);
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${Math.max(bottom, 1)}`);
    svg.style.display = names.length ? "" : "none";
    svg.innerHTML = markup;
    empty.textContent = names.length ? "" : emptyText(source);
    const unmatched = matches.filter((match) => !match.layers.length).map((match) => match.pattern);
    problems.textContent = names.length && unmatched.length ? `No layer is named ${unmatched.join(", ")}` : "";
    height = names.length ? Math.min(HIGHEST, 34 + (bottom * Math.max(node.size[0], WIDTH)) / WIDTH) : 56;
    if (problems.textContent) height += 20;
    grow(node);
  }

  let sweep = null; // {on, layers} while the pointer is down

  function touch(event) {
    const cell = document.elementFromPoint(event.clientX, event.clientY)?.closest?.("[data-layer]");
    if (!cell || !svg.contains(cell)) return;
    const layer = Number(cell.dataset.layer);
    sweep.on ??= !selected.has(layer);
    sweep.layers.add(layer);
    cell.setAttribute("class", sweep.on ? "on" : "");
    cell.setAttribute("fill", sweep.on ? "var(--dense)" : "var(--sparse)");
  }

  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    event.stopPropagation();
    svg.setPointerCapture(event.pointerId);
    sweep = { layers: new Set() };
    touch(event);
  });
  svg.addEventListener("pointermove", (event) => {
    if (sweep) touch(event);
  });
  svg.addEventListener("pointerup", () => {
    const { on, layers } = sweep ?? {};
    sweep = null;
    if (!layers?.size) return;
    const text = String(widgetOf(node, "patterns").value ?? "");
    const comments = text.split("\n").filter((line) => line.trimStart().startsWith("#"));
    setWidget(node, "patterns", [...comments, ...changed(matches, names, layers, on)].join("\n"));
  });
  after(node, "onExecuted", (output) => {
    if (output?.layers?.length) {
      ran = output.layers;
      refresh();
    }
  });
  follow(node, refresh);
}

function emptyText(source) {
  if (!source) return "Connect model to choose its layers in a grid";
  return "Run once to choose this model's layers in a grid. Patterns work without it.";
}

/** Layers of one kind differ only in their numbers: blocks.3.self_attn is a blocks.*.self_attn. */
const kindOf = (name) => name.replace(/\d+/g, "*");

/** The patterns after `layers` (indices) were switched on or off. */
export function changed(matches, names, layers, on) {
  let kept = matches;
  let single = [];
  if (on) {
    const covered = new Set(matches.flatMap((match) => match.layers));
    single = [...layers].filter((layer) => !covered.has(layer));
  } else {
    kept = matches.filter((match) => !match.layers.some((layer) => layers.has(layer)));
    const covered = new Set(kept.flatMap((match) => match.layers));
    const others = matches.filter((match) => !kept.includes(match)).flatMap((match) => match.layers);
    single = [...new Set(others)].filter((layer) => !layers.has(layer) && !covered.has(layer));
  }
  const patterns = [...kept.map((match) => match.pattern), ...single.sort((a, b) => a - b).map((i) => names[i])];
  return on ? shortened(patterns, names) : patterns;
}

/** Patterns in which all layers of one kind, listed one by one, become their kind. */
function shortened(patterns, names) {
  const kinds = new Map();
  for (const name of names) kinds.set(kindOf(name), [...(kinds.get(kindOf(name)) ?? []), name]);
  for (const [kind, members] of kinds) {
    if (members.length < 2 || !members.every((name) => patterns.includes(name))) continue;
    patterns = [...patterns.filter((pattern) => !members.includes(pattern)), kind];
  }
  return patterns;
}

function grid(names, selected) {
  const kinds = new Map();
  names.forEach((name, index) => kinds.set(kindOf(name), [...(kinds.get(kindOf(name)) ?? []), index]));
  let y = 0;
  let markup = "";
  for (const [kind, layers] of kinds) {
    const on = layers.filter((layer) => selected.has(layer)).length;
    const count = on ? `${on} of ${layers.length} dense` : `${layers.length}`;
    markup += `<text x="0" y="${y + 10}">${escape(kind)}</text>
      <text x="${WIDTH}" y="${y + 10}" text-anchor="end">${count}</text>`;
    y += 14;
    layers.forEach((layer, place) => {
      const column = place % PER_ROW;
      if (column === 0 && place) y += CELL;
      if (column === 0) markup += `<text x="${LABEL - 4}" y="${y + 11}" text-anchor="end">${place}</text>`;
      const isOn = selected.has(layer);
      markup += `<rect data-layer="${layer}" class="${isOn ? "on" : ""}" x="${LABEL + column * CELL + 1}" y="${y + 1}"
        width="${CELL - 2}" height="${CELL - 2}" rx="2" style="cursor: pointer"
        fill="var(--${isOn ? "dense" : "sparse"})"><title>${escape(names[layer])}</title></rect>`;
    });
    y += CELL + 6;
  }
  return { markup, bottom: y };
}
