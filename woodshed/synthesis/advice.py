"""Words for tests that do not run: what pytest said, and the ways out."""

from __future__ import annotations

import json
import re

from packaging.utils import canonicalize_name

from woodshed.grading.results import TestRun
from woodshed.synthesis import plugins, project

ERROR = re.compile(r"ERROR\b|Error\b|Exception\b|Missing required|unrecognized arguments", re.MULTILINE)
"""Lines of pytest's output that say why it did not run."""
MISSING_VARIABLE = re.compile(r"KeyError: ['\"]([A-Z][A-Z0-9_]{2,})['\"]")
"""The error of `os.environ` for a variable that is not set."""


def failing(name: str, run: TestRun, broken: set[str], described: project.Project) -> str:
    errors = [
        f"{path}: {text.strip().splitlines()[-1]}"
        for path, text in run.collection_errors.items()
        if text.strip()
    ]
    errors += [
        f"{test}: {run.messages[test].rpartition(': ')[2][:200]}"
        for test in sorted(broken)
        if test in run.messages
    ]
    lines = [
        f"{name}: its tests do not run here ({len(broken)} fail, {len(run.collection_errors)} files are not collected)"
    ]
    if not run.outcomes and not run.collection_errors:
        lines = [f"{name}: pytest does not run its tests. It ended with:"]
        errors = [line.strip() for line in run.log.splitlines() if ERROR.search(line)][-4:]
    lines += [f"    {error}" for error in errors[:4]]
    lines += [f"    not installed: {reason}" for reason in described.left_out[:8]]
    text = " ".join(
        [*run.collection_errors.values(), *run.messages.values(), "" if run.outcomes else run.log]
    )
    return "\n".join([*lines, *_advice(text, described)])


def _advice(text: str, described: project.Project) -> list[str]:
    """Ways out where modules are missing. A name of the repository's own is nobody's to install, and a module's name is
    no distribution's: a stranger may have it."""
    missing = sorted(set(re.findall(r"No module named ['\"]([\w.]+)", text)))
    known, ours, unknown = list[str](), list[str](), list[str]()
    for module in missing:
        top = module.partition(".")[0]
        distribution = plugins.IMPORTED_AS.get(top) or plugins.distribution(module)
        shared = any(
            name.startswith(f"{top}.") for name in described.packages
        )  # a namespace, of many distributions
        named = [module, *module.split(".")[1:]] if shared else [top]
        inside = {canonicalize_name(re.split("[<=]", name)[0]) for name in [*named, distribution] if name}
        if inside & {*described.inside.homes, *described.inside.elsewhere, *described.inside.alike}:
            ours.append(module)
        else:
            (known.append(distribution) if distribution else unknown.append(module))
    lines = [
        f"{name}: an environment variable, as it looks. Give it with --env {name}=VALUE, or set it here and give "
        f"--env {name}, if its value may stand in no task"
        for name in sorted(set(MISSING_VARIABLE.findall(text)))
    ]
    if known:
        lines.append(
            f"Modules are missing; add them to the command, as 'extra_requirements={json.dumps(known)}'"
        )
    if ours:
        lines.append(
            f"{', '.join(ours)}: a name of this repository, which no index is asked for. Give a folder in which it can "
            "be imported from the top, from src, or from where the package lies; or name the project of the "
            "repository that has it in extra_requirements: it is built from there"
        )
    if unknown:
        lines.append(
            f"{', '.join(unknown)}: missing. Where a distribution is known to bring it, add that one as "
            "'extra_requirements=[\"NAME==VERSION\"]'; a module's name may be another distribution's"
        )
    return lines
