"""Asynchronous RL: a collector makes attempts while a trainer learns from earlier ones; the run folder lies between.

launcher     `woodshed train`: starts both and engine servers, restarts one that died, ends all
collector    draws tasks, has attempts made, graded, watched and annotated, gives engines new weights; no torch
trainer      the stages of a recipe, on one rank or several; the stage `rl` takes its steps from the run folder
"""
