"""Stand-in tokenizers of model families: chat templates written to the documented formats, with their special tokens.

They keep what matters to a renderer (ends of messages, openings, forms of calls and results, thoughts that are kept or
dropped) and leave out the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tiny_model import tiny_tokenizer

LISTED = "{% if tools %}{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}{% endif %}"
"""Tools as JSON lines."""


def chatml(call: str, *, opening: str = "", thought: str = "") -> str:
    """A ChatML template whose calls are written by `call` (of `c`, the function of a call)."""
    return (
        "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
        "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content | trim }}"
        f"{LISTED}<|im_end|>\n{{% endif %}}"
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        f"{thought}"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{% for t in m.tool_calls or [] %}{% set c = t.function %}{% if m.content or not loop.first %}\n{% endif %}"
        f"{call}{{% endfor %}}<|im_end|>\n"
        "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
        "\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% elif m.role == 'user' or not loop.first %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{opening}{{% endif %}}"
    )


KEPT_AFTER_THE_LAST_USER = (
    "{% if loop.index0 > last.user %}<think>\n{{ (m.reasoning_content or '') | trim }}\n</think>\n\n"
    "{% endif %}"
)
HERMES_CALL = '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson if v is mapping or v is iterable else v | string }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>"
)
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n# Tools" + LISTED + "{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n<think>{{ m.reasoning_content or '' }}</think>"
    "{% if m.content %}\n{{ m.content }}{% endif %}{% for t in m.tool_calls or [] %}\n<tool_call>"
    "{{ t.function.name }}\n{% for k, v in t.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MINIMAX = (
    "]~b]system\n{{ messages[0].content }}{% if tools %}<tools>" + LISTED + "</tools>{% endif %}[e~[\n"
    "{% for m in messages[1:] %}{% if m.role == 'assistant' %}]~b]ai\n{{ m.content }}{% if m.tool_calls %}"
    "\n<minimax:tool_call>\n{% for t in m.tool_calls %}"
    '<invoke name="{{ t.function.name }}">\n{% for k, v in t.function.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}'
    "</minimax:tool_call>{% endif %}[e~[\n"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0].role != 'tool' %}]~b]tool{% endif %}\n<response>"
    "{{ m.content }}</response>{% if loop.last or messages[loop.index0 + 2].role != 'tool' %}[e~[\n{% endif %}"
    "{% else %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\nCALL<|eot_id|>"
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'system' %}Today: {{ strftime_now('%d %b %Y') }}\n" + LISTED + "{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
    "RESULT{% elif m.tool_calls %}CALLS{{ eos_token }}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_JSON = MISTRAL.replace(
    "CALLS",
    '[TOOL_CALLS] [{% for t in m.tool_calls %}{"name": "{{ t.function.name }}", "arguments": '
    '{{ t.function.arguments | tojson }}, "id": "{{ t.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]',
).replace(
    "RESULT",
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]',
)
MISTRAL_ARGS = MISTRAL.replace(
    "CALLS",
    "{% for t in m.tool_calls %}[TOOL_CALLS]{{ t.function.name }}[ARGS]{{ t.function.arguments | tojson }}{% endfor %}",
).replace("RESULT", "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]")
MISTRAL_IDS = MISTRAL.replace(
    "CALLS",
    "{% for t in m.tool_calls %}[TOOL_CALLS]{{ t.function.name }}[CALL_ID]{{ t.id }}[ARGS]"
    "{{ t.function.arguments | tojson }}{% endfor %}",
).replace("RESULT", "[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]")
DEEPSEEK = (
    "{{ bos_token }}{% set was = namespace(tool=false) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}{% if not was.tool %}<｜Assistant｜>{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for t in m.tool_calls %}CALL{% endfor %}<｜tool▁calls▁end｜>"
    "{% endif %}<｜end▁of▁sentence｜>{% endif %}{% set was.tool = m.role == 'tool' %}{% endfor %}"
    "{% if add_generation_prompt and not was.tool %}<｜Assistant｜>{% endif %}"
)
"""Lists no tools, and opens no message behind a result."""
DEEPSEEK_3 = DEEPSEEK.replace(
    "CALL",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ t.function.name }}\n```json\n{{ t.function.arguments + '' }}\n```"
    "<｜tool▁call▁end｜>",
)
"""Takes arguments as text."""
DEEPSEEK_31 = DEEPSEEK.replace(
    "CALL",
    "<｜tool▁call▁begin｜>{{ t.function.name }}<｜tool▁sep｜>{{ t.function.arguments | tojson }}<｜tool▁call▁end｜>",
)
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n"
    "{{ m.content }}<|im_end|>{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for t in m.tool_calls %}<|tool_call_begin|>{{ t.id }}"
    "<|tool_call_argument_begin|>{{ t.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>"
    "{% set last = namespace(final=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set last.final = loop.index0 %}{% endif %}{% endfor %}"
    "{% set called = namespace(name='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}<|start|>developer<|message|># Instructions\n\n{{ m.content }}"
    + LISTED
    + "<|end|>"
    "{% elif m.tool_calls %}{% if m.thinking and loop.index0 > last.final %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}{% set called.name = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ called.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PYTHONIC_CALL = (
    "[{% set c = m.tool_calls[0].function %}{{ c.name }}({% for k, v in c.arguments.items() %}"
    "{% if not loop.first %}, {% endif %}{{ k }}={{ v | pprint if v is not string else v | tojson }}{% endfor %})]"
)


class Family(NamedTuple):
    """A family as tests make it."""

    codec: str
    """Format that its template writes."""
    template: str
    special: tuple[str, ...]
    eos: str
    documented: str
    """A call of read_file with path "src/a.py" and count 3, as its documentation writes calls."""
    thought: str = ""
    """What the policy writes before a call, where it thinks."""


TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA_TOKENS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
MISTRAL_TOKENS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *(
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[TOOL_CONTENT]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
    ),
)
DEEPSEEK_TOKENS = tuple(
    f"<｜{name}｜>"
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end"),
        *("tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁output▁begin", "tool▁output▁end"),
    )
)
HERMES_WRITTEN = (
    '<tool_call>\n{"name": "read_file", "arguments": {"path": "src/a.py", "count": 3}}\n</tool_call>'
)
XML_WRITTEN = (
    "<tool_call>\n<function=read_file>\n<parameter=path>\nsrc/a.py\n</parameter>\n<parameter=count>\n3\n"
    "</parameter>\n</function>\n</tool_call>"
)
FAMILIES = {
    "qwen2.5": Family("hermes", chatml(HERMES_CALL), TOOL_TAGS, "<|im_end|>", HERMES_WRITTEN),
    "qwen3": Family(
        "hermes",
        chatml(
            HERMES_CALL,
            thought="{% if m.reasoning_content and loop.index0 > last.user %}<think>\n{{ m.reasoning_content }}\n"
            "</think>\n\n{% endif %}",
        ),
        TOOL_TAGS,
        "<|im_end|>",
        HERMES_WRITTEN,
        "<think>\nHm.\n</think>\n\n",
    ),
    "qwen3-coder": Family("qwen3-coder", chatml(XML_CALL), TOOL_TAGS, "<|im_end|>", XML_WRITTEN),
    "qwen3.5": Family(
        "qwen3-coder",
        chatml(XML_CALL, opening="<think>\n", thought=KEPT_AFTER_THE_LAST_USER),
        TOOL_TAGS,
        "<|im_end|>",
        XML_WRITTEN,
        "Hm.\n</think>\n\n",
    ),
    "glm-4.5": Family(
        "glm-4.5",
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *TOOL_TAGS),
        "<|endoftext|>",
        "<tool_call>read_file\n<arg_key>path</arg_key>\n<arg_value>src/a.py</arg_value>\n<arg_key>count</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "\n<think>Hm.</think>\n",
    ),
    "minimax-m2": Family(
        "minimax-m2",
        MINIMAX,
        ("]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
        "[e~[",
        '<minimax:tool_call>\n<invoke name="read_file">\n<parameter name="path">src/a.py</parameter>\n'
        '<parameter name="count">3</parameter>\n</invoke>\n</minimax:tool_call>',
        "\n",
    ),
    "llama-3": Family(
        "llama-json",
        LLAMA.replace(
            "CALL",
            '{"name": "{{ m.tool_calls[0].function.name }}", '
            '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}',
        ),
        LLAMA_TOKENS,
        "<|eot_id|>",
        '{"name": "read_file", "parameters": {"path": "src/a.py", "count": 3}}',
    ),
    "llama-4": Family(
        "llama-pythonic",
        LLAMA.replace("CALL", PYTHONIC_CALL),
        (*LLAMA_TOKENS, "<|python_start|>", "<|python_end|>"),
        "<|eot_id|>",
        '[read_file(path="src/a.py", count=3)]',
    ),
    "mistral-7b": Family(
        "mistral-json",
        MISTRAL_JSON,
        MISTRAL_TOKENS,
        "</s>",
        '[TOOL_CALLS] [{"name": "read_file", "arguments": {"path": "src/a.py", "count": 3}}]',
    ),
    "devstral": Family(
        "mistral",
        MISTRAL_ARGS,
        MISTRAL_TOKENS,
        "</s>",
        '[TOOL_CALLS]read_file[ARGS]{"path": "src/a.py", "count": 3}',
    ),
    "mistral-small": Family(
        "mistral-id",
        MISTRAL_IDS,
        MISTRAL_TOKENS,
        "</s>",
        '[TOOL_CALLS]read_file[CALL_ID]8zk2Xp0aB[ARGS]{"path": "src/a.py", "count": 3}',
    ),
    "deepseek-v3": Family(
        "deepseek-v3",
        DEEPSEEK_3,
        DEEPSEEK_TOKENS,
        "<｜end▁of▁sentence｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read_file\n```json\n"
        '{"path": "src/a.py", "count": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "deepseek-v3.1": Family(
        "deepseek-v3.1",
        DEEPSEEK_31,
        DEEPSEEK_TOKENS,
        "<｜end▁of▁sentence｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read_file<｜tool▁sep｜>{"path": "src/a.py", "count": 3}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi-k2": Family(
        "kimi-k2",
        KIMI,
        (
            *(
                "<|im_system|>",
                "<|im_user|>",
                "<|im_assistant|>",
                "<|im_middle|>",
                "<|tool_calls_section_begin|>",
            ),
            *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
            "<|tool_call_end|>",
        ),
        "<|im_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.read_file:0<|tool_call_argument_begin|>"
        '{"path": "src/a.py", "count": 3}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "gpt-oss": Family(
        "harmony",
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        "<|return|>",
        "<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>"
        '{"path": "src/a.py", "count": 3}',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
    ),
}


def tokenizer(family: Family) -> Any:
    """A small tokenizer with the special tokens and the template of a family."""
    special = tuple(token for token in family.special if token not in ("<|im_end|>", "<|endoftext|>"))
    made = tiny_tokenizer(
        family.template.replace("%}\n", "%}{{ '\\n' }}"), special
    )  # Jinja drops such newlines
    made.eos_token = family.eos
    made.bos_token = next(
        (t for t in special if t in ("<s>", *LLAMA_TOKENS[:1], *DEEPSEEK_TOKENS[:1])), "<|im_start|>"
    )
    return made
