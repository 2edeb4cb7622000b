// The text on a node: what is in effect, how the run goes, what came of it, or why it was refused.

import { addPanel, after, grow, make } from "./panel.js";

// The frontend sends a node's progress text to its widget of this name, and makes one if there is
// none. Under this name ours is the one.
const NAME = "$$node-text-preview";
const LINE = 16;

/**
 * Gives a node a text panel. `placeholder` stands there before the first run; with `brief` only
 * progress text does after it, for nodes whose output text is a document.
 */
export function setUpStatus(node, placeholder, { brief = false } = {}) {
  const content = make("div", "selectable");
  const element = make("div", "trtllm-status", content);
  let text = "";
  let failed = false;
  const lines = () => (text || placeholder).split("\n").reduce((sum, line) => sum + wrapped(line, node.size[0]), 0);
  addPanel(node, NAME, element, () => (text || placeholder ? Math.min(320, 14 + LINE * lines()) : 0), {
    getValue: () => text,
    setValue: (value) => show(value),
  });

  function show(value, isError = false) {
    [text, failed] = [String(value ?? ""), isError];
    content.replaceChildren(...(text ? text.split("\n").map(lineOf) : [make("div", "faint", placeholder)]));
    content.classList.toggle("bad", failed);
    element.style.display = text || placeholder ? "" : "none";
    grow(node);
  }

  show("");
  node.trtllmStatus = { show, isError: () => failed };
  after(node, "onExecuted", (output) => {
    if (!brief && output?.text?.length) show(output.text.join("\n"));
  });
}

/** Puts a refusal on a node of the pack, with or without a text panel of its own. */
export function showError(node, message) {
  if (!node.trtllmStatus) setUpStatus(node, ""); // shows nothing but errors
  node.trtllmStatus.show(message, true);
}

/** Takes refusals of an earlier run away. */
export function clearError(node) {
  if (node.trtllmStatus?.isError()) node.trtllmStatus.show("");
}

function wrapped(line, width) {
  return Math.max(1, Math.ceil((line.length * 6.4) / Math.max(width - 40, 100)));
}

/** "self: REFERENCE (…)" with its first word set off. */
function lineOf(line) {
  const colon = line.indexOf(": ");
  if (colon < 0 || colon > 40) return make("div", "", line || "\u00a0");
  return make("div", "", make("b", "", line.slice(0, colon)), line.slice(colon));
}
