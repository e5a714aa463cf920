"""Nothing of what a task took away may be found by an attempt; what is planted must be, in every kind of place."""

from __future__ import annotations

import ast
import asyncio.base_events
import dataclasses
import json
import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import counting_provider
import planted_leaks
import pytest
from counting_provider import nobody_else
from planted_leaks import CORE, FUNCTION, HEAD, removal_task

from woodshed.records import Task, TaskError
from woodshed.sandbox import SandboxSpec
from woodshed.synthesis import operators, sources
from woodshed.synthesis.leaks import (
    LeftoverRule,
    add_rules,
    fingerprints,
    first_leak,
    read_rules,
    readers,
    run_exploit,
    scan,
    scanner,
    scrub,
)
from woodshed.synthesis.names import Codebase
from woodshed.tasks import folder, prepare, sandbox_spec


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return removal_task(tmp_path_factory.mktemp("weave"))


def with_files(root: Path, files: dict[str, bytes]):
    """A sandbox of a task, with more files in it."""
    layer, outside = root / "layer", root / "outside"
    layer.mkdir()
    binds: dict[str, Path] = {}
    for path, data in files.items():
        inner = path.removeprefix("/workspace/")
        place = layer / inner if inner != path else outside / path.strip("/").replace("/", "%")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        if inner == path:
            binds[path] = place

    def spec(task: Task) -> SandboxSpec:
        opened = sandbox_spec(task, extra_lowers=(layer,))
        return dataclasses.replace(opened, binds={**opened.binds, **binds})

    return spec


def test_a_clean_task_has_no_leak_and_a_visible_mention_is_none(task: Task):
    (report,) = scan([task], shared=("/env",))
    assert report.leaks == () and report.files > 4


def test_what_is_passed_over_by_its_words_would_not_be_found():
    """Libraries are searched whole only where their words allow for a copy; mangled copies of a function tell."""
    rng, tokens = random.Random(0), tuple(fingerprints.code_words(FUNCTION))
    runs = fingerprints.Runs([fingerprints.Body("", "interleave", "gold", tokens)])
    seen = set[tuple[bool, bool]]()
    for number in range(300):
        mangled = [t if rng.random() > number / 900 else rng.choice(("other", "(", "=")) for t in tokens]
        text = " ".join(mangled[rng.randrange(len(tokens)) * (number % 2) :])
        found = bool(runs.find(fingerprints.words(text)))
        may_stand = fingerprints.may_stand(fingerprints.told(tokens), scanner.words_of(text))
        assert may_stand or not found, text
        seen.add((found, may_stand))
    assert {(True, True), (False, False)} <= seen


@pytest.fixture(scope="module")
def found(
    task: Task, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, dict[str, bytes]], list[str]]:
    """Everything planted at once, each in its own place; where the scan saw leaks."""
    root = tmp_path_factory.mktemp("planted")
    kinds = planted_leaks.planted(root)
    (report,) = scan(
        [task], shared=(), spec=with_files(root, {p: d for files in kinds.values() for p, d in files.items()})
    )
    return kinds, [finding.where for finding in report.leaks]


def test_every_planted_leak_is_found(found):
    kinds, places = found
    missed = [
        kind for kind, files in kinds.items() if not all(any(w.startswith(p) for w in places) for p in files)
    ]
    assert missed == []
    assert len(kinds) >= 55


def test_nothing_else_is_called_a_leak(found):
    kinds, places = found
    paths = [path for files in kinds.values() for path in files]
    assert [where for where in places if not where.startswith(tuple(paths))] == []


def test_a_copy_among_the_dependencies_is_found(task: Task, tmp_path: Path):
    environment = tmp_path / "env"
    shutil.copytree(prepare(task.environment), environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "weave").mkdir()
    (site / "weave" / "core.py").write_text(CORE)
    (site / "stubs.zip").write_bytes(planted_leaks.zipped())
    spec = lambda task: dataclasses.replace(sandbox_spec(task), environment=environment)  # noqa: E731
    (report,) = scan([task], shared=("/env",), spec=spec)
    assert {re.sub(r".*site-packages/", "", leak.where) for leak in report.leaks} == {
        "weave/core.py",
        "stubs.zip > weave/core.py",
    }


def test_the_environment_variables_of_an_attempt_are_searched(task: Task):
    def spec(task: Task) -> SandboxSpec:
        opened = sandbox_spec(task)
        return dataclasses.replace(opened, env={**opened.env, "HINT": FUNCTION})

    (report,) = scan([task], shared=(), spec=spec)
    assert {leak.where for leak in report.leaks} == {"environment"}


def test_a_stub_keeps_its_signature_and_a_sibling_is_no_copy(tmp_path: Path):
    stubbed = f"{HEAD}\n\n{FUNCTION[: FUNCTION.index('    iterators')]}    raise NotImplementedError('interleave')\n"
    sibling = FUNCTION.replace("interleave", "alternate").replace(
        "exhausted.add(position)", "exhausted |= {position}"
    )
    sibling = sibling.replace("row.extend(taken + [padding] * (width - len(taken)))", "row.append(taken)")
    task = removal_task(tmp_path, visible_code=stubbed, level=1)
    layer = with_files(
        tmp_path, {"/workspace/weave/words.py": b"def first(streams):\n    return next(iter(streams))\n"}
    )
    (report,) = scan([task], shared=(), spec=layer)
    assert report.leaks == () and [f.kind for f in report.findings] == ["signature"]
    gutted = removal_task(tmp_path / "gutted", visible_code=stubbed, level=3)
    assert scan([gutted], shared=())[0].leaks == ()  # the signature stands where the function stands
    assert sibling != FUNCTION


def test_a_list_of_names_that_lost_one_is_no_leak(tmp_path: Path):
    names = [f"pattern_{number}" for number in range(30)]
    lists = [f"\n\n__all__ = {[*names, *more, 'chunks']}\n" for more in ((), ("interleave",))]
    task = removal_task(tmp_path, visible_code=HEAD + lists[0], code=CORE + lists[1])
    (report,) = scan([task], shared=())
    assert report.leaks == ()
    missing = removal_task(tmp_path / "b", visible_code=HEAD, code=CORE + lists[1])
    (report,) = scan(
        [missing], shared=(), spec=with_files(tmp_path, {"/workspace/old.txt": lists[1].encode()})
    )
    assert [leak.where for leak in report.leaks] == ["/workspace/old.txt"]


def test_an_idiom_beside_the_missing_code_is_no_leak(tmp_path: Path):
    """A class is gone; another one, that stays, has the same `__ne__` and the same protocol."""
    tiny = "\n    def __ne__(self, other):\n        return not self.__eq__(other)\n"
    tiny += "\n    def __call__(self, *args, **kwargs):\n        return self.rows\n"
    gone = "\n\nclass Weaver:\n" + "".join(f"    {line}\n" for line in FUNCTION.splitlines()) + tiny
    task = removal_task(
        tmp_path, visible_code=f"{HEAD}\n\nclass Comb:\n{tiny}", code=f"{HEAD}\n\nclass Comb:\n{tiny}{gone}"
    )
    (report,) = scan([task], shared=())
    assert report.leaks == ()


LOOM = """

class Loom:
    def __init__(self, frame, shafts):
        self.frame, self.shafts = frame, shafts

    @property
    def width(self):
        return len(self.frame)

    @property
    def depth(self):
        return len(self.shafts)

    def raised(self, pick):
        return self.shafts[pick]
"""
TREADLE = """
    def treadle(self, plan):
        return [self.raised(pick) for pick in plan if pick in self.shafts]
"""


def where_it_leaks(task: Task, root: Path, **files: str) -> list[tuple[str, str]]:
    """Kind and place of what is found with some files in the workspace; without them nothing may be."""
    (clean,) = scan([task], shared=())
    assert clean.leaks == ()
    planted = {f"/workspace/{name.replace('__', '.')}": text.encode() for name, text in files.items()}
    (report,) = scan([task], shared=(), spec=with_files(root, planted))
    return sorted({(leak.kind, leak.where) for leak in report.leaks})


def test_small_methods_are_found_together_where_they_are_most_of_a_class(tmp_path: Path):
    task = removal_task(tmp_path / "task", code=f"{HEAD}{LOOM}{TREADLE}", level=1)
    assert where_it_leaks(task, tmp_path, old__txt=LOOM) == [("body", "/workspace/old.txt")]


def test_parameters_of_a_constructor_are_looked_for_behind_its_class(tmp_path: Path):
    """A class that stays may have a constructor like it: the name of the method says nothing."""
    other = (
        LOOM.replace("Loom", "Frame").partition("    @property")[0].replace("self.shafts = ", "self.rows = ")
    )
    task = removal_task(
        tmp_path / "task", visible_code=f"{HEAD}{other}", code=f"{HEAD}{other}{LOOM}{TREADLE}"
    )
    stub = "class Loom:\n    def __init__(self, frame, shafts) -> None: ...\n"
    assert where_it_leaks(task, tmp_path, core__pyi=stub) == [("signature", "/workspace/core.pyi")]


@pytest.mark.parametrize(
    ("gold", "shown"),
    [
        pytest.param("len(taken) < width", "len(taken) <= width", id="one token too many"),
        pytest.param("[padding] * (width", "[padding] + (width", id="another token"),
        pytest.param("any(item is not", "any(item is", id="one token is missing"),
        pytest.param("@traced\ndef interleave(", "def interleave(", id="decorator"),
        pytest.param("padding=None):", "padding=0):", id="default"),
    ],
)
def test_a_small_change_is_found_with_what_stands_around_it(gold: str, shown: str, tmp_path: Path):
    traced = FUNCTION if gold in FUNCTION else f"@traced\n{FUNCTION}"
    changed = traced.replace(gold, shown)
    assert changed != traced
    task = removal_task(
        tmp_path / "task", visible_code=f"{HEAD}\n\n{changed}", code=f"{HEAD}\n\n{traced}", level=0
    )
    assert where_it_leaks(task, tmp_path, docs__txt=traced) == [("body", "/workspace/docs.txt")]


def test_an_entry_of_a_table_is_found_where_nothing_else_is_missing(tmp_path: Path):
    rows = "".join(f'    "kind_{number}": kind_{number},\n' for number in range(20))
    tables = [f"\n\nWEAVES = {{\n{rows}{more}}}\n" for more in ("", '    "plain": interleave,\n')]
    task = removal_task(tmp_path / "task", visible_code=CORE + tables[0], code=CORE + tables[1], level=1)
    assert where_it_leaks(task, tmp_path, old__txt=tables[1]) == [("body", "/workspace/old.txt")]


def test_tasks_are_searched_together_as_they_are_alone(task: Task, tmp_path: Path):
    """One sandbox for all of an environment: what one of them leaks is not said of another."""
    tasks = []
    for number, path in enumerate(["", "weave/core.py.orig", "docs/same.txt", "docs/same.txt", "broken.whl"]):
        here = tmp_path / str(number)
        shutil.copytree(task.folder, here)
        if path:
            place = here / "environment" / "workspace" / path
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(CORE.encode() if path != "broken.whl" else b"PK\x03\x04" + bytes(40))
        tasks.append(dataclasses.replace(task, name=f"{task.name}-{number}", folder=here))
    alone = [scan([one], shared=())[0] for one in tasks]
    together = scan(tasks, shared=())
    assert [report.files for report in together] == [report.files for report in alone]
    for one, other in zip(together, alone, strict=True):
        assert set(one.findings) == set(other.findings)
    assert [bool(report.leaks) for report in together] == [False, True, True, True, True]


@pytest.mark.slow
def test_a_second_definition_in_a_real_package_is_refused(tmp_path: Path):
    """boltons.strutils.indent lives on in boltons.funcutils under another name."""
    repository = sources.fetch("pypi:boltons==26.2.0", tmp_path / "tree")
    path = "boltons/strutils.py"
    before = (repository.tree / path).read_text(encoding="utf-8")
    code = Codebase({path: before}, ("",))
    (symbol,) = (s for s in operators.symbols(code) if s.name == "indent")
    text = operators.stub(code, symbol).changed[path]
    assert text is not None
    (repository.tree / path).write_text(text, encoding="utf-8")
    draft = dataclasses.replace(
        removal_task(tmp_path / "weave", level=1),
        environment=dataclasses.replace(planted_leaks.environment(), packages=("boltons",)),
        name="boltons-stub-indent",
    )
    gold: dict[str, bytes | None] = {path: before.encode()}
    tests = {"tests/test_core.py": b"def test_nothing():\n    pass\n"}
    made = folder.write(draft, tmp_path / draft.name, workspace=repository.tree, tests=tests, gold=gold)
    assert first_leak(made) == "body of indent in /workspace/boltons/funcutils.py"


def test_learned_rules_make_places_leftovers(task: Task, tmp_path: Path):
    spec = with_files(tmp_path, {"/workspace/.oracle/notes": b"see interleave\n"})
    rules = add_rules(
        tmp_path / "rules.json", [LeftoverRule(r"^\.oracle/", "an attempt read it", "run a, rollout b")]
    )
    assert add_rules(tmp_path / "rules.json", rules) == rules == read_rules(tmp_path / "rules.json")
    (before,), (after,) = scan([task], shared=(), spec=spec), scan([task], shared=(), spec=spec, rules=rules)
    assert before.leaks == () and [leak.kind for leak in after.leaks] == ["name"]
    (tmp_path / "tree" / ".oracle").mkdir(parents=True)
    scrub(tmp_path / "tree", rules)
    assert not (tmp_path / "tree" / ".oracle").exists()


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"pattern": "(", "why": ""}]', '[{"shape": 1}]', "no json"])
def test_rules_that_cannot_be_read_are_refused(text: str, tmp_path: Path):
    (tmp_path / "rules.json").write_text(text)
    with pytest.raises(TaskError, match=r"holds no leak rules|rules\.json cannot be read"):
        read_rules(tmp_path / "rules.json")


def test_scrub_takes_every_leftover_and_no_source(tmp_path: Path):
    gone = [".git/HEAD", "a/__pycache__/x.pyc", ".mypy_cache/x", "x.py.orig", ".coverage.host.1", "dist/x"]
    gone += [
        "tags",
        "a.egg-info/PKG-INFO",
        ".history/x",
        "a/.#x.py",
        "node_modules/x",
        "wheelhouse/x.whl",
        "core.77",
    ]
    kept = [
        "tags/__init__.py",
        "a/core.py",
        "a/tags/en.txt",
        "build/__init__.py",
        "a/build/x.py",
        "mutants/x.py",
    ]
    for path in [p for p in gone if p != "tags"] + kept:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    scrub(tmp_path)
    left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert left == sorted(kept)


# -- hostile files -------------------------------------------------------------------------------------------------


def test_a_pickle_is_never_loaded(tmp_path: Path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    import pickle

    list(readers.read("x.pkl", pickle.dumps(Bomb())))
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["zip", "tar", "gzip", "xz", "pack", "sqlite", "pickle", "pyc", "zstd"])
def test_damaged_files_are_told_and_end_nothing(name: str, tmp_path: Path):
    whole = {
        "zip": planted_leaks.zipped(),
        "tar": planted_leaks.tarred("w:"),
        "gzip": planted_leaks.gzip.compress(CORE.encode()),
        "xz": planted_leaks.lzma.compress(CORE.encode()),
        "pack": next(d for p, d in planted_leaks.git_files(tmp_path).items() if p.endswith(".pack")),
        "sqlite": planted_leaks.sqlite(tmp_path, "a", (CORE,)),
        "pickle": planted_leaks.pickle.dumps([CORE]),
        "pyc": planted_leaks.pyc(),
        "zstd": b"\x28\xb5\x2f\xfd" + b"x" * 40,
    }[name]
    for cut in (len(whole) // 2, 20):
        assert isinstance(list(readers.read("x", whole[:cut])), list)


def test_archives_inside_of_archives_end_somewhere():
    data = planted_leaks.zipped()
    for _ in range(20):
        out = planted_leaks.io.BytesIO()
        with planted_leaks.zipfile.ZipFile(out, "w") as archive:
            archive.writestr("x.zip", data)
        data = out.getvalue()
    assert any("inside of each other" in piece.problem for piece in readers.read("x", data))


def test_packs_are_read_like_git_reads_them(tmp_path: Path):
    """Every blob, deltas included, against `git cat-file`."""
    place = tmp_path / "r"
    subprocess.run(["git", "init", "-q", str(place)], check=True)
    for version in range(12):
        (place / "f.txt").write_text("".join(f"line {n * (version + 1) % 97} of {n}\n" for n in range(200)))
        commit = ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", str(version)]
        subprocess.run(["git", "-C", str(place), "add", "."], check=True)
        subprocess.run(["git", "-C", str(place), *commit], check=True)
    subprocess.run(["git", "-C", str(place), "repack", "-adfq"], check=True)
    listing = subprocess.run(
        ["git", "-C", str(place), "rev-list", "--objects", "--all"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    blobs = {
        subprocess.run(
            ["git", "-C", str(place), "cat-file", "blob", line.split()[0]], capture_output=True
        ).stdout.decode()
        for line in listing.splitlines()
        if line.endswith("f.txt")
    }
    (pack,) = (place / ".git/objects/pack").glob("*.pack")
    read = {piece.text for piece in readers.read("pack", pack.read_bytes()) if "blob" in piece.where}
    assert len(blobs) == 12 and blobs <= read


def test_runs_are_found_as_a_slow_search_finds_them():
    tokens = tuple(f"w{number}" for number in range(50))
    body = fingerprints.Body("t", "f", "gold", tokens)
    assert fingerprints.Runs([body]).find(["x", "y", "z", *tokens, "x"]) == {0: 3}
    for begin, end in ((0, 10), (0, 29), (0, 30), (7, 36), (7, 37), (20, 50), (21, 50)):
        part = ["!", *tokens[begin:end], "!"]
        longest = max(n for n in range(51) for at in range(51) if _holds(part, tokens[at : at + n], n))
        assert bool(fingerprints.Runs([body]).find(part)) == (longest >= 30), (begin, end)
    torn = [
        token for number, token in enumerate(tokens) for token in ((token, "#") if number == 25 else (token,))
    ]
    assert fingerprints.Runs([body]).find(torn), "one foreign token inside"


def test_tables_are_searched_in_no_time():
    """Rulers of tables are everywhere in a test of tables, and in a body that is looked for."""
    table = "".join(f"+{'-' * 9}+{'-' * 9}+\n| a{{0}}{n} | b{n} |\n" for n in range(40))
    body = fingerprints.Body("t", "f", "test", tuple(fingerprints.words(table.format("x"))))
    text = fingerprints.words("".join(table.format(f"y{n}") for n in range(200)))
    began = time.process_time()
    assert fingerprints.Runs([body]).find(text) == {}
    assert fingerprints.Runs([body]).find([*text, *body.tokens]) == {0: len(text)}
    assert time.process_time() - began < 20


def _holds(text: list[str], part: tuple[str, ...], length: int) -> bool:
    return len(part) == length and any(tuple(text[at : at + length]) == part for at in range(len(text)))


# -- the scripted exploit -------------------------------------------------------------------------------------------


def test_the_exploit_has_many_tricks_and_gets_nothing(task: Task):
    with nobody_else() as opened:
        result = run_exploit(task, counting_provider.SETTINGS.create())
    assert sum(opened.values()) > 1  # its own, and those that grade
    assert len(result.tricks) >= 45 and result.tried >= 1
    assert result.reward == 0.0  # copies may be found: other packages have functions of that name


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["bytecode", pytest.param("wheel", marks=SLOW), pytest.param("packed git object", marks=SLOW)]
)
def test_the_exploit_finds_planted_leaks(task: Task, tmp_path: Path, kind: str):
    files = planted_leaks.planted(tmp_path)[kind]
    result = run_exploit(task, spec=with_files(tmp_path, files))
    assert result.reward == 1.0, result


def test_findings_are_json(task: Task):
    (report,) = scan([task], shared=())
    json.dumps(dataclasses.asdict(report))


@pytest.mark.parametrize("module", [ast, dataclasses, subprocess, shutil, asyncio.base_events])
def test_functions_are_found_wherever_they_stand(module):
    tree = ast.parse(Path(module.__file__).read_text())
    every = [node for node in ast.walk(tree) if isinstance(node, fingerprints.Function)]
    found = list(fingerprints.functions(tree))
    assert {id(node) for _, node in found} == {id(node) for node in every} and len(found) == len(every)
    assert all(name.rpartition(".")[2] == node.name for name, node in found)
