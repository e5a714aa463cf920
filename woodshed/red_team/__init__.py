"""Red team: attacks on our own graders, generated from parts for any task, and honest solutions beside them.

`compose` combines what to reach, how, when and in which spelling; `planting` puts an attack into a task's code;
`weak_judges` show that it is one; `campaign` grades many, in sandboxes like any other patch.
"""

from woodshed.red_team.campaign import BELIEVED, GRADERS, Campaign, GradedAttack, count_by_kind, plan, run
from woodshed.red_team.compose import Attack, attacks, sample
from woodshed.red_team.planting import can_be_attacked, hollow, plant
from woodshed.red_team.weak_judges import JUDGES, bought

__all__ = [
    "BELIEVED",
    "GRADERS",
    "JUDGES",
    "Attack",
    "Campaign",
    "GradedAttack",
    "attacks",
    "bought",
    "can_be_attacked",
    "count_by_kind",
    "hollow",
    "plan",
    "plant",
    "run",
    "sample",
]
