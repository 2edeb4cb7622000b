// What the wires of a graph say: which model file feeds a node, which sampler it feeds.

const BYPASSED = 4;
const MUTED = 2;
const MOST_HOPS = 64;

const LOADERS = {
  UNETLoader: ["diffusion_models", "unet_name"],
  CheckpointLoaderSimple: ["checkpoints", "ckpt_name"],
};

/** The node wired to an input, reroutes left out; null where there is none in this graph. */
export function upstream(node, input) {
  let slot = node.inputs?.findIndex((i) => i.name === input) ?? -1;
  for (let hops = 0; slot >= 0 && hops < MOST_HOPS; hops++) {
    node = node.getInputNode?.(slot) ?? null;
    if (!node || node.mode === MUTED) return null;
    if (node.type !== "Reroute") return node;
    slot = 0;
  }
  return null;
}

export function isLinked(node, input) {
  return node.inputs?.some((i) => i.name === input && i.link != null) ?? false;
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
  if (!current) return null;
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
