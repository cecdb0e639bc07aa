# SPDX-License-Identifier: Apache-2.0
"""Rules on batch size ramp-up, learning rate and weight decay."""

from collections.abc import Iterator

from megatron.bridge.training.config.batch_size import lengths, stages
from megatron.bridge.training.config.blocks.optimizer import ParameterOverride
from megatron.bridge.training.config.rules.values import divisors, multiple_near, near, value_of
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.errors import UserError


def rampup_reaches_global_batch_size(config: RunConfig, world_size: int) -> Iterator[str]:
    """The batch size reaches ``global_batch_size`` in whole increments of at least one sample each."""
    ramp = config.train.rampup_batch_size
    full = config.train.global_batch_size
    if ramp is None:
        return
    key = f"train.rampup_batch_size={ramp}"
    if len(ramp) != 3 or min(ramp) < 1:
        yield f"{key}: give three numbers above 0: samples per step at the start, increment, samples until the end"
        return
    start, increment, samples = ramp
    count, rest = divmod(full - start, increment)
    if start >= full:
        yield f"{key} starts with {start} samples, but train.global_batch_size={full}: start lower, or unset it"
    elif rest:
        yield (
            f"{key} does not reach train.global_batch_size={full} in increments of {increment}: use an increment "
            f"of {near(increment, divisors(full - start))}"
        )
    elif samples < count:
        yield f"{key} has {count} increments in {samples} samples: use at least {count} samples"


def epochs_can_be_counted(config: RunConfig, world_size: int) -> Iterator[str]:
    """The rows of the data and one batch size give the number of steps, before the first step."""
    epochs = config.train.num_epochs
    if epochs is None:
        return
    key = f"train.num_epochs={epochs:g}"
    if not epochs > 0:
        yield f"{key}: must be above 0"
    for name in ("train.train_samples", "train.rampup_batch_size", "inprocess_restart.enabled"):
        if value := value_of(config, name):
            yield f"{key} and {name}={value} exclude each other: unset one, or set train.train_iters instead"
    if not config.dataset.has_epochs:
        yield (
            f"{key}, but a dataset of type {type(config.dataset).__name__} has no number of rows to count: set "
            "train.train_iters or train.train_samples instead"
        )


def validation_sets_can_be_read(config: RunConfig, world_size: int) -> Iterator[str]:
    """Each set has a name that does not look like two, and a source that the dataset can read."""
    for name, source in config.validation.sets.items():
        key = f"validation.sets: {name}"
        if not name or "/" in name:
            yield f"{key!r} is no name: use one without a slash, which separates it from the names of losses"
        if source is None:
            continue
        try:
            problems = config.dataset.held_out_from(source).problems()
        except UserError as error:
            problems = [str(error)]
        for problem in problems:
            yield f"{key}: {problem}"


def rampup_fits_data_parallel_size(config: RunConfig, world_size: int) -> Iterator[str]:
    """Megatron-Core would check a batch size only when it is reached, hours into a run."""
    ramp = config.train.rampup_batch_size
    micro = config.train.micro_batch_size
    replicas = config.data_parallel_size(world_size)
    wrong = [size for _, size in stages(config.train) if size % (micro * replicas)]
    if ramp is not None and wrong:
        yield (
            f"train.rampup_batch_size={ramp} has a step of {wrong[0]} samples, no multiple of "
            f"train.micro_batch_size={micro} x data parallel size {replicas}: use "
            f"{multiple_near(wrong[0], micro * replicas)}"
        )


def rampup_fits_virtual_stages(config: RunConfig, world_size: int) -> Iterator[str]:
    """The interleaved schedule needs whole groups of microbatches in every step."""
    model = config.model
    train = config.train
    unit = train.micro_batch_size * config.data_parallel_size(world_size)
    group = model.microbatch_group_size_per_vp_stage or model.pipeline_model_parallel_size
    if train.rampup_batch_size is None or not model.virtual_pipeline_model_parallel_size:
        return
    counts = [size // unit for _, size in stages(train)]
    wrong = [
        count
        for count in counts
        if count < group or 0 < count % group < model.pipeline_model_parallel_size
    ]
    if wrong:
        yield (
            f"train.rampup_batch_size={train.rampup_batch_size} has steps of {wrong[0]} microbatches per rank, "
            f"which virtual pipelining cannot interleave in groups of {group}: use batch sizes that are multiples "
            f"of {group * unit}"
        )


def learning_rates_are_ordered(config: RunConfig, world_size: int) -> Iterator[str]:
    """The learning rate rises from the warmup start to the peak and falls to the minimum."""
    peak = config.optimizer.lr
    end = config.optimizer.min_lr
    if peak is None or peak <= 0:
        yield f"optimizer.lr={peak}: set a learning rate above 0, for example 3.0e-4"
        return
    low = {"optimizer.min_lr": end, "scheduler.lr_warmup_init": config.scheduler.lr_warmup_init}
    wrong = [f"{key}={value}" for key, value in low.items() if value and not 0 <= value <= peak]
    if wrong:
        yield f"{', '.join(wrong)}: must lie between 0 and optimizer.lr={peak}"


def warmup_ends_before_decay(config: RunConfig, world_size: int) -> Iterator[str]:
    """Warmup ends before the schedule does."""
    scheduler = config.scheduler
    length = lengths(config)
    fraction = scheduler.lr_warmup_fraction
    if fraction is not None and not 0 <= fraction < 1:
        yield f"scheduler.lr_warmup_fraction={fraction}: must lie in [0, 1)"
    elif 0 <= length.warmup < length.decay:
        return
    elif scheduler.lr_warmup_samples is not None or scheduler.lr_decay_samples is not None:
        yield (
            f"the warm-up of {length.warmup} samples must be shorter than the decay of {length.decay}: lower "
            "scheduler.lr_warmup_samples or lr_warmup_iters, or raise scheduler.lr_decay_samples or lr_decay_iters"
        )
    else:
        decay = scheduler.lr_decay_iters or 0
        yield (
            f"scheduler.lr_warmup_iters={scheduler.lr_warmup_iters} must be below scheduler.lr_decay_iters="
            f"{decay}: use at most {max(decay - 1, 0)}"
        )


def learning_rate_lasts(config: RunConfig, world_size: int) -> Iterator[str]:
    """Steps with a learning rate of 0 change nothing, for example those by which a finished run is made longer."""
    optimizer = config.optimizer
    scheduler = config.scheduler
    length = lengths(config)
    ends = (
        scheduler.lr_decay_style != "constant" and not optimizer.min_lr and not optimizer.overrides
    )
    if ends and length.decay < length.run:
        of_samples = scheduler.lr_decay_samples is not None
        key = "scheduler.lr_decay_samples" if of_samples else "scheduler.lr_decay_iters"
        yield (
            f"{key}={value_of(config, key)} ends after {length.decay} of {length.run} samples at a learning rate "
            f"of 0, and what follows trains nothing: set {key}=null, which ends with the run, or raise "
            "optimizer.min_lr"
        )


def wsd_has_a_decay(config: RunConfig, world_size: int) -> Iterator[str]:
    """The WSD schedule needs the length of its final decay, which must fit behind the warmup."""
    scheduler = config.scheduler
    length = lengths(config)
    available = length.decay - length.warmup
    if scheduler.lr_decay_style == "WSD" and not 1 <= length.wsd_decay <= available:
        in_samples = scheduler.lr_wsd_decay_samples is not None
        name = "lr_wsd_decay_samples" if in_samples else "lr_wsd_decay_iters"
        limit = available if in_samples else available // config.train.global_batch_size
        yield (
            f"scheduler.{name}={getattr(scheduler, name)} with lr_decay_style=WSD: give the length of the final "
            f"decay, between 1 and {max(limit, 1)}, which is what the warmup leaves"
        )


def overrides_are_valid(config: RunConfig, world_size: int) -> Iterator[str]:
    """Each entry names parameters and sets values that do not exclude each other."""
    for entry in config.optimizer.overrides:
        yield from _entry_problems(entry)


def _entry_problems(entry: ParameterOverride) -> Iterator[str]:
    key = f"optimizer.overrides for {', '.join(entry.params)}"
    values = entry.values()
    if not entry.params:
        yield "optimizer.overrides has an entry without params: give patterns of the parameters that it is for"
    elif not values:
        yield f"{key} sets nothing: give lr, min_lr, lr_mult, weight_decay or wd_mult"
    negative = [f"{name}={value}" for name, value in values.items() if value < 0]
    if negative:
        yield f"{key}: {', '.join(negative)}: must not be negative"
    for multiplier, value_name in (
        ("lr_mult", "lr"),
        ("lr_mult", "min_lr"),
        ("wd_mult", "weight_decay"),
    ):
        if multiplier in values and value_name in values:
            yield f"{key} gives {multiplier} and {value_name}, which exclude each other: remove one"


def overrides_are_ordered(config: RunConfig, world_size: int) -> Iterator[str]:
    """The learning rate of each group rises to its peak and falls to its minimum."""
    optimizer = config.optimizer
    start = config.scheduler.lr_warmup_init or 0.0
    lr = optimizer.lr or 0.0
    min_lr = optimizer.min_lr or 0.0
    groups = {
        f"optimizer.overrides for {', '.join(e.params)}": e.rates(lr, min_lr)
        for e in optimizer.overrides
    }
    if optimizer.decoupled_lr is not None:
        end = optimizer.decoupled_min_lr
        groups["optimizer.decoupled_lr"] = (optimizer.decoupled_lr, min_lr if end is None else end)
    for key, (peak, end) in groups.items():
        if peak < max(end, start):
            yield (
                f"{key} gives a peak of {peak} and an end of {end}: the peak must not be below the end, nor below "
                f"scheduler.lr_warmup_init={start}"
            )


def weight_decay_grows(config: RunConfig, world_size: int) -> Iterator[str]:
    """Megatron-Core only increases the weight decay."""
    scheduler = config.scheduler
    start = scheduler.start_weight_decay or 0.0
    end = scheduler.end_weight_decay or 0.0
    if not 0 <= start <= end:
        yield f"scheduler.start_weight_decay={start} must lie between 0 and end_weight_decay={end}"
    elif start != end and scheduler.weight_decay_incr_style == "constant":
        yield (
            f"scheduler.start_weight_decay={start} and end_weight_decay={end} differ: choose "
            "weight_decay_incr_style=linear or cosine"
        )
