"""Chat templates of model families, in our words: the forms of text that differ in how a mask is found."""

# The same form for every role.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Tools go into the first question, results have a role of their own, a call is JSON.
LLAMA3 = """{{- bos_token }}
{%- set ns = namespace(tools=tools) %}
{%- for m in messages %}
{%- set name = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + name + '<|end_header_id|>\n\n' }}
{%- if m.role == 'user' and ns.tools %}
{%- for tool in ns.tools %}{{ tool | tojson }}{{ '\n\n' }}{% endfor %}
{%- set ns.tools = none %}
{%- endif %}
{%- if m.tool_calls %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
{%- else %}{{ m.content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# No role's name is written, users and answers take turns, tools come before the last question.
MISTRAL = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set said = messages[1:] %}
{%- else %}{% set said = messages %}{% endif %}
{%- set users = said | selectattr('role', 'equalto', 'user') | list %}
{%- for m in said %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' }}{% if system and loop.first %}{{ system + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ ']</s>' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}
{%- else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}
{%- endfor %}"""

# Answers are the model's, there is no system, and roles must take turns.
GEMMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set said = messages[1:] %}
{%- else %}{% set first = '' %}{% set said = messages %}{% endif %}
{%- for m in said %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- (first if loop.first else '') + (m.content | trim) + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# Thoughts are written in the answers after the last question only; results of tools are a user's.
QWEN3 = """{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set text = m.content %}{% set thought = '' %}
{%- if '</think>' in text %}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- text }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or text %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n' }}{{ call.function | tojson }}{{ '\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# The last answer ends in another way than the others; `generation` marks the answers.
TAGGED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}"
)
