"""Removals of what conftest files import, as the usual suite of a business imports its classes.

The originals, which are hidden and judge, keep their conftest: without the code it cannot be imported, and no test
runs. So all tests fail before the patch. Those that miss the behaviour show in a second suite, in which conftest files,
and the helpers that they import, have lost whatever refers to the code, as the agent is shown them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from woodshed.synthesis.closure import close
from woodshed.synthesis.names import Codebase
from woodshed.synthesis.operators import Deletion
from woodshed.synthesis.repository_context import Rejected, RepositoryContext


@dataclass(frozen=True)
class PrunedConftests:
    """Test files without tests of their own, as far as they had to lose something; none where all can be imported."""

    files: Mapping[str, str] = field(default_factory=dict)
    words: frozenset[str] = frozenset()
    """Names that they no longer define, fixtures above all: a failure may have one of them as its reason."""


def pruned(work: RepositoryContext, deletion: Deletion) -> PrunedConftests:
    """Conftest files, and test helpers, without what refers to removed code.

    Raises:
        Rejected: conftest_broken, if that takes nothing away from them.
    """
    texts = {**deletion.code.texts, **deletion.absent, **work.tests}
    closed = close(Codebase(texts, deletion.code.roots, frozenset(work.tests)), deletion.removed)
    holding = {test.partition("::")[0] for test in work.baseline.stable}
    files = {
        path: closed.code.texts[path]
        for path, text in work.tests.items()
        if path not in holding and closed.code.texts[path] != text
    }
    if not files:
        raise Rejected(
            "conftest_broken", "it cannot be imported, and names nothing that could be taken out of it"
        )
    words = {name.rpartition(".")[2] for path, name in closed.removed if path in files}
    return PrunedConftests(files, frozenset(words))
