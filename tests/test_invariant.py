"""Attention and products that do not depend on what stands beside a row: values and gradients against PyTorch's and
PEFT's own, and on a card the very bits of sampler and trainer."""

from __future__ import annotations

import itertools
import pickle
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_model import tiny_tokenizer
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from woodshed.engines import local
from woodshed.engines.engine import SampleRequest, SamplerSettings, sample_all
from woodshed.engines.local import LocalEngine, compute_in_model_precision, invariant
from woodshed.experience.samples import TrainingSample
from woodshed.learning import packing, prefix_tree
from woodshed.learning.policy import Policy, add_adapter
from woodshed.tokens.renderer import create_renderer

on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def randn(*shape: int, seed: int = 0, **options: Any) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(**options)


def same_gradients(
    ours: torch.Tensor, plain: torch.Tensor, inputs: list[torch.Tensor], *, atol: float, rtol: float
) -> None:
    """Of a weighed sum, in all inputs."""
    weight = randn(*plain.shape, seed=8, device=plain.device, dtype=plain.dtype)
    found, wanted = (torch.autograd.grad((each * weight).sum(), inputs) for each in (ours, plain))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=rtol)


class Module:
    """What attention asks of a layer."""

    is_causal = True
    num_key_value_groups = 2
    training = False


@pytest.mark.parametrize("queries", [1, 3])
def test_spans_show_each_row_its_own_beginning(queries: int):
    query, key, value = randn(3, 4, queries, 16), randn(3, 2, 40, 16, seed=1), randn(3, 2, 40, 16, seed=2)
    begin, first = torch.tensor([0, 7, 30]), torch.tensor(31)
    spans = invariant.spans(begin, first)
    seen, _ = invariant.attend(Module(), query, key, value, spans, scaling=0.25)
    for row in range(3):
        for q in range(queries):
            columns = slice(int(begin[row]), int(first) + q + 1)
            alone = scaled_dot_product_attention(
                query[row : row + 1, :, q : q + 1],
                key[row : row + 1, :, columns],
                value[row : row + 1, :, columns],
                enable_gqa=True,
                scale=0.25,
            )
            torch.testing.assert_close(seen[row : row + 1, q : q + 1], alone.transpose(1, 2))


CARD = pytest.param("cuda", marks=on_a_card)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("device", ["cpu", CARD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_queries_attend_as_if_keys_were_copied(queries: int, device: str, dtype: torch.dtype):
    query, key, value = inputs = [  # as a projection leaves them: the heads lie inside the positions
        randn(2, length, heads, 16, seed=heads + length, device=device, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for length, heads in ((queries, 6), (12, 2), (12, 2))
    ]
    mask = randn(2, 1, queries, 12, seed=5, device=device) > -0.5
    mask[..., 0] = True
    plain = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True, scale=0.3).transpose(1, 2)
    ours = invariant.attend_few(query, key, value, mask, 0.3)
    atol, rtol = (2e-2, 2e-2) if dtype == torch.bfloat16 else (2e-6, 2e-5)
    torch.testing.assert_close(ours, plain, atol=atol, rtol=rtol)
    same_gradients(ours, plain, inputs, atol=2 * atol, rtol=rtol)


@pytest.mark.parametrize("device", ["cpu", CARD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_branches_attend_as_under_one_mask(device: str, dtype: torch.dtype):
    trunk, few = 70, 9
    query, key, value = inputs = [
        randn(2, trunk + few, heads, 16, seed=heads, device=device, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (4, 2, 2)
    ]
    mask = torch.ones(trunk + few, trunk + few, dtype=torch.bool, device=device).tril()
    mask[-few:, trunk // 2 : trunk] = False
    ours = invariant.attend_branching(Module(), query, key, value, mask[-few:].expand(2, 1, -1, -1))
    plain = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)
    atol, rtol = (2e-2, 2e-2) if dtype == torch.bfloat16 else (2e-6, 2e-5)
    torch.testing.assert_close(ours, plain, atol=atol, rtol=rtol)
    same_gradients(ours, plain, inputs, atol=4 * atol, rtol=rtol)


def model_of(intermediate: int = 128, *, installed: bool = True) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=348,
        hidden_size=64,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    if installed:
        invariant.install(model)
    return model


def adapted() -> Any:
    config = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name
        model = get_peft_model(model_of(), config).eval()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_B" in name:
            parameter.data = randn(*parameter.shape, seed=index) * 0.1
    return model


def test_an_adapter_that_adds_in_place_gives_pefts_values_and_gradients():
    theirs, ours = adapted(), compute_in_model_precision(adapted())
    ids = torch.randint(0, 348, (2, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
    for model in (theirs, ours):
        model(input_ids=ids).logits.log_softmax(-1)[..., 7].sum().backward()
    named = dict(theirs.named_parameters())
    moved = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert len(moved) == 2 * 7 * 2
    for name, gradient in moved.items():
        torch.testing.assert_close(gradient, named[name].grad)


def test_an_adapter_that_is_off_or_merged_is_pefts_own():
    ours, ids = compute_in_model_precision(adapted()), torch.arange(6)[None]
    on = ours(input_ids=ids).logits
    with ours.disable_adapter():
        torch.testing.assert_close(ours(input_ids=ids).logits, model_of()(input_ids=ids).logits)
    ours.merge_adapter()
    torch.testing.assert_close(ours(input_ids=ids).logits, on)
    ours.unmerge_adapter()
    torch.testing.assert_close(ours(input_ids=ids).logits, on)


def test_long_sums_are_taken_by_a_class_of_their_own():
    model = model_of(invariant.LONG)
    long = {name for name, module in model.named_modules() if type(module) is invariant.Linear}
    assert long == {f"model.layers.{i}.mlp.down_proj" for i in range(2)}
    x = randn(3, invariant.LONG)
    layer = model.model.layers[0].mlp.down_proj
    torch.testing.assert_close(layer(x), x @ layer.weight.T)


def test_norms_keep_their_numbers_and_those_of_another_kind_stay():
    class OneMoreRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * (1 + self.weight)

    plain, model = model_of(installed=False), model_of()
    for name, module in plain.named_modules():
        if name.endswith("norm"):
            ours = model.get_submodule(name)
            assert type(ours) is invariant.RMSNorm
            for dtype, weight in itertools.product((torch.float32, torch.bfloat16), repeat=2):
                module.to(weight)
                ours.to(weight)
                x = randn(3, 64, dtype=dtype)
                assert ours(x).dtype == module(x).dtype
                rounding = 0.0 if torch.float32 == dtype == weight else 1e-2
                torch.testing.assert_close(ours(x), module(x), rtol=rounding, atol=0.0)
    model.model.norm = OneMoreRMSNorm(64)
    invariant.install(model)
    assert type(model.model.norm) is OneMoreRMSNorm
    assert torch.equal(
        pickle.loads(pickle.dumps(model.model.layers[0].input_layernorm)).weight, torch.ones(64)
    )


def test_an_adapter_with_other_targets_or_of_another_kind_is_pefts_own():
    ids = torch.arange(6)[None]
    made = []
    for convert in (compute_in_model_precision, lambda model: model):
        model = adapted()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(3)
            convert(model)
            model.add_adapter("few", LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
            dora = LoraConfig(r=2, target_modules=["v_proj"], use_dora=True, task_type="CAUSAL_LM")
            model.add_adapter("dora", dora)
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_B" in name:
                parameter.data = randn(*parameter.shape, seed=index) * 0.1
        found = []
        for name in ("few", "dora", "default", []):
            model.base_model.set_adapter(name)
            found.append(model(input_ids=ids).logits)
        made.append(found)
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs)


# --- on a card ------------------------------------------------------------------------------------------------------


@on_a_card
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_causal_attention_and_its_gradient_are_pytorchs(dtype: torch.dtype):
    atol, rtol = (2e-2, 2e-2) if dtype == torch.bfloat16 else (2e-6, 2e-5)
    for width, length in ((64, 300), (80, 65), (16, 1)):
        query, key, value = inputs = [
            randn(2, length, h, width, seed=h, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
            for h in (6, 2, 2)
        ]
        ours, _ = invariant.attend(Module(), query, key, value, None)
        plain = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )
        torch.testing.assert_close(ours, plain, atol=atol, rtol=rtol)
        same_gradients(ours, plain, inputs, atol=atol, rtol=rtol)


def test_causal_attention_can_be_computed_again(monkeypatch: pytest.MonkeyPatch):
    """As activation checkpointing does, which gives saved tensors only once."""

    def attend(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return scaled_dot_product_attention(query, *rest[:2], is_causal=True, enable_gqa=True).transpose(1, 2)

    kernels = SimpleNamespace(attend=attend)  # those of a card need Triton
    monkeypatch.setitem(sys.modules, "woodshed.engines.local.kernels", kernels)
    monkeypatch.setattr(local, "kernels", kernels, raising=False)
    query, key, value = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (4, 2, 2))

    def attended() -> torch.Tensor:
        return invariant._Causal.apply(query, key, value, 8**-0.5, None)  # pyright: ignore[reportReturnType]

    gradients = torch.autograd.grad(attended().square().sum(), (query, key, value))
    again = torch.autograd.grad(checkpoint(attended, use_reentrant=False).square().sum(), (query, key, value))
    assert all(map(torch.equal, again, gradients))


@on_a_card
def test_unsplit_products_leave_the_settings_as_they_were():
    matmul = torch.backends.cuda.matmul

    def settings() -> tuple[Any, ...]:
        return (
            torch.backends.cuda.preferred_blas_library(),
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction_split_k,
        )

    before = settings()
    with pytest.raises(KeyError), invariant.unsplit():
        assert settings() != before
        raise KeyError
    assert settings() == before


@on_a_card
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_branches_are_taken_on_a_card(dtype: torch.dtype):
    model = add_adapter(model_of(4096).to("cuda", dtype), 16)
    assert prefix_tree.why_not(Policy(model, is_adapter=True)) == ""


@on_a_card
@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize("max_rows", [5, 64])
def test_sampler_and_trainer_agree_to_the_last_bit(with_adapter: bool, max_rows: int):
    model = model_of(4096).to("cuda", torch.bfloat16)
    if with_adapter:
        model = add_adapter(model, 16)
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_" in name:
                parameter.data = parameter.data.float()
            if "lora_B" in name:
                parameter.data = randn(*parameter.shape, seed=index).cuda() * 0.1
    else:
        model.requires_grad_(True)
    policy = Policy(model, is_adapter=with_adapter)
    sampler = LocalEngine(model, create_renderer(tiny_tokenizer()), SamplerSettings(max_rows=max_rows))
    rng = torch.Generator().manual_seed(2)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 300, (count,), generator=rng).tolist())

    head, rows = some(30), []
    asked = [SampleRequest(head + some(5 + 9 * i), 40, i) for i in range(12)]
    for turn in range(
        3
    ):  # goes on from what was computed before: all but a turn, all but one token, one row alone
        samples = sample_all(sampler, asked)
        for request, sample in zip(asked, samples, strict=True):
            ids = (*request.prompt_ids, *sample.ids)
            rows.append(TrainingSample(ids, tuple(range(len(request.prompt_ids), len(ids))), sample.logps))
        if turn == 0:
            asked = [SampleRequest((*rows[i].ids, *some(7)), 30, 100 + i) for i in range(12)]
        else:
            asked = [SampleRequest(asked[0].prompt_ids, 30, 200)]
    for make_batch, count in itertools.product((packing.pad, packing.pack), (1, 5, 24)):
        for begin in range(0, len(rows), count):
            padded = make_batch(rows[begin : begin + count], policy.device)
            gap = (policy.logps(padded, 1.0) - padded.logp_sampler_BN) * padded.mask_BN
            assert not gap.any()
