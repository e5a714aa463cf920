"""Choice of the next tasks, and of the tasks that should be made.

`posterior` holds what is believed about a solve rate, `pool` draws tasks by it, `levels` moves between levels, `choice`
says what a choice of the user's own must do, and `bandit` chooses the generator of new tasks.
"""

from woodshed.curriculum.bandit import Bandit
from woodshed.curriculum.choice import TaskChoice
from woodshed.curriculum.create import create, draw
from woodshed.curriculum.pool import Curriculum, CurriculumSettings, refuse_dry

__all__ = ["Bandit", "Curriculum", "CurriculumSettings", "TaskChoice", "create", "draw", "refuse_dry"]
