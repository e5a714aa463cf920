"""Harbor task folders of others, as far as our sandboxes can hold them.

A sandbox here is a workspace at /workspace and a Python with packages from wheels: there is no image, no network and
no root. So the Dockerfile is read, not built: a Python image, files copied into the workspace, `pip install` and
PYTHONPATH. Anything else is named with its line, and so is a script that fetches something or works in another folder.

Harbor keeps a script where a task folder of ours keeps the solved files: `solution/solve.sh` is run in a sandbox, and
what it changed is the gold patch. `tests/test.sh` goes on grading (`grading.command_verifier`).
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from woodshed import documents
from woodshed.records import Environment, TaskError
from woodshed.runs.links import stays_inside
from woodshed.tasks import environment
from woodshed.tasks.foreign import ForeignTask
from woodshed.tasks.paths import text_of, tree

WAY_OUT = "It can be run with Harbor itself"
PARTS = ("instruction.md", "task.toml", "environment/Dockerfile", "tests/test.sh", "solution/solve.sh")
IMAGE = re.compile(r"(?:docker\.io/)?(?:library/)?python:(\d+\.\d+)[\w.-]*$")
FETCHES = re.compile(r"\b(apt|apt-get|apk|curl|wget|git clone|uv|uvx|npm|pip3? install|pip3? download)\b")
ELSEWHERE = re.compile(r"(?<![\w.$}/-])/(app|testbed|root|home|opt|srv|repo|src|code|work)\b[\w./-]*")
NO_EFFECT = ("LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT", "STOPSIGNAL", "HEALTHCHECK")
"""Instructions that change nothing that an attempt or its grading sees."""


@dataclass
class Image:
    """A Dockerfile, as far as a sandbox can be like it."""

    python: str = ""
    workdir: str = "/"
    requirements: list[str] = field(default_factory=list)
    source_roots: tuple[str, ...] = (".",)
    workspace: dict[str, bytes] = field(default_factory=dict)


def read(source: Path) -> Iterator[ForeignTask | TaskError]:
    """The task in a folder, or every task in the folders of it; an error in the place of one that no sandbox here
    could hold."""
    folders = [source] if (source / "task.toml").exists() else sorted(source.glob("*/task.toml"))
    for folder in folders:
        folder = folder if folder.is_dir() else folder.parent
        try:
            yield task_in(folder)
        except TaskError as error:
            yield error


def task_in(folder: Path) -> ForeignTask:
    """One task.

    Raises:
        TaskError: a part that is missing, or that a sandbox here cannot be like; its solution changes nothing.
    """
    for name in PARTS:
        if not (folder / name).is_file():
            raise TaskError(f"{folder}: a Harbor task has the file {name}, and this one does not")
        if not stays_inside(folder / name, folder):
            raise TaskError(f"{folder}: {name} is a link that leaves the task; replace it by the file itself")
    settings = documents.read_toml(folder / "task.toml", TaskError, WAY_OUT)
    _refuse_settings(folder, settings)
    image = image_of(folder)
    tests = {path: file.read_bytes() for path, file in tree(folder / "tests")}
    for part in ("tests", "solution"):
        for path, file in tree(folder / part):
            if path.endswith(".sh"):
                _refuse_script(f"{folder}/{part}/{path}", file.read_bytes().decode("utf-8", "replace"))
    python = image.python or f"{sys.version_info.major}.{sys.version_info.minor}"
    pins = environment.resolve(image.requirements, python=python)
    place = Environment(python, pins, packages=(), source_roots=image.source_roots)
    verifier = settings.get("verifier", {})
    return ForeignTask(
        name=folder.name,
        instruction=text_of(folder / "instruction.md"),
        environment=place,
        workspace=image.workspace,
        tests={},
        gold={},
        solution={path: file.read_bytes() for path, file in tree(folder / "solution")},
        command_tests=tests,
        verify_timeout_s=float(verifier.get("timeout_sec", 600.0)),
        verifier_env={str(name): str(value) for name, value in verifier.get("env", {}).items()},
    )


def _refuse_settings(folder: Path, settings: dict[str, Any]) -> None:
    tables = {name: settings.get(name, {}) for name in ("environment", "agent", "verifier")}
    if image := tables["environment"].get("docker_image"):
        raise TaskError(f"{folder}: it runs in the image {image!r}, and a sandbox here has none. {WAY_OUT}")
    if (folder / "environment" / "docker-compose.yaml").exists():
        raise TaskError(f"{folder}: it runs several containers (environment/docker-compose.yaml). {WAY_OUT}")
    for name, table in tables.items():
        wanted = table.get("network_mode", "public" if table.get("allow_internet") else "no-network")
        if wanted != "no-network":
            raise TaskError(
                f"{folder}: its {name} wants a network ({wanted!r}), and a sandbox has none. {WAY_OUT}"
            )
    for key in ("user", "allowed_hosts", "environment", "collect"):
        if value := tables["verifier"].get(key):
            raise TaskError(
                f"{folder}: task.toml has verifier.{key} = {value!r}, which is not honoured. {WAY_OUT}"
            )


def _refuse_script(name: str, text: str) -> None:
    """Check the lines of a script for what a sandbox lacks."""
    for number, line in enumerate(text.splitlines(), 1):
        code = line.partition("#")[0]
        if fetched := FETCHES.search(code):
            raise TaskError(
                f"{name}, line {number}: `{fetched[0]}` fetches something, and a sandbox has no network. Let the "
                "Dockerfile install it with pip"
            )
        if place := ELSEWHERE.search(code):
            raise TaskError(
                f"{name}, line {number}: it works in {place[0]}, and a sandbox shows the workspace at /workspace. "
                "Write the paths relative to it"
            )


def image_of(folder: Path) -> Image:
    """Read environment/Dockerfile.

    Raises:
        TaskError: names the line that a sandbox cannot be like.
    """
    image, context = Image(), folder / "environment"
    text = text_of(context / "Dockerfile")
    joined = re.sub(r"\\[ \t]*\n", lambda _: " \0", text)  # \0 keeps count of the lines
    number = 1
    for line in joined.splitlines():
        plain = line.replace("\0", "").strip()
        if plain and not plain.startswith("#"):
            word, _, rest = plain.partition(" ")
            try:
                _take(image, context, word.upper(), rest.strip())
            except (TaskError, ValueError) as error:
                raise TaskError(
                    f"{context}/Dockerfile, line {number}: `{plain[:80]}`: {error}. A sandbox here has no image, only "
                    f"a workspace and a Python with packages. {WAY_OUT}"
                ) from None
        number += 1 + line.count("\0")
    return image


def _take(image: Image, context: Path, word: str, rest: str) -> None:
    """Carry out one instruction.

    Raises:
        TaskError: a sandbox cannot be like this.
        ValueError: it cannot be split into words.
    """
    if word == "FROM":
        if image.python or not (found := IMAGE.match(rest)):
            raise TaskError("only one stage, of an image python:VERSION, can be imitated")
        image.python = found[1]
    elif word == "WORKDIR":
        image.workdir = str(PurePosixPath(image.workdir, rest))
    elif word == "COPY":
        _copy(image, context, [each for each in shlex.split(rest) if not each.startswith("--chown")])
    elif word == "RUN":
        for command in rest.split("&&"):
            _run(image, shlex.split(command))
    elif word == "ENV":
        for name, _, value in (each.partition("=") for each in shlex.split(rest)):
            if name == "PYTHONPATH":
                image.source_roots = tuple(_inside(image, part) for part in value.split(":"))
            elif not name.startswith(("PYTHON", "PIP_", "LANG", "LC_", "TZ")):
                raise TaskError(f"the variable {name} cannot be set")
    elif word not in NO_EFFECT:
        raise TaskError(f"{word} cannot be imitated")


def _run(image: Image, words: list[str]) -> None:
    if words[:2] == ["mkdir", "-p"] or not words:
        return
    if words[:3] == ["python", "-m", "pip"]:
        words = words[2:]
    if words[:2] not in (["pip", "install"], ["pip3", "install"]):
        raise TaskError("only `pip install` of packages can be imitated")
    for each in words[2:]:
        if each in ("-r", "-e", "--requirement", "--editable", "-c", "-i", "--index-url") or "/" in each:
            raise TaskError(f"`{each}` cannot be imitated; name the packages")
    image.requirements += [each for each in words[2:] if not each.startswith("-")]


def _copy(image: Image, context: Path, words: list[str]) -> None:
    *sources, target = words
    if not sources or any(each.startswith("--") or "*" in each for each in sources):
        raise TaskError("this form of COPY cannot be imitated")
    for name in sources:
        source = context / name
        if not source.resolve().is_relative_to(context.resolve()) or not source.exists():
            raise TaskError(f"environment/{name} is not there")
        is_folder = target.endswith("/") or target in (".", "./") or len(sources) > 1
        files = dict(tree(source)) if source.is_dir() else {source.name if is_folder else "": source}
        for path, file in files.items():
            if file.name == "Dockerfile" and file.parent == context:
                continue
            inside = _inside(image, str(PurePosixPath(target, path)))
            image.workspace[inside] = file.read_bytes()


def _inside(image: Image, path: str) -> str:
    """A path of the image as one of the workspace."""
    whole = PurePosixPath(image.workdir, path)
    if not whole.is_relative_to("/workspace"):
        raise TaskError(f"{whole} lies outside of /workspace")
    return str(whole.relative_to("/workspace"))
