"""Text on a node while the graph runs."""

from __future__ import annotations

import sys


def is_watched() -> bool:
    """Whether the running prompt came from an open frontend."""
    return getattr(_server(), "client_id", None) is not None


def current_prompt() -> str | None:
    """The id of the running prompt, or None outside a server."""
    return getattr(_server(), "last_prompt_id", None)


def show(node_id: str | None, text: str) -> None:
    """Put `text` on node `node_id` of every open frontend; does nothing outside a server."""
    server = _server()
    if node_id is not None and server is not None:
        server.send_progress_text(text, node_id)


def _server():
    """The running PromptServer, or None; a script that uses ComfyUI's modules has not imported it."""
    module = sys.modules.get("server")
    return getattr(getattr(module, "PromptServer", None), "instance", None)
