"""Compact chat templates of models that take images."""

_SHOWN = r"""
{%- macro shown(content) %}{%- if content is string %}{{- content }}{%- else %}
{%- for part in content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}
"""
QWEN_VL = (
    _SHOWN
    + r"""
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\nCall with <tool_call>\n{...}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + shown(message.content) + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' + shown(message.content) }}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + shown(message.content) + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)
# Tools tell texts only.
QWEN_VL_TEXT_TOOLS = QWEN_VL.replace(
    r"\n' + shown(message.content) + '\n</tool", r"\n' + message.content + '\n</tool"
)
# Contents are lists of parts, whose images stand before their texts; no tools, no system prompt of its own.
LLAVA = r"""
{%- for message in messages %}
{%- if message.role != 'system' %}{{- message.role.upper() + ': ' }}{%- endif %}
{%- for part in message.content | selectattr('type', 'equalto', 'image') %}{{- '<image>\n' }}{%- endfor %}
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{- part.text + ' ' }}{%- endfor %}
{%- if message.role == 'assistant' %}{{- '</s>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT: ' }}{%- endif %}"""
# Users and assistants alternate; images come as `image_url`, and with a tool's result not at all.
PIXTRAL = r"""
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
{%- if message.role in ('user', 'assistant') and not message.tool_calls %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.index = ns.index + 1 %}{%- endif %}
{%- if message.role == 'user' %}{{- '[INST]' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}
{%- if part.type == 'text' %}{{- part.text }}{%- elif part.type == 'image_url' %}{{- '[IMG]' }}
{%- else %}{{- raise_exception('only text and image_url parts') }}{%- endif %}{%- endfor %}{%- endif %}
{{- '[/INST]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
{{- '' if loop.last else ', ' }}{%- endfor %}{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + '}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('only user, assistant and tool roles') }}{%- endif %}{%- endfor %}"""
