"""Programs of this folder, as sandboxes start them: modules that need nothing but the standard library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from woodshed.grading.session import compiled
from woodshed.pysource import syntax
from woodshed.sandbox import Limits, SandboxSpec

LIBRARY = "/run/woodshed/lib"


def with_programs(spec: SandboxSpec, names: Sequence[str]) -> SandboxSpec:
    """Sandbox specification with programs of this folder that can be started as modules."""
    here = Path(__file__).parent
    files = {f"{LIBRARY}/woodshed/synthesis/leaks": [here / name for name in names]}
    files[f"{LIBRARY}/woodshed/pysource"] = [Path(syntax.__file__)]
    binds: dict[str, Path] = {}
    for inner, sources in files.items():
        for source in sources:
            binds[f"{inner}/{source.name}"] = source
            if (bytecode := compiled(source)).is_file():
                binds[f"{inner}/__pycache__/{bytecode.name}"] = bytecode
    return replace(spec, binds={**spec.binds, **binds}, limits=Limits(memory_mb=3072))
