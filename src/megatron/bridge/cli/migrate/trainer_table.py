# SPDX-License-Identifier: Apache-2.0
"""Keys of Hugging Face's Trainer, TRL, axolotl and LLaMA-Factory, and what corresponds to them here."""

SETTINGS = {
    "checkpoint": "output_dir=save save_steps=save_interval save_total_limit=most_recent_k",
    "train": "max_steps=train_iters num_train_epochs=num_epochs per_device_train_batch_size=micro_batch_size",
    "optimizer": (
        "learning_rate=lr weight_decay=weight_decay adam_beta1=adam_beta1 adam_beta2=adam_beta2 "
        "adam_epsilon=adam_eps max_grad_norm=clip_grad"
    ),
    "scheduler": "warmup_steps=lr_warmup_iters warmup_ratio=lr_warmup_fraction",
    "logger": (
        "logging_steps=log_interval run_name=wandb_exp_name wandb_project=wandb_project wandb_entity=wandb_entity"
    ),
    "validation": "eval_steps=eval_interval",
    "rng": "seed=seed",
    "dataset": "seed=seed dataloader_num_workers=num_workers max_length=seq_length dataset_num_proc=workers",
    "model": "max_length=seq_length",
    "peft": "lora_r=dim lora_alpha=alpha lora_dropout=dropout use_rslora=use_rslora",
    "dpo": "beta=beta",
    "tokenizer": "trust_remote_code=trust_remote_code",
}
"""Group -> keys, and the fields that take their values."""

ALIASES = (
    "adam_eps=adam_epsilon pref_beta=beta rl_beta=beta datasets=dataset dataset_processes=dataset_num_proc "
    "preprocessing_num_workers=dataset_num_proc adapter=finetuning_type lora_rank=lora_r "
    "lora_target_modules=lora_target lr_scheduler=lr_scheduler_type cutoff_len=max_length "
    "max_seq_length=max_length sequence_len=max_length base_model=model_name_or_path num_epochs=num_train_epochs "
    "optimizer=optim sample_packing=packing micro_batch_size=per_device_train_batch_size wandb_name=run_name "
    "rl=stage peft_use_rslora=use_rslora"
)
"""Names of other frameworks, and the names that these tables use."""

SCHEDULES = {"inverse_sqrt": "inverse-square-root", "warmup_stable_decay": "WSD"}
SCHEDULES |= {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adam") | {"sgd": "sgd"}
MODES = {"sft": "sft", "dpo": "dpo", "pt": "pretrain", "lora": "lora", "full": "sft"}
MODULES = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "linear_qkv") | {"o_proj": "linear_proj"}
MODULES |= dict.fromkeys(("gate_proj", "up_proj"), "linear_fc1") | {"down_proj": "linear_fc2"}
"""Modules of Hugging Face's models -> the fused layers of Megatron-Core."""

IMPLIED = (
    "do_train include_num_input_tokens_seen dataloader_drop_last strict auto_find_batch_size flash_attention "
    "flash_attn overwrite_output_dir overwrite_cache dataloader_pin_memory ddp_find_unused_parameters tf32 "
    "remove_unused_columns average_tokens_across_devices ddp_timeout model_type tokenizer_type plot_loss "
    "resume_from_checkpoint auto_resume_from_checkpoints"
)
"""Keys of what every run of this package does, or does not need."""

MISSING = {
    "evaluation and saving go by steps: validation.eval_interval, checkpoint.save_interval": (
        "eval_strategy evaluation_strategy save_strategy saves_per_epoch evals_per_epoch logging_strategy"
    ),
    "the records for evaluation are a file or a share of the data: docs/finetuning.md": (
        "val_set_size val_size per_device_eval_batch_size eval_batch_size test_datasets eval_dataset"
    ),
    "the recipe chooses the layout: model.*_parallel_size, ddp.use_distributed_optimizer": (
        "deepspeed fsdp fsdp_config parallelism_config context_parallel_size tensor_parallel_size"
    ),
    "the tokenizer's own template and tokens are used: dataset.chat_template": (
        "template chat_template special_tokens dataset_dir dataset_prepared_path train_on_inputs group_by_length"
    ),
    "trackers are on when they have a project or a folder: logger.*": "report_to logging_dir use_tensorboard",
    "this package does not have it": (
        "neftune_noise_alpha label_smoothing_factor torch_compile use_liger_kernel push_to_hub hub_model_id "
        "plugins load_best_model_at_end early_stopping_patience loraplus_lr_ratio lr_scheduler_kwargs "
        "load_in_8bit load_in_4bit quantization_bit gradient_checkpointing_kwargs ref_model pref_loss pref_ftx "
        "max_samples"
    ),
}
"""Why there is no counterpart -> such keys."""
