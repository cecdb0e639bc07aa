# SPDX-License-Identifier: Apache-2.0
"""From a command line of Megatron-LM's ``pretrain_gpt.py`` to a config.

Each argument becomes a dotted override: by a function in ``_SPECIAL``, by a row of ``SETTINGS``, or under the name
that ``megatron_lm.yaml`` has for it. The overrides are applied to a config with the defaults of Megatron-LM.
"""

import ast
import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from megatron.bridge.cli.migrate.translation import Translation
from megatron.bridge.cli.migrate.yaml_arguments import read_yaml_arguments
from megatron.bridge.training.config.ranges import all_ranges
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError, misspelling, refuse

type Arguments = dict[str, list[str]]
"""Argument without dashes -> its values."""

TABLES = yaml_text.tables_beside(__file__)


@dataclass(frozen=True)
class ConfigSetting:
    """A key of a config that an argument sets."""

    key: str
    value: bool | int | str | None = None
    """None takes the value of the argument."""


SETTINGS: dict[str, tuple[ConfigSetting, ...]] = {
    "accumulate-allreduce-grads-in-fp32": (ConfigSetting("ddp.grad_reduce_in_fp32", True),),
    "activations-checkpoint-method": (
        ConfigSetting("model.recompute_granularity", "full"),
        ConfigSetting("model.recompute_method"),
    ),
    "apply-layernorm-1p": (ConfigSetting("model.layernorm_zero_centered_gamma", True),),
    "checkpoint-activations": (
        ConfigSetting("model.recompute_granularity", "full"),
        ConfigSetting("model.recompute_method", "uniform"),
        ConfigSetting("model.recompute_num_layers", 1),
    ),
    "cpu-offloading-num-layers": (
        ConfigSetting("model.cpu_offloading", True),
        ConfigSetting("model.cpu_offloading_num_layers"),
    ),
    "disable-bias-linear": (ConfigSetting("model.add_bias_linear", False),),
    "grad-reduce-in-bf16": (ConfigSetting("ddp.grad_reduce_in_fp32", False),),
    "no-bias-gelu-fusion": (ConfigSetting("model.bias_activation_fusion", False),),
    "no-bias-swiglu-fusion": (ConfigSetting("model.bias_activation_fusion", False),),
    "no-check-for-nan-in-loss-and-grad": (
        ConfigSetting("rerun_state_machine.check_for_nan_in_loss", False),
        ConfigSetting("rerun_state_machine.check_for_nan_in_grad", False),
    ),
    "no-overlap-p2p-communication": (ConfigSetting("model.overlap_p2p_comm", False),),
    "fp4-param-gather": (
        ConfigSetting("model.fp4_param", True),
        ConfigSetting("ddp.fp4_param_gather", True),
    ),
    "fp8-param-gather": (
        ConfigSetting("model.fp8_param", True),
        ConfigSetting("ddp.fp8_param_gather", True),
    ),
    "no-rope-fusion": (ConfigSetting("model.apply_rope_fusion", False),),
    "quick-geglu": (
        ConfigSetting("model.gated_linear_unit", True),
        ConfigSetting("model.activation_func", "megatron.core.fusions.fused_bias_geglu.quick_gelu"),
    ),
    "recompute-activations": (ConfigSetting("model.recompute_granularity", "selective"),),
    "reuse-grad-buf-for-mxfp8-param-ag": (
        ConfigSetting("ddp.reuse_grad_buf_for_mxfp8_param_ag", True),
        ConfigSetting("optimizer.reuse_grad_buf_for_mxfp8_param_ag", True),
    ),
    "seed": (ConfigSetting("rng.seed"), ConfigSetting("dataset.random_seed")),
    "seq-length": (ConfigSetting("dataset.seq_length"), ConfigSetting("model.seq_length")),
    "squared-relu": (
        ConfigSetting("model.activation_func", "megatron.core.activations.squared_relu"),
    ),
    "swiglu": (
        ConfigSetting("model.gated_linear_unit", True),
        ConfigSetting("model.activation_func", "torch.nn.functional.silu"),
    ),
    "untie-embeddings-and-output-weights": (
        ConfigSetting("model.share_embeddings_and_output_weights", False),
    ),
    "use-rope-scaling": (ConfigSetting("model.rope_scaling", True),),
    "use-rotary-position-embeddings": (ConfigSetting("model.position_embedding_type", "rope"),),
}
"""Arguments that set several keys, or a key to a value that is not theirs."""

LIST_FIELDS = {
    "cuda_graph_modules",
    "hierarchical_context_parallel_sizes",
    "iterations_to_skip",
    "offload_modules",
    "profile_ranks",
    "rampup_batch_size",
    "recompute_modules",
}
"""Fields that take a list even of one value."""

LAYER_PATTERN_FIELDS = {
    "moe_layer_freq",
    "window_attn_skip_freq",
    "no_rope_freq",
    "linear_attention_freq",
}
"""Fields that take an expression such as ``[0]*3+[1]*58``."""

_VARIABLE = re.compile(r"\$(?:\{([^}:]*)(?::-([^}]*))?\}|(\w+|[@*]))")
_FORMATS = (
    "bf16 fp16 fp8_recipe fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16 fp4_recipe "
    "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
)
_PRECISION = {"fp8-format": "fp8", "fp4-format": "fp4"} | {
    name.replace("_", "-"): name for name in _FORMATS.split()
}
LATENT_DEFAULTS: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "rotary_scaling_factor": 1.0,
}
_IMPLIED, _MISSING = (
    {name: reason for reason, names in TABLES[table].items() for name in names}
    for table in ("implied", "missing")
)
_BLENDS = ("data-path", "train-data-path", "valid-data-path", "test-data-path")
_BLEND_FILES = ("data-args-path", "per-split-data-args-path")


@dataclass
class MegatronLMRun:
    """A translated command line."""

    translation: Translation
    arguments: Arguments
    world_size: (
        int | None
    )  # number of processes that a ``torchrun`` in front of the script starts, if there is one


def translate(command: str, world_size: int | None = None) -> MegatronLMRun:
    """Translate ``[torchrun ...] pretrain_gpt.py --argument value ...``, or the arguments alone."""
    launcher, words = _split(_expand(command))
    arguments = _parse(words)
    if "yaml-cfg" in arguments:
        arguments = _arguments_of_yaml(arguments)
    translation = Translation()
    refuse(problem for name in arguments for problem in _unknown(name))
    ranks = world_size or _launched(launcher)
    for name, values in arguments.items():
        _translate(name, values, arguments, translation)
    for derive in (_precision, _sizes, _data, _tokenizer, _unused):
        derive(arguments, translation)
    _batch_size(arguments, translation, ranks)
    _warmup_start(arguments, translation)
    translation.refuse_out_of_range(all_ranges())
    return MegatronLMRun(translation, arguments, ranks)


def _expand(command: str) -> str:
    """Join continued lines, and replace shell variables by their values in the environment."""
    text = re.sub(r"\\\r?\n", " ", command)
    variables = [(match[1] or match[3] or match[0], match[2]) for match in _VARIABLE.finditer(text)]
    unset = [
        f"${name}" for name, default in variables if os.environ.get(name) is None and not default
    ]
    if unset:
        names = ", ".join(dict.fromkeys(unset))
        raise UserError(
            f"the command line has shell variables without a value: {names}; export them, or put `echo` in front "
            "of the command in its script and give what that prints"
        )
    return _VARIABLE.sub(lambda match: os.environ.get(match[1] or match[3]) or match[2] or "", text)


def _split(text: str) -> tuple[list[str], list[str]]:
    """The words up to the script, and those after it."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UserError(f"the command line cannot be read ({error}): close its quotes") from error
    script = next((index for index, word in enumerate(words) if word.endswith(".py")), -1)
    launcher = words[: script + 1]
    _refuse_other_script(launcher)
    words = words[script + 1 :]
    if not words or not words[0].startswith("--"):
        raise UserError(
            f"the command line has no arguments of Megatron-LM{f' ({words[0]})' if words else ''}: give "
            "`pretrain_gpt.py --num-layers ...`, or the arguments alone"
        )
    return launcher, words


_OTHER_SCRIPTS = {
    "pretrain_vlm.py": "vision-language models are trained from a Hugging Face model here, such as "
    "`train --recipe qwen25_vl_3b_finetune_config --hf-model ID`",
    "pretrain_bert.py": "encoders are not supported; decoders are trained with pretrain_gpt.py's arguments",
    "pretrain_t5.py": "encoder-decoder models are not supported",
    "pretrain_retro.py": "retrieval-augmented pretraining is not supported",
}
"""Scripts of other models -> what to do instead. Those of GPT and hybrid models (Mamba) have the same arguments."""


def _refuse_other_script(launcher: list[str]) -> None:
    script = launcher[-1].rpartition("/")[2] if launcher else ""
    if script in _OTHER_SCRIPTS:
        raise UserError(f"{script}: {_OTHER_SCRIPTS[script]}")


def _parse(words: list[str]) -> Arguments:
    """The values of each argument; the last one wins, as with argparse."""
    arguments: Arguments = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values = arguments[name.replace("_", "-")] = [value] if equals else []
        else:
            values.append(word)
    return arguments


def _arguments_of_yaml(arguments: Arguments) -> Arguments:
    """The arguments that the file of ``--yaml-cfg`` stands for; Megatron-LM ignores all others next to it."""
    given = arguments["yaml-cfg"]
    if len(given) != 1:
        raise UserError("--yaml-cfg takes one file")
    idle = [f"--{name}" for name in arguments if name != "yaml-cfg"]
    if idle:
        raise UserError(
            f"{', '.join(idle)} next to --yaml-cfg: Megatron-LM ignores all other arguments; write them into "
            f"{given[0]}"
        )
    return _parse(read_yaml_arguments(Path(given[0])))


def _launched(words: list[str]) -> int | None:
    text = " ".join(words)
    per_node, nodes = (
        re.search(rf"--{name}[= ](\d+)", text) for name in ("nproc[_-]per[_-]node", "nnodes")
    )
    return int(per_node[1]) * (int(nodes[1]) if nodes else 1) if per_node else None


@cache
def _fields() -> dict[str, str]:
    """Argument -> dotted key, for all arguments that give a field its value."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    groups = {
        "optimizer": OptimizerConfig,
        "ddp": DistributedDataParallelConfig,
        "model": MLATransformerConfig,
    }
    keys_of_arguments = {
        _dashed(entry.name): f"{group}.{entry.name}"
        for group, kind in groups.items()
        for entry in fields(kind)
    }
    keys_of_arguments |= {
        f"ddp-{name}": key for name, key in keys_of_arguments.items() if key.startswith("ddp.")
    }
    for group, pairs in TABLES["renamed"].items():
        keys_of_arguments |= {name: f"{group}.{key}" for name, key in pairs.items()}
    for group, names in TABLES["same_names"].items():
        prefix = {"dataset.fim": "fim_", "inprocess_restart": "inprocess_"}.get(group, "")
        keys_of_arguments |= {
            _dashed(name): f"{group}.{name.removeprefix(prefix)}" for name in names
        }
    return keys_of_arguments


def _settings_of(name: str) -> tuple[ConfigSetting, ...]:
    """Return the keys that an argument sets; none if the argument is unknown."""
    if name in SETTINGS:
        return SETTINGS[name]
    fields_by_argument = _fields()
    if name in fields_by_argument:
        return (ConfigSetting(fields_by_argument[name]),)
    positive_name = name.removeprefix("no-")
    if positive_name != name and positive_name in fields_by_argument:
        return (ConfigSetting(fields_by_argument[positive_name], False),)
    return ()


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _missing(name: str) -> str | None:
    """Why the argument has no counterpart; None if it has one or is unknown."""
    if name in SETTINGS or name in _fields() or name in _SPECIAL:
        return _MISSING.get(name)
    return next(
        (reason for pattern, reason in _MISSING.items() if fnmatchcase(name, pattern)), None
    )


def _unknown(name: str) -> list[str]:
    if name in _SPECIAL or name in _IMPLIED or _missing(name) or _settings_of(name):
        return []
    hint = misspelling(name, [*_SPECIAL, *SETTINGS, *_fields(), *_IMPLIED, *_MISSING])
    return [
        f"--{name} is not an argument of Megatron-LM that this command knows{hint or ': leave it out'}"
    ]


def _translate(
    name: str, values: list[str], arguments: Arguments, translation: Translation
) -> None:
    if name in _SPECIAL:
        if (special := _SPECIAL[name]) is not None:
            special(values, arguments, translation)
    elif name in _IMPLIED:
        translation.implied[f"--{name}"] = _IMPLIED[name]
    elif (reason := _missing(name)) is not None:
        translation.missing[f"--{name}"] = reason
    else:
        settings = _settings_of(name)
        if values and all(setting.value is not None for setting in settings):
            raise UserError(f"--{name} takes no value, but {values[0]} follows it: remove that")
        for setting in settings:
            value = setting.value
            if value is None:
                value = _value(name, setting.key, values)
            translation.set(setting.key, value, f"--{name}")


def _value(name: str, key: str, values: list[str]) -> str:
    field = key.rpartition(".")[2]
    if field in LAYER_PATTERN_FIELDS and values:
        return json.dumps(_pattern(name, values[0]))
    if len(values) > 1 or (values and field in LIST_FIELDS):
        return f"[{', '.join(' '.join(values).split())}]"
    return values[0] if values else "true"


def _pattern(name: str, text: str) -> int | list[int]:
    """The value of an expression such as ``[0]*3+[1]*58``."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise UserError(f"--{name}={text}: give a number, or lists such as [0]*3+[1]*58") from error


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=items):
            return [_evaluate(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left) + _evaluate(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _evaluate(left) * _evaluate(right)
        case _:
            raise ValueError(ast.dump(node))


def _number(arguments: Arguments, *names: str) -> int | None:
    """The value of the first of the arguments that is given."""
    for name in names:
        if values := arguments.get(name):
            if not values[0].isdecimal():
                raise UserError(f"--{name}={values[0]}: give a whole number")
            return int(values[0])
    return None


def _precision(arguments: Arguments, translation: Translation) -> None:
    old = {"fp8-e4m3": "e4m3", "fp8-hybrid": "hybrid"}
    given = {
        key: _value(name, key, arguments[name])
        for name, key in _PRECISION.items()
        if name in arguments
    }
    for name in old.keys() & arguments.keys():
        given["fp8"] = old[name]
    if given:
        values = {"_target_": "MixedPrecisionConfig", **given}
        text = ", ".join(f"{key}: {value}" for key, value in values.items())
        names = [f"--{name}" for name in (*_PRECISION, *old) if name in arguments]
        translation.set("mixed_precision", f"{{{text}}}", " ".join(names))
    if "fp16" in arguments and "accumulate-allreduce-grads-in-fp32" not in arguments:
        translation.set("ddp.grad_reduce_in_fp32", "false", "--fp16")


def _sizes(arguments: Arguments, translation: Translation) -> None:
    """Set the widths that Megatron-LM derives from others, and the virtual stages."""
    hidden = _number(arguments, "hidden-size")
    if hidden is not None and "ffn-hidden-size" not in arguments:
        width = int(4 * hidden * 2 / 3 / 64) * 64 if "swiglu" in arguments else 4 * hidden
        translation.set("model.ffn_hidden_size", width, "default of Megatron-LM")
    layers_per_stage = _number(arguments, "num-layers-per-virtual-pipeline-stage")
    if layers_per_stage is not None:
        layers = _number(arguments, "num-layers") or 0
        _set_virtual(
            layers // layers_per_stage,
            arguments,
            translation,
            "--num-layers-per-virtual-pipeline-stage",
        )
    if layout := arguments.get("pipeline-model-parallel-layout"):
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )

        count = PipelineParallelLayerLayout.get_num_stages_from_str(layout[0])
        _set_virtual(count, arguments, translation, "--pipeline-model-parallel-layout")


def _set_virtual(count: int, arguments: Arguments, translation: Translation, source: str) -> None:
    """Divide ``count`` stages among the pipeline's ranks."""
    stages = _number(arguments, "pipeline-model-parallel-size") or 1
    if count // stages > 1:
        translation.set("model.virtual_pipeline_model_parallel_size", count // stages, source)


def _unused(arguments: Arguments, translation: Translation) -> None:
    """Drop the settings that Megatron-LM switches off, and the files of mock data."""
    if (_number(arguments, "tensor-model-parallel-size", "model-parallel-size") or 1) == 1:
        translation.drop(
            "model.sequence_parallel", "Megatron-LM switches it off without tensor parallelism"
        )
    if "num-experts" not in arguments and "E" not in translation.settings.get(
        "model.hybrid_override_pattern", ""
    ):
        translation.drop("model.expert_tensor_parallel_size", "the model has no experts")
    if "mock-data" in arguments:
        for key in [
            key for key in translation.settings if key.startswith("dataset.") and key not in _MOCK
        ]:
            translation.drop(key, "mock data has no files")


def _query_groups(values: list[str], arguments: Arguments, translation: Translation) -> None:
    if "group-query-attention" in arguments:
        translation.set(
            "model.num_query_groups",
            _number(arguments, "num-query-groups") or 1,
            "--num-query-groups",
        )
    else:
        translation.implied["--num-query-groups"] = (
            "Megatron-LM reads it only with --group-query-attention"
        )


def _implementation(values: list[str], arguments: Arguments, translation: Translation) -> None:
    if values == ["local"]:
        translation.set("model.backend", "torch", "--transformer-impl")
    else:
        translation.implied["--transformer-impl"] = (
            "Transformer Engine is used where it is installed"
        )


def _window(values: list[str], arguments: Arguments, translation: Translation) -> None:
    sides = re.findall(r"-?\d+", " ".join(values))
    translation.set("model.window_size", f"[{', '.join(sides)}]", "--window-size")


def _pattern_of_layers(values: list[str], arguments: Arguments, translation: Translation) -> None:
    pattern = values[0] if values else ""
    translation.set("model.hybrid_override_pattern", json.dumps(pattern), "--hybrid-layer-pattern")
    if "num-layers" not in arguments:
        translation.set("model.num_layers", len(pattern.replace("|", "")), "--hybrid-layer-pattern")
    _set_virtual(pattern.count("|") + 1, arguments, translation, "--hybrid-layer-pattern")


def _data(arguments: Arguments, translation: Translation) -> None:
    from megatron.bridge.data.pretraining.blend import get_blend_and_blend_per_split

    given = {name: arguments[name] for name in _BLENDS if name in arguments}
    files = {name: arguments[name][0] for name in _BLEND_FILES if arguments.get(name)}
    values = {f"{name.replace('-', '_')}s": words for name, words in given.items()}
    values |= {name.replace("-", "_"): path for name, path in files.items()}
    blend, per_split = get_blend_and_blend_per_split(**values)  # pyright: ignore[reportArgumentType]
    source = " ".join(f"--{name}" for name in (*given, *files))
    if blend is not None:
        translation.set("dataset.blend", list(blend), source)
        if "split" not in arguments:
            translation.set("dataset.split", "969,30,1", "default of Megatron-LM")
    if "multiple-validation-sets" in arguments:
        if per_split is None or per_split[1] is None:
            raise UserError(
                "--multiple-validation-sets needs a corpus for each set: give them with --valid-data-path"
            )
        sets = _validation_sets(arguments, per_split[1][0])
        translation.set("validation.sets", json.dumps(sets), "--multiple-validation-sets")
        per_split = (per_split[0], None, per_split[2])
    if per_split is not None:
        translation.set(
            "dataset.blend_per_split", [part and list(part) for part in per_split], source
        )


def _validation_sets(arguments: Arguments, prefixes: list[str]) -> dict[str, str]:
    """Return the corpora of the validation data by their names, which are their numbers if none are given."""
    names = arguments.get("validation-set-names") or [str(index) for index in range(len(prefixes))]
    if len(names) != len(prefixes) or len(set(names)) != len(names):
        raise UserError(
            f"--validation-set-names={' '.join(names)} for the {len(prefixes)} corpora of the validation data: "
            "give each a name of its own"
        )
    return dict(zip(names, prefixes, strict=True))


_MOCK = (
    "dataset.seq_length",
    "dataset.random_seed",
    "dataset.num_workers",
)  # settings of mock data


def _tokenizer(arguments: Arguments, translation: Translation) -> None:
    model = arguments.get("tokenizer-model")
    size = _number(arguments, "vocab-size")
    default = (
        "HuggingFaceTokenizer"
        if model
        else "GPT2BPETokenizer"
        if "merge-file" in arguments
        else None
    )
    kind = next(iter(arguments.get("tokenizer-type", [])), default)
    if padded := _number(arguments, "padded-vocab-size"):
        translation.set("model.vocab_size", padded, "--padded-vocab-size")
        translation.set("model.should_pad_vocab", "false", "--padded-vocab-size")
    elif size and kind != "NullTokenizer":
        translation.set("model.vocab_size", size, "--vocab-size")
    if kind == "NullTokenizer" or (kind is None and size):
        translation.set("tokenizer.tokenizer_type", "NullTokenizer", "--tokenizer-type")
        for key in ("tokenizer.vocab_size", "model.vocab_size"):
            translation.set(key, (size or 0) + 1, "--vocab-size, and a token that ends documents")
    elif kind == "HuggingFaceTokenizer" and model:
        translation.set("tokenizer.tokenizer_model", model[0], "--tokenizer-model")
    elif kind == "GPT2BPETokenizer":
        translation.set(
            "tokenizer.tokenizer_model", "openai-community/gpt2", f"--tokenizer-type={kind}"
        )
        translation.set("model.vocab_size", size or 50257, f"--tokenizer-type={kind}")
        for name in {"--vocab-file", "--merge-file"} & translation.missing.keys():
            del translation.missing[name]
            translation.implied[name] = (
                "openai-community/gpt2 has GPT-2's; give your directory if yours differ"
            )
    elif kind is not None:
        translation.missing["--tokenizer-type"] = (
            f"{kind} reads a file; set tokenizer.tokenizer_model to the directory or hub id of the same tokenizer "
            "in Hugging Face's format. `megatron-bridge data preprocess --tokenizer-type` writes one next to the "
            "data, as PREFIX_tokenizer"
        )


def _batch_size(arguments: Arguments, translation: Translation, ranks: int | None) -> None:
    """Megatron-LM's default is one microbatch on each data-parallel rank."""
    if "global-batch-size" in arguments or "micro-batch-size" not in arguments:
        return
    if ranks is None:
        raise UserError(
            "--global-batch-size is not given, so it depends on the number of processes: add it, or --world-size N"
        )
    sizes = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    for name in sizes:
        ranks //= _number(arguments, name) or 1
    samples = max(ranks, 1) * (_number(arguments, "micro-batch-size") or 1)
    translation.set("train.global_batch_size", samples, "default of Megatron-LM")


def _warmup_start(arguments: Arguments, translation: Translation) -> None:
    """Megatron-LM's warmup begins at a learning rate of 0."""
    lengths = {"lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction"}
    if lengths & arguments.keys() and "lr-warmup-init" not in arguments:
        translation.set("scheduler.lr_warmup_init", 0.0, "default of Megatron-LM")


_SPECIAL: dict[str, Callable[[list[str], Arguments, Translation], None] | None] = {
    **dict.fromkeys([*_PRECISION, "fp8-e4m3", "fp8-hybrid", *_BLENDS, *_BLEND_FILES]),
    **dict.fromkeys(["tokenizer-type", "tokenizer-model", "vocab-size", "padded-vocab-size"]),
    **dict.fromkeys(["multiple-validation-sets", "validation-set-names"]),
    "num-layers-per-virtual-pipeline-stage": None,
    "num-query-groups": _query_groups,
    "group-query-attention": _query_groups,
    "transformer-impl": _implementation,
    "window-size": _window,
    "hybrid-layer-pattern": _pattern_of_layers,
    "hybrid-override-pattern": _pattern_of_layers,
}
"""Arguments that need code; other arguments' functions handle those with None."""
