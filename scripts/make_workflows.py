"""Write workflows/: each draft as UI-format JSON, as API-format JSON and as a picture.

    python scripts/make_workflows.py [NAME...]

Needs what the browser tests need: a ComfyUI (COMFYUI_PATH, COMFYUI_PYTHON), Playwright and Chromium.
"""

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "comfy"), str(ROOT / "tests" / "browser")]

from frontend import Browser  # noqa: E402
from harness import location  # noqa: E402
from harness.server import ComfyServer  # noqa: E402
from workflow_drafts import DRAFTS  # noqa: E402

FOLDER = ROOT / "workflows"
PICTURE_WIDTH = 1600
VIEW = (3000, 1700)  # large enough that text is drawn at the zoom that shows the whole graph

# Places nodes in groups and columns, and makes the notes; sizes are the frontend's own.
LAY_OUT = """
({groups, titles}) => {
  const gap = 34, head = LiteGraph.NODE_TITLE_HEIGHT, graph = app.graph;
  const place = (node, x, y) => { node.pos = [x, y]; return [node.size[0], node.size[1]]; };
  let x = 0;
  for (const [title, columns] of Object.entries(groups)) {
    const left = x;
    let bottom = 0;
    for (const column of columns) {
      let y = 90, width = 0;
      for (const entry of column) {
        let node = entry.node && graph.getNodeById(Number(entry.node));
        if (!node) {
          node = LiteGraph.createNode('MarkdownNote');
          graph.add(node);
          node.widgets[0].value = entry.note;
          node.title = 'Note';
          node.setSize([400, 120 + entry.note.length * 0.22]);
        } else {
          const small = node.computeSize();
          node.setSize([Math.max(small[0], 340), Math.max(small[1], entry.height ?? 0)]);
        }
        if (titles[entry.node]) node.title = titles[entry.node];
        const [w, h] = place(node, x + gap, y);
        y += h + head + gap;
        width = Math.max(width, w);
      }
      for (const entry of column) {
        const node = entry.node && graph.getNodeById(Number(entry.node));
        if (node) node.setSize([width, node.size[1]]);
      }
      x += width + gap;
      bottom = Math.max(bottom, y);
    }
    const group = new LiteGraph.LGraphGroup(title);
    group.pos = [left, 0];
    group.size = [x - left + gap, bottom];
    graph.add(group);
    x += gap * 2;
  }
  const groupsOf = graph._groups ?? graph.groups;
  const height = Math.max(...groupsOf.map((g) => g.size[1]));
  groupsOf.forEach((g) => { g.size = [g.size[0], height]; });
  app.canvas.setDirty(true, true);
}
"""

FRAME = """
() => {
  const groups = app.graph._groups ?? app.graph.groups;
  const right = Math.max(...groups.map((g) => g.pos[0] + g.size[0])), bottom = Math.max(...groups.map((g) => g.size[1]));
  const ds = app.canvas.ds, box = app.canvas.canvas.getBoundingClientRect();
  ds.scale = Math.min((box.width - 320) / right, (box.height - 340) / bottom, 1);
  ds.offset[0] = 200 / ds.scale;
  ds.offset[1] = 170 / ds.scale;
  app.canvas.setDirty(true, true);
  return {x: box.x + 192, y: box.y + 162, width: right * ds.scale + 16, height: bottom * ds.scale + 16};
}
"""


# Comparing needs the same seed in every run; a calibration wants another one in each.
FIX_SEEDS = """
() => app.graph.nodes.flatMap((node) => node.widgets ?? [])
  .filter((widget) => widget.name === 'control_after_generate').forEach((widget) => { widget.value = 'fixed'; })
"""


def make(front, draft):
    """Write one workflow's three files."""
    front.page.set_viewport_size({"width": VIEW[0], "height": VIEW[1]})
    front.settle()
    front.js("prompt => app.loadApiJson(prompt, 'workflow')", draft.nodes)
    if "calibrate" not in draft.name:
        front.js(FIX_SEEDS)
    front.settle(1200)  # panels ask the server once and grow
    front.js(LAY_OUT, {"groups": draft.groups, "titles": draft.titles})
    front.settle(1500)
    workflow = _tidy(front.serialize())
    (FOLDER / f"{draft.name}.json").write_text(json.dumps(workflow, indent=1) + "\n")
    prompt = front.js("async () => (await app.graphToPrompt()).output")
    (FOLDER / "api").mkdir(parents=True, exist_ok=True)
    (FOLDER / "api" / f"{draft.name}.json").write_text(json.dumps(prompt, indent=1) + "\n")
    clip = front.js(FRAME)
    front.settle(1500)
    _save_jpg(front.page.screenshot(clip=clip), FOLDER / f"{draft.name}.jpg")


def _tidy(workflow):
    """Without what only this session's frontend means."""
    workflow.get("extra", {}).pop("ds", None)
    return workflow


def _save_jpg(png, path):
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    height = round(picture.height * PICTURE_WIDTH / picture.width)
    picture.resize((PICTURE_WIDTH, height), Image.LANCZOS).save(path, quality=82, optimize=True)


def main():
    """The command line of the module's docstring."""
    wanted = set(sys.argv[1:])
    models = location.CACHE / "models" / f"stock-{location.comfyui_version()}"
    script = location.LAUNCHER.with_name("stock_models.py")
    subprocess.run([location.comfyui_python(), script, location.comfyui_path(), models], check=True)
    with tempfile.TemporaryDirectory() as workspace:
        server = ComfyServer(workspace, packs={"trtllm-attention": ROOT}, models=models)
        (server.workspace / "input").mkdir(parents=True)
        source = location.comfyui_path() / "input" / "example.png"
        if source.exists():
            (server.workspace / "input" / "example.png").write_bytes(source.read_bytes())
        with server:
            for draft in (make_draft() for make_draft in DRAFTS):
                if not wanted or draft.name in wanted:
                    with Browser() as browser:  # a fresh profile: previews of one graph stay in the next
                        front = browser.open(server)
                        make(front, draft)
                        print(draft.name, "errors:", front.errors)


if __name__ == "__main__":
    main()
