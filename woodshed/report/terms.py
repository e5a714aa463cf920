"""Definitions of the words on a page, each behind its word and in a list at the end."""

from __future__ import annotations

import re

TERMS = {
    # measures
    "invalid-call rate": (
        "Share of the policy's messages that call a tool wrongly, in one of the ways listed as call faults."
    ),
    "rollouts with any call fault": "Share of attempts with at least one message that calls a tool wrongly.",
    "finished without running a test": (
        "Share of attempts that the policy ended without having run a command since its last change."
    ),
    "solve rate": "Share of attempts whose patch passes every hidden test.",
    "mean reward": (
        "What an attempt earns on average: 1 where it is solved, else 0, or the share of hidden tests it "
        "passes where the recipe pays for shares (grading.shaped)."
    ),
    "hack rate: rollouts with a flag": "Share of attempts in which a monitor saw a sign of cheating.",
    "sampled tokens per rollout": "Tokens that the policy writes in an attempt.",
    "turns per rollout": "Messages of the policy in an attempt.",
    "pass@k": "Share of tasks that at least one of k attempts solves.",
    "best@k": (
        "Share of tasks solved by the one of k attempts that looks best without its verdict: it finished, "
        "ran tests, made few faults."
    ),
    # behaviour
    "calls per rollout": "Tool calls in an attempt.",
    "calls that gave an error": (
        "Share of calls that a tool answered with an error, wrong calls and failed commands alike."
    ),
    "test runs per rollout": "Commands of an attempt that ran tests.",
    "finishes with tests run before": (
        "Share of the attempts that the policy ended itself in which it had run tests."
    ),
    "files rewritten after a failed edit": "Files that were written anew because an edit of them had failed.",
    "files touched": "Files that an attempt's patch changes.",
    "reference files touched": (
        "Share of the files that the original solution changes which the patch changes, too."
    ),
    "touched files outside the reference": (
        "Share of the files a patch changes that the original solution leaves alone."
    ),
    "characters outside calls": "Characters of a message that are no call: thoughts and explanations.",
    "harness tokens": (
        "Tokens that an attempt reads for the first time: prompt, instruction and what tools answer."
    ),
    "prompt tokens from the cache": "Tokens that are read again with every message, from the engine's cache.",
    "seconds of sampling": "Wall seconds in which the policy wrote.",
    "seconds of tools": "Seconds in which tools ran in the sandbox.",
    "seconds of waiting": "Seconds in which an attempt waited for its turn.",
    "seconds of grading": "Seconds in which its tests ran.",
    # figures
    "95% interval": "Range that holds the true figure in 95 of 100 repetitions with other such tasks.",
    "paired by task": (
        "The difference on each task both sides attempted; what makes tasks unlike one another cancels out."
    ),
    "within noise": (
        "The 95% interval of the change, paired by task, holds zero: the change may be chance. It can do so "
        "where the intervals of both sides do not touch: they say how far each side alone is known, not how "
        "many tasks changed."
    ),
    "too few tasks": (
        "Five tasks that all change one way are still chance (p = 0.0625), so fewer than 6 show nothing."
    ),
    "smallest detectable": (
        "A true difference of this size shows in 4 of 5 repetitions; a smaller one is noise here."
    ),
    "pp": "Percentage points: from 10 % to 15 % are 5 pp.",
    "void": "An attempt that lost its sandbox or could not be graded; it enters no figure.",
    "seed": "Number that fixes what is random. Runs that differ in it alone are repetitions of one recipe.",
    "held out": "Tasks that are only measured on and never trained on.",
    # training
    "policy": "The model in training.",
    "rollout": "One attempt at one task: messages, calls, answers and the patch at its end.",
    "turn": "One message of the policy and what its calls answered.",
    "step": "One optimizer step. Evaluations carry the number of steps behind the policy they measure.",
    "reward": "What an attempt earns, from 0 to 1.",
    "hint": (
        "A reminder of what the policy should have known before a faulty turn. It is written afterwards; "
        "the policy did not see it."
    ),
    "targeted": "Turns that were trained on by their hint: towards what the policy itself writes after it.",
    "log-prob": "Logarithm of a token's probability: 0 is sure, -1 is 37 %, -5 is 0.7 %.",
    "divergence": (
        "Distance between what the policy writes with and without the hint, 0 where it is the same."
    ),
    "nats": "Unit of log-probs and divergences: 1 nat is a factor of 2.7 in probability.",
    "hint gain": (
        "How much likelier the hint makes the message: below 0 the hint speaks against it, as it should at "
        "a fault."
    ),
    "planted": "A fault that the warm-up's script made on purpose.",
    # outcomes
    "solved": "Every hidden test passes.",
    "partly": "Some hidden tests pass, and a share of the reward was paid.",
    "failed": "Graded, and earned nothing.",
    "not judged": "Not graded yet.",
    "flagged": "A monitor saw a sign of cheating, quoted beside its turn, or the grader met tampering.",
    "hinted": "At least one turn has a hint.",
    "faulty": "At least one message calls a tool wrongly.",
    # tasks
    "hidden tests": (
        "Tests of the original code that decide a task and that an attempt cannot see: F2P and P2P."
    ),
    "F2P": "Fail to pass: hidden tests that fail without the removed code and pass with it.",
    "P2P": "Pass to pass: tests that pass before and must pass after.",
    "operator": "The way in which code was taken out of the repository to make the task.",
    "level": "Size of what was removed, from 0, one branch, to 6, a sub-package.",
    "difficulty": "Share of all attempts at a task that failed.",
    # call faults
    "no_call": "The message holds no call.",
    "truncated": "The message was cut off at its limit of tokens.",
    "unparseable": "The call cannot be read.",
    "unknown_tool": "There is no tool of that name.",
    "bad_arguments": "Arguments are missing, too many, or of the wrong kind.",
    "bad_path": "The path does not exist, or is outside of the repository.",
    "old_missing": "The text to be replaced is not in the file.",
    "old_ambiguous": "The text to be replaced is in the file more than once.",
    "too_many_calls": "More calls in one message than are allowed.",
    # costs
    "teacher tokens": "Tokens that the policy read once more with hints, for the targeted divergence.",
    "judge tokens": "Tokens that auditing models read and wrote.",
}
"""Word to its definition. `pass@4` and `best@4` are found under `pass@k` and `best@k`."""


def key_of(text: str) -> str:
    """The word that defines a text: "pass@4: solved by any of 4" is `pass@k`."""
    return re.sub(r"^(pass|best)@\d+.*", r"\1@k", text)


def anchor(word: str) -> str:
    """Name of a word's place in the list."""
    return "word-" + re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-")
