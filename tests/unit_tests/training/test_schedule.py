# SPDX-License-Identifier: Apache-2.0
"""Every schedule at every step against its formula, written out by itself; resumed, it goes on as it was."""

import math
from types import SimpleNamespace

import pytest

from megatron.bridge.training.config import OptimizerConfig, SchedulerConfig
from megatron.bridge.training.config.batch_size import lengths
from megatron.bridge.training.optim.scheduler import build_scheduler
from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config

PEAK, END, START, STEPS, WARMUP, BATCH = 1e-2, 1e-3, 1e-4, 20, 4, 8


def shape(style, part, wsd=None):
    """What is left of the way from peak to end, ``part`` of the steps after warm-up gone."""
    if style == "WSD":
        gone = (part - (1 - wsd[1])) / wsd[1]
        return 1.0 if gone <= 0 else WSD[wsd[0]](gone)
    return {"linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2, "constant": 1.0}[
        style
    ]


WSD = {
    "linear": lambda gone: 1 - gone,
    "cosine": lambda gone: (1 + math.cos(math.pi * gone)) / 2,
    "exponential": lambda gone: 2 * 0.5**gone - 1,
    "minus_sqrt": lambda gone: 1 - math.sqrt(gone),
}


def rate(style, step, wsd=None):
    """The learning rate behind ``step`` steps."""
    if step <= WARMUP:
        return START + (PEAK - START) * step / WARMUP
    if style == "inverse-square-root":
        return max(END, PEAK * math.sqrt(WARMUP / step))
    return END + (PEAK - END) * shape(style, (step - WARMUP) / (STEPS - WARMUP), wsd)


def scheduled(groups=({},), train=None, **options):
    """A schedule over groups without parameters; the config is validated first."""
    config = toy_config(
        train={"train_iters": STEPS, "global_batch_size": BATCH, **(train or {})},
        optimizer=OptimizerConfig(lr=PEAK, min_lr=END, weight_decay=0.1),
        scheduler=SchedulerConfig(
            **{"lr_warmup_iters": WARMUP, "lr_warmup_init": START, **options}
        ),
    )
    config = config.resolve(1).config
    every = [{"max_lr": PEAK, "min_lr": END, "wd_mult": 1.0, **group} for group in groups]
    return build_scheduler(config, SimpleNamespace(param_groups=every))


def followed(schedule, steps=STEPS, batch=lambda step: BATCH):
    """Rates of the first group before each step and behind the last one."""
    group, seen = schedule.optimizer.param_groups[0], []
    for step in range(steps):
        seen.append(group["lr"])
        schedule.step(batch(step))
    return [*seen, group["lr"]]


def test_the_first_step_trains_and_steps_are_equal():
    schedule = scheduled(
        groups=({}, {"max_lr": 5 * PEAK}, {"max_lr": 0.0, "min_lr": 0.0}), lr_warmup_init=None
    )
    before = [[group["lr"] for group in schedule.optimizer.param_groups]]
    for _ in range(WARMUP):
        schedule.step(BATCH)
        before.append([group["lr"] for group in schedule.optimizer.param_groups])
    expected = [
        [share * PEAK, share * 5 * PEAK, 0.0]
        for share in ((step + 1) / (WARMUP + 1) for step in range(WARMUP + 1))
    ]
    assert before == [pytest.approx(rates, rel=1e-12) for rates in expected]
    rest = followed(schedule, steps=STEPS - WARMUP)
    assert rest == pytest.approx(
        [rate("linear", step) for step in range(WARMUP, STEPS + 1)], rel=1e-12
    )


def test_without_warmup_the_first_step_has_the_peak():
    assert followed(scheduled(lr_warmup_iters=0, lr_warmup_init=None))[0] == pytest.approx(
        PEAK, rel=1e-12
    )


@pytest.mark.parametrize("saved_start", [0.0, START, None, "not saved"])
def test_an_open_start_is_that_of_the_checkpoint(saved_start):
    """A run of an earlier version, whose warmup began at 0, goes on as it was."""
    options = {} if saved_start == "not saved" else {"lr_warmup_init": saved_start}
    earlier = scheduled(**{"lr_warmup_init": 0.0, **options})
    earlier.step(BATCH)
    state = earlier.state_dict()
    if saved_start == "not saved":
        del state["init_lr"]
    resumed = scheduled(lr_warmup_init=None)
    resumed.load_state_dict(state)
    assert followed(resumed, steps=STEPS - 1) == followed(earlier, steps=STEPS - 1)


STYLES = [
    *((style, None) for style in ("constant", "linear", "cosine", "inverse-square-root")),
    *(("WSD", (decay, part)) for decay in WSD for part in (0.25, 1.0)),
]


@pytest.mark.parametrize(("style", "wsd"), STYLES)
def test_every_step_has_the_rate_of_the_formula(style, wsd):
    last = (
        {"lr_wsd_decay_style": wsd[0], "lr_wsd_decay_iters": int(wsd[1] * (STEPS - WARMUP))}
        if wsd
        else {}
    )
    schedule = scheduled(lr_decay_style=style, **last)
    expected = [rate(style, step, wsd) for step in range(STEPS + 1)]
    assert followed(schedule) == pytest.approx(expected, rel=1e-12)
    if style != "constant":
        schedule.step(BATCH)
        assert schedule.optimizer.param_groups[0]["lr"] == END  # behind the end


@pytest.mark.parametrize(
    "warmup",
    [
        {"lr_warmup_iters": WARMUP},
        {"lr_warmup_iters": 0, "lr_warmup_samples": WARMUP * BATCH},
        {"lr_warmup_iters": 0, "lr_warmup_fraction": WARMUP / STEPS},
    ],
)
@pytest.mark.parametrize(
    "decay", [{}, {"lr_decay_iters": STEPS}, {"lr_decay_samples": STEPS * BATCH}]
)
def test_steps_samples_and_fractions_say_the_same(warmup, decay):
    expected = [rate("cosine", step) for step in range(STEPS + 1)]
    assert followed(scheduled(lr_decay_style="cosine", **warmup, **decay)) == pytest.approx(
        expected, rel=1e-12
    )


def test_samples_are_steps_of_any_batch():
    schedule = scheduled(
        lr_decay_style="WSD",
        lr_wsd_decay_samples=64,
        lr_decay_samples=STEPS * BATCH,
        lr_wsd_decay_style="linear",
    )
    assert (schedule.wsd_decay_steps, schedule.lr_decay_steps) == (64, STEPS * BATCH)


def test_a_growing_batch_has_the_schedule_of_its_samples():
    """Ends of parts that were given in steps are met exactly, with the peak at the last step of warm-up."""
    sizes = [2, 2, 2, 2, 4, 4, 6, 8, 8, 8]
    schedule = scheduled(
        train={"rampup_batch_size": [2, 2, 21], "micro_batch_size": 1, "train_iters": len(sizes)},
        lr_decay_style="linear",
    )
    before = [sum(sizes[:step]) for step in range(len(sizes) + 1)]
    assert (schedule.lr_warmup_steps, schedule.lr_decay_steps) == (before[WARMUP], before[-1])
    seen = followed(schedule, len(sizes), lambda step: sizes[step])
    for step, samples in enumerate(before):
        up, down = samples / before[WARMUP], (before[-1] - samples) / (before[-1] - before[WARMUP])
        expected = START + (PEAK - START) * up if step <= WARMUP else END + (PEAK - END) * down
        assert seen[step] == pytest.approx(expected, rel=1e-12)


def test_the_last_steps_of_wsd_are_as_long_as_the_batch_has_become():
    config = toy_config(
        train={"rampup_batch_size": [2, 6, 10], "micro_batch_size": 1, "train_iters": 12},
        scheduler=SchedulerConfig(lr_decay_style="WSD", lr_wsd_decay_iters=3),
    )
    config = config.resolve(1).config
    assert lengths(config) == (0, 5 * 2 + 7 * 8, 3 * 8, 5 * 2 + 7 * 8, 2)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_weight_decay_grows_as_the_formula_says(style):
    schedule = scheduled(
        groups=({}, {"wd_mult": 0.5}, {"start_wd": 0.3, "end_wd": 0.3}),
        start_weight_decay=0.1,
        end_weight_decay=0.2,
        weight_decay_incr_style=style,
    )
    for step in range(STEPS + 3):
        part = min(step / STEPS, 1.0)
        expected = 0.1 + 0.1 * (part if style == "linear" else (1 - math.cos(math.pi * part)) / 2)
        found = [group["weight_decay"] for group in schedule.optimizer.param_groups]
        assert found == pytest.approx([expected, 0.5 * expected, 0.3], rel=1e-12)
        schedule.step(BATCH)


def test_a_group_goes_its_own_way_in_step_with_the_others():
    schedule = scheduled(groups=({"max_lr": 10 * PEAK, "min_lr": 0.0},), lr_decay_style="linear")
    seen = followed(schedule)
    assert seen[WARMUP] == pytest.approx(10 * PEAK, rel=1e-12)
    assert seen[12] == pytest.approx(5 * PEAK, rel=1e-12)
    assert seen[-1] == 0.0


OTHER = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 8, "lr_wsd_decay_style": "linear"}


def test_resumed_it_goes_on_as_it_was():
    undisturbed = followed(scheduled(**OTHER))
    first = scheduled(**OTHER)
    assert followed(first, 7) == undisturbed[:8]
    second = scheduled(**OTHER)
    second.load_state_dict(first.state_dict())
    assert followed(second, STEPS - 7) == undisturbed[7:]


def test_the_checkpoints_schedule_is_used_in_all_of_its_parts():
    """Megatron-Core goes on with the config's rates, warm-up start and end of WSD."""
    first = scheduled(
        groups=({}, {"max_lr": 5.0}), **OTHER, start_weight_decay=0.2, end_weight_decay=0.2
    )
    undisturbed = followed(scheduled(**OTHER))
    followed(first, 2)
    config = toy_config(
        train={"train_iters": STEPS},
        optimizer=OptimizerConfig(lr=0.5, min_lr=0.25),
        scheduler=SchedulerConfig(use_checkpoint_opt_param_scheduler=True),
    )
    config = config.resolve(1).config
    rates = {"max_lr": 0.5, "min_lr": 0.25, "wd_mult": 1.0}
    second = build_scheduler(
        config, SimpleNamespace(param_groups=[rates, {**rates, "max_lr": 5.0}])
    )
    second.load_state_dict(first.state_dict())
    assert second.optimizer.param_groups[1]["max_lr"] == 5.0
    assert second.optimizer.param_groups[0]["weight_decay"] == 0.2
    assert followed(second, STEPS - 2) == undisturbed[2:]


def test_run_length_in_samples_becomes_steps():
    config = toy_config(
        train={"train_iters": 0, "train_samples": 45, "rampup_batch_size": [4, 4, 10]}
    )
    config = config.resolve(1).config
    assert config.train.train_iters == 3 + 4  # 3 x 4 + 4 x 8 = 44
    assert config.validate(1) == []
    config.train.train_iters = 8
    assert config.validate(1) == [
        "train.train_iters=8 is overridden by train.train_samples=45, which are 7 steps"
    ]
    config = toy_config(train={"train_iters": 0, "train_samples": 7})
    with pytest.raises(UserError, match=r"train_samples=7 are not enough for one step"):
        config.validate(1)


def test_growing_batches_that_fit_pass():
    for world_size, ramp in ((1, [2, 2, 30]), (2, [4, 4, 1])):
        toy_config(train={"rampup_batch_size": ramp}).validate(world_size)
