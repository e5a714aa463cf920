"""Local models: loading, and an engine that samples from them."""

from woodshed.engines.local.engine import LocalEngine
from woodshed.engines.local.loading import (
    SAFE,
    LoadedModel,
    adapter_weights,
    compute_in_model_precision,
    load,
)
from woodshed.engines.local.loading import _quiet as quiet

__all__ = [
    "SAFE",
    "LoadedModel",
    "LocalEngine",
    "adapter_weights",
    "compute_in_model_precision",
    "load",
    "quiet",
]
