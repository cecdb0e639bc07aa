# SPDX-License-Identifier: Apache-2.0
"""The predicted time of published training runs against the published one.

``python -m benchmarks.predict published.csv`` reads a table with the columns model, gpu, gpus, tp, pp, vp, cp, ep,
etp, dp, mbs, gbs, seq, precision, recompute, tflops_per_gpu, step_time_s and source, and prints each row and the
medians. Rows of models without a recipe are counted, not guessed. Nothing of the prediction is fitted to a row.
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks import deepseek_v4
from megatron.bridge.autotune.gpus import GPUS
from megatron.bridge.autotune.ledger import spread
from megatron.bridge.autotune.search.candidate import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Candidate,
    Recompute,
)
from megatron.bridge.autotune.search.price import Pricer
from megatron.bridge.autotune.time.simulate import makespan
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.recipes.catalog import catalog
from megatron.bridge.recipes.sizes import size_of
from megatron.bridge.utils.config import yaml_text

PRETRAIN = "_pretrain_config"
ALIASES = {"nemotron340b": "nemotron4340b", "nemotron15b": "nemotron415b"}
"""Models as published tables spell them, letters and digits only, where the names of recipes differ."""

GPT_SIZES = {
    # Narayanan et al., 2021, table 1
    "gpt17b": (24, 2304, 24),
    "gpt36b": (30, 3072, 32),
    "gpt75b": (36, 4096, 32),
    "gpt184b": (40, 6144, 48),
    "gpt391b": (48, 8192, 64),
    "gpt761b": (60, 10240, 80),
    "gpt1456b": (80, 12288, 96),
    "gpt3101b": (96, 16384, 128),
    "gpt5296b": (105, 20480, 128),
    "gpt1008b": (128, 25600, 160),
    # Korthikanti et al., 2022, table 3
    "gpt22b": (48, 6144, 64),
    "mtnlg530b": (105, 20480, 128),
    # NeMo's recipe gpt3_5b
    "gpt35b": (24, 4096, 32),
    # Megatron-LM's README
    "gpt70b": (80, 8192, 64),
    "gpt177b": (96, 12288, 96),
    "gpt314b": (96, 16384, 128),
}
"""Layers, hidden size and heads of GPT models."""
GPT_VOCABULARIES = {"Narayanan": 51200, "Korthikanti": 51200, "README": 131072}
"""By a word of the source."""
MATRIX_OF_README = ("gpt17b", "gpt16b", "gpt119b")
"""Models of the table in Megatron-LM's README whose sizes it does not state."""
WRITTEN_SIZES = re.compile(r"GPT .*\((\d+)x(\d+), ffn (\d+), GQA (\d+), vocab (\d+)\)")
PREDICTED_AHEAD = {"nemotron_3_super": ("*E", 2)}
"""Layers of a multi-token prediction and their number, which Megatron-Bridge's recipe of the model trains, and which
the models of this package leave out: they are priced as further layers, output layers and losses."""
NO_TENSOR_OVERLAP = ("nemotron_3_super",)
"""Models whose performance recipes do not set ``tp_comm_overlap``."""
PUBLISHED = {"Moonlight-16B-A3B": ("deepseek_v3", "moonshotai/Moonlight-16B-A3B")}
"""Models without a recipe of pretraining: a recipe with the same kind of layers, and a published config."""
COUNTED = ("deepseekv4flash",)
"""Models whose layers this package does not have: ``deepseek_v4`` counts them."""
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    # NeMo's Nemotron3Config22B: Nemotron-4 15B with more layers, and keys for each head
    "nemotron22b": ("nemotron4_15b", {"num_layers": 40, "num_query_groups": None}),
}
"""Models without a recipe: a recipe with the same kind of layers, and the sizes in which they differ."""

_COUNTED: dict[tuple[str, int, bool], dict[Any, Any]] = {}
"""Layers by model, length and adapters: most models are in many rows."""

UNKNOWN_MEMORY = (0,)  # of counted layers, whose activations are not known

LLAMA_PAPER = {
    "virtual": 8,
    "layout": "|".join(["E", *["t"] * 126, "L"]),
    "switches": (("model.cp_comm_type", "all_gather"),),
}
"""What "The Llama 3 Herd of Models" (2024), section 3.3.2, says about its runs on 16 stages, beside its table 4: the
first chunk has only the embedding and the last one only the output layer, because one layer was taken from each. So a
chunk has one layer: 126 layers and two empty chunks on 16 stages are 8 chunks a stage. Keys are all-gathered."""

SETTINGS: dict[str, dict[str, list[str]]] = yaml_text.tables_beside(__file__)


@dataclass(frozen=True)
class Row:
    """A published step and the predicted one, in seconds."""

    name: str
    kin: tuple[
        str, ...
    ]  # model, GPU, precision and source: rows that share them are ordered by their rates
    operations: float  # of a GPU in a step
    is_moe: bool
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def is_faster(self, other: "Row") -> tuple[bool, bool]:
        """Return whether a GPU runs faster than in ``other``, as measured and as predicted."""
        ratio = self.operations / other.operations
        return ratio > self.measured / other.measured, ratio > self.predicted / other.predicted


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against published step times.")
    parser.add_argument("tables", nargs="+", type=Path, help="CSV files")
    parser.add_argument("--verbose", action="store_true", help="also print where the time goes")
    args = parser.parse_args()
    skipped: list[str] = []
    rows = [row for path in args.tables for row in _rows(path, skipped, args.verbose)]
    for row in rows:
        print(
            f"{row.error:+7.1%}  measured {row.measured:8.3f} s  predicted {row.predicted:8.3f} s  {row.name}"
        )
    for title, is_moe in (("dense", False), ("mixtures of experts", True)):
        _summary(title, [row for row in rows if row.is_moe == is_moe])
    _order(rows)
    print(f"{len(skipped)} rows are not priced: {', '.join(sorted(set(skipped)))}")


def _summary(title: str, rows: list[Row]) -> None:
    if not rows:
        return
    covered = sum(row.low <= row.measured <= row.high for row in rows) / len(rows)
    print(
        f"{title}: {len(rows)} rows, {spread([row.error for row in rows])}; the interval covers {covered:.0%}"
    )


def _order(rows: list[Row]) -> None:
    """Print how many pairs of a model's runs are in the right order, if their measured rates differ by over a tenth."""
    pairs = [
        pair for pair in combinations(rows, 2) if pair[0].kin == pair[1].kin and _differ(*pair)
    ]
    right = sum(len(set(one.is_faster(other))) == 1 for one, other in pairs)
    print(f"order: {right} of {len(pairs)} pairs of runs of one model, GPU, precision and source")


def _differ(one: Row, other: Row) -> bool:
    rates = [row.operations / row.measured for row in (one, other)]
    return max(rates) > 1.1 * min(rates)


def _rows(path: Path, skipped: list[str], verbose: bool) -> Iterator[Row]:
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            reason = _reason_to_skip(line)
            config = None if reason else _config(line)
            if config is None:
                skipped.append(f"{line['model']} on {line['gpu']} ({reason or 'no recipe'})")
                continue
            card = _card(line)
            assert card is not None, "a reason to skip"
            yield _predict(line, config, "A100 80GB" if card.startswith("A100") else card, verbose)


def _card(line: dict[str, str]) -> str | None:
    return next((name for name in GPUS if name.split()[0] == line["gpu"].split()[0]), None)


def _reason_to_skip(line: dict[str, str]) -> str | None:
    """Return why a row says too little to be priced."""
    if _card(line) is None:
        return "unknown GPU"
    if not line["seq"]:
        return "length not stated"
    if "model_table" in line["source"] and _plain(line["model"]) in MATRIX_OF_README:
        return "sizes not stated"
    is_long = "long_sequence" in line["source"]
    if not line["gbs"] and not is_long and int(line["pp"] or 1) > 1:
        return "batch not stated, which decides the share of pipeline bubbles"
    return None


def _config(line: dict[str, str]) -> Any:
    key = _plain(line["model"])
    written = WRITTEN_SIZES.match(line["model"])
    if written is not None:
        layers, hidden, ffn, groups, vocabulary = map(int, written.groups())
        config = _gpt(layers, hidden, hidden // 128, vocabulary)
        config.model.ffn_hidden_size, config.model.num_query_groups = ffn, groups
    elif key in GPT_SIZES:
        words = (word for word in GPT_VOCABULARIES if word in line["source"])
        config = _gpt(*GPT_SIZES[key], GPT_VOCABULARIES[next(words, "Narayanan")])
    elif line["model"] in PUBLISHED:
        start, hub_id = PUBLISHED[line["model"]]
        config = _resolved(start)
        config.model = size_of(hub_id).provider()
    elif key in COUNTED:
        config = _resolved("deepseek_v3")
        deepseek_v4.set_sizes(config.model)
    elif key in SIZES:
        start, sizes = SIZES[key]
        config = _resolved(start)
        for name, size in sizes.items():
            setattr(config.model, name, size)
    else:
        start = _start(line)
        if start is None:
            return None
        config = _resolved(start)
    if _start(line) in PREDICTED_AHEAD:
        kinds, times = PREDICTED_AHEAD[str(_start(line))]
        config.model.hybrid_override_pattern += kinds * times
        config.model.num_layers += len(kinds) * times
    if "LoRA" in line["source"]:
        config.peft = (
            LoRA()
        )  # the layers of its default, of which weights only adapters are trained
    return config


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int) -> Any:
    config = _resolved("gpt3_175b")
    model = config.model
    model.num_layers, model.hidden_size, model.num_attention_heads = layers, hidden, heads
    model.ffn_hidden_size, model.kv_channels = 4 * hidden, None
    model.num_query_groups = None
    model.vocab_size = vocabulary
    return config


def _start(line: dict[str, str]) -> str | None:
    """Return the start of the name of the model's recipes."""
    key = _plain(line["model"])
    starts = {_plain(start): start for start in (name.removesuffix(PRETRAIN) for name in catalog())}
    return starts.get(ALIASES.get(key, key))


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _resolved(start: str) -> Any:
    recipe = catalog()[start + PRETRAIN]
    return recipe().resolve(recipe.gpus).config


def _predict(line: dict[str, str], config: Any, card: str, verbose: bool) -> Row:
    gpus, length = int(line["gpus"]), int(line["seq"])
    candidate = _candidate(line, config)
    if line["source"].startswith("Llama 3 paper") and candidate.pipeline == 16:
        candidate = replace(candidate, **LLAMA_PAPER)
    ranks = candidate.tensor * candidate.context * candidate.pipeline
    replicas = int(line["dp"] or gpus // ranks)
    few = 4 * replicas * candidate.micro_batch
    # rows of NeMo's table of long sequences that state a batch have 4M tokens
    config.train.global_batch_size = int(
        line["gbs"] or (2**22 // length if "long_sequence" in line["source"] else few)
    )
    config.dataset.seq_length = config.model.seq_length = length
    quantized = "FP8" in line["precision"]
    config.model.fp8 = "hybrid" if quantized else None
    config.model.fp4 = "e2m1" if "FP4" in line["precision"] else None
    config.model.tp_comm_overlap = candidate.tensor > 1 and _start(line) not in NO_TENSOR_OVERLAP
    config.model.cp_comm_type = "p2p"
    if config.model.num_moe_experts:
        _set_dispatcher(config.model, line)
    of_row = (line["model"], length, "LoRA" in line["source"])
    pricer = Pricer(config, gpus, card, layers=_COUNTED.setdefault(of_row, {}))
    _, pricer.further_losses = PREDICTED_AHEAD.get(str(_start(line)), ("", 0))
    if _plain(line["model"]) in COUNTED:
        pricer.use_layers(deepseek_v4.count_layers(length))
        price = pricer.price(candidate, makespan, memory=UNKNOWN_MEMORY)
    else:
        price = pricer.price(candidate, makespan)
    assert price is not None, line
    step = price.prediction
    measured = (
        float(line["step_time_s"] or 0)
        or step.operations / gpus / float(line["tflops_per_gpu"]) / 1e12
    )
    name = f"{line['model']} {gpus} x {card} {candidate.label()} {line['precision']} {length}"
    if verbose:
        split = ", ".join(
            f"{kind} {part / step.seconds:.0%}" for kind, part in step.split.items() if part
        )
        print(f"{name}: MFU {step.mfu:.1%}, {split}")
    kin = tuple(line[key] for key in ("model", "gpu", "precision", "source"))
    is_moe = bool(config.model.num_moe_experts)
    return Row(
        name, kin, step.operations / gpus, is_moe, measured, step.seconds, step.low, step.high
    )


def _set_dispatcher(model: Any, line: dict[str, str]) -> None:
    """Set how tokens reach their experts; of NeMo's scripts, ``pretrain_deepseek_v3.py`` uses DeepEP on H100."""
    source, gpu = line["source"], line["gpu"].split()[0]
    found = re.match(r"Megatron-Bridge.* release ([\d.]+\d)", source)
    if "HybridEP" in source:
        flex, overlap = True, "EP overlap on" in source
    elif found is None:
        flex, overlap = "NeMo" in source and (_start(line), gpu) == ("deepseek_v3", "H100"), False
    else:
        release = SETTINGS[_known_release(found[1])]
        run = f"{_start(line)} {gpu} {line['precision']} EP{line['ep']}"
        flex, overlap = (
            any(fnmatchcase(run, each) for each in release[key]) for key in ("alltoall", "overlap")
        )
        flex = not flex
    model.moe_token_dispatcher_type = "flex" if flex else "alltoall"
    model.overlap_moe_expert_parallel_comm = overlap


def _known_release(release: str) -> str:
    """Return the longest listed start of a release's name, or else the newest listed release before it."""
    starts = [known for known in SETTINGS if release.startswith(known)]
    if starts:
        return max(starts, key=len)
    numbers = [int(part) for part in release.split(".")]
    earlier = [known for known in SETTINGS if [int(part) for part in known.split(".")] < numbers]
    return max(earlier or SETTINGS, key=lambda known: [int(part) for part in known.split(".")])


def _candidate(line: dict[str, str], config: Any) -> Candidate:
    return Candidate(
        tensor=int(line["tp"] or 1),
        context=int(line["cp"] or 1),
        pipeline=int(line["pp"] or 1),
        virtual=int(line["vp"] or 1),
        expert=int(line["ep"] or 1),
        expert_tensor=int(line["etp"] or 1) if config.model.num_moe_experts else None,
        micro_batch=int(line["mbs"] or 1),
        recompute=_recompute(line["recompute"]),
    )


def _recompute(text: str) -> Recompute:
    block = re.match(r"full block (\d+) layers", text)
    if block is not None:
        return ("full", "block", int(block[1]), None)
    if text.startswith("full"):
        return FULL_RECOMPUTE
    named = re.split(r"[^a-z_]+", text)
    modules = ("mla_up_proj", "moe_act", "moe", "layernorm", "mlp", "core_attn")
    known = [module for module in modules if module in named]
    return ("selective", None, None, tuple(known)) if known else NO_RECOMPUTE


if __name__ == "__main__":
    sys.exit(main())
