# SPDX-License-Identifier: Apache-2.0
"""Drafts of bridges: the nearest declared family, and what config keys and names of tensors say is different."""

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import getfile
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron.bridge import AutoBridge
from megatron.bridge.models import families
from megatron.bridge.models.conversion import model_bridge
from megatron.bridge.models.conversion.declare import vocabulary
from megatron.bridge.models.conversion.declare.fields import IRRELEVANT, Field
from megatron.bridge.testing import reference
from megatron.bridge.testing.family import on_one_process, padding_row
from megatron.bridge.testing.row import Row
from megatron.bridge.utils.errors import UserError, one_line

_TINY = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "head_dim": 16,
}
_TINY |= {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 16,
}
_TINY |= {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "topk_group": 1,
}
_TINY |= {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
}
_TINY |= {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_TINY |= {"rotary_dim": 4, "n_inner": 72, "attention_multiplier": 0.25}
# not one, which would hide how a number is applied, nor so large that noise grows
_TINY |= {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
    "logit_scale": 0.5,
}
# without padding: some classes of transformers zero its row when they load a checkpoint (Youtu)
_IDS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
_MOST = 20_000_000  # parameters of a tiny model: more take long, and a real one all of the memory
_EPSILONS = ("norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon")
_PLAIN = {
    "num_key_value_heads": "num_query_groups",
    **dict.fromkeys(_EPSILONS, "layernorm_epsilon"),
}
_NORMS = (("input_layernorm", "post_attention_layernorm"), ("ln_1", "ln_2"), ("norm_1", "norm_2"))
_PROJECTIONS = r"(.+)\.(q_proj|query_key_value|qkv_proj|c_attn|Wqkv)\.weight"


def tiny_config(
    config: Mapping[str, Any], renamed: Mapping[str, str], **sizes: Any
) -> dict[str, Any]:
    """The arguments of a tiny model: small ``sizes``, also where usual keys are ``renamed``, and no dropout."""
    derived = ("qk_head_dim", "max_window_layers", "dtype", *IRRELEVANT)
    tiny = {key: value for key, value in config.items() if key not in derived}
    small = _TINY | {
        renamed_key: _TINY[key] for key, renamed_key in renamed.items() if key in _TINY
    }
    for key, value in tiny.items():
        if key in small and (value is not None or "exp" in key):
            tiny[key] = small[key]
        elif (
            config.get("sliding_window")
            and value
            and key == "layer_types"
            and {*value} == {"full_attention"}
        ):
            tiny[key] = [*value[:1], "sliding_attention"] * 2  # what it can mean, said or not
        elif isinstance(value, list) and len(value) == config.get("num_hidden_layers"):
            tiny[key] = [
                *(value * 4)[:4],
                *(kind for kind in dict.fromkeys(value) if kind not in value[:4]),
            ][-4:]
        elif "drop" in key and isinstance(value, float):
            tiny[key] = 0.0
    latent = {"num_key_value_heads": 6, "head_dim": 8} if "kv_lora_rank" in config else {}
    return tiny | latent | _IDS | sizes


def best(config: Any, folder: Path) -> "tuple[BridgeDraft, Row, list[str]]":
    """The draft for a Hugging Face config, the row that it was tried on, and what still differs on one process."""
    name = (config.architectures or ("",))[0]
    model: Any = getattr(transformers, name, None) if name.endswith("ForCausalLM") else None
    if model is None:
        raise UserError(
            f"architectures={config.architectures} names no causal model of transformers: give one"
        )
    case = _reference_case(model, config, folder)
    tensors = {
        name: tuple(value.shape) for name, value in reference.read_weights(case.checkpoint).items()
    }
    full = transformers.AutoConfig.from_pretrained(case.checkpoint).to_dict()
    bases = [base for base in model_bridge.declared_bridges() if not base.endswith("Generation")]
    text = "".join(path.read_text() for path in Path(getfile(model)).parent.glob("modular_*.py"))
    # transformers names parents: class CwmMLP(LlamaMLP)
    name_matches = {
        base: len(re.findall(rf"\({base[:-11]}(?!\d|Moe)\w+\):", text)) for base in bases
    }
    has_row = padding_row(case.row, 0) is not None
    drafts = [
        BridgeDraft(name, config.model_type, base, config, full, tensors, has_row) for base in bases
    ]
    drafts.sort(
        key=lambda candidate: (
            candidate.distance - 3 * bool(name_matches[candidate.base]),
            -name_matches[candidate.base],
            len(candidate.parent.fixed),
        )
    )
    tried = _try_drafts(drafts[:2], case, folder)
    first = next(tried)
    best_tried = (
        first
        if not first[1]
        else next((candidate for candidate in tried if not candidate[1]), first)
    )
    return best_tried[0], case.row, best_tried[1]


def _reference_case(model: Any, config: Any, folder: Path) -> reference.Case:
    # what the class derives from other keys, such as key heads from multi_query, would contradict them
    declared_keys = {config.attribute_map.get(f.name, f.name) for f in dataclasses.fields(config)}
    derived = (config.to_dict().keys() & _TINY.keys()) - declared_keys
    full = {key: value for key, value in config.to_dict().items() if key not in derived}
    reason = ""
    # some heads must be as wide as hidden size / number of heads, and some sizes agree only as the config has them
    for index, sizes in enumerate(({}, {"head_dim": 8}, None)):
        tiny = tiny_config(full, config.attribute_map, **(sizes or {}))
        if sizes is None:
            tiny |= {
                key: full[key]
                for key in tiny.keys() & full.keys() - _IDS.keys()
                if "drop" not in key
            }
        row = Row(config.model_type, model, tiny)
        try:
            with torch.device("meta"):
                count = sum(
                    parameter.numel()
                    for parameter in model(model.config_class(**row.config)).parameters()
                )
            if count <= _MOST:
                return reference.make_reference(row, folder / f"reference{index}")
            reason = reason or f"still has {count} parameters"
        except Exception as error:  # of transformers' own code, whatever it checks
            reason = reason or f"does not run ({type(error).__name__}: {one_line(error, 400)})"
    raise UserError(
        f"a tiny {model.__name__} {reason}: give a config of small sizes, which is then used as it is"
    )


def _try_drafts(
    drafts: "list[BridgeDraft]", case: reference.Case, folder: Path
) -> "Iterator[tuple[BridgeDraft, list[str]]]":
    for draft in drafts:
        draft.complete()
        for index, tried in enumerate(draft.guesses()):
            yield tried, (problems := tried.problems(case, folder / f"{draft.base}-{index}"))
            if not (problems and problems[0].startswith("logits")):
                break


@dataclass
class BridgeDraft:
    """A bridge for ``architecture`` in terms of the declared family ``base``."""

    architecture: str
    model_type: str
    base: str
    source_config: Any  # what was asked for
    config: Mapping[str, Any]  # of the tiny model, as transformers completes it
    tensors: Mapping[str, tuple[int, ...]]  # names in its checkpoint, with their shapes
    has_padding_row: bool  # whether transformers' embedding has a padding_idx
    fixed: dict[str, Any] = field(default_factory=dict[str, Any])
    claimed: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # key of no field of the base -> what reads it
    blocks: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.parent = model_bridge.declared_bridges()[self.base]
        registry = self.parent().mapping_registry()
        mappings = {name: registry.hf_to_megatron_lookup(name) for name in self.tensors}
        lost = (name for name, mapping in mappings.items() if mapping is None)
        down = [
            name
            for name, item in mappings.items()
            if item and item.transposed and item.megatron_param.endswith("fc2.weight")
        ]
        self.straight = any(
            self.tensors[item][0] < self.tensors[item][1] for item in down
        )  # [out, in], unlike the base's
        self.left_over = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in lost))
        missing = [
            f.hf
            for f in self.parent.fields
            if f.default is families.REQUIRED and f.hf not in self.config
        ]
        unspoken = [key for key in self.unclaimed if not vocabulary.groups_with(key)]
        self.distance = 2 * len(self.left_over) + len(unspoken) + len(missing)

    @property
    def kept(self) -> list[Field]:
        """Fields of the base, but for those whose key is not there or that names of tensors speak against."""
        there = [
            f
            for f in self.parent.fields
            if f.hf in self.config or f.default is not families.REQUIRED
        ]
        sparse = any("num_moe_experts" in f.names for f in there)
        there = [
            f
            for f in there
            if sparse or not f.names or not all(name.startswith("moe_") for name in f.names)
        ]
        return [f for f in there if self.fixed.keys().isdisjoint(f.names)]

    @property
    def unclaimed(self) -> list[str]:
        """Config keys that the base neither can read nor knows to be harmless."""
        harmless = {**IRRELEVANT, **self.parent.irrelevant}
        read = {f.hf for f in self.kept if self._reads((f,))}
        free = (key for key in self.config if key not in read and harmless.get(key, ()) is not None)
        return [key for key in free if self.config[key] not in harmless.get(key, ())]

    @property
    def idle(self) -> list[str]:
        """Unclaimed keys that only say how a new model is initialized."""
        return [key for key in self.unclaimed if "initializer" in key]

    @property
    def unread(self) -> dict[str, tuple[Any, ...]]:
        """Keys that nothing reads, or that a default of transformers contradicts, with their values."""
        both = (self.source_config.to_dict(), self.config)
        defaults = type(self.source_config)().to_dict()
        checked = [
            key
            for key, values in self.parent.irrelevant.items()
            if values is not None and key in self.config
        ]
        keys = [key for key in self.unclaimed if key not in {*self.claimed, *self.idle}]
        keys += [
            key for key in checked if key not in keys and self.config[key] != defaults.get(key)
        ]
        return {
            key: (
                *{
                    repr(config_dict.get(key)): config_dict.get(key) for config_dict in both
                }.values(),
            )
            for key in keys
        }

    def guesses(self) -> "Iterator[BridgeDraft]":
        """What no name tells, to be tried until logits agree: this draft, rotary embeddings, a scale turned round."""
        yield self
        for interleaved in (True, False):
            yield dataclasses.replace(self, fixed=self.fixed | {"rotary_interleaved": interleaved})
        inverse = ", to=LOGIT_SCALE.to, back=LOGIT_SCALE.back"
        for f in self.kept:
            if f.names == ("logits_scaling",) and f.hf in self.config:
                text = f"Field({f.hf!r}, 'logits_scaling'{'' if f.to else inverse})"
                yield dataclasses.replace(self, claimed=self.claimed | {f.hf: text})

    def _reads(self, group: tuple[Field, ...]) -> bool:
        try:
            return all(f.read(self.config) is not None for f in group)
        except (UserError, KeyError, TypeError, AttributeError):
            return False

    def complete(self) -> None:
        """Take from the names of tensors what the config does not say, then claim keys by the vocabulary."""
        self._read_tensors(
            {re.sub(r"^\D+\.\d+\.", "", name): shape for name, shape in self.tensors.items()}
        )
        implied = {
            f.name: f.default for f in dataclasses.fields(families.GPTModelProvider)
        } | self.parent.fixed
        expressible = {name for f in self.parent.fields for name in f.names}
        self.fixed = {
            name: v for name, v in self.fixed.items() if name in expressible or implied[name] != v
        }
        self.claimed = {key: text for key in self.unclaimed if (text := self._field(key))}

    def _field(self, key: str) -> str:
        """What reads a key: the group that covers most unclaimed keys, or another family's field."""
        if key in _PLAIN:
            return f"Field({key!r}, {_PLAIN[key]!r})"
        groups = vocabulary.field_groups()
        free = {*self.unclaimed}
        for name in sorted(
            vocabulary.groups_with(key), key=lambda group: -len(groups[group])
        ):  # the largest first
            sets = {attribute for f in groups[name] for attribute in f.names}
            if (
                {f.hf for f in groups[name]} <= free
                and self._reads(groups[name])
                and not sets & self.fixed.keys()
            ):
                return f"*{name}" if isinstance(getattr(families, name), tuple) else name
        if key in {
            f.hf for f in self.parent.fields
        }:  # the tensors spoke against what the base makes of it
            return ""
        usual = {
            standard_key: name for name, standard_key in self.source_config.attribute_map.items()
        }.get(key)
        plain = (
            f
            for fields in model_bridge.declared_fields().values()
            for f in fields
            if f.hf in (key, usual)
        )
        names = [f.megatron for f in plain if f.to is None and f.back is None]
        return f"Field({key!r}, {names[0]!r})" if names else ""

    def _read_tensors(self, ends: Mapping[str, tuple[int, ...]]) -> None:
        """Biases, norms and projections, by the names of tensors in a layer."""
        biases = [name for name in ends if name.endswith(("_proj.bias", "c_fc.bias"))]
        if any(name.endswith("norm.bias") for name in ends):
            self.fixed["normalization"] = "LayerNorm"
        if biases and not any(
            name.endswith(("o_proj.bias", "up_proj.bias", "c_fc.bias")) for name in biases
        ):
            self.fixed |= {"add_qkv_bias": True, "add_bias_linear": False}
        elif biases and "attention_bias" not in self.config:
            self.fixed["add_bias_linear"] = True
        before, after = (f"{kind}_feedforward_layernorm.weight" in ends for kind in ("pre", "post"))
        placement = "both" if before and after else "post" if after else "pre"
        query, key = (ends.get(f"self_attn.{role}_norm.weight") for role in "qk")
        matrices = [
            name for name, shape in ends.items() if name.startswith("mlp.") and len(shape) == 2
        ]
        plain = len(matrices) == 2 and not any("gate" in name for name in matrices)
        self.fixed |= {"norm_placement": placement, "gated_linear_unit": not plain}
        self.fixed |= (
            {"qk_norm_across_heads": query != key, "qk_layernorm": query == key} if query else {}
        )
        norms = next((pair for pair in _NORMS if f"{pair[0]}.weight" in ends), _NORMS[0])
        norms = (
            (None, None)
            if placement == "post"
            else (norms[0], "pre_feedforward_layernorm")
            if before
            else norms
        )
        alone = f"{norms[0]}.weight" in ends and f"{norms[1]}.weight" not in ends
        biased = any(name.endswith("head.bias") for name in self.tensors)
        parent_values = self.parent.fixed
        if alone != (parent_values.get("parallel_residual") == "shared_norm"):
            self.fixed["parallel_residual"] = "shared_norm" if alone else None
        self.fixed |= (
            {"output_bias": biased} if biased != parent_values.get("output_bias", False) else {}
        )
        norms = (norms[0], None) if alone else norms
        layers = re.sub(
            r"\.\d+\..*",
            ".*",
            next(tensor_name for tensor_name in self.tensors if re.search(r"\.\d+\.", tensor_name)),
        )
        moved = self.straight or placement != parent_values.get("norm_placement", "pre")
        extra_tensors = self._post_norms(layers) if placement == "pre" else self.left_over
        if moved or any(
            "norm" in name or re.search("attn.*(proj|dense|key_value)", name)
            for name in extra_tensors
        ):
            self.blocks.append(_attention_block(ends, layers, norms[0]))
            self.blocks += (
                ["post_norms('post_attention_layernorm', 'post_feedforward_layernorm')"]
                if after
                else []
            )
        if (
            moved
            or (plain and parent_values.get("gated_linear_unit", True))
            or any("mlp" in name for name in extra_tensors)
        ):
            names = ("gate_proj", "up_proj", "down_proj")
            if plain:  # the narrow side of each is the width of the model
                pair = sorted(matrices, key=lambda name: ends[name][0] < ends[name][1])
                names = ("", *(name.split(".")[1] for name in pair))
            self.blocks.append(
                f"mlp({layers!r}, norm={norms[1]!r}, gated={not plain}, projections={names!r})"
            )

    def _post_norms(self, layers: str) -> list[str]:
        """The tensors left over, except two norms of a layer in addition to those that the base names."""
        norm = re.compile(rf"{re.escape(layers)}\.(\w*norm\w*)\.weight")
        norms = {
            tensor_name: repr(m[1])
            for tensor_name in self.left_over
            if (m := norm.fullmatch(tensor_name))
        }
        if len(norms) != 2:
            return self.left_over
        self.fixed["norm_placement"] = "both"
        self.blocks.append(f"post_norms({', '.join(norms.values())}, {layers!r})")
        return [tensor_name for tensor_name in self.left_over if tensor_name not in norms]

    def _overrides(self, parent: str) -> str:
        """The lines of the class after its fields, but for those that would repeat the base's."""
        attributes = (("fixed", self.fixed), ("irrelevant", dict.fromkeys(self.idle)))
        lines = [
            f"    {name} = {{**{parent}.{name}, {repr(values)[1:]}\n"
            for name, values in attributes
            if values
        ]
        if self.has_padding_row != self.parent.has_padding_row:
            lines.append(f"    has_padding_row = {self.has_padding_row}\n")
        weights = (
            f"    weights = replace_blocks({', '.join((f'{parent}.weights', *self.blocks))})\n"
        )
        return "".join((*lines, weights if self.blocks else ""))

    @property
    def source(self) -> str:
        """The text of a module that registers the bridge."""
        name = self.architecture.removesuffix("ForCausalLM")
        parent = self.parent.__name__
        drop = tuple(dict.fromkeys(f.hf for f in self.parent.fields if f not in self.kept))
        parent_fields = (
            f"(f for f in {parent}.fields if f.hf not in {drop!r})" if drop else f"{parent}.fields"
        )
        provider = model_bridge.registration_of(self.base).provider
        constants = [
            f"constant({', '.join(map(repr, (key, *values)))})"
            for key, values in self.unread.items()
        ]
        options = f"provider={provider.__name__}, " if provider else ""
        fields = ", ".join((parent_fields, *dict.fromkeys(self.claimed.values()), *constants))
        body = f"""@register_bridge({self.architecture!r}, {options}model_type={self.model_type!r})
class {name}Bridge({parent}):
    fields = override({fields})
{self._overrides(parent)}"""
        return f'''# SPDX-License-Identifier: Apache-2.0
"""{name}'s bridge, drafted by `megatron-bridge port` from what {self.base} declares."""

from megatron.bridge.models.families import {", ".join(_names_of_families(body))}
from {self.parent.__module__} import {parent}


{body}'''

    @property
    def report(self) -> list[str]:
        """What there was to do, one line each."""
        return [
            f"{self.architecture} is nearest to {self.base}",
            *(
                f"key {key}={self.config[key]!r}: {text} reads it"
                for key, text in self.claimed.items()
            ),
            *(
                f"key {key} in {str(values)[:120]}: {_other_readers(key)}"
                for key, values in self.unread.items()
            ),
            *(f"key {key}: any value, it only initializes a new model" for key in self.idle),
            *(
                f"tensor {name}: {self.base} does not name it{_others_name(name)}"
                for name in self.left_over
            ),
        ]

    def problems(self, case: reference.Case, output: Path) -> list[str]:
        """What differs when the draft converts the tiny model on one process."""
        try:
            exec(self.source, {"__name__": "draft"})  # every value in it is a literal
            AutoBridge.from_hf_config(self.source_config).to_megatron_provider(load_weights=False)
            return list(on_one_process(case, output))
        except Exception as error:  # a draft can be wrong in any way
            return [f"{type(error).__name__}: {one_line(error, 1500)}"]
        finally:
            model_bridge.forget(self.architecture)


def _names_of_families(source: str) -> list[str]:
    """Return the names in the source code of a class that ``models.families`` defines."""
    nodes = ast.walk(ast.parse(source))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return sorted(name for name in names if hasattr(families, name))


def _attention_block(ends: Mapping[str, tuple[int, ...]], layers: str, norm: str | None) -> str:
    projection = next((m for name in ends if (m := re.fullmatch(_PROJECTIONS, name))), None)
    module, first = projection.groups() if projection else ("self_attn", "q_proj")
    outputs = [f"{module}.{name}" for name in ("o_proj", "out_proj", "dense", "c_proj")]
    output = next((name for name in outputs if f"{name}.weight" in ends), outputs[0])
    options: dict[str, Any] = (
        {"fused": first, "grouped": first == "query_key_value"} if first != "q_proj" else {}
    )
    norms = (re.fullmatch(rf"{module}\.q_(\w*norm)\.weight", name) for name in ends)
    options |= next(({"qk_norm": m[1]} for m in norms if m), {})
    keywords = ", ".join(
        f"{name}={value!r}" for name, value in (options | {"names": module}).items()
    )
    return f"attention({layers!r}, {norm!r}, {output!r}, {keywords})"


def _other_readers(key: str) -> str:
    families = model_bridge.families_that_read(key)
    read = f"look at the fields of {', '.join(families[:2])}" if families else "nothing reads it"
    return f"{read}; others are refused"


def _others_name(tensor: str) -> str:
    """Which families name a tensor that ends so in a layer."""
    end = re.sub(r"^.*?(\.\*\.|$)", "*.", tensor)
    registries = {
        name: bridge().mapping_registry()
        for name, bridge in model_bridge.declared_bridges().items()
    }
    names = (
        (name, hf)
        for name, registry in registries.items()
        for m in registry.get_all_mappings()
        for hf in m.hf_names
    )
    owners = list(dict.fromkeys(name for name, hf in names if hf.endswith(end)))
    return f"; look at {', '.join(owners[:2])}" if owners else ""
