# SPDX-License-Identifier: Apache-2.0
"""A hundred mistakes: what somebody types, and the words that the one sentence about it must have.

Arguments are those of ``megatron-bridge``; ``{tmp}`` is a folder that ``places.make`` fills.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    """One mistake.

    Attributes:
        name: For people.
        arguments: Of the command.
        words: What the sentence says, all of them.
    """

    name: str
    arguments: list[str]
    words: tuple[str, ...]


PRETRAIN = ["train", "--recipe", "llama32_1b_pretrain_config"]
TUNE = ["train", "--recipe", "llama32_1b_finetune_config"]
EXPERTS = ["train", "--recipe", "qwen3_30b_a3b_pretrain_config", "--world-size", "16"]
TP, PP, VP, CP, EP, ETP = (
    f"model.{name}_parallel_size"
    for name in (
        "tensor_model",
        "pipeline_model",
        "virtual_pipeline_model",
        "context",
        "expert_model",
        "expert_tensor",
    )
)
SMALL = [
    *(
        "--seq-length",
        "32",
        "model.num_layers=2",
        "model.hidden_size=32",
        "model.num_attention_heads=4",
    ),
    *(
        "model.num_query_groups=2",
        "model.kv_channels=8",
        "model.ffn_hidden_size=64",
        "model.vocab_size=96",
    ),
    *(
        "train.train_iters=2",
        "train.global_batch_size=2",
        "validation.eval_iters=0",
        "mixed_precision=fp32",
    ),
]
RUN = [*PRETRAIN, *SMALL, "tokenizer.vocab_size=96"]
BASE = [*TUNE, *SMALL, "checkpoint.pretrained_checkpoint={tmp}/llama"]
TUNE_RUN = [*BASE, "tokenizer.tokenizer_model={tmp}/llama"]


def dry(name, extra, *words, base=PRETRAIN):
    """A mistake that a dry run finds."""
    return Mistake(name, [*base, *extra, "--dry-run"], words)


def ran(name, extra, *words, base=RUN):
    """A mistake that shows when the run is set up, before its first step."""
    return Mistake(name, [*base, *extra], words)


NAMES = [
    Mistake(
        "misspelt recipe",
        ["train", "--recipe", "lama32_1b_pretrain_config"],
        ("lama32_1b", "did you mean llama32_1b"),
    ),
    Mistake(
        "recipe without its end",
        ["train", "--recipe", "llama3_8b"],
        ("no recipe llama3_8b", "llama3_8b_"),
    ),
    Mistake("no recipe", ["train"], ("nothing to run", "--recipe NAME")),
    Mistake("only a dry run", ["train", "--dry-run"], ("nothing to run", "--recipe NAME")),
    Mistake("a list of nothing", ["train", "--list", "gpt9"], ("no recipe contains 'gpt9'",)),
    Mistake(
        "misspelt command", ["trian"], ("there is no command trian", "did you mean train or trace?")
    ),
    Mistake("misspelt option", [*PRETRAIN, "--dryrun"], ("--dryrun", "did you mean --dry-run")),
    Mistake(
        "option without its value", ["train", "--recipe"], ("--recipe", "expected one argument")
    ),
    Mistake("unknown mode", [*PRETRAIN, "--mode", "rl"], ("--mode", "'rl'", "pretrain")),
    Mistake(
        "a word that is no override",
        [*PRETRAIN, "train_iters", "--dry-run"],
        ("train_iters", "key.sub=value"),
    ),
    Mistake(
        "an override of two dashes",
        [*PRETRAIN, "--train.train_iters=5"],
        ("--train.train_iters=5", "without dashes: train.train_iters=5"),
    ),
    Mistake("world size of a run", [*PRETRAIN, "--world-size", "4"], ("--world-size", "--dry-run")),
    Mistake(
        "no processes",
        [*PRETRAIN, "--dry-run", "--world-size", "0"],
        ("--world-size: 0", "from 1 to"),
    ),
    Mistake("a sequence in words", [*PRETRAIN, "--seq-length", "4k"], ("--seq-length", "'4k'")),
    dry("unknown step function", ["--step-func", "vlm"], "--step-func vlm", "use gpt_step"),
    dry("step function of no module", ["--step-func", "mine.step"], "no module named 'mine'"),
    dry("step function that is missing", ["--step-func", "math.setp"], "math", "setp"),
    dry("adapters without a base model", ["--peft-scheme", "lora"], "use a finetune recipe"),
    dry("unknown adapters", ["--peft-scheme", "qloraa"], "peft=qloraa", "qlora", base=TUNE),
    dry(
        "two kinds of adapters",
        ["--mode", "lora", "--peft-scheme", "dora"],
        "contradict",
        base=TUNE,
    ),
    dry("packing mock data", ["--packed-sequence"], "--packed-sequence", "finetune recipe"),
    Mistake(
        "two things at once",
        [*PRETRAIN, "--dry-run", "--rehearse"],
        ("--dry-run and --rehearse", "leave one out"),
    ),
    Mistake(
        "a rank beyond the last",
        [*PRETRAIN, "--rehearse-rank", "16", "--world-size", "16"],
        ("--rehearse-rank 16", "--world-size 16", "0 to 15"),
    ),
    Mistake(
        "ranks that the layout does not divide",
        [
            *PRETRAIN,
            "--rehearse-rank",
            "1",
            "--world-size",
            "7",
            "model.tensor_model_parallel_size=2",
        ],
        ("needs 2 processes", "start 6 or 8"),
    ),
    Mistake(
        "adapters of one rank",
        [*TUNE, "--rehearse-rank", "0", "--peft-scheme", "lora"],
        ("peft", "pretrain"),
    ),
    Mistake(
        "two rehearsals",
        [*PRETRAIN, "--rehearse", "--rehearse-rank", "0"],
        ("--rehearse-rank", "leave one out"),
    ),
    Mistake(
        "a rehearsal of nothing", [*PRETRAIN, "--rehearse", "0"], ("--rehearse: 0", "from 1 to")
    ),
]

KEYS = [
    dry(
        "misspelt key",
        ["train.train_itres=5"],
        "train.train_itres",
        "did you mean train.train_iters",
    ),
    dry(
        "reference to nothing",
        ["rng.seed=${train.train_itres}"],
        "rng.seed=${train.train_itres}",
        "did you mean train.train_iters",
    ),
    dry(
        "unset environment variable",
        ["rng.seed=${oc.env:NOT_SET}"],
        "NOT_SET is not set",
        "give a default",
    ),
    dry("misspelt group", ["trian.train_iters=5"], "trian", "did you mean train"),
    dry("key of another group", ["model.lr=1"], "model.lr", "optimizer.lr"),
    dry("key without a group", ["lr=1e-4"], "lr", "optimizer.lr"),
    dry("another framework's key", ["train.max_steps=5"], "train.max_steps", "train.train_iters"),
    dry(
        "another framework's batch",
        ["train.per_device_train_batch_size=2"],
        "per_device_train_batch_size",
        "micro_batch_size",
    ),
    dry(
        "words for a number",
        ["train.train_iters=many"],
        "train.train_iters must be an integer, not 'many'",
    ),
    dry(
        "a fraction for an integer",
        ["train.train_iters=1.5"],
        "train.train_iters must be an integer, not 1.5",
    ),
    dry("a unit in a number", ["optimizer.lr=1e-4x"], "optimizer.lr must be a number", "'1e-4x'"),
    dry(
        "a number for a switch",
        ["model.sequence_parallel=2"],
        "model.sequence_parallel must be",
        "2",
    ),
    dry("a list for a number", ["model.num_layers=[1,2]"], "model.num_layers must be an integer"),
    dry(
        "an unknown choice",
        ["scheduler.lr_decay_style=cosin"],
        "scheduler.lr_decay_style must be one of",
        "cosine",
        "'cosin'",
    ),
    dry("an unknown precision", ["mixed_precision=bf16"], "mixed_precision=bf16", "bf16_mixed"),
    dry(
        "an unknown activation", ["model.activation_func=swish2"], "model.activation_func", "swish2"
    ),
    dry("a computed key", ["model.padded_vocab_size=5"], "model.padded_vocab_size is computed"),
    dry("null for a number", ["train.train_iters=null"], "train.train_iters must be an integer"),
    dry(
        "a key twice",
        ["train.train_iters=5", "train.train_iters=6"],
        "train.train_iters is given twice",
    ),
    dry(
        "an option and its key",
        ["--seq-length", "64", "dataset.seq_length=32"],
        "dataset.seq_length is given twice",
    ),
    dry("a group for a value", ["train=5"], "train"),
    dry("broken YAML in a value", ["dataset.split=[1,2"], "dataset.split"),
    dry("no value", ["train.train_iters="], "train.train_iters"),
    dry("a value that cannot stay", ["model.bf16=false"], "model.bf16=False", "has no effect"),
    dry("a block that is not there yet", ["tensor_inspect=1"], "tensor_inspect must be null"),
]

LAYOUTS = [
    dry(
        "tensor ranks that do not divide heads",
        [f"{TP}=3", "--world-size", "3"],
        f"{TP}=3",
        "num_attention_heads=32",
        "use 2 or 4",
    ),
    dry("more tensor ranks than heads", [f"{TP}=64", "--world-size", "64"], f"{TP}=64", "use 32"),
    dry("too few processes", [f"{PP}=16"], "needs 16 processes", "there are 8"),
    dry(
        "stages that do not divide layers",
        [f"{PP}=3", "--world-size", "3"],
        f"{PP}=3",
        "num_layers=16",
        "use 2 or 4",
    ),
    dry("virtual stages alone", [f"{VP}=2"], f"{VP}=2", f"needs {PP} > 1"),
    dry("one virtual stage", [f"{VP}=1", f"{PP}=2"], f"{VP}=1"),
    dry("virtual stages that do not divide layers", [f"{PP}=4", f"{VP}=3"], "=12", "num_layers=16"),
    dry(
        "sequence parallel alone",
        ["model.sequence_parallel=true"],
        "sequence_parallel=True needs",
        TP,
    ),
    dry(
        "context ranks that do not divide the sequence",
        [f"{CP}=8", "--seq-length", "1000"],
        "seq_length=1000",
        "use 992 or 1008",
    ),
    dry(
        "ring attention with dropout",
        [
            f"{CP}=2",
            "model.cp_comm_type=p2p",
            "model.attention_dropout=0.1",
            "model.backend=torch",
        ],
        "cp_comm_type=p2p with model.attention_dropout=0.1",
        "cp_comm_type=all_gather",
    ),
    dry("experts of a dense model", [f"{EP}=2"], f"{EP}=2", "num_moe_experts is not set"),
    dry(
        "expert ranks that do not divide experts",
        [f"{EP}=48", f"{TP}=1", "model.sequence_parallel=false", "--world-size", "48"],
        f"{EP}=48",
        "num_moe_experts=128",
        base=EXPERTS[:3],
    ),
    dry("expert ranks that do not fit the world", [f"{EP}=32"], f"{EP}=32", "16", base=EXPERTS),
    dry(
        "experts without sequence parallelism",
        ["model.sequence_parallel=false"],
        "model.sequence_parallel=true",
        base=EXPERTS,
    ),
    dry(
        "expert tensor ranks of a dense model",
        [f"{ETP}=2"],
        f"{ETP}=2",
        "without model.num_moe_experts",
    ),
    dry(
        "a batch that does not divide",
        ["train.global_batch_size=100"],
        "global_batch_size=100",
        "use 96 or 104",
    ),
    dry(
        "a micro batch above the batch",
        ["train.micro_batch_size=1024"],
        "global_batch_size=512",
        "1024",
    ),
    dry("processes that do not divide the batch", ["--world-size", "7"], "global_batch_size=512"),
    dry("size zero", [f"{TP}=0"], f"{TP}=0", "at least 1"),
    dry("negative size", [f"{CP}=-1"], f"{CP}=-1", "at least 1"),
    dry(
        "batched and overlapped messages",
        ["model.overlap_p2p_comm=true", f"{PP}=2"],
        "overlap_p2p_comm=True",
        "batch_p2p_comm=false",
    ),
    dry(
        "too few microbatches to interleave",
        [f"{PP}=4", f"{VP}=2", "train.global_batch_size=4"],
        "global_batch_size=4",
        "use",
    ),
    dry(
        "groups that do not divide heads",
        ["model.num_query_groups=5"],
        "num_query_groups=5",
        "use 4 or 8",
    ),
    dry(
        "a vocabulary that does not divide",
        [f"{TP}=2", "model.vocab_size=128257", "model.should_pad_vocab=false"],
        "128257",
        "should_pad_vocab=true",
    ),
]

VALUES = [
    dry("a learning rate of zero", ["optimizer.lr=0"], "optimizer.lr=0", "above 0"),
    dry(
        "a minimum above the peak",
        ["optimizer.min_lr=1"],
        "optimizer.min_lr=1",
        "between 0 and optimizer.lr",
    ),
    dry(
        "warm-up that never ends",
        ["scheduler.lr_warmup_fraction=1.5"],
        "lr_warmup_fraction=1.5",
        "[0, 1)",
    ),
    dry(
        "two warm-ups",
        ["scheduler.lr_warmup_iters=5"],
        "lr_warmup_fraction=",
        "and scheduler.lr_warmup_iters=5",
    ),
    dry("WSD without its decay", ["scheduler.lr_decay_style=WSD"], "lr_wsd_decay_iters=None"),
    dry(
        "a window of less than nothing",
        ["model.window_size=[-5,0]"],
        "model.window_size=(-5, 0)",
        "at least -1",
    ),
    dry("dropout of one", ["model.hidden_dropout=1.0"], "hidden_dropout=1.0", "[0, 1)"),
    dry("a negative seed", ["rng.seed=-1"], "rng.seed=-1", "at least 0"),
    dry("no steps", ["train.train_iters=0"], "train.train_iters=0", "at least 1"),
    dry(
        "saving nowhere",
        ["checkpoint.save_interval=5"],
        "save_interval=5 has no effect without checkpoint.save",
    ),
    dry("saving never", ["checkpoint.save=runs", "checkpoint.save_interval=0"], "save_interval=0"),
    dry(
        "keeping no checkpoint",
        ["checkpoint.save=runs", "checkpoint.most_recent_k=0"],
        "most_recent_k=0",
    ),
    dry(
        "a longer sequence than the model's",
        ["dataset.seq_length=9000"],
        "seq_length=9000",
        "model.seq_length=8192",
    ),
    dry(
        "tuning without a base",
        ["--mode", "lora"],
        "peft needs checkpoint.pretrained_checkpoint",
        base=TUNE,
    ),
    dry(
        "adapters of rank zero",
        ["--mode", "lora", "checkpoint.pretrained_checkpoint=x", "peft.dim=0"],
        "peft.dim=0",
        base=TUNE,
    ),
    dry(
        "an optimizer that is not there",
        ["optimizer.optimizer=adamw"],
        "optimizer.optimizer",
        "adamw",
        "adam",
    ),
    dry(
        "two half precisions",
        ["mixed_precision=null", "model.bf16=true", "model.fp16=true"],
        "bf16",
        "fp16",
    ),
]

FILES = [
    Mistake(
        "no such file",
        [*PRETRAIN, "--config", "{tmp}/none.yaml", "--dry-run"],
        ("none.yaml", "No such file"),
    ),
    Mistake(
        "a folder for a file",
        [*PRETRAIN, "--config", "{tmp}", "--dry-run"],
        ("cannot be read", "directory"),
    ),
    Mistake(
        "a file that is no text",
        [*PRETRAIN, "--config", "{tmp}/binary.yaml", "--dry-run"],
        ("not text",),
    ),
    Mistake(
        "broken YAML",
        [*PRETRAIN, "--config", "{tmp}/broken.yaml", "--dry-run"],
        ("broken.yaml", "not valid YAML at line 3"),
    ),
    Mistake(
        "tabs in YAML",
        [*PRETRAIN, "--config", "{tmp}/tabs.yaml", "--dry-run"],
        ("tabs.yaml", "line 2"),
    ),
    Mistake(
        "a key twice in YAML",
        [*PRETRAIN, "--config", "{tmp}/twice.yaml", "--dry-run"],
        ("'train' is given twice",),
    ),
    Mistake(
        "misspelt key in YAML",
        [*PRETRAIN, "--config", "{tmp}/misspelt.yaml", "--dry-run"],
        ("did you mean train.train_iters",),
    ),
    Mistake(
        "an empty file",
        [*PRETRAIN, "--config", "{tmp}/empty.yaml", "--dry-run"],
        ("holds no settings",),
    ),
    Mistake(
        "half a config alone",
        ["train", "--config", "{tmp}/good.yaml", "--dry-run"],
        ("not a complete config", "--recipe"),
    ),
    Mistake(
        "a class that is none",
        ["train", "--config", "{tmp}/target.yaml", "--dry-run"],
        ("os.system",),
    ),
    Mistake(
        "a config of another thing",
        ["train", "--config", "{tmp}/other.yaml", "--dry-run"],
        ("TrainingConfig", "not a run"),
    ),
    ran("a corpus that is not there", ["--data", "{tmp}/none"], "{tmp}/none"),
    ran("a corpus with its ending", ["--data", "{tmp}/text.bin"], "text", ".bin"),
    ran("half a corpus", ["--data", "{tmp}/half"], "half", ".idx"),
    ran("text for a corpus", ["--data", "{tmp}/train.jsonl"], "train.jsonl", "preprocess"),
    ran(
        "shares that are no numbers",
        ["--data", "{tmp}/none", "dataset.split=a,b,c"],
        "dataset.split",
        "a,b,c",
    ),
    ran("a tuning folder that is not there", ["--data", "{tmp}/nowhere"], "nowhere", base=TUNE_RUN),
    ran(
        "a tuning folder without data",
        ["--data", "{tmp}/void"],
        "void has no file training",
        base=TUNE_RUN,
    ),
    ran(
        "samples with other fields",
        ["--data", "{tmp}/fields"],
        "fields/training.jsonl",
        "the keys are: question, solution",
        base=TUNE_RUN,
    ),
    ran(
        "samples that are no JSON",
        ["--data", "{tmp}/nojson"],
        "nojson/training.jsonl:2",
        "JSON",
        base=TUNE_RUN,
    ),
    ran("two tuning folders", ["--data", "{tmp}/a", "{tmp}/b"], "one folder", base=TUNE_RUN),
    ran(
        "a tokenizer that is not there",
        ["tokenizer.tokenizer_type=HuggingFaceTokenizer", "tokenizer.tokenizer_model={tmp}/no"],
        "tokenizer",
        "{tmp}/no",
        base=[*PRETRAIN, *SMALL, "tokenizer.vocab_size=null"],
    ),
    ran(
        "another model's tokenizer",
        ["--data", "{tmp}/samples", "tokenizer.tokenizer_model={tmp}/tokens"],
        "tokenizer.tokenizer_model",
        "tokens differ",
        base=BASE,
    ),
    ran(
        "a vocabulary below the tokenizer's",
        ["tokenizer.vocab_size=200"],
        "model.vocab_size=96",
        "200",
        base=[*PRETRAIN, *SMALL],
    ),
    ran(
        "a base that is not there",
        ["checkpoint.pretrained_checkpoint={tmp}/none"],
        "{tmp}/none",
        base=[*TUNE, *SMALL, "tokenizer.vocab_size=96"],
    ),
    ran(
        "a base that is no model",
        ["checkpoint.pretrained_checkpoint={tmp}/void"],
        "{tmp}/void",
        base=[*TUNE, *SMALL, "tokenizer.vocab_size=96"],
    ),
    ran(
        "a base of another shape",
        ["checkpoint.pretrained_checkpoint={tmp}/llama", "model.ffn_hidden_size=128"],
        "mlp.gate_proj.weight",
        "[64, 32]",
        "[128, 32]",
        base=[*TUNE, *[item for item in SMALL if "ffn" not in item], "tokenizer.vocab_size=96"],
    ),
    ran("a folder to load that is not there", ["checkpoint.load={tmp}/none"], "{tmp}/none"),
    ran(
        "a model for a checkpoint",
        ["checkpoint.load={tmp}/llama"],
        "llama",
        "checkpoint.pretrained_checkpoint",
    ),
    ran(
        "a TensorBoard folder in a file",
        ["logger.tensorboard_dir={tmp}/binary.yaml/run"],
        "logger.tensorboard_dir",
        "choose another folder",
    ),
    ran(
        "a damaged checkpoint",
        ["checkpoint.save={tmp}/damaged", "checkpoint.when_damaged=refuse"],
        "damaged",
    ),
    ran(
        "a checkpoint of another model",
        ["checkpoint.save={tmp}/saved", "model.num_layers=3"],
        "saved",
        base=[item for item in RUN if "num_layers" not in item],
    ),
    ran("a folder that cannot be made", ["checkpoint.save={tmp}/binary.yaml/run"], "binary.yaml"),
    ran(
        "FP8 without its hardware",
        ["mixed_precision=bf16_with_fp8_current_scaling_mixed"],
        "bf16_with_fp8_current_scaling_mixed",
        base=[item for item in RUN if "mixed" not in item],
    ),
]

LLAMA = "{tmp}/llama"
NO_MODEL = ("/none does not exist", "or a hub id")
NO_CHECKPOINT = ("checkpoint /none does not exist",)
UNPUBLISHED = ("void holds no latest_checkpointed_iteration.txt",)
COMMANDS = [
    Mistake(f"{' '.join(words[:2])}: {name}", words, said)
    for name, words, said in (
        ("no model", ["generate", "/none", "--prompt", "hi"], NO_MODEL),
        ("an empty folder", ["generate", "{tmp}/void", "--prompt", "hi"], UNPUBLISHED),
        ("no prompt", ["generate", LLAMA], ("--prompts", "--prompt")),
        (
            "prompts that are not there",
            ["generate", LLAMA, "--prompts", "/none.jsonl"],
            ("/none.jsonl",),
        ),
        (
            "no temperature",
            ["generate", LLAMA, "--prompt", "hi", "--temperature", "nan"],
            ("--temperature=nan",),
        ),
        (
            "words for a number",
            ["generate", LLAMA, "--prompt", "hi", "--top-k", "few"],
            ("--top-k", "'few'"),
        ),
        (
            "more than all tokens",
            ["generate", LLAMA, "--prompt", "hi", "--top-p", "2"],
            ("=2.0", "from 0 to 1"),
        ),
        (
            "memory in words",
            ["generate", LLAMA, "--prompt", "hi", "--kv-memory", "lots"],
            ("lots", "4GB"),
        ),
        ("no adapter", ["generate", LLAMA, "--prompt", "hi", "--adapter", "/none"], NO_CHECKPOINT),
        ("no model", ["chat", "/none"], NO_MODEL),
        (
            "no template",
            ["chat", LLAMA, "--chat-template", "/none"],
            ("--chat-template /none cannot be read",),
        ),
        ("no model", ["convert", "--hf-model", "/none", "--megatron-path", "{tmp}/new"], NO_MODEL),
        (
            "no config",
            ["convert", "--hf-model", "{tmp}/void", "--megatron-path", "{tmp}/new"],
            ("no config.json",),
        ),
        ("no target", ["convert", "--hf-model", LLAMA], ("--megatron-path",)),
        (
            "another framework's type",
            ["convert", "--hf-model", LLAMA, "--megatron-path", "{tmp}/new", "--dtype", "bf16"],
            ("'bf16'", "bfloat16"),
        ),
        (
            "more ranks than processes",
            ["convert", "--hf-model", LLAMA, "--megatron-path", "{tmp}/new", "--tp", "3"],
            ("--tp 3", "torchrun --nproc-per-node 3"),
        ),
        (
            "no checkpoint",
            ["export", "--megatron-path", "/none", "--hf-path", "{tmp}/new"],
            NO_CHECKPOINT,
        ),
        (
            "a model for a checkpoint",
            ["export", "--megatron-path", "{tmp}/void", "--hf-path", "{tmp}/new"],
            UNPUBLISHED,
        ),
        ("no model", ["plan", "--hf-model", "/none"], NO_MODEL),
        ("no path", ["inspect", "/none"], ("/none does not exist",)),
        ("no checkpoint", ["inspect", "{tmp}/void"], ("void is not a checkpoint", "config.json")),
        ("no model", ["verify", "/none", "/none"], NO_MODEL),
        ("no checkpoint", ["verify", LLAMA, "/none"], NO_CHECKPOINT),
        ("no run", ["checkpoint", "list", "/none"], ("/none is not a folder",)),
        ("no checkpoint", ["checkpoint", "inspect", "/none"], NO_CHECKPOINT),
        ("an empty folder", ["checkpoint", "verify", "{tmp}/void"], UNPUBLISHED),
        ("an empty folder", ["checkpoint", "diff", "{tmp}/void", "/none"], UNPUBLISHED),
        ("no checkpoint", ["checkpoint", "convert", "/none", "{tmp}/new"], NO_CHECKPOINT),
        ("nothing to merge", ["adapter", "merge"], ("--adapter", "--hf-path")),
        (
            "no tokenizer",
            ["data", "preprocess", "--input", "/none", "--output-prefix", "{tmp}/new"],
            ("--tokenizer-model is missing", "directory or hub id"),
        ),
        ("no file", ["from-megatron-lm", "/none"], ("/none is neither a command line nor a file",)),
        ("no argument", ["from-megatron-lm", "pretrain_gpt.py --nope 3"], ("--nope",)),
        ("no file", ["from-trainer", "/none"], ("/none cannot be read",)),
        ("no run", ["watch", "/none"], ("/none cannot be read", "logger.log_dir")),
        ("no metrics", ["plot", "{tmp}/void"], ("void/metrics.jsonl cannot be read",)),
        ("no config", ["port", "/none"], NO_MODEL),
        (
            "misspelt recipe",
            ["tune", "--recipe", "lama32_1b_pretrain_config"],
            ("did you mean llama32_1b",),
        ),
        ("no GPUs", ["tune", *PRETRAIN[1:], "--gpus", "0"], ("--gpus", "from 1 to")),
        ("no dimension", ["tune", *PRETRAIN[1:], "--fixed", "tp=3"], ("--fixed tp=3", "tensor")),
        ("no budget", ["tune", *PRETRAIN[1:], "--budget", "x"], ("--budget x", "memory=")),
        (
            "no such GPU",
            ["tune", *PRETRAIN[1:], "--gpu", "H1000"],
            ("'H1000'", "did you mean H100"),
        ),
    )
]

MISTAKES = [*NAMES, *KEYS, *LAYOUTS, *VALUES, *FILES, *COMMANDS]
