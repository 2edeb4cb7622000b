// Timestep Gate: the schedule as bars, dense ones in one colour and sparse ones in another, under a
// cutoff that can be dragged.

import { addPanel, after, ask, follow, grow, make, setWidget, widgetOf } from "./panel.js";
import { modelSource, samplerAfter, samplerSettings, upstream } from "./wiring.js";

const CUTOFF = "disabled_until_timestep";
const SETTINGS = ["steps", "scheduler", "denoise"];
const WIDTH = 320; // of the drawing's own coordinates; CSS scales it
const HEIGHT = 96;
const AXIS = 22;

export function setUpGate(node) {
  const head = make("div", "head");
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const hint = make("div", "faint hint");
  addPanel(node, "schedule", make("div", "trtllm-gate", head, svg, hint), () => 156);
  if (node.size[0] < 320) node.setSize([320, node.size[1]]);
  grow(node);

  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT + 14}`);
  svg.setAttribute("tabindex", "0");
  svg.setAttribute("role", "slider");
  svg.setAttribute("aria-label", "cutoff: attention stays dense above it");

  let times = []; // one normalized timestep per step
  let wanted = ""; // what `times` is the schedule of
  let ran = { wanted: null, times: [] }; // what the last run said
  const cutoff = () => Number(widgetOf(node, CUTOFF).value);

  async function refresh() {
    const asked = schedule(node);
    const key = JSON.stringify(asked);
    if (key !== wanted) {
      wanted = key;
      times = [];
      if (ran.wanted === key) times = ran.times;
      else if (asked.file && asked.shift !== undefined) {
        const answer = await ask("schedule", asked);
        if (wanted !== key) return; // the graph changed while the server answered
        times = answer?.timesteps ?? [];
      }
    }
    draw(asked);
  }

  function draw(asked) {
    const t = cutoff();
    head.replaceChildren(...counts(times, t));
    svg.innerHTML = picture(times, t, asked.empty);
    svg.setAttribute("aria-valuenow", t);
    const other = differingSampler(node, asked);
    hint.replaceChildren(...(other ? [other] : []));
  }

  function moveTo(event) {
    const box = svg.getBoundingClientRect();
    const y = ((event.clientY - box.top) / box.height) * (HEIGHT + 14);
    const step = event.shiftKey ? 1000 : 100;
    const t = Math.round((1 - (y - 2) / (HEIGHT - 2)) * step) / step;
    setWidget(node, CUTOFF, Math.min(1, Math.max(0, t)));
    draw(schedule(node));
  }

  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    event.stopPropagation(); // the node must not be dragged along
    svg.setPointerCapture(event.pointerId);
    moveTo(event);
  });
  svg.addEventListener("pointermove", (event) => {
    if (svg.hasPointerCapture(event.pointerId)) moveTo(event);
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowUp: 0.01, ArrowDown: -0.01, PageUp: 0.1, PageDown: -0.1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const t = Math.round((cutoff() + step) * 1000) / 1000;
    setWidget(node, CUTOFF, Math.min(1, Math.max(0, t)));
  });
  after(node, "onExecuted", (output) => {
    if (!output?.timesteps?.length) return;
    ran = { wanted: JSON.stringify(schedule(node)), times: output.timesteps };
    wanted = "";
    refresh();
  });
  follow(node, refresh);
}

/** What is known of the schedule: the request to the server, and what to say while there is none. */
function schedule(node) {
  const own = Object.fromEntries(SETTINGS.map((name) => [name, widgetOf(node, name).value]));
  const maker = upstream(node, "sigmas");
  if (maker !== null) {
    const settings = maker && samplerSettings(maker);
    const source = settings ? modelSource(maker) : null;
    const { steps, scheduler, denoise } = settings ?? own;
    return { ...source, steps, scheduler, denoise, sigmas: true, empty: "Run once to see the wired sigmas" };
  }
  const source = modelSource(node);
  if (!source) return { ...own, empty: "Connect the sampler's model (or sigmas) to see its schedule" };
  return { ...source, ...own, empty: "Run once to see this model's schedule" };
}

function isDense(time, cutoff) {
  return cutoff > 0 && time > cutoff;
}

function counts(times, cutoff) {
  if (!times.length) return [make("span", "faint", cutoff > 0 ? `dense while t > ${cutoff}` : "no gate")];
  const dense = times.filter((time) => isDense(time, cutoff)).length;
  return [
    make("b", "dense", `${dense} of ${times.length} steps dense`),
    make("span", "faint", ", "),
    make("b", "sparse", `${times.length - dense} with Skip-Softmax`),
  ];
}

const yOf = (time) => 2 + (1 - time) * (HEIGHT - 2);

function picture(times, cutoff, empty) {
  const width = (WIDTH - AXIS) / Math.max(times.length, 1);
  const gap = width > 5 ? 1.5 : 0; // hundreds of bars become an area
  const bars = { dense: "", sparse: "" };
  times.forEach((time, index) => {
    const x = AXIS + index * width;
    const top = yOf(Math.min(1, Math.max(0, time)));
    bars[isDense(time, cutoff) ? "dense" : "sparse"] +=
      `M${x.toFixed(2)} ${HEIGHT}V${top.toFixed(2)}h${(width - gap).toFixed(2)}V${HEIGHT}Z`;
  });
  const line = yOf(cutoff);
  const scale = [1, 0.5, 0].map((t) => `<text x="0" y="${yOf(t) + (t === 1 ? 7 : t ? 3 : 0)}">${t}</text>`).join("");
  const ends = times.length
    ? `<text x="${AXIS}" y="${HEIGHT + 12}">step 1</text>
       <text x="${WIDTH}" y="${HEIGHT + 12}" text-anchor="end">${times.length}</text>`
    : `<text x="${(WIDTH + AXIS) / 2}" y="${HEIGHT / 2 + 14}" text-anchor="middle">${empty}</text>`;
  return `
    <rect x="${AXIS}" y="0" width="${WIDTH - AXIS}" height="${HEIGHT}" fill="transparent"/>
    <path d="${bars.dense}" fill="var(--dense)"/><path d="${bars.sparse}" fill="var(--sparse)"/>
    <path d="M${AXIS} ${HEIGHT}H${WIDTH}" stroke="var(--descrip-text, #999)" stroke-width="0.5"/>
    <g style="cursor: ns-resize" class="cutoff">
      <path d="M${AXIS} ${line}H${WIDTH}" stroke="var(--input-text, #ddd)" stroke-width="1.2" stroke-dasharray="4 3"/>
      <path d="M${AXIS} ${line}H${WIDTH}" stroke="transparent" stroke-width="12"/>
      <rect x="${WIDTH - 44}" y="${Math.min(line - 7, HEIGHT - 14)}" width="44" height="14" rx="3"
        fill="var(--input-text, #ddd)"/>
      <text x="${WIDTH - 22}" y="${Math.min(line, HEIGHT - 7) + 3.5}" text-anchor="middle"
        style="fill: var(--comfy-input-bg, #222)">t ${cutoff}</text>
    </g>${scale}${ends}`;
}

/** An offer to take over the sampler's settings, where they are not the ones that are drawn. */
function differingSampler(node, asked) {
  if (asked.sigmas) return null;
  const sampler = samplerAfter(node);
  if (!sampler || SETTINGS.every((name) => sampler[name] === asked[name])) return null;
  const take = make("a", "take", "use");
  take.onclick = () => SETTINGS.forEach((name) => setWidget(node, name, sampler[name]));
  const denoise = sampler.denoise === 1 ? "" : `, denoise ${sampler.denoise}`;
  return make("span", "", `${sampler.name}: ${sampler.steps} steps, ${sampler.scheduler}${denoise} `, take);
}
