"""The real frontend in Debian's Chromium. Without Chromium or Playwright the tests skip, with the reason."""

import shutil

import pytest
from harness import location
from harness.fixtures import new_server, tiny_models  # noqa: F401

CHROMIUM_ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps",
]  # fmt: skip
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.InstalledVersion": "9.9.9",
    "Comfy.Workflow.ShowMissingModelsWarning": False,
}


@pytest.fixture(scope="session")
def comfy_server(request):
    """A server with the pack and the test pack."""
    if reason := location.why_unavailable():
        pytest.skip(reason)
    return request.getfixturevalue("new_server")()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A Chromium context of the session."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on PATH")
    with playwright.sync_playwright() as running:
        context = running.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("chromium"), executable_path=chromium, headless=True,
            args=CHROMIUM_ARGUMENTS, viewport={"width": 1600, "height": 900},
        )  # fmt: skip
        yield context
        context.close()


@pytest.fixture
def page(browser, comfy_server):
    """ComfyUI's page, loaded and ready; `page.errors` are its uncaught exceptions. Nothing else is reached."""

    def only_the_server(route):
        if route.request.url.startswith((comfy_server.url, "data:", "blob:")):
            route.continue_()
        else:
            route.abort()

    comfy_server.post("/settings", SETTINGS)
    page = browser.new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.route("**/*", only_the_server)
    page.goto(comfy_server.url)
    page.wait_for_function("() => window.app?.graph && window.app.extensionManager", timeout=90000)
    page.wait_for_function(
        "count => Object.keys(window.LiteGraph?.registered_node_types || {}).length >= count",
        arg=len(comfy_server.object_info) - 5,
        timeout=90000,
    )
    yield page
    page.close()
