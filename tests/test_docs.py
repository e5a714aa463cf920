"""What the documents and messages tell people to type exists: verbs, options, settings, scripts, files, links."""

from __future__ import annotations

import ast
import os
import re
import shlex
from pathlib import Path

import pytest
import typer.main

import woodshed
from woodshed.cli import app
from woodshed.settings import leaves
from woodshed.stages.recipe import Recipe

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
COMMAND = re.compile(r"^\s*(?:\.venv/bin/)?(woodshed|scripts/\w+)((?: .*)?)$")


def blocks(page: Path) -> list[str]:
    """Lines of fenced blocks without a language: what a person types. (Output stands in ```text.)"""
    lines = []
    for fence in re.findall(r"^```\n(.*?)^```", page.read_text("utf-8"), re.S | re.M):
        lines += fence.splitlines()
    return lines


def typed() -> list[tuple[str, str]]:
    """Every command of a page's blocks, of inline code, and of the scripts."""
    found = []
    for page in PAGES:
        if page.name == "log.md":  # its commands are those of its commits
            continue
        inline = re.findall(r"`((?:woodshed|scripts/)[^`]*)`", page.read_text("utf-8"))
        found += [(page.name, line) for line in [*blocks(page), *inline] if COMMAND.match(line)]
    for script in ("quickstart", "warmup-tasks", "feedback-tasks"):
        text = (ROOT / "scripts" / script).read_text("utf-8").replace("\\\n", " ").replace("$@", "1")
        found += [(script, line) for line in text.splitlines() if COMMAND.match(line)]
    return found


def parse(words: list[str]) -> None:
    """Parse a command line without running it; click raises where a verb or an option does not exist."""
    command = typer.main.get_command(app)
    context = command.make_context("woodshed", [], resilient_parsing=True)
    while hasattr(command, "commands"):
        if not words and "run" in command.commands:  # type: ignore[attr-defined]
            return  # `eval` alone is a mention too: it has a verb that need not be said
        assert words, "a verb is missing"
        if words[0] in ("--help", "--version", "--install-completion"):
            return
        verb = words.pop(0)
        inner = command.get_command(context, verb)  # type: ignore[attr-defined]
        assert inner is not None, f"there is no verb {verb!r}"
        command = inner
    if words:  # a verb alone is a mention
        command.make_context("verb", words, parent=context)


@pytest.mark.parametrize(("page", "line"), typed())
def test_commands_exist(page: str, line: str):
    match = COMMAND.match(line)
    assert match is not None
    program, rest = match.groups()
    if program.startswith("scripts/"):
        assert os.access(ROOT / program, os.X_OK)
    elif words := shlex.split(rest, comments=True):
        parse([re.sub(r"\$\{?[\w#*%=]+\}?", "1", word) for word in words])


def test_messages_name_verbs_that_exist():
    """`woodshed tasks check x` inside an error must be good advice."""
    for path in (ROOT / "woodshed").rglob("*.py"):
        for advice in re.findall(r"`woodshed ((?:[a-z]+ ?)+)", path.read_text("utf-8")):
            verbs = typer.main.get_command(app)
            for word in advice.split():
                inner = getattr(verbs, "commands", {})
                if not inner:
                    break
                assert word in inner, f"{path.name}: there is no `woodshed {advice}`"
                verbs = inner[word]


def test_next_lines_can_be_pasted():
    """Whatever is in a path or a setting: every command is joined as a shell takes it apart."""
    for path in (ROOT / "woodshed" / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "say_next":
                assert not isinstance(node.args[0], ast.JoinedStr), (
                    f"{path.name}:{node.lineno}: use shlex.join"
                )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub makes addresses of them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_into_pages_meet_a_heading(page: Path):
    for target, anchor in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text("utf-8")):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(page: Path):
    if page.name in ("CHANGELOG.md", "log.md"):
        pytest.skip("speaks of the past")
    named = re.findall(
        r"`((?:woodshed|scripts|tests|benchmarks|docs|recipes|requirements)/[\w./-]+)`", page.read_text()
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=lambda p: p.name)
def test_settings_that_are_named_exist(page: Path):
    """`agent.max_turns`, also with a value behind it. A section's name may be a package's too, and that a module's."""
    if page.name in ("CHANGELOG.md", "log.md"):
        pytest.skip("speaks of the past")
    known = {name for name, _ in leaves(Recipe)}
    known |= {name.rpartition(".")[0] for name in known}
    named = re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?: ?=[^`]*)?`", page.read_text("utf-8"))
    for name in named:
        is_module = (ROOT / "woodshed" / f"{name.replace('.', '/')}.py").exists()
        is_file = page.parent.joinpath(name).exists() or name.endswith(
            (".py", ".md", ".toml", ".json", ".jsonl")
        )
        if name.partition(".")[0] in known and not is_module and not is_file:
            assert name in known, f"there is no setting {name}"


def test_the_first_screen_is_short():
    """At most 80 words before the first command."""
    before, _, _ = (ROOT / "README.md").read_text("utf-8").partition("```")
    assert len(before.split()) <= 80


def test_the_first_page_shows_the_ladder():
    """Every module that exists, in the order of the ladder."""
    listing = (woodshed.__doc__ or "").partition("The ladder.")[2]
    package = ROOT / "woodshed"
    names = [line.strip() for line in listing.splitlines() if line.startswith("    ")]
    rooms = [name for name in names if name != "__main__"]
    existing = [name for name in rooms if (package / f"{name}.py").exists() or (package / name).is_dir()]
    rows = re.findall(r"^\| `(\w+)` \| [a-z].* \|$", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert rows == existing
