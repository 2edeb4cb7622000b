"""A real ComfyUI as a child process: start it, post API-format prompts, read results and errors."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from . import location

START_TIMEOUT = 180.0
POLL_SECONDS = 0.05
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    # On a busy machine threads that spin while they wait take the cores from those they wait for:
    # the reference's attention of 2,048 tokens took 10.5 s instead of 0.54 s at a load of 12 on 2 cores.
    "OMP_WAIT_POLICY": "PASSIVE",
}


class PromptError(RuntimeError):
    """A prompt that ComfyUI refused, or a node that raised.

    `node_id`, `node_type` and `message` are what ComfyUI shows on the node. `refused` is true for
    a prompt that failed validation and never ran; `details` then holds ComfyUI's whole answer.
    """

    def __init__(self, message, node_id=None, node_type=None, exception_type=None, refused=False, details=None):
        super().__init__(f"{node_type or 'prompt'} {node_id or ''}: {message}")
        self.message, self.node_id, self.node_type = message, node_id, node_type
        self.exception_type, self.refused, self.details = exception_type, refused, details


@dataclass
class Run:
    """A finished prompt. `outputs` maps a node's id to what it returned as `ui`."""

    outputs: dict
    log: str
    seconds: float
    output_directory: Path
    cached: list = field(default_factory=list)

    def ui(self, node) -> dict:
        """The `ui` output of a node (a graphs.Node or an id); {} if it gave none."""
        return self.outputs.get(getattr(node, "id", node), {})

    def files(self, node, kind=None) -> list:
        """Paths of the files that a node saved, in its order; `kind` picks one ui key, such as "latents"."""
        ui = self.ui(node)
        entries = [entry for key in ([kind] if kind else ui) for entry in ui.get(key, ())]
        return [
            self.output_directory / entry.get("subfolder", "") / entry["filename"]
            for entry in entries
            if isinstance(entry, dict) and "filename" in entry
        ]

    def latent(self, node):
        """The tensor that a SaveLatent node wrote."""
        from safetensors.torch import load_file

        return load_file(self.files(node)[0])["latent_tensor"]


class ComfyServer:
    """ComfyUI with a directory of its own for user data, models, packs and outputs.

    workspace: becomes ComfyUI's base directory. packs: folder name in custom_nodes -> pack.
    models: a folder with diffusion_models and the like in it. args: further arguments of main.py.
    """

    def __init__(self, workspace, packs=None, models=None, args=(), cpu=True, environment=None):
        self.workspace = Path(workspace).resolve()
        self.packs = dict(packs or {})
        self.models = models
        self.args = list(args)
        self.cpu = cpu
        self.environment = dict(environment or {})
        self.process = None
        self.log_path = self.workspace / "server.log"

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc_info):
        self.stop()

    @property
    def output_directory(self) -> Path:
        return self.workspace / "output"

    def start(self):
        """Start the process and wait until it answers. Returns self."""
        self._lay_out()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            location.comfyui_python(), str(location.LAUNCHER), str(location.comfyui_path()),
            "--listen", "127.0.0.1", "--port", str(self.port), "--base-directory", str(self.workspace),
            "--database-url", "sqlite:///:memory:", "--disable-api-nodes", "--disable-auto-launch",
            *(["--cpu"] if self.cpu else []), *self.args,
        ]  # fmt: skip
        environment = {**ENVIRONMENT, **os.environ, **self.environment}
        environment.pop("PYTHONPATH", None)
        log = open(self.log_path, "ab")
        started = time.monotonic()
        try:
            self.process = subprocess.Popen(
                command, cwd=location.comfyui_path(), env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        finally:
            log.close()
        while True:
            try:
                self.system = self.get("/system_stats")["system"]
                break
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None or time.monotonic() - started > START_TIMEOUT:
                    self.stop()
                    raise RuntimeError(f"ComfyUI did not start:\n{self.log()[-4000:]}") from None
                time.sleep(POLL_SECONDS)
        self.object_info = self.get("/object_info")
        self.start_seconds = time.monotonic() - started
        return self

    def stop(self):
        """End the process, by force if it does not end by itself within 20 s."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None

    def restart(self):
        """Stop and start with the same workspace: what the user directory holds survives."""
        self.stop()
        return self.start()

    def log(self) -> str:
        """Everything the server wrote since the workspace was made."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def get(self, path):
        """GET a path, JSON decoded."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def post(self, path, body):
        """POST JSON to a path. Returns (status, decoded answer); an HTTP error is an answer too."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")

    def run(self, graph, timeout=300.0) -> Run:
        """Queue a graphs.Graph (or an API-format dict), wait for it, return what it gave.

        Raises PromptError, or TimeoutError after `timeout` seconds.
        """
        prompt = self.fit(graph if isinstance(graph, dict) else graph.prompt())
        log_start, started = len(self.log()), time.monotonic()
        status, answer = self.post("/prompt", {"prompt": prompt, "client_id": "test"})
        if status != 200:
            raise _refusal(answer)
        history = self._wait(answer["prompt_id"], started + timeout)
        messages = dict((kind, content) for kind, content in history["status"]["messages"])
        if "execution_error" in messages:
            error = messages["execution_error"]
            raise PromptError(
                error["exception_message"].strip(), error["node_id"], error["node_type"],
                error["exception_type"], details=error,
            )  # fmt: skip
        if history["status"]["status_str"] != "success":
            raise PromptError(str(history["status"]))
        return Run(
            outputs=history["outputs"], log=self.log()[log_start:], seconds=time.monotonic() - started,
            output_directory=self.output_directory, cached=messages.get("execution_cached", {}).get("nodes", []),
        )  # fmt: skip

    def free(self):
        """Unload every model and drop ComfyUI's caches, as the frontend's button does."""
        self.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(1.5)  # carried out by the prompt worker, which looks once a second

    def fit(self, prompt) -> dict:
        """The prompt as the frontend of this version would send it.

        Without inputs that the installed nodes lack, so that one graph serves several versions,
        and with the defaults of widgets that the graph does not mention.
        """
        fitted = {}
        for node_id, node in prompt.items():
            spec = self.object_info.get(node["class_type"], {}).get("input", {})
            required, optional = spec.get("required") or {}, spec.get("optional") or {}
            defaults = {
                name: kind[1]["default"] for name, kind in required.items() if len(kind) > 1 and "default" in kind[1]
            }
            given = {name: value for name, value in node["inputs"].items() if name in {**required, **optional}}
            fitted[node_id] = {**node, "inputs": {**defaults, **given} if spec else node["inputs"]}
        return fitted

    def _wait(self, prompt_id, deadline):
        while time.monotonic() < deadline:
            history = self.get("/history/" + prompt_id)
            if prompt_id in history:
                return history[prompt_id]
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended while it ran a prompt:\n{self.log()[-4000:]}")
            time.sleep(POLL_SECONDS)
        raise TimeoutError(f"prompt {prompt_id} did not finish:\n{self.log()[-2000:]}")

    def _lay_out(self):
        for name in ("custom_nodes", "input", "output", "temp", "user", "models"):
            (self.workspace / name).mkdir(parents=True, exist_ok=True)
        links = {self.workspace / "custom_nodes" / name: Path(pack) for name, pack in self.packs.items()}
        for folder in Path(self.models).iterdir() if self.models is not None else ():
            links[self.workspace / "models" / folder.name] = folder
        for link, target in links.items():
            if not link.is_symlink():
                link.symlink_to(target.resolve(), target_is_directory=True)


def _refusal(answer) -> PromptError:
    """The first node error of a prompt that failed validation."""
    for node_id, node in (answer.get("node_errors") or {}).items():
        error = node["errors"][0]
        message = f"{error['message']}: {error['details']}" if error.get("details") else error["message"]
        return PromptError(message, node_id, node["class_type"], refused=True, details=answer)
    return PromptError(answer.get("error", {}).get("message", str(answer)), refused=True, details=answer)
