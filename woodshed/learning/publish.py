"""The trainer's weights on their way to the engine, and the proof that the engine computes with them."""

from __future__ import annotations

import shutil
from pathlib import Path

from woodshed.agent.tools import TOOLS
from woodshed.engines import published
from woodshed.engines.engine import Engine, Sample, SampleRequest, WeightUpdate, sample_all
from woodshed.engines.local import LocalEngine
from woodshed.engines.published import Canary, Published
from woodshed.experience.samples import TrainingSample
from woodshed.learning.worker import Worker
from woodshed.records import SamplerError
from woodshed.runs.files import staged, sweep
from woodshed.tokens.renderer import Renderer

PROBE = "Write the numbers from one to ten."
PROBE_TOKENS = 16
CANARY_TOKENS = 64


def publish(worker: Worker, engine: Engine, folder: Path, version: int) -> None:
    """Let the engine write every later token with the policy's weights.

    An engine of this process computes with them, or with a copy where ranks hold parts of them; one of another process
    reads them from a folder below `folder`.

    Raises:
        SamplerError, ModelError: the engine cannot take them.
    """
    if engine.takes == "shared":
        worker.refresh()
        engine.update_weights(WeightUpdate("shared"), version)
        return
    engine.update_weights(write(worker, engine.renderer, folder, version), version)


def write(
    worker: Worker, renderer: Renderer, root: Path, version: int, kept: int = published.KEPT
) -> WeightUpdate:
    """Publish the policy's weights as a folder below `root`, for engines of other processes.

    Whole bfloat16 weights are published as the difference to the version before, and in full at first and every
    `FULL_EVERY` versions. A version that is published again, with weights that changed meanwhile, replaces its folder.

    Args:
        kept: newest versions that stay, for engines that are behind.
    """
    sweep(root)
    before = worker.newest
    is_next = before is not None and before[0].parent == root and before[1].version < version
    is_delta = worker.has_differences and is_next and worker.since_full + 1 < published.FULL_EVERY
    kind = "adapter" if worker.policy.is_adapter else "delta" if is_delta else "full"
    base = before if is_delta else None
    target = root / published.name_of(version)
    with staged(target) as partial:
        partial.mkdir()
        tensors = worker.write_for_servers(partial, kind)
        files = {tensor.file for tensor in tensors.values()}
        record = Published(
            version,
            kind,
            tensors,
            canary_of(worker, renderer),
            base[0].name if base else "",
            base[1].fingerprint if base else "",
            sum((partial / file).stat().st_size for file in files),
        )
        published.finish(partial, record)
    published.announce(target, kept)
    worker.newest, worker.since_full = (target, record), worker.since_full + 1 if is_delta else 0
    return WeightUpdate(kind, target)


def canary_of(worker: Worker, renderer: Renderer) -> Canary:
    """Log-probs of a fixed prompt by the policy, which an engine with its weights must find, too."""
    ids = tuple(renderer.start("", PROBE, TOOLS).ids)[:CANARY_TOKENS]
    sample = TrainingSample(ids, tuple(range(1, len(ids))), (0.0,) * (len(ids) - 1))
    return Canary(ids, tuple(worker.score(sample, temperature=1.0)))


def refuse_another_model(worker: Worker, engine: Engine, temperature: float, max_gap: float) -> None:
    """Sample one short message, and compare its log-probs with the policy's for every engine but our local one.

    Args:
        max_gap: most nats a token by which they may differ on average.

    Raises:
        SamplerError: the engine answers without token ids, or computes with other weights or another distribution.
    """
    if type(engine) is LocalEngine:  # computes with the policy's own module
        return
    prompt = tuple(engine.renderer.start("", PROBE, TOOLS).ids)
    sample = sample_all(engine, [SampleRequest(prompt, PROBE_TOKENS, seed=0)])[0]
    gap = disagreement(worker, prompt, sample, temperature)
    if not gap <= max_gap:
        served = engine.description.get("served", "its model")
        raise SamplerError(
            f"the engine, which serves {served!r}, and the trainer differ by {gap:.3f} nats a token, above "
            f"{max_gap:g}: they do not compute the same distribution. Serve "
            f"{worker.policy.base or 'the model of the recipe'}, in the precision of policy.dtype, and let the server "
            "report log-probs as it samples (vLLM: --logprobs-mode processed_logprobs)"
        )


def refuse_deaf_engine(
    worker: Worker, engine: Engine, folder: Path, temperature: float, max_gap: float
) -> None:
    """Let an engine of another process take whole weights with noise in them, and compare it with the policy.

    A server may take a folder, answer that all went well and keep a layer as it was: a build of vLLM did so with an
    output layer that is tied to its embedding. The policy is left as it was, and is to be published next.

    Args:
        folder: receives the weights, as in `publish`.
        max_gap: most nats a token by which they may differ on average.

    Raises:
        SamplerError: the engine answers by weights that it had before, in part or all.
    """
    if worker.policy.is_adapter or engine.takes == "shared":
        return
    prompt = tuple(engine.renderer.start("", PROBE, TOOLS).ids)
    worker.add_noise()
    try:
        publish(worker, engine, folder / "noise", 0)
        sample = sample_all(engine, [SampleRequest(prompt, PROBE_TOKENS, seed=0)])[0]
        gap = disagreement(worker, prompt, sample, temperature)
    finally:
        worker.remove_noise()
        shutil.rmtree(folder / "noise", ignore_errors=True)
    before = disagreement(worker, prompt, sample, temperature)
    if not gap <= (most := min(max_gap, before / 2)):
        raise SamplerError(
            f"the engine took new weights, and is {gap:.3f} nats a token from them, above {most:.3f}, and {before:.3f} "
            "from those before: it goes on with old ones, in part at least. Serve a copy of the model in whose config "
            "tie_word_embeddings is false, or train an adapter (policy.lora_rank above 0)"
        )


def disagreement(worker: Worker, prompt: tuple[int, ...], sample: Sample, temperature: float) -> float:
    """Mean absolute difference of the engine's log-probs from the policy's, in nats a token."""
    ids = (*prompt, *sample.ids)
    if max(ids) >= worker.policy.model.get_input_embeddings().num_embeddings:
        return float("inf")  # an id that the policy does not have
    predicted = tuple(range(len(prompt), len(ids)))
    logps = worker.score(TrainingSample(ids, predicted, sample.logps), temperature)
    return sum(abs(a - b) for a, b in zip(logps, sample.logps, strict=True)) / len(logps)
