"""Muon for sharded parameters: ranks store shards, and whole matrices are orthogonalised.

It imports torch, and Triton where that is installed, and nothing else of Woodshed. `optimizer` is the entry point, with
`settings`. `grid` and `layout` describe which rank stores what, `units` what one matrix is, `planner` and `plan` which
rank orthogonalises it and what is exchanged. `runtime` carries the plan out, with `elementwise` kernels and the matrix
products of `newton_schulz`. `clip` and `qk_clip` work on the same layouts, `states` imports the momentum of other
optimizers, `cost` and `sim` predict the duration of a step.
"""

from woodshed.muon.clip import clip_grad_norm_
from woodshed.muon.errors import MuonError
from woodshed.muon.newton_schulz import NewtonSchulz
from woodshed.muon.optimizer import ShardedMuon
from woodshed.muon.qk_clip import qk_clip_
from woodshed.muon.settings import MuonSettings
from woodshed.muon.states import import_state
from woodshed.muon.units import Experts, Heads, Whole

__all__ = [
    "Experts",
    "Heads",
    "MuonError",
    "MuonSettings",
    "NewtonSchulz",
    "ShardedMuon",
    "Whole",
    "clip_grad_norm_",
    "import_state",
    "qk_clip_",
]
