# SPDX-License-Identifier: Apache-2.0
# The modules of benchmarks/ are scripts, which pyright does not find.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The stages of `scripts.gpu.acceptance`, each run in a process of its own.

A stage prints its figures as soon as it has them, as one line of JSON; a later line replaces an earlier one, so a
stage that is ended early leaves what it found.
"""

import argparse
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.gpu.acceptance import FIGURES, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import megatron.bridge  # noqa: F401, I001 - prepares megatron.core for machines without a GPU
import torch
from measure import DEVICE, wait

GPU_TESTS = (
    "tests/unit_tests/backends",
    "tests/unit_tests/training/test_observability.py",
    "tests/functional_tests/training/test_on_gpu.py",
)
STEPS = {"tiny": 2, "quick": 6, "whole": 20}
KERNEL_SECONDS = {
    "tiny": 2.0,
    "quick": 20.0,
    "whole": 45.0,
}  # to measure the kernels of each of three runs
LAST, SAVED = 12, 3  # steps of the run that is killed, and the step that it saves


def emit(figures: dict[str, Any]) -> None:
    print(FIGURES + json.dumps(figures), flush=True)


# ------------------------------------------------------------------------------------------------- correctness


def run_tests(size: str, out: Path) -> None:
    """The tests that are marked ``gpu``."""
    paths = GPU_TESTS if size != "tiny" else ["tests/unit_tests/backends/test_torch_norms.py"]
    report = out / "tests.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    subprocess.run([*command, *paths], cwd=ROOT, check=False)
    (suite,) = ElementTree.parse(report).getroot()
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    emit({"failed": failed, "passed": count["tests"] - failed - count["skipped"]})


def families(size: str, out: Path) -> None:
    """Logits of every family against transformers on the same device, in several processes."""
    from tests.families.rows import ROWS

    names = [name for name, row in ROWS.items() if row.rewrite is None]
    names = names[:: {"tiny": -(-len(names) // 2), "quick": 4, "whole": 1}[size]]
    problems: dict[str, str] = {}
    processes = max(1, min(6, (os.cpu_count() or 1) // 2))
    with multiprocessing.get_context("spawn").Pool(processes, without_fla) as pool:
        for number, (name, wrong) in enumerate(pool.imap_unordered(compare_family, names), 1):
            if wrong:
                problems[name] = wrong
            emit(
                {
                    "families compared": number,
                    "families that differ": len(problems),
                    "problems": problems,
                }
            )


def without_fla() -> None:
    """Hide flash-linear-attention, whose kernels need wider heads than the rows have; transformers would use them."""
    sys.modules["fla"] = None  # type: ignore[assignment]


def compare_family(name: str) -> tuple[str, str]:
    """A row of ``tests/families``, and what differs or breaks."""
    from tests.families.rows import ROWS

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        return name, difference(ROWS[name])
    except Exception as error:  # one family must not hide the others
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            name,
            f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"[:300],
        )


def difference(row: Any) -> str:
    """What differs; empty if nothing does.

    In fp32 the limit is that of the tests on a CPU; in bf16, three times the error of transformers' own bf16 for the
    median token.
    """
    from megatron.bridge import AutoBridge
    from tests.families import harness
    from tests.toy_models import tokens

    ids = tokens(vocab_size=row.config["vocab_size"])[0].to(DEVICE)
    theirs = harness.hf_model(row)
    if theirs._can_set_experts_implementation():
        theirs.set_experts_implementation(
            "eager"
        )  # PyTorch's grouped kernel wants widths that toys do not have

    def ours(checkpoint: str, half: bool) -> torch.Tensor:
        provider = AutoBridge.from_hf_pretrained(checkpoint).to_megatron_provider()
        for key, value in harness.settings(provider, {}, row.provider).items():
            setattr(provider, key, value)
        provider.backend, provider.bf16 = "torch", half
        (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
        positions = torch.arange(ids.shape[1], device=DEVICE).expand_as(ids)
        logits = chunk.eval()(input_ids=ids, position_ids=positions, attention_mask=None)
        return logits.float()[..., : expected.shape[-1]]

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        harness.save(theirs, Path(folder))
        theirs = theirs.to(DEVICE)
        expected = theirs(input_ids=ids, use_cache=False).logits
        error = harness.distance(expected, ours(folder, False), expected.std())
        if not error <= harness.LOGITS:
            return f"fp32 logits differ by {error:.1e} of their deviation (at most {harness.LOGITS:.0e})"
        rounded = theirs.bfloat16()(input_ids=ids, use_cache=False).logits.float()
        # the median token: rounding may send a token to another expert, in either of the two
        both = (rounded, ours(folder, True))
        allowed, found = ((x - expected).square().mean(-1).sqrt().median() for x in both)
        ratio = (found / allowed).item()
        return (
            ""
            if ratio <= 3
            else f"bf16 logits are {ratio:.1f} times as far from fp32 as transformers' are"
        )


# --------------------------------------------------------------------------------------------------- training


def pretrain_arguments(size: str, *more: str) -> argparse.Namespace:
    import pretrain_gpu

    if size == "tiny":
        return pretrain_gpu.arguments(["--tiny", *more])
    rounds = {"quick": "1", "whole": "2"}[size]
    return pretrain_gpu.arguments(["--rounds", rounds, "--steps", str(STEPS[size]), *more])


def utilization(tokens_per_second: float, operations: float) -> dict[str, float]:
    """Model FLOP/s over the data sheet's; nothing for GPUs that are not in the table."""
    from megatron.bridge.backends.hardware.device_flops import device_tflops

    peak = device_tflops()
    return (
        {}
        if peak is None
        else {"model FLOP/s utilization": tokens_per_second * operations / peak / 1e12}
    )


def pretrain(size: str, out: Path) -> None:
    """Tokens a second against two loops over transformers, in turn, and the prediction of a dry run."""
    import pretrain_gpu as bench

    from megatron.bridge.autotune.memory import fullest_stage, memory_per_rank

    args = pretrain_arguments(size)
    limits = bench.in_process(args, "ceilings")
    figures = {key: value for key, value in limits.items() if key != "operations"}
    emit(figures)
    predicted = fullest_stage(memory_per_rank(bench.bridge_config(args).resolve().config, 1)).total
    others = {
        "speed over the HF Trainer": bench.TRAINER,
        "speed over the compiled loop": bench.COMPILED,
    }

    def after_each(found: dict[str, Any]) -> None:
        seconds = {
            name: statistics.median(it["seconds"]) for name, it in found.items() if it["seconds"]
        }
        speed = args.micro_batch_size * args.seq_length / seconds[bench.OURS]
        memory = found[bench.OURS]["memory"]
        ratios = {
            key: seconds[name] / seconds[bench.OURS]
            for key, name in others.items()
            if name in seconds
        }
        peak = {
            "peak memory, GB": memory / 1e9,
            "error of predicted memory": abs(predicted - memory) / memory,
        }
        emit(
            figures
            | {"tokens/s": speed, **utilization(speed, limits["operations"]), **ratios, **peak}
        )

    bench.compare(
        args, {name: (name, ()) for name in (bench.OURS, bench.TRAINER, bench.COMPILED)}, after_each
    )


def lora(size: str, out: Path) -> None:
    """Adapters beside all linear layers, against ``peft``."""
    import lora_gpu as bench

    shape = (
        ["--shape", "tiny", "--seq-length", "64"] if size == "tiny" else ["--shape", "llama31-8b"]
    )
    args = bench.arguments([*shape, "--rounds", "1", "--steps", str(STEPS[size])])
    times, operations = bench.compare(args)
    seconds = {name: statistics.median(step[0] for step in steps) for name, steps in times.items()}
    speed = args.micro_batch_size * args.seq_length / seconds[bench.OURS]
    figures = {"tokens/s": speed, "speed over peft": seconds[bench.TRAINER] / seconds[bench.OURS]}
    emit(figures | utilization(speed, operations))


def measure_run(
    config: Any, size: str, check: Callable[[Any], dict[str, Any]] = lambda run: {}
) -> dict[str, Any]:
    """Train a few steps and measure the later ones; ``check`` looks at the run before them."""
    from training import framework_loop

    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.setup import setup

    run = setup(config, forward_step)
    figures = check(run)
    run.emit("train_start")
    steps = framework_loop(run)
    steps(1 if size == "tiny" else 6)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    stamps = [stamp for stamp, _ in steps(STEPS[size] + 1)]
    seconds = statistics.median(later - earlier for earlier, later in pairwise(stamps))
    tokens = run.config.train.global_batch_size * run.config.dataset.seq_length
    assert run.last_step is not None, "steps were taken"
    loss = run.last_step.loss_dict["lm loss"].item()
    figures |= {
        "tokens/s": tokens / seconds,
        "loss": loss,
        "not finite": int(not math.isfinite(loss)),
    }
    if DEVICE == "cuda":
        figures["peak memory, GB"] = torch.cuda.max_memory_allocated() / 1e9
    return figures


def packed(size: str, out: Path) -> None:
    """All weights, on conversations that are packed into rows."""
    import lora_gpu
    import pretrain_gpu

    args = pretrain_arguments(size)
    config = pretrain_gpu.bridge_config(args)
    with tempfile.TemporaryDirectory() as folder:
        config.dataset = lora_gpu.dataset(
            "packed", args.seq_length, Path(folder), config.model.vocab_size
        )
        config.train.micro_batch_size = config.train.global_batch_size = 1
        emit(measure_run(config, size))


def experts(size: str, out: Path) -> None:
    """A mixture of experts that fits on one GPU; whether the weights of a layer's experts are copied."""
    import pretrain_gpu

    from megatron.bridge.backends.moe.grouped_experts import GroupedLinear, stack_weights

    def copies(run: Any) -> dict[str, Any]:
        layers = [
            part
            for chunk in run.model
            for part in chunk.modules()
            if isinstance(part, GroupedLinear)
        ]
        copied = [
            one
            for one in layers
            if stack_weights(one.weights()).data_ptr() != one.weights()[0].data_ptr()
        ]
        return {"layers of experts": len(layers), "copies of experts": len(copied)}

    emit(measure_run(pretrain_gpu.bridge_config(experts_arguments(size)), size, copies))


def experts_arguments(size: str) -> argparse.Namespace:
    """Four layers of Qwen3 30B-A3B, with microbatches of one sequence."""
    import pretrain_gpu

    from megatron.bridge.recipes.sizes import size_of

    numbers = {**size_of("Qwen/Qwen3-30B-A3B").numbers, "num_hidden_layers": 4}
    if size == "tiny":
        small = (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
        )
        numbers |= {key: pretrain_gpu.TINY[key] for key in small}
        numbers |= {"moe_intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    pretrain_gpu.SHAPES["experts"] = numbers
    args = pretrain_arguments(size)
    args.shape, args.micro_batch_size = "experts", 1
    return args


def predictions(size: str, out: Path) -> None:
    """Steps of three runs against those that are predicted: from data sheets, and from measured kernels of the card."""
    import pretrain_gpu

    from megatron.bridge.autotune.measure.machine import measure
    from megatron.bridge.autotune.predict import predict
    from megatron.bridge.autotune.profile import write
    from megatron.bridge.autotune.search.search import Search
    from megatron.bridge.utils import distributed

    card = _card()
    small = pretrain_arguments(size)
    small.micro_batch_size = 1
    runs = {
        "dense": pretrain_arguments(size),
        "dense, one sequence": small,
        "experts": experts_arguments(size),
    }
    figures: dict[str, Any] = {"data sheet": card}
    distributed.initialize()
    for name, args in runs.items():
        config = pretrain_gpu.bridge_config(args).resolve(1).config
        search = Search(config, 1, card)
        kernels = measure(config, search.pricer.shapes(search.current), KERNEL_SECONDS[size])
        write(kernels, out / f"profile of {name}.json")
        predicted = {
            "data sheet": predict(config, 1, card).seconds,
            "kernels": predict(config, 1, card, kernels).seconds,
        }
        found = measure_run(pretrain_gpu.bridge_config(args), size)
        tokens = config.train.global_batch_size * config.dataset.seq_length
        seconds = tokens / found["tokens/s"]
        figures[f"{name}: measured, s"] = seconds
        for source, value in predicted.items():
            figures[f"{name}: predicted from {source}, s"] = value
            figures[f"{name}: error from {source}"] = value / seconds - 1
        emit(figures)
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def _card() -> str:
    """The row of the table of GPUs for this one; H100 where there is none, or one that is not in the table."""
    from megatron.bridge.autotune.gpus import GPUS

    device = torch.cuda.get_device_name() if DEVICE == "cuda" else ""
    return next((name for name in GPUS if name.split()[0] in device), "H100 80GB")


def transformer_engine(size: str, out: Path) -> None:
    """Its layers in bf16 and in FP8."""
    if importlib.util.find_spec("transformer_engine") is None:
        emit({"skipped": "transformer_engine is not installed"})
        return
    import pretrain_gpu

    figures: dict[str, Any] = {}
    for name in ("bf16_mixed", "bf16_with_fp8_current_scaling_mixed"):
        config = pretrain_gpu.bridge_config(pretrain_arguments(size))
        config.model.backend, config.mixed_precision = "transformer_engine", name
        figures |= {f"{name}: {key}": value for key, value in measure_run(config, size).items()}
        emit(figures)
        gc.collect()
        torch.cuda.empty_cache()


def graphs(size: str, out: Path) -> None:
    """The same steps without CUDA graphs and with both kinds."""
    if DEVICE != "cuda":
        emit({"skipped": "CUDA graphs need a GPU"})
        return
    import pretrain_gpu

    figures: dict[str, Any] = {}
    losses: list[float] = []
    for kind in ("none", "local", "full_iteration"):
        config = pretrain_gpu.bridge_config(pretrain_arguments(size))
        config.model.cuda_graph_impl = kind
        found = measure_run(config, size)
        losses.append(found["loss"])
        figures |= {f"{kind}: {key}": value for key, value in found.items()}
        figures["largest difference of losses"] = max(abs(loss - losses[0]) for loss in losses)
        emit(figures)
        gc.collect()
        torch.cuda.empty_cache()


def generation(size: str, out: Path) -> None:
    """Greedy tokens in fp32 against transformers, then the speed of prefill and decoding in bf16."""
    from benchmarks import inference as bench
    from megatron.bridge.inference.llm import LLM

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    figures: dict[str, Any] = {}
    cases = (("float32", "smollm2-135m", (4,)), ("bfloat16", "llama32-1b", (1, 8, 32, 64)))
    for dtype, shape, batches in cases if size != "tiny" else cases[:1]:
        with tempfile.TemporaryDirectory(dir=out) as folder:
            model = bench.make_model(Path(folder), dtype, shape=shape)
            with LLM(folder, dtype=dtype, max_requests=max(batches)) as llm:
                for batch in batches:
                    texts = bench.prompts(batch, model.config.vocab_size)
                    if dtype == "float32":
                        figures["texts that differ"] = _texts_that_differ(model, llm, texts)
                    else:
                        figures |= _speeds(bench.measure(model, llm, texts, 2 * STEPS[size], 3))
                    emit(figures)
        del model
        gc.collect()


def _texts_that_differ(model: Any, llm: Any, texts: list[list[int]], count: int = 32) -> int:
    """Texts whose greedy tokens are others than those of transformers."""
    from benchmarks import inference as bench

    theirs = bench.generate_hf(model, texts, count)[:, -count:].tolist()
    ours = [completions[0].tokens for completions in bench.generate_ours(llm, texts, count)]
    return sum(list(one) != other for one, other in zip(ours, theirs, strict=True))


def _speeds(row: Any) -> dict[str, float]:
    name = f"batch {row.batch}"
    return {
        f"{name}: prefill, tokens/s": row.prefill_ours,
        f"{name}: prefill over transformers": row.prefill_ours / row.prefill_hf,
        f"{name}: ms/step": row.decode_ours,
        f"{name}: decoding over transformers": row.decode_hf / row.decode_ours,
    }


# ---------------------------------------------------------------------------------------- checkpoints and files


def resume(size: str, out: Path) -> None:
    """A run that is killed after a save goes on bitwise like one that was not."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        codes = {
            mode: _train(size, Path(folder), mode) for mode in ("undisturbed", "killed", "resumed")
        }
        if codes != {"undisturbed": 0, "killed": -signal.SIGKILL, "resumed": 0}:
            raise SystemExit(f"exit codes {codes}")
        undisturbed, killed, resumed = (_steps(Path(folder, f"{mode}.jsonl")) for mode in codes)
        same = bool(resumed) and all(
            undisturbed[step]["loss"] == found["loss"] for step, found in resumed.items()
        )
        usual = statistics.median(
            found["seconds"] for step, found in undisturbed.items() if step > 2
        )
        saving = killed[SAVED + 1]["seconds"]  # a step is counted with what follows the one before
        stored = (
            sum(path.stat().st_size for path in Path(folder, "killed").rglob("*") if path.is_file())
            / 1e9
        )
    emit(
        {
            "bitwise equal": int(same),
            "steps compared": len(resumed),
            "checkpoint, GB": stored,
            "async save blocks, s/GB": max(0.0, saving - usual) / stored,
        }
    )


def _train(size: str, folder: Path, mode: str) -> int:
    command = [sys.executable, "-m", "scripts.gpu.stages", "run_to_resume", "--size", size, "--out"]
    return subprocess.run([*command, str(folder / mode)], cwd=ROOT, check=False).returncode


def _steps(path: Path) -> dict[int, dict[str, Any]]:
    return {found["step"]: found for found in map(json.loads, path.read_text().splitlines())}


def run_to_resume(size: str, out: Path) -> None:
    """One of the three runs, by the name of the folder: it notes the exact loss and the seconds of each step."""
    import pretrain_gpu

    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.config import CheckpointConfig
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    shared = out.with_name("killed")
    tracker = shared / "latest_checkpointed_iteration.txt"

    class Notes(Callback):
        started = 0.0

        def on_train_step_end(self, context: Any) -> None:
            wait()
            now = time.perf_counter()
            loss = context.last_step.loss_dict["lm loss"].item().hex()
            note = {"step": context.progress.step, "loss": loss, "seconds": now - self.started}
            with out.with_suffix(".jsonl").open("a") as file:
                file.write(json.dumps(note) + "\n")
            self.started = now
            if out.name == "killed" and context.progress.step > SAVED and tracker.exists():
                os.kill(os.getpid(), signal.SIGKILL)

    args = pretrain_arguments(size)
    config = pretrain_gpu.bridge_config(args)
    config.train.train_iters = LAST
    config.train.micro_batch_size = config.train.global_batch_size = 1
    if out.name != "undisturbed":
        config.checkpoint = CheckpointConfig(save=str(shared), save_interval=SAVED, async_save=True)
    pretrain(config, forward_step, [Notes()])


def conversion(size: str, out: Path) -> None:
    """GB/s from host memory to the device, and of a whole model from disk and back."""
    import lora_gpu

    from megatron.bridge import AutoBridge

    figures: dict[str, Any] = {}
    block = torch.empty((1 << 30) if DEVICE == "cuda" else (1 << 22), dtype=torch.uint8)
    for name, source in (("pageable", block), ("pinned", block.pin_memory())):
        target = torch.empty_like(block, device=DEVICE)
        seconds = min(
            _seconds(lambda s=source, t=target: t.copy_(s, non_blocking=True)) for _ in range(4)
        )
        figures[f"{name} memory to the device, GB/s"] = block.nbytes / seconds / 1e9
    with tempfile.TemporaryDirectory(dir=out) as folder:
        lora_gpu.make_base("tiny" if size == "tiny" else "llama31-8b", Path(folder, "base"))
        stored = (
            sum(path.stat().st_size for path in Path(folder, "base").glob("*.safetensors")) / 1e9
        )
        bridge, model = AutoBridge.from_hf_pretrained(f"{folder}/base"), []
        loading = _seconds(lambda: model.extend(bridge.to_megatron_model(wrap_with_ddp=False)))
        emit(figures := figures | {"model, GB": stored, "load, GB/s": stored / loading})
        export = _seconds(
            lambda: bridge.save_hf_pretrained(model, f"{folder}/out", show_progress=False)
        )
        emit(figures | {"export, GB/s": stored / export})


def _seconds(function: Callable[[], object]) -> float:
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def profile(size: str, out: Path) -> None:
    """One step of the run of ``pretrain``: what takes longest on the device, and how long it waits."""
    import pretrain_gpu
    from torch.profiler import ProfilerActivity
    from training import framework_loop

    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.setup import setup

    run = setup(pretrain_gpu.bridge_config(pretrain_arguments(size)), forward_step)
    run.emit("train_start")
    steps = framework_loop(run)
    steps(1 if size == "tiny" else 6)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (DEVICE == "cuda")
    with torch.profiler.profile(activities=kinds) as found:
        steps(1)
    sums = found.key_averages()
    (out / "profile.txt").write_text(sums.table(sort_by=f"self_{DEVICE}_time_total", row_limit=60))
    attribute = "self_device_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
    longest = sorted(sums, key=lambda one: -getattr(one, attribute))[:10]
    figures: dict[str, Any] = {
        f"ms in {one.key[:60]}": getattr(one, attribute) / 1e3 for one in longest
    }
    emit(figures | _gaps(found))


def _gaps(found: Any) -> dict[str, float]:
    """Milliseconds between the first kernel and the last in which none ran; nothing without a GPU."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        return {}
    idle, until = 0.0, spans[0][0]
    for start, end in spans:
        idle += max(0.0, start - until)
        until = max(until, end)
    return {
        "ms from the first kernel to the last": (until - spans[0][0]) / 1e3,
        "ms without a kernel": idle / 1e3,
    }


STAGES: dict[str, Callable[[str, Path], None]] = {
    "tests": run_tests,
    "run_to_resume": run_to_resume,
    **{
        function.__name__: function
        for function in (
            families, pretrain, lora, packed, experts, resume, transformer_engine, generation, graphs, conversion,
            predictions, profile,
        )
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--size", choices=STEPS, default="tiny")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    STAGES[args.stage](args.size, args.out)


if __name__ == "__main__":
    main()
