"""Search for leaked answers: fingerprints of the missing code, and everywhere that it could still be found.

`leftovers` lists the places where code hides, `evidence` collects what must not be found, `scan` searches the root
file system of an attempt for it (`scanner`, `readers` and `fingerprints` run inside), and `exploit_check` runs a
scripted exploit.
"""

from woodshed.synthesis.leaks.exploit_check import ExploitResult, run_exploit
from woodshed.synthesis.leaks.leftovers import LeftoverRule, add_rules, read_rules, rules_path, scrub
from woodshed.synthesis.leaks.scan import (
    LIBRARIES,
    LeakFinding,
    LeakReport,
    copies,
    first_copy,
    first_leak,
    scan,
)

__all__ = [
    "LIBRARIES",
    "ExploitResult",
    "LeakFinding",
    "LeakReport",
    "LeftoverRule",
    "add_rules",
    "copies",
    "first_copy",
    "first_leak",
    "read_rules",
    "rules_path",
    "run_exploit",
    "scan",
    "scrub",
]
