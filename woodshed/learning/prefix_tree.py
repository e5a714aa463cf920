"""Hinted turns that branch off their rollout, so that what they share with it is computed once.

    trunk      p p p p o m m m x x o m m m . .     the rollout (p context, o opening, m message, x observation)
    branch 1                                  h h o m m m      hint, opening and message of the first hinted turn
    branch 2                                              h h o m m m      ... of the second

One row holds a trunk, padding up to the longest trunk of the batch, and the branches behind each other. A branch sees
the trunk up to where its hint goes in, and itself; its positions go on from there. A hint costs its own tokens and its
turn's, not the prefix again: trunks attend as any causal batch does, and only the few queries of branches take a mask.

Shapes: B rows, M positions of trunk, K of branches, T = M + K, N wanted tokens (padded), G targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from woodshed.engines.local import invariant
from woodshed.learning import packing
from woodshed.learning.packing import Batch, Padded, Row, Target
from woodshed.learning.policy import Policy
from woodshed.records import Hint

_PADDING = -1


@dataclass(frozen=True)
class Tree:
    """A rollout and its hinted turns."""

    row: Row
    """The trunk. Where the rollout has no advantage, it ends with the last hinted turn, and only hinted turns are
    wanted."""
    has_advantage: bool
    targets: tuple[Target, ...]

    @property
    def length(self) -> int:
        """Positions with all branches."""
        return len(self.row.ids) + sum(len(t.teacher.ids) - t.shared for t in self.targets)


@dataclass(frozen=True)
class PaddedTrees:
    """Trees as tensors."""

    padded: Padded
    student_GN: Tensor
    """Where the logits that predict each target's tokens without the hint lie in (B x N) flattened; empty where the
    trunk wants none of them."""
    teacher_GN: Tensor
    """... and with the hint; empty where the branches were left out."""
    targets: Padded | None
    """The targets' own tokens, masks and log-probs, (G, N); None where there are no targets."""


def trees(batch: Batch) -> list[Tree]:
    """One tree for every rollout that has an advantage or a target, in the order of the batch."""
    found: dict[str, list[Target]] = {}
    for target in batch.targets:
        found.setdefault(target.hint.rollout_id, []).append(target)
    made = [Tree(row, True, tuple(found.pop(row.rollout_id, ()))) for row in batch.rows]
    return made + [Tree(_hinted_part(targets), False, tuple(targets)) for targets in found.values()]


def _hinted_part(targets: Sequence[Target]) -> Row:
    """The rollout up to its last hinted turn; the hinted turns' tokens are wanted."""
    in_order = sorted(targets, key=lambda t: t.student.wanted[0])
    wanted = tuple(i for t in in_order for i in t.student.wanted)
    logps = tuple(logp for t in in_order for logp in t.student.logps)
    longest = in_order[-1].student
    return Row(longest.ids, wanted, logps, rollout_id=targets[0].hint.rollout_id)


def pad(
    made: Sequence[Tree], device: torch.device | str = "cpu", *, with_branches: bool = True
) -> PaddedTrees:
    """Trees as right-padded rows. With branches, their messages are wanted behind the trunk's wanted tokens."""
    trunk = max(len(tree.row.ids) for tree in made)
    laid = [_lay_out(tree, trunk, with_branches) for tree in made]
    padded = packing.pad([row for row, _, _ in laid], device)
    width = padded.predict_BN.shape[1]
    hinted = [(b, tree, t) for b, tree in enumerate(made) for t in tree.targets]
    students, teachers = [], []
    beyond = [len(tree.row.wanted) for tree in made]  # first wanted token of the next branch
    index = [{position: n for n, position in enumerate(tree.row.wanted)} for tree in made]
    for b, _tree, target in hinted:
        students.append([b * width + index[b][i] for i in target.student.wanted if i in index[b]])
        teachers.append([b * width + beyond[b] + n for n in range(len(target.teacher.wanted))])
        beyond[b] += len(target.teacher.wanted)
    if with_branches and hinted:
        behind = padded.ids_BT.shape[1] - trunk
        position_BM = torch.arange(trunk, device=device).expand(len(made), -1)
        position_BK = packing.table([positions for _, _, positions in laid], behind, device)
        branch_BK = packing.table([of for _, of, _ in laid], behind, device, padding=_PADDING)
        padded = replace(
            padded,
            positions=sum(tree.length for tree in made),
            positions_BT=torch.cat([position_BM, position_BK], 1),
            visible=visible(branch_BK, _seen(made, branch_BK), trunk),
        )
    return PaddedTrees(
        padded,
        _indices(students, device),
        _indices(teachers if with_branches else [], device),
        packing.pad([t.student for _, _, t in hinted], device) if hinted else None,
    )


def prefixes(made: Sequence[Tree]) -> list[Tree]:
    """The trees as a teacher with other weights needs them: the trunk ends where the last hint goes in."""
    cut = []
    for tree in made:
        end = max(t.shared for t in tree.targets)
        cut.append(Tree(Row(tree.row.ids[:end], ()), False, tree.targets))
    return cut


def _lay_out(tree: Tree, trunk: int, with_branches: bool) -> tuple[Row, list[int], list[int]]:
    """(row, number of the branch that each token behind the trunk belongs to, position of each of them)."""
    ids, wanted = list(tree.row.ids), list(tree.row.wanted)
    logps, of, positions = list(tree.row.logps), [], []
    if with_branches and tree.targets:
        ids += [0] * (trunk - len(ids))
    for number, target in enumerate(tree.targets if with_branches else ()):
        branch = target.teacher.ids[target.shared :]
        wanted += [len(ids) + i - target.shared for i in target.teacher.wanted]
        logps += [0.0] * len(target.teacher.wanted)
        of += [number] * len(branch)
        positions += range(target.shared, len(target.teacher.ids))
        ids += branch
    own = len(tree.row.wanted)
    counted = (*[tree.has_advantage] * own, *[False] * (len(wanted) - own))
    row = Row(tuple(ids), tuple(wanted), tuple(logps), tree.row.advantage, counted)
    return row, of, positions


def _indices(rows: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    return packing.table(rows, max((len(row) for row in rows), default=0), device)


def _seen(made: Sequence[Tree], branch_BK: Tensor) -> Tensor:
    """How much of the trunk each position of a branch may see: up to its hint; padding sees none."""
    most = max(len(tree.targets) for tree in made)
    shared = packing.table([[t.shared for t in tree.targets] for tree in made], most, branch_BK.device)
    return shared.gather(1, branch_BK.clamp(min=0)) * (branch_BK != _PADDING)


def visible(branch_BK: Tensor, seen_BK: Tensor, trunk: int) -> Tensor:
    """(B, 1, K, M + K) true where a position of a branch may attend: the trunk that it sees, and its own branch up to
    itself. Padding sees padding, so that no row of the mask is empty."""
    in_trunk_BKM = torch.arange(trunk, device=branch_BK.device) < seen_BK.unsqueeze(-1)
    same_BKK = branch_BK.unsqueeze(-1) == branch_BK.unsqueeze(-2)
    return torch.cat([in_trunk_BKM, same_BKK.tril()], -1).unsqueeze(1)


def why_not(policy: Policy) -> str:
    """Why this model cannot take branches, or "" where it can: its configuration is read, then it is tried.

    Attention that looks back a fixed distance, or a state instead of keys and values, would ignore the mask.
    """
    config = policy.model.config.get_text_config()
    if reason := invariant.limited_attention(config):
        return reason
    if config._attn_implementation not in ("sdpa", invariant.NAME, "eager"):
        return f"its attention is {config._attn_implementation}"
    gap = _gap(policy)
    bound = 1e-3 if next(policy.model.parameters()).dtype == torch.float32 else 0.2  # bfloat16 rounds
    return "" if gap <= bound else f"one forward and two differ by {gap:.2g} of what a hint changes"


@torch.no_grad()
def _gap(policy: Policy) -> float:
    """Mean difference in log-probs between branches and separate forwards on a made-up rollout, as a share of the mean
    difference that its hints make. Rounding grows with a model's logits, and so does that."""
    vocabulary = policy.model.config.get_text_config().vocab_size
    rng = torch.Generator().manual_seed(0)
    ids = tuple(torch.randint(vocabulary, (36,), generator=rng).tolist())
    targets = []
    for end in (16, 28):
        branch = (*ids[:3], *ids[end - 8 : end])  # three tokens of hint, two of opening, a message of six
        student = Row(ids[:end], tuple(range(end - 6, end)), (0.0,) * 6)
        whole = (*ids[: end - 8], *branch)
        teacher = Row(whole, tuple(range(len(whole) - 6, len(whole))), (0.0,) * 6)
        targets.append(Target(Hint("", 0, "", ""), student, teacher, end - 8, spans=((0, 6),)))
    both = pad([Tree(_hinted_part(targets), False, tuple(targets))], policy.device)
    logps = policy.logits(both.padded).float().log_softmax(-1).flatten(0, 1)
    apart = [
        policy.logits(packing.pad(rows, policy.device)).float().log_softmax(-1)
        for rows in ([t.student for t in targets], [t.teacher for t in targets])
    ]
    gaps = [
        (logps[at_GN] - alone).abs().mean()
        for at_GN, alone in zip((both.student_GN, both.teacher_GN), apart, strict=True)
    ]
    share = float(torch.stack(gaps).max() / (apart[0] - apart[1]).abs().mean())
    return math.inf if math.isnan(share) else share
