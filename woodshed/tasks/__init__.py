"""Tasks on disk, and the environments that they run in."""

from woodshed.tasks.contents import (
    gold_files,
    gold_folder,
    gold_patch,
    grading_files,
    hidden_tests,
    original,
    original_api,
    protected_files,
    workspace,
)
from woodshed.tasks.environment import cache_dir, prepare, resolve, sandbox_spec
from woodshed.tasks.folder import load, load_set, task_folders, write
from woodshed.tasks.paths import is_protected

__all__ = [
    "cache_dir",
    "gold_files",
    "gold_folder",
    "gold_patch",
    "grading_files",
    "hidden_tests",
    "is_protected",
    "load",
    "load_set",
    "original",
    "original_api",
    "prepare",
    "protected_files",
    "resolve",
    "sandbox_spec",
    "task_folders",
    "workspace",
    "write",
]
