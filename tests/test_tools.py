"""The six tools against a real sandbox."""

from __future__ import annotations

import difflib
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from woodshed.agent import nearest, pasting, tools
from woodshed.agent.output import clean, clip
from woodshed.agent.tools import TOOLS, ToolSettings
from woodshed.records import Call, Observation, SandboxError
from woodshed.sandbox import Sandbox, SandboxSpec, open_sandbox
from woodshed.tokens.codec import CODECS

Box = Callable[..., Sandbox]
SETTINGS = ToolSettings(command_timeout_s=10, output_chars=200)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """Opens a sandbox whose workspace holds the given files (name with / for folders to content)."""
    opened: list[Sandbox] = []

    def open_with(files: dict[str, bytes] | None = None) -> Sandbox:
        workspace = tmp_path / f"workspace-{len(opened)}"
        workspace.mkdir()
        for name, data in (files or {}).items():
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            (workspace / name).write_bytes(data)
        opened.append(open_sandbox(SandboxSpec(lowers=(workspace,))))
        return opened[-1]

    yield open_with
    for sandbox in opened:
        sandbox.close()


def use(sandbox: Sandbox, tool: str, **arguments: object) -> Observation:
    changed = {name: arguments.pop(name) for name in [*arguments] if name in ToolSettings.model_fields}
    settings = SETTINGS.model_copy(update=changed)
    return tools.run(Call("call_0", tool, arguments, ""), sandbox, settings)


# --- read_file


def test_read_file_shows_a_window_that_can_be_pasted_into_an_edit(box: Box) -> None:
    sandbox = box({"a.py": b"".join(b"line %d\n" % n for n in range(1, 43))})
    shown = [f"line {n}" for n in range(1, 41)]
    assert use(sandbox, "read_file", path="a.py").text == "\n".join(["lines 1-40 of 42", *shown])
    assert (
        use(sandbox, "read_file", path="a.py", start=41, count=10).text
        == "lines 41-42 of 42\nline 41\nline 42"
    )
    assert use(sandbox, "read_file", path="/workspace/a.py", start=42).text == "lines 42-42 of 42\nline 42"


@pytest.mark.parametrize(("start", "count"), [(0, 5), (-3, 5), (13, 5), (1, 0), (1, -1)])
def test_read_file_outside_the_file_says_which_lines_there_are(box: Box, start: int, count: int) -> None:
    seen = use(box({"a.py": b"x\n" * 12}), "read_file", path="a.py", start=start, count=count)
    assert seen.error_kind == "bad_arguments" and "1-12" in seen.text


def test_read_file_of_odd_files(box: Box) -> None:
    sandbox = box(
        {
            "empty": b"",
            "binary": b"\x7fELF\0\0",
            "windows": b"\xef\xbb\xbfone\r\ntwo\r\n",
            "latin": b"caf\xe9\x1b[31m\n",
            "long": b"x" * 340 + b"\n",
        }
    )
    assert use(sandbox, "read_file", path="empty").text == "empty is empty"
    binary = use(sandbox, "read_file", path="binary")
    assert binary.error_kind == "bad_path" and "binary file of 6 bytes" in binary.text
    assert use(sandbox, "read_file", path="windows").text == "lines 1-2 of 2\none\ntwo"
    assert use(sandbox, "read_file", path="latin").text == "lines 1-1 of 1\ncaf\\xe9\\x1b[31m"
    assert use(sandbox, "read_file", path="long").text.endswith("x" * 300 + " [40 more characters]")


@pytest.mark.parametrize(
    "path", ["../etc/passwd", "/etc/passwd", "", " ", "a/../../x", "/workspace2/a", "a\0b", "\ud800"]
)
def test_paths_outside_the_workspace_are_refused(box: Box, path: str) -> None:
    sandbox = box()
    for tool, more in (
        ("read_file", {}),
        ("edit_file", {"old": "a", "new": "b"}),
        ("write_file", {"content": ""}),
    ):
        assert use(sandbox, tool, path=path, **more).error_kind == "bad_path"
    assert use(sandbox, "search", pattern="x", path=path).error_kind == "bad_path"
    assert sandbox.diff() == []


def test_a_missing_file_names_the_nearest(box: Box) -> None:
    sandbox = box({"pkg/dicttoolz.py": b"x\n", "pkg/other.py": b"y\n"})
    seen = use(sandbox, "read_file", path="pkg/dictoolz.py")
    assert (seen.error_kind, seen.text) == (
        "bad_path",
        "error: no file pkg/dictoolz.py; there is pkg/dicttoolz.py",
    )
    assert "there is pkg/other.py" in use(sandbox, "edit_file", path="other.py", old="y", new="z").text
    assert use(sandbox, "read_file", path="nothing/like/it").text == "error: no file nothing/like/it"
    for tool, more in (
        ("read_file", {}),
        ("edit_file", {"old": "a", "new": "b"}),
        ("write_file", {"content": ""}),
    ):
        seen = use(sandbox, tool, path="pkg", **more)
        assert (seen.error_kind, seen.text) == ("bad_path", "error: pkg is a folder")


def test_an_observation_quotes_little_of_a_long_argument(box: Box) -> None:
    """Up to 100,000 characters of a path came back and filled the context."""
    sandbox = box({"a.py": b"one\n"})
    long, deep = "x" * 50_000, "/".join(["d" * 200] * 15)
    made = use(sandbox, "write_file", path=f"{deep}/a.py", content="two\nthree")
    assert made.text.startswith("wrote dd") and made.error_kind is None
    for arguments in (
        {"tool": "read_file", "path": long},
        {"tool": "read_file", "path": f"../{long}"},
        {"tool": "read_file", "path": f"{deep}/a.py", "start": 10**5000},
        {"tool": "read_file", "path": deep},
        {"tool": "write_file", "path": long, "content": ""},
        {"tool": "write_file", "path": deep, "content": ""},
        {"tool": "edit_file", "path": f"{deep}/a.py", "old": "four", "new": ""},
        {"tool": "edit_file", "path": f"{deep}/a.py", "old": "e", "new": ""},
        {"tool": "edit_file", "path": f"{deep}/a.py", "old": "two", "new": "2"},
        {"tool": "search", "pattern": "three"},
        {"tool": "search", "pattern": "x", "path": long},
        {"tool": "search", "pattern": f"(?P={long})"},
    ):
        seen = use(sandbox, **arguments)  # type: ignore[arg-type]
        assert 0 < len(seen.text) < 700, arguments


def test_files_that_are_too_large_are_refused_before_they_are_read(box: Box) -> None:
    sandbox = box()
    assert sandbox.exec("truncate -s 250M big.py; truncate -s 4M edge.py", timeout_s=60).outcome == "ok"
    started = time.process_time()
    for tool, more in (("read_file", {}), ("edit_file", {"old": "x", "new": "y"})):
        seen = use(sandbox, tool, path="big.py", **more)
        assert (seen.error_kind, seen.text) == (
            "bad_path",
            "error: big.py is larger than 4 MB; use shell commands on it",
        )
    assert "binary file of 4194304 bytes" in use(sandbox, "read_file", path="edge.py").text
    assert use(sandbox, "write_file", path="big.py", content="x = 1\n").error_kind is None
    assert sandbox.read("big.py") == b"x = 1\n"
    assert time.process_time() - started < 2  # eight seconds each when it was read


@pytest.mark.parametrize(
    ("data", "old"),
    [
        (b"".join(b"%06d %06d\n" % (n, 7 * n % 300_000) for n in range(299_000)), "999999 000000"),
        (b"".join(b"ab" * 95 + b"x" * (n % 9) + b"\n" for n in range(20_000)), "ba" * 100),
        (b"a" * (4 << 20), "a" * 5000 + "\n" + "a" * 5000),
        (b"a" * (1 << 20) + b"\x1b", "a" * 5000 + "\\x1b\n"),
        (b"a\n" * (2 << 20), "q\n" * 50_000),
    ],
    ids=["many lines", "lines alike", "a long line", "an escape", "many lines asked for"],
)
def test_an_edit_without_a_match_ends_soon(data: bytes, old: str) -> None:
    """A file of 300,000 lines took two minutes; all of these take less than a second."""
    started = time.process_time()
    assert not pasting.find(data, old)
    nearest.closest(data, old)
    assert time.process_time() - started < 5


def test_places_are_those_of_whole_line_ends_whatever_kind() -> None:
    """Against a pattern that says the same, over all short files."""
    for size, wanted in itertools.product(range(1, 6), ("a", "\n", "a\r\n", "\ra", "\n\n", "a\n\ra")):
        end = rb"(?:\r\n|(?<!\r)\n|\r(?!\n))"
        pattern = b"".join(b"a" if part == "a" else end for part in re.findall("a|\r\n|\r|\n", wanted))
        for data in map(bytes, itertools.product(b"a\r\n", repeat=size)):
            found = [(place.start, place.end) for place in pasting.find(data, wanted)]
            assert found == [m.span(1) for m in re.finditer(b"(?=(%s))" % pattern, data)], (data, wanted)


def test_the_nearest_text_is_that_of_difflib() -> None:
    rng = random.Random(0)
    for _ in range(200):
        texts = ["".join(rng.choices("abcd", k=rng.randrange(1, 9))) for _ in range(30)]
        for least in (0.5, 0.8):
            expected = difflib.get_close_matches(texts[0], texts[1:], n=1, cutoff=least)
            assert nearest.nearest(texts[0], texts[1:], least) == (expected[0] if expected else "")


# --- edit_file and write_file


def test_an_edit_splices_bytes_and_touches_nothing_else(box: Box) -> None:
    data = b"\xef\xbb\xbfa\t\n\tif x:\n\t\treturn 1  \n\xff\xfe\r\nlast"
    sandbox = box({"a.py": data})
    seen = use(sandbox, "edit_file", path="a.py", old="\t\treturn 1", new="\t\treturn 2  \n\n")
    assert (seen.error_kind, seen.text) == (None, "edited a.py at line 3")
    assert sandbox.read("a.py") == data.replace(b"\t\treturn 1", b"\t\treturn 2  \n\n")


def test_an_edit_of_several_lines_keeps_the_line_endings_of_the_file(box: Box) -> None:
    sandbox = box({"a.py": b"one\r\ntwo\r\nthree\r\n"})
    assert use(sandbox, "edit_file", path="a.py", old="one\ntwo", new="1\n2\n2.5").error_kind is None
    assert sandbox.read("a.py") == b"1\r\n2\r\n2.5\r\nthree\r\n"


def test_an_edit_is_strict_about_whitespace_and_shows_the_closest_lines(box: Box) -> None:
    data = b"def f(x):\n    if x:\n        return 1\n    return 0\n"
    sandbox = box({"a.py": data})
    seen = use(sandbox, "edit_file", path="a.py", old="  if x:\n    return 1", new="pass")
    assert seen.error_kind == "old_missing"
    assert seen.text == ("error: old text is not in a.py; closest, lines 2-3:\n    if x:\n        return 1")
    assert use(sandbox, "edit_file", path="a.py", old="nothing like it at all", new="").text == (
        "error: old text is not in a.py"
    )
    assert sandbox.read("a.py") == data


def test_an_ambiguous_edit_names_the_lines_and_changes_nothing(box: Box) -> None:
    sandbox = box({"a.py": b"x = 1\ny = 2\nx = 1\n", "b": b"aaa"})
    seen = use(sandbox, "edit_file", path="a.py", old="x = 1", new="x = 3")
    assert seen.error_kind == "old_ambiguous" and seen.text.endswith("2 times in a.py, at lines 1, 3")
    assert use(sandbox, "edit_file", path="b", old="aa", new="").error_kind == "old_ambiguous"  # overlapping
    assert sandbox.diff() == []


def test_an_edit_with_empty_old_text_only_creates(box: Box) -> None:
    sandbox = box({"a.py": b"x\n", "empty.py": b""})
    assert use(sandbox, "edit_file", path="new/b.py", old="", new="y\n").text == "wrote new/b.py"
    assert use(sandbox, "edit_file", path="empty.py", old="", new="z\n").error_kind is None
    assert (sandbox.read("new/b.py"), sandbox.read("empty.py")) == (b"y\n", b"z\n")
    for old, new in (("", "y"), ("  \n", "y"), ("x", "x")):
        assert use(sandbox, "edit_file", path="a.py", old=old, new=new).error_kind == "bad_arguments"
    assert sandbox.read("a.py") == b"x\n"


def test_write_file_writes_exactly_the_content(box: Box) -> None:
    sandbox = box({"a.py": b"old\n"})
    for path in ("a.py", "deep/er/b.py"):
        assert use(sandbox, "write_file", path=path, content=" x\r\n\ty ").error_kind is None
        assert sandbox.read(path) == b" x\r\n\ty "
    assert use(sandbox, "write_file", path="c", content="\ud800").error_kind == "bad_arguments"


# --- search


def test_search_is_sorted_capped_and_counts_the_rest(box: Box) -> None:
    files = {f"pkg/{name}.py": b"import os\ndef f():\n    return os\n" for name in "gfedcba"}
    hits = [
        f"{path}:{hit}" for path in sorted(files) for hit in ("1:import os", "2:def f():", "3:    return os")
    ]
    sandbox = box(files | {"pkg/__pycache__/a.pyc": b"import os", "bin": b"import os\0"})
    seen = use(sandbox, "search", pattern="^import|def|return").text
    assert seen == "\n".join([*hits[:20], "[1 more hits]"])
    assert use(sandbox, "search", pattern="def f", path="pkg/b.py").text == "pkg/b.py:2:def f():"


def test_search_takes_what_is_no_regular_expression_as_plain_text(box: Box) -> None:
    sandbox = box({"a.py": b"def f(\nx = '--'\n$HOME `id`\n"})
    assert use(sandbox, "search", pattern="def f(").text == (
        "[plain text, no regular expression: missing ), unterminated subpattern at position 5]\na.py:1:def f("
    )
    assert use(sandbox, "search", pattern="--").text == "a.py:2:x = '--'"
    assert use(sandbox, "search", pattern="`id`").text == "a.py:3:$HOME `id`"
    seen = use(sandbox, "search", pattern="absent")
    assert (seen.text, seen.error_kind) == ("no hits", None)
    assert use(sandbox, "search", pattern="x", path="absent").error_kind == "bad_path"
    assert use(sandbox, "search", pattern="").error_kind == "bad_arguments"
    refused = use(sandbox, "search", pattern="g(")
    assert (refused.error_kind, "as plain text not there" in refused.text) == ("bad_arguments", True)


LINES = b"version = 42\nclass Adder:\n\tx = 'a.b_c'\nnull  \nfoo|bar\r\nlast one"


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        (r"\d+", [1]),
        (r"= \d", [1]),
        (r"(?i)ADDER", [2]),
        (r"[\w.]+'", [3]),
        (r"^\t", [3]),
        (r"\tx", [3]),
        (r"\bone\b", [6]),
        (r"one$", [6]),
        (r"bar$", [5]),
        (r"version|last", [1, 6]),
        (r"^(?!.*(42|bar)).*a", [2, 3, 6]),
        (r"(?<=class )A", [2]),
        (r"v.*?n", [1]),
        (r"(.)\1", [2, 4, 5]),
        (r"l{2}", [4]),
        (r"\|", [5]),
        (r"(?x) l a s t  # the word", [6]),
        (r"42\nclass", [1]),
        ("42\nclass", [1]),
        (r"(?s)42.class", [1]),
        (r"(?s)class.*?null", [2]),
        (r"(?si:CLASS.*?NULL)", [2]),
        (r"42\sclass", [1]),
        (r"42[\s\S]class", [1]),
        (r"Adder[^x]+x", [2]),
        (r"Adder:\W+x =", [2]),
        (r"42.class", []),
        (r"42\s$", []),
        (r"[^\n]+:\n\s*x", [2]),
        (r"\\n", []),
        (r"\s+$", [4]),
        (r"é", []),
    ],
)
def test_search_speaks_the_dialect_that_it_promises(box: Box, pattern: str, numbers: list[int]) -> None:
    seen = use(box({"a.py": LINES}), "search", pattern=pattern)
    found = [int(line.split(":")[1]) for line in seen.text.split("\n") if line.startswith("a.py:")]
    assert (found, seen.error_kind) == (numbers, None), seen.text


def test_search_says_what_it_does_not_know(box: Box) -> None:
    sandbox = box({"a.py": b"one two\n"})
    for pattern, said in (
        ("[[:space:]]", "[:space:] is not known"),
        (r"(?<name>o)", "unknown extension ?<n"),
        (r"\hone", r"bad escape \h"),
        ("*one", "nothing to repeat"),
    ):
        seen = use(sandbox, "search", pattern=pattern)
        assert (seen.error_kind, said in seen.text) == ("bad_arguments", True), seen.text
    assert use(sandbox, "search", pattern=r"one\|two").text == r"no hits; \| is a plain | in Python"


def test_a_search_that_would_take_for_ever_ends(box: Box) -> None:
    sandbox = box({"a.py": b"a" * 40 + b"!\n", "b.py": b"here\n"})
    seen = use(sandbox, "search", pattern="(a|a)*$|here", command_timeout_s=1.0)
    assert seen.error_kind == "timeout" and "for less" in seen.text
    assert use(sandbox, "search", pattern="here").text == "b.py:1:here"


@pytest.mark.parametrize(
    ("data", "old", "new", "after"),
    [
        (b"fee = 1\r\nx\r\n", "fee = 1", "fee = 1\ntip = 2", b"fee = 1\r\ntip = 2\r\nx\r\n"),
        (b"a\r\nb\r\nc\r\n", "a\nb", "a\nb\nd", b"a\r\nb\r\nd\r\nc\r\n"),
        (b"a\rb\rc", "b", "b\nd", b"a\rb\rd\rc"),
        (b"a\nb\r\nc\r\n", "b", "b\nd", b"a\nb\r\nd\r\nc\r\n"),
        (b"a\nb\nc\r\n", "a", "a\nd", b"a\nd\nb\nc\r\n"),
        (b"a\nb\n", "a\r\nb", "a\r\nd", b"a\nd\n"),
        (b"a\r\nlast", "last", "last\nd", b"a\r\nlast\r\nd"),
        (b"only", "only", "a\nb", b"a\nb"),
        (b"a\x0c\nb\n", "a\\x0c\nb", "a\\x0c\nc", b"a\x0c\nc\n"),
        (b"x = '\\x0c'\n", "'\\x0c'", "'\\x0c' + y", b"x = '\\x0c' + y\n"),
        (b"a\xffb\n", "a\\xffb", "c\\xffb", b"c\xffb\n"),
        ("a\x85b\n".encode(), "a\\x85b", "c\\x85", "c\x85\n".encode()),
        (b"a\x1b[1mb\r\n", "a\\x1b[1mb", "a\\x1b[0mb\nc", b"a\x1b[0mb\r\nc\r\n"),
    ],
)
def test_what_is_pasted_is_found_and_takes_the_line_ends_around_it(
    box: Box, data: bytes, old: str, new: str, after: bytes
) -> None:
    sandbox = box({"a.py": data})
    assert use(sandbox, "edit_file", path="a.py", old=old, new=new).error_kind is None
    assert sandbox.read("a.py") == after


@pytest.mark.parametrize(
    ("line", "old", "said"),
    [
        ("x =\u00a01", "x = 1", "line 1, column 4 has U+00A0 NO-BREAK SPACE, not a space"),
        ("if\tx:", "if x:", "line 1, column 3 has a tab, not a space"),
        ("    x = 1", "\tx = 1", "line 1, column 4 has a space, not a tab"),
        ("ab\u200bc = 1", "abc = 1", "line 1, column 3 has U+200B ZERO WIDTH SPACE, not 'c'"),
        ("s = \u2019a\u2019", "s = 'a'", 'line 1, column 5 has U+2019 RIGHT SINGLE QUOTATION MARK, not "\'"'),
        ("caf\u0301e", "cafe", "line 1, column 4 has U+0301 COMBINING ACUTE ACCENT, not 'e'"),
        ("x = 1  ", "x = 1\ny", "line 1, column 6 has a space, not the end of the line"),
    ],
)
def test_a_difference_that_cannot_be_seen_is_named(box: Box, line: str, old: str, said: str) -> None:
    sandbox = box({"a.py": f"{line}\ny = 2\n".encode()})
    seen = use(sandbox, "edit_file", path="a.py", old=old, new="z")
    assert (seen.error_kind, said in seen.text) == ("old_missing", True), seen.text


@pytest.mark.parametrize(
    ("before", "content", "after"),
    [
        (b"a\r\nb\r\n", "a\nc\n", b"a\r\nc\r\n"),
        (b"a\nb\n", "a\nc\n", b"a\nc\n"),
        (b"a\r\nb\n", "a\nc\n", b"a\nc\n"),
        (b"a\rb", "a\nc", b"a\rc"),
        (b"\xef\xbb\xbfa\n", "b\n", b"\xef\xbb\xbfb\n"),
        (b"a\x0c\nb\n", "a\\x0c\nc\n", b"a\x0c\nc\n"),
    ],
)
def test_a_file_that_is_written_whole_stays_of_its_kind(
    box: Box, before: bytes, content: str, after: bytes
) -> None:
    sandbox = box({"a.py": before})
    use(sandbox, "write_file", path="a.py", content=content)
    use(sandbox, "write_file", path="new.py", content=content)
    assert (sandbox.read("a.py"), sandbox.read("new.py")) == (after, content.encode())


# --- shell


def test_shell_shows_both_streams_in_order_and_the_exit_code(box: Box) -> None:
    sandbox = box()
    seen = use(sandbox, "shell", command="echo one; echo two >&2; echo three; exit 3")
    assert (seen.text, seen.error_kind) == ("one\ntwo\nthree\nexit code 3", "nonzero_exit")
    assert use(sandbox, "shell", command="true").text == "(no output)"
    assert use(sandbox, "shell", command="nosuch").text == (
        "/bin/bash: line 1: nosuch: command not found\nexit code 127"
    )
    assert "syntax error" in use(sandbox, "shell", command="if (").text
    for command in (" ", "\n", "a\0b", "x" * 200_000):
        assert use(sandbox, "shell", command=command).error_kind == "bad_arguments"


def test_each_shell_is_fresh_and_has_no_input(box: Box) -> None:
    sandbox = box()
    use(sandbox, "shell", command="cd /tmp; export X=1; echo kept > /workspace/file")
    assert use(sandbox, "shell", command="pwd; echo $X; cat; cat file").text == "/workspace\n\nkept"


def test_long_output_keeps_its_head_and_tail(box: Box) -> None:
    text = use(box(), "shell", command="seq 1 1000").text
    assert text.startswith("1\n2\n3") and text.endswith("999\n1000")
    assert "\n[3692 characters cut]\n" in text and len(text) < 200 + 40


def test_a_timeout_gives_back_the_beginning(box: Box) -> None:
    quick = SETTINGS.model_copy(update={"command_timeout_s": 0.5})
    sandbox = box()
    for command, start in (("echo begun; sleep 60", "begun\nkilled"), ("yes", "y\ny\n")):
        seen = tools.run(Call("1", "shell", {"command": command}, ""), sandbox, quick)
        assert seen.error_kind == "timeout" and seen.text.startswith(start)
        assert seen.text.endswith("killed: more than 0.5 s or too much output") and len(seen.text) < 150
    assert use(sandbox, "shell", command="echo alive").text == "alive"


def test_the_same_command_reads_the_same_every_time(box: Box) -> None:
    commands = [
        "python3 -c 'print(object(), {*\"abcdefgh\"}, id)'",
        "mktemp; mktemp -d; python3 -c 'import tempfile; print(tempfile.mkdtemp())'",
        "time sleep 0.01",
        "for i in $(seq 20); do touch f$i; done; ls -U | sort",
        "python3 -m unittest 2>&1 | head -5",
        "python3 -c 'import time; time.sleep(1)' & sleep 0.01; kill %1; wait; echo done",
    ]
    first, second = box(), box()
    for command in commands:
        assert use(first, "shell", command=command).text == use(second, "shell", command=command).text


def test_a_lost_sandbox_is_no_observation(box: Box) -> None:
    sandbox = box({"a.py": b"x\n"})
    sandbox.close()
    for tool, arguments in (
        ("shell", {"command": "true"}),
        ("read_file", {"path": "a.py"}),
        ("search", {"pattern": "x"}),
    ):
        with pytest.raises(SandboxError):
            use(sandbox, tool, **arguments)


# --- output


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07plain", "red plain"),
        (b" 10%\r 50%\r100%\r\nnext\r\n", "100%\nnext"),
        (b"bell\x07 null\x00 caf\xc3\xa9 bad\xff", "bell\\x07 null\\x00 caf\xe9 bad\\xff"),
        (b"trailing   \n\n\n", "trailing"),
        (b"4 passed in 0.12s", "4 passed in #s"),
        (b"1 failed in 61.20s (0:01:01)", "1 failed in #s"),
        (b"Ran 3 tests in 0.001s", "Ran 3 tests in #s"),
        (b"0.12s call     test_a.py::test", "#s call     test_a.py::test"),
        (b"<f at 0x7f00deadbeef> 0x55aabbccddee", "<f at 0x#> 0x#"),
        (b"/tmp/tmpab_12xyz/x /tmp/tmp.Ab12Cd34Ef", "/tmp/tmp#/x /tmp/tmp.#"),
        (b"/bin/bash: line 1:    12 Segmentation fault", "/bin/bash: line 1:    Segmentation fault"),
        # What a program under test may print stays as it is.
        (b"1.5s 0xff 0xdeadbeef '1.50 seconds' /tmp/data", "1.5s 0xff 0xdeadbeef '1.50 seconds' /tmp/data"),
    ],
)
def test_clean(raw: bytes, read: str) -> None:
    assert clean(raw) == read


def test_clip_is_exact_about_what_it_leaves_out() -> None:
    assert clip("abcdef", 6) == "abcdef"
    assert clip("abcdefg", 5) == "abc\n[2 characters cut]\nfg"


# --- refusals


@pytest.mark.parametrize("codec", [CODECS["plain"], CODECS["json"]], ids=lambda codec: codec.name)
def test_every_example_is_a_call_that_reads_back(codec) -> None:
    for spec in TOOLS:
        text = tools.form(spec.name, codec)
        _, calls, error_kind = codec.parse(text, TOOLS)
        assert error_kind is None
        assert [(call.tool, call.arguments) for call in calls] == [(spec.name, spec.example)]


def test_a_refusal_says_what_would_work() -> None:
    codec = CODECS["plain"]

    def refused(text: str) -> str:
        _, (call, *_), _ = codec.parse(text, TOOLS)
        return tools.refuse(call, codec).text

    assert refused("<call>view a.py</call>") == (
        "error: there is no tool 'view'; the tools are read_file, edit_file, write_file, search, shell, finish"
    )
    assert refused("<call>read_file</call>") == (
        "error: read_file: argument 'path' is missing; write\n<call>read_file package/module.py 1 40</call>"
    )
    assert "<<<<\nold text\n====\nnew text\n>>>>" in refused("<call>edit_file a.py\n<<<<\nx\n>>>>\n</call>")
