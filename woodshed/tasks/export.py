"""Tasks as lines of JSON, for harnesses that read SWE-bench or SWE-smith instances.

Each workspace becomes a git repository of one commit with a fixed author and date, so `base_commit` can be made again
from the task folder by anybody: `git init`, `ATTRIBUTES` into .git/info/attributes, `git add --all --force`, then a
commit with `COMMIT`'s variables (`repository` does all that). What the workspace's own .gitattributes ask for, such as
other line ends, is for people's checkouts: the commit holds the workspace's bytes, and a checkout gives these.
SWE-bench: `patch` is the gold patch. SWE-smith: `patch` makes the repository broken, and `gold_patch` mends it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from woodshed.pysource import syntax
from woodshed.records import Task, TaskError
from woodshed.runs.files import staged
from woodshed.runs.machine import git_environment
from woodshed.tasks import folder

Format = Literal["swebench", "swesmith"]
COMMIT = {
    **{f"GIT_{who}_NAME": "woodshed" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "woodshed@localhost" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}

ATTRIBUTES = "* -text -ident -filter -working-tree-encoding\n"
"""Every file as it is, both ways; stands in .git/info/attributes, which wins over the files in the tree."""


def export(tasks: Iterable[Task], kind: Format, out: Path) -> int:
    """One line per task into `out`, all or nothing; how many there are.

    Raises:
        TaskError: git is missing or fails.
        OSError: `out` cannot be written.
    """
    count = 0
    with staged(out) as partial, partial.open("w", encoding="utf-8") as lines:
        for task in tasks:
            lines.write(json.dumps(instance(task, kind), ensure_ascii=True) + "\n")
            count += 1
    return count


def instance(task: Task, kind: Format) -> dict[str, Any]:
    """One task as the instance that a harness reads."""
    commit, gold, bug, tests = _diffs(task)
    source = str(task.provenance.get("source", task.name))
    common = {
        "instance_id": f"woodshed__{task.name}",
        "repo": source.removeprefix("pypi:").partition("==")[0],
        "base_commit": commit,
        "problem_statement": task.instruction,
        "FAIL_TO_PASS": list(task.fail_to_pass),
        "PASS_TO_PASS": list(task.pass_to_pass),
        "image_name": f"woodshed/{task.id}",
    }
    if kind == "swesmith":
        return {**common, "patch": bug, "gold_patch": gold, "test_patch": tests, "strategy": task.operator}
    return {
        **common,
        "patch": gold,
        "test_patch": tests,
        "hints_text": "",
        "version": task.environment.distribution.partition("==")[2],
        "environment_setup_commit": commit,
        "FAIL_TO_PASS": json.dumps(common["FAIL_TO_PASS"]),  # SWE-bench keeps lists as text
        "PASS_TO_PASS": json.dumps(common["PASS_TO_PASS"]),
    }


def repository(task: Task, tree: Path) -> str:
    """The task's workspace as a git repository of one commit in the folder `tree`, which it makes; the commit.

    Raises:
        TaskError: git is missing or fails.
    """
    shutil.copytree(folder.workspace(task), tree, symlinks=True)
    _git(tree, "init", "--quiet", "--template=", "--initial-branch=main")
    (tree / ".git" / "info").mkdir(exist_ok=True)
    (tree / ".git" / "info" / "attributes").write_text(ATTRIBUTES, encoding="utf-8")
    _git(tree, "add", "--all", "--force")
    _git(tree, "commit", "--quiet", "--allow-empty", "--message", "The repository, with something missing.")
    return _git(tree, "rev-parse", "HEAD").strip()


def _diffs(task: Task) -> tuple[str, str, str, str]:
    """The commit, and the patches that mend it, break it again, and put the hidden tests in."""
    with tempfile.TemporaryDirectory(prefix="woodshed-") as scratch:
        tree = Path(scratch, "repository")
        commit = repository(task, tree)
        for path, text in folder.gold_patch(task).files.items():
            if text is None:
                (tree / path).unlink(missing_ok=True)
            else:
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_bytes(syntax.write(path, text))
        _git(tree, "add", "--all", "--force")
        gold = _git(tree, "diff", "--cached", "--binary", "HEAD")
        bug = _git(tree, "diff", "--cached", "--binary", "-R", "HEAD")
        _git(tree, "reset", "--quiet", "--hard", "HEAD")
        shutil.copytree(folder.hidden_tests(task), tree, symlinks=True, dirs_exist_ok=True)
        _git(tree, "add", "--all", "--force")
        return commit, gold, bug, _git(tree, "diff", "--cached", "--binary", "HEAD")


def _git(tree: Path, *arguments: str) -> str:
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", "-C", str(tree)]
    try:
        done = subprocess.run(
            [*command, *arguments], capture_output=True, env={**git_environment(), **COMMIT}, check=False
        )
    except FileNotFoundError:
        raise TaskError("git is not installed; an export needs it to make patches") from None
    if done.returncode != 0:
        raise TaskError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return done.stdout.decode("utf-8", errors="surrogateescape")
