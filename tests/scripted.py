"""Scripted attempts for tests: a small real tokenizer, a task of one file, and a player of messages."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from woodshed.agent import AgentSettings, Attempt, specs, tools, workspace_files
from woodshed.engines.engine import sample_all
from woodshed.engines.scripted import ScriptedEngine
from woodshed.records import Environment, Rollout, Task
from woodshed.sandbox import SandboxSpec, open_sandbox
from woodshed.tokens.renderer import Renderer, create_renderer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODULE = "def double(x):\n    raise NotImplementedError\n\n\ndef halve(x):\n    return x // 2\n"
SOLVED = MODULE.replace("raise NotImplementedError", "return 2 * x")

READ = "<call>read_file calc.py 1 2</call>"
EDIT = "<call>edit_file calc.py\n<<<<\n    raise NotImplementedError\n====\n    return 2 * x\n>>>>\n</call>"
TEST = "<call>shell python3 -c 'import calc; print(calc.double(4))'</call>"
FINISH = "<call>finish</call>"
UNKNOWN = "<call>view calc.py</call>"
UNREADABLE = "<call>edit_file calc.py\n<<<<\n</call>"
PROSE = "I am done!"


class Hasty(AgentSettings):
    max_errors = 3


SETTINGS = Hasty(max_turns=12, turn_tokens=160, rollout_tokens=2000)


@functools.cache
def renderer(codec: str = "plain") -> Renderer:
    """A byte-level BPE tokenizer of 600 tokens with a ChatML template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    sources = [Path(str(module.__file__)).read_text() for module in (specs, tools, workspace_files)]
    core.train_from_iterator(["".join(sources), READ, EDIT, TEST, FINISH], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=CHATML)
    return create_renderer(tokenizer, codec=codec)


NO_ENVIRONMENT = Environment("3.11", (), ("calc",))


def calc_task(folder: Path, environment: Environment = NO_ENVIRONMENT) -> Task:
    """A task of one file, whose commands need nothing but a Python. Its name is the folder's."""
    workspace = folder / "environment" / "workspace"
    workspace.mkdir(parents=True)
    (workspace / "calc.py").write_text(MODULE)
    (workspace / "data.bin").write_bytes(b"\xff\0")
    return Task(
        id=f"{folder.name:0>16}",
        name=folder.name,
        folder=folder,
        instruction="Implement double in calc.py, lines 1-2.",
        environment=environment,
        allowed_paths=("calc.py",),
        fail_to_pass=(),
        pass_to_pass=(),
        operator="stub",
        level=1,
        target_path="calc.py",
        target_symbol="double",
        target_lines=(1, 2),
        test_command="python3 -c 'import calc; print(calc.double(4))'",
    )


def play(task: Task, *messages: str, settings: AgentSettings = SETTINGS, codec: str = "plain") -> Rollout:
    """The attempt that writes these messages, then finishes."""
    sandbox = open_sandbox(SandboxSpec(lowers=(task.folder / "environment" / "workspace",)))
    attempt = Attempt(task, sandbox, renderer(codec), settings, rollout_id=f"test-0-{task.name}-0")
    finish = renderer(codec).codec.format("finish", {}, tools.TOOLS)
    sampler = ScriptedEngine(renderer(codec), itertools.chain(messages, itertools.repeat(finish)))
    try:
        while not attempt.done:
            attempt.act(sample_all(sampler, [attempt.request()])[0])
        return attempt.finish()
    except BaseException:
        sandbox.close()
        raise
