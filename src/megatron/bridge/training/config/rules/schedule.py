# SPDX-License-Identifier: Apache-2.0
"""Rules on batch size ramp-up, learning rate and weight decay."""

from megatron.bridge.training.config.batch_size import stages
from megatron.bridge.training.config.blocks.optimizer import ParameterOverride
from megatron.bridge.training.config.rules.nearest_values import divisors, multiple_near, near
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.training.config.schedule_lengths import lengths


def rampup_reaches_global_batch_size(config: RunConfig, world_size: int) -> str | None:
    """The batch size reaches ``global_batch_size`` in whole increments of at least one sample each."""
    train = config.train
    ramp, full = train.rampup_batch_size, train.global_batch_size
    if ramp is None:
        return None
    key = f"train.rampup_batch_size={ramp}"
    if len(ramp) != 3 or min(ramp) < 1:
        return (
            f"{key}: give three numbers above 0: samples a step at the start, increment, samples until it is over"
        )
    start, increment, samples = ramp
    if start >= full:
        return f"{key} starts with {start} samples, but train.global_batch_size={full}: start lower, or unset it"
    count, rest = divmod(full - start, increment)
    if rest:
        return (
            f"{key} does not reach train.global_batch_size={full} in increments of {increment}: use an increment "
            f"of {near(increment, divisors(full - start))}"
        )
    if samples < count:
        return f"{key} has {count} increments in {samples} samples: use at least {count} samples"
    return None


def rampup_fits_data_parallel_size(config: RunConfig, world_size: int) -> str | None:
    """Megatron-Core would check a batch size only when it is reached, hours into a run."""
    train = config.train
    unit = train.micro_batch_size * config.data_parallel_size(world_size)
    wrong = [size for _, size in stages(train) if size % unit]
    if train.rampup_batch_size is None or not wrong:
        return None
    return (
        f"train.rampup_batch_size={train.rampup_batch_size} has a step of {wrong[0]} samples, no multiple of "
        f"train.micro_batch_size={train.micro_batch_size} x data parallel size "
        f"{config.data_parallel_size(world_size)}: use {multiple_near(wrong[0], unit)}"
    )


def rampup_fits_virtual_stages(config: RunConfig, world_size: int) -> str | None:
    """The interleaved schedule needs whole groups of microbatches in every step."""
    model, train = config.model, config.train
    unit = train.micro_batch_size * config.data_parallel_size(world_size)
    group = model.microbatch_group_size_per_vp_stage or model.pipeline_model_parallel_size
    if train.rampup_batch_size is None or not model.virtual_pipeline_model_parallel_size:
        return None
    counts = [size // unit for _, size in stages(train)]
    wrong = [count for count in counts if count < group or 0 < count % group < model.pipeline_model_parallel_size]
    if not wrong:
        return None
    return (
        f"train.rampup_batch_size={train.rampup_batch_size} has steps of {wrong[0]} microbatches per rank, which "
        f"virtual pipelining cannot interleave in groups of {group}: use batch sizes that are multiples of "
        f"{group * unit}"
    )


def rampup_needs_sequential_samples(config: RunConfig, world_size: int) -> str | None:
    """Random samplers and readers distribute samples by whole global batches."""
    kind = config.dataset.dataloader_type
    if config.train.rampup_batch_size is None or kind in ("single", "cyclic"):
        return None
    return (
        f"train.rampup_batch_size with dataset.dataloader_type={kind}, which deals out batches of one size: set "
        "dataset.dataloader_type=single or cyclic"
    )


def lengths_have_one_unit(config: RunConfig, world_size: int) -> str | None:
    """A length is given in steps, in samples or as a fraction."""
    scheduler = config.scheduler
    pairs = {
        "lr_decay_samples": ("lr_decay_iters", scheduler.lr_decay_iters),
        "lr_warmup_samples": ("lr_warmup_iters", scheduler.lr_warmup_iters),
        "lr_wsd_decay_samples": ("lr_wsd_decay_iters", scheduler.lr_wsd_decay_iters),
    }
    wrong = [
        f"scheduler.{samples} and scheduler.{iters} are both set: remove one"
        for samples, (iters, value) in pairs.items()
        if getattr(scheduler, samples) is not None and value
    ]
    if scheduler.lr_warmup_fraction is not None:
        wrong += [
            f"scheduler.lr_warmup_fraction and scheduler.{name} are both set: remove one"
            for name in ("lr_warmup_iters", "lr_warmup_samples")
            if getattr(scheduler, name)
        ]
    return "; ".join(wrong) or None


def learning_rates_are_ordered(config: RunConfig, world_size: int) -> str | None:
    """The learning rate rises from the warmup start to the peak and falls to the minimum."""
    optimizer = config.optimizer
    if optimizer.lr is None or optimizer.lr <= 0:
        return f"optimizer.lr={optimizer.lr}: set a learning rate above 0, for example 3.0e-4"
    low = {"optimizer.min_lr": optimizer.min_lr, "scheduler.lr_warmup_init": config.scheduler.lr_warmup_init}
    wrong = [f"{key}={value}" for key, value in low.items() if value and not 0 <= value <= optimizer.lr]
    return f"{', '.join(wrong)}: must lie between 0 and optimizer.lr={optimizer.lr}" if wrong else None


def warmup_ends_before_decay(config: RunConfig, world_size: int) -> str | None:
    """Warmup ends before the schedule does."""
    scheduler = config.scheduler
    fraction = scheduler.lr_warmup_fraction
    if fraction is not None and not 0 <= fraction < 1:
        return f"scheduler.lr_warmup_fraction={fraction}: must lie in [0, 1)"
    length = lengths(config)
    if 0 <= length.warmup < length.decay:
        return None
    if scheduler.lr_warmup_samples is not None or scheduler.lr_decay_samples is not None:
        return (
            f"the warm-up of {length.warmup} samples must be shorter than the decay of {length.decay}: lower "
            "scheduler.lr_warmup_samples or lr_warmup_iters, or raise scheduler.lr_decay_samples or lr_decay_iters"
        )
    decay = scheduler.lr_decay_iters or 0
    return (
        f"scheduler.lr_warmup_iters={scheduler.lr_warmup_iters} must be below "
        f"scheduler.lr_decay_iters={decay}: use at most {max(decay - 1, 0)}"
    )


def wsd_has_a_decay(config: RunConfig, world_size: int) -> str | None:
    """The WSD schedule needs the length of its final decay, which must fit behind the warmup."""
    scheduler = config.scheduler
    if scheduler.lr_decay_style != "WSD":
        return None
    length, in_samples = lengths(config), scheduler.lr_wsd_decay_samples is not None
    if 1 <= length.wsd_decay <= length.decay - length.warmup:
        return None
    name = "lr_wsd_decay_samples" if in_samples else "lr_wsd_decay_iters"
    room = length.decay - length.warmup
    most = room if in_samples else room // config.train.global_batch_size
    return (
        f"scheduler.{name}={getattr(scheduler, name)} with lr_decay_style=WSD: give the length of the final "
        f"decay, between 1 and {max(most, 1)}, which is what the warmup leaves"
    )


def overrides_are_valid(config: RunConfig, world_size: int) -> str | None:
    """Each entry names parameters and sets values that do not exclude each other."""
    return "; ".join(filter(None, map(_entry_problem, config.optimizer.overrides))) or None


def _entry_problem(entry: ParameterOverride) -> str | None:
    key, values = f"optimizer.overrides for {', '.join(entry.params)}", entry.values()
    if not entry.params:
        return "optimizer.overrides has an entry without params: give patterns of the parameters that it is for"
    if not values:
        return f"{key} sets nothing: give lr, min_lr, lr_mult, weight_decay or wd_mult"
    negative = [f"{name}={value}" for name, value in values.items() if value < 0]
    if negative:
        return f"{key}: {', '.join(negative)}: must not be negative"
    for one, others in (("lr_mult", ("lr", "min_lr")), ("wd_mult", ("weight_decay",))):
        both = [name for name in others if one in values and name in values]
        if both:
            return f"{key} gives {one} and {both[0]}, which exclude each other: remove one"
    return None


def overrides_are_ordered(config: RunConfig, world_size: int) -> str | None:
    """The learning rate of each group rises to its peak and falls to its minimum."""
    optimizer, start = config.optimizer, config.scheduler.lr_warmup_init
    lr, least = optimizer.lr or 0.0, optimizer.min_lr or 0.0
    groups = {f"optimizer.overrides for {', '.join(e.params)}": e.rates(lr, least) for e in optimizer.overrides}
    if optimizer.decoupled_lr is not None:
        end = optimizer.decoupled_min_lr
        groups["optimizer.decoupled_lr"] = (optimizer.decoupled_lr, least if end is None else end)
    wrong = [
        f"{key} gives a peak of {peak} and an end of {end}: the peak must not be below the end, nor below "
        f"scheduler.lr_warmup_init={start}"
        for key, (peak, end) in groups.items()
        if peak < max(end, start)
    ]
    return "; ".join(wrong) or None


def weight_decay_grows(config: RunConfig, world_size: int) -> str | None:
    """Megatron-Core only increases the weight decay."""
    scheduler = config.scheduler
    start, end = scheduler.start_weight_decay or 0.0, scheduler.end_weight_decay or 0.0
    if 0 <= start < end and scheduler.weight_decay_incr_style == "constant":
        return (
            f"scheduler.start_weight_decay={start} and end_weight_decay={end} differ: choose "
            "weight_decay_incr_style=linear or cosine"
        )
    if 0 <= start <= end:
        return None
    return f"scheduler.start_weight_decay={start} must lie between 0 and end_weight_decay={end}"


def one_source_of_resumed_schedule(config: RunConfig, world_size: int) -> str | None:
    """The schedule comes from the checkpoint or from the config."""
    scheduler = config.scheduler
    if not (scheduler.use_checkpoint_opt_param_scheduler and scheduler.override_opt_param_scheduler):
        return None
    return (
        "scheduler.use_checkpoint_opt_param_scheduler and override_opt_param_scheduler exclude each other: "
        "switch one off"
    )
