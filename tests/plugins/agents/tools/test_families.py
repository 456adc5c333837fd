# SPDX-License-Identifier: Apache-2.0
"""Three turns with tools through eleven chat templates: every id and every mask of the row, written by hand.

The templates are shortened, with the marks, roles, order, white space and generation prompts of the published ones:
the same turns give the same responses. The tokenizer is the same for all, with each family's control tokens."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from episodes import episode
from transformers import AutoTokenizer

from whet.config.schema import EnvironmentConfig
from whet.plugins.agents.tools.toolbox import FORM, described, toolbox_of
from whet.rollout.batch import rows_of

TOOL = '''
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b
'''
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
SCHEMA = {"type": "function", "function": FUNCTION}
ASKED = "1+2?"  # the prompt of `episode`

QWEN25 = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'You are Qwen.' }}{%- endif %}
{{- '\\n\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nA call: <tool_call>\\n{\\"name\\": <function-name>}\\n</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{\\"name\\": \\"' + call.function.name + '\\", \\"arguments\\": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Thoughts before the last question are removed; an empty one is written into a last answer that has none.
QWEN3 = (
    QWEN25.replace(
        "{%- for message in messages %}\n",
        "{%- set ns = namespace(query=0) %}{%- for m in messages %}{%- if m.role == 'user' and not "
        "m.content.startswith('<tool_response>') %}{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for message in messages %}{%- set content = message.content %}{%- set thought = '' %}"
        "{%- if message.role == 'assistant' and '</think>' in content %}"
        "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{%- if message.role == 'assistant' and loop.index0 > ns.query and (loop.last or thought) %}"
        "{%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content %}{%- endif %}\n",
        1,
    )
    .replace("+ message.content + '<|im_end|>", "+ content + '<|im_end|>")
    .replace("{%- if message.content %}{{- '\\n' + message.content }}", "{%- if content %}{{- '\\n' + content }}")
)

LLAMA3 = """\
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n<|eot_id|>' }}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools %}{{- 'Functions:\\n\\n' }}
{%- for t in tools %}{{- t | tojson + '\\n\\n' }}{%- endfor %}{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once') }}{%- endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{\\"name\\": \\"' + message.tool_calls[0].function.name }}
{{- '\\", \\"parameters\\": ' + message.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Nemo: user and assistant take turns, messages with tool calls do not count; tools stand before the last question.
MISTRAL = """\
{%- set ns = namespace(index=0) %}
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list %}
{{- '<s>' }}{%- for message in messages %}
{%- if not (message.role == 'tool' or message.tool_calls is defined) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == questions[-1] %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('IDs should have length 9') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', \\"id\\": \\"' + call.id + '\\"}' }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']</s>' }}
{%- elif message.role == 'assistant' %}{{- message.content + '</s>' }}
{%- else %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('IDs should have length 9') }}{%- endif %}
{{- '[TOOL_RESULTS]{\\"content\\": ' + message.content + ', \\"call_id\\": \\"' + message.tool_call_id }}
{{- '\\"}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"""

# Small 3.2: calls and results have the id between marks of their own.
MISTRAL_SMALL = """\
{{- '<s>[SYSTEM_PROMPT]You are Mistral.[/SYSTEM_PROMPT]' }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('IDs should have length 9') }}{%- endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}{{- '</s>' }}
{%- elif message.role == 'assistant' %}{{- message.content + '</s>' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('IDs should have length 9') }}{%- endif %}
{{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}"""

# Results have a role of their own; the line break after the last one depends on what follows.
HERMES3 = """\
{{- '<s><|im_start|>system\\nYou call functions.\\n<tools>' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '</tools>\\nA call: <tool_call>\\n{\\"name\\": <function-name>}\\n</tool_call><|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role != 'tool' and not message.tool_calls %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{\\"name\\": \\"' + call.function.name + '\\", \\"arguments\\": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- else %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>tool\\n' }}{%- endif %}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}{%- if not loop.last %}{{- '\\n' }}{%- endif %}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Calls are XML; results are one user message.
QWEN3_CODER = """\
{{- '<|im_start|>system\\nYou are Qwen.\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n<function>\\n<name>' + tool.function.name + '</name>\\n</function>' }}{%- endfor %}
{{- '\\n</tools>\\n\\n<tool_call>\\n<function=example>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content | trim + '\\n' }}{%- endif %}
{%- for call in message.tool_calls %}{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + value | string + '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role != 'tool' %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user\\n' }}{%- endif %}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# No tools and no system role: its text comes before the first question; user and assistant take turns.
GEMMA = """\
{{- '<bos>' }}{%- set prefix = '' %}{%- set rest = messages %}
{%- if messages[0].role == 'system' %}{%- set prefix = messages[0].content + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Gemma's first templates refuse a system message.
REFUSES_SYSTEM = (
    "{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
)

# The tools are a field of the system message; any role is written as it is.
PHI = """\
{%- for message in messages %}
{%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{- '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{%- else %}{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- '<|endoftext|>' }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """A template, its control tokens, and a conversation: opening, then turns and the text between them."""

    template: str
    tokens: tuple[str, ...]
    end: str
    opening: str
    parts: tuple[str, ...]  # turn, between, turn, between, turn; turns without their end
    parser: str | None = None
    role: str = "tool"
    ends: tuple[str, ...] = ()  # of the turns, where they differ
    num_calls: int | None = None  # unset: as often as "name" is in the turns


# Harmony: a message goes to a recipient; thoughts and calls before the last answer are written in another order.
GPT_OSS = """\
{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|># Tools' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '<|end|>' }}{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set last.name = none %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{%- set call = message.tool_calls[0].function %}{%- set last.name = call.name %}
{%- if message.content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}{%- set last.name = none %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{- raise_exception('a tool message without a call before it') }}{%- endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

ONE, TWO = '{"name": "add", "arguments": {"a": 1, "b": 2}}', '{"name": "add", "arguments": {"a": 3, "b": 4}}'
TAGGED, TAGGED_TWO = f"<tool_call>\n{ONE}\n</tool_call>", f"<tool_call>\n{TWO}\n</tool_call>"
QWEN_OPENING = (
    f"<|im_start|>system\nYou are Qwen.\n\n# Tools\n<tools>\n{json.dumps(SCHEMA)}\n</tools>\nA call: <tool_call>\n"
    '{"name": <function-name>}\n</tool_call><|im_end|>\n'
    f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"
)
QWEN_TOKENS = ("<|im_start|>", "<|im_end|>")


def qwen_results(*results: str) -> str:
    shown = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
    return f"\n<|im_start|>user{shown}<|im_end|>\n<|im_start|>assistant\n"


def llama_result(result: str) -> str:
    shown = json.dumps(result)
    return (
        f"<|start_header_id|>ipython<|end_header_id|>\n\n{shown}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def mistral_result(result: str, uid: str) -> str:
    return f'[TOOL_RESULTS]{{"content": {result}, "call_id": "{uid}"}}[/TOOL_RESULTS]'


def hermes_results(*results: str) -> str:
    shown = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return f"\n<|im_start|>tool\n{shown}<|im_end|><|im_start|>assistant\n"


def coded(a: int, b: int) -> str:
    values = f"<parameter=a>\n{a}\n</parameter>\n<parameter=b>\n{b}\n</parameter>\n"
    return f"<tool_call>\n<function=add>\n{values}</function>\n</tool_call>"


def gemma_results(*results: str) -> str:
    shown = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return f"\n<start_of_turn>user\n{shown}<end_of_turn>\n<start_of_turn>model\n"


GEMMA_FAMILY = Family(
    GEMMA,
    ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    "<end_of_turn>",
    f"<bos><start_of_turn>user\n{described([SCHEMA])}\n\n{ASKED}<end_of_turn>\n<start_of_turn>model\n",
    (f"{TAGGED}{TAGGED_TWO}", gemma_results("3", "7"), TAGGED, gemma_results("3"), "It is 3."),
    role="user",
)
FAMILIES = {
    "Qwen2.5": Family(
        QWEN25,
        QWEN_TOKENS,
        "<|im_end|>",
        QWEN_OPENING,
        (f"I add.\n{TAGGED}\n{TAGGED_TWO}", qwen_results("3", "7"), TAGGED, qwen_results("3"), "It is 3."),
    ),
    "Qwen3": Family(
        QWEN3,
        QWEN_TOKENS,
        "<|im_end|>",
        QWEN_OPENING,
        (
            f"<think>\nHm.\n</think>\n\n{TAGGED}",
            qwen_results("3"),
            f"<think>\nOnce more.\n</think>\n\n{TAGGED_TWO}",
            qwen_results("7"),
            "<think>\n\n</think>\n\nIt is 3.",
        ),
    ),
    "Llama 3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        "<|eot_id|>",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n<|eot_id|>"
        f"<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n\n{json.dumps(SCHEMA)}\n\n{ASKED}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        (
            '{"name": "add", "parameters": {"a": 1, "b": 2}}',
            llama_result("3"),
            '<|python_tag|>{"name": "add", "parameters": {"a": 3, "b": 4}}',  # a special token, and another end
            llama_result("7"),
            "It is 3.",
        ),
        ends=("<|eot_id|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "Mistral": Family(
        MISTRAL,
        (
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        "</s>",
        f"<s>[AVAILABLE_TOOLS]{json.dumps([SCHEMA])}[/AVAILABLE_TOOLS][INST]{ASKED}[/INST]",
        (
            f"[TOOL_CALLS][{ONE}, {TWO}]",
            mistral_result("3", "t0000c000") + mistral_result("7", "t0000c001"),
            f"[TOOL_CALLS] [{ONE}]",
            mistral_result("3", "t0001c000"),
            "It is 3.",
        ),
    ),
    "Mistral Small": Family(
        MISTRAL_SMALL,
        (
            *("<s>", "</s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]"),
            *(
                "[ARGS]",
                "[AVAILABLE_TOOLS]",
                "[/AVAILABLE_TOOLS]",
                "[TOOL_RESULTS]",
                "[TOOL_CONTENT]",
                "[/TOOL_RESULTS]",
            ),
        ),
        "</s>",
        "<s>[SYSTEM_PROMPT]You are Mistral.[/SYSTEM_PROMPT]"
        f"[AVAILABLE_TOOLS]{json.dumps([SCHEMA])}[/AVAILABLE_TOOLS][INST]{ASKED}[/INST]",
        (
            '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]add[ARGS]{"a": 3, "b": 4}',
            "[TOOL_RESULTS]t0000c000[TOOL_CONTENT]3[/TOOL_RESULTS][TOOL_RESULTS]t0000c001[TOOL_CONTENT]7[/TOOL_RESULTS]",
            'I add.[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1, "b": 2}',
            "[TOOL_RESULTS]t0001c000[TOOL_CONTENT]3[/TOOL_RESULTS]",
            "It is 3.",
        ),
        num_calls=3,
    ),
    "Hermes 3": Family(
        HERMES3,
        ("<s>", *QWEN_TOKENS),
        "<|im_end|>",
        f"<s><|im_start|>system\nYou call functions.\n<tools>{json.dumps(SCHEMA)}</tools>\nA call: <tool_call>\n"
        f'{{"name": <function-name>}}\n</tool_call><|im_end|>\n<|im_start|>user\n{ASKED}<|im_end|>\n'
        "<|im_start|>assistant\n",
        (f"{TAGGED}\n{TAGGED_TWO}", hermes_results("3", "7"), TAGGED, hermes_results("3"), "It is 3."),
    ),
    "Qwen3-Coder": Family(
        QWEN3_CODER,
        QWEN_TOKENS,
        "<|im_end|>",
        "<|im_start|>system\nYou are Qwen.\n\n<tools>\n<function>\n<name>add</name>\n</function>\n</tools>\n\n"
        f"<tool_call>\n<function=example>\n</function>\n</tool_call><|im_end|>\n<|im_start|>user\n{ASKED}<|im_end|>\n"
        "<|im_start|>assistant\n",
        (
            f"I add.\n\n{coded(1, 2)}\n{coded(3, 4)}",
            "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>\n<|im_end|>\n"
            "<|im_start|>assistant\n",
            coded(1, 2),
            "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n",
            "It is 3.",
        ),
        num_calls=3,
    ),
    "Gemma": GEMMA_FAMILY,
    "Gemma 2": replace(GEMMA_FAMILY, template=REFUSES_SYSTEM + GEMMA),
    "gpt-oss": Family(
        GPT_OSS,
        ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
        "<|call|>",
        "<|start|>system<|message|>You are ChatGPT.<|end|><|start|>developer<|message|># Tools\n"
        f"{json.dumps(SCHEMA)}<|end|><|start|>user<|message|>{ASKED}<|end|><|start|>assistant",
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1, "b": 2}',
            '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant',
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 3, "b": 4}',
            '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"7"<|end|><|start|>assistant',
            "<|channel|>final<|message|>It is 3.",
        ),
        ends=("<|call|>", "<|call|>", "<|return|>"),
        num_calls=2,
    ),
    "Phi": Family(
        PHI,
        (
            *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
            *("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
        ),
        "<|end|>",
        f"<|system|><|tool|>{json.dumps([FUNCTION])}<|/tool|><|end|><|user|>{ASKED}<|end|><|assistant|>",
        (
            f"I add.<|tool_call|>[{ONE}, {TWO}]<|/tool_call|>",
            "<|tool|>3<|end|><|tool|>7<|end|><|assistant|>",
            f"<|tool_call|>{ONE}<|/tool_call|>",
            "<|tool|>3<|end|><|assistant|>",
            "It is 3.",
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_id_and_mask_of_three_turns(name: str, qwen25_folder: Path, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = deepcopy(AutoTokenizer.from_pretrained(qwen25_folder))
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens)})
    tokenizer.chat_template = family.template
    (tmp_path / "mine.py").write_text(TOOL)
    config = EnvironmentConfig(tools=[f"{tmp_path}/mine.py:add"], tool_parser=family.parser, tool_role=family.role)  # type: ignore[arg-type]
    tools = toolbox_of(config)
    assert [each.to_dict() for each in tools.schemas] == [SCHEMA]
    ends = family.ends or (family.end,) * 3
    turns = [turn + end for turn, end in zip(family.parts[::2], ends, strict=True)]
    trajectory = episode(tokenizer, config, turns, end="")
    [row] = rows_of(trajectory)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    parts = [ids(part) for pair in zip(turns, (*family.parts[1::2], ""), strict=True) for part in pair]
    assert tokenizer.decode(row.prompt_ids) == family.opening
    assert list(row.prompt_ids) == ids(family.opening)
    assert tokenizer.decode(row.response_ids) == "".join(tokenizer.decode(part) for part in parts)
    assert row.response_ids == [token for part in parts for token in part]
    assert [turn >= 0 for turn in row.turn_ids] == [1 - number % 2 for number, part in enumerate(parts) for _ in part]
    number_of_calls = family.num_calls or sum(part.count('"name"') for part in family.parts[::2])
    assert trajectory.fields["tools/calls"] == number_of_calls and trajectory.fields["tools/errors"] == 0.0
    assert FORM in described([SCHEMA])
