# SPDX-License-Identifier: Apache-2.0
"""What a ``quantization_config`` declares: the formats of its checkpoint, and what the stored tensors do not say.

``METHODS`` has a row for each ``quant_method``, with its keys and which of their values can be represented. A key that
is not known is refused, because it might change what the stored numbers mean.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from megatron.bridge.models.hf_pretrained import quantization_formats as formats
from megatron.bridge.models.hf_pretrained.quantization_formats import Format, Scheme
from megatron.bridge.utils import strict_json
from megatron.bridge.utils.errors import UserError, did_you_mean

WAY_OUT = "convert a bfloat16 or float32 version, from its authors or from save_pretrained of transformers"
KEY = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"
CONFIG_FILES = (MODELOPT_FILE, "quantize_config.json", "quant_config.json")
"""Files next to ``config.json`` that tell a reader that the weights are quantized."""

Config = Mapping[str, Any]
Accepts = Callable[[Any], bool]


def _anything(_: Any) -> bool:
    return True


def _any_of(*values: Any) -> Accepts:
    return lambda value: value in values


def _is_block(value: Any) -> bool:
    if value is None:
        return True
    is_pair = isinstance(value, list | tuple) and len(cast(Sequence[Any], value)) == 2
    return is_pair and all(isinstance(size, int) and size > 0 for size in value)


def _is_structure(value: Any) -> bool:
    return _is_block(value) or bool(re.fullmatch(r"[1-9]\d*x[1-9]\d*", str(value)))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in cast(Any, value))


def _is_mapping_or_none(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _is_empty(value: Any) -> bool:
    return not value


def _is_dense(value: Any) -> bool:
    return not value or value.get("format") == "dense"


@dataclass(frozen=True)
class Method:
    """One ``quant_method``."""

    formats: tuple[Format, ...]
    keys: Mapping[str, Accepts]  # key -> whether its value can be represented
    scheme_of: Callable[[Config, str], Scheme] = lambda config, name: Scheme()
    nested: Mapping[str, Mapping[str, Accepts]] | None = (
        None  # the same for dicts in ``config_groups``
    )


def _fp8_scheme(config: Config, _: str) -> Scheme:
    block_size = cast(Sequence[int] | None, config.get("weight_block_size"))
    block = None if block_size is None else (block_size[0], block_size[1])
    return Scheme(block, powers=config.get("scale_fmt") == "ue8m0")


def _gptq_scheme(config: Config, _: str) -> Scheme:
    bits = None if config.get("dynamic") else config.get("bits")
    return Scheme(bits=bits, is_gptq_v2=config.get("checkpoint_format") == "gptq_v2")


def _group_scheme(config: Config, name: str) -> Scheme:
    """Return the scheme of the config group whose targets name the module."""
    group = group_of(config, name.rpartition(".")[0])
    weights: Config = (group or {}).get("weights") or {}
    structure = weights.get("block_structure")
    block = None
    if weights.get("strategy") == "block" and structure:
        sizes = structure.split("x") if isinstance(structure, str) else structure
        block = (int(sizes[0]), int(sizes[1]))
    bits = weights.get("num_bits")
    return Scheme(block, "block_structure", bits)


def group_of(config: Config, module: str) -> Config | None:
    """Return the group of ``config_groups`` that a module is in: by name, then by expression, then by class."""
    groups: Iterable[Config] = (config.get("config_groups") or {}).values()
    ranked: list[tuple[int, Config]] = []
    for group in groups:
        for target in group.get("targets") or ():
            if target.startswith("re:"):
                if re.match(target[3:], module):
                    ranked.append((1, group))
            elif target == module:
                ranked.append((0, group))
            elif target in ("Linear", "LinearBase", "FusedMoE"):
                ranked.append((2, group))
    return min(ranked, key=lambda item: item[0])[1] if ranked else None


def _keys(*harmless: str, **checked: Accepts) -> dict[str, Accepts]:
    return {**dict.fromkeys(harmless, _anything), **checked}


_EXCEPTIONS = ("modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize")
_OF_WEIGHTS = _keys(
    *("group_size", "strategy", "observer", "observer_kwargs", "symmetric"),
    *("scale_dtype", "zp_dtype"),
    num_bits=_any_of(2, 4, 8),
    block_structure=_is_structure,
    type=_any_of("int", "float"),
    dynamic=_any_of(False, None),
    actorder=_any_of(None, False, "weight", "static", "group", "dynamic"),
)
_OF_GROUP = _keys(
    *("input_activations", "output_activations", "format", "quant_algo"),
    targets=_is_names,
    weights=_is_mapping_or_none,
)
_GROUPS: Mapping[str, Mapping[str, Accepts]] = {"group": _OF_GROUP, "weights": _OF_WEIGHTS}
_CT_FORMATS = (
    *(None, "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)
_MODELOPT_ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "NVFP4", "W4A16_NVFP4"),
    *("MXFP8", "W8A16", "MIXED_PRECISION", None),
)

METHODS: dict[str, Method] = {
    "fp8": Method(
        (formats.SCALED_WEIGHTS, formats.SCALED_PARAMETERS),
        _keys(
            *_EXCEPTIONS,
            activation_scheme=_any_of("dynamic", "static"),
            weight_block_size=_is_block,
            fmt=_any_of("e4m3", "float8_e4m3fn", None),
            scale_fmt=_any_of("float", "ue8m0", None),
            expert_dtype=_any_of("fp8", None),
        ),
        _fp8_scheme,
    ),
    "fbgemm_fp8": Method(
        (formats.SCALED_WEIGHTS, formats.SCALED_PARAMETERS),
        _keys(*_EXCEPTIONS, "activation_scale_ub"),
    ),
    "mxfp4": Method((formats.MXFP4,), _keys("dequantize", "modules_to_not_convert")),
    "compressed-tensors": Method(
        (
            formats.PACKED_INTEGERS,
            formats.PACKED_FLOATS,
            formats.SCALED_WEIGHTS,
            formats.SCALED_PARAMETERS,
        ),
        _keys(
            *("config_groups", "global_compression_ratio", "ignore", "kv_cache_scheme", "version"),
            *("run_compressed", "dequantize", "use_optimized_inference"),
            format=_any_of(*_CT_FORMATS),
            quantization_status=_any_of("compressed", "frozen", None),
            sparsity_config=_is_dense,
            transform_config=_is_empty,
        ),
        _group_scheme,
        _GROUPS,
    ),
    "modelopt": Method(
        (formats.NVFP4, formats.SCALED_WEIGHTS, formats.SCALED_PARAMETERS),
        _keys(
            *("config_groups", "ignore", "exclude_modules", "kv_cache_scheme", "producer"),
            *("kv_cache_quant_algo", "group_size", "quantized_layers"),
            quant_algo=_any_of(*_MODELOPT_ALGORITHMS),
            has_zero_point=_any_of(False, None),
            pre_quant_scale=_any_of(False, None),
        ),
        nested=_GROUPS,
    ),
    "gptq": Method(
        (formats.GPTQ,),
        _keys(
            *("group_size", "sym", "desc_act", "static_groups", "true_sequential", "damp_percent"),
            *("damp_auto_increment", "dynamic", "lm_head", "meta", "uuid", "dataset", "tokenizer"),
            *("model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block"),
            *("batch_size", "pad_token_id", "use_cuda_fp16", "use_exllama", "disable_exllama"),
            *("exllama_config", "max_input_length", "cache_block_outputs", "backend", "mse"),
            *("modules_in_block_to_quantize", "modules_to_not_convert", "model_name_or_path"),
            *("model_file_base_name", "quantizer", "parallel_packing", "hyb_act", "fail_safe"),
            *("act_group_aware", "pack_impl", "offload_to_disk", "offload_to_disk_path", "gptaq"),
            *("gptaq_alpha", "adapter", "device", "compute_device_filter", "failsafe", "v2_alpha"),
            *(
                "is_marlin_format_checked",
                "hessian",
                "v2",
                "act_order",
                "auto_forward_data_parallel",
            ),
            bits=_any_of(2, 4, 8),
            checkpoint_format=_any_of("gptq", "gptq_v2", None),
            format=_any_of("gptq", "gptq_v2", None),
            quant_method=_any_of("gptq"),
            pack_dtype=_any_of("int32", None),
            is_marlin_format=_any_of(False, None),
            rotation=_any_of(None, False),
        ),
        _gptq_scheme,
    ),
    "awq": Method(
        (formats.AWQ,),
        _keys(
            *("group_size", "q_group_size", "modules_to_not_convert", "backend", "do_fuse"),
            *("fuse_max_seq_len", "exllama_config", "modules_to_fuse", "zero_point"),
            bits=_any_of(4, None),
            w_bit=_any_of(4, None),
            version=_any_of("gemm", "GEMM", None),
        ),
    ),
    "bitsandbytes": Method(
        (formats.BNB_4BIT, formats.BNB_INT8),
        _keys(
            *("load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"),
            *("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_threshold"),
            *("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
            *("llm_int8_skip_modules", "_load_in_4bit", "_load_in_8bit", "target_modules"),
        ),
    ),
}


for _name in ("modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"):
    METHODS[_name] = METHODS["modelopt"]


def check(config: Config) -> str:
    """Check a ``quantization_config``; returns its method."""
    name = config.get("quant_method")
    if name not in METHODS:
        raise UserError(
            f"{KEY}.quant_method={name!r} is not supported: use {', '.join(METHODS)}, or {WAY_OUT}"
        )
    method = METHODS[name]
    _check_keys(KEY, config, method.keys, name)
    groups = config.get("config_groups") or {}
    if method.nested is not None and not isinstance(groups, Mapping):
        raise UserError(f"{KEY}.config_groups={groups!r} is not a table of groups: {WAY_OUT}")
    if method.nested is not None:
        for label, group in cast(Mapping[str, Any], groups).items():
            where = f"{KEY}.config_groups.{label}"
            if not isinstance(group, Mapping):
                raise UserError(f"{where}={group!r} is not a table: {WAY_OUT}")
            group = cast(Config, group)
            _check_keys(where, group, method.nested["group"], name)
            _check_keys(
                f"{where}.weights", group.get("weights") or {}, method.nested["weights"], name
            )
    return name


def _check_keys(where: str, config: Config, known: Mapping[str, Accepts], method: str) -> None:
    for key, value in config.items():
        if key == "quant_method" or (key.startswith("_") and key not in known):
            continue
        if key not in known:
            hint = did_you_mean(key, known)
            raise UserError(
                f"{where}.{key}={value!r} is not known for quant_method={method!r}"
                f"{hint or '; remove it if it changes nothing, or '}{'' if hint else WAY_OUT}"
            )
        if not known[key](value):
            raise UserError(
                f"{where}.{key}={value!r} is not supported with quant_method={method!r}: {WAY_OUT}"
            )


def quantization_of(config: Config, directory: Path | None = None) -> Config | None:
    """Return the ``quantization_config`` of a model as a dict, or None.

    Args:
        config: the model's ``config.json``, where the text model may have its own.
        directory: the model's folder, in which older exports of ModelOpt have a file instead.
    """
    text: Config = config.get("text_config") or {}
    declared = config.get(KEY) or (text.get(KEY) if isinstance(text, Mapping) else None)
    if declared is not None:
        plain = as_plain_dict(declared)
        return as_modelopt(plain) if "quantization" in plain else plain
    if directory is None or not (directory / MODELOPT_FILE).is_file():
        return None
    return as_modelopt(cast(Config, strict_json.read(directory / MODELOPT_FILE)))


def as_modelopt(content: Config) -> Config:
    """Return the content of ModelOpt's own file as a ``quantization_config``."""
    details: dict[str, Any] = dict(content.get("quantization") or {})
    producer = {"producer": content["producer"]} if "producer" in content else {}
    return {**details, **producer, "quant_method": "modelopt"}


def without_quantization(config: Config) -> dict[str, Any]:
    """The Hugging Face config of the dequantized model."""
    declared = quantization_of(config)
    plain = dict(config)
    if declared is None:
        return plain
    check(declared)
    plain.pop(KEY, None)
    if isinstance(plain.get("text_config"), Mapping) and KEY in plain["text_config"]:
        plain["text_config"] = {
            key: value for key, value in plain["text_config"].items() if key != KEY
        }
    return plain


def as_plain_dict(quantization: Any) -> Config:
    """A ``quantization_config`` as a dict; transformers may have made it an object."""
    if isinstance(quantization, Mapping):
        return cast(Config, quantization)
    if not hasattr(quantization, "to_dict"):
        raise UserError(f"{KEY}={quantization!r} is not a table: {WAY_OUT}")
    plain: Iterable[tuple[str, Any]] = quantization.to_dict().items()
    return {key: getattr(value, "value", value) for key, value in plain}


def scheme_finder(config: Config) -> Callable[[str], Scheme]:
    """Return the function from a tensor's plain name to what ``config`` declares about it."""
    method = METHODS[config["quant_method"]]
    return partial(method.scheme_of, config)
