"""The policy's weights as files, and messages over their updates: every version exact, nothing damaged gets through."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from local_server import serving
from torch import Tensor

from woodshed.engines import local, published
from woodshed.engines.engine import Sample, SampleRequest, WeightUpdate, sample_all
from woodshed.engines.http import EndpointSettings, HttpEngine, later_seed
from woodshed.engines.local.server import LocalServer
from woodshed.engines.published import Receiver, read
from woodshed.learning import publish
from woodshed.learning.policy import Policy, PolicySettings
from woodshed.learning.worker import Worker
from woodshed.records import SamplerError, to_json
from woodshed.runs.folder import RunDir
from woodshed.tokens.renderer import Renderer, create_renderer

PROMPT = (5, 6, 7, 8)


class Trainer:
    """A policy whose weights change when they are told to."""

    def __init__(self, model: Path, root: Path, *, lora_rank: int = 0, dtype: str = "bfloat16") -> None:
        settings = PolicySettings.model_validate(
            {"model": str(model), "lora_rank": lora_rank, "dtype": dtype}
        )
        self.policy, loaded = Policy.load(settings, seed=0)
        self.renderer: Renderer = create_renderer(loaded.tokenizer, codec="plain", model_dir=loaded.directory)
        self.worker, self.root, self.version = Worker(self.policy, RunDir(root)), root / "weights", -1
        self._random = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, size: float = 0.02) -> None:
        """Change a few weights, as a small step does in bfloat16."""
        for weight in self.policy.trainable.values():
            noise = torch.randn(weight.shape, generator=self._random)
            weight += size * noise * (torch.rand(weight.shape, generator=self._random) < 0.05)
        self.policy.round_weights()

    def publish(self) -> Path:
        self.version += 1
        update = publish.write(self.worker, self.renderer, self.root, self.version)
        assert update.folder is not None
        return update.folder

    def whole(self) -> dict[str, Tensor]:
        return {name: value for names, value in self.policy.whole_weights() for name in names}


def holds(folder: Path, trainer: Trainer) -> bool:
    """True if a folder has the trainer's weights, bit for bit."""
    found = dict(published.tensors_of(folder))
    wanted = {name: value.reshape(-1).view(torch.uint8).numpy() for name, value in trainer.whole().items()}
    return found.keys() == wanted.keys() and all((found[name] == wanted[name]).all() for name in wanted)


@contextmanager
def receiver() -> Iterator[Receiver]:
    with closing(Receiver(in_memory=True)) as made:
        yield made


def test_a_receiver_follows_bit_for_bit_and_pruning_keeps_what_late_ones_need(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(published, "FULL_EVERY", 4)
    trainer, kinds = Trainer(tiny_model_dir, tmp_path), []
    left = published.SHARED_MEMORY / f"woodshed-{os.getuid()}" / ".mirror.killed.partial"
    left.mkdir(parents=True)
    with receiver() as always, receiver() as sometimes:
        for version in range(10):
            folder = trainer.publish()
            kinds.append(read(folder).kind)
            assert published.latest(trainer.root) == folder
            for each in (always, *((sometimes,) if version in (2, 5, 9) else ())):
                with each.received(folder) as (where, record):
                    assert holds(where, trainer) and record.version == version
            with receiver() as late, late.received(folder) as (where, _):
                assert holds(where, trainer)
            trainer.step()
    assert not left.exists(), "the copy of a receiver that was killed"
    assert kinds == ["full", "delta", "delta", "delta"] * 2 + ["full", "delta"]
    assert sorted(path.name for path in trainer.root.glob("v*")) == ["v000008", "v000009"]
    record = read(folder)
    assert record.tensors["lm_head.weight"] == record.tensors["model.embed_tokens.weight"], "written once"
    whole = read(trainer.root / "v000008").size_bytes
    assert record.size_bytes < 0.25 * whole
    assert not any(path.name.startswith(".mirror") for path in trainer.root.iterdir())


def test_float32_weights_and_adapters_are_published_whole(tiny_model_dir: Path, tmp_path: Path):
    for kind, rank in (("full", 0), ("adapter", 4)):
        trainer = Trainer(tiny_model_dir, tmp_path / kind, lora_rank=rank, dtype="float32")
        for _ in range(3):
            assert read(trainer.publish()).kind == kind
            trainer.step()
        assert len(list(trainer.root.glob("v*"))) == 2
    model = local.load(str(trainer.root.parent.parent / "full" / "weights" / "v000002"), dtype="float32")
    assert model.model.config.tie_word_embeddings is False


Damage = Callable[[Path], None]


def flip(name: str) -> Damage:
    def act(folder: Path) -> None:
        (file,) = folder.glob(name)
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)

    return act


def cut(folder: Path) -> None:
    (file,) = folder.glob("delta-*")
    file.write_bytes(file.read_bytes()[:-20])


def edited(**changes: object) -> Damage:
    def act(folder: Path) -> None:
        record = to_json(replace(read(folder), **changes))  # type: ignore[arg-type]
        (folder / published.RECORD).write_text(json.dumps(record))

    return act


def without_a_tensor(folder: Path) -> None:
    record = read(folder)
    edited(tensors=dict(list(record.tensors.items())[1:]))(folder)


def unchanged(folder: Path) -> None:
    record = read(folder)
    edited(tensors={name: replace(tensor, size=0) for name, tensor in record.tensors.items()})(folder)


def without_a_record(folder: Path) -> None:
    (folder / published.RECORD).unlink()


def half_a_record(folder: Path) -> None:
    (folder / published.RECORD).write_text("{")


DAMAGED: dict[str, tuple[Damage, str]] = {
    "a flipped bit": (flip("delta-*"), "is not what was published|cannot be read"),
    "a cut file": (cut, "cannot be read"),
    "no record": (without_a_record, "cannot be read"),
    "half a record": (half_a_record, "JSON"),
    "another base": (edited(base_fingerprint="00"), "is a difference to v000001"),
    "another set of tensors": (without_a_tensor, "other tensors"),
    "changes without a difference": (unchanged, "changes without a difference"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_version_is_refused_and_the_copy_stays(damage: str, tiny_model_dir: Path, tmp_path: Path):
    spoil, message = DAMAGED[damage]
    trainer = Trainer(tiny_model_dir, tmp_path)
    trainer.publish()
    trainer.step()
    with receiver() as copy:
        with copy.received(trainer.publish()) as (where, _):
            before = {name: data.copy() for name, data in published.tensors_of(where)}
        trainer.step()
        folder = trainer.publish()
        shutil.copytree(folder, tmp_path / "sound")
        spoil(folder)
        with pytest.raises(SamplerError, match=message), copy.received(folder):
            pass
        assert all((data == before[name]).all() for name, data in published.tensors_of(where))
        shutil.rmtree(folder)
        (tmp_path / "sound").rename(folder)
        with copy.received(folder) as (where, _):
            assert holds(where, trainer)


def test_versions_that_are_missing_out_of_order_or_applied_twice_are_refused(
    tiny_model_dir: Path, tmp_path: Path
):
    trainer = Trainer(tiny_model_dir, tmp_path)
    first, second = trainer.publish(), trainer.publish()
    trainer.step()
    third = trainer.publish()
    with receiver() as copy:
        with copy.received(third) as (where, _):
            assert holds(where, trainer)
        with (
            pytest.raises(SamplerError, match="is version 1, and version 2 was received"),
            copy.received(second),
        ):
            pass
        with pytest.raises(SamplerError, match="difference to v000001, and the copy here is version 2"):
            copy.apply(third, read(third))
        with copy.received(third) as (where, _):  # again, as for a second server
            assert holds(where, trainer)
    shutil.rmtree(second)
    with (
        receiver() as late,
        pytest.raises(SamplerError, match="v000001 cannot be read"),
        late.received(third),
    ):
        pass
    flip("model-*")(first)
    with (
        receiver() as late,
        pytest.raises(SamplerError, match="is not what was published"),
        late.received(first),
    ):
        pass
    adapter = Trainer(tiny_model_dir, tmp_path / "adapter", lora_rank=4).publish()
    flip("adapter_model*")(adapter)
    with (
        receiver() as late,
        pytest.raises(SamplerError, match="is not what was published"),
        late.received(adapter),
    ):
        pass


# --- messages over updates --------------------------------------------------------------------------------------------


class Stops:
    """The part of a renderer that an engine of another process needs; nothing stops a message."""

    stop_ids = frozenset({9999})


@contextmanager
def connected(url: str, patience_s: float = 0.0) -> Iterator[HttpEngine]:
    renderer: Renderer = Stops()  # type: ignore[assignment]
    settings = EndpointSettings(url=url)
    with closing(
        HttpEngine(settings, renderer, patience_s=patience_s, sleep=lambda s: time.sleep(s / 20))
    ) as engine:
        yield engine


class Brake:
    """Lets each message of a server come to so many tokens, and no further."""

    def __init__(self, server: LocalServer, tokens: int) -> None:
        self.tokens, self.reached = tokens, threading.Event()
        for engine in server.engines.values():
            self.put_on(engine.scheduler)

    def put_on(self, scheduler: local.scheduler.Scheduler) -> None:  # type: ignore[name-defined]
        step = scheduler.step

        def braked() -> list[object]:
            rows = scheduler._running
            if rows and all(len(row.ids) >= self.tokens for row in rows) and not scheduler._waiting:
                self.reached.set()
                time.sleep(0.002)
                return []
            return step()

        scheduler.step = braked

    def wait(self) -> None:
        """Wait until all messages stand."""
        self.reached.clear()
        assert self.reached.wait(60)

    def release(self) -> None:
        self.tokens = 1 << 30


def update(engine: HttpEngine, trainer: Trainer) -> None:
    folder = trainer.publish()
    engine.update_weights(WeightUpdate(read(folder).kind, folder), trainer.version)


def logps(trainer: Trainer, ids: tuple[int, ...]) -> list[float]:
    """Of all tokens but the first, by the trainer's weights now."""
    with torch.no_grad():
        rows = trainer.policy.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()


def far(sample: Sample, told: list[float], begin: int, count: int) -> float:
    """Largest distance of some tokens' log-probs from those of a version."""
    first = len(PROMPT) - 1 + begin
    pairs = zip(sample.logps[begin : begin + count], told[first : first + count], strict=True)
    return max(abs(a - b) for a, b in pairs)


def test_messages_that_are_cut_go_on_and_every_token_is_of_the_version_that_it_names(
    tiny_model_dir: Path, tmp_path: Path
):
    trainer = Trainer(tiny_model_dir, tmp_path, dtype="float32")
    with serving(tiny_model_dir) as (url, server), connected(url) as engine:
        update(engine, trainer)
        brake, snapshots = Brake(server, 10), []
        futures = engine.submit_all([SampleRequest(PROMPT, 40, seed) for seed in range(3)])
        for _ in range(2):
            brake.wait()
            snapshots.append({name: value.clone() for name, value in trainer.whole().items()})
            trainer.step(0.3)
            update(engine, trainer)
        brake.wait()
        brake.release()
        samples = [future.result(60) for future in futures]
        for sample in samples:
            assert [version for version, _ in sample.versions] == [0, 1, 2]
            assert min(count for _, count in sample.versions) >= 10
        snapshots.append({name: value.clone() for name, value in trainer.whole().items()})
        for version, weights in enumerate(snapshots):
            trainer.policy.model.load_state_dict(weights)
            for sample in samples:
                told, begin = logps(trainer, PROMPT + sample.ids), 0
                for written, count in sample.versions:
                    gap = far(sample, told, begin, count)
                    assert gap < 1e-4 if written == version else gap > 0.1
                    begin += count
        ids, written = samples[0].ids, 40 - samples[0].versions[2][1]
        fresh = SampleRequest(PROMPT + ids[:written], 40 - written, later_seed(0, written))
        assert sample_all(engine, [fresh])[0].ids == ids[written:]
    assert len({later_seed(seed, count) for seed in range(50) for count in range(50)}) == 2500


def test_a_message_keeps_its_adapter_which_is_unloaded_after_it(tiny_model_dir: Path, tmp_path: Path):
    trainer = Trainer(tiny_model_dir, tmp_path, lora_rank=4, dtype="float32")
    with serving(tiny_model_dir) as (url, server), connected(url) as engine:
        trainer.step(0.3)
        update(engine, trainer)
        brake = Brake(server, 5)
        running = engine.submit(SampleRequest(PROMPT, 30, 0))
        brake.wait()
        old = engine.model
        before = {name: value.clone() for name, value in trainer.policy.trainable.items()}
        trainer.step(0.3)
        update(engine, trainer)
        later = sample_all(engine, [SampleRequest(PROMPT, 30, 1)])[0]
        assert later.versions == ((1, 30),) and far(later, logps(trainer, PROMPT + later.ids), 0, 30) < 1e-4
        assert set(server.engines) == {"policy", old, engine.model}
        brake.release()
        sample = running.result(60)
        assert sample.versions == ((0, 30),)
        trainer.policy.load_weights(before)
        assert far(sample, logps(trainer, PROMPT + sample.ids), 0, 30) < 1e-4
        deadline = time.monotonic() + 30
        while old in server.engines and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(server.engines) == {"policy", engine.model}


def patient(url: str) -> HttpEngine:
    """An engine that waits for its server."""
    renderer: Any = Stops()
    return HttpEngine(EndpointSettings(url=url), renderer, patience_s=1e3, sleep=lambda s: time.sleep(0.05))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_server_that_died_and_came_back_gets_its_weights_before_it_samples(
    lora_rank: int, tiny_model_dir: Path, tmp_path: Path
):
    trainer = Trainer(tiny_model_dir, tmp_path, lora_rank=lora_rank, dtype="float32")
    trainer.step(0.3)
    with serving(tiny_model_dir) as (url, _):
        engine = patient(url)
        update(engine, trainer)
    under_way = engine.submit(SampleRequest(PROMPT, 12, 0))
    time.sleep(0.2)
    with closing(engine), serving(tiny_model_dir, int(url.rpartition(":")[2])):
        for sample in (under_way.result(60), sample_all(engine, [SampleRequest(PROMPT, 12, 1)])[0]):
            assert far(sample, logps(trainer, PROMPT + sample.ids), 0, 12) < 1e-4
            assert sample.versions == ((0, 12),)


def test_new_weights_are_taken_by_a_server_that_died_and_came_back(tiny_model_dir: Path, tmp_path: Path):
    trainer = Trainer(tiny_model_dir, tmp_path, lora_rank=4, dtype="float32")
    with serving(tiny_model_dir) as (url, _):
        engine = patient(url)
        update(engine, trainer)
    with closing(engine), serving(tiny_model_dir, int(url.rpartition(":")[2])):
        trainer.step(0.3)
        update(engine, trainer)
        sample = sample_all(engine, [SampleRequest(PROMPT, 12, 0)])[0]
        assert (
            sample.versions == ((1, 12),) and far(sample, logps(trainer, PROMPT + sample.ids), 0, 12) < 1e-4
        )


def test_what_was_held_over_an_update_is_asked_again(tiny_model_dir: Path, tmp_path: Path):
    """A request that the server gets after the pause is answered by the new weights."""
    trainer = Trainer(tiny_model_dir, tmp_path, dtype="float32")
    with serving(tiny_model_dir) as (url, _), connected(url) as engine:
        update(engine, trainer)
        engine.weights._send("POST", "/pause?mode=abort")
        held: Future[Sample] = engine.submit(SampleRequest(PROMPT, 12, 0))
        while not engine.weights._users.total():
            time.sleep(0.001)
        trainer.step(0.3)
        update(engine, trainer)
        sample = held.result(60)
        assert (
            sample.versions == ((1, 12),) and far(sample, logps(trainer, PROMPT + sample.ids), 0, 12) < 1e-4
        )


def test_a_canary_that_fails_once_is_asked_again_and_one_that_fails_twice_ends_it(
    tiny_model_dir: Path, tmp_path: Path
):
    trainer = Trainer(tiny_model_dir, tmp_path, dtype="float32")
    with serving(tiny_model_dir) as (url, server), connected(url) as engine:
        hear, ignored = server.engines["policy"].reload, [1]

        def reload(folder: Path) -> None:
            if ignored[0]:
                ignored[0] -= 1
            else:
                hear(folder)

        server.engines["policy"].reload = reload
        trainer.step(0.3)
        update(engine, trainer)
        assert engine.policy_version == 0 and engine.weights.canary_gap < 1e-4
        ignored[0] = 2
        trainer.step(0.3)
        with pytest.raises(SamplerError, match=r"\(version 1\) twice, and is .* goes on with old ones"):
            update(engine, trainer)
        with pytest.raises(SamplerError, match="twice, and is"):
            sample_all(engine, [SampleRequest(PROMPT, 2, 0)])


def test_damaged_weights_never_reach_the_server(tiny_model_dir: Path, tmp_path: Path):
    trainer = Trainer(tiny_model_dir, tmp_path, dtype="float32")
    with serving(tiny_model_dir) as (url, _), connected(url) as engine:
        update(engine, trainer)
        flip("model-*")(folder := trainer.publish())
        with pytest.raises(SamplerError, match="is not what was published"):
            engine.update_weights(WeightUpdate("full", folder), 1)
        assert sample_all(engine, [SampleRequest(PROMPT, 2, 0)])[0].versions == ((0, 2),)
