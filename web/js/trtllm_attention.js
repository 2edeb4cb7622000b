// The pack's frontend extension: which node gets which panel. Every value stays in a plain widget,
// so a frontend that shows none of this still runs the same graph.

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { setUpGate } from "./gate.js";
import { setUpLayers } from "./layers.js";
import { after, refreshAll } from "./panel.js";
import { setUpSkipSoftmax } from "./skip_softmax.js";
import { clearError, receiveProgressText, setUpStatus, showError } from "./status.js";

const PANELS = {
  TRTLLMTimestepGate: setUpGate,
  TRTLLMLayerIgnoreList: setUpLayers,
  TRTLLMSkipSoftmax: setUpSkipSoftmax,
  TRTLLMAttentionPatch: (node) => setUpStatus(node, "Run to see the backend of each role, and why it was chosen"),
  TRTLLMLoadCalibration: setUpCalibration,
  TRTLLMSaveCalibration: setUpCalibration,
  TRTLLMAttentionReport: (node) => setUpStatus(node, "Shows here what the last run skipped", { brief: true }),
  TRTLLMCompare: (node) => setUpStatus(node, "Shows here how far a and b are apart", { brief: true }),
  TRTLLMCalibrate: (node) => setUpStatus(node, "Counts while the model samples; nothing is skipped"),
};

function setUpCalibration(node) {
  setUpStatus(node, "Run to see the curve");
  after(node, "onExecuted", (output) => {
    node.trtllmCurve = output?.curve ?? node.trtllmCurve;
    refreshAll();
  });
}

/** The node of an execution id such as "12" or, inside subgraphs, "7:12". */
function nodeOf(id) {
  let graph = app.rootGraph ?? app.graph;
  let node = null;
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById(Number(part)) ?? graph?.getNodeById(part) ?? null; // ids are strings in later frontends
    graph = node?.subgraph;
  }
  return node;
}

const failed = new Set();

app.registerExtension({
  name: "trtllm.attention",

  setup() {
    // the frontend's own signal of an edit, by whichever renderer
    api.addEventListener("graphChanged", refreshAll);
    receiveProgressText(nodeOf);
    api.addEventListener("execution_start", () => {
      failed.forEach(clearError);
      failed.clear();
    });
    api.addEventListener("execution_error", ({ detail }) => {
      const node = nodeOf(detail?.node_id);
      if (!node?.type?.startsWith("TRTLLM")) return;
      showError(node, detail.exception_message.trim());
      failed.add(node);
    });
  },

  nodeCreated(node) {
    try {
      PANELS[node.comfyClass]?.(node);
    } catch (error) {
      // the node works without its panel
      console.warn("TRTLLM Attention: no panel on", node.comfyClass, error);
    }
  },

  afterConfigureGraph() {
    refreshAll();
  },
});
