"""Layout of a model over GPUs: dense and expert weights on different meshes of the same ranks.

`layout` is the entry point; `sharding` wraps a model's modules, `experts` carries tokens to the experts and back,
`context` cuts sequences into chunks that attend to each other.
"""

from woodshed.parallel.layout import DenseAxes, ExpertAxes, ParallelLayout

__all__ = ["DenseAxes", "ExpertAxes", "ParallelLayout"]
