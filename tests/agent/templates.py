"""Compact chat templates of the common families, on the tiny byte-level tokenizer."""

import functools
from dataclasses import dataclass

from tests.agent.image_templates import LLAVA, PIXTRAL, QWEN_VL, QWEN_VL_TEXT_TOOLS
from tests.tiny import tiny_tokenizer

_TOOLS_AT_THE_TOP = r"""
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\nCall with <tool_call>\n{...}\n</tool_call><|im_end|>\n' }}
"""
_CALLS = r"""
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
{{- '}\n</tool_call>' }}{%- endfor %}
"""
_TOOL_TURNS = r"""
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
"""
CHATML = (
    _TOOLS_AT_THE_TOP
    + r"""
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + message.content }}"""
    + _CALLS
    + r"""{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}"""
    + _TOOL_TURNS
    + r"""{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)
QWEN3 = (
    _TOOLS_AT_THE_TOP
    + r"""
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
{%- if ns.searching and message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set ns.searching = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = message.reasoning_content or '' %}{%- set content = message.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- content }}{%- endif %}"""
    + _CALLS
    + r"""{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}"""
    + _TOOL_TURNS
    + r"""{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
)
LLAMA3 = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting knowledge date: then\n' + system + '<|eot_id|>' }}
{%- if tools %}
{{- '<|start_header_id|>user<|end_header_id|>\n\nUse these functions:\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
{{- messages[0].content | trim + '<|eot_id|>' }}{%- set messages = messages[1:] %}{%- endif %}
{%- for message in messages %}
{%- if message.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
MISTRAL = r"""
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set ns = namespace(index=0, last=none) %}
{%- for message in rest %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- if message.role != 'tool' and not message.tool_calls %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('conversation roles must alternate user/assistant') }}{%- endif %}
{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' }}{%- if loop.index0 == ns.last and system is defined %}{{- system + '\n\n' }}{%- endif %}
{{- message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('tool call ids must have length 9') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}{%- endfor %}{{- eos_token }}
{%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}
{{- raise_exception('tool call ids must have length 9') }}{%- endif %}
{{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('only user, assistant and tool roles are supported') }}{%- endif %}
{%- endfor %}"""
DEEPSEEK_R1 = r"""
{%- set ns = namespace(system='', in_tool=false) %}
{%- for message in messages %}{%- if message.role == 'system' %}
{%- set ns.system = ns.system + message.content %}{%- endif %}{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if ns.in_tool %}{{- '<|tool_outputs_end|>' }}{%- endif %}{%- set ns.in_tool = false %}
{{- '<|User|>' + message.content }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{%- if ns.in_tool %}{{- '<|tool_outputs_end|>' + content }}
{%- else %}{{- '<|Assistant|>' + content }}{%- endif %}
{%- set ns.in_tool = false %}
{%- for call in message.tool_calls %}
{{- '<|tool_calls_begin|>' if loop.first else '\n' }}
{{- '<|tool_call_begin|>function<|tool_sep|>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments + '\n```<|tool_call_end|>' }}
{{- '<|tool_calls_end|>' if loop.last else '' }}{%- endfor %}
{{- eos_token }}
{%- elif message.role == 'tool' %}
{{- '' if ns.in_tool else '<|tool_outputs_begin|>' }}
{{- '<|tool_output_begin|>' + message.content + '<|tool_output_end|>' }}{%- set ns.in_tool = true %}
{%- endif %}{%- endfor %}
{%- if ns.in_tool %}{{- '<|tool_outputs_end|>' }}{%- endif %}
{%- if add_generation_prompt and not ns.in_tool %}{{- '<|Assistant|><think>\n' }}{%- endif %}"""
GLM = r"""
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\n# Tools\n' }}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|user|>\n' + message.content }}
{%- elif message.role == 'system' %}{{- '<|system|>\n' + message.content }}
{%- elif message.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- if message.reasoning_content %}{{- '\n<think>' + message.reasoning_content.strip() + '</think>' }}
{%- else %}{{- '\n<think></think>' }}{%- endif %}
{%- if message.content.strip() %}{{- '\n' + message.content.strip() }}{%- endif %}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>' + call.function.name + '\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<arg_key>' + name + '</arg_key>\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>\n' }}{%- endfor %}
{{- '</tool_call>' }}{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
GEMMA = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('system role is not supported') }}{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{{- message.content | trim + '<end_of_turn>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""
PHI = r"""
{%- for message in messages %}
{{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- else %}{{- eos_token }}{%- endif %}"""
HARMONY = r"""
{%- set ns = namespace(called='') %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set call = message.tool_calls[-1].function %}{%- set ns.called = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|message|>' + (call.arguments | tojson) + '<|call|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + ns.called + ' to=assistant<|message|>' + (message.content | tojson) + '<|end|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """A chat template with its special tokens, and its other added tokens."""

    template: str
    special: tuple[str, ...]
    markers: tuple[str, ...] = ()
    bos: str | None = None
    eos: str = "<|im_end|>"


_HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_R1 = ("tool_calls_begin", "tool_calls_end", "tool_call_begin", "tool_call_end", "tool_sep")
_R1_OUTPUTS = ("tool_outputs_begin", "tool_outputs_end", "tool_output_begin", "tool_output_end")
FAMILIES = {
    "chatml": Family(CHATML, (), _HERMES[:4]),
    "qwen3": Family(QWEN3, (), _HERMES),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "mistral": Family(
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        bos="<s>",
        eos="</s>",
    ),
    "deepseek_r1": Family(
        DEEPSEEK_R1,
        ("<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>"),
        (*(f"<|{name}|>" for name in _R1 + _R1_OUTPUTS), "<think>", "</think>"),
        bos="<|bos|>",
        eos="<|eos|>",
    ),
    "glm": Family(
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        eos="<|endoftext|>",
    ),
    "gemma": Family(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>", eos="<eos>"),
    "phi": Family(PHI, ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>"), eos="<|endoftext|>"),
    "harmony": Family(
        HARMONY, ("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"), eos="<|return|>"
    ),
}

_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
IMAGE_FAMILIES = {
    "qwen_vl": Family(QWEN_VL, _VISION, _HERMES[:4]),
    "qwen_vl_text_tools": Family(QWEN_VL_TEXT_TOOLS, _VISION, _HERMES[:4]),
    "llava": Family(LLAVA, ("<image>", "</s>"), eos="</s>"),
    "pixtral": Family(
        PIXTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[TOOL_CALLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        bos="<s>",
        eos="</s>",
    ),
}


@functools.cache
def family_tokenizer(name):
    """The tiny tokenizer with the template and the added tokens of a family."""
    family = (FAMILIES | IMAGE_FAMILIES)[name]
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(family.special), special_tokens=True)
    tokenizer.add_tokens(list(family.markers))
    tokenizer.eos_token = family.eos
    if family.bos:
        tokenizer.bos_token = family.bos
    tokenizer.chat_template = family.template
    return tokenizer
