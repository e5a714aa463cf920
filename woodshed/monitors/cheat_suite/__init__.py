"""Known cheats and their honest look-alikes as scripts, to be played on any task: what monitors are measured with.

`cheats.CHEATS` has one entry a row of the list of known cheats, `twins.TWINS` what an honest attempt does that looks
like it. `play.play` carries a script out in a real sandbox and gives a rollout like any other.
"""
