"""Valid tasks per CPU hour from SWE-smith's procedural modifiers, as far as they run without a container engine.

    git clone https://github.com/SWE-bench/SWE-smith          # read at cf2e649
    python -m venv smith; smith/bin/pip install libcst astor python-dotenv ghapi rich tqdm tree-sitter{,-go,-ruby}
    python benchmarks/swe_smith.py SWE-smith smith/bin/python pypi:toolz==1.2.0 pypi:python-slugify==9.2.0 --sample 20

What is run: its 13 modifiers on all functions and classes of the package, as `bug_gen.procedural.generate` does it,
on the tree of the sdist. What is not: its clone, its git diffs, its images. Its check (one run of the whole
suite, at least one test that passed before fails) is done in our sandbox, for a seeded sample of the candidates.
The other checks of `woodshed tasks make` are not made, and there is no instruction: SWE-smith has a model write it.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from task_factory import EXTRA

from woodshed.runs import machine
from woodshed.synthesis.measuring import measured_once
from woodshed.synthesis.progress import Phases
from woodshed.synthesis.repository_context import (
    Rejected,
    RepositoryContext,
    SynthesisSettings,
    read_context,
)
from woodshed.synthesis.sources import fetch

GENERATE = """
import json, random, sys
from pathlib import Path
import libcst
from swesmith.bug_gen.procedural import PythonProceduralModifier
from swesmith.bug_gen.procedural.generate import PM_TECHNIQUES
from swesmith.bug_gen.utils import apply_code_change, extract_entities_from_directory
from swesmith.utils import BugRewrite

random.seed(24)
def can_change(self, entity):  # the original calls `complexity`, which is a property at this commit
    known = all(c in entity._tags for c in self.conditions)
    return known and self.min_complexity <= entity.complexity <= self.max_complexity
PythonProceduralModifier.can_change = can_change
tree = sys.argv[1]
entities = [e for e in extract_entities_from_directory(tree) if e.file_path.endswith(".py")]
for pm in PM_TECHNIQUES:
    for entity in filter(pm.can_change, entities):
        try:
            module = libcst.parse_module(entity.src_code)
            for _ in range(5):
                modified = module.visit(pm)
                if modified.code != module.code:
                    break
            else:
                continue
        except Exception:
            continue
        path = Path(entity.file_path)
        before = path.read_bytes()
        apply_code_change(entity, BugRewrite(modified.code, "", pm.name))
        text = path.read_text("utf-8")
        path.write_bytes(before)
        print(json.dumps({"modifier": pm.name, "path": str(path.relative_to(tree)), "text": text}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Valid tasks from SWE-smith's procedural modifiers.")
    parser.add_argument("smith", type=Path, help="a checkout of SWE-smith")
    parser.add_argument(
        "python", type=Path, help="a Python that has libcst and what else its modifiers import"
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--sample", type=int, default=20, help="candidates that are checked, per source")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="for a run of a suite; more on a busy machine"
    )
    parser.add_argument("--build", type=Path, help="folder of a build whose baselines are taken")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "swe_smith.json")
    options = parser.parse_args()
    rows = [one(source, options) for source in options.sources]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"rows": rows, "machine": machine.describe()}, indent=1) + "\n")


def one(source: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        repository = fetch(source, Path(scratch, "tree"))
        settings = SynthesisSettings(extra_requirements=EXTRA.get(source, ()), timeout_s=options.timeout)
        kept = options.build or Path(scratch, "build")
        measured = measured_once(repository, kept, settings, Phases(lambda done, total, text: None))
        work = read_context(measured, Path(scratch, "staging"), settings)
        began, cpu = time.monotonic(), cpu_s()
        command = [str(options.python.absolute()), "-c", GENERATE, str(repository.tree)]
        lines = subprocess.run(command, cwd=options.smith, capture_output=True, text=True, check=True).stdout
        found = [c for c in map(json.loads, lines.splitlines()) if c["path"] in work.code.texts]
        generation = cpu_s() - cpu
        sample = random.Random(0).sample(found, min(options.sample, len(found)))
        work.spec()
        cpu = cpu_s()
        valid = sum(is_valid(work, candidate) for candidate in sample)
        each = (cpu_s() - cpu) / len(sample) + generation / len(found)
    row = {"source": source, "candidates": len(found), "checked": len(sample), "valid": valid}
    row |= {"cpu_s_per_candidate": round(each, 2), "wall_s": round(time.monotonic() - began)}
    row["valid_per_cpu_hour"] = round(3600 * valid / len(sample) / each)
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def is_valid(work: RepositoryContext, candidate: dict[str, str]) -> bool:
    """Whether a test that passed before fails; a suite that ends early or late says nothing."""
    try:
        with work.opened({candidate["path"]: candidate["text"]}) as sandbox:
            run = work.run(sandbox, work.baseline.stable)
    except Rejected:
        return False
    return any(outcome != "passed" for outcome in run.outcomes.values())


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


if __name__ == "__main__":
    main()
