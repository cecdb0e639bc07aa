# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face causal language model on disk or on the hub, each part read when it is first asked for."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Set
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from megatron.bridge.models.hf_pretrained import (
    hub,
    quantization_configs,
    quantized_checkpoint,
    transformers_reads,
)
from megatron.bridge.models.hf_pretrained.model_folder import RECORD
from megatron.bridge.models.hf_pretrained.own_configs import own_config
from megatron.bridge.models.hf_pretrained.safetensors_files import SafetensorsCheckpoint
from megatron.bridge.utils import atomic, strict_json
from megatron.bridge.utils.errors import UserError, did_you_mean

# a model_type that transformers does not know -> the one whose architecture the models have
_OMNI = "nemotron_h_omni"
_ALIASES = {"kimi_k2": "deepseek_v3", "NemotronH_Nano_Omni_Reasoning_V3": _OMNI}
_SIZES = {
    **dict.fromkeys(
        ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), 10_000
    ),
    **dict.fromkeys(("hidden_size", "intermediate_size"), 10_000_000),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 1_000_000_000),
}
"""Key of a config -> the largest value for which a model is built."""
_ABOVE_ZERO = (
    "rope_theta",
    "rope_local_base_freq",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_eps",
    "norm_epsilon",
    "logits_scaling",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "embedding_multiplier",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
)
"""Keys of a config, or of the dicts in it, by which a model divides or multiplies."""


class PreTrainedCausalLM:
    """Config, tokenizer and weights of one model; nothing is loaded by the constructor.

    Args:
        model_name_or_path: a directory or a hub id.
        trust_remote_code: run the model's own configuration and tokenizer code.
        dtype: dtype to hold the weights in; None takes what the checkpoint declares.
        revision: branch, tag or commit on the hub.
        cache_dir: hub cache to use.
        strip_prefix: prefix of all tensors' names that a wrapper added, such as ``module.``; it is left out.
        adapter: ``none`` leaves out an adapter that is in the folder of the model; None refuses to load its weights.
    """

    def __init__(
        self,
        model_name_or_path: str | Path,
        *,
        trust_remote_code: bool = False,
        dtype: torch.dtype | str | None = None,
        revision: str | None = None,
        cache_dir: str | None = None,
        strip_prefix: str = "",
        adapter: str | None = None,
    ) -> None:
        if adapter not in (None, "none"):
            raise UserError(
                f"adapter={adapter!r} is not 'none': load an adapter with peft_for and load_hf_adapter"
            )
        self.model_name_or_path = str(model_name_or_path)
        self.trust_remote_code = trust_remote_code
        self.dtype = to_dtype(dtype)
        self.strip_prefix = strip_prefix
        self.adapter = adapter
        self._hub = {"revision": revision, "cache_dir": cache_dir}

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str | Path, **options: Any
    ) -> "PreTrainedCausalLM":
        """The model at a directory or hub id; ``options`` are those of the constructor."""
        if "torch_dtype" in options:
            options["dtype"] = options.pop("torch_dtype")
        known = (
            "trust_remote_code",
            "dtype",
            "revision",
            "cache_dir",
            "strip_prefix",
            "adapter",
        )
        for name in options:
            if name not in known:
                raise UserError(
                    f"from_hf_pretrained takes no option {name}{did_you_mean(name, known)}"
                )
        return cls(model_name_or_path, **options)

    @cached_property
    def directory(self) -> Path:
        """The files other than weights."""
        return hub.resolve(self.model_name_or_path, weights=False, **self._hub)

    @cached_property
    def raw_config(self) -> dict[str, Any]:
        path = self.directory / "config.json"
        content = strict_json.read(path, _parse_constant)
        if not isinstance(content, dict):
            raise UserError(f"{path} is not a JSON object")
        raw = cast(dict[str, Any], content)
        _check_raw_config(raw, path)
        return raw

    @cached_property
    def config(self) -> Any:
        config = self._parsed_config
        if self.dtype is not None:
            config.dtype = self.dtype
        elif config.dtype is None:
            config.dtype = self._stored_dtype()
        return config

    @cached_property
    def _parsed_config(self) -> Any:
        """The config as transformers reads the file."""
        import transformers
        from huggingface_hub.errors import StrictDataclassError

        auto = cast(Any, transformers.AutoConfig)
        raw = self.raw_config
        kind = raw.get("model_type", "")
        alias = _OMNI if kind == _OMNI and raw.get("sound_config") else _ALIASES.get(kind)
        try:
            if (config_class := own_config(kind)) is not None:
                config: Any = config_class.from_pretrained(self.directory)
            elif alias is None:
                remote = self.trust_remote_code and not _is_native(raw)
                config = auto.from_pretrained(self.directory, trust_remote_code=remote)
            else:
                kinds = cast(Any, transformers.CONFIG_MAPPING)
                config = kinds[alias].from_dict(_with_model_type(raw, alias))
        except Exception as error:  # transformers computes with the numbers before it looks at them
            # the first line of a validation error names the validator, the last one the mistake
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = lines[-1 if isinstance(error, StrictDataclassError) else 0].strip()
            if isinstance(error, KeyError):
                reason = _unknown_value(raw, error.args[0])
            raise UserError(
                f"transformers refuses {self.directory / 'config.json'}: {reason}"
            ) from error
        return config

    @cached_property
    def tokenizer(self) -> Any:
        import transformers

        auto: Any = transformers.AutoTokenizer
        return auto.from_pretrained(self.directory, trust_remote_code=self.trust_remote_code)

    @cached_property
    def state(self) -> SafetensorsCheckpoint:
        """The weights in full, as lazy views; quantized ones are dequantized when they are read."""
        directory = hub.resolve(self.model_name_or_path, weights=True, **self._hub)
        return quantized_checkpoint.open_checkpoint(
            directory,
            self.raw_config,
            self.declared_dtype,
            self.strip_prefix,
            lambda names: transformers_reads.unread_tensors(self._parsed_config.to_dict(), names),
        )

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """What the model's files say about quantized weights; None if they are in full."""
        return quantization_configs.quantization_of(self.raw_config, self.directory)

    def quantization_files(self) -> list[Path]:
        """Files besides ``config.json`` that describe the quantization of the weights."""
        paths = (self.directory / name for name in quantization_configs.CONFIG_FILES)
        return [path for path in paths if path.is_file()]

    def refuse_adapter(self) -> None:
        """Refuse weights next to an adapter, which transformers would apply, unless it is left out on purpose."""
        hub.refuse_adapter_beside_weights(self.directory, ignored=self.adapter == "none")

    @property
    def stored_names(self) -> Set[str] | None:
        """Names of the stored tensors; None if neither the weights nor their index are here."""
        return self._stored.listed_names

    @property
    def has_weights_here(self) -> bool:
        """Whether the files of the weights are on this machine; a hub model's small files are downloaded."""
        return self._stored.is_complete

    @property
    def _stored(self) -> SafetensorsCheckpoint:
        return quantized_checkpoint.open_unquantized(self.directory, self.strip_prefix)

    @property
    def declared_dtype(self) -> torch.dtype | None:
        """The dtype that ``config.json`` says the weights are stored in."""
        return to_dtype(self.raw_config.get("dtype") or self.raw_config.get("torch_dtype"))

    def side_files(self) -> Iterator[Path]:
        """Paths, relative to ``directory``, of what belongs to the model: tokenizer, chat template, licence, ...

        Weights, what describes their quantization, and the files of training runs are left out.
        """
        for folder, folders, files in os.walk(self.directory):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for path in (Path(folder, name).relative_to(self.directory) for name in sorted(files)):
                is_weight = any(fnmatch(path.name, pattern) for pattern in hub.WEIGHT_PATTERNS)
                of_a_run = any(fnmatch(str(path), pattern) for pattern in hub.RUN_PATTERNS)
                # readers take these files for the truth about the weights, which are written in full
                of_quantization = path.name in quantization_configs.CONFIG_FILES
                if path.name != RECORD and not is_weight and not of_a_run and not of_quantization:
                    yield path

    @property
    def name_or_path(self) -> str:
        """``model_name_or_path``, as a transformers model calls it."""
        return self.model_name_or_path

    def save_artifacts(self, save_directory: str | Path) -> None:
        """Copy all files but weights: config, tokenizer, chat template, code, ...

        Files that are there are replaced, each in one step. The config says nothing of quantized weights, since
        exports are in full.
        """
        folder = Path(save_directory)
        for name in self.side_files():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with atomic.published_file(folder / name) as aside:
                shutil.copyfile(self.directory / name, aside)
        config = quantization_configs.without_quantization(self.raw_config)
        if config != self.raw_config:
            atomic.write_text(
                folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n"
            )

    def _stored_dtype(self) -> torch.dtype | None:
        try:
            entries = self.state.entries
        except UserError:
            return (
                None  # a config without weights; reading the weights says what is wrong with them
            )
        dtypes = {entry.dtype for entry in entries.values()}
        return dtypes.pop() if len(dtypes) == 1 else None


def _with_model_type(raw: dict[str, Any], alias: str) -> dict[str, Any]:
    """``raw`` as a model that transformers knows; the released ``sound_config`` is of a type that it does not."""
    known = {**raw, "model_type": alias}
    if alias == _OMNI:
        known["architectures"] = ["NemotronH_Omni_Reasoning_V3"]
        sound: dict[str, Any] = raw.get("sound_config") or {}
        known["sound_config"] = {key: sound[key] for key in sound if key != "model_type"} or None
    return known


def _unknown_value(raw: Mapping[str, Any], name: Any) -> str:
    """Say that transformers has no ``name`` in one of its tables, and which keys of the config have it."""
    holders = [
        f"{key}={value!r}"
        for key, value in raw.items()
        if value == name or (isinstance(value, str | list) and name in value)
    ]
    if not holders:
        return f"it needs the key {name!r}: add it"
    return (
        f"it does not know {name!r}, which {' and '.join(holders)} has: write a value that it knows"
    )


def _parse_constant(name: str) -> float:
    """``Infinity`` is a limit that some models have; ``NaN`` is nothing that a model can compute with."""
    if name == "NaN":
        raise ValueError("NaN is no number that a model can have")
    return float(name)


def _divisor_values(raw: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys of ``_ABOVE_ZERO`` with their values; rotary parameters may be given for each kind of layer."""
    yield from ((key, raw[key]) for key in _ABOVE_ZERO if raw.get(key) is not None)
    for value in raw.values():
        if isinstance(value, dict):
            yield from _divisor_values(cast(dict[str, Any], value))


def _check_raw_config(raw: dict[str, Any], path: Path) -> None:
    """Refuse what every model would stumble over, in its own words."""
    names = raw.get("architectures")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise UserError(
            f"{path}: architectures={names!r} must be a list of names, such as ['LlamaForCausalLM']"
        )
    for key, value in _divisor_values(raw):
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UserError(f"{path}: {key}={value!r} must be a number above 0")
    for key, limit in _SIZES.items():
        if isinstance(raw.get(key), bool):
            raise UserError(f"{path}: {key}={raw[key]} must be a number")
        if isinstance(raw.get(key), int) and not 1 <= raw[key] <= limit:
            rule = "at least 1" if raw[key] < 1 else f"at most {limit}"
            raise UserError(f"{path}: {key}={raw[key]} must be {rule}")


def _is_native(config: Mapping[str, Any]) -> bool:
    """Whether the architecture is one of transformers itself, so that the model's own copy of it need not run."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = cast(Mapping[str, Any], MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    names = config.get("architectures")
    return config.get("model_type") in known and bool(names) and set(names) <= set(known.values())


def to_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """The torch dtype of a name such as ``bfloat16``; None and ``auto`` stay undecided."""
    if value is None or value == "auto" or isinstance(value, torch.dtype):
        return None if isinstance(value, str) else value
    torch_dtype = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(torch_dtype, torch.dtype):
        raise UserError(
            f"dtype={value!r} is not a dtype of torch: use float32, bfloat16 or float16"
        )
    return torch_dtype
