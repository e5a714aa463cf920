"""Layout of a model over GPUs: dense and expert weights on different meshes of the same ranks.

`layout` is what one uses; `sharding` wraps a model's modules, `experts` carries tokens to the experts and back,
`context` cuts sequences and lets their pieces attend to each other.
"""

from woodshed.parallel.layout import Dense, Experts, ParallelLayout

__all__ = ["Dense", "Experts", "ParallelLayout"]
