"""Family of a model: the call format that its chat template writes, found by rendering a call and reading it back."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from woodshed import documents
from woodshed.records import ModelError
from woodshed.tokens.chat_template import ChatTemplate
from woodshed.tokens.codec import CODECS
from woodshed.tokens.codec.families import FAMILIES, FamilyCodec
from woodshed.tokens.schema import ToolSpec

PROBE = ToolSpec(
    "probe_tool",
    "Try.",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["path"],
        "additionalProperties": False,
    },
    example={"path": "a b.py", "count": 3},
)

TRAINED: dict[str, tuple[str, ...]] = {
    "deepseek_v3": ("deepseek-v3", "deepseek-v3.1", "kimi-k2"),
    "glm4_moe": ("glm-4.5", "glm-4.7"),
    "gpt_oss": ("harmony",),
    "kimi_k2": ("kimi-k2",),
    "minimax_m2": ("minimax-m2",),
    "mistral": ("mistral", "mistral-id", "mistral-json", "hermes"),
    "mistral3": ("mistral", "mistral-id", "mistral-json"),
    "qwen2": ("hermes", "deepseek-v3", "deepseek-v3.1"),
    "qwen3": ("hermes", "qwen3-coder", "deepseek-v3", "deepseek-v3.1"),
    "qwen3_5": ("qwen3-coder",),
    "qwen3_5_moe": ("qwen3-coder",),
    "qwen3_moe": ("hermes", "qwen3-coder"),
    "qwen3_next": ("hermes", "qwen3-coder"),
}
"""`model_type` of a configuration to the formats that its models were trained on, where that is known."""


def takes_tools(template: ChatTemplate) -> bool:
    """True if the template lists tools."""
    try:
        listed = template.text(template.base, tools=schemas([PROBE]))
    except ModelError:
        return False
    return listed != template.text(template.base)


def schemas(tools: Sequence[ToolSpec]) -> list[dict[str, object]]:
    """Tools in the form that chat templates take."""
    return [{"type": "function", "function": tool.schema} for tool in tools]


def find(template: ChatTemplate, folder: Path | None = None) -> FamilyCodec | None:
    """The codec that reads a call as the template writes it, preferably one that also writes it so.

    None if the template neither lists tools nor writes calls. Where it writes calls only (DeepSeek), the codec
    describes the tools.

    Args:
        folder: where the model's configuration lies.

    Raises:
        ModelError: no codec reads it, or it is not what models of this type were trained on.
    """
    is_listed = takes_tools(template)
    for template.arguments_as_text in (False, True):
        readers = {codec.name: codec for codec in FAMILIES if reads(template, codec)}
        written = [codec for codec in readers.values() if _call(codec) in _section(template, codec)]
        if readers:
            found = next(iter(written or readers.values()))
            _refuse_untrained(template, found, folder)
            return replace(found, describes=not is_listed)
    template.arguments_as_text = False
    if not is_listed:
        return None
    raise ModelError(
        f"{template.name}: the chat template lists tools, and writes a call of one as {_shown(template)}, in no form "
        f"that Woodshed reads: {', '.join(codec.name for codec in FAMILIES)}. Choose one by name (codec), or plain or "
        "json, which any model can learn, or name a Codec of your own as package.module:name"
    )


def named(template: ChatTemplate, codec: FamilyCodec) -> FamilyCodec:
    """A codec that was chosen by name, made to fit the template: it describes the tools where that does not.

    Raises:
        ModelError: the template lists no tools and writes no calls.
    """
    if takes_tools(template):
        return codec
    if reads(template, codec):
        return replace(codec, describes=True)
    raise ModelError(
        f"{template.name}: codec {codec.name} needs a chat template that lists tools, or writes calls of this form"
    )


def reads(template: ChatTemplate, codec: FamilyCodec) -> bool:
    """True if the codec reads a call that the template wrote."""
    try:
        _, calls, fault = codec.parse(_section(template, codec), [PROBE])
    except ModelError:
        return False
    return fault is None and [(c.tool, c.arguments) for c in calls] == [(PROBE.name, PROBE.example)]


def _call(codec: FamilyCodec) -> str:
    return codec.format(PROBE.name, PROBE.example, [PROBE])


def _section(template: ChatTemplate, codec: FamilyCodec) -> str:
    """The assistant's message with a call, as the template writes it."""
    before = template.text(template.base, opened=False)
    call = template.calls([(PROBE.name, codec.call_id.format(name=PROBE.name, index=0), PROBE.example)])
    whole = template.text([*template.base, call], opened=False)
    shared = sum(1 for _ in itertools.takewhile(bool, map(operator.eq, before, whole)))
    return whole[shared:]


def _shown(template: ChatTemplate) -> str:
    try:
        return repr(_section(template, FAMILIES[0])[:200])
    except ModelError as error:
        return f"nothing ({error})"


def _refuse_untrained(template: ChatTemplate, codec: FamilyCodec, folder: Path | None) -> None:
    """Raise ModelError where a template speaks another language than the model."""
    path = folder / "config.json" if folder else None
    if path is None or not path.is_file():
        return
    settings = documents.read_json(path, ModelError)
    model_type = settings.get("model_type") if isinstance(settings, dict) else None
    trained = TRAINED.get(str(model_type), ())
    if trained and codec.name not in trained:
        raise ModelError(
            f"{template.name}: the chat template writes calls in the form {codec.name}, but models of type "
            f"{model_type!r} were trained on {' or '.join(trained)}; take the template that came with the model, or "
            f"choose a codec by name: {', '.join(CODECS)}"
        )
