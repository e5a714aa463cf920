"""Did it cheat: rules over what an attempt read, ran and wrote, each flag with its evidence. Rewards are never edited.

`rules.watch` applies the table of rules; `honeypots` lays bait and makes tasks that nobody can solve; `gap` and `drift`
look at a whole run; `judge` lets a model read what the rules flagged; `response` is what a recipe does about flags.
"""
