"""Loads task folders with Harbor's model classes and says which of them Harbor refuses; exits with 1 if it does.

Runs in the environment that scripts/validate-harbor makes. Harbor ignores keys that it does not know, so a key of ours
that Harbor does not read is refused here.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from harbor.models.task.config import TaskConfig  # pyright: ignore[reportMissingImports]
from harbor.models.task.task import Task  # pyright: ignore[reportMissingImports]


def complaints(folder: Path) -> list[str]:
    """Why Harbor would not run a task as it is meant; none where it would."""
    given = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    try:
        config = TaskConfig.model_validate(given)
        task = Task(folder)
    except Exception as error:  # whatever Harbor says about it
        return [f"{type(error).__name__}: {error}"]
    read = config.model_dump(mode="json")
    found = [f"Harbor does not know {key}" for key in unknown(given, read, "")]
    if not task.instruction.strip():
        found.append("Harbor reads no instruction")
    if (
        str(getattr(config.verifier.environment_mode, "value", config.verifier.environment_mode))
        != "separate"
    ):
        found.append("the verifier would share the agent's environment")
    return found


def unknown(given: dict, read: dict, where: str) -> list[str]:
    """Keys of a table that did not arrive in Harbor's model; [metadata] is free."""
    found = []
    for key, value in given.items():
        name = f"{where}{key}"
        if not isinstance(read, dict) or key not in read:
            found.append(name)
        elif isinstance(value, dict) and name != "metadata":
            found += unknown(value, read[key], f"{name}.")
    return found


def main() -> None:
    folders = [p.parent for given in sys.argv[1:] for p in sorted(Path(given).glob("**/task.toml"))]
    bad = {folder: found for folder in folders if (found := complaints(folder))}
    for folder, found in bad.items():
        print(f"bad  {folder.name}: {'; '.join(found)}")
    print(f"{len(folders) - len(bad)} of {len(folders)} tasks are Harbor tasks")
    sys.exit(1 if bad or not folders else 0)


if __name__ == "__main__":
    main()
