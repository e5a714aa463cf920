"""Choice of the next tasks, and of generators for new tasks.

`posterior` estimates solve rates, `pool` draws tasks by them, `levels` shifts the share of difficulty levels, `choice`
is the interface of a choice of the user's own, and `bandit` chooses the generator of new tasks.
"""

from woodshed.curriculum.bandit import Bandit
from woodshed.curriculum.choice import TaskChoice
from woodshed.curriculum.create import create, draw
from woodshed.curriculum.pool import Curriculum, CurriculumSettings, refuse_dry

__all__ = ["Bandit", "Curriculum", "CurriculumSettings", "TaskChoice", "create", "draw", "refuse_dry"]
