# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's arguments and what corresponds to them here.

An argument that is in none of these tables, but names a field of Megatron-Core's configs, sets that field:
``--num-layers`` is ``model.num_layers``. ``--no-`` before the name of a field sets it to false, and fields of
data parallelism may begin with ``--ddp-``.
"""

RENAMED = {
    "model": (
        "activations-checkpoint-num-layers=recompute_num_layers "
        "decoder-first-pipeline-num-layers=num_layers_in_first_pipeline_stage "
        "decoder-last-pipeline-num-layers=num_layers_in_last_pipeline_stage "
        "microbatch-group-size-per-virtual-pipeline-stage=microbatch_group_size_per_vp_stage "
        "model-parallel-size=tensor_model_parallel_size norm-epsilon=layernorm_epsilon "
        "num-experts=num_moe_experts num-virtual-stages-per-pipeline-rank=virtual_pipeline_model_parallel_size "
        "overlap-p2p-communication-warmup-flush=overlap_p2p_comm_warmup_flush "
        "rotary-seq-len-interpolation-factor=seq_len_interpolation_factor"
    ),
    "ft": "calc-ft-timeouts=calc_ft_timeouts enable-ft-package=enable_ft_package",
    "rerun_state_machine": "check-for-spiky-loss=check_for_spiky_loss",
    "dataset": "data-cache-path=path_to_cache",
    "inprocess_restart": "inprocess-restart=enabled",
    "checkpoint": "persistent-save-interval=save_interval",
    "profiling": "profile=use_nsys_profiler",
    "comm_overlap": "tp-comm-overlap-cfg=tp_comm_overlap_cfg",
    "ddp": "use-nccl-ub=nccl_ub",
    "dist": "use-torch-fsdp2=use_torch_fsdp2",
    "tokenizer": "trust-remote-code=trust_remote_code",
}
"""Group -> arguments, and the fields that take their values."""

SETTINGS = {
    "accumulate-allreduce-grads-in-fp32": "ddp.grad_reduce_in_fp32=true",
    "activations-checkpoint-method": "model.recompute_granularity=full model.recompute_method",
    "apply-layernorm-1p": "model.layernorm_zero_centered_gamma=true",
    "checkpoint-activations": "model.recompute_granularity=full model.recompute_method=uniform "
    "model.recompute_num_layers=1",
    "disable-bias-linear": "model.add_bias_linear=false",
    "grad-reduce-in-bf16": "ddp.grad_reduce_in_fp32=false",
    "no-bias-gelu-fusion": "model.bias_activation_fusion=false",
    "no-bias-swiglu-fusion": "model.bias_activation_fusion=false",
    "no-check-for-nan-in-loss-and-grad": "rerun_state_machine.check_for_nan_in_loss=false "
    "rerun_state_machine.check_for_nan_in_grad=false",
    "no-overlap-p2p-communication": "model.overlap_p2p_comm=false",
    "no-rope-fusion": "model.apply_rope_fusion=false",
    "quick-geglu": "model.gated_linear_unit=true "
    "model.activation_func=megatron.core.fusions.fused_bias_geglu.quick_gelu",
    "recompute-activations": "model.recompute_granularity=selective",
    "seed": "rng.seed dataset.random_seed",
    "seq-length": "dataset.seq_length model.seq_length",
    "squared-relu": "model.activation_func=megatron.core.activations.squared_relu",
    "swiglu": "model.gated_linear_unit=true model.activation_func=torch.nn.functional.silu",
    "untie-embeddings-and-output-weights": "model.share_embeddings_and_output_weights=false",
    "use-rope-scaling": "model.rope_scaling=true",
    "use-rotary-position-embeddings": "model.position_embedding_type=rope",
}
"""Argument -> the fields that it sets: ``field=value``, or a field that takes the value of the argument."""

SAME_NAMES = {
    "model": "fp16_lm_cross_entropy make_vocab_size_divisible_by max_position_embeddings position_embedding_type "
    "rope_scaling_factor rotary_base rotary_percent",
    "train": "micro_batch_size global_batch_size rampup_batch_size train_iters train_samples exit_interval "
    "exit_duration_in_mins exit_signal_handler manual_gc manual_gc_interval iterations_to_skip",
    "validation": "eval_interval eval_iters",
    "scheduler": "lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples "
    "lr_warmup_fraction lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples "
    "start_weight_decay end_weight_decay weight_decay_incr_style use_checkpoint_opt_param_scheduler "
    "override_opt_param_scheduler",
    "checkpoint": "save load save_interval pretrained_checkpoint finetune async_save non_persistent_save_interval "
    "non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir "
    "save_optim save_rng load_optim load_rng",
    "logger": "log_interval tensorboard_dir wandb_project wandb_entity wandb_exp_name wandb_save_dir "
    "log_params_norm log_energy timing_log_level timing_log_option",
    "rng": "data_parallel_random_init",
    "dist": "distributed_backend distributed_timeout_minutes",
    "profiling": "profile_step_start profile_step_end profile_ranks use_pytorch_profiler record_memory_history "
    "memory_snapshot_path record_shapes nvtx_ranges",
    "dataset": "split dataloader_type num_workers reset_position_ids reset_attention_mask eod_mask_loss "
    "num_dataset_builder_threads mid_level_dataset_surplus "
    "mmap_bin_files",
    "dataset.fim": "fim_rate fim_spm_rate fim_prefix_token fim_suffix_token fim_middle_token",
    "inprocess_restart": "inprocess_max_iterations inprocess_soft_timeout inprocess_hard_timeout "
    "inprocess_heartbeat_interval inprocess_heartbeat_timeout inprocess_barrier_timeout "
    "inprocess_completion_timeout inprocess_last_call_wait inprocess_termination_grace_time "
    "inprocess_monitor_thread_interval inprocess_monitor_process_interval inprocess_progress_watchdog_interval",
}
"""Group -> fields whose argument has their name (``inprocess_`` and ``fim_`` are prefixes)."""

LISTS = (
    "cuda_graph_modules hierarchical_context_parallel_sizes iterations_to_skip offload_modules profile_ranks "
    "rampup_batch_size recompute_modules"
)
"""Fields that take a list even of one value."""

PATTERNS = "moe_layer_freq window_attn_skip_freq no_rope_freq linear_attention_freq"
"""Fields that take an expression such as ``[0]*3+[1]*58``."""

IMPLIED = {
    "every run of this package does so": (
        "use-mcore-models use-dist-ckpt ckpt-fully-parallel-save ckpt-fully-parallel-load "
        "no-create-attention-mask-in-dataloader no-initialization log-throughput auto-detect-ckpt-format "
        "save-tokenizer-assets use-flash-attn no-async-tensor-model-parallel-allreduce verify-integrity"
    ),
    "all trackers get all metrics": (
        "log-timers-to-tensorboard log-memory-to-tensorboard log-validation-ppl-to-tensorboard "
        "log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard log-batch-size-to-tensorboard "
        "log-world-size-to-tensorboard log-progress no-log-loss-scale-to-tensorboard "
        "no-log-learnig-rate-to-tensorboard"
    ),
    "other settings say it": "fim-data mock-data is-hybrid-model no-position-embedding",
}
"""Why an argument needs no setting -> such arguments."""

MISSING = {
    "use --cuda-graph-impl and --cuda-graph-modules": "cuda-graph-scope enable-cuda-graph external-cuda-graph",
    "CUDA graphs leave the optimizer out in this version": "optimizer-cuda-graph",
    "checkpoints have one format here, torch_dist, and resume under every layout": (
        "ckpt-* async-strategy dist-ckpt-* no-ckpt-fully-parallel-save no-ckpt-load-validate-sharding-integrity "
        "distrib-optim-fully-reshardable-mem-efficient use-persistent-ckpt-worker async-ckpt-* "
        "non-persistent-local-ckpt-algo replication* load-main-params-from-ckpt strict-fsdp-dtensor-load"
    ),
    "a run resumes from the newest checkpoint in checkpoint.save; its config is run_config.yaml": (
        "ckpt-step use-checkpoint-args use-mp-args-from-checkpoint-args "
        "no-use-tokenizer-model-from-checkpoint-args exit-on-missing-checkpoint "
        "override-ckpt-iteration save-retain-interval"
    ),
    "the tokenizer's own files say it": (
        "vocab-file merge-file vocab-extra-ids tiktoken-* tokenizer-metadata tokenizer-special-tokens "
        "tokenizer-sentencepiece-legacy tokenizer-hf-* null-tokenizer-* chat-template use-gigatoken"
    ),
    "weights stay in bf16 here, so that checkpoints do not depend on FP8": (
        "fp8-param-gather fp4-param-gather reuse-grad-buf-for-mxfp8-param-ag"
    ),
    "Megatron-Core's own debugging and logging options are not exposed": (
        "log-max-attention-logit logging-level log-straggler straggler-* disable-straggler-on-startup "
        "check-weight-hash-* gpu-sniff-test-interval error-injection-* rerun-mode "
        "result-rejected-tracker-filename log-device-memory-used log-memory-interval "
        "no-barrier-with-level-1-timing config-logger-dir save-params-interval save-activations-interval "
        "save-tokens-per-expert-interval save-wgrads-interval save-dgrads-interval test-mode fake-process-group "
        "dump-param-to-param-group-map te-rng-tracker onnx-safe run-workload-inspector-server "
        "pytorch-profiler-collect-*"
    ),
    "logger.log_interval is the interval of all trackers": "tensorboard-log-interval tensorboard-queue-size",
    "Megatron-Core makes its process groups by itself here": (
        "use-tp-pp-dp-mapping disable-gloo-process-groups enable-gloo-process-groups "
        "nccl-communicator-config-path use-sharp sharp-enabled-group high-priority-stream-groups lazy-mpu-init "
        "local-rank distributed-timeout-seconds-after-init create-all-gather-group align-grad-reduce "
        "no-align-grad-reduce DDP-impl use-ring-exchange-p2p no-contiguous-buffers-in-local-ddp "
        "scatter-gather-tensors-in-pipeline no-scatter-gather-tensors-in-pipeline standalone-embedding-stage "
        "local-ddp flight-recorder-*"
    ),
    "the batch size ramps in equal steps here: see train.rampup_batch_size": (
        "step-batch-size-schedule decrease-batch-size-if-needed"
    ),
    "evaluation uses the batch size of training": (
        "eval-global-batch-size eval-micro-batch-size full-validation multiple-validation-sets "
        "validation-set-names start-eval-at-iter skip-train"
    ),
    "a config has train.exit_signal_handler alone": (
        "exit-signal exit-signal-handler-for-dataloader exit-signal-handler-for-training train-sync-interval "
        "empty-unused-memory-level no-manual-gc-eval"
    ),
    "layers follow from the other settings; a spec of your own is model.transformer_layer_spec": (
        "spec use-legacy-models enable-gpt-oss enable-experimental te-precision-config-file kitchen-*"
    ),
    "FSDP has no such option here": (
        "megatron-fsdp-version no-use-layer-wise-param-layout torch-fsdp2-no-reshard-after-forward gtp-* "
        "enable-full-sharding-in-hsdp"
    ),
    "records for fine-tuning are a dataset of their own: see docs/finetuning.md": (
        "sft sft-tokenizer-prompt-format dataloader-inter-document-masking phase-transition-iterations"
    ),
    "indexed datasets are read from a file system here": (
        "object-storage-cache-path enable-msc disable-msc dataloader-fast-cache-load "
        "dataloader-defer-npy-index-mmap per-dataset-sequences-path"
    ),
    "fill in the middle cuts documents at characters, without such an option": (
        "fim-split-sample fim-fragment-rate fim-no-prefix fim-pad-token fim-eod-token"
    ),
    "the learning rate of parameters is optimizer.overrides": "head-lr-mult",
    "NVIDIA's services and autoresume are not part of this package": (
        "no-one-logger one-logger-* enable-one-logger app-tag-run-* otel-* adlr-autoresume* ft-num-warmup-iters "
        "inprocess-granularity inprocess-active-* inprocess-empty-cuda-cache"
    ),
    "the config files of Megatron-LM are not read: give the arguments": "yaml-cfg heterogeneous-layers-config-*",
    "this package does not have it": (
        "encoder-num-layers decoder-num-layers batch-size openai-gelu warmup moe-extended-tp "
        "relative-attention-* hybrid-*-ratio moe-use-upcycling moe-upcycling-granularity freeze-all-layers "
        "allow-ambiguous-pad-tokens sample-rate encoder-seq-length decoder-seq-length mask-prob short-seq-prob "
        "yarn-* init-method-xavier-uniform no-weight-decay-cond-type output-logit-dtype perform-rl-step "
        "bert-no-binary-head pad-vocab-size no-pad-vocab-size mtp-hybrid-override-pattern"
    ),
    "serving is megatron-bridge serve, with options of its own": "inference-*",
    "RL frameworks train with this package: see docs/rl.md": "rl-* grpo-* langrl-* refit-*",
    "Retro models are not part of this package": "retro-*",
    "distillation is megatron-bridge train --mode distill": "export-kd-*",
    "the options of NVIDIA's Model Optimizer are not part of this package": "export-*",
    "distillation from a cache is megatron-bridge train --mode cache-teacher": "logits-*",
    "the traces of routers are not part of this package": "moe-routing-trace-*",
    "only language models are translated": "dino-* swin-* biencoder-*",
}
"""Why there is no counterpart -> such arguments; ``*`` stands for any characters."""
