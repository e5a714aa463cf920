"""The blocks of the documents: a small function for every block, from the files in benchmarks/results."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from published import cards, engines, learning, machine

BLOCKS: Mapping[str, Callable[[], str]] = {
    "headline": learning.headline,
    "quickstart": learning.quickstart,
    "quickstart-calls": learning.quickstart_calls,
    "quickstart-solved": learning.quickstart_solved,
    "quickstart-facts": learning.quickstart_facts,
    "experiment": learning.experiment,
    "against-rl": learning.against_rl,
    "experiment-bars": learning.experiment_bars,
    "other-variants": learning.other_variants,
    "gate": learning.gate,
    "agreement": engines.agreement,
    "vllm-training": engines.vllm_training,
    "decode": engines.decode,
    "decode-again": engines.decode_again,
    "decode-lora": engines.decode_lora,
    "grpo": engines.grpo,
    "step": engines.step,
    "redesign": engines.redesign,
    "full-weights": engines.full_weights,
    "step-one-card": cards.ranks_step,
    "step-noise": cards.ranks_agree,
    "step-facts": cards.ranks_facts,
    "async-attempts": cards.async_attempts,
    "hint-cost": engines.hint_cost,
    "muon": engines.muon,
    "muon-facts": engines.muon_facts,
    "machine": machine.machine,
    "beside-commit": machine.beside_commit,
    "call-path": machine.call_path,
    "grading": machine.grading,
    "red-team": machine.red_team,
    "isolation": machine.isolation,
    "cheating-policy": machine.cheating_policy,
    "channel-fuzz": machine.channel_fuzz,
    "strangers": machine.strangers,
    "strangers-recall": machine.strangers_recall,
    "factory": machine.factory,
    "first-task": machine.first_task,
    "curriculum": machine.curriculum,
    "intervals": machine.intervals,
    "duration": machine.duration,
    "busy-duration": machine.busy_duration,
    "installation": machine.installation,
    "memory": machine.memory,
    "hardware": machine.hardware,
    "first-hour": machine.first_hour,
}
"""Name of a block -> what makes it."""
