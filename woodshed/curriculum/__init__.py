"""Choice of the next tasks, and of generators for new tasks.

`posterior` estimates solve rates, `pool` draws tasks by them, `levels` shifts the share of difficulty levels, and
`bandit` chooses the generator of new tasks.
"""

from woodshed.curriculum.bandit import Bandit
from woodshed.curriculum.pool import Curriculum, CurriculumSettings, refuse_dry

__all__ = ["Bandit", "Curriculum", "CurriculumSettings", "refuse_dry"]
