"""Models on this machine: loading them, and drawing batches of messages from them."""

from woodshed.engines.local.loading import SAFE, LoadedModel, compute_in_model_precision, load
from woodshed.engines.local.loading import _quiet as quiet
from woodshed.engines.local.sampler import LocalSampler

__all__ = ["SAFE", "LoadedModel", "LocalSampler", "compute_in_model_precision", "load", "quiet"]
