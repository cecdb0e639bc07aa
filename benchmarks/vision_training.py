# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning of a vision-language model on this machine: this framework against the HF Trainer.

``python -m benchmarks vision_training`` trains the same random Qwen2.5-VL on the same conversations about the same
pictures, in turn, round after round. A round is one epoch, whose first step is not counted; steps of the same
records are compared over the rounds, and their medians are summed up. The Trainer has a collator as TRL's for
images: it decodes, tokenizes and pads a batch. Each candidate has a process of its own; one works at a time.

* ``padded``: both pad each sample to ``--seq-length``.
* ``padding_free``: both take the same samples in a step; this framework concatenates them, the Trainer pads to the
  longest of a batch.
* ``packed``: this framework packs samples into rows of that length, one a step; the Trainer pads to the longest of
  a batch.

Before that, the losses of the first step are compared: the Trainer's model computes that of the same records.
CPU seconds are those of all threads and of workers. ``--wait STEPS`` then measures how long a step waits for data
that ``dataset.num_workers=2`` processes make, in a run of its own; ``--size 1m`` has short steps.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import statistics
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import batched, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measure import table
from megatron.bridge import AutoBridge
from megatron.bridge.data.config import FinetuningDatasetConfig, PackedSequenceSpecs
from megatron.bridge.training.callbacks.observe.metrics import DataWait
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.loop import advance, train_step
from megatron.bridge.training.setup import setup
from megatron.bridge.training.state import Run
from megatron.bridge.training.vlm_step import forward_step
from tests import toy_vision

TOY = toy_vision.TOYS["qwen2_5_vl"]
PATCH, MERGE, IGNORED = 14, 2, -100
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.95), 0.1, 1.0
TOLERANCES = {"bf16": 1e-3, "fp32": 1e-5}  # of the first loss, relative
LAYOUTS = ["padded", "padding_free", "packed"]
CANDIDATES = ("Megatron Bridge", "HF Trainer")
STARTING = 8  # steps
TICKS = os.sysconf("SC_CLK_TCK")
HEADERS = ["", "steps", "ms/step", "CPU s/step", "tokens/s", "speed", "speed per CPU second"]
WORDS = (
    "soft",
    "bright",
    "dark",
    "red",
    "green",
    "colors",
    "in",
    "the",
    "corner",
    "middle",
    "and",
    "a",
    "spot",
)

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "30m": {
        "text": {
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "vocab_size": 8192,
        },
        "vision": {
            "depth": 6,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_heads": 4,
            "window_size": 112,
        },
        "images": {"sides": (200, 601)},
    },
    "1m": {
        "text": {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "vocab_size": 512,
        },
        "vision": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "window_size": 112,
        },
        "images": {"sides": (200, 601)},
    },
    "toy": {
        "text": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "vocab_size": 512,
        },
        "vision": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "window_size": 56,
        },
        "images": {"sides": (40, 120)},
    },
}


class Stamp(NamedTuple):
    """Seconds since some start, at the end of a step."""

    wall: float
    cpu: float


def now() -> Stamp:
    """CPU seconds are those of this process, of its workers, and of those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    workers = sum(map(_seconds_of, multiprocessing.active_children()))
    return Stamp(
        time.perf_counter(), time.process_time() + ended.ru_utime + ended.ru_stime + workers
    )


def _seconds_of(process: Any) -> float:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


# ------------------------------------------------------------------------------------------- the model and its data


def hf_config(size: str, tokenizer: Any) -> Any:
    """A small Qwen2.5-VL with patches of 14 pixels, and heads of 64 channels unless it is tiny."""
    from transformers import Qwen2_5_VLConfig

    text, vision = SIZES[size]["text"], SIZES[size]["vision"]
    hidden, depth = text["hidden_size"], vision["depth"]
    heads = {"num_attention_heads": hidden // (64 if hidden > 128 else 16)}
    heads |= {"num_key_value_heads": heads["num_attention_heads"] // 4}
    width = hidden // heads["num_attention_heads"]
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [width // 8, width // 16 * 3, width // 16 * 3],
    }
    attended = [layer for layer in range(depth) if layer % 3 == 2 or layer == depth - 1]
    config = Qwen2_5_VLConfig(
        text_config={
            **text,
            **heads,
            "rope_parameters": rope,
            "max_position_embeddings": 4096,
            "use_cache": False,
        },
        vision_config={
            **vision,
            "out_hidden_size": hidden,
            "patch_size": PATCH,
            "fullatt_block_indexes": attended,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=True,
        dtype="float32",
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    return config


def image_processor() -> Any:
    import transformers
    from transformers.utils import is_torchvision_available

    cell = PATCH * MERGE
    size = {"shortest_edge": cell**2, "longest_edge": cell**2 * 1280}
    name = "Qwen2VLImageProcessor" + ("" if is_torchvision_available() else "Pil")
    return getattr(transformers, name)(
        patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, size=size
    )


def write(folder: Path, args: argparse.Namespace) -> None:
    """The model with all its files and, in ``data``, its records."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    tokenizer = toy_vision.make_tokenizer(TOY)
    Qwen2_5_VLForConditionalGeneration(hf_config(args.size, tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor().save_pretrained(folder)
    (folder / "data").mkdir()
    random = np.random.default_rng(0)
    lines = [
        json.dumps(_record(folder / "data", number, random, args.size)) + "\n"
        for number in range(records(args))
    ]
    (folder / "data" / "training.jsonl").write_text("".join(lines))


def _record(folder: Path, number: int, random: Any, size: str) -> dict[str, Any]:
    """One or two pictures, a question and an answer."""
    parts, sides = [], SIZES[size]["images"]["sides"]
    for place in range(random.integers(1, 3)):
        width, height = random.integers(*sides, 2).tolist()
        name = toy_vision.picture(
            folder, f"{number}-{place}.jpg", width, height, 2 * number + place
        )
        parts.append({"type": "image", "image": name})
    question = {"type": "text", "text": "What do you see?"}
    answer = " ".join(random.choice(WORDS, random.integers(4, 16)))
    return {
        "messages": [
            {"role": "user", "content": [*parts, question]},
            {"role": "assistant", "content": answer},
        ]
    }


def records(args: argparse.Namespace) -> int:
    """In an epoch."""
    return (args.steps + 1) * args.batch


# ------------------------------------------------------------------------------------------------- the two candidates


class Collator:
    """As TRL's for prompts with images and completions: pixels and tokens of a batch, prompts not in the loss."""

    def __init__(self, folder: Path, length: int | None) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer

        self.folder, self.length = folder / "data", length
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.images: Any = AutoImageProcessor.from_pretrained(folder)

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        from PIL import Image

        chats = [record["messages"] for record in batch]
        names = [
            part["image"]
            for chat in chats
            for part in chat[0]["content"]
            if part["type"] == "image"
        ]
        media = self.images(
            [Image.open(self.folder / name).convert("RGB") for name in names], return_tensors="pt"
        )
        counts = iter((media["image_grid_thw"].prod(-1) // MERGE**2).tolist())
        asked = [self._text(chat[:1], add_generation_prompt=True) for chat in chats]
        answers = [
            self._text(chat)[len(prompt) :] for chat, prompt in zip(chats, asked, strict=True)
        ]
        prompts = [
            re.sub(re.escape(TOY.image), lambda mark: mark[0] * next(counts), prompt)
            for prompt in asked
        ]
        tokens = [self.tokenizer(texts)["input_ids"] for texts in (prompts, answers)]
        return {**self._padded(list(zip(*tokens, strict=True))), **media}

    def _text(self, chat: list[dict[str, Any]], **options: Any) -> str:
        return self.tokenizer.apply_chat_template(chat, tokenize=False, **options)

    def _padded(self, pairs: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
        length = self.length or max(len(prompt) + len(answer) for prompt, answer in pairs)
        ids = torch.full((len(pairs), length), self.tokenizer.pad_token_id)
        labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
        for row, (prompt, answer) in enumerate(pairs):
            start, end = len(prompt), len(prompt) + len(answer)
            ids[row, :end], mask[row, :end] = torch.tensor(prompt + answer), 1
            labels[row, start:end] = torch.tensor(answer)
        types = (ids == self.tokenizer.convert_tokens_to_ids(TOY.image)).long()
        return {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": mask,
            "mm_token_type_ids": types,
        }


class Trainer:
    """The Hugging Face Trainer with its fused AdamW and no logging, records in their order."""

    def __init__(self, folder: Path, args: argparse.Namespace, layout: str, precision: str) -> None:
        from transformers import Qwen2_5_VLForConditionalGeneration

        self.bf16, self.batch, self.stamps = precision == "bf16", args.batch, []
        self.model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
        lines = (folder / "data" / "training.jsonl").read_text().splitlines()
        self.records = [json.loads(line) for line in lines]
        self.collator = Collator(folder, args.seq_length if layout == "padded" else None)
        self.trainer = self._trainer(args.steps + 1)

    def _trainer(self, steps: int) -> Any:
        import transformers

        stamps = self.stamps

        class Clock(transformers.TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                stamps.append(now())

        arguments = transformers.TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=self.batch,
            max_steps=steps,
            bf16=self.bf16,
            use_cpu=True,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_beta2=BETAS[1],
            max_grad_norm=CLIP,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
        )
        data: Any = {"train_dataset": self.records, "data_collator": self.collator}
        found = transformers.Trainer(model=self.model, args=arguments, callbacks=[Clock()], **data)
        found.remove_callback(transformers.PrinterCallback)
        return found

    @property
    def plan(self) -> list[list[int]]:
        """The records of each step of an epoch."""
        return [list(step) for step in batched(range(len(self.records)), self.batch)]

    def loss(self, places: list[int]) -> float:
        """Of some records, before the first step."""
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return self.model(
                **self.collator([self.records[place] for place in places])
            ).loss.item()

    def epoch(self) -> list[Stamp]:
        self.stamps.clear()
        self.trainer.train()
        return list(self.stamps)


class Ours:
    """The body of ``training.loop.train`` with the default callbacks, records in their order."""

    def __init__(
        self, folder: Path, args: argparse.Namespace, layout: str, precision: str, workers: int = 0
    ) -> None:
        self.run: Run = setup(_config(folder, args, layout, precision, workers), forward_step)
        batches: Any = self.run.train_batches[0]
        dataset = batches.dataset
        dataset.seed = None
        self.plan = self._plan(dataset.rows, args.batch)
        self.lengths: list[int] = (dataset.rows.samples.lengths - 1).tolist()
        self.first_loss: float | None = None
        self.run.emit("train_start")
        self.wait = DataWait()
        self.wait.attach(self.run)

    @staticmethod
    def _plan(rows: Any, batch: int) -> list[list[int]]:
        if hasattr(rows, "plan"):
            return [row.tolist() for row in rows.plan]
        return [list(step) for step in batched(range(len(rows)), batch)]

    def step(self) -> Stamp:
        run = self.run
        run.emit("train_step_start")
        run.last_step = train_step(run)
        if self.first_loss is None:
            self.first_loss = float(run.last_step.loss_dict["lm loss"])
        advance(run, run.last_step)
        run.emit("train_step_end")
        return now()

    def epoch(self) -> list[Stamp]:
        return [self.step() for _ in self.plan]

    def read_wait(self, steps: int) -> float:
        """Seconds for which a step waited for data, the mean of the last ``steps``."""
        return self.wait.read(steps)["data wait"]


def _config(
    folder: Path, args: argparse.Namespace, layout: str, precision: str, workers: int
) -> ConfigContainer:
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    length, batch = args.seq_length, 1 if layout == "packed" else args.batch
    provider.seq_length = length
    specs = PackedSequenceSpecs(packed_sequence_size=length) if layout == "packed" else None
    return ConfigContainer(
        model=provider,
        train=TrainingConfig(batch, batch, train_iters=10**5),
        optimizer=OptimizerConfig(
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            clip_grad=CLIP,
        ),
        scheduler=SchedulerConfig(lr_decay_style="constant"),
        dataset=FinetuningDatasetConfig(
            dataset_root=str(folder / "data"),
            seq_length=length,
            packed_sequence_specs=specs,
            padding_free=layout == "padding_free",
            do_validation=False,
            do_test=False,
            num_workers=workers,
        ),
        logger=LoggerConfig(log_interval=10),
        tokenizer=TokenizerConfig(tokenizer_model=str(folder)),
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(folder)),
        mixed_precision="bf16_mixed" if precision == "bf16" else "fp32",
    )


# ------------------------------------------------------------------------------------------------------- measuring


def serve(name: str, given: tuple[Any, ...], threads: int, pipe: Any) -> None:
    """A process: what a candidate answers to the calls that come in."""
    torch.set_num_threads(threads)
    candidate: Any = (Ours if name == CANDIDATES[0] else Trainer)(*given)
    while (call := pipe.recv()) is not None:
        found = getattr(candidate, call[0])
        pipe.send(found(*call[1:]) if callable(found) else found)


class Remote(AbstractContextManager["Remote"]):
    """A candidate in a process of its own, which ends with the block."""

    def __init__(self, name: str, given: tuple[Any, ...], threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # not a daemon: those have no workers
        self.process = context.Process(target=serve, args=(name, given, threads, theirs))
        self.process.start()
        theirs.close()

    def ask(self, *call: Any) -> Any:
        self.pipe.send(call)
        return self.pipe.recv()

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.pipe.send(None)
        self.pipe.close()
        self.process.join()


def step_medians(epochs: list[list[Stamp]]) -> list[Stamp]:
    """For each step but the first, the median of its wall and of its CPU seconds over the rounds."""
    steps = zip(
        *([Stamp(b.wall - a.wall, b.cpu - a.cpu) for a, b in pairwise(epoch)] for epoch in epochs),
        strict=True,
    )
    return [
        Stamp(*(statistics.median(values) for values in zip(*step, strict=True))) for step in steps
    ]


def rows(found: dict[str, list[Stamp]], tokens: dict[str, int]) -> list[list[str]]:
    """Means of a step, and tokens a second relative to those of the Trainer."""
    wall = {name: sum(step.wall for step in steps) for name, steps in found.items()}
    cpu = {name: sum(step.cpu for step in steps) for name, steps in found.items()}
    speeds = [{name: tokens[name] / seconds[name] for name in found} for seconds in (wall, cpu)]
    return [
        [
            *(
                name,
                str(len(steps)),
                f"{wall[name] / len(steps) * 1e3:.0f}",
                f"{cpu[name] / len(steps):.2f}",
            ),
            f"{speeds[0][name]:,.0f}",
            *(f"{speed[name] / speed['HF Trainer']:.2f}" for speed in speeds),
        ]
        for name, steps in found.items()
    ]


def compare_losses(remotes: dict[str, Remote], plan: list[list[int]], precision: str) -> str:
    """What both compute at the first step.

    Raises:
        SystemExit: They differ.
    """
    theirs = remotes["HF Trainer"].ask("loss", plan[0])
    remotes["Megatron Bridge"].ask("epoch")
    ours = remotes["Megatron Bridge"].ask("first_loss")
    line = f"first loss {ours:.6f}, the Trainer's {theirs:.6f}, relative difference {abs(ours / theirs - 1):.1e}"
    if not abs(ours / theirs - 1) <= TOLERANCES[precision]:
        sys.exit(line)
    return line


def compare(folder: Path, args: argparse.Namespace, layout: str, precision: str) -> None:
    """Print one table; both processes take turns."""
    with ExitStack() as stack:
        given = (folder, args, layout, precision)
        remotes = {
            name: stack.enter_context(Remote(name, given, args.threads)) for name in CANDIDATES
        }
        plans = {name: remote.ask("plan") for name, remote in remotes.items()}
        lengths = remotes["Megatron Bridge"].ask("lengths")
        print(
            f"\n{args.size}, {precision}, {layout}, {len(lengths)} samples of {statistics.mean(lengths):.0f} tokens\n"
        )
        print(compare_losses(remotes, plans["Megatron Bridge"], precision), end="\n\n")
        remotes["HF Trainer"].ask("epoch")
        rounds = [
            {name: remote.ask("epoch") for name, remote in remotes.items()}
            for _ in range(args.rounds)
        ]
    found = {name: step_medians([epochs[name] for epochs in rounds]) for name in remotes}
    tokens = {
        name: sum(lengths[place] for step in plan[1:] for place in step)
        for name, plan in plans.items()
    }
    print(table(HEADERS, rows(found, tokens)), flush=True)


def waiting(folder: Path, args: argparse.Namespace, layout: str, precision: str) -> list[str]:
    """A row: how long a step waits for two workers; the first steps, which start them, are not counted."""
    with Remote("Megatron Bridge", (folder, args, layout, precision, 2), args.threads) as remote:
        start = [remote.ask("step") for _ in range(STARTING)][-1]
        remote.ask("read_wait", STARTING)
        end = [remote.ask("step") for _ in range(args.wait)][-1]
        wait = remote.ask("read_wait", args.wait)
    seconds, cpu = ((last - first) / args.wait for first, last in zip(start, end, strict=True))
    return [
        f"{layout}, {precision}",
        f"{seconds * 1e3:.0f}",
        f"{cpu:.2f}",
        f"{wait * 1e3:.2f}",
        f"{wait / seconds:.2%}",
    ]


def main() -> None:
    """Measure each layout in each precision, and the wait for data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="30m")
    parser.add_argument("--precision", nargs="+", choices=TOLERANCES, default=list(TOLERANCES))
    parser.add_argument("--layout", nargs="*", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument(
        "--batch", type=int, default=2, help="samples of a step that are not packed"
    )
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=4, help="0 measures the wait for data only")
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="counted steps of a round of samples that are not packed",
    )
    parser.add_argument(
        "--wait", type=int, default=20, help="steps for which the wait for data is measured"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    cases = [(layout, precision) for layout in args.layout for precision in args.precision]
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), args)
        for case in cases if args.rounds else ():
            compare(Path(directory), args, *case)
        headers = ["2 workers", "ms/step", "CPU s/step", "ms waiting for data", "share"]
        if args.wait:
            print("\n" + table(headers, [waiting(Path(directory), args, *case) for case in cases]))


if __name__ == "__main__":
    main()
