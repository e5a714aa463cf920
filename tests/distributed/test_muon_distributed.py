"""Sharded Muon over real processes: equal to full matrices, no byte more than planned, checkpoints that reshard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from worlds import launch

FP32, BF16 = 1e-5, 2e-2


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        pytest.param(4, None, id="4 ranks, every layout"),
        pytest.param(8, ["hsdp", "fsdp_over_ep"], id="8 ranks"),
        pytest.param(2, None, id="2 ranks, every layout", marks=pytest.mark.slow),
        pytest.param(8, None, id="8 ranks, every layout", marks=pytest.mark.slow),
    ],
)
def test_equals_full_matrices(world: int, layouts: list[str] | None):
    """Every layout x kind of unit x even, uneven and empty shards x placement and replica mode, three steps."""
    errors = launch(world, "muon_matrix:run", "float32", layouts)[0]
    assert len(errors) >= 80
    assert {key: error for key, error in errors.items() if not error < FP32} == {}


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        pytest.param(4, ["last_dim"], id="4 ranks"),
        pytest.param(2, None, id="2 ranks, every layout", marks=pytest.mark.slow),
        pytest.param(8, None, id="8 ranks, every layout", marks=pytest.mark.slow),
    ],
)
def test_equals_full_matrices_in_bfloat16(world: int, layouts: list[str] | None):
    """Against an oracle that rounds at the same two points and uses the same products."""
    errors = launch(world, "muon_matrix:run", "bfloat16", layouts)[0]
    assert {key: error for key, error in errors.items() if not error < BF16} == {}


def test_traffic_is_what_the_plan_says():
    ranks = launch(4, "muon_scenarios:traffic")
    for rows in zip(*ranks, strict=True):
        assert len({row["digest"] for row in rows}) == 1
        for row in rows:
            # one all-reduce tells everyone about NaN; nothing is gathered
            assert set(row["counts"]) <= {"alltoall_base_", "allreduce_"}, row
            assert row["counts"].get("allreduce_") == 1
            assert row["counts"].get("alltoall_base_", 0) == row["planned_collectives"], row
            assert row["sent_bytes"] == row["planned_bytes"], row
    whole, cut, *rest = ranks[0]
    assert whole["planned_collectives"] == whole["sent_bytes"] == 0
    # 2 x bytes x elements x (W - 1) / W / W of Shard(1), bfloat16: momentum there, updates back
    assert cut["sent_bytes"] == 2 * 2 * (8 * 96 + 4 * 96) * 3 // 16
    assert cut["buckets"] > 1
    assert all(row["sent_bytes"] > 0 for row in rest)


def test_a_missing_gradient_counts_as_zeros():
    assert max(launch(3, "muon_scenarios:missing_gradients")) == 0


def test_nan_is_raised_everywhere_or_stays_in_its_unit():
    ranks = launch(4, "muon_scenarios:nonfinite")
    for rank, seen in enumerate(ranks):
        assert seen["message"].startswith("NaN or Inf in the gradient")
        assert ("of e, v" if rank == 3 else "another rank") in seen["message"]
        assert not seen["changed"]
        assert seen["skipped"] == {"e": 1, "v": 1}
        assert seen["others"] < 1e-6
        assert seen["alone"]
        assert seen["momentum_clean"]


def test_starved_experts():
    moved = launch(2, "muon_scenarios:starved")[0]
    assert moved["step"] > 0.05  # as full-matrix Muon: a whole step along old momentum
    assert moved["skip"] == 0
    assert moved["decay_only"] == pytest.approx(0.1 * 0.5, rel=1e-4)
    assert moved["skip, others"] == pytest.approx(moved["step, others"], rel=1e-5)


def test_one_norm_over_several_meshes():
    for norms in launch(4, "muon_scenarios:clipping"):
        assert norms["norm"] == pytest.approx(norms["expected"], rel=1e-5)
        assert norms["clipped"] == pytest.approx(1.0, rel=1e-3)


def test_qk_clip_shrinks_logits_by_gamma():
    errors = launch(3, "muon_scenarios:qk_clipping")[0]
    assert max(errors.values()) < 1e-4, errors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    """Three steps on 8 ranks with dense and expert weights on meshes with different numbers of replicas."""
    folder = str(tmp_path_factory.mktemp("checkpoint") / "three")
    return folder, launch(8, "muon_scenarios:save_toy", "dual", folder, 3)[0]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = str(tmp_path_factory.mktemp("checkpoint") / "five")
    return launch(1, "muon_scenarios:save_toy", "single", folder, 5)[0]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (4, "dual"),
        (1, "single"),
        pytest.param(8, "swapped", marks=pytest.mark.slow),
        pytest.param(4, "swapped", marks=pytest.mark.slow),
        (2, "fsdp"),
        pytest.param(8, "dual", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_loads_in_another_world(
    checkpoint: tuple[str, dict[str, torch.Tensor]],
    uninterrupted: dict[str, torch.Tensor],
    world: int,
    layout: str,
):
    """Momentum is bitwise what was saved, and two more steps end where five in a row do."""
    folder, saved = checkpoint
    for loaded, later in launch(world, "muon_scenarios:load_toy", layout, folder, 3, 2):
        assert loaded.keys() == saved.keys() == later.keys() == uninterrupted.keys()
        assert [key for key in saved if not torch.equal(loaded[key], saved[key])] == []
        for key, value in uninterrupted.items():
            torch.testing.assert_close(later[key], value, rtol=1e-4, atol=1e-6, msg=key)


def test_resuming_is_bitwise_in_the_same_world(tmp_path: Path):
    first, second = str(tmp_path / "two"), str(tmp_path / "four")
    launch(2, "muon_scenarios:save_toy", "fsdp", first, 2)
    straight = launch(2, "muon_scenarios:save_toy", "fsdp", second, 4)[0]
    _, resumed = launch(2, "muon_scenarios:load_toy", "fsdp", first, 2, 2)[0]
    assert [key for key in straight if not torch.equal(straight[key], resumed[key])] == []


def test_what_cannot_be_exact_is_refused():
    for said in launch(2, "muon_scenarios:refusals"):
        assert "lost is a plain tensor" in said["plain among sharded"]
        assert "Shard(dim=0)" in said["plain among sharded"]
        assert "fully_shard" in said["plain among sharded"]
        assert "one mesh" in said["two meshes"]
        assert "(2,)" in said["two meshes"] and "(2, 1)" in said["two meshes"]
        assert "named a" in said["tied over two meshes"]
        assert "w: placements" in said["false shard"]
        assert "reduce Partial" in said["partial"]
        assert 'placement="local" moves nothing' in said["local"]
        assert "distribute_tensor" in said["split plain"]
        assert "ranks made different plans" in said["other plans"]
        assert "torch.distributed.checkpoint" in said["another world saved"]
        # torch refuses it before an optimizer sees it; distribute_tensor's uneven Shard(1) is in the matrix above
        assert "uneven sharding" in said["uneven FSDP"]
        assert "gradient" in said["gradient elsewhere"] or said["gradient elsewhere"] == "refused by torch"
