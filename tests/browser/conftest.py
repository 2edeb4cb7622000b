"""Fixtures for tests in the real frontend. Playwright is imported only where a browser is opened."""

import subprocess

import frontend
import pytest
from harness import location
from harness.fixtures import tiny_models  # noqa: F401
from harness.server import ComfyServer

BROWSER_FIXTURES = {"server", "browser", "front"}


def pytest_collection_modifyitems(items):
    """Mark and, where there is no browser or no ComfyUI, skip the tests that need them."""
    reason = frontend.why_unavailable() or location.why_unavailable()
    for item in items:
        if BROWSER_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.browser)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def models(tiny_models):  # noqa: F811
    """A models folder with the files that the workflows name, without data, and the tiny models."""
    folder = location.CACHE / "models" / f"stock-{location.comfyui_version()}"
    script = location.LAUNCHER.with_name("stock_models.py")
    subprocess.run([location.comfyui_python(), script, location.comfyui_path(), folder], check=True)
    for file in (tiny_models / "diffusion_models").iterdir():
        link = folder / "diffusion_models" / file.name
        if not link.exists():
            link.symlink_to(file.resolve())
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory, models):
    workspace = tmp_path_factory.mktemp("comfyui")
    (workspace / "input").mkdir()
    (workspace / "input" / "example.png").write_bytes((location.comfyui_path() / "input" / "example.png").read_bytes())
    packs = {"test_nodes": location.TEST_PACK, "trtllm-attention": location.ROOT}
    with ComfyServer(workspace, packs=packs, models=models) as started:
        yield started


@pytest.fixture(scope="session")
def browser():
    with frontend.Browser() as opened:
        yield opened


@pytest.fixture(scope="module", params=["canvas", "nodes2"])
def front(request, server, browser):
    """The frontend with either renderer; a page for each test file. Tests must leave no complaint behind."""
    page = browser.open(server, nodes2=request.param == "nodes2")
    yield page
    page.close()


@pytest.fixture(autouse=True)
def no_complaints(request):
    """No exception, no console error, no toast and no dialog but those that a test takes note of."""
    yield
    if "front" in request.fixturenames:
        page = request.getfixturevalue("front")
        errors, page.errors = page.errors, []
        assert not errors and not page.toasts()
