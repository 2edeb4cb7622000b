"""Write locales/en/nodeDefs.json from the nodes' schemas: python scripts/make_locales.py

Needs a ComfyUI (COMFYUI_PATH, COMFYUI_PYTHON).
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "comfy"))

from harness.locales import node_defs  # noqa: E402
from harness.server import ComfyServer  # noqa: E402


def main():
    """The command line of the module's docstring."""
    target = ROOT / "locales" / "en" / "nodeDefs.json"
    with tempfile.TemporaryDirectory() as workspace:
        with ComfyServer(workspace, packs={"trtllm-attention": ROOT}) as server:
            text = json.dumps(node_defs(server.object_info), indent=2, ensure_ascii=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
