"""Small chat templates that write tool calls as the three families of models do."""

HERMES_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\nAnswer with <tool_call>{"name": ..., "arguments": ...}' }}
    {{- '</tool_call> to call one of:\n' }}
    {%- for tool in tools %}{{- tool | tojson ~ '\n' }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- (call.function.arguments | tojson) ~ '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

MISTRAL_TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools %}{{- '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' ~ message.content ~ '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{%- endif %}
            {{- '{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- (call.function.arguments | tojson) ~ ', "id": "' ~ call.id ~ '"}' }}
            {{- '' if loop.last else ', ' }}
        {%- endfor %}
        {{- ']' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] ' ~ message.content ~ '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- ' ' ~ message.content }}
    {%- endif %}
{%- endfor %}
"""

LLAMA_TEMPLATE = """
{%- for message in messages %}
    {{- '<|start|>' ~ message.role ~ '<|end|>\n\n' }}
    {%- if message.role == 'user' and tools %}
        {{- 'Answer with {"name": ..., "parameters": ...}.\n' ~ (tools | tojson(indent=2)) }}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ (call.arguments | tojson) ~ '}' }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}
"""
