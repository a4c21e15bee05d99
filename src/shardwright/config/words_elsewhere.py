"""What other libraries, and people in a hurry, call what a setting does here: for advice, never accepted."""

__all__ = ["advice_for"]

_BATCH = "Remove it: the script makes the batch; microbatches says into how many parts it is cut."
_STEPS = "Remove it: call optimizer.step() after as many steps, as in one process."
_ORDINARY = "Remove it, and write it in the script as for one process."
_PRECISION = (
    "Set bf16 or fp16 to true for parameters of that type, or use torch.autocast in the step function."
)
_SHARDED = (
    "Set sharded_data_parallel_degree to the ranks that share parameters, or, for ZeRO-1, "
    "shard_optimizer_state."
)
_RANKS = "Remove it: the launcher starts ranks (shardwright run -n 4, or torchrun)."
_DEVICES = "Remove it: each rank takes the accelerator of its local rank (sw.device())."
_QUANTIZED = "Remove it: gradients and rows go between hosts as they are; bf16: true halves them."
_CALIBRATE = "Remove it: runs keep their plan, and correct no predictions; plan_anew plans anew."
_UNUSED = "Remove it: unused parameters need nothing here."
_RESUME = (
    "Remove it: sw.Checkpoints(...).resume() goes on from checkpoints, as shardwright run --resume does."
)

_DEGREES = {
    "context_parallel_degree": ("cp", "cp_size", "context_parallel"),
    "data_parallel_degree": ("dp", "dp_size", "replicas", "num_replicas"),
    "expert_parallel_degree": ("ep", "ep_size", "expert_parallel"),
    "pipeline_parallel_degree": ("pp", "pp_size", "num_stages", "stages", "split_points"),
    "tensor_parallel_degree": ("tp", "tp_size", "tp_degree"),
}
_SETTINGS = {
    "activation_checkpointing": ("recompute", "recomputation", "gradient_checkpointing", "checkpointing"),
    "microbatches": ("chunks", "num_chunks", "micro_batches", "num_microbatches", "n_microbatches"),
    "offload_activations": ("cpu_offload", "activation_offload"),
    "pipeline": ("schedule", "pipeline_schedule", "pipeline_parallel_schedule"),
    "memory_limit": ("max_memory", "memory_budget"),
    "log_interval": ("log_level", "verbose", "logging_steps"),
    "run_dir": ("output_dir", "log_dir", "checkpoint_dir", "save_dir"),
}
_ADVICE = {
    _BATCH: ("batch_size", "micro_batch_size", "train_batch_size", "global_batch_size"),
    _STEPS: ("gradient_accumulation_steps",),
    _PRECISION: ("amp", "dtype", "mixed_precision", "precision"),
    _SHARDED: ("fsdp", "shard", "sharding_strategy", "zero", "zero_optimization", "zero_stage"),
    _RANKS: ("nnodes", "nproc_per_node", "num_processes", "world_size"),
    _DEVICES: ("device", "devices", "gpus", "num_gpus"),
    _ORDINARY: ("clip_grad", "gradient_clipping", "max_grad_norm", "learning_rate", "lr"),
    _CALIBRATE: ("calibrate",),
    _QUANTIZED: ("sdp_quantized_gradients", "sdp_quantized_parameters"),
    _UNUSED: ("find_unused_parameters",),
    _RESUME: ("resume", "resume_from_checkpoint"),
}

_WORDS = {word: f"Did you mean {ours}?" for ours, words in _SETTINGS.items() for word in words}
_WORDS |= {word: f"Did you mean {ours}?" for ours, words in _DEGREES.items() for word in words}
_WORDS |= {word: advice for advice, words in _ADVICE.items() for word in words}


def advice_for(word: str) -> str | None:
    """What to do in place of a setting of that name; None where we know of none.

    >>> advice_for("schedule")
    'Did you mean pipeline?'
    """
    return _WORDS.get(word)
