# SPDX-License-Identifier: Apache-2.0
"""Write the tables of blocks, fields and settings into docs/adding-a-family.md: ``make vocabulary``."""

import ast
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from scripts.docs.generated import table_of

PART = table_of("adding-a-family.md", "vocabulary")

_PACKAGE = "megatron.bridge."
_OF_MEGATRON_CORE = {
    "activation_func": "The activation of feed-forward layers",
    "add_bias_linear": "All linear layers have biases",
    "add_qkv_bias": "Queries, keys and values have biases",
    "gated_linear_unit": "Feed-forward layers have a gate in addition to the up projection",
    "layernorm_zero_centered_gamma": "Checkpoints store the gains of norms minus one",
    "linear_attention_freq": "Layers with a gated delta net instead of attention",
    "moe_layer_freq": "Layers with experts among dense ones",
    "moe_router_enable_expert_bias": "Correction bias of the scores, which only affects the choice of experts",
    "moe_router_pre_softmax": "Weights of experts are a softmax over all experts, not only the chosen ones",
    "moe_router_score_function": "Weights of experts are a softmax or sigmoids",
    "moe_shared_expert_intermediate_size": "Total width of the shared experts",
    "no_rope_freq": "Layers without a rotary embedding",
    "normalization": "RMSNorm or LayerNorm",
    "qk_layernorm": "Queries and keys are normalized, each head separately",
    "rotary_interleaved": "Rotary embeddings rotate neighboring dimensions instead of the two halves of a head",
    "rotary_percent": "Fraction of each head that is rotated",
    "softmax_scale": "Scale of the attention scores",
    "softmax_type": "Attention has sinks",
    "window_attn_skip_freq": "Layers with an attention window among those without",
    "window_size": "Attention window: the last tokens that a token attends to",
}


def table() -> str:
    """Three Markdown tables: blocks, fields and their groups, settings of providers."""
    parts = {
        "Blocks": ["| block | parts of a model |", "|---|---|", *_blocks()],
        "Fields and groups of fields": [
            "| name | config keys | meaning |",
            "|---|---|---|",
            *_groups(),
        ],
        "Settings": [
            "| feature of the model | setting of the provider | set by |",
            "|---|---|---|",
            *_settings(),
        ],
    }
    return (
        "\n".join(f"\n### {title}\n\n" + "\n".join(lines) for title, lines in parts.items())
        + "\n\n"
    )


def _modules() -> Iterator[ModuleType]:
    import importlib
    import pkgutil

    from megatron.bridge.models.conversion import declare

    for found in pkgutil.iter_modules(declare.__path__):
        yield importlib.import_module(f"{declare.__name__}.{found.name}")


def _blocks() -> Iterator[str]:
    from megatron.bridge.models.conversion.declare.blocks import Block, SizedBlock

    for module in _modules():
        for name, function in inspect.getmembers(module, inspect.isfunction):
            returned = inspect.get_annotations(function).get("return")
            if (
                function.__module__ == module.__name__
                and not name.startswith("_")
                and returned in (Block, SizedBlock)
            ):
                arguments = ", ".join(inspect.signature(function).parameters)
                yield f"| `{name}({arguments})` | {_first(function.__doc__)} |"


def _groups() -> Iterator[str]:
    from megatron.bridge.models.conversion.declare import vocabulary

    docs = {
        name: doc
        for module in _modules()
        for name, doc in _literals(ast.parse(inspect.getsource(module)))
    }
    for name, group in sorted(vocabulary.field_groups().items()):
        keys = ", ".join(f"`{key}`" for key in dict.fromkeys(field.hf for field in group))
        yield f"| `{name}` | {keys} | {_first(docs.get(name))} |"


def _settings() -> Iterator[str]:
    from megatron.bridge.models.conversion.model_bridge import declared_bridges, function_fields
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.mamba_provider import MambaModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider

    docs = dict(_OF_MEGATRON_CORE)
    for provider in (GPTModelProvider, MLAModelProvider, MambaModelProvider):
        declared = [kind for kind in provider.__mro__ if kind.__module__.startswith(_PACKAGE)]
        for kind in reversed(declared):
            docs |= dict(_literals(ast.parse(inspect.getsource(kind)).body[0]))
    for name in sorted(function_fields() & docs.keys()):
        users = [
            bridge.__name__.removesuffix("Bridge")
            for bridge in declared_bridges().values()
            if name in bridge.fixed or any(name in field.names for field in bridge.fields)
        ]
        shown = ", ".join(users[:3]) + (f" and {len(users) - 3} more" if len(users) > 3 else "")
        yield f"| {_first(docs[name])} | `{name}` | {shown} |"


def _literals(parent: Any) -> Iterator[tuple[str, str]]:
    """(name, text) of each assignment that is followed by a string."""
    for before, after in zip(parent.body, parent.body[1:], strict=False):
        if not isinstance(before, ast.Assign | ast.AnnAssign):
            continue
        target = before.target if isinstance(before, ast.AnnAssign) else before.targets[0]
        if (
            isinstance(target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            yield target.id, str(after.value.value)


def _first(text: str | None) -> str:
    """The first sentence, in one line, as a cell of a table."""
    line = " ".join((text or "").split())
    sentence = re.split(r"(?<=[.;])\s", line)[0].rstrip(".;").replace("|", "\\|").replace("``", "`")
    return sentence if len(sentence) < 200 else f"{sentence[:197]}..."


if __name__ == "__main__":
    PART.write(table())
