// The text on a node: what is in effect, how the run goes, what came of it, or why it was refused.

import { api } from "../../../scripts/api.js";
import { addPanel, after, grow, make } from "./panel.js";

const LINE = 16;
const AROUND = 32; // the padding of a panel, and the margin that the frontend keeps around it
const HIGHEST = 340; // longer texts scroll
const MOST_LINES = 4; // of a document without a summary
const SECTION = "## ";
const PROGRESS = "progress_text"; // {nodeId, text}, and in later frontends prompt_id

/**
 * Gives a node a text panel. `placeholder` stands there before the first run. `brief` is for nodes whose
 * output text is a document: the progress text of the same run is kept, and where there was none, as
 * when the node came from the cache, the document's summary is shown.
 */
export function setUpStatus(node, placeholder, { brief = false } = {}) {
  const content = make("div", "selectable");
  const element = make("div", "trtllm-status", content);
  let text = "";
  let failed = false;
  let told = false; // by progress text, in this run
  let measured = 0; // the text's height; 0 while it is not on the page
  const lines = () => (text || placeholder).split("\n").reduce((sum, line) => sum + wrapped(line, node.size[0]), 0);
  const height = () => Math.min(HIGHEST, AROUND + (measured || LINE * lines()));
  addPanel(node, "status", element, () => (text || placeholder ? height() : 0));

  function show(value, isError = false) {
    [text, failed, told] = [String(value ?? ""), isError, false];
    content.replaceChildren(...(text ? text.split("\n").map(lineOf) : [make("div", "faint", placeholder)]));
    content.classList.toggle("bad", failed);
    element.style.display = text || placeholder ? "" : "none";
    measured = content.offsetHeight;
    grow(node);
  }

  const observer = new ResizeObserver(() => {
    if (!content.offsetHeight || content.offsetHeight === measured) return; // out of view, or as it was
    measured = content.offsetHeight;
    grow(node);
  });
  observer.observe(content);

  show("");
  const progress = (value) => {
    show(value);
    told = true;
  };
  node.trtllmStatus = { show, progress, isError: () => failed };
  after(node, "onExecuted", (output) => {
    const [was, said] = [told, output?.text?.join("\n")];
    told = false;
    if (said && !(brief && was)) show(brief ? summaryOf(said) : said);
  });
}

/** A Markdown document up to its first line that is all bold, else its sections with their scores, else its first lines. */
export function summaryOf(markdown) {
  const lines = markdown.split("\n").filter((line) => line.trim() && !line.startsWith("# "));
  const bold = lines.findIndex((line) => /^\*\*.*\*\*$/.test(line));
  if (bold >= 0) return lines.slice(0, bold + 1).join("\n").replaceAll("**", "");
  if (!lines.some((line) => line.startsWith(SECTION))) return lines.slice(0, MOST_LINES).join("\n");
  return lines.map((line) => (line.startsWith(SECTION) ? line.slice(SECTION.length) : score(line))).filter(Boolean).join("\n");
}

/** "PSNR: 20.1 dB" of a table's row that has a name and a number; "" of any other line. */
function score(line) {
  const [before, name, value] = line.split("|").map((cell) => cell.trim());
  return before === "" && /^[^\d-]/.test(name) && /^(-?\d|inf)/.test(value) ? `${name}: ${value}` : "";
}

/**
 * Shows progress text for our nodes in their panels; `nodeOf` finds the node of an execution id.
 *
 * The frontend's own listener, which is always there before ours, would make a second text widget for
 * it, and later frontends take that one away after each run. So text for our panels is taken before
 * it is dispatched. Where a frontend dispatches it in some other way, ours still hears it.
 */
export function receiveProgressText(nodeOf) {
  const take = (detail) => {
    const panel = nodeOf(detail?.nodeId)?.trtllmStatus;
    panel?.progress(detail.text);
    return panel !== undefined;
  };
  const dispatch = api.dispatchCustomEvent;
  api.dispatchCustomEvent = function (type, detail) {
    return (type === PROGRESS && take(detail)) || dispatch.apply(this, arguments);
  };
  api.addEventListener(PROGRESS, ({ detail }) => take(detail));
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
