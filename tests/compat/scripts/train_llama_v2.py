"""A tiny Llama over SMP v2 and FSDP: delayed parameters, offloaded checkpoints of activations, resuming."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.sagemaker.delayed_param import DelayedParamIniter
from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls
from torch.sagemaker.distributed.checkpoint.state_dict_utils import (
    SMStateDictType,
    init_optim_state,
    sm_state_dict_type,
)
from torch.sagemaker.grad_norm import clip_grad_norm_
from torch.sagemaker.logger import get_logger
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

logger = get_logger()


def make_model(args, device):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = tsm.transform(model)
    initer = DelayedParamIniter(model)
    if dist.get_rank() == 0:
        print(f"{initer.count_num_params()} parameters")
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    with initer.validate_params_and_buffers_inited():
        model = FSDP(
            model,
            auto_wrap_policy=policy,
            mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_id=device,
            limit_all_gathers=True,
            use_orig_params=bool(args.use_orig_params),
            sync_module_states=True,
            param_init_fn=initer.get_param_init_fn(),
            post_param_init_fn=initer.get_post_param_init_fn(),
        )
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    is_layer = lambda module: isinstance(module, LlamaDecoderLayer)  # noqa: E731
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=is_layer)
    if tsm.state.sm_activation_offloading:
        model = offload_wrapper(model)
    return model


def find_fsdp(model):
    return next(module for module in model.modules() if isinstance(module, FSDP))


def checkpoint_place(args, model):
    """The folder and group of ranks that write it: one for each shard, or one for all."""
    if not args.local:
        return args.checkpoint_dir, None
    mine = None
    for ranks in tsm.state.ranker.get_rep_groups():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return os.path.join(args.checkpoint_dir, f"tp{tsm.state.tp_rank}_fsdp{find_fsdp(model).rank}"), mine


def states(model, optimizer, step):
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "total_steps": step}


def full_state(model):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save_at", type=int, default=-1)
    parser.add_argument("--resume", type=int, default=0)
    parser.add_argument("--bf16", type=int, default=0)
    parser.add_argument("--local", type=int, default=0)
    parser.add_argument("--use_orig_params", type=int, default=1)
    parser.add_argument("--checkpoint_dir", default="checkpoints")
    parser.add_argument("--model_dir", default="")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    tsm.init()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(7)
    model = make_model(args, device)
    if args.model_dir:
        first = full_state(model)
        if dist.get_rank() == 0:
            find_fsdp(model).module.config.to_json_file(os.path.join(args.model_dir, "config.json"))
            torch.save(first, os.path.join(args.model_dir, "first.pt"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    folder, group = checkpoint_place(args, model)
    step = 0
    if args.resume:
        init_optim_state(optimizer, skip_empty_param=True)
        found = states(model, optimizer, 0)
        load(found, checkpoint_id=folder, process_group=group)
        with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
            model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = found["total_steps"]

    dp_rank, dp_size = dist.get_rank(tsm.state.world_process_group), dist.get_world_size()
    while step < args.steps:
        batch = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))
        mine = batch.chunk(dp_size)[dp_rank].to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        norm = clip_grad_norm_(find_fsdp(model), 0.5)
        optimizer.step()
        step += 1
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        if dp_rank == 0:
            print(f"step {step} loss: {total.item() / dp_size:.6f} norm: {norm.item():.6f}", flush=True)
        if step == args.save_at:
            async_save(states(model, optimizer, step), checkpoint_id=folder, process_group=group)
        maybe_finalize_async_calls(blocking=False, process_group=group)
    maybe_finalize_async_calls(blocking=True, process_group=group)
    if args.model_dir:
        last = full_state(model)
        if dist.get_rank() == 0:
            torch.save(last, os.path.join(args.model_dir, "last.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
