"""Search for leaked answers: fingerprints of the missing code, and everywhere that it could still be found.

`residue` lists the places where code hides, `evidence` says what must not be found, `scan` searches the root file
system of an attempt for it (`scanner`, `readers` and `prints` run inside), and `theft` lets a scripted thief try.
"""

from woodshed.synthesis.leaks.exploit_check import Theft, steal
from woodshed.synthesis.leaks.leftovers import Rule, add_rules, read_rules, rules_path, scrub
from woodshed.synthesis.leaks.scan import LIBRARIES, Finding, Report, copies, first_copy, first_leak, scan

__all__ = [
    "LIBRARIES",
    "Finding",
    "Report",
    "Rule",
    "Theft",
    "add_rules",
    "copies",
    "first_copy",
    "first_leak",
    "read_rules",
    "rules_path",
    "scan",
    "scrub",
    "steal",
]
