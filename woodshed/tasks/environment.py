"""The environment a repository runs in: its dependencies, built once, read-only, shared by all of its tasks.

Nothing of a third party runs on the host while it is built. Dependencies come as wheels only (unpacked, never
built), into a virtual environment without pip; the repository itself is never installed, only described by a
dist-info that holds its name, its version and its entry points. Sandboxes mount the result at /env.
"""

from __future__ import annotations

import configparser
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from woodshed.records import Environment, Task, TaskError, to_json
from woodshed.runs.files import staged, sweep, write_atomically
from woodshed.sandbox import SandboxSpec
from woodshed.tasks import interpreters
from woodshed.tasks.contents import workspace

Progress = Callable[[int, int, str], None]

FORMAT = 3
"""Raise when the same Environment must be built differently: cached builds of before are then left alone."""
MOUNT = "/env"
"""Path of the environment in sandboxes; scripts and bytecode are written for this path."""
_BUILDING: dict[Path, threading.Lock] = {}
"""Held while a thread builds the environment of a folder: attempts and runs that want the same one wait for it."""
STEERING = r"(PYTHON|PYTEST_|WOODSHED_|LD_)\w*|PATH|HOME|USER|BASH_ENV"
VARIABLE = rf"(?s:(?!({STEERING})(=|$))[A-Za-z_]\w*(=[^\0]*)?)"
"""A variable of the tests, none that steers Python, pytest, the loader or the sandbox."""
PIP = (sys.executable, "-P", "-m", "pip")
"""pip of this Python, and never a pip that lies in the working folder."""
SHARED = "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"
"""A namespace that finds its parts wherever on Python's path they lie."""
PRIVATE = (
    "for a private package set PIP_FIND_LINKS to a folder with its wheel, or PIP_EXTRA_INDEX_URL (PIP_INDEX_URL) to "
    "your index, here and wherever its tasks are run"
)
BUILT = re.compile(r"[+.]woodshed\.x[0-9a-f]{12}$")
"""End of the version of a wheel that was built from a path or an address: no package index has such a release."""
NO_WHEEL = re.compile(r"(?:satisfies the requirement|matching distribution found for) ([^\s(]+)")


class NoWheelError(TaskError):
    """A requirement for which no package index has a wheel."""

    def __init__(self, said: str, requirement: str):
        super().__init__(said)
        self.requirement = requirement


def cache_dir() -> Path:
    """Cache of builds and downloads: $WOODSHED_CACHE, else ~/.cache/woodshed."""
    chosen = os.environ.get("WOODSHED_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "woodshed"


def built_wheels() -> Path:
    """Folder of wheels that were built from source in sandboxes; pip looks there, too."""
    return cache_dir() / "wheels"


def built_wheel(requirement: str) -> Path | None:
    """The wheel of a pin on something that was built from a path or an address (BUILT); None for all other pins.

    Raises:
        TaskError: it is not on this machine.
    """
    pin = Requirement(requirement)
    version = next((each.version for each in pin.specifier if each.operator == "=="), "")
    if not BUILT.search(version):
        return None
    stem = f"{canonicalize_name(pin.name).replace('-', '_')}-{version}-"
    for place in (built_wheels(), *map(Path, os.environ.get("PIP_FIND_LINKS", "").split())):
        if found := sorted(place.glob(f"{stem}*.whl")):
            return found[-1]
    raise TaskError(
        f"{requirement} was built from source where its tasks were made, and is not on this machine; it is never "
        "fetched from a package index. The task folder holds it: "
        "export PIP_FIND_LINKS=TASK/environment/wheels, or make the tasks again here"
    )


def resolve(
    requirements: Sequence[str], *, python: str | None = None, constraints: Sequence[str] = ()
) -> tuple[str, ...]:
    """Exact pins of the requirements and everything that they need, pytest included, sorted.

    Args:
        constraints: versions ("six==1.17.0") of what is needed anyway.

    Raises:
        TaskError: a requirement that is malformed, does not exist, conflicts, or has no wheel.
    """
    wanted = [_requirement(text) for text in requirements]
    if not any(canonicalize_name(r.name) == "pytest" for r in wanted):
        wanted.append(Requirement("pytest"))
    version = python or interpreters.OURS
    return _resolved(
        tuple(map(str, wanted)), version, interpreters.find(version), tuple(constraints), _index()
    )


@functools.lru_cache(maxsize=256)
def _resolved(
    wanted: tuple[str, ...], version: str, interpreter: Path, constraints: tuple[str, ...], index: object
) -> tuple[str, ...]:
    """See `resolve`; pip is asked once per process for the same requirements in the same `index`."""
    with tempfile.TemporaryDirectory(prefix="woodshed-") as scratch:
        report, bounds = Path(scratch, "report.json"), Path(scratch, "constraints.txt")
        bounds.write_text("".join(f"{text}\n" for text in constraints), encoding="utf-8")
        options = ["--dry-run", "--ignore-installed", "--report", str(report)]
        options += ["--constraint", str(bounds)] if constraints else []
        _pip(interpreter, options, wanted, version)
        installs = json.loads(report.read_text("utf-8"))["install"]
    pins = [(canonicalize_name(i["metadata"]["name"]), i["metadata"]["version"]) for i in installs]
    return tuple(sorted(f"{name}=={release}" for name, release in pins))


def _index() -> tuple[object, ...]:
    """Settings of pip in this environment, and the wheels that were built here."""
    wheels = sorted(file.name for file in built_wheels().iterdir()) if built_wheels().is_dir() else []
    return (*sorted(entry for entry in os.environ.items() if entry[0].startswith("PIP_")), *wheels)


def tool(requirement: str, python: str) -> Path:
    """The folder of an environment with a tool of ours, whose pins are those of its first use on this machine.

    Raises:
        TaskError: as `resolve` and `prepare`.
    """
    name = hashlib.sha256(f"{requirement} {python}".encode()).hexdigest()[:20]
    kept = cache_dir() / "tools" / f"{name}.json"
    try:
        pins = tuple(json.loads(kept.read_text("utf-8")))
    except (OSError, ValueError):
        pins = resolve([requirement], python=python)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(pins))
    return prepare(Environment(python, pins, packages=()))


def prepare(environment: Environment, *, progress: Progress | None = None) -> Path:
    """The environment's folder in the cache, built now if it is not there.

    Built beside its final place and renamed into it, so that a killed or a second process does no harm; threads that
    want the same one at the same moment build it once.

    Raises:
        TaskError: a pin that cannot be installed as a wheel, pins that are incomplete, no pytest among them, a
            dependency that brings a copy of the repository's own package, or a Python that is not on this machine.
    """
    _check_words(environment)
    interpreter = interpreters.find(environment.python)
    folder = cache_dir() / "envs" / _key(environment, interpreter)
    if (folder / "bin" / "python").exists():
        return folder
    pins = _pins(environment)
    try:
        with _BUILDING.setdefault(folder, threading.Lock()):
            if (folder / "bin" / "python").exists():  # another thread was faster
                return folder
            folder.parent.mkdir(parents=True, exist_ok=True)
            sweep(folder.parent)
            shutil.rmtree(folder, ignore_errors=True)  # incomplete: its interpreter is gone from this machine
            with staged(folder, keep=True) as build:
                _build(build, environment, interpreter, pins, progress or (lambda done, total, text: None))
    except OSError as error:
        raise TaskError(
            f"cannot build an environment in {folder.parent}: {error.strerror or error}. "
            "Set WOODSHED_CACHE to a folder with space that you may write to."
        ) from error
    return folder


def sandbox_spec(task: Task, *, extra_lowers: Sequence[Path] = (), watch: bool = False) -> SandboxSpec:
    """A sandbox that shows the task as the agent sees it, with more read-only layers on top of the workspace.

    `watch` keeps which files its commands touch; reads of a second copy of the package wherever it may lie.
    """
    return SandboxSpec(
        lowers=(workspace(task), *extra_lowers),
        environment=prepare(task.environment),
        env=variables(task.environment),
        watch=tuple(package.rpartition(".")[2] for package in task.environment.packages) if watch else None,
    )


def variables(environment: Environment) -> dict[str, str]:
    """Variables of a sandbox: PYTHONPATH, and those that the repository's code and tests need.

    Raises:
        TaskError: one of this machine is not set, or nobody allowed that tasks read it.
    """
    known = {}
    for entry in environment.variables:
        name, is_given, value = entry.partition("=")
        known[name] = value if is_given else _of_this_machine(name)
    return {**known, "PYTHONPATH": python_path(environment)}


def allow_variable(name: str) -> None:
    """Let tasks on this machine read a variable of whoever runs them; only its name is kept."""
    if name not in _allowed_variables():
        cache_dir().mkdir(parents=True, exist_ok=True)
        with (cache_dir() / "variables").open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")


def _allowed_variables() -> set[str]:
    kept = cache_dir() / "variables"
    lines = kept.read_text("utf-8").split() if kept.is_file() else []
    return {*lines, *os.environ.get("WOODSHED_ENV", "").split(",")}


def _of_this_machine(name: str) -> str:
    """A variable of whoever runs a task. A stranger's task must not read others than those that were allowed."""
    if name not in os.environ:
        raise TaskError(
            f"the tests need the environment variable {name}, which is not set here: export {name}=VALUE (a value "
            "for tests: the agent's commands see it too)"
        )
    if name not in _allowed_variables():
        raise TaskError(
            f"the task reads {name} from your environment, and shows it to the agent's commands. If it may, "
            f"export WOODSHED_ENV={name} (names separated by commas)"
        )
    return os.environ[name]


def python_path(environment: Environment) -> str:
    """PYTHONPATH inside a sandbox: the source roots below /workspace."""
    roots = ("/workspace" if root in ("", ".") else f"/workspace/{root}" for root in environment.source_roots)
    return ":".join(roots)


def is_own(environment: Environment, module: str) -> bool:
    """True for a module, or a name in it, of the packages that the repository provides."""
    return any(f"{module}.".startswith(f"{package}.") for package in environment.packages)


def own_files(environment: Environment) -> dict[str, str]:
    """Files that stand for the installed distribution, by path below the environment's prefix; never code.

    Metadata without README and RECORD, and console scripts. A pytest11 section is dropped: code that the agent can
    edit must not become a plugin of the runner that grades it.

    Raises:
        TaskError: entry points that cannot be read, or a version or command that is no file's name.
    """
    _check_words(environment)
    name, _, version = environment.distribution.partition("==")
    if not version:
        return {}
    entry_points = configparser.ConfigParser(delimiters=("=",), strict=False, interpolation=None)
    entry_points.optionxform = str  # type: ignore[assignment]  # names keep their case
    try:
        entry_points.read_string(environment.entry_points)
    except configparser.Error as error:
        raise TaskError(f"{name}: its entry points cannot be read: {error}") from None
    scripts = entry_points.options("console_scripts") if entry_points.has_section("console_scripts") else []
    named = [(name, r"\w[\w.-]*"), (environment.python, r"\d+\.\d+"), (version, r"\w[\w.!+-]*")]
    for part, form in [*named, *((script, r"\w[\w.-]*") for script in scripts)]:
        if not re.fullmatch(form, part):
            raise TaskError(f"{name}: {part!r} is no name for a file, and names one of the environment's")
    entry_points.remove_section("pytest11")
    info = f"lib/python{environment.python}/site-packages/{re.sub(r'[-_.]+', '_', name)}-{version}.dist-info"
    files = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    sections = [(s, entry_points.items(s)) for s in entry_points.sections()]
    if sections:
        lines = [f"[{section}]\n" + "".join(f"{k} = {v}\n" for k, v in items) for section, items in sections]
        files[f"{info}/entry_points.txt"] = "\n".join(lines)
    for section, items in sections:
        for script, target in items if section == "console_scripts" else ():
            module, _, function = target.partition("[")[0].strip().partition(":")
            head = function.partition(".")[0]
            files[f"bin/{script}"] = (
                f"#!/usr/bin/env python\nimport sys\n\nfrom {module} import {head}\n\nsys.exit({function}())\n"
            )
    return files


def _build(
    build: Path, environment: Environment, interpreter: Path, pins: dict[str, str], progress: Progress
) -> None:
    """Dependencies, the distribution's own metadata, bytecode; every path in it says /env."""
    progress(0, 3, f"installing {len(pins)} packages")
    _run([str(interpreter), "-I", "-m", "venv", "--without-pip", "--symlinks", str(build)])
    # The environment's own Python runs pip here, which is safe only while the environment is empty.
    _pip(build / "bin" / "python", ["--no-compile"], environment.requirements, environment.python)
    site = build / "lib" / f"python{environment.python}" / "site-packages"
    for told in site.glob("*.dist-info/direct_url.json"):  # names a folder of this machine
        told.unlink()
    _open_namespaces(site, environment.packages)
    progress(1, 3, "checking the environment")
    _check(site, environment, pins)
    for path, text in own_files(environment).items():
        target = build / path
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            target.chmod(0o755 if path.startswith("bin/") else 0o644)
    for script in [*(build / "bin").iterdir(), build / "pyvenv.cfg"]:
        if script.name.lower().startswith("activate"):
            script.unlink()
        elif not script.is_symlink():
            script.write_bytes(script.read_bytes().replace(os.fsencode(build), MOUNT.encode()))
    progress(2, 3, "compiling bytecode")
    # Compiling executes nothing; some packages ship files for other Pythons, whose errors do not matter.
    options = ["--invalidation-mode", "unchecked-hash", "-s", str(build), "-p", MOUNT]
    subprocess.run(
        [str(interpreter), "-I", "-m", "compileall", "-qq", *options, str(site)],
        capture_output=True,
        check=False,
    )
    progress(3, 3, "environment ready")


def _open_namespaces(site: Path, packages: Sequence[str]) -> None:
    """Let a namespace hold parts of the workspace and of dependencies, in whichever of the three ways each declares it.

    `pkg_resources.declare_namespace`, in the workspace, passes over folders without `__init__.py`.
    """
    for hook in site.glob("*-nspkg.pth"):  # it would close its namespace to the workspace's part of it
        hook.unlink()
    for package in packages:
        for above in Path(package.replace(".", "/")).parents:
            start = site / above / "__init__.py"
            if above.name and start.parent.is_dir() and not start.exists():
                start.write_text(SHARED, encoding="utf-8")


def _check(site: Path, environment: Environment, pins: dict[str, str]) -> None:
    installed = {canonicalize_name(d.metadata["Name"]): d.version for d in distributions(path=[str(site)])}
    if left_out := sorted(f"{name}=={installed[name]}" for name in installed.keys() - pins.keys()):
        raise TaskError(
            f"the environment's requirements are incomplete: they also need {', '.join(left_out)}. "
            "Pin every dependency, as `tasks.environment.resolve` does."
        )
    for package in environment.packages:
        place = package.replace(".", "/")
        copies = [site / place / "__init__.py", *site.glob(f"{place}.py"), *site.glob(f"{place}.*.so")]
        if any(copy.exists() for copy in copies):
            raise TaskError(
                f"the environment would hold a second copy of {package!r}, the package to work on, because a "
                f"dependency needs it (pins: {', '.join(environment.requirements)}). "
                "A repository that pytest or its plugins need cannot be made into tasks."
            )


def _check_words(environment: Environment) -> None:
    """Refuse words that would become paths, options or variables of this machine.

    Raises:
        TaskError: names the word.
    """
    forms = [(environment.python, interpreters.FORM, "a Python version (3.12)")]
    forms += [(name, r"[^\W\d]\w*(\.[^\W\d]\w*)*", "a name to import") for name in environment.packages]
    forms += [(root, r"[^:\0\n]*", "a folder of the workspace") for root in environment.source_roots]
    forms += [(entry, VARIABLE, "a variable that tests may be given") for entry in environment.variables]
    forms += [(option, r"[^\0]+", "an option") for option in environment.pytest_options]
    for word, form, what in forms:
        if not re.fullmatch(form, word):
            raise TaskError(f"the environment names {word!r}, which is not {what}; make the task again")


def _pins(environment: Environment) -> dict[str, str]:
    pins = {}
    for text in environment.requirements:
        requirement = _requirement(text)
        if not re.fullmatch(r"==[^=*,]+", str(requirement.specifier)):
            raise TaskError(
                f"requirement {text!r} is not an exact pin: write it as name==version (`resolve` does)."
            )
        pins[canonicalize_name(requirement.name)] = str(requirement.specifier)[2:]
    if int(pins.get("pytest", "0").partition(".")[0]) < 7:
        seen = f"pytest=={pins['pytest']}" if "pytest" in pins else "no pytest"
        raise TaskError(
            f"the environment has {seen} among its requirements: tests are run with pytest 7 or newer. "
            "Add a pin such as pytest==9.0.0."
        )
    return pins


def _requirement(text: str) -> Requirement:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise TaskError(
            f"requirement {text!r} cannot be read: {error}. Write it as name or name==version."
        ) from None
    if any(each.operator == "===" for each in requirement.specifier):  # pip takes `name===x.zip` for a file
        raise TaskError(f"requirement {text!r} compares versions as texts; write it with two equals signs")
    if requirement.url:
        raise TaskError(
            f"requirement {text!r} points to a URL: dependencies come as wheels from the package index, "
            "so that none of their code runs on this machine. Name a released version instead."
        )
    return requirement


def as_argument(wanted: str, folder: Path | None = None) -> str:
    """A requirement as pip is given it: what was built by its file (in `folder`), so that no index is asked for it."""
    wheel = built_wheel(wanted)
    if wheel is None:
        return wanted
    pin = Requirement(wanted)
    extras = f"[{','.join(sorted(pin.extras))}]" if pin.extras else ""
    return f"{pin.name}{extras} @ {((folder or wheel.parent) / wheel.name).as_uri()}"


def _pip(python: Path, options: Sequence[str], wanted: Sequence[str], version: str) -> None:
    """`pip install` on behalf of another Python, wheels only; nothing of the working folder is run or installed."""
    command = [*PIP, "--python", str(python), "install", "--only-binary=:all:", "--no-input", "--quiet"]
    found = ["--find-links", str(built_wheels())] if built_wheels().is_dir() else []
    command += [
        "--disable-pip-version-check",
        "--progress-bar=off",
        *found,
        *options,
        "--",
        *map(as_argument, wanted),
    ]
    own = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # seen as installed there
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, env=own
    )
    if done.returncode == 0:
        return
    output = done.stderr + done.stdout
    lines = "\n    ".join(output.strip().splitlines()[-6:])
    missing = NO_WHEEL.search(output)
    if missing:
        raise NoWheelError(
            f"requirement {missing[1]!r} has no wheel for Python {version} on {sysconfig.get_platform()}, or there "
            "is no such release, or no package index answered. Only wheels are installed, because building from "
            f"source would run the package's code on this machine; {PRIVATE}. pip said:\n    {lines}",
            missing[1],
        )
    raise TaskError(f"pip could not install {' '.join(wanted)}. pip said:\n    {lines}")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise TaskError(f"`{' '.join(command)}` failed: {(done.stderr + done.stdout).strip()[-600:]}")


def _key(environment: Environment, interpreter: Path) -> str:
    installed = dataclasses.replace(environment, variables=(), pytest_options=())
    parts = [FORMAT, to_json(installed), str(interpreter), sysconfig.get_platform()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]
