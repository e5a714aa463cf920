"""A model as its files describe it: size, language, and whether it needs a warm-up. Nothing here loads weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from woodshed import documents
from woodshed.records import ModelError
from woodshed.tokens import model_files
from woodshed.tokens.renderer import create_renderer

SMALL = 2_000_000_000
"""Weights below which a model is taken to need a warm-up. The 0.5B model that was measured here needs one; larger ones
were not tried."""
SAMPLE = "<call>edit_file\npath: src/prices.py\n<<<<\n    return round(total * (1 - discount), 2)\n====\n"
"""Text as attempts write it, to count tokens of."""
USUAL_CHARS_PER_TOKEN = 2.5
"""Of such text, with vocabularies of 49,000 ids and more."""


@dataclass(frozen=True)
class ModelFacts:
    """Size and language of a model, as its files describe them."""

    spec: str
    """As a recipe names it."""
    kind: str
    """Type by its configuration, such as "llama"."""
    num_weights: int
    layers: int
    width: int
    vocabulary: int
    context: int
    """Longest sequence, in tokens."""
    call_format: str
    """Name of the codec by which it calls tools."""
    wordiness: float
    """Tokens that it needs, times those of a usual vocabulary; at least 1."""
    why_warm_up: str
    """Reason for a warm-up; "" where none is needed."""

    @property
    def called(self) -> str:
        """Last part of the specification that tells it from others, as part of a run's name."""
        path = Path(self.spec)
        name = path.parent.name if path.name == "policy" else path.name
        return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "model"

    @property
    def is_small(self) -> bool:
        """True for models below SMALL."""
        return self.num_weights < SMALL

    @property
    def is_tiny(self) -> bool:
        """True if all weights are trained, as there are so few."""
        return self.num_weights < 50_000_000


def look(spec: str) -> ModelFacts:
    """Read the configuration, the chat template and, where weights lie here, their sizes; a hub model's weights are
    not fetched.

    Raises:
        ModelError: no such model, no chat template, or a language that no codec reads.
    """
    try:
        base = str(model_files.apart({"model": spec})["model"])
    except ValueError as error:
        raise ModelError(str(error)) from None
    source = model_files.resolve(base, weights=False)
    tokenizer, folder = model_files.load_tokenizer(base)
    call_format = create_renderer(tokenizer, model_dir=folder).codec.name
    shape = _of_gguf(folder / source.gguf) if source.gguf else _of_folder(folder)
    used = len(tokenizer.encode(SAMPLE, add_special_tokens=False))
    shape["vocabulary"] = shape["vocabulary"] or len(tokenizer)
    return ModelFacts(
        spec=spec,
        call_format=call_format,
        wordiness=max(1.0, used * USUAL_CHARS_PER_TOKEN / len(SAMPLE)),
        why_warm_up=_why_warm_up(Path(spec), shape["num_weights"], call_format),
        **shape,
    )


def _why_warm_up(path: Path, num_weights: int, call_format: str) -> str:
    if path.name == "policy" and (path.parent / "recipe.toml").is_file():
        return ""  # a run trained it
    if call_format == "plain":
        return "its chat template lists no tools, or the embeddings of its tool tokens were never trained"
    if num_weights < SMALL:
        return (
            f"with {num_weights / 1e9:.2g} billion weights it will seldom keep to the form of calls by itself"
        )
    return ""


def _of_folder(folder: Path) -> dict[str, Any]:
    config = documents.read_json(folder / "config.json", ModelError)
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ModelError(f"{folder / 'config.json'}: text_config = {text!r} is no table")
    sizes = {name: text.get(key) for name, key in KEYS.items()}
    if odd := [KEYS[name] for name, value in sizes.items() if value is not None and type(value) is not int]:
        raise ModelError(f"{folder / 'config.json'}: {odd[0]} = {text[odd[0]]!r} is no whole number")
    known = {name: value or 0 for name, value in sizes.items()}
    weights = sum(_count(path) for path in sorted(folder.glob("*.safetensors"))) or _guessed(text, known)
    return {**known, "kind": str(config.get("model_type", "unknown")), "num_weights": weights}


KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
}


def _count(path: Path) -> int:
    header = model_files.check_safetensors(path)
    tensors = [each for each in header.values() if isinstance(each, dict) and "shape" in each]
    return sum(math.prod(tensor["shape"]) for tensor in tensors)


def _guessed(text: dict[str, Any], known: dict[str, int]) -> int:
    """Weights by the usual shape of a decoder: attention, gated feed-forward parts, two embeddings."""

    def size(key: str, otherwise: int) -> int:
        return value if isinstance(value := text.get(key), int) else otherwise

    width, heads = known["width"], size("num_attention_heads", 1)
    key_values = size("num_key_value_heads", heads)
    experts = size("num_experts", size("num_local_experts", size("n_routed_experts", 1)))
    inner = size("moe_intermediate_size" if experts > 1 else "intermediate_size", 4 * width)
    attention = int(width * width * (2 + 2 * key_values / max(heads, 1)))
    ends = known["vocabulary"] * width * (1 if text.get("tie_word_embeddings") else 2)
    return known["layers"] * (attention + 3 * width * inner * max(experts, 1)) + ends


def _of_gguf(path: Path) -> dict[str, Any]:
    import gguf

    reader = gguf.GGUFReader(path)

    def value(name: str) -> Any:
        field = reader.get_field(name)
        return field.contents() if field is not None else 0

    kind = str(value("general.architecture"))
    return {
        "kind": kind,
        "num_weights": sum(math.prod(map(int, tensor.shape)) for tensor in reader.tensors),
        "layers": int(value(f"{kind}.block_count")),
        "width": int(value(f"{kind}.embedding_length")),
        "vocabulary": 0,
        "context": int(value(f"{kind}.context_length")),
    }
