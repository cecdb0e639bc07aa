# SPDX-License-Identifier: Apache-2.0
"""Break a run at every phase, over and over, and see that it ends as if nothing had happened.

``python -m benchmarks.chaos --faults 1000 --seed 2 --out chaos`` trains a tiny model on two gloo ranks under a
launcher. Each attempt suffers one fault of a seeded plan, is ended or ends itself, and is started again. Passed
means:

* the losses of all steps, the weights and the optimizer's state are bitwise those of an undisturbed run;
* no published checkpoint is lost: after each attempt the newest one is whole, and no older than before;
* nothing hangs: each attempt ends within a bound.

Detection is counted from the fault to the end of the attempt's processes, recovery from there to the end of the
first step of the next attempt. Signals, full and failing disks and numbers are injected inside the processes; what
a machine does when it loses power, its network or a GPU is not simulated.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it, in 1 s: once here, not in each that is forked
import torch.nn.functional as F

import megatron.bridge  # noqa: F401 - makes megatron.core usable without a GPU
from benchmarks.chaos_report import Attempt, read, report
from megatron.bridge.checkpoint import manifest, verification
from megatron.bridge.checkpoint import paths as layout
from megatron.bridge.checkpoint.hashing_writer import PreparedSave
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import config as settings
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.callbacks.guard.hang_detection import HANG_EXIT_CODE
from megatron.bridge.training.callbacks.guard.preemption import REQUEUE_EXIT_CODE
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils import atomic
from megatron.bridge.utils.processes import free_port, start_time

WORLD = 2
HANG_SECONDS = 4.0
# An attempt that takes longer than this hangs, whatever the machine is busy with.
BOUND = 90.0
# Whoever is left when a launcher was killed has this long to save and leave.
GRACE = 20.0

PHASES = ("data", "forward", "backward", "collective", "optimizer", "write", "publish", "tracker")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGKILL", "SIGSTOP")
DAMAGES = ("flip", "truncate", "delete", "swap", "tracker")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: ``kill``, ``disk``, ``damage``, ``nan``, ``slow`` or ``poison``.
        phase: Where in a step or a save.
        detail: The signal, the error number or the damage.
        target: ``rank 0``, ``rank 1``, ``all`` or ``launcher``.
        after: Steps from the start of the attempt.
        background: Whether the attempt saves in the background.
    """

    kind: str
    phase: str
    detail: str
    target: str
    after: int
    background: bool


def plan(count: int, seed: int) -> list[Fault]:
    """``count`` faults: every kind and every phase in turn, the rest drawn."""
    draw = random.Random(seed)
    kinds = ["kill"] * 12 + ["disk"] * 3 + ["damage"] * 4 + ["nan"] * 1 + ["slow"] * 1
    faults, kills = [], 0
    for index in range(count):
        kind = kinds[index % len(kinds)]
        detail = {
            "kill": SIGNALS[(kills + kills // len(PHASES)) % len(SIGNALS)],  # each meets each phase
            "disk": draw.choice(("ENOSPC", "EIO")),
            "damage": DAMAGES[index % len(DAMAGES)],
        }.get(kind, "")
        phase = {"kill": PHASES[kills % len(PHASES)], "disk": "write", "nan": "optimizer"}.get(
            kind, "forward"
        )
        targets = ("rank 0", "rank 1", "all", "launcher")
        target = draw.choice(targets) if kind == "kill" else draw.choice(targets[:2])
        if phase in ("publish", "tracker") and target == "rank 1":
            target = "rank 0"  # the first rank alone does these
        kills += kind == "kill"
        faults.append(Fault(kind, phase, detail, target, draw.randint(1, 4), draw.random() < 0.5))
    draw.shuffle(faults)
    return faults


@dataclass
class Paths:
    """Where a chaos run leaves what."""

    out: Path

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.out / "run"

    @property
    def events(self) -> Path:
        """What processes did when, one JSON object a line."""
        return self.out / "events.jsonl"

    def result(self, rank: int, end: str = "") -> Path:
        """What a rank that reached the end has to show."""
        return self.out / f"result.{rank}{end}"


def note(paths: Paths, event: str, **values: Any) -> None:
    """Append to the log; a line is short enough to be written at once."""
    with paths.events.open("a") as stream:
        stream.write(
            json.dumps({"time": time.monotonic(), "event": event, "pid": os.getpid(), **values})
            + "\n"
        )


def events(paths: Paths) -> list[dict[str, Any]]:
    """The log so far; the last line may be cut off by a kill."""
    found = []
    for line in paths.events.read_text().splitlines() if paths.events.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def configuration(folder: Path | None, steps: int, skipped: list[int], background: bool) -> Any:
    """Two layers with dropout, two data-parallel ranks, a checkpoint every two steps."""
    return settings.ConfigContainer(
        train=settings.TrainingConfig(
            micro_batch_size=1, global_batch_size=2, train_iters=steps, iterations_to_skip=skipped
        ),
        model=GPTModelProvider(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            ffn_hidden_size=32,
            normalization="RMSNorm",
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=F.silu,
            hidden_dropout=0.1,
            attention_dropout=0.0,
            vocab_size=64,
            seq_length=16,
            calculate_per_token_loss=True,
        ),
        optimizer=settings.OptimizerConfig(lr=1e-2, clip_grad=1.0),
        scheduler=settings.SchedulerConfig(lr_decay_style="constant"),
        dataset=settings.MockGPTDatasetConfig(seq_length=16),
        logger=settings.LoggerConfig(log_interval=10**6),
        tokenizer=settings.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=64),
        checkpoint=settings.CheckpointConfig(
            save=folder and str(folder),
            save_interval=folder and 2,
            most_recent_k=3,
            async_save=background,
        ),
        dist=settings.DistributedInitConfig(hang_timeout_minutes=HANG_SECONDS / 60),
        straggler=settings.StragglerDetectionConfig(interval=3),
        rerun_state_machine=settings.RerunStateMachineConfig(
            when_persistent="skip" if folder else "stop"
        ),
        mixed_precision="fp32",
    )


class Series(Callback):
    """The loss of every step; survives restarts."""

    def __init__(self, paths: Paths) -> None:
        self.losses: dict[int, float] = {}
        self._paths = paths

    def state_dict(self) -> dict[str, Any]:
        """All losses so far."""
        return {"losses": dict(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Those of the checkpoint."""
        self.losses = dict(state["losses"])

    def on_train_start(self, context: Any) -> None:
        """Tell where the attempt starts."""
        note(self._paths, "from", step=context.progress.step, rank=int(os.environ["RANK"]))

    def on_train_step_end(self, context: Any) -> None:
        """Note the loss."""
        self.losses[context.progress.step] = context.loss_dict["lm loss"].item()
        note(self._paths, "step", step=context.progress.step)


class Injector(Callback):
    """Lets one fault happen in this rank."""

    def __init__(self, fault: Fault, paths: Paths) -> None:
        self._fault, self._paths = fault, paths
        self._armed, self._done, self._slowed = False, False, 0
        rank = int(os.environ["RANK"])
        self._acts = fault.target == f"rank {rank}" or (
            fault.target in ("all", "launcher") and rank == 0
        )

    def on_train_start(self, context: Any) -> None:
        """Wait at the place where the fault is to be injected."""
        self._last = context.progress.step + self._fault.after
        if self._fault.phase == "data":
            context.train_batches[0] = self._watched(context.train_batches[0])
        if self._fault.phase == "collective":
            finish = context.model[0].config.finalize_model_grads_func
            context.model[0].config.finalize_model_grads_func = self._before(finish)
        if self._fault.phase == "optimizer" and self._fault.kind == "kill":
            context.optimizer.step = self._after(context.optimizer.step)

    def on_train_step_start(self, context: Any) -> None:
        """Arm when it is time; be slow."""
        # a save comes every second step only: the first one from the drawn step on is hit
        self._armed = self._acts and not self._done and context.progress.step + 1 >= self._last
        if self._armed and self._fault.kind == "slow" and self._slowed < 3:
            self._slowed += 1
            note(self._paths, "fault", **asdict(self._fault))
            time.sleep(0.3)
        if self._done and self._fault.detail == "SIGSTOP" and self._fault.target == "launcher":
            time.sleep(1.0)  # otherwise the run would end before the launcher continues
        if (
            self._acts
            and self._fault.kind in ("slow", "nan")
            and context.progress.step >= self._last + 3
        ):
            _send("SIGTERM", "launcher")  # the run went on; let the next fault come

    def on_grads_ready(self, context: Any) -> None:
        """Spoil a gradient, once."""
        if self._armed and self._fault.kind == "nan":
            self._done, self._armed = True, False
            note(self._paths, "fault", **asdict(self._fault))
            next(iter(context.model[0].parameters())).main_grad.view(-1)[0] = float("nan")

    def wrap(self, phase: str, function: Any) -> Any:
        """``function``, with the fault before it if it is of that phase."""
        return self._before(function) if self._fault.phase == phase else function

    def act(self) -> None:
        """The fault itself."""
        if not self._armed or self._done:
            return
        fault, self._done = self._fault, True
        if fault.kind == "damage":  # done by the driver, once all processes are gone
            _send("SIGKILL", "all")
        elif fault.kind == "kill":
            note(self._paths, "fault", **asdict(fault))
            _send(fault.detail, fault.target)
        elif fault.kind == "disk":
            note(self._paths, "fault", **asdict(fault))
            number = getattr(__import__("errno"), fault.detail)
            raise OSError(number, os.strerror(number))

    def _before(self, function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.act()
            return function(*args, **kwargs)

        return called

    def _after(self, function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.act()
            return result

        return called

    def _watched(self, batches: Any) -> Any:
        for batch in batches:
            self.act()
            yield batch


def _send(name: str, target: str) -> None:
    """Send a signal. A stopped process that nobody is left to notice is continued later, as after a suspension."""
    launcher, own = int(os.environ["CHAOS_LAUNCHER"]), os.getpid()
    targets = {"launcher": [launcher], "all": _children(launcher)}.get(target, [own])
    targets.sort(key=lambda pid: pid == own)  # this process last
    if name == "SIGSTOP" and target in ("all", "launcher"):
        _go_on_later(targets, launcher)
    _kill(targets, getattr(signal, name))


def _go_on_later(targets: list[int], launcher: int) -> None:
    """In a separate process: continue ``targets`` after the hang limit, then end the attempt."""
    if os.fork() == 0:
        time.sleep(1.5 * HANG_SECONDS)
        _kill(targets, signal.SIGCONT)
        time.sleep(0.5)
        _kill([launcher], signal.SIGTERM)
        os._exit(0)


def _kill(pids: list[int], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rank_main(
    rank: int, port: int, paths: Paths, steps: int, fault: Fault | None, poisoned: list[int]
) -> None:
    """Train to the end, or to what the fault makes of it; the exit code is the process's."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    log = os.open(paths.out / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    note(paths, "started", rank=rank)
    series = Series(paths)
    callbacks: list[Callback] = [series]
    step = partial(_poisoned, poisoned)
    if fault is not None:
        injector = Injector(fault, paths)
        callbacks.append(injector)
        step = partial(_disturbed, injector, step)
        PreparedSave.write_files = injector.wrap("write", PreparedSave.write_files)
        atomic.publish = injector.wrap("publish", atomic.publish)
        layout.write_tracker = injector.wrap("tracker", layout.write_tracker)
    config = configuration(paths.run, steps, [], bool(fault and fault.background))
    run = pretrain(config, _step(step), callbacks)
    paths.result(rank).write_bytes(pickle.dumps(_outcome(run, series)))


def _step(inner: Any) -> Any:
    def step(state: Any, data_iterator: Any, model: Any) -> Any:
        return inner(state, data_iterator, model)

    return step


def _poisoned(steps: list[int], state: Any, data_iterator: Any, model: Any) -> Any:
    """A batch that makes the loss infinite, whenever it is learned from."""
    output, loss = forward_step(data_iterator, model)
    return (
        (output * float("nan"), loss)
        if state.progress.step + 1 in steps and model.training
        else (output, loss)
    )


def _disturbed(injector: Injector, inner: Any, state: Any, data_iterator: Any, model: Any) -> Any:
    injector.wrap("forward", lambda: None)()
    output, loss = inner(state, data_iterator, model)
    if output.requires_grad:
        output.register_hook(injector.wrap("backward", lambda gradient: gradient))
    return output, loss


def _outcome(run: Any, series: Series) -> dict[str, Any]:
    """Everything that must be equal, to the bit."""
    inner = [
        part.optimizer for part in getattr(run.optimizer, "chained_optimizers", [run.optimizer])
    ]
    return {
        "losses": dict(series.losses),
        "weights": [
            parameter.detach().clone() for chunk in run.model for parameter in chunk.parameters()
        ],
        "optimizer": [
            value.clone()
            for optimizer in inner
            for entry in optimizer.state.values()
            for name, value in sorted(entry.items())
            if isinstance(value, torch.Tensor)
        ],
        "random": torch.get_rng_state(),
        "samples": run.progress.consumed_train_samples,
    }


def reference_main(rank: int, port: int, paths: Paths, steps: int, skipped: list[int]) -> None:
    """The undisturbed run; it saves nothing."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    series = Series(Paths(paths.out / "reference"))
    run = pretrain(configuration(None, steps, skipped, False), forward_step, [series])
    paths.result(rank, ".reference").write_bytes(pickle.dumps(_outcome(run, series)))


def launch(main: Any, arguments: tuple[Any, ...]) -> None:
    """Start the ranks; when one fails, end the others; hand a SIGTERM on. Exits as the first failed rank did."""
    os.environ |= {"CHAOS_LAUNCHER": str(os.getpid()), "TORCHELASTIC_RUN_ID": "chaos"}
    fork = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [fork.Process(target=main, args=(rank, port, *arguments)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in ranks])
    while any(process.is_alive() for process in ranks):
        failed = [process.exitcode for process in ranks if process.exitcode not in (None, 0)]
        if failed:
            _end(ranks, GRACE if failed[0] in (REQUEUE_EXIT_CODE, HANG_EXIT_CODE) else 0.0)
        time.sleep(0.01)
    codes = [process.exitcode or 0 for process in ranks]
    sys.exit(next((code if code > 0 else 128 - code for code in codes if code), 0))


def _end(ranks: list[Any], grace: float) -> None:
    """A rank that leaves in order takes the others with it; after a crash they are killed."""
    until = time.monotonic() + min(grace, 2.0)
    while time.monotonic() < until and any(process.is_alive() for process in ranks):
        time.sleep(0.01)
    for process in ranks:
        process.kill()


def attempt(context: Any, paths: Paths, main: Any, arguments: tuple[Any, ...]) -> int | None:
    """Start the launcher and wait for it and its ranks; its exit code, or None if something hung."""
    mark = len(events(paths))
    process = context.Process(target=launch, args=(main, arguments))
    process.start()
    process.join(BOUND)
    hung = process.is_alive()
    process.kill()
    process.join()
    pids = [event["pid"] for event in events(paths)[mark:] if event["event"] == "started"]
    until = time.monotonic() + (0 if hung else GRACE)
    while any(start_time(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    left = [pid for pid in pids if start_time(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return None if hung or left else process.exitcode


def chaos(out: Path, faults: list[Fault]) -> list[Attempt]:
    """Run under ``faults``, with a poisoned batch now and then; what is wrong is in the attempts' ``problems``."""
    paths = Paths(out)
    shutil.rmtree(out, ignore_errors=True)
    (out / "reference").mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.chaos"])
    steps = 3 * len(faults) + 4
    bad = list(range(3, steps, 100))
    try:
        code = attempt(context, Paths(out / "reference"), reference_main, (paths, steps, bad))
        assert code == 0, f"the undisturbed run ended with {code}"
        return _suffer(context, paths, steps, faults, bad)
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined] - it would outlive this process


def _suffer(
    context: Any, paths: Paths, steps: int, faults: list[Fault], bad: list[int]
) -> list[Attempt]:
    attempts: list[Attempt] = []
    queue, draw = list(faults), random.Random(len(faults))
    newest, damaged = 0, set[int]()
    while len(attempts) < 3 * len(faults) + 10:
        fault = queue.pop(0) if queue else None
        mark = len(events(paths))
        code = attempt(context, paths, rank_main, (paths, steps, fault, bad))
        seen = events(paths)[mark:]
        done = Attempt(
            "none" if fault is None else " ".join(map(str, asdict(fault).values())), code or 0
        )
        _clock(done, seen, attempts)
        if code is None:
            done.problems.append("it hung")
        newest = _check(paths, done, newest, damaged)
        if fault is not None and fault.kind == "damage" and not damaged:
            newest = _damage(paths, fault.detail, draw, newest, damaged)
        happened = any(event["event"] in ("fault", "damage") for event in events(paths)[mark:])
        if fault is not None and not happened:
            queue.append(
                replace(fault, after=fault.after + 2)
            )  # the attempt ended before, or nothing could be done
        attempts.append(done)
        if code == 0:
            if queue:
                done.problems.append(f"finished with {len(queue)} faults to come")
            break
    _compare(paths, attempts[-1])
    return attempts


def _clock(done: Attempt, seen: list[dict[str, Any]], before: list[Attempt]) -> None:
    """Seconds from the fault to the end of this attempt, and from the end of those before to the next step of any.

    An attempt that breaks before its first step recovers nothing: the one after it does.
    """
    fault = next((event["time"] for event in seen if event["event"] == "fault"), None)
    first = next((event["time"] for event in seen if event["event"] == "step"), None)
    done.ended = time.monotonic()
    if fault is not None:
        done.detected = done.ended - fault
    for entry in before:
        if first is not None and entry.recovered is None:
            entry.recovered = first - entry.ended


def _check(paths: Paths, done: Attempt, newest: int, damaged: set[int]) -> int:
    """The iteration of the newest whole checkpoint; one that is lost, or damaged by nobody, is a problem."""
    layout.recover(paths.run)
    whole, published = 0, layout.published_iterations(paths.run)
    damaged.intersection_update(published)
    for number in published:
        try:
            verification.verify(layout.iteration_dir(paths.run, number))
            whole = number
            damaged.discard(number)
        except manifest.DamagedError as error:
            if number not in damaged:
                done.problems.append(str(error))
    if whole < newest:
        done.problems.append(
            f"iteration {newest} was published, now the newest whole one is {whole}"
        )
    return whole


def _damage(paths: Paths, how: str, draw: random.Random, newest: int, damaged: set[int]) -> int:
    """Damage the newest checkpoint if there is an older one; return the iteration to resume from."""
    older = [number for number in layout.published_iterations(paths.run) if number < newest]
    if not older:
        return newest
    note(paths, "damage", how=how, iteration=newest)
    directory = layout.iteration_dir(paths.run, newest)
    if how == "tracker":
        (paths.run / layout.TRACKER).write_text("")
        return newest
    damaged.add(newest)
    if how == "swap":
        first, second = sorted(directory.glob("*.distcp"))
        aside = directory / "aside"
        first.rename(aside)
        second.rename(first)
        aside.rename(second)
        return older[-1]
    victim = directory / draw.choice([*manifest.files_of(directory), manifest.NAME])
    content = bytearray(victim.read_bytes())
    if how == "delete":
        victim.unlink()
    elif how == "truncate":
        os.truncate(victim, draw.randrange(len(content)))
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        victim.write_bytes(content)
    return older[-1]


def _compare(paths: Paths, last: Attempt) -> None:
    """The end must be that of the undisturbed run."""
    for rank in range(WORLD):
        if not paths.result(rank).exists():
            last.problems.append(f"rank {rank} never reached the end")
            continue
        found, expected = (
            pickle.loads(path.read_bytes())
            for path in (paths.result(rank), paths.result(rank, ".reference"))
        )
        last.problems += [
            f"{name} of rank {rank} differ"
            for name in expected
            if not _same(found[name], expected[name])
        ]


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    return found == expected


def main() -> int:
    """Run, write ``attempts.jsonl``, and fail if anything was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("chaos"))
    parser.add_argument("--read", type=Path, help="show the times of an attempts.jsonl instead")
    args = parser.parse_args()
    if args.read is not None:
        print(report(read(args.read)))
        return 0
    attempts = chaos(args.out, plan(args.faults, args.seed))
    with (args.out / "attempts.jsonl").open("w") as stream:
        for entry in attempts:
            stream.write(json.dumps(asdict(entry)) + "\n")
    print(report(attempts))
    return int(any(entry.problems for entry in attempts))


if __name__ == "__main__":
    # Processes that are started import this file by name; importing it as their main module, too, takes seconds.
    from benchmarks import chaos as module

    this = sys.modules["__main__"]
    this.__spec__, this.__file__ = None, None
    sys.exit(module.main())
