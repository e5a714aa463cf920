"""Settings of `ShardedMuon` that rarely change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from woodshed.muon.errors import MuonError
from woodshed.muon.newton_schulz import NewtonSchulz
from woodshed.muon.planner import Placement, ReplicaMode
from woodshed.muon.units import SCALES, Scale

Starved = Literal["step", "skip", "decay_only"]
NonFinite = Literal["raise", "skip_unit", "unchecked"]
CHOICES = {
    "starved": get_args(Starved),
    "nonfinite": get_args(NonFinite),
    "replica_mode": get_args(ReplicaMode),
    "placement": get_args(Placement),
}


@dataclass(frozen=True)
class MuonSettings:
    """Arithmetic, precision, placement and treatment of unusual gradients.

    Raises `MuonError` for a value that is not one of those listed.
    """

    nesterov: bool = True
    """Orthogonalise G + mu M instead of M."""
    scale: str | Scale = "match_rms_adamw"
    """Learning-rate scale of a unit: "match_rms_adamw", "spectral", "spectral_unclamped", or a function of its rows and
    columns."""
    newton_schulz: NewtonSchulz = field(default_factory=NewtonSchulz)
    """Coefficients, steps, dtype and backend of the orthogonalisation."""
    wire_dtype: torch.dtype = torch.bfloat16
    """Precision of what ranks exchange; bfloat16 halves the bytes, and the products round to it anyway."""
    momentum_dtype: torch.dtype = torch.float32
    """Precision of the stored momentum."""
    replica_mode: ReplicaMode = "auto"
    """Under HSDP, "redundant" updates every unit in every replica, "split" once; "auto" asks the cost model."""
    placement: Placement = "auto"
    """"auto" leaves whole units where they are while balance allows, "local" insists on it, "all_to_all" moves
    everything to where balance is best."""
    max_inflight_bytes: int = 1 << 30
    """Size of the buffers in flight; products may take half as much again."""
    starved: Starved = "step"
    """Treatment of a unit whose gradient is all zeros (an expert without tokens). "step": Muon as it is, a full-sized
    step along old momentum. "decay_only": weight decay. "skip": nothing. The latter two leave momentum as it is."""
    nonfinite: NonFinite = "raise"
    """Treatment of NaN or Inf in a gradient. "raise" before anything was changed; "skip_unit" leaves that unit alone
    and counts it in `skipped`; "unchecked" saves the pass over the gradients, and loses the unit's momentum."""

    def __post_init__(self) -> None:
        for name in ("wire_dtype", "momentum_dtype"):
            if (dtype := getattr(self, name)) not in (torch.bfloat16, torch.float32):
                raise MuonError(f"{name}={dtype}: use torch.bfloat16 or torch.float32.")
        if self.max_inflight_bytes < 1:
            raise MuonError(
                f"max_inflight_bytes={self.max_inflight_bytes}: pass a positive number; 1 << 30 is 1 GiB."
            )
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise MuonError(f"{name}={value!r}: use one of {', '.join(choices)}.")
        if not callable(self.scale) and self.scale not in SCALES:
            raise MuonError(
                f"scale={self.scale!r}: use one of {', '.join(SCALES)}, or a function of rows and columns."
            )

    def unit_scale(self, rows: int, cols: int) -> float:
        """Factor of the learning rate for a unit of this shape."""
        return (self.scale if callable(self.scale) else SCALES[self.scale])(rows, cols)
