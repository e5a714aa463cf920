"""Sharded Muon: whole matrices orthogonalised, shards stored. Imports nothing of ours; torch, and Triton where it is.

`grid` and `layout` say who stores what, `units` what one matrix is, `planner` and `plan` who orthogonalises it and what
travels; `runtime` carries that out with `pieces` (element-wise work) and `newton_schulz` (products), `optimizer` is
what one uses. `clip` and `qk_clip` work on the same layouts, `states` reads other optimizers' momentum, `sim` predicts
step times.
"""

from woodshed.muon.clip import clip_grad_norm_
from woodshed.muon.errors import MuonError
from woodshed.muon.newton_schulz import NewtonSchulz
from woodshed.muon.optimizer import ShardedMuon
from woodshed.muon.qk_clip import qk_clip_
from woodshed.muon.states import import_state
from woodshed.muon.units import Experts, Heads, Whole

__all__ = [
    "Experts",
    "Heads",
    "MuonError",
    "NewtonSchulz",
    "ShardedMuon",
    "Whole",
    "clip_grad_norm_",
    "import_state",
    "qk_clip_",
]
