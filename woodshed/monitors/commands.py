"""Commands in a shell text, read as words by `shlex` and never by patterns on the raw text.

`git "log" --al'l'`, `G=git; $G log --all` and `bash -c 'git log --all'` are the same command here, and a message that
only mentions it is not. Wrappers (env, timeout, sudo, xargs, ...) are removed, `bash -c`, `eval`, `$(...)` and
`find -exec` are followed, here-documents belong to the command that reads them. This is not a shell: globs, loops and
functions are not evaluated. The access log shows what they did.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

MAX_DEPTH = 4
MAX_CHARS = 20_000  # of one shell text; the rest of a longer one is data
HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
OPERATOR = re.compile(r"&&|\|\||\|&|;;|>>|>\||&>>|&>|>&|<&|<<<|[;&|()<>\n]")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
SUBSTITUTION = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
DURATION = re.compile(r"[\d.]+[smhd]?")
VERSIONED = re.compile(r"^(python|pypy|pip|perl|ruby|node|bash)[\d.]+$")
SHELLS = {"bash", "sh", "dash", "zsh", "ksh"}
KEYWORDS = {"if", "then", "else", "elif", "while", "until", "do", "!", "{", "}", "fi", "done"}
WRAPPERS = {"sudo", "nohup", "time", "exec", "command", "builtin", "nice", "ionice", "stdbuf", "setsid"}
WRAPPERS |= {"env", "timeout", "xargs", "doas", "chronic", "unbuffer"}
TAKES_VALUE = {"-n", "-k", "-s", "-u", "-I", "-P", "-L", "-d", "-c", "-o", "-e", "-i", "-C"}
"""Options of wrappers whose value is the next word."""


def program(word: str) -> str:
    """Name of a program without its folder, and without the version of interpreters such as python3.11."""
    name = word.rpartition("/")[2]
    return VERSIONED.sub(r"\1", name)


@dataclass(frozen=True)
class Command:
    """One program with its arguments."""

    argv: tuple[str, ...]
    """The program first, as it was called; without assignments and wrappers."""
    assignments: Mapping[str, str] = field(default_factory=dict)
    """Variables set for it, or by it if argv is empty or starts with export."""
    wrappers: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    """Files that its input comes from."""
    writes: tuple[str, ...] = ()
    """Files that its output goes to."""
    appends: tuple[str, ...] = ()
    """Those of them that it appends to."""
    stdin: str = ""
    """Its here-document."""
    background: bool = False
    pipes_into: str = ""
    """The program that reads its output; "" if it is not piped."""
    text: str = ""
    """The line it was written in, for evidence."""

    @property
    def program(self) -> str:
        """Name of the program without folder and version: "python" for /usr/bin/python3.11."""
        return program(self.argv[0]) if self.argv else ""

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.argv[1:]

    @property
    def code(self) -> str:
        """The Python that it runs from its own command line or here-document; "" for a file or a module."""
        if self.program not in ("python", "pypy", "ipython"):
            return ""
        for position, word in enumerate(self.arguments):
            if word == "-c" or (word.startswith("-") and not word.startswith("--") and word.endswith("c")):
                return next(iter(self.arguments[position + 1 :]), "")
            if not word.startswith("-"):
                return ""
        return self.stdin


@functools.lru_cache(maxsize=4096)
def parse(text: str, depth: int = 0) -> tuple[Command, ...]:
    """Every command in a shell text, in order; inner commands follow the one that contains them."""
    text, documents = _take_documents(text[:MAX_CHARS])
    parsed: list[Command] = []
    variables: dict[str, str] = {}
    for words, reads, writes, appends, background, piped in _simple_commands(text):
        command = _command(words, variables)
        stdin = documents.pop(0) if documents and any(HEREDOC_MARK in word for word in reads) else ""
        reads = [word for word in reads if HEREDOC_MARK not in word]
        line = " ".join(words)[:400]
        command = replace(
            command,
            reads=tuple(reads),
            writes=tuple(writes),
            appends=tuple(appends),
            stdin=stdin,
            background=background,
            text=line,
        )
        if parsed and piped:
            parsed[-1] = replace(parsed[-1], pipes_into=command.program)
        if not command.argv or command.program == "export":
            variables |= command.assignments
        parsed.append(command)
        if depth < MAX_DEPTH:
            parsed += _inner(command, words, depth)
    return tuple(parsed)


HEREDOC_MARK = "\x00heredoc"


def _take_documents(text: str) -> tuple[str, list[str]]:
    """The text with a mark for each of its here-documents, and their bodies."""
    if "<<" not in text:
        return text, []
    lines, kept_lines, bodies = text.split("\n"), [], []
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        for match in HEREDOC.finditer(line):
            end = next((i for i in range(index, len(lines)) if lines[i].strip() == match[2]), len(lines))
            bodies.append("\n".join(lines[index:end]))
            index = end + 1
        kept_lines.append(HEREDOC.sub(f"<{HEREDOC_MARK}", line))
    return "\n".join(kept_lines), bodies


def _tokens(text: str) -> list[str]:
    """Words and operators. Malformed text is split at white space."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        return list(lexer)
    except ValueError:
        return text.split()


def _simple_commands(text: str) -> Iterator[tuple[list[str], list[str], list[str], list[str], bool, bool]]:
    """Words, files read, written and appended to, is in background, reads the output of the one before."""
    words: list[str] = []
    reads: list[str] = []
    writes: list[str] = []
    appends: list[str] = []
    target: list[str] | None = None
    piped = comment = adding = False
    for token in [*_tokens(text.replace("\\\n", " ")), "\n"]:
        operators = OPERATOR.findall(token) if OPERATOR.match(token) else []
        if not operators or "".join(operators) != token:
            comment = comment or token.startswith("#")
            if not comment:
                (words if target is None else target).append(token)
                if target is writes and adding:
                    appends.append(token)
                target = None
            continue
        for operator in operators:
            comment = comment and operator != "\n"
            if comment:
                continue
            if operator[0] in "<>" or operator in ("&>", "&>>"):
                if words and words[-1].isdecimal() and operator[0] in "<>":
                    words.pop()  # a descriptor: 2>
                target = reads if operator in ("<", "<&", "<<<") else writes
                adding = operator in (">>", "&>>")
                continue
            if words or reads or writes:
                files = [w for w in writes if not w.isdecimal()]
                yield words, reads, files, appends, operator == "&", piped
            words, reads, writes, appends, target = [], [], [], [], None
            piped = operator in ("|", "|&")


def _command(words: list[str], variables: Mapping[str, str]) -> Command:
    """A command without leading assignments, keywords and wrappers, known variables expanded."""
    remaining = [_expanded(word.strip("`"), variables) for word in words]
    assignments: dict[str, str] = {}
    wrappers: list[str] = []
    while remaining:
        head = remaining[0].rpartition("/")[2]
        match = ASSIGNMENT.fullmatch(remaining[0])
        if match:
            assignments[match[1]] = match[2]
        elif head in WRAPPERS:
            wrappers.append(head)
            del remaining[: _options(remaining)]
            continue
        elif remaining[0] not in KEYWORDS and remaining[0] != "$":
            break
        del remaining[0]
    if remaining and remaining[0] in ("export", "declare", "readonly"):
        assignments |= {m[1]: m[2] for word in remaining[1:] if (m := ASSIGNMENT.fullmatch(word))}
    return Command(tuple(remaining), assignments, tuple(wrappers))


def _options(words: list[str]) -> int:
    """Number of words that a wrapper takes: itself, its options, and for timeout the duration."""
    index = 1
    while index < len(words) and words[index].startswith("-"):
        index += 2 if words[index] in TAKES_VALUE else 1
    if words[0].rpartition("/")[2] == "timeout" and index < len(words) and DURATION.fullmatch(words[index]):
        index += 1
    return index


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    if not variables or "$" not in word:
        return word
    return VARIABLE.sub(lambda m: variables.get(m[1] or m[2], m[0]), word)


def _inner(command: Command, words: list[str], depth: int) -> Iterator[Command]:
    """Commands inside a command."""
    texts = [a or b for word in words if "$(" in word or "`" in word for a, b in SUBSTITUTION.findall(word)]
    arguments = command.arguments
    if command.program in SHELLS:
        flag_index = next((i for i, w in enumerate(arguments) if re.fullmatch(r"-[a-z]*c", w)), None)
        texts += (
            list(arguments[flag_index + 1 : flag_index + 2]) if flag_index is not None else [command.stdin]
        )
    elif command.program == "eval":
        texts.append(" ".join(arguments))
    elif command.program == "find":
        for flag in ("-exec", "-execdir", "-ok"):
            if flag in arguments:
                texts.append(shlex.join(w for w in arguments[arguments.index(flag) + 1 :] if w not in ";+"))
    for text in filter(None, texts):
        yield from parse(text, depth + 1)
