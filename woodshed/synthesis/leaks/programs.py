"""Programs of this folder, as sandboxes start them: modules that need nothing but the standard library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from woodshed.pysource import syntax
from woodshed.sandbox import Limits, SandboxSpec

LIBRARY = "/run/woodshed/lib"


def with_programs(spec: SandboxSpec, names: Sequence[str]) -> SandboxSpec:
    """Sandbox specification with programs of this folder that can be started as modules."""
    here = Path(__file__).parent
    inner = f"{LIBRARY}/woodshed/synthesis/leaks"
    binds = {f"{inner}/{name}": here / name for name in names}
    binds[f"{LIBRARY}/woodshed/pysource/syntax.py"] = Path(syntax.__file__)
    return replace(spec, binds={**spec.binds, **binds}, limits=Limits(memory_mb=3072))
