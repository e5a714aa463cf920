"""The trainer's weights on their way to the engine, and the proof that the engine computes with them."""

from __future__ import annotations

import shutil
from pathlib import Path

from woodshed.agent.tools import TOOLS
from woodshed.engines.engine import Engine, Sample, SampleRequest, WeightUpdate, sample_all
from woodshed.engines.local import LocalEngine
from woodshed.experience.samples import TrainingSample
from woodshed.learning.worker import Worker
from woodshed.records import SamplerError
from woodshed.runs.folder import staged

PROBE = "Write the numbers from one to ten."
PROBE_TOKENS = 16


def publish(worker: Worker, engine: Engine, folder: Path, version: int) -> None:
    """Let the engine write every later token with the policy's weights.

    An engine of this process computes with them, or with a copy where ranks hold parts of them; one of another process
    reads them from a folder below `folder`, whose last two stay.

    Raises:
        SamplerError, ModelError: the engine cannot take them.
    """
    if engine.takes == "shared":
        worker.refresh()
        engine.update_weights(WeightUpdate("shared"), version)
        return
    update = write(worker, folder, version)
    engine.update_weights(update, version)
    remove_old(folder, 2)


def write(worker: Worker, folder: Path, version: int) -> WeightUpdate:
    """Write the policy's weights into a folder below `folder`, for engines of other processes."""
    target = folder / f"{version:06d}"
    with staged(target) as partial:
        worker.write_for_servers(partial)
    return WeightUpdate("adapter" if worker.policy.is_adapter else "full", target)


def remove_old(folder: Path, kept: int) -> None:
    """Remove all weights but those of the newest versions."""
    for old in sorted(path for path in folder.iterdir() if path.name.isdecimal())[:-kept]:
        shutil.rmtree(old)


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
        publish(worker, engine, folder, 0)
        sample = sample_all(engine, [SampleRequest(prompt, PROBE_TOKENS, seed=0)])[0]
        gap = disagreement(worker, prompt, sample, temperature)
    finally:
        worker.remove_noise()
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
