"""What a repository requires: every place where it may say so, and what is never fetched for it."""

from __future__ import annotations

import textwrap
from email import message_from_string
from pathlib import Path

import pytest

from woodshed.records import TaskError
from woodshed.synthesis import plugins, requirements
from woodshed.synthesis.siblings import enclosing, siblings

METADATA = """\
Name: Ledger
Version: 1.0
Requires-Dist: left>=1
Requires-Dist: gone; python_version < "3"
Requires-Dist: time-zones; extra == "time"
Requires-Dist: freezegun; extra == "time"
Requires-Dist: ledger[time]; extra == "all"
Requires-Dist: ledger[all]; extra == "time"
Requires-Dist: private @ https://example.org/private.whl
"""


def lay(root: Path, **files: str | bytes) -> Path:
    root.mkdir(exist_ok=True)
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else textwrap.dedent(content).encode()
        (root / path).write_bytes(data)
    return root


def found(tree: Path, metadata: str = METADATA, **files: str | bytes) -> requirements.Requirements:
    lay(tree, **files)
    return requirements.find(tree, message_from_string(metadata), siblings(tree, "ledger"))


COMPILED = """\
freezegun==1.5.1 \\
    --hash=sha256:bf111d7138a8abe55ab48a71755673dbaa4ab87f4cff5634a4442dfec34c15f1 \\
    --hash=sha256:b29dedfcda6d5e8e083ce71b2b542753ad48cfec44037b3fc79702e2980a89e9
    # via -r test.in
pytest==8.3.3 --hash=sha256:70b98107bd648308a7952b06e6ca9a50bc660be218d53c257cc1fc94fda10181
six==1.17.0 ; python_version >= "3" \\
    --hash=sha256:4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274
"""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"requirements-test.txt": b"\xef\xbb\xbffreezegun\r\npytest\r\n"}, ["freezegun", "pytest"]),
        ({"requirements-test.txt": "freezegun\nsix\n".encode("utf-16")}, ["freezegun", "six"]),
        ({"requirements-test.txt": COMPILED}, ["freezegun==1.5.1", "pytest", "six==1.17.0"]),
        (
            {"requirements-test.txt": COMPILED.replace("\n", "\r\n")},
            ["freezegun==1.5.1", "pytest", "six==1.17.0"],
        ),
        (
            {
                "requirements/test.txt": "-r more.txt\n--requirement=sub/other.txt\n-c limits.txt\nsix # why\n#no\n",
                "requirements/more.txt": "-rtest.txt\nfreezegun[x]>=1\n",
                "requirements/sub/other.txt": "  tabulate ; python_version > '3'\nwin ; sys_platform == 'win32'\n",
                "requirements/limits.txt": "six<2\nunused==1\n",
            },
            ["freezegun[x]>=1", "six<2", "tabulate"],
        ),
        ({"test-requirements.txt": "-e .[time]\n"}, ["freezegun", "time-zones"]),
        ({"test-requirements.txt": ".[all]\n"}, ["freezegun", "time-zones"]),
        ({"test-requirements.txt": "ledger[time]\nLedger\n"}, ["freezegun", "time-zones"]),
        ({"test-requirements.txt": "--editable=file:.[time]\n"}, ["freezegun", "time-zones"]),
        (
            {
                "pyproject.toml": """
                    [dependency-groups]
                    TEST = ["six", {include-group = "Some_More"}]
                    "some.more" = ["ledger[time]", {include-group = "test"}]
                    """
            },
            ["freezegun", "six", "time-zones"],
        ),
        (
            {
                "tox.ini": "[testenv]\nextras = time\ndeps =\n  -r{toxinidir}/in.txt\n  py27: old\n  %s\n  {[x]deps}\n",
                "in.txt": "six",
            },
            ["freezegun", "six", "time-zones"],
        ),
    ],
)
def test_what_tests_require_wherever_it_is_said(tmp_path: Path, files: dict, expected: list[str]):
    assert found(tmp_path, **files).tests == expected


def test_a_test_extra_that_names_others_of_the_same_package(tmp_path: Path):
    more = 'Requires-Dist: pytest; extra == "test"\nRequires-Dist: LEDGER[all]; extra == "test"\n'
    read = found(tmp_path, METADATA + more)
    assert read.tests == ["freezegun", "pytest", "time-zones"] and read.package[0] == "left>=1"


def test_what_is_left_out_has_a_reason(tmp_path: Path):
    listed = "git+https://example.org/x\n./wheels/x.whl\n${NAME}\nnope nope\n-r ../outside.txt\n--extra-index-url http://u:p@x\n"
    read = found(tmp_path, **{"requirements-test.txt": listed + "black\nsix\nx; nobody == 'knows'\n"})
    said = "\n".join(read.left_out)
    for name in (
        "./wheels/x.whl",
        "${NAME}",
        "nope nope",
        "outside.txt",
        "black",
        "x; nobody",
    ):
        assert name in said
    assert (
        "--extra-index-url: pip's own settings say where" in said
        and "u:p" not in said
        and read.tests == ["six", "x @ git+https://example.org/x"]
    )
    assert read.package == ["left>=1", "private @ https://example.org/private.whl"]


ODD = [
    "dependency-groups = 3",
    "[[dependency-groups]]\ntest = 1",
    "[dependency-groups]\ntest = 'six'",
    "[dependency-groups]\ntest = [3, [], {}, {include-group = 4}, {include-group = 'none'}]",
    "tool = []",
    "[tool]\npytest = 1\nuv = 'x'\npoetry = [1]",
    "[tool.pytest]\nini_options = [1]",
    "[tool.pytest.ini_options]\naddopts = 3\nrequired_plugins = {a = 1}",
    "[tool.pytest.ini_options]\naddopts = [3, '-p', '']\nrequired_plugins = ['>=', '', 'a b']\n",
    '[tool.pytest.ini_options]\naddopts = "-k \'unfinished"',
    "[tool.uv]\nsources = [1]\nworkspace = 3",
    "[tool.uv.sources]\ncore = 'x'\nother = [{path = 3}, 4]",
    "[tool.poetry]\nname = 3\ngroup = {test = 1, dev = {dependencies = [2]}}\ndependencies = 'x'",
    "project = 'x'",
    "[project]\nname = ['ledger']\ndependencies = {a = 1}\noptional-dependencies.test.more = 3",
    "project.name = 'ledger'\nproject.dynamic = 'version'",
]


@pytest.mark.parametrize("text", ODD)
def test_odd_tables_are_no_tracebacks(tmp_path: Path, text: str):
    read = found(
        tmp_path, **{"pyproject.toml": text, "sub/pyproject.toml": text, "conftest.py": "pytest_plugins = 3"}
    )
    assert read.package[0] == "left>=1" and all(": " in reason for reason in read.left_out)


def test_a_pyproject_that_is_no_toml_is_named(tmp_path: Path):
    for text in ("[project", "a = " + "[" * 5000, "\xff", "a = 1\na = 2"):
        with pytest.raises(TaskError, match=r"pyproject\.toml cannot be read"):
            found(tmp_path, METADATA, **{"pyproject.toml": text.encode("latin-1")})


def test_ini_files_are_taken_as_they_are(tmp_path: Path):
    cfg = "[metadata]\nname = %(x)s\nversion = 50%\n[tool:pytest]\naddopts = --cov=x --log-format='%(message)s'\n"
    read = found(
        tmp_path, **{"setup.cfg": cfg, "tox.ini": "no section\n%", "sub/setup.cfg": "[metadata]\nname=core"}
    )
    assert read.demanded == ["pytest-cov"]


# Plugins


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"pytest.ini": "[pytest]\nrequired_plugins = pytest-cov>=3 pytest-odd\n"},
            {"pytest-cov>=3", "pytest-odd"},
        ),
        (
            {"pyproject.toml": "[tool.pytest.ini_options]\nrequired_plugins = ['pytest-cov']\n"},
            {"pytest-cov"},
        ),
        ({"pyproject.toml": "[tool.pytest]\nrequired_plugins = ['pytest-cov']\n"}, {"pytest-cov"}),
        ({"pytest.toml": "[pytest]\naddopts = ['--timeout=3']\n"}, {"pytest-timeout"}),
        (
            {"tox.ini": "[pytest]\nDJANGO_SETTINGS_MODULE = x\ntimeout_method = thread\n"},
            {"pytest-django", "pytest-timeout"},
        ),
        ({"setup.cfg": "[tool:pytest]\nasyncio_mode = auto\nqt_api = x\n"}, {"pytest-asyncio", "pytest-qt"}),
        (
            {"pytest.ini": "", "setup.cfg": "[tool:pytest]\nasyncio_mode = auto\n"},
            set(),
        ),  # pytest reads the first alone
        (
            {
                "pytest.ini": "[pytest]\naddopts = -n4 --cov-report=xml --benchmark-skip -p randomly -pno:sugar -pown\n"
            },
            {"pytest-xdist", "pytest-cov", "pytest-benchmark", "pytest-randomly"},
        ),
        (
            {
                "pytest.ini": "[pytest]\naddopts = -ra --strict-markers --doctest-modules -p pytester -m 'not x'\n"
            },
            set(),
        ),
        ({"conftest.py": "pytest_plugins = ['pytest_cov', 'pytester']\n"}, {"pytest-cov"}),
        ({"tests/conftest.py": "pytest_plugins: str = 'xdist.plugin'\n"}, {"pytest-xdist"}),
        ({"conftest.py": "pytest_plugins = ('html', 'tests.env')\n", "html/__init__.py": ""}, set()),
        ({"conftest.py": "pytest_plugins = ['no_one_knows_this']\n"}, set()),
    ],
)
def test_plugins_that_the_configuration_demands(tmp_path: Path, files: dict, expected: set[str]):
    assert {demand.requirement for demand in plugins.demands(lay(tmp_path, **files))} == expected


def test_a_demanded_plugin_is_no_tool_beside_the_tests(tmp_path: Path):
    extra = 'Requires-Dist: pytest-cov<9; extra == "test"\nRequires-Dist: pytest-xdist; extra == "test"\n'
    read = found(tmp_path, METADATA + extra, **{"pytest.ini": "[pytest]\naddopts = --cov\n"})
    assert (read.tests, read.demanded) == (["pytest-cov<9"], ["pytest-cov"])
    assert any("pytest-xdist" in reason for reason in read.left_out)


# Names of the repository's own

MONOREPO = {
    "pyproject.toml": "[project]\nname = 'ledger'\n[tool.uv]\nsources = {far.path = '../far', near.workspace = true}\n",
    "packages/core/pyproject.toml": "[project]\nname = 'Acme.Core'\ndependencies = ['six', 'acme-wire']\n",
    "packages/core/src/acme_core_impl/__init__.py": "",
    "packages/wire/setup.py": "NAME = 'acme_wire'\nimport setuptools\nsetuptools.setup(name=NAME)\n",
    "packages/cfg/setup.cfg": "[metadata]\nname = acme-cfg\n",
    "packages/poet/pyproject.toml": "[tool.poetry]\nname = 'acme-poet'\n",
    "helpers/__init__.py": "",
    "src/ledger/__init__.py": "",
    "src/money.py": "",
    "docs/flask/__init__.py": "",
    ".venv/pyvenv.cfg": "",
    ".venv/lib/requests/setup.py": "setup(name='requests')",
    "packages/broken/pyproject.toml": "[project",
}
OURS = [
    "acme-core",
    "acme_wire",
    "Acme.CFG",
    "acme-poet",
    "helpers",
    "money",
    "acme-core-impl",
    "far",
    "near",
]


def test_a_name_of_the_repository_is_never_fetched(tmp_path: Path):
    listed = "\n".join([*OURS, "flask", "requests", "-e packages/broken/[x]", "./../elsewhere"])
    read = found(tmp_path, METADATA, **MONOREPO, **{"requirements-test.txt": listed})
    assert read.tests == ["flask", "requests"]
    assert set(read.roots) == {
        "packages/core/src",
        "packages/wire",
        "packages/cfg",
        "packages/poet",
        "packages/broken",
        ".",
        "src",
    }
    assert sorted(read.package)[::2] == ["left>=1", "six"]  # what a sibling requires, its own siblings apart
    assert all(any(f"{name}: " in reason for reason in read.left_out) for name in OURS)
    needed = found(tmp_path, METADATA + "Requires-Dist: acme-core>=2\nRequires-Dist: far\n")
    assert "acme-core>=2" not in needed.package and "packages/core/src" in needed.roots
    assert needed.unfetched == [
        "far: of the same repository (../far), and never fetched from a package index"
    ]


def test_the_rest_of_a_larger_repository_is_known_to_a_part_of_it(tmp_path: Path):
    lay(tmp_path / "all", **MONOREPO, **{"packages/app/pyproject.toml": "[project]\nname = 'app'\n"})
    part = tmp_path / "all/packages/app"
    assert enclosing(part) == []  # two folders side by side are no repository
    (tmp_path / "all/.git").mkdir()
    lay(
        tmp_path / "all",
        **{"clones/requests/setup.py": "setup(name='requests')", "clones/requests/.git/config": ""},
    )
    beyond = dict(enclosing(part))
    assert beyond["acme-core"] == "../core" and beyond["helpers"] == "../.."
    assert "app" not in beyond and "requests" not in beyond
    (part / ".git").write_text("gitdir: elsewhere")
    assert enclosing(part) == []  # a repository of its own
    inside = siblings(part, "app", beyond.items())
    assert inside.place("Acme_Core") == "../core" and inside.place("six") == ""
