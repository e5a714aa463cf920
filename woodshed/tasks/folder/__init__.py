"""A task on disk: a Harbor task directory (schema 1.4), read, checked and written.

    instruction.md            what the agent is asked to do
    task.toml                 Harbor's keys; everything else of a Task under [metadata.woodshed]
    environment/Dockerfile    the same pins that `tasks.environment` installs
    environment/own/          metadata and scripts that stand for the installed distribution
    environment/workspace/    the repository as the agent sees it, with the gap in it
    tests/files/              original tests and configuration, byte for byte: laid over the workspace for grading
    tests/expected.json       the record, for the grader: tests that must pass or can be isolated, the interface to keep
    tests/shown/              the files that a solution may change, as the agent was given them
    tests/test.sh             grades in a fresh box under Harbor, by the same code that `grading` uses (tests/grader/)
    solution/files/           the gold patch, whole files; solution/deletes lists files that it removes

What makes a task (the record, workspace/, tests/files/, solution/) is hashed into its id. The other files are written
from those and may change with the version of Woodshed.
"""

from woodshed.tasks.contents import (
    gold_files,
    gold_folder,
    gold_patch,
    grading_files,
    hidden_tests,
    isolated_tests,
    original,
    original_api,
    protected_files,
    workspace,
)
from woodshed.tasks.folder.reading import load, peek
from woodshed.tasks.folder.sets import claimed, load_set, of_run, refuse_run, task_folders
from woodshed.tasks.folder.writing import keep_isolated_tests, write
from woodshed.tasks.paths import is_clean, is_inside, is_protected

__all__ = [
    "claimed",
    "gold_files",
    "gold_folder",
    "gold_patch",
    "grading_files",
    "hidden_tests",
    "is_clean",
    "is_inside",
    "is_protected",
    "isolated_tests",
    "keep_isolated_tests",
    "load",
    "load_set",
    "of_run",
    "original",
    "original_api",
    "peek",
    "protected_files",
    "refuse_run",
    "task_folders",
    "workspace",
    "write",
]
