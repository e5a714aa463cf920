"""What a task is on disk, and the environment that it runs in."""

from woodshed.tasks.environment import cache_dir, prepare, resolve, sandbox_spec
from woodshed.tasks.folder import (
    gold_patch,
    is_protected,
    load,
    load_set,
    protected_files,
    task_folders,
    write,
)

__all__ = [
    "cache_dir",
    "gold_patch",
    "is_protected",
    "load",
    "load_set",
    "prepare",
    "protected_files",
    "resolve",
    "sandbox_spec",
    "task_folders",
    "write",
]
