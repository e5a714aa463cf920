"""Git sources: addresses as people copy them from a forge, fetched without prompts.

Known are https, ssh and file addresses (with or without "git+" before them, "@REV" and "#subdirectory=FOLDER" behind
them), "git@HOST:OWNER/NAME", and the page of a branch or folder in a browser.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from woodshed.records import TaskError
from woodshed.runs.machine import git_environment
from woodshed.synthesis.siblings import Origin

FORMS = "https://HOST/OWNER/NAME@REV, git@HOST:OWNER/NAME@REV or git+file:///PATH@REV"
ARCHIVE = re.compile(r"\.(zip|whl|tar|tgz|tar\.\w+)$")
VIEW = r"(?:-/)?(?:tree|src/(?:branch|tag|commit)|src)"
PAGE = re.compile(rf"(?P<home>https://[^/]+/.+?)/{VIEW}/(?P<rev>[^/]+)(?:/(?P<sub>.+))?")
"""A branch or folder as the forges show it."""
HOST = r"(?:https|ssh)://(?:[^-/@][^/@]*@)?[A-Za-z0-9\[][^/@]*"
"""A user and a host; neither begins with a hyphen, which ssh would take for an option."""
LOGIN = re.compile(r"(?P<scheme>\w+://)(?P<user>[^/@:\s]*)(:[^/@\s]*)?@")
PRIVATE = (
    "could not read Username",
    "Authentication failed",
    "Permission denied",
    "not found",
    "Host key verification",
)
TIMEOUT_S = 600


@dataclass(frozen=True)
class GitSource:
    """A repository, a revision of it, and a folder of that."""

    address: str
    """As git takes it; it may hold a password."""
    revision: str
    subdirectory: str

    @property
    def name(self) -> str:
        place = self.subdirectory or self.address
        return re.split(r"[/:]", place.rstrip("/"))[-1].removesuffix(".git")


def read(source: str) -> GitSource | None:
    """The git source that a text names, or None if it is none.

    Raises:
        TaskError: an address that git is not asked for.
    """
    is_marked = source.startswith("git+")
    text, _, fragment = source.removeprefix("git+").partition("#")
    subdirectory = next(
        (part[13:] for part in fragment.split("&") if part.startswith("subdirectory=")), ""
    ).strip("/")
    scp = re.fullmatch(r"([A-Za-z0-9][\w.-]*@[A-Za-z0-9][\w.-]*:(?!/{0,2}/)[^@]+?)(?:@([^@]+))?", text)
    if scp and not Path(source).exists():
        return GitSource(scp[1], scp[2] or "HEAD", subdirectory)
    if not re.match(r"(https|ssh)://", text) and not is_marked:
        return _refused(source) if re.match(r"\w+://", text) else None
    if not is_marked and ARCHIVE.search(text):
        raise TaskError(
            f"{without_secrets(source)!r} is an archive; unpack it and give the folder, or write pypi:NAME==VERSION"
        )
    page = PAGE.fullmatch(text)
    if page and not is_marked:
        return GitSource(page["home"], page["rev"], subdirectory or (page["sub"] or "").strip("/"))
    parts = re.fullmatch(rf"((?:file://[^/]*|{HOST})/.+?)(?:@([^@]+))?", text)
    return GitSource(parts[1], parts[2] or "HEAD", subdirectory) if parts else _refused(source)


def _refused(source: str) -> None:
    raise TaskError(f"{without_secrets(source)!r} cannot be read; write {FORMS}")


def fetch(source: GitSource, into: Path) -> tuple[str, str, Origin]:
    """The files of a revision in a folder: version, resolved source, and where the rest of a larger repository is.

    Raises:
        TaskError: it cannot be cloned, or has no such revision or folder.
    """
    clone(source, into)
    known = f"{without_secrets(source.address)}: no revision {source.revision!r}; tags: {_tags(into)}"
    asked = ["rev-parse", "--verify", "--quiet", "--end-of-options"]
    try:
        commit = _git([*asked, f"{source.revision}^{{commit}}"], known, into)
    except TaskError:  # a branch of the remote that nobody checked out
        commit = _git([*asked, f"origin/{source.revision}^{{commit}}"], known, into)
    _git(["-c", "core.hooksPath=/dev/null", "checkout", "--quiet", "--detach", commit], known, into)
    version, origin = _described(into), _only(into, source)
    resolved = f"git+{_as_url(without_secrets(source.address))}@{commit}"
    return version, resolved + (f"#subdirectory={source.subdirectory}" if source.subdirectory else ""), origin


def clone(source: GitSource, into: Path) -> None:
    """A clone with its history and no work tree.

    Raises:
        TaskError: it cannot be cloned.
    """
    arguments = ["clone", "--quiet", "--no-checkout", "--", source.address, str(into)]
    _git(arguments, f"{without_secrets(source.address)} cannot be cloned")


def _only(clone: Path, source: GitSource) -> Origin:
    """Leave the asked folder of a checkout, without git's own, and the whole of it beside that."""
    is_ours = source.address.startswith("file:")
    if not source.subdirectory:
        shutil.rmtree(clone / ".git")
        return Origin(clone.resolve(), clone.resolve(), is_ours)
    inner = clone / source.subdirectory
    if not inner.is_dir() or not inner.resolve().is_relative_to(clone.resolve()):
        raise TaskError(
            f"{without_secrets(source.address)}: no folder {source.subdirectory!r} in {source.revision}"
        )
    aside = clone.with_name(f"{clone.name}.whole")
    shutil.rmtree(aside, ignore_errors=True)
    clone.rename(aside)
    shutil.copytree(aside / source.subdirectory, clone, symlinks=True)
    return Origin((aside / source.subdirectory).resolve(), aside.resolve(), is_ours)


def _as_url(address: str) -> str:
    """The address as a URL: "ssh://git@host/owner/name" for "git@host:owner/name"."""
    return address if "://" in address else f"ssh://{address.replace(':', '/', 1)}"


def _described(clone: Path) -> str:
    """Version from the nearest tag, "0.0.0" without one. Only of a clone, whose configuration is ours."""
    command = ["git", "-C", str(clone), "describe", "--tags", "--abbrev=0"]
    done = subprocess.run(command, capture_output=True, env=git_environment(), check=False)
    return version_of(done.stdout.decode(errors="replace"))


def version_of(tag: str) -> str:
    """The version that a tag names; "0.0.0" if it names none."""
    try:
        return str(Version(re.sub(r"^[^\d]*", "", tag.strip())))
    except InvalidVersion:
        return "0.0.0"


def _tags(repository: Path) -> str:
    tags = _git(["tag", "--sort=-creatordate"], "tags cannot be listed", repository).split()
    return ", ".join(tags[:8]) or "none"


def _git(arguments: Sequence[str], complaint: str, repository: Path | None = None) -> str:
    place = [] if repository is None else ["-C", str(repository)]
    environment = git_environment()
    if "GIT_SSH" not in environment:
        environment.setdefault("GIT_SSH_COMMAND", "ssh -o BatchMode=yes")  # nobody is asked for a passphrase
    try:
        done = subprocess.run(
            ["git", *place, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise TaskError("git is not installed; install it, or use a pypi: source") from None
    except subprocess.TimeoutExpired:
        raise TaskError(f"{complaint}: git took longer than {TIMEOUT_S} s") from None
    if done.returncode != 0:
        text = without_secrets(f"{complaint}{': ' + why if (why := cause(done.stderr)) else ''}")
        if any(word in done.stderr for word in PRIVATE):
            text += (
                ". If it is private, give its ssh address (git@HOST:OWNER/NAME), with a key that asks for no "
                "passphrase; or clone it yourself and give the folder"
            )
        raise TaskError(text)
    return done.stdout.rstrip("\n")


def cause(stderr: str) -> str:
    """Cause of a failure; advice about other cases follows it."""
    lines = stderr.strip().splitlines() or [""]
    return next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1])


def without_secrets(text: str) -> str:
    """The text without the names and passwords of the addresses in it; the name of an ssh address is no secret."""
    return LOGIN.sub(lambda m: m["scheme"] + (f"{m['user']}@" if m["scheme"] == "ssh://" else ""), text)
