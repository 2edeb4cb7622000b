// Skip-Softmax: only the widgets of the chosen mode, and the λ that they amount to.

import { addPanel, follow, grow, make, widgetOf } from "./panel.js";
import { isLinked, upstream } from "./wiring.js";

const WIDGET_OF = { threshold: "threshold", calibrated: "target_sparsity" };
const KEYS = [32760, 75600]; // tokens of Wan's 832 x 480 and 1280 x 720, 81 frames

export function setUpSkipSoftmax(node) {
  const text = make("div", "trtllm-lambda selectable");
  addPanel(node, "lambda", text, () => 52);
  grow(node);
  follow(node, () => {
    const mode = widgetOf(node, "mode").value;
    for (const [owner, name] of Object.entries(WIDGET_OF)) setHidden(widgetOf(node, name), owner !== mode);
    text.replaceChildren(...meaning(node, mode));
    node.setDirtyCanvas?.(true, true);
  });
}

/**
 * Hides a widget without moving it, so that saved values keep their places. Nodes 2.0 learned to
 * show a hidden widget again only after frontend 1.32; before that it shows both.
 */
function setHidden(widget, hidden) {
  widget.hidden = hidden;
  // the canvas keeps a row for a hidden widget unless it is this small
  if (hidden) widget.computeSize = () => [0, -4];
  else delete widget.computeSize;
  if (!widget._state?.options || widget._state.options.hidden === hidden) return;
  widget._state.options = { ...widget._state.options, hidden }; // Nodes 2.0 notices a new object
}

function meaning(node, mode) {
  if (mode === "threshold") {
    const threshold = Number(widgetOf(node, "threshold").value);
    if (!(threshold > 0)) return [make("b", "", "λ = 0"), " skips nothing"];
    return [make("b", "", `λ = ${threshold}`), `: skips tiles whose scores all stay ${(-Math.log(threshold)).toFixed(1)} below their row's maximum`];
  }
  const target = Number(widgetOf(node, "target_sparsity").value);
  if (!isLinked(node, "calibration")) {
    return [make("span", "bad", "Connect a calibration, or switch mode to threshold")];
  }
  const curve = upstream(node, "calibration")?.trtllmCurve;
  if (!curve) return [make("span", "faint", `aims at ${percent(target)} of tiles; run once to see λ`)];
  const scale = curve[0] * Math.exp(curve[1] * target);
  const values = KEYS.map((keys) => `${(scale / keys).toPrecision(2)} at ${keys.toLocaleString("en")} keys`);
  return [make("b", "", `λ = ${scale.toPrecision(3)} / keys`), `: ${values.join(", ")}`];
}

const percent = (share) => `${Math.round(share * 100)} %`;
