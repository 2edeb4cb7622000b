"""Text on a node while the graph runs."""

from __future__ import annotations


def is_watched() -> bool:
    """Whether the running prompt came from an open frontend."""
    from server import PromptServer

    return getattr(getattr(PromptServer, "instance", None), "client_id", None) is not None


def show(node_id: str | None, text: str) -> None:
    """Put `text` on node `node_id` of every open frontend; does nothing outside a server."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if node_id is not None and server is not None:
        server.send_progress_text(text, node_id)
