"""The trainer's weights on their way to the engine, and the proof that the engine computes with them."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from woodshed.agent.tools import TOOLS
from woodshed.engines.engine import Engine, SampleRequest, WeightUpdate, sample_all
from woodshed.engines.local import LocalEngine
from woodshed.experience.samples import TrainingSample
from woodshed.learning import packing
from woodshed.learning.policy import Policy
from woodshed.records import SamplerError
from woodshed.runs.folder import staged

PROBE = "Write the numbers from one to ten."
PROBE_TOKENS = 16


def publish(policy: Policy, engine: Engine, folder: Path, version: int) -> None:
    """Let the engine write every later token with the policy's weights.

    An engine of another process reads them from a folder below `folder`, whose last two stay.

    Raises:
        SamplerError, ModelError: the engine cannot take them.
    """
    if engine.takes == "shared":
        engine.update_weights(WeightUpdate("shared"), version)
        return
    target = folder / f"{version:06d}"
    with staged(target) as partial:
        if policy.is_adapter:
            policy.export(partial)
        else:
            _write_untied(policy, partial)
    engine.update_weights(WeightUpdate("adapter" if policy.is_adapter else "full", target), version)
    for old in sorted(path for path in folder.iterdir() if path.name < target.name)[:-1]:
        shutil.rmtree(old)


def refuse_another_model(policy: Policy, engine: Engine, temperature: float, max_gap: float) -> None:
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
    gap = disagreement(policy, prompt, sample.ids, sample.logps, temperature)
    if not gap <= max_gap:
        served = engine.description.get("served", "its model")
        raise SamplerError(
            f"the engine, which serves {served!r}, and the trainer differ by {gap:.3f} nats a token, above "
            f"stability.max_logp_gap = {max_gap:g}: they do not compute the same distribution. Serve "
            f"{policy.base or 'the model of the recipe'}, in the precision of policy.dtype, and let the server report "
            "log-probs as it samples (vLLM: --logprobs-mode processed_logprobs)"
        )


def refuse_deaf_engine(
    policy: Policy, engine: Engine, folder: Path, temperature: float, max_gap: float
) -> None:
    """Let an engine of another process take whole weights with noise in them, and compare it with the policy.

    A server may take a folder, answer that all went well and keep a layer as it was: vLLM's CPU build does so with an
    output layer that is tied to its embedding. The policy is left as it was, and is to be published next.

    Args:
        folder: receives the weights, as in `publish`.
        max_gap: most nats a token by which they may differ on average.

    Raises:
        SamplerError: the engine answers by weights that it had before, in part or all.
    """
    if policy.is_adapter or engine.takes == "shared":
        return
    kept = {name: value.to("cpu", copy=True) for name, value in policy.snapshot().items()}
    noise = torch.Generator().manual_seed(0)
    prompt = tuple(engine.renderer.start("", PROBE, TOOLS).ids)
    try:
        policy.load_weights(
            {
                name: value + 0.1 * value.abs().mean() * torch.randn(value.shape, generator=noise)
                for name, value in kept.items()
            }
        )
        publish(policy, engine, folder, 0)
        sample = sample_all(engine, [SampleRequest(prompt, PROBE_TOKENS, seed=0)])[0]
        gap = disagreement(policy, prompt, sample.ids, sample.logps, temperature)
    finally:
        policy.load_weights(kept)
    before = disagreement(policy, prompt, sample.ids, sample.logps, temperature)
    if not gap <= (most := min(max_gap, before / 2)):
        raise SamplerError(
            f"the engine took new weights, and is {gap:.3f} nats a token from them, above {most:.3f}, and {before:.3f} "
            "from those before: it goes on with old ones, in part at least. Serve a copy of the model in whose config "
            "tie_word_embeddings is false, or train an adapter (policy.lora_rank above 0)"
        )


@torch.no_grad()
def disagreement(
    policy: Policy,
    prompt: tuple[int, ...],
    ids: tuple[int, ...],
    logps: tuple[float, ...],
    temperature: float,
) -> float:
    """Mean absolute difference of the engine's log-probs from the policy's, in nats a token."""
    rows = policy.model.get_input_embeddings().num_embeddings
    if max((*prompt, *ids)) >= rows:
        return float("inf")  # an id that the policy does not have
    predicted = tuple(range(len(prompt), len(prompt) + len(ids)))
    padded = packing.pad([TrainingSample((*prompt, *ids), predicted, logps)], policy.device)
    return float((policy.logps(padded, temperature) - padded.logp_sampler_BN).abs().mean())


def _write_untied(policy: Policy, folder: Path) -> None:
    """A Hugging Face folder with the output layer written out, also where it is the embedding.

    vLLM loads weights into the layers that it has, and one build left a tied output layer old and said nothing.
    """
    folder.mkdir(parents=True)
    weights = {name: value.detach().cpu().clone() for name, value in policy.model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(policy.model.config)
    config.tie_word_embeddings = False
    config.save_pretrained(folder)
