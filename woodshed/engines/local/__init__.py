"""Models on this machine: loading them, and an engine that computes with them."""

from woodshed.engines.local.engine import LocalEngine
from woodshed.engines.local.loading import SAFE, LoadedModel, compute_in_model_precision, load
from woodshed.engines.local.loading import _quiet as quiet

__all__ = ["SAFE", "LoadedModel", "LocalEngine", "compute_in_model_precision", "load", "quiet"]
