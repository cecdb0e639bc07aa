# SPDX-License-Identifier: Apache-2.0
"""The order of events, the ways to stop, and the error path."""

import gc
import json
from datetime import datetime, timedelta

import pytest
import torch
from megatron.core import parallel_state

from megatron.bridge.data.config import Splits
from megatron.bridge.training.callbacks import Callback, CallbackManager
from megatron.bridge.training.callbacks.base import EVENTS
from megatron.bridge.training.callbacks.observe.logging import announcement
from megatron.bridge.training.callbacks.observe.outputs import remaining
from megatron.bridge.training.config import (
    CheckpointConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.setup import initialize
from megatron.bridge.utils.errors import UserError
from tests.refusals import refused
from tests.toy_run import toy_config

pytestmark = pytest.mark.usefixtures("one_process")


class Events(Callback):
    """Writes down what happens."""

    def __init__(self):
        self.seen = []

    def close(self, context):
        self.seen.append("close")


for event in EVENTS:
    setattr(Events, event, lambda self, context, *values, event=event: self.seen.append(event[3:]))


def tiny(**blocks):
    defaults = {
        "model": {"num_layers": 1},
        "train": {"train_iters": 2},
        "validation": ValidationConfig(),
    }
    return toy_config(**defaults | blocks)


def test_events_of_a_run_in_order():
    events = Events()
    run = pretrain(
        tiny(validation=ValidationConfig(eval_interval=2, eval_iters=1)), forward_step, [events]
    )
    step = ["train_step_start", "grads_ready", "train_step_end"]
    evaluation = ["start", "step_start", "step_end", "end"]
    # an evaluation is over before the user's callbacks hear of the end of the step
    assert events.seen == [
        "train_start",
        *step,
        *step[:2],
        *(f"eval_{part}" for part in evaluation),
        step[2],
        *(f"test_{part}" for part in evaluation),
        "train_end",
        "close",
    ]
    assert (run.progress.step, run.progress.consumed_train_samples) == (2, 16)


def test_a_callback_stops_the_run_and_the_end_is_regular():
    events, manager = Events(), CallbackManager()
    manager.add(events)
    manager.register("on_train_step_end", lambda context: setattr(context, "stop_reason", "enough"))
    run = pretrain(tiny(), forward_step, manager)
    assert run.progress.step == 1
    assert events.seen[-2:] == ["train_end", "close"]


def test_exit_interval():
    run = pretrain(tiny(train={"train_iters": 5, "exit_interval": 2}), forward_step)
    assert run.progress.step == 2
    assert run.stop_reason == "train.exit_interval=2"


def test_steps_that_are_left_out_take_no_interval_with_them(tmp_path):
    """Step 2 is saved before step 3 is left out; in the place of step 4, step 5 is evaluated and saved."""
    events = Events()
    run = pretrain(
        tiny(
            train={"train_iters": 7, "iterations_to_skip": [3, 4]},
            validation=ValidationConfig(eval_interval=2, eval_iters=1),
            checkpoint=CheckpointConfig(save=str(tmp_path), save_interval=2),
            logger=LoggerConfig(log_interval=2),
        ),
        forward_step,
        [events],
    )
    saved = [2, 5, 6, 7]
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == [
        f"iter_{step:07d}" for step in saved
    ]
    assert steps_of(tmp_path, "validation") == steps_of(tmp_path, "train") == saved
    assert (run.progress.skipped_steps, run.progress.consumed_train_samples) == (2, 7 * 8)


def test_a_run_stops_before_it_leaves_out_what_comes_next(tmp_path):
    """And shows the steps behind the last interval."""
    train = {"train_iters": 5, "iterations_to_skip": [4], "exit_interval": 3}
    checkpoint = CheckpointConfig(save=str(tmp_path))
    run = pretrain(
        tiny(train=train, checkpoint=checkpoint, logger=LoggerConfig(log_interval=2)), forward_step
    )
    assert run.progress.step == 3
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000003"]
    assert steps_of(tmp_path, "train") == [2, 3]


def test_a_run_that_goes_on_logs_what_the_undisturbed_one_does(tmp_path):
    """Step 3 was saved between two lines: the mean of steps 1 to 4 is no mean of step 4."""
    losses = []
    for stops in ([4], [3, 4]):
        for stop in stops:
            folder = str(tmp_path / str(len(stops)))
            blocks = {
                "checkpoint": CheckpointConfig(save=folder, save_interval=3),
                "logger": LoggerConfig(4),
            }
            pretrain(tiny(train={"train_iters": 5, "exit_interval": stop}, **blocks), forward_step)
            parallel_state.destroy_model_parallel()
        lines = map(
            json.loads, (tmp_path / str(len(stops)) / "metrics.jsonl").read_text().splitlines()
        )
        losses.append(
            next(line["lm loss"] for line in lines if (line["step"], line["kind"]) == (4, "train"))
        )
    assert losses[0] == losses[1]


def steps_of(folder, kind):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == kind]


class Drawing:
    """Samples that draw a random number each, as some augmentations do."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        torch.rand(1)
        return self.samples[index]


class DrawingData(MockGPTDatasetConfig):
    read_ahead = False

    def build(self, request):
        return Splits(
            *(None if samples is None else Drawing(samples) for samples in super().build(request))
        )


def test_a_look_at_the_data_draws_none_of_the_runs_random_numbers():
    """The first rank alone looks: its dropout masks would be others than those of its tensor-parallel ranks."""
    states = []
    manager = CallbackManager()
    manager.register("on_train_start", lambda context: states.append(torch.get_rng_state()))
    for data in (MockGPTDatasetConfig(seq_length=32), DrawingData(seq_length=32)):
        pretrain(tiny(dataset=data, train={"train_iters": 1}), forward_step, manager)
        parallel_state.destroy_model_parallel()
    assert torch.equal(*states)


def test_error_path_closes_everything_and_ends_nothing_else():
    first, last = Events(), Events()

    class Failing(Callback):
        def on_grads_ready(self, context):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        pretrain(tiny(), forward_step, [first, Failing(), last])
    assert first.seen == ["train_start", "train_step_start", "grads_ready", "error", "close"]
    assert last.seen == ["train_start", "train_step_start", "error", "close"]


def test_context_of_a_step():
    seen = {}

    class Reader(Callback):
        def on_train_step_end(self, context):
            seen.update(
                loss=context.loss_dict["lm loss"].item(),
                norm=context.grad_norm,
                skipped=context.skipped_iter,
                state=context.state,
                scheduler=context.scheduler.num_steps,
            )
            context.user_state["here"] = True

    run = pretrain(tiny(train={"train_iters": 1}), forward_step, [Reader()])
    assert 4 < seen["loss"] < 5
    assert seen["norm"] > 0
    assert seen["skipped"] is False
    assert seen["state"] is run
    assert seen["scheduler"] == 8
    assert run.user_state == {"here": True}


def test_forward_step_with_state():
    def step(state, data_iterator, model):
        state.user_state["calls"] = state.user_state.get("calls", 0) + 1
        return forward_step(data_iterator, model)

    run = pretrain(tiny(), step)
    assert run.user_state["calls"] == 2 * run.num_microbatches


def test_loss_function_of_two_values_and_plain_numbers():
    """A mean instead of sum and count: the mean over microbatches is reported."""

    def step(data_iterator, model):
        output, masked = forward_step(data_iterator, model)

        def mean(losses):
            total, tokens, _ = masked(losses)
            return total / tokens, {"mean loss": (total / tokens).detach()}

        return output, mean

    model = {"num_layers": 1, "calculate_per_token_loss": False}
    usual = pretrain(tiny(model=model), forward_step)
    run = pretrain(tiny(model=model), step)
    assert usual.loss_dict["lm loss"].item() == pytest.approx(
        run.loss_dict["mean loss"].item(), rel=1e-6
    )


def test_unknown_event_is_refused():
    with pytest.raises(UserError, match="did you mean on_train_step_end"):
        CallbackManager().register("on_train_step_ended", print)


def test_states_of_callbacks_by_name(capfd):
    class Counter(Callback):
        def __init__(self, name, count=0):
            self._name, self.count = name, count

        @property
        def name(self):
            return self._name

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    states = CallbackManager([Counter("a", 1), Counter("b", 2), Callback()]).state_dict()
    assert states == {"a": {"count": 1}, "b": {"count": 2}}
    fresh = [Counter("b"), Counter("new", 7)]
    CallbackManager(fresh).load_state_dict(states)
    assert [counter.count for counter in fresh] == [2, 7]
    assert "the state of callback a is dropped" in capfd.readouterr().err
    with pytest.raises(
        UserError, match="two callbacks with state have the name a: override `name`"
    ):
        CallbackManager([Counter("a", 1), Counter("a", 2)]).state_dict()


def test_metrics_and_resolved_config_are_on_disk(tmp_path, capfd):
    folder = tmp_path / "run"
    config = tiny(
        train={"train_iters": 3},
        logger=LoggerConfig(
            log_interval=2, log_dir=str(folder), tensorboard_dir=str(tmp_path / "board")
        ),
        validation=ValidationConfig(eval_iters=1),
    )
    run = pretrain(config, forward_step)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["kind"]) for row in rows] == [
        (2, "train"),
        (3, "train"),
        (3, "validation"),
        (3, "test"),
    ]
    assert rows[1]["lm loss"] == run.loss_dict["lm loss"].item()
    assert rows[1]["consumed samples"] == 24
    assert rows[0]["tokens per second"] == pytest.approx(8 * 32 / rows[0]["step time"])
    assert type(config).from_yaml((folder / "run_config.yaml").read_text()) == run.config
    assert list((tmp_path / "board").glob("events.*"))
    lines = [
        line
        for line in capfd.readouterr().err.splitlines()
        if line.startswith(("step", "validation"))
    ]
    assert lines[0].startswith("step 2/3  lm loss 4.")
    assert "tokens/s" in lines[0]
    assert lines[-1].startswith("validation after step 3: lm loss")


def test_logged_loss_is_the_mean_of_the_interval(tmp_path):
    def losses(interval):
        logger = LoggerConfig(log_interval=interval, log_dir=str(tmp_path / str(interval)))
        pretrain(tiny(train={"train_iters": 4}, logger=logger), forward_step)
        rows = (tmp_path / str(interval) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row)["lm loss"] for row in rows]

    every, second = losses(1), losses(2)
    assert second == pytest.approx(
        [(every[0] + every[1]) / 2, (every[2] + every[3]) / 2], rel=1e-12
    )


def test_evaluation_repeats_and_does_not_disturb():
    """Held-out batches are the same each time, and a run goes on as if it had not been evaluated."""
    losses, held_out = {}, []

    def trained(validation):
        manager, seen = CallbackManager(), []
        manager.register(
            "on_train_step_end", lambda context: seen.append(context.loss_dict["lm loss"].item())
        )
        manager.register(
            "on_eval_end",
            lambda context: held_out.append(context.total_loss_dict["lm loss"].item()),
        )
        model = {"num_layers": 1, "hidden_dropout": 0.1, "attention_dropout": 0.1}
        optimizer = OptimizerConfig(
            lr=1e-30
        )  # weights that stand still show whether the batches are the same
        pretrain(
            tiny(model=model, optimizer=optimizer, validation=validation), forward_step, manager
        )
        return seen

    losses["plain"] = trained(ValidationConfig())
    losses["evaluated"] = trained(ValidationConfig(eval_interval=1, eval_iters=2))
    assert losses["evaluated"] == losses["plain"]
    assert len(held_out) == 2
    assert held_out[0] == held_out[1]


def test_fp16_scales_the_loss_and_skips_what_overflows():
    optimizer = OptimizerConfig(
        lr=1e-3, initial_loss_scale=2.0**40, hysteresis=1, min_loss_scale=1.0
    )
    run = pretrain(
        tiny(train={"train_iters": 40}, optimizer=optimizer, mixed_precision="fp16_mixed"),
        forward_step,
    )
    assert 0 < run.progress.skipped_steps < 40
    # the schedule stands still while steps are skipped
    assert run.scheduler.num_steps == 8 * (40 - run.progress.skipped_steps)
    assert torch.isfinite(run.loss_dict["lm loss"])


def test_manual_garbage_collection_leaves_the_process_as_it_was():
    enabled = []
    manager = CallbackManager()
    manager.register("on_train_step_end", lambda context: enabled.append(gc.isenabled()))
    pretrain(
        tiny(train={"train_iters": 2, "manual_gc": True, "manual_gc_interval": 1}),
        forward_step,
        manager,
    )
    assert enabled == [False, False]
    assert gc.isenabled()


def test_tokenizer_larger_than_the_vocabulary_is_refused():
    config = tiny(model={"vocab_size": 64})
    with pytest.raises(
        UserError,
        match=r"model.vocab_size=64 is smaller than .* 96: .* leave model.vocab_size unset",
    ):
        pretrain(config, forward_step)


def test_vocabulary_follows_the_tokenizer():
    run = pretrain(
        tiny(model={"num_layers": 1, "vocab_size": None}, train={"train_iters": 1}), forward_step
    )
    assert run.config.model.vocab_size == 96


def test_second_run_under_another_layout_in_one_process_is_refused():
    pretrain(tiny(train={"train_iters": 1}), forward_step)
    for name in ("tensor", "expert"):
        config = tiny()
        setattr(config.model, f"{name}_model_parallel_size", 2)
        with pytest.raises(
            UserError, match=f"{name} parallel size 1, not 2.*destroy_model_parallel"
        ):
            initialize(config)


def test_seed_decides_the_weights():
    def weights(seed):
        from megatron.bridge.training.config import RNGConfig

        run = pretrain(tiny(train={"train_iters": 1}, rng=RNGConfig(seed=seed)), forward_step)
        return torch.cat([parameter.detach().flatten() for parameter in run.model[0].parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_training_config_has_no_silent_fields():
    """Each field changes something somewhere: its name is read outside of the config."""
    from dataclasses import fields
    from pathlib import Path

    import megatron.bridge.training as package

    sources = "".join(
        path.read_text()
        for path in Path(package.__path__[0]).rglob("*.py")
        if path.name != "config.py" and path.parent.name != "rules"
    )
    assert all(f".{entry.name}" in sources for entry in fields(TrainingConfig))


def test_metrics_go_on_behind_the_step_that_is_resumed(tmp_path):
    from megatron.bridge.training.callbacks.observe.outputs import JsonLinesOutput

    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "kind": "train", "lm loss": 1.0} for step in (1, 2, 3)]
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "ki'
    )  # killed while writing
    output = JsonLinesOutput(path)
    output.open(2, 10)
    output.write(3, "train", {"lm loss": 2.0})
    output.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["lm loss"]) for row in found] == [(1, 1.0), (2, 1.0), (3, 2.0)]


@pytest.mark.parametrize("line", [b'{"step": 1, "ki{"step": 2}\n', b"[]\n", b"\xff\n"])
def test_damaged_metrics_are_named(tmp_path, line):
    from megatron.bridge.training.callbacks.observe.outputs import JsonLinesOutput

    (tmp_path / "metrics.jsonl").write_bytes(line)
    with pytest.raises(UserError, match=r"metrics.jsonl(, line 1 is damaged| cannot be read)"):
        JsonLinesOutput(tmp_path / "metrics.jsonl").open(2, 10)


def test_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    events = Events()
    with pytest.raises(UserError, match=r"logger.log_dir=.* cannot be written: .*choose another"):
        pretrain(tiny(logger=LoggerConfig(log_dir=str(tmp_path / "file"))), forward_step, [events])
    assert "train_step_start" not in events.seen
    assert events.seen[-1] == "close"


def test_a_terminal_gets_one_live_line(monkeypatch):
    import io

    from rich.console import Console

    from megatron.bridge.training.callbacks.observe import outputs

    screen = io.StringIO()
    monkeypatch.setattr(
        outputs,
        "console",
        lambda: Console(file=screen, force_terminal=True, width=200, highlight=False),
    )
    output = outputs.ConsoleOutput()
    output.open(0, 4)
    numbers = {
        "lm loss": 2.5,
        "learning rate": 1e-3,
        "tokens per second": 1234.5,
        "skipped steps": 1,
    }
    output.write(1, "train", numbers)
    output.write(1, "validation", {"lm loss": 2.25})
    output.write(2, "train", numbers)
    output.close()
    shown = screen.getvalue()
    assert "step 2/4  lm loss 2.5000  lr 1.00e-03  1,234 tokens/s  1 skipped" in shown
    assert "validation after step 1: lm loss 2.2500" in shown
    assert "\x1b[2K" in shown  # the line is replaced in place


def test_a_step_that_ruins_the_weights_ends_the_run(tmp_path):
    def poison(context):
        if context.progress.step == 1:
            next(context.model[0].parameters()).main_grad.fill_(float("nan"))

    manager = CallbackManager()
    manager.register("on_grads_ready", poison)
    checkpoint = CheckpointConfig(save=str(tmp_path), save_interval=1)
    with pytest.raises(FloatingPointError, match=r"step 2: the gradient norm is nan \(lm loss 4\."):
        pretrain(tiny(train={"train_iters": 4}, checkpoint=checkpoint), forward_step, manager)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000001"]


def test_announcement():
    config = tiny()
    config.model.tensor_model_parallel_size = 2
    assert (
        announcement(config, 2)
        == "nothing is left to train: the run is at step 2, train.train_iters=2"
    )
    assert announcement(config, 1).startswith(
        "training from step 1 to 2: 8 x 32 = 256 tokens per step on 1 pro"
    )


def test_the_end_of_a_run_is_told_in_local_time():
    now = datetime(2026, 1, 2, 22, 15)
    assert remaining(timedelta(seconds=59), now) == "0:00:59 left"
    assert remaining(timedelta(minutes=90), now) == "1:30:00 left, ends 23:45"
    assert remaining(timedelta(hours=30), now) == "1 day, 6:00:00 left, ends Sun Jan 4 04:15"


def test_a_misspelled_hook_is_refused_where_it_is_written():
    with pytest.raises(UserError) as caught:

        class Misspelled(Callback):
            def on_train_step_ended(self, context):
                """Nobody would call this."""

    for word in ("Misspelled.on_train_step_ended", "did you mean on_train_step_end"):
        assert word in str(caught.value)
    with pytest.raises(UserError, match="on_log"):
        type("OfAnotherTrainer", (Callback,), {"on_log": lambda self, context: None})
    helper = type("Helper", (Callback,), {"_on_loss": print, "once": print, "online": print})
    assert list(CallbackManager([helper()]))
    callback = Callback()
    callback.on_step_end = print
    with pytest.raises(UserError, match="on_step_end"):
        CallbackManager([callback])


class Silent(Callback):
    pass


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Silent, ("the callback Silent is a class", "Silent()")),
        (
            json,
            ("json", "is no callback", "subclass of megatron.bridge.training.callbacks.Callback"),
        ),
        (print, ("print", "is no callback", "CallbackManager.register")),
    ],
)
def test_what_is_no_callback_is_refused(other, words):
    with refused(*words):
        CallbackManager([other])
