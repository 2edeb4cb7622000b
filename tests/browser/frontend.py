"""The real frontend in a real Chromium: open it, load a workflow, look at nodes, run.

Playwright is imported when a `Browser` is opened, so that this file can be imported without it.
"""

import json
import os
import shutil
import tempfile
import time
from pathlib import Path

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps",
]  # fmt: skip

SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.InstalledVersion": "9.9.9",
    "Comfy.Workflow.WorkflowTabsPosition": "Topbar",
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.Workflow.ShowMissingModelsWarning": False,
}

# console errors that the frontend makes without any pack: requests that leave the machine, and 404s of optional files
HARMLESS = ("net::ERR_FAILED", "status of 404", "Failed to load resource", "ERR_BLOCKED", "Content Security Policy")


def chromium_path() -> str | None:
    """The Chromium to use: CHROMIUM, else the one on PATH; None without one."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def why_unavailable() -> str | None:
    """None where a browser can be driven, else the reason."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "Playwright is not installed"
    return None if chromium_path() else "no chromium on PATH: install it, or set CHROMIUM"


class Browser:
    """One Chromium process; a context manager. `open` gives pages of it."""

    def __enter__(self):
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        self._profile = tempfile.mkdtemp()
        self._context = self._playwright.chromium.launch_persistent_context(
            self._profile, executable_path=chromium_path(), headless=True, args=FLAGS,
            viewport={"width": 1600, "height": 1000},
        )  # fmt: skip
        return self

    def __exit__(self, *exc_info):
        self._context.close()
        self._playwright.stop()
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, server, **options) -> "Frontend":
        return Frontend(server, self._context.new_page(), **options)


class Frontend:
    """A page with the frontend of `server` in it.

    nodes2: the Vue renderer instead of the canvas. theme: "dark" or "light". `errors` collects
    exceptions and console errors, `offsite` the requests to other hosts, which are refused; `sent`
    are the queued prompts, `asked` the requests to the pack's routes.
    """

    def __init__(self, server, page, *, nodes2=False, theme="dark"):
        self.server, self.page = server, page
        self.nodes2 = nodes2
        self.errors, self.offsite, self.sent, self.asked = [], set(), [], []
        page.on("pageerror", lambda error: self.errors.append(f"exception: {error}"))
        page.on("console", self._on_console)
        page.route("**/*", self._route)
        settings = {**SETTINGS, "Comfy.VueNodes.Enabled": nodes2, "Comfy.ColorPalette": theme}
        server.post("/settings", settings)
        page.set_default_timeout(10000)
        page.goto(server.url)
        page.wait_for_function("() => window.app?.graph && window.app.extensionManager", timeout=90000)
        page.wait_for_function(
            "() => Object.keys(window.LiteGraph?.registered_node_types || {}).length > 300", timeout=90000
        )
        page.wait_for_timeout(1000)
        # what the frontend itself complains of while it starts is not the pack's
        self.errors = [error for error in self.errors if "trtllm" in error.lower()]

    def _on_console(self, message):
        if message.type == "error" and not any(text in message.text for text in HARMLESS):
            self.errors.append(f"console: {message.text}")

    def _route(self, route):
        request = route.request
        if "trtllm_attention" in request.url:
            self.asked.append(request.url)
        if request.url.startswith((self.server.url, "data:", "blob:")):
            if request.method == "POST" and request.url.endswith("/prompt"):
                self.sent.append(json.loads(request.post_data)["prompt"])
            route.continue_()
        else:
            self.offsite.add(request.url.split("?")[0])
            route.abort()

    def js(self, source, argument=None):
        """Evaluate a function's source in the page."""
        return self.page.evaluate(source, argument)

    def load_api(self, prompt):
        """Open an API-format prompt, laid out by the frontend, as the workflow file that it becomes."""
        self.js("prompt => app.loadApiJson(prompt, 'api')", prompt)
        self.page.wait_for_timeout(200)
        self.js("() => app.graph.arrange(160)")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "workflow.json")
            path.write_text(json.dumps(self.serialize()))
            self.load(path)

    def load(self, path):
        """Open a workflow file as a person does, through the file input behind Open."""
        count = len(json.loads(Path(path).read_text())["nodes"])
        self.js("() => app.graph.clear()")
        self.page.set_input_files("#comfy-file-input", str(path))
        self.page.wait_for_function("n => app.graph._nodes.length == n", arg=count, timeout=20000)
        self.settle()

    def serialize(self) -> dict:
        # through a string: evaluate() turns undefined into null, which the frontend's schema refuses
        return json.loads(self.js("() => JSON.stringify(app.graph.serialize())"))

    def settle(self, milliseconds=400):
        self.page.wait_for_timeout(milliseconds)

    def fit(self):
        """Show the whole graph."""
        self.js("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        self.settle()

    def look_at(self, node_id, scale=1.0):
        """Bring a node to the middle of the page at `scale`."""
        self.js(
            """([id, scale]) => {
                const node = app.graph.getNodeById(id), ds = app.canvas.ds;
                ds.scale = scale;
                const rect = app.canvas.canvas.getBoundingClientRect();
                ds.offset[0] = rect.width / 2 / scale - node.pos[0] - node.size[0] / 2;
                ds.offset[1] = rect.height / 2 / scale - node.pos[1] - node.size[1] / 2;
                app.canvas.setDirty(true, true);
            }""",
            [node_id, scale],
        )
        self.settle()

    def ids(self, node_type) -> list:
        return self.js("type => app.graph._nodes.filter(n => n.type == type).map(n => n.id)", node_type)

    def prompt(self) -> dict:
        """What the Run button would send."""
        return json.loads(self.js("async () => JSON.stringify((await app.graphToPrompt()).output)"))

    def unknown_nodes(self) -> list:
        return self.js("() => app.graph._nodes.filter(n => !LiteGraph.registered_node_types[n.type]).map(n => n.type)")

    def fresh_seed(self) -> int:
        """A seed that no cached run has."""
        self._seeds = getattr(self, "_seeds", 0) + 1
        return int(time.time()) + self._seeds

    def panel(self, node_id, kind):
        """The panel of a node: "gate", "layers", "lambda" or "status"."""
        self.js(
            """id => (app.graph.getNodeById(id).widgets ?? []).forEach((w) => {
                if (w.element?.classList?.contains('trtllm-panel')) w.element.dataset.node = id;
            })""",
            node_id,
        )
        found = self.page.locator(f".trtllm-{kind}[data-node='{node_id}']")
        if not found.count():
            self.look_at(node_id)  # later frontends only mount what is in view
        return found

    def shows(self, locator, text, seconds=8) -> bool:
        """Whether `text` stands in an element, now or soon: the server may have to be asked first."""
        for _ in range(int(seconds * 10)):
            if text in locator.inner_text():
                return True
            self.page.wait_for_timeout(100)
        return False

    def shown_widgets(self, node_id) -> list:
        """Names of the plain widgets that a person sees on a node, by either renderer."""
        if not self.nodes2:
            return self.js(
                "id => app.graph.getNodeById(id).widgets.filter(w => !w.element && !w.hidden).map(w => w.name)", node_id
            )
        text = self.page.locator(f"[data-node-id='{node_id}']").inner_text()
        names = self.js("id => app.graph.getNodeById(id).widgets.filter(w => !w.element).map(w => w.name)", node_id)
        return [name for name in names if name in text.split("\n")]

    def middle(self, locator) -> tuple:
        box = locator.bounding_box()
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def click_middle(self, locator):
        """A click of the mouse, at whatever lies on top there."""
        self.page.mouse.click(*self.middle(locator))
        self.settle()

    def close_dialogs(self):
        """Close what tells of a failed run, and forget that it did."""
        for _ in range(3):
            self.page.keyboard.press("Escape")
        for button in self.page.locator(".p-toast-close-button").all():
            button.click()
        self.settle()
        self.errors.clear()

    def add_by_search(self, words, node_type):
        """Add a node as a person does: double click on the canvas, type, Enter. Returns its id."""
        before = set(self.ids(node_type))
        for patience in (800, 3000):  # a busy machine fills the result list late
            self.js("() => { app.canvas.ds.reset(); app.canvas.ds.offset = [3000, 3000]; app.canvas.setDirty(true, true); }")
            self.settle(200)
            self.page.mouse.dblclick(900, 700)
            self.settle()
            self.page.keyboard.type(words, delay=15)
            self.settle(patience)
            self.page.keyboard.press("Enter")
            self.settle()
            self.page.mouse.click(900, 700)  # later frontends leave the node at the mouse until a click
            self.settle(700)
            added = set(self.ids(node_type)) - before
            if added:
                (node,) = added
                return node
            self.page.keyboard.press("Escape")
            self.settle()
        raise AssertionError(f"searching for {words!r} added no {node_type}")

    def values(self, node_id) -> dict:
        """{widget name: value} as the node shows them."""
        return self.js(
            "id => Object.fromEntries((app.graph.getNodeById(id).widgets || []).map(w => [w.name, w.value]))", node_id
        )

    def set(self, node_id, name, value):
        """Give a widget a value as typing into it does."""
        self.js(
            """([id, name, value]) => {
                const node = app.graph.getNodeById(id), widget = node.widgets.find(w => w.name == name);
                widget.value = value;
                widget.callback?.(value, app.canvas, node);
            }""",
            [node_id, name, value],
        )
        self.settle()

    def box(self, node_id) -> dict:
        """Where a node is on the page, its title included."""
        return self.js(
            """id => {
                const node = app.graph.getNodeById(id), ds = app.canvas.ds;
                const rect = app.canvas.canvas.getBoundingClientRect(), title = LiteGraph.NODE_TITLE_HEIGHT;
                return {x: rect.x + (node.pos[0] + ds.offset[0]) * ds.scale - 12,
                        y: rect.y + (node.pos[1] - title + ds.offset[1]) * ds.scale - 12,
                        width: node.size[0] * ds.scale + 24,
                        height: (node.size[1] + title) * ds.scale + 24};
            }""",
            node_id,
        )

    def picture(self, path, node_id=None):
        """A screenshot of the page, or of one node."""
        clip = None
        if node_id is not None:
            self.look_at(node_id)
            clip = self.box(node_id)
        self.page.screenshot(path=str(path), clip=clip)

    def toasts(self) -> list:
        return self.page.locator(".p-toast-message").all_inner_texts()

    def dialogs(self) -> list:
        return self.page.locator(".p-dialog:visible").all_inner_texts()

    def run(self, timeout=120) -> dict:
        """Queue the graph with the Run command and wait; returns the history entry."""
        before = set(self.server.get("/history"))
        self.js("() => { app.queuePrompt(0, 1) }")
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            new = {k: v for k, v in self.server.get("/history").items() if k not in before}
            if new:
                self.settle()
                return next(iter(new.values()))
            self.page.wait_for_timeout(100)
        raise TimeoutError(f"the graph did not run: {self.dialogs() + self.toasts()}")

    def close(self):
        self.page.close()
