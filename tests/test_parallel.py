"""Layouts as values, and sequences cut so that ranks have equal work; what needs processes is in distributed/."""

from __future__ import annotations

import pytest
import torch

from woodshed.parallel import ParallelLayout
from woodshed.parallel.context import chunk_mask, cp_chunks, number_documents
from woodshed.records import LayoutError

DENSE, EXPERT = {"replicate": 2, "shard": 2, "cp": 2}, {"replicate": 1, "shard": 1, "ep": 8}


def test_a_layout_is_a_value():
    layout = ParallelLayout.build(world=8, dense=DENSE, expert=EXPERT)
    assert layout == ParallelLayout.build(8, DENSE, {"ep": 8})
    assert hash(layout) == hash(ParallelLayout.build(8, DENSE, EXPERT))
    assert layout.num_readers == 4
    with pytest.raises(AttributeError):
        layout.world = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_experts_lie_as_dense_weights_unless_told():
    layout = ParallelLayout.build(world=8, dense=DENSE)
    assert (layout.expert.replicate, layout.expert.shard, layout.expert.ep) == (2, 4, 1)


def test_describe_says_who_shares_what():
    text = ParallelLayout.build(world=8, dense=DENSE, expert=EXPERT).describe()
    assert "replicate 2 x shard 2 x cp 2" in text
    assert "copies x shards of a weight: 2 x 4, on 0-3 4-7" in text
    assert "ranks that share a sequence: 2, on 0-1 2-3 4-5 6-7" in text
    assert "ranks that exchange tokens: 8, on 0-7" in text


@pytest.mark.parametrize(
    ("dense", "expert", "parts"),
    [
        ({"shard": 4}, None, ["dense: replicate 1 x shard 4 x cp 1", "4 ranks", "world=8", "must be 8"]),
        (DENSE, {"ep": 4}, ["expert: replicate 1 x shard 1 x ep 4", "must be 8"]),
        ({"shards": 8}, None, ["no axis 'shards'", "replicate, shard, cp"]),
        ({"shard": 8, "cp": 0}, None, ["cp=0", "from 1"]),
        ({"shard": 8.0}, None, ["shard=8.0", "whole numbers"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused(dense, expert, parts: list[str]):
    with pytest.raises(LayoutError) as refused:
        ParallelLayout.build(8, dense, expert)
    assert [part for part in parts if part not in str(refused.value)] == []


def test_meshes_need_the_ranks():
    with pytest.raises(LayoutError, match="no process group"):
        _ = ParallelLayout.build(8, DENSE).dense_mesh


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_pieces_are_the_sequence_and_equal_work(num_ranks: int):
    positions = torch.arange(4 * 2 * num_ranks).expand(2, -1)
    held = [cp_chunks(positions, rank, num_ranks) for rank in range(num_ranks)]
    assert torch.equal(torch.cat(held, dim=1).sort(dim=1).values, positions)
    assert len({int((each + 1).sum()) for each in held}) == 1  # keys that a query sees


def test_documents_begin_where_positions_do():
    packed = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    numbered = number_documents(packed)
    assert numbered is not None
    assert numbered.tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
    assert number_documents(torch.arange(3, 9).expand(2, -1)) is None


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("is_packed", [False, True])
def test_masks_are_those_of_the_whole_sequence(window: int | None, is_packed: bool):
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 2]]) if is_packed else None
    position = torch.arange(8)
    full = (position[None] <= position[:, None]) & (position[None] > position[:, None] - (window or 99))
    full = full.expand(2, 1, 8, 8)
    if documents is not None:
        full = full & (documents[:, None, :, None] == documents[:, None, None, :])
    query, key = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 8, 4)
    found = chunk_mask(2, 5, documents, window, query.device)
    expected = full[:, :, 2:5, :5]
    attend = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(
        attend(query, key[:, :, :5], key[:, :, :5], found),
        attend(query, key[:, :, :5], key[:, :, :5], expected),
    )
