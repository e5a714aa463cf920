"""Bytes and seconds of a weight update, on real gradients: what a trainer publishes, and a receiver that follows it.

    python benchmarks/weight_updates.py --out benchmarks/results/weight_updates.json

SmolLM2-135M reads source code of this package, and AdamW takes steps on all weights in bfloat16, with float32 copies,
or on an adapter. After every step the weights are published, and a receiver's copy is compared with the trainer's, bit
for bit. Shares are of the whole model in bfloat16. On a CPU the long chain is that of the model's first layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import woodshed
from woodshed.engines import published
from woodshed.engines.published import Receiver
from woodshed.learning import publish
from woodshed.learning.policy import Policy, PolicySettings
from woodshed.learning.worker import Worker
from woodshed.runs import machine
from woodshed.runs.folder import RunDir
from woodshed.tokens.renderer import create_renderer

SETTINGS = {
    "whole weights, 1e-6": (0, 1e-6),
    "whole weights, 3e-6": (0, 3e-6),
    "adapter of rank 8, 1e-4": (8, 1e-4),
}
"""Rank of the adapter and learning rate."""
CHAINS = ((0, 10), (6, 50))
"""First layers that are used, 0 for all, and steps."""
ROWS, TOKENS = 2, 128


def source_code(tokenizer: Any) -> torch.Tensor:
    """Ids of the package's own source code, in order of paths."""
    files = sorted(Path(woodshed.__file__).parent.rglob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return torch.tensor(tokenizer(text[:2_000_000]).input_ids)


def is_equal(folder: Path, policy: Policy) -> bool:
    """True if a folder has the policy's weights, bit for bit."""
    found = {name.replace(".default", ""): data for name, data in published.tensors_of(folder)}
    for names, value in policy.whole_weights():
        data = value.to("cpu", torch.bfloat16).contiguous().reshape(-1).view(torch.uint8).numpy()
        for name in names:
            if (
                name.replace(".default", "") in found
                and not (found[name.replace(".default", "")] == data).all()
            ):
                return False
    return bool(found)


def measure(name: str, model: str, layers: int, steps: int, root: Path) -> dict[str, Any]:
    """Train, publish and receive; a row of figures."""
    rank, rate = SETTINGS[name]
    settings = PolicySettings.model_validate({"model": model, "lora_rank": rank, "dtype": "bfloat16"})
    policy, loaded = Policy.load(settings, seed=0)
    if layers:
        body = policy.model.get_base_model().model if rank else policy.model.model
        body.layers = body.layers[:layers]
        policy.model.config.num_hidden_layers = layers
        policy.find_weights()
    worker = Worker(policy, RunDir(root / "run"))
    renderer = create_renderer(loaded.tokenizer, codec="plain", model_dir=loaded.directory)
    ids = source_code(loaded.tokenizer)
    optimizer = torch.optim.AdamW(policy.trainable.values(), lr=rate, weight_decay=0.0)
    whole = 2 * sum(each.numel() for name, each in policy.model.named_parameters() if "lora_" not in name)
    shares, write_s, receive_s, exact = [], [], [], 0
    with closing(Receiver(in_memory=True)) as receiver:
        for step in range(steps + 1):
            begun = time.perf_counter()
            folder = publish.write(worker, renderer, root / "weights", step).folder
            assert folder is not None
            written = time.perf_counter()
            with receiver.received(folder) as (where, record):
                received = time.perf_counter()
                exact += is_equal(where, policy)
            if record.kind != "full" and step:
                shares.append(record.size_bytes / whole)
                write_s.append(written - begun)
                receive_s.append(received - written)
            first = step * ROWS * TOKENS % (len(ids) - ROWS * TOKENS)
            batch = ids[first : first + ROWS * TOKENS].view(ROWS, TOKENS)
            policy.model(input_ids=batch, labels=batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.trainable.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            policy.round_weights()
    return {
        "weights": name,
        "layers": layers or policy.model.config.num_hidden_layers,
        "steps": steps,
        "whole_bytes": whole,
        "share_mean": statistics.mean(shares),
        "share_max": max(shares),
        "write_s_median": statistics.median(write_s),
        "receive_s_median": statistics.median(receive_s),
        "exact": exact,
        "versions": steps + 1,
    }


def main() -> None:
    """Print the rows, and write them as JSON."""
    parser = argparse.ArgumentParser(description="Bytes and seconds of weight updates on real gradients.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for layers, steps in CHAINS:
        for name in SETTINGS:
            with tempfile.TemporaryDirectory() as temporary:
                rows.append(measure(name, options.model, layers, steps, Path(temporary)))
            print(json.dumps(rows[-1]), flush=True)
    report = {"model": options.model, "rows": rows, "machine": machine.describe()}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
