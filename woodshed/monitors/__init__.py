"""Monitors for cheating: rules over what an attempt read, ran and wrote, each flag with its evidence.

`rules.watch` applies the table of rules; `honeypots` makes tasks with bait; `visible_hidden_gap` and `drift` compare
the steps of a run; `judge` asks a model about flagged attempts; `flag_policy` holds the consequences of flags. Rewards
are never changed.
"""
