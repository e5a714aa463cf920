"""Woodshed: a training system for coding agents.

Real repositories become proven practice tasks, an agent attempts them in sandboxes, a verifier judges the patch,
hints say in words what went wrong at the exact turn, and the policy is trained on all of it.

The ladder. A module imports only from lines below its own; modules that share a line do not import each other.

    __main__
    cli
    doctor
    report
    stages
    learning
    parallel
    muon
    red_team
    synthesis
    solving
    evals
    experience
    curriculum
    feedback
    monitors
    grading
    gateway
    agent
    engines
    tokens
    tasks
    sandbox
    runs
    pysource
    settings
    parts
    boundary
    documents
    records
"""

__version__ = "0.1.0"
