"""Servers that a run starts: whatever is killed, nothing of them stays, and they come back at the same address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from woodshed.engines import guard, servers, vllm
from woodshed.engines.guard import Orders
from woodshed.engines.published import tensors_of
from woodshed.engines.servers import GuardedServer, ServedModel
from woodshed.records import RecipeError, SamplerError

SERVER = """
import http.server, mmap, os, subprocess, sys, threading, time
if sys.argv[1:] == ["worker"]:  # one that outlives the process that answers, in a session of its own
    os.setsid()
    time.sleep(1000)
name = f"/dev/shm/woodshed-test-{os.getpid()}"
file = open(name, "wb+")
file.truncate(4096)
shared = mmap.mmap(file.fileno(), 4096)
subprocess.Popen([sys.executable, __file__, "worker"])

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
BROKEN = "print('no such option'); raise SystemExit(2)"


def orders(folder: Path, program: str, port: int) -> Orders:
    script = folder / "server.py"
    script.write_text(program)
    command = [sys.executable, str(script), str(port)]
    return Orders(str(folder / "s0.json"), f"http://127.0.0.1:{port}", command, dict(os.environ), 60.0)


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture(autouse=True)
def nothing_stays_in_shared_memory() -> Iterator[None]:
    yield
    for path in Path("/dev/shm").glob("woodshed-test-*"):
        path.unlink(missing_ok=True)


@contextmanager
def guarded(folder: Path, program: str = SERVER) -> Iterator[GuardedServer]:
    server = GuardedServer(orders(folder, program, free_port()))
    try:
        yield server
    finally:
        server.end()
        assert not guard.members(server.orders.record)


def record(server: GuardedServer) -> dict[str, object]:
    return json.loads(Path(server.orders.record).read_text())


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_back(server: GuardedServer, starts: int) -> bool:
    with suppress(FileNotFoundError):
        now = record(server)
        return now["starts"] == starts and now["state"] == "ready"
    return False


def test_a_server_whose_front_is_killed_comes_back_and_leaves_nothing_behind(tmp_path: Path):
    with guarded(tmp_path) as server:
        server.wait_until_ready()
        wait_for(lambda: len(guard.members(server.orders.record)) == 2 and bool(record(server)["shared"]))
        before, shared = (
            guard.members(server.orders.record),
            f"/dev/shm/woodshed-test-{record(server)['pid']}",
        )
        assert Path(shared).exists()
        os.kill(int(str(record(server)["pid"])), signal.SIGKILL)
        wait_for(lambda: is_back(server, 2))
        assert not set(before) & set(guard.members(server.orders.record)) and not Path(shared).exists()
        with urllib.request.urlopen(server.orders.url):
            pass
    assert record(server)["state"] == "ended"


def test_a_guard_that_is_killed_comes_back_with_a_new_server(tmp_path: Path):
    with guarded(tmp_path) as server:
        server.wait_until_ready()
        wait_for(lambda: bool(record(server)["shared"]))
        first = record(server)
        os.kill(int(str(first["guard"])), signal.SIGKILL)
        wait_for(lambda: record(server)["guard"] != first["guard"] and is_back(server, 1))
        assert first["pid"] not in guard.members(server.orders.record)
        assert not Path(f"/dev/shm/woodshed-test-{first['pid']}").exists()


def test_servers_end_with_a_killed_owner(tmp_path: Path):
    asked = orders(tmp_path, SERVER, free_port())
    owner = (
        "import json, sys, time\n"
        "from woodshed.engines.servers import GuardedServer, Orders\n"
        "server = GuardedServer(Orders(**json.loads(sys.argv[1])))\n"
        "server.wait_until_ready()\n"
        "print(flush=True)\n"
        "time.sleep(1000)\n"
    )
    text = json.dumps(vars(asked))
    with subprocess.Popen([sys.executable, "-c", owner, text], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert guard.members(asked.record)
        process.kill()
    wait_for(lambda: json.loads(Path(asked.record).read_text())["state"] == "ended")
    assert not guard.members(asked.record)


def test_a_server_that_does_not_start_is_an_error_with_its_log(tmp_path: Path):
    with (
        guarded(tmp_path, BROKEN) as server,
        pytest.raises(SamplerError, match=r"(?s)does not start.*no such option"),
    ):
        server.wait_until_ready()
    assert (record(server)["state"], record(server)["starts"]) == ("failed", guard.MOST_STARTS)


@pytest.mark.parametrize(
    ("seen", "gpus", "says"), [("", (0,), "no GPU 0 here .none"), ("4,7", (0, 2), "GPU 2 .*0 to 1")]
)
def test_a_gpu_that_is_not_here_is_refused(
    seen: str, gpus: tuple[int, ...], says: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    monkeypatch.setattr(servers.machine, "gpus", lambda: [])
    servers.refuse_gpus(())
    with pytest.raises(RecipeError, match=says):
        servers.refuse_gpus(gpus)


def test_the_command_of_vllm(tmp_path: Path):
    model = write_tiny_model(tmp_path / "model")
    program = vllm.VllmProgram("python", "0.26.0", is_cpu=False, has_flashinfer=False)
    adapter = ServedModel(model, "bfloat16", lora_rank=12, staleness=2, trained_gpus=1)
    command, environment = vllm.command(program, adapter, tmp_path, is_shared=True)
    text = " ".join(command)
    assert "--enable-lora --max-lora-rank 16 --max-loras 4 --gpu-memory-utilization" in text
    assert "--logprobs-mode processed_logprobs --generation-config vllm" in text
    assert f"--model {model} " in text and environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    command, _ = vllm.command(program, ServedModel(model, "bfloat16"), tmp_path, is_shared=False)
    untied = Path(command[command.index("--model") + 1])
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert vllm.linear_layers(untied) == names
    tensors = dict(tensors_of(untied))
    assert (tensors["lm_head.weight"] == tensors["model.embed_tokens.weight"]).all()
    assert json.loads((untied / "config.json").read_text())["tie_word_embeddings"] is False
    from woodshed.engines import local

    both = [local.load(str(each)).model.state_dict() for each in (model, untied)]
    assert all((both[0][name] == both[1][name]).all() for name in both[0])


def test_without_vllm_the_way_to_get_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    vllm.find.cache_clear()
    monkeypatch.setenv(vllm.VARIABLE, sys.executable)
    with pytest.raises(SamplerError, match=r"has no vLLM; put the path .* into WOODSHED_VLLM_PYTHON"):
        vllm.find()
    monkeypatch.setenv(vllm.VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(SamplerError, match="cannot be run as a Python with vLLM"):
        vllm.find()
    settings = servers.StartSettings("vllm", servers.SamplerSettings())
    with (
        pytest.raises(SamplerError, match="cannot be run"),
        servers.serving(settings, ServedModel(tmp_path, "float32"), tmp_path / "engines"),
    ):
        pass
