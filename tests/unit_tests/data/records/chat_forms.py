# SPDX-License-Identifier: Apache-2.0
"""Chat templates in the published forms of well-known models, each written twice.

Once in Jinja, as a tokenizer carries it, and once as a Python function that lists the pieces of the text and
says of each which assistant message it belongs to, if it is one to be learnt. The functions are the oracle: they
never render a prefix and know nothing of Jinja.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

Pieces = list[tuple[str, int | None]]
LOOP, END = "{% for m in messages %}", "{% endfor %}"


def never(messages, tools, wanted):
    return False


def earlier_answers(messages, tools, wanted):
    """Templates that render the last message in another way than the same message earlier on."""
    return any(place != len(messages) - 1 for place in wanted)


@dataclass(frozen=True)
class Form:
    name: str
    template: str
    pieces: Callable[..., Pieces]
    system: bool = True
    tools: bool = False
    thinking: bool = False
    marked: bool = False
    refuses: Callable[..., bool] = never
    special: tuple[str, ...] = field(default=())


def turns(opening, parts, header, default=None, strip=False):
    """An oracle for templates that put a text before and behind each message.

    parts: by role, what comes before and behind the content. header: what the prompt to generate adds, with which
    the text before an answer begins.
    """

    def pieces(messages, tools):
        found = [(opening, None)]
        if default is not None and messages[0]["role"] != "system":
            found.append((default, None))
        for place, message in enumerate(messages):
            before, behind = parts[message["role"]]
            content = message["content"].strip() if strip else message["content"]
            if message["role"] != "assistant":
                found.append((before + content + behind, None))
                continue
            assert before.startswith(header)
            found += [(header, None), (before[len(header) :] + content + behind, place)]
        return found

    return pieces


def same(before, behind, assistant=None):
    """One pattern for all roles; {} stands for the role."""
    roles = {"system": "system", "user": "user", "assistant": assistant or "assistant"}
    return {role: (before.replace("{}", name), behind) for role, name in roles.items()}


def roles(parts):
    """A Jinja expression for what comes before the content."""
    return repr({role: before for role, (before, _) in parts.items()}) + "[m['role']]"


def prompt(text):
    return "{% if add_generation_prompt %}{{ " + repr(text) + " }}{% endif %}"


# ------------------------------------------------------------------------------------------------------- ChatML

CHATML_LOOP = (
    LOOP + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}" + END
)
CHATML_PROMPT = prompt("<|im_start|>assistant\n")
CHATML_PARTS = same("<|im_start|>{}\n", "<|im_end|>\n")
CHATML_HEADER = "<|im_start|>assistant\n"
QWEN_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
SMOL_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n"


def chatml(name, opening="", default=None, opening_jinja=""):
    first = (
        "{% if messages[0]['role'] != 'system' %}{{ " + repr(default) + " }}{% endif %}"
        if default
        else ""
    )
    template = opening_jinja + first + CHATML_LOOP + CHATML_PROMPT
    return Form(name, template, turns(opening, CHATML_PARTS, CHATML_HEADER, default))


MARKED_CHATML = (
    LOOP
    + "{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    + "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    + "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
    + END
    + CHATML_PROMPT
)


def marked_chatml(messages, tools):
    found = []
    for place, message in enumerate(messages):
        head, text = f"<|im_start|>{message['role']}\n", message["content"] + "<|im_end|>"
        found += [
            (head, None),
            (text, place if message["role"] == "assistant" else None),
            ("\n", None),
        ]
    return found


def qwen_tool_call(call):
    function = call["function"]
    body = {"name": function["name"], "arguments": function["arguments"]}
    return "<tool_call>\n" + json.dumps(body) + "\n</tool_call>"


QWEN_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\n\n' }}{% endif %}{{ '# Tools\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}"
    "{% elif messages[0]['role'] == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{% endif %}"
)
QWEN_CALLS = (
    "{% for call in m.tool_calls or [] %}{% if (loop.first and m['content']) or not loop.first %}{{ '\n' }}"
    "{% endif %}{{ '<tool_call>\n{\"name\": ' + (call.function.name | tojson) + ', \"arguments\": ' + "
    "(call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
)
QWEN_TOOL_TURN = (
    "{% elif m['role'] == 'tool' %}{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
QWEN25 = (
    QWEN_TOOLS
    + LOOP
    + "{% if m['role'] == 'user' %}{{ '<|im_start|>user\n' + m['content'] + '<|im_end|>\n' }}"
    + "{% elif m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' + m['content'] }}"
    + QWEN_CALLS
    + "{{ '<|im_end|>\n' }}"
    + QWEN_TOOL_TURN
    + "{% endif %}"
    + END
    + CHATML_PROMPT
)


def qwen_opening(messages, tools):
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        listed = "".join("\n" + json.dumps(tool) for tool in tools)
        before = system + "\n\n" if system is not None else ""
        return f"<|im_start|>system\n{before}# Tools\n<tools>{listed}\n</tools><|im_end|>\n"
    return f"<|im_start|>system\n{system}<|im_end|>\n" if system is not None else ""


def qwen_pieces(messages, tools, answer):
    found = [(qwen_opening(messages, tools), None)]
    for place, message in enumerate(messages):
        role = message["role"]
        if role == "user":
            found.append((f"<|im_start|>user\n{message['content']}<|im_end|>\n", None))
        elif role == "assistant":
            found += [("<|im_start|>assistant\n", None), (answer(place) + "<|im_end|>\n", place)]
        elif role == "tool":
            first = messages[place - 1]["role"] != "tool"
            last = place == len(messages) - 1 or messages[place + 1]["role"] != "tool"
            text = "<|im_start|>user" if first else ""
            text += f"\n<tool_response>\n{message['content']}\n</tool_response>"
            found.append((text + ("<|im_end|>\n" if last else ""), None))
    return found


def qwen_answer(message):
    calls = [qwen_tool_call(call) for call in message.get("tool_calls", [])]
    return "\n".join([message["content"]] * bool(message["content"] or not calls) + calls)


def qwen25(messages, tools):
    return qwen_pieces(messages, tools, lambda place: qwen_answer(messages[place]))


QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + QWEN_TOOLS
    + LOOP
    + "{% if m['role'] == 'user' %}{{ '<|im_start|>user\n' + m['content'] + '<|im_end|>\n' }}"
    + "{% elif m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    + "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    + "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m['content'] }}"
    + QWEN_CALLS
    + "{{ '<|im_end|>\n' }}"
    + QWEN_TOOL_TURN
    + "{% endif %}"
    + END
    + CHATML_PROMPT
)


def qwen3(messages, tools):
    last_user = max(
        (place for place, message in enumerate(messages) if message["role"] == "user"), default=0
    )

    def answer(place):
        thought = messages[place].get("reasoning_content", "")
        shown = place > last_user and (place == len(messages) - 1 or thought)
        return (f"<think>\n{thought}\n</think>\n\n" if shown else "") + qwen_answer(messages[place])

    return qwen_pieces(messages, tools, answer)


def qwen3_refuses(messages, tools, wanted):
    """An answer before the last is shown without thinking, but when it was last, with (an empty) one."""
    last_user = max(place for place, message in enumerate(messages) if message["role"] == "user")

    def changes(place):
        if place == len(messages) - 1:
            return False
        return place < last_user or not messages[place].get("reasoning_content")

    return any(changes(place) for place in wanted)


# -------------------------------------------------------------------------------------------------------- Llama

LLAMA2 = (
    LOOP
    + "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' }}{% if loop.index0 == 1 and messages[0]['role'] == "
    + "'system' %}{{ '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' }}{% endif %}"
    + "{{ m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    + "{{ ' ' + m['content'] + ' ' + eos_token }}"
    + "{% endif %}"
    + END
)


def llama2(messages, tools):
    found = []
    for place, message in enumerate(messages):
        if message["role"] == "user":
            system = place == 1 and messages[0]["role"] == "system"
            block = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n" if system else ""
            found.append((f"<s>[INST] {block}{message['content']} [/INST]", None))
        elif message["role"] == "assistant":
            found.append((f" {message['content']} </s>", place))
    return found


LLAMA3_HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA3_PROMPT = prompt(LLAMA3_HEAD.replace("{}", "assistant"))
LLAMA3 = (
    "{{ bos_token }}"
    + LOOP
    + "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    + END
    + LLAMA3_PROMPT
)
LLAMA31 = (
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{% if tools %}{{ 'Environment: ipython\n' }}{% endif %}{{ 'Cutting Knowledge Date: December 2023\n\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{ '<|eot_id|>' }}"
    "{% for m in rest %}{% if m['role'] == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m['content'] | tojson) + '<|eot_id|>' }}"
    "{% elif m.tool_calls %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% generation_ %}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' + '
    "(m.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' }}{% endgeneration_ %}"
    "{% elif m['role'] == 'assistant' %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% generation_ %}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration_ %}"
    "{% else %}{{ '<|start_header_id|>user<|end_header_id|>\n\n' }}"
    "{% if tools and loop.first %}{{ 'Given the following functions: ' }}{% for tool in tools %}"
    "{{ (tool | tojson) + '\n\n' }}{% endfor %}{% endif %}{{ m['content'] | trim + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}" + LLAMA3_PROMPT
)
LLAMA31_PLAIN = LLAMA31.replace("{% generation_ %}", "").replace("{% endgeneration_ %}", "")
LLAMA31_MARKED = LLAMA31.replace("generation_ %}", "generation %}")


def llama31(messages, tools):
    environment = "Environment: ipython\n" if tools else ""
    system = messages[0]["role"] == "system"
    content = messages[0]["content"].strip() if system else ""
    text = f"<s>{LLAMA3_HEAD.replace('{}', 'system')}{environment}Cutting Knowledge Date: December 2023\n\n"
    found = [(text + content + "<|eot_id|>", None)]
    for place, message in list(enumerate(messages))[int(system) :]:
        role = message["role"]
        if role == "tool":
            head = LLAMA3_HEAD.replace("{}", "ipython")
            found.append((head + json.dumps(message["content"]) + "<|eot_id|>", None))
        elif role == "assistant":
            answer = message["content"].strip()
            if message.get("tool_calls"):
                function = message["tool_calls"][0]["function"]
                arguments = json.dumps(function["arguments"])
                answer = f'{{"name": "{function["name"]}", "parameters": {arguments}}}'
            found += [
                (LLAMA3_HEAD.replace("{}", "assistant"), None),
                (answer + "<|eot_id|>", place),
            ]
        else:
            listed = ""
            if tools and place == int(system):
                listed = "Given the following functions: " + "".join(
                    json.dumps(t) + "\n\n" for t in tools
                )
            head = LLAMA3_HEAD.replace("{}", "user")
            found.append((f"{head}{listed}{message['content'].strip()}<|eot_id|>", None))
    return found


# ------------------------------------------------------------------------------------------------------- Mistral

MISTRAL1 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' }}{% if loop.first %}{{ system }}{% endif %}"
    "{{ m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def mistral1(messages, tools):
    found = [("<s>", None)]
    first = True
    for place, message in enumerate(messages):
        if message["role"] == "user":
            system = (
                messages[0]["content"] + "\n\n" if first and messages[0]["role"] == "system" else ""
            )
            found.append((f"[INST] {system}{message['content']} [/INST]", None))
            first = False
        elif message["role"] == "assistant":
            found.append((f" {message['content']}</s>", place))
    return found


MISTRAL3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ bos_token }}"
    + LOOP
    + "{% if m['role'] == 'user' %}{% if tools and loop.index0 == ns.last %}"
    + "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    + "{{ '[INST] ' + m['content'] + '[/INST]' }}"
    + "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}{{ call.function | tojson }}"
    + "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}"
    + "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    + "{% elif m['role'] == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + (m['content'] | tojson) + '}' + "
    + "'[/TOOL_RESULTS]' }}{% endif %}"
    + END
)


def mistral3(messages, tools):
    last_user = max(
        (place for place, message in enumerate(messages) if message["role"] == "user"), default=0
    )
    found = [("<s>", None)]
    for place, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "user":
            listed = (
                f"[AVAILABLE_TOOLS] {json.dumps(tools)}[/AVAILABLE_TOOLS]"
                if tools and place == last_user
                else ""
            )
            found.append((f"{listed}[INST] {content}[/INST]", None))
        elif role == "tool":
            found.append(
                (f'[TOOL_RESULTS] {{"content": {json.dumps(content)}}}[/TOOL_RESULTS]', None)
            )
        elif role == "assistant":
            calls = ", ".join(
                json.dumps(call["function"]) for call in message.get("tool_calls", [])
            )
            found.append((f"[TOOL_CALLS] [{calls}]</s>" if calls else f" {content}</s>", place))
    return found


def mistral3_refuses(messages, tools, wanted):
    """The tools move to the last user message."""
    last_user = max(place for place, message in enumerate(messages) if message["role"] == "user")
    return bool(tools) and any(place < last_user for place in wanted)


MISTRAL7 = (
    "{{ bos_token }}"
    + LOOP
    + "{% if m['role'] == 'system' %}{{ '[SYSTEM_PROMPT]' + m['content'] + '[/SYSTEM_PROMPT]' }}"
    + "{% elif m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}"
    + "{% else %}{{ m['content'] + eos_token }}{% endif %}"
    + END
)
MISTRAL7_PARTS = {
    "system": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "user": ("[INST]", "[/INST]"),
    "assistant": ("", "</s>"),
}

# -------------------------------------------------------------------------------------------------------- Google

GEMMA_TURN = "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + "
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    + LOOP
    + GEMMA_TURN
    + "m['content'] | trim + '<end_of_turn>\n' }}"
    + END
    + prompt("<start_of_turn>model\n")
)
GEMMA3 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}"
    + GEMMA_TURN
    + "(system if loop.first else '') + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}" + prompt("<start_of_turn>model\n")
)


def gemma3(messages, tools):
    found, system = [("<s>", None)], ""
    for place, message in enumerate(messages):
        text = message["content"].strip() + "<end_of_turn>\n"
        if message["role"] == "system":
            system = message["content"] + "\n\n"
        elif message["role"] == "user":
            found.append((f"<start_of_turn>user\n{system}{text}", None))
            system = ""
        else:
            found += [("<start_of_turn>model\n", None), (system + text, place)]
    return found


# ------------------------------------------------------------------------------------------------- many others

PHI3 = (
    LOOP
    + "{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}"
    + END
    + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


def phi3(messages, tools):
    found = turns("", same("<|{}|>\n", "<|end|>\n"), "<|assistant|>\n")(messages, tools)
    owner = len(messages) - 1 if messages[-1]["role"] == "assistant" else None
    return [*found, ("</s>", owner)]


def phi3_refuses(messages, tools, wanted):
    """The text ends with an end-of-text token, wherever it ends."""
    return any(place != len(messages) - 1 for place in wanted)


DEEPSEEK = (
    "{{ '<|begin_of_sentence|>' }}"
    + LOOP
    + "{% if m['role'] == 'system' %}{{ m['content'] + '\n\n' }}{% elif m['role'] == 'user' %}"
    + "{{ 'User: ' + m['content'] + '\n\n' }}{% else %}"
    + "{{ 'Assistant: ' + m['content'] + '<|end_of_sentence|>' }}{% endif %}"
    + END
    + prompt("Assistant:")
)
DEEPSEEK3 = (
    "{{ '<|begin_of_sentence|>' }}"
    + LOOP
    + "{% if m['role'] == 'system' %}{{ m['content'] }}{% elif m['role'] == 'user' %}"
    + "{{ '<|User|>' + m['content'] }}"
    + "{% else %}{{ '<|Assistant|>' + m['content'] + '<|end_of_sentence|>' }}{% endif %}"
    + END
    + prompt("<|Assistant|>")
)
R1 = DEEPSEEK3.replace(
    "'<|Assistant|>' + m['content'] +", "'<|Assistant|>' + m['content'].split('</think>')[-1] +"
)
R1 = R1.replace(prompt("<|Assistant|>"), prompt("<|Assistant|><think>\n"))


def always(messages, tools, wanted):
    return bool(wanted)


COMMAND_R_PARTS = {
    role: (f"<|START_OF_TURN_TOKEN|><|{name}_TOKEN|>", "<|END_OF_TURN_TOKEN|>")
    for role, name in (("system", "SYSTEM"), ("user", "USER"), ("assistant", "CHATBOT"))
}
COMMAND_R = (
    "{{ '<BOS_TOKEN>' }}"
    + LOOP
    + "{{ '<|START_OF_TURN_TOKEN|><|' + {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m['role']] + "
    + "'_TOKEN|>' + m['content'] | trim + '<|END_OF_TURN_TOKEN|>' }}"
    + END
    + prompt("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>")
)

OLMO2 = (
    "{{ '<|endoftext|>' }}"
    + LOOP
    + "{% if m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + '<|endoftext|>' }}"
    + "{% if not loop.last %}{{ '\n' }}{% endif %}{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '\n' }}"
    + "{% endif %}"
    + END
    + prompt("<|assistant|>\n")
)


def olmo2(messages, tools):
    found = [("<|endoftext|>", None)]
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            found.append((f"<|{message['role']}|>\n{message['content']}\n", None))
            continue
        found += [("<|assistant|>\n", None), (message["content"] + "<|endoftext|>", place)]
        found += [("\n", None)] * (place < len(messages) - 1)
    return found


VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}{% endif %}"
    + LOOP
    + "{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}{% elif m['role'] == 'assistant' %}"
    + "{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}"
    + END
    + prompt("ASSISTANT:")
)
VICUNA_PARTS = {"system": ("", " "), "user": ("USER: ", " "), "assistant": ("ASSISTANT: ", "</s>")}

HARMONY = (
    "{{ '<|start|>system<|message|>You are ChatGPT.\nReasoning: medium<|end|>' }}"
    + LOOP
    + "{% if m['role'] == 'system' %}{{ '<|start|>developer<|message|># Instructions\n\n' + m['content'] + "
    + "'<|end|>' }}{% elif m['role'] == 'user' %}{{ '<|start|>user<|message|>' + m['content'] + '<|end|>' }}"
    + "{% else %}{% if m.thinking and loop.last %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + "
    + "m.thinking + '<|end|>' }}{% endif %}{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] }}"
    + "{% if loop.last and not add_generation_prompt %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}{% endif %}"
    + "{% endif %}"
    + END
    + prompt("<|start|>assistant")
)


def harmony(messages, tools):
    found = [("<|start|>system<|message|>You are ChatGPT.\nReasoning: medium<|end|>", None)]
    for place, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "system":
            found.append((f"<|start|>developer<|message|># Instructions\n\n{content}<|end|>", None))
        elif role == "user":
            found.append((f"<|start|>user<|message|>{content}<|end|>", None))
        else:
            last = place == len(messages) - 1
            thought = message.get("reasoning_content")
            analysis = (
                f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
                if thought and last
                else ""
            )
            end = "<|return|>" if last else "<|end|>"
            text = f"{analysis}<|channel|>final<|message|>{content}{end}"
            found += [("<|start|>assistant", None), (text, place)]
    return found


HERMES_MARKED = QWEN25.replace(
    "{{ '<|im_start|>assistant\n' + m['content'] }}" + QWEN_CALLS + "{{ '<|im_end|>\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% generation %}{{ m['content'] }}"
    + QWEN_CALLS
    + "{{ '<|im_end|>\n' }}{% endgeneration %}",
)


def by_turn(name, jinja, parts, header, opening="", opening_jinja="", strip=False, system=True):
    """A form of which one Jinja expression renders every message."""
    template = opening_jinja + LOOP + "{{ " + jinja + " }}" + END + prompt(header)
    return Form(name, template, turns(opening, parts, header, strip=strip), system=system)


NEMOTRON_PARTS = {
    "system": ("<extra_id_0>System\n", "\n"),
    "user": ("<extra_id_1>User\n", "\n"),
    "assistant": ("<extra_id_1>Assistant\n", "\n"),
}
ALPACA_PARTS = {
    "system": ("", "\n\n"),
    "user": ("### Instruction:\n", "\n\n"),
    "assistant": ("### Response:\n", "\n\n"),
}
OPENCHAT_PARTS = {
    "system": ("", "<|end_of_turn|>"),
    "user": ("GPT4 Correct User: ", "<|end_of_turn|>"),
    "assistant": ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
}

FORMS = [
    chatml("chatml"),
    chatml("qwen2", default=QWEN_SYSTEM),
    chatml("smollm2", default=SMOL_SYSTEM),
    chatml("internlm2", opening="<s>", opening_jinja="{{ bos_token }}"),
    Form("chatml marked", MARKED_CHATML, marked_chatml, marked=True),
    Form("qwen2.5", QWEN25, qwen25, tools=True),
    Form("hermes marked", HERMES_MARKED, qwen25, tools=True, marked=True),
    Form("qwen3", QWEN3, qwen3, tools=True, thinking=True, refuses=qwen3_refuses),
    Form("llama2", LLAMA2, llama2),
    Form(
        "llama3",
        LLAMA3,
        turns(
            "<s>",
            same(LLAMA3_HEAD, "<|eot_id|>"),
            LLAMA3_HEAD.replace("{}", "assistant"),
            strip=True,
        ),
    ),
    Form("llama3.1", LLAMA31_PLAIN, llama31, tools=True),
    Form("llama3.1 marked", LLAMA31_MARKED, llama31, tools=True, marked=True),
    Form("mistral v1", MISTRAL1, mistral1),
    Form("mistral v3", MISTRAL3, mistral3, system=False, tools=True, refuses=mistral3_refuses),
    Form("mistral v7", MISTRAL7, turns("<s>", MISTRAL7_PARTS, "")),
    Form(
        "gemma",
        GEMMA,
        turns(
            "<s>",
            same("<start_of_turn>{}\n", "<end_of_turn>\n", "model"),
            "<start_of_turn>model\n",
            strip=True,
        ),
        system=False,
    ),
    Form("gemma3", GEMMA3, gemma3),
    Form("phi3", PHI3, phi3, refuses=phi3_refuses),
    by_turn(
        "phi4",
        "'<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] + '<|im_end|>'",
        same("<|im_start|>{}<|im_sep|>", "<|im_end|>"),
        "<|im_start|>assistant<|im_sep|>",
    ),
    by_turn(
        "phi4-mini",
        "'<|' + m['role'] + '|>' + m['content'] + '<|end|>'",
        same("<|{}|>", "<|end|>"),
        "<|assistant|>",
    ),
    Form(
        "deepseek v2",
        DEEPSEEK,
        turns(
            "<|begin_of_sentence|>",
            {
                "system": ("", "\n\n"),
                "user": ("User: ", "\n\n"),
                "assistant": ("Assistant: ", "<|end_of_sentence|>"),
            },
            "Assistant:",
        ),
    ),
    Form(
        "deepseek v3",
        DEEPSEEK3,
        turns(
            "<|begin_of_sentence|>",
            {
                "system": ("", ""),
                "user": ("<|User|>", ""),
                "assistant": ("<|Assistant|>", "<|end_of_sentence|>"),
            },
            "<|Assistant|>",
        ),
    ),
    Form(
        "deepseek r1",
        R1,
        turns(
            "<|begin_of_sentence|>",
            {
                "system": ("", ""),
                "user": ("<|User|>", ""),
                "assistant": ("<|Assistant|>", "<|end_of_sentence|>"),
            },
            "<|Assistant|>",
        ),
        refuses=always,
    ),
    Form(
        "command-r",
        COMMAND_R,
        turns("<BOS_TOKEN>", COMMAND_R_PARTS, COMMAND_R_PARTS["assistant"][0], strip=True),
    ),
    by_turn(
        "zephyr",
        "'<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n'",
        same("<|{}|>\n", "</s>\n"),
        "<|assistant|>\n",
    ),
    by_turn(
        "granite",
        "'<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + '<|end_of_text|>\n'",
        same("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"),
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    by_turn(
        "glm4",
        "'<|' + m['role'] + '|>\n' + m['content']",
        same("<|{}|>\n", ""),
        "<|assistant|>\n",
        "[gMASK]<sop>",
        "{{ '[gMASK]<sop>' }}",
    ),
    Form("gpt-oss", HARMONY, harmony, thinking=True, refuses=earlier_answers),
    by_turn(
        "openchat",
        roles(OPENCHAT_PARTS) + " + m['content'] + '<|end_of_turn|>'",
        OPENCHAT_PARTS,
        "GPT4 Correct Assistant:",
    ),
    Form("vicuna", VICUNA, turns("", VICUNA_PARTS, "ASSISTANT:")),
    by_turn(
        "alpaca", roles(ALPACA_PARTS) + " + m['content'] + '\n\n'", ALPACA_PARTS, "### Response:\n"
    ),
    by_turn(
        "falcon3",
        "'<|' + m['role'] + '|>\n' + m['content'] + '\n'",
        same("<|{}|>\n", "\n"),
        "<|assistant|>\n",
    ),
    by_turn(
        "stablelm2",
        "'<|' + m['role'] + '|>\n' + m['content'] + '<|endoftext|>\n'",
        same("<|{}|>\n", "<|endoftext|>\n"),
        "<|assistant|>\n",
    ),
    Form("olmo2", OLMO2, olmo2),
    by_turn(
        "nemotron",
        roles(NEMOTRON_PARTS) + " + m['content'] + '\n'",
        NEMOTRON_PARTS,
        "<extra_id_1>Assistant\n",
    ),
    by_turn(
        "jamba",
        "'<|bom|><|' + m['role'] + '|> ' + m['content'] + '<|eom|>'",
        same("<|bom|><|{}|> ", "<|eom|>"),
        "<|bom|><|assistant|>",
    ),
]

CONTROL_TOKENS = [
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|im_sep|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    *(
        "[INST]",
        "[/INST]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
    ),
    *(
        "<start_of_turn>",
        "<end_of_turn>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<|end|>",
        "<|User|>",
    ),
    *(
        "<|Assistant|>",
        "<|begin_of_sentence|>",
        "<|end_of_sentence|>",
        "<BOS_TOKEN>",
        "<|START_OF_TURN_TOKEN|>",
    ),
    *(
        "<|END_OF_TURN_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
        "<|start_of_role|>",
    ),
    *(
        "<|end_of_role|>",
        "<|end_of_text|>",
        "[gMASK]",
        "<sop>",
        "<|start|>",
        "<|message|>",
        "<|channel|>",
    ),
    *(
        "<|return|>",
        "<|end_of_turn|>",
        "<|endoftext|>",
        "<extra_id_0>",
        "<extra_id_1>",
        "<|bom|>",
        "<|eom|>",
    ),
]
