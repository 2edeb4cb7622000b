// What every panel of this pack shares: a DOM widget that is never saved, its look, and one refresh
// for all of them when the graph changes. Both renderers show DOM widgets; nothing here polls.

import { api } from "../../../scripts/api.js";

const CSS = `
.trtllm-panel { --dense: #d98e2b; --sparse: #3b93d8; box-sizing: border-box; width: 100%; height: 100%;
  overflow: hidden auto; padding: 6px 8px; border-radius: 6px; background: var(--comfy-input-bg, #222);
  color: var(--input-text, #ddd); font: 12px/16px Inter, Arial, sans-serif; user-select: none; }
.trtllm-panel .faint { color: var(--descrip-text, #999); }
.trtllm-panel .dense { color: color-mix(in srgb, var(--dense) 75%, var(--input-text, #ddd)); }
.trtllm-panel .sparse { color: color-mix(in srgb, var(--sparse) 75%, var(--input-text, #ddd)); }
.trtllm-panel .bad { color: color-mix(in srgb, #e5322d 80%, var(--input-text, #ddd)); }
.trtllm-panel a { color: inherit; font-weight: bold; cursor: pointer; text-decoration: underline; }
.trtllm-panel svg { display: block; width: 100%; overflow: visible; touch-action: none; }
.trtllm-panel svg text { font: 10px Inter, Arial, sans-serif; fill: var(--descrip-text, #999); }
.trtllm-panel svg:focus-visible { outline: 1px solid var(--sparse); outline-offset: 2px; }
.trtllm-panel .selectable { user-select: text; }
`;

let styled = false;

/** Adds `element` to the end of a node as a widget that is neither saved nor sent. */
export function addPanel(node, name, element, minHeight) {
  if (!styled) {
    const style = document.createElement("style");
    style.textContent = CSS;
    document.head.append(style);
    styled = true;
  }
  element.classList.add("trtllm-panel");
  const widget = node.addDOMWidget(name, "trtllm_panel", element, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: minHeight,
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false;
  after(node, "onConfigure", () => grow(node)); // saved before there was a panel
  return widget;
}

const growing = new Set();

/** Makes a node large enough for its widgets, soon; never smaller. */
export function grow(node) {
  if (!growing.size) setTimeout(growAll, 0);
  growing.add(node);
}

function growAll() {
  for (const node of growing) {
    const wanted = node.computeSize();
    const width = Math.max(node.size[0], wanted[0]);
    const height = Math.max(node.size[1], wanted[1]);
    if (width > node.size[0] || height > node.size[1]) node.setSize([width, height]);
    node.setDirtyCanvas?.(true, true);
  }
  growing.clear();
}

/** An element; children are nodes or strings. */
export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

const refreshers = new Map();

/** Calls `refresh` soon, and again whenever the graph, a wire or one of the node's widgets changes. */
export function follow(node, refresh) {
  let waiting = false;
  const soon = () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => {
      waiting = false;
      if (refreshers.has(node) && node.graph) refresh(); // not while it is being made or taken away
    }, 0);
  };
  refreshers.set(node, soon);
  after(node, "onConnectionsChange", soon);
  after(node, "onConfigure", soon);
  after(node, "onRemoved", () => refreshers.delete(node));
  for (const widget of node.widgets ?? []) after(widget, "callback", soon);
  soon();
  return soon;
}

export function refreshAll() {
  for (const soon of refreshers.values()) soon();
}

/** Runs `extra` after a method that may or may not exist, and keeps its result. */
export function after(object, name, extra) {
  const original = object[name];
  object[name] = function (...args) {
    const result = original?.apply(this, args);
    extra.apply(this, args);
    return result;
  };
}

export function widgetOf(node, name) {
  return node.widgets?.find((widget) => widget.name === name);
}

/** Gives a widget a value as typing into it does. */
export function setWidget(node, name, value) {
  const widget = widgetOf(node, name);
  widget.value = value;
  widget.callback?.(value, undefined, node);
}

/** Asks the server; null where it has no answer, as on a server without the pack's routes. */
export async function ask(path, body) {
  try {
    const response = await api.fetchApi(`/trtllm_attention/${path}`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

/** An SVG's markup for `text`, safe to put between tags. */
export function escape(text) {
  return String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
}
