// What the wires of a graph say: which model file feeds a node, which sampler it feeds.

const BYPASSED = 4;
const MUTED = 2;
const MOST_HOPS = 64;

const LOADERS = {
  UNETLoader: ["diffusion_models", "unet_name"],
  CheckpointLoaderSimple: ["checkpoints", "ckpt_name"],
};

/**
 * The node wired to an input, reroutes left out and followed into and out of subgraphs; null where there
 * is none, undefined where only a run will tell: a subgraph that is used twice has two outsides.
 */
export function upstream(node, input) {
  let slot = node.inputs?.findIndex((i) => i.name === input) ?? -1;
  for (let hops = 0; slot >= 0 && hops < MOST_HOPS; hops++) {
    let link = linkInto(node, slot);
    if (!link) return null;
    if (link.originIsIoNode) {
      const outside = nodesOf(node.graph);
      if (outside.length !== 1) return undefined;
      [node, slot] = [outside[0], link.origin_slot];
      continue;
    }
    node = node.graph.getNodeById(link.origin_id);
    while (node?.subgraph && node.mode !== BYPASSED && node.mode !== MUTED) {
      link = node.subgraph.outputNode.slots[link.origin_slot]?.getLinks()[0];
      if (!link || link.originIsIoNode) return link ? undefined : null;
      node = node.subgraph.getNodeById(link.origin_id);
    }
    if (!node || node.mode === MUTED) return null;
    if (node.type !== "Reroute") return node;
    slot = 0;
  }
  return null;
}

/** The link into an input, by the method of plain nodes: a subgraph's node has another that looks further. */
function linkInto(node, slot) {
  return LiteGraph.LGraphNode.prototype.getInputLink.call(node, slot);
}

/** The nodes, in the whole workflow, that stand for `subgraph`. */
function nodesOf(subgraph) {
  const graphs = new Set([subgraph.rootGraph]);
  const found = [];
  for (const graph of graphs) {
    for (const node of graph.nodes) {
      if (!node.subgraph) continue;
      graphs.add(node.subgraph); // visited later by this very loop
      if (node.subgraph === subgraph) found.push(node);
    }
  }
  return found;
}

export function isLinked(node, input) {
  const slot = node.inputs?.findIndex((i) => i.name === input) ?? -1;
  return slot >= 0 && node.isInputConnected(slot);
}

/** A widget's value, also through a primitive; undefined where only a run will tell. */
export function valueOf(node, name) {
  if (isLinked(node, name)) {
    const source = upstream(node, name);
    return source?.type.startsWith("Primitive") ? source.widgets?.[0]?.value : undefined;
  }
  return node.widgets?.find((widget) => widget.name === name)?.value;
}

/**
 * The model wired to a node: null where nothing is, else {file, shift}. file is null where the
 * loader is not known; shift is null for the model's own, undefined where only a run will tell.
 */
export function modelSource(node) {
  let current = upstream(node, "model");
  if (current === null) return null;
  let shift = null;
  for (let hops = 0; current && hops < MOST_HOPS; hops++) {
    if (current.mode !== BYPASSED) {
      if (current.type.startsWith("ModelSampling") && shift === null) {
        shift = current.type === "ModelSamplingSD3" ? valueOf(current, "shift") : undefined;
      }
      const loader = LOADERS[current.type];
      if (loader) return { file: { folder: loader[0], name: valueOf(current, loader[1]) }, shift };
    }
    current = upstream(current, "model");
  }
  return { file: null, shift };
}

/** The settings of the sampler that a node's outputs lead to, or null. */
export function samplerAfter(node) {
  const queue = [node];
  const seen = new Set(queue);
  while (queue.length && seen.size < MOST_HOPS * 4) {
    const current = queue.shift();
    for (let slot = 0; slot < (current.outputs?.length ?? 0); slot++) {
      for (const next of current.getOutputNodes?.(slot) ?? []) {
        if (seen.has(next)) continue;
        seen.add(next);
        queue.push(next);
        const settings = samplerSettings(next);
        if (settings) return settings;
      }
    }
  }
  return null;
}

/** {name, steps, scheduler, denoise} of a node that has a sampler's widgets, or null. */
export function samplerSettings(node) {
  const steps = valueOf(node, "steps");
  const scheduler = valueOf(node, "scheduler");
  if (node.type.startsWith("TRTLLM") || steps === undefined || scheduler === undefined) return null;
  return { name: node.title ?? node.type, steps, scheduler, denoise: valueOf(node, "denoise") ?? 1 };
}
