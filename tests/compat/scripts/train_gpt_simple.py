"""Pre-trains a language model of the GPT kind with SMP, as published scripts do; tiny by default."""

import argparse
import math
import os
import random
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
import transformers
from packaging import version as pversion
from torch.nn import LayerNorm
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import FusedLayerNorm

assert pversion.parse(smdistributed.modelparallel.__version__) >= pversion.parse("1.10"), "SMP is too old"


def model_config(args):
    """Sizes under the names of each architecture."""
    width, depth, heads, length = args.hidden_width, args.num_layers, args.num_heads, args.max_context_width
    common = {"vocab_size": args.vocab_size, "use_cache": False, "return_dict": True}
    of_gpt = {"n_positions": length, "n_embd": width, "n_layer": depth, "n_head": heads}
    if args.model_type == "gpt2":
        dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
        kind, sizes = "GPT2Config", of_gpt | {name: getattr(args, name) for name in dropouts}
    elif args.model_type == "gptj":
        kind, sizes = "GPTJConfig", of_gpt
        sizes |= {"rotary_dim": width // heads // 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    elif args.model_type == "gpt_neox":
        kind, sizes = "GPTNeoXConfig", {"hidden_size": width, "num_hidden_layers": depth}
        sizes |= {"num_attention_heads": heads, "intermediate_size": 4 * width}
        sizes |= {"max_position_embeddings": length}
    else:
        kind, sizes = "BloomConfig", {"hidden_size": width, "n_layer": depth, "n_head": heads}
    return getattr(transformers, kind)(**common, **sizes)


def layers_of(args, module):
    """The repeated layers, where each architecture has them."""
    transformer = module.gpt_neox if args.model_type == "gpt_neox" else module.transformer
    if is_distributed(args):
        return transformer.seq_layers
    return transformer.layers if args.model_type == "gpt_neox" else transformer.h


def is_distributed(args):
    return smp.tp_size() > 1 or args.use_distributed_transformer > 0


class TokenDataset(Dataset):
    """Sequences that a next token can be guessed from."""

    def __init__(self, args, seed, num_samples=4096):
        rng = np.random.default_rng(seed)
        first = rng.integers(0, args.vocab_size, size=(num_samples, 1))
        stride = rng.integers(1, 3, size=(num_samples, 1))
        self.tokens = (first + stride * np.arange(args.max_context_width)) % args.vocab_size

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index].astype(np.int64)
        return tokens, np.ones_like(tokens)


class DummyDataset(Dataset):
    """What ranks that do not read data iterate over."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.empty(0), torch.empty(0)


def create_dataloader(args, batch_size, seed):
    dataset = TokenDataset(args, seed)
    if smp.pp_rank() != 0:
        return DataLoader(DummyDataset(len(dataset) // smp.dp_size()), batch_size=batch_size, drop_last=True)
    # Ranks of a tensor-parallel group get the same batch, or one each.
    rank = smp.rdp_rank() if args.prescaled_batch else smp.dp_rank()
    num_replicas = smp.rdp_size() if args.prescaled_batch else smp.dp_size()
    sampler = torch.utils.data.DistributedSampler(
        dataset, shuffle=True, seed=seed, rank=rank, num_replicas=num_replicas, drop_last=True
    )
    return DataLoader(
        dataset, sampler=sampler, batch_size=batch_size, num_workers=0, pin_memory=True, drop_last=True
    )


def param_groups_by_weight_decay(module):
    decay, no_decay = {"params": []}, {"params": [], "weight_decay": 0.0}
    seen = set()
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_exempt = isinstance(part, (FusedLayerNorm, LayerNorm)) or name == "bias"
            (no_decay if is_exempt else decay)["params"].append(parameter)
    return decay, no_decay


class AnnealingLR:
    """Warms up, then anneals, as Megatron does: it sets the rate in the optimizer's groups."""

    def __init__(self, optimizer, start_lr, warmup, num_iters, decay_style, min_lr=0.0):
        self.optimizer, self.start_lr, self.min_lr = optimizer, start_lr, min_lr
        self.warmup, self.end, self.decay_style = max(1, round(warmup * num_iters)), num_iters, decay_style
        self.num_iters = 0
        self.step(0)

    def get_lr(self):
        if self.num_iters <= self.warmup:
            return self.start_lr * self.num_iters / self.warmup
        share = min(1.0, (self.num_iters - self.warmup) / max(1, self.end - self.warmup))
        scale = 1 - share if self.decay_style == "linear" else 0.5 * (math.cos(math.pi * share) + 1)
        return max(self.min_lr, self.start_lr * scale)

    def step(self, step_num=None):
        self.num_iters = self.num_iters + 1 if step_num is None else step_num
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()

    def state_dict(self):
        return {"num_iters": self.num_iters, "start_lr": self.start_lr}

    def load_state_dict(self, state):
        self.start_lr = state["start_lr"]
        self.step(state["num_iters"])


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    if args.logits_output:
        output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
        loss = output["loss"]
    else:
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    if args.logits_output:
        return output
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def eval_model(model, dataloader, num_batches):
    model = model.eval()
    n_batches, loss = 0, 0.0
    with torch.no_grad():
        for batch_idx, (input_ids, attention_mask) in enumerate(dataloader):
            if batch_idx >= num_batches:
                break
            loss += test_step(model, input_ids, attention_mask).reduce_mean()
            n_batches += 1
    dist.all_reduce(loss, group=smp.get_dp_process_group())
    loss = loss.item() / smp.dp_size() / n_batches
    return loss, math.exp(loss)


def user_content_of(args, num_params, total_steps, config, lr_scheduler, batch_index):
    return {
        "cli_args": args.__dict__,
        "num_params": num_params,
        "total_steps": total_steps,
        "start_batch_index": batch_index,
        "model_config": config.to_dict(),
        "lr_scheduler": lr_scheduler.state_dict(),
    }


def train(args, model, optimizer, lr_scheduler, config, num_params, total_steps, start_batch_index):
    model.train()
    dataloader = create_dataloader(args, args.train_batch_size, args.seed)
    validation = create_dataloader(args, args.val_batch_size, args.seed + 1)
    torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    for batch_idx, (input_ids, attention_mask) in enumerate(dataloader):
        if batch_idx < start_batch_index:
            continue
        if total_steps >= args.max_steps:
            break
        step_start = time.time()
        optimizer.zero_grad(set_to_none=True)
        loss_mb = train_step(model, optimizer, input_ids, attention_mask, args)
        if args.logits_output:
            loss_mb = loss_mb["loss"]
        loss = loss_mb.reduce_mean()
        if args.clean_cache > 0:
            torch.cuda.empty_cache()
        if args.fp16 and args.grad_clip > 0:
            optimizer.clip_master_grads(args.grad_clip)
        elif args.grad_clip > 0 and args.sharded_data_parallel_degree == 1:
            nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        if not (args.fp16 and optimizer.overflow):
            lr_scheduler.step()
        total_steps += 1
        seconds = time.time() - step_start
        if smp.rank() == 0 and total_steps % args.logging_freq == 0:
            throughput = args.train_batch_size * smp.dp_size() / seconds
            print(
                f"({int(seconds * 1000)}ms), Batch {total_steps - 1} Loss: {loss.item():.6f}, "
                f"Speed: {throughput:.1f} samples/sec, lr: {optimizer.param_groups[0]['lr']:.6f}",
                flush=True,
            )
        if args.validation_freq and total_steps % args.validation_freq == 0:
            state = np.random.get_state()
            val_loss, val_ppl = eval_model(model, validation, args.validation_batches)
            np.random.set_state(state)
            model.train()
            if smp.rank() == 0:
                print(f"Batch {total_steps - 1} Validation loss: {val_loss:.6f} perplexity: {val_ppl:.3f}")
        if args.checkpoint_freq and total_steps % args.checkpoint_freq == 0:
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"total_steps{total_steps}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content=user_content_of(
                    args, num_params, total_steps, config, lr_scheduler, batch_idx + 1
                ),
                num_kept_partial_checkpoints=args.num_kept_checkpoints,
            )
    return total_steps


def parse_args():
    parser = argparse.ArgumentParser()
    opt = parser.add_argument_group(title="optimizer")
    opt.add_argument("--seed", type=int, default=12345)
    opt.add_argument("--same_seed", type=int, default=0)
    opt.add_argument("--lr", type=float, default=5e-3)
    opt.add_argument("--lr_decay_style", type=str, default="linear")
    opt.add_argument("--warmup", type=float, default=0.1)
    opt.add_argument("--beta1", type=float, default=0.9)
    opt.add_argument("--beta2", type=float, default=0.95)
    opt.add_argument("--weight_decay", type=float, default=0.01)
    opt.add_argument("--grad_clip", type=float, default=1.0)
    opt.add_argument("--gradient_accumulation", type=int, default=1)
    io = parser.add_argument_group(title="io")
    io.add_argument("--checkpoint-dir", type=str, default="/opt/ml/checkpoints")
    io.add_argument("--model-dir", type=str, default=os.environ.get("SM_MODEL_DIR", "/opt/ml/model"))
    io.add_argument("--training-dir", type=str, default=os.environ.get("SM_CHANNEL_TRAIN"))
    io.add_argument("--checkpoint_freq", type=int, default=0)
    io.add_argument("--num_kept_checkpoints", type=int, default=5)
    io.add_argument("--load_partial", type=int, default=0)
    io.add_argument("--load_full", type=int, default=0)
    io.add_argument("--save_final_full_model", type=int, default=0)
    io.add_argument("--logging_freq", type=int, default=1)
    io.add_argument("--validation_freq", type=int, default=0)
    io.add_argument("--validation_batches", type=int, default=2)
    io.add_argument("--mp_parameters", type=str, default="")
    size = parser.add_argument_group(title="model")
    size.add_argument("--model_type", type=str, default="gpt2")
    size.add_argument("--max_context_width", type=int, default=12)
    size.add_argument("--vocab_size", type=int, default=53)
    size.add_argument("--hidden_width", type=int, default=32)
    size.add_argument("--num_layers", type=int, default=4)
    size.add_argument("--num_heads", type=int, default=2)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        size.add_argument(f"--{name}", type=float, default=0.1)
    size.add_argument("--train_batch_size", type=int, default=4)
    size.add_argument("--val_batch_size", type=int, default=4)
    size.add_argument("--max_steps", type=int, default=4)
    mp = parser.add_argument_group(title="smp")
    mp.add_argument("--tensor_parallel_degree", type=int, default=1)
    mp.add_argument("--pipeline_parallel_degree", type=int, default=2)
    mp.add_argument("--microbatches", type=int, default=2)
    mp.add_argument("--active_microbatches", type=int, default=None)
    mp.add_argument("--sharded_data_parallel_degree", type=int, default=1)
    mp.add_argument("--optimize", type=str, default="speed")
    mp.add_argument("--placement_strategy", type=str, default="cluster")
    mp.add_argument("--activation_strategy", type=str, default="each")
    mp.add_argument("--manual_partition", type=int, default=0)
    mp.add_argument("--activation_loading_horizon", type=int, default=4)
    mp.add_argument("--ddp_dist_backend", type=str, default="auto")
    for name in ("activation_checkpointing", "delayed_param", "fused_softmax"):
        mp.add_argument(f"--{name}", type=int, default=1)
    for name in ("fp16", "bf16", "shard_optimizer_state", "prescaled_batch", "offload_activations"):
        mp.add_argument(f"--{name}", type=int, default=0)
    mp.add_argument("--use_distributed_transformer", type=int, default=0)
    for name in ("skip_tracing", "static_mode", "fast_mode", "logits_output", "clean_cache"):
        mp.add_argument(f"--{name}", type=int, default=0)
    for name in ("fused_dropout", "fused_bias_gelu", "query_key_layer_scaling", "attention_in_fp32"):
        mp.add_argument(f"--{name}", type=int, default=0)
    args, _ = parser.parse_known_args()
    return args


def smp_config_of(args):
    smp_config = {
        "ddp": True,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "prescaled_batch": args.prescaled_batch > 0,
        "fp16": args.fp16 > 0,
        "bf16": args.bf16 > 0,
        "offload_activations": args.offload_activations > 0,
        "delayed_parameter_initialization": args.delayed_param > 0,
        "optimize": args.optimize,
        "placement_strategy": args.placement_strategy,
        "activation_loading_horizon": args.activation_loading_horizon,
        "skip_tracing": args.skip_tracing > 0,
        "auto_partition": not args.manual_partition,
        "default_partition": 0,
        "static_mode": args.static_mode > 0,
        "fast_mode": args.fast_mode > 0,
        "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
        "ddp_dist_backend": args.ddp_dist_backend,
        "sdp_hierarchical_allgather": False,
        "sdp_gradient_clipping": args.grad_clip,
    }
    if args.active_microbatches is not None:
        smp_config["active_microbatches"] = args.active_microbatches
    return smp_config


def main():
    args = parse_args()
    smp.init(smp_config_of(args))
    if smp.rank() == 0:
        print("Arguments:", args.__dict__)
        print(f"Transformers version: {transformers.__version__}")
        print(f"smdistributed.modelparallel version: {smdistributed.modelparallel.__version__}")
        if args.save_final_full_model or args.checkpoint_freq:
            os.makedirs(args.checkpoint_dir, exist_ok=True)
    set_seed(args.seed)
    config = model_config(args)

    dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.get_default_dtype()
    with smp.model_creation(
        tensor_parallelism=is_distributed(args),
        dtype=dtype,
        attention_in_fp32=args.attention_in_fp32 > 0,
        query_key_layer_scaling=args.query_key_layer_scaling > 0 and args.bf16 < 1,
        fused_softmax=args.fused_softmax > 0,
        fused_dropout=args.fused_dropout > 0,
        fused_bias_gelu=args.fused_bias_gelu > 0,
    ):
        model = AutoModelForCausalLM.from_config(config)
    num_params = int(sum(np.prod(p.size()) for p in model.parameters()))
    if smp.rank() == 0:
        print(f"# total parameters: {num_params}")

    # Input tensors go to the device of this process.
    torch.cuda.set_device(smp.local_rank())
    if not args.same_seed:
        set_seed(args.seed + smp.tp_rank())

    model = smp.DistributedModel(
        model, trace_device="gpu", backward_passes_per_step=args.gradient_accumulation
    )
    layers = layers_of(args, model.get_module())
    if args.manual_partition:
        share = len(layers) / smp.pp_size()
        for number, layer in enumerate(layers.children()):
            smp.set_partition(layer, int(number / share))
    if args.activation_checkpointing:
        if isinstance(layers, nn.Sequential):
            smp.set_activation_checkpointing(
                layers, pack_args_as_tuple=True, strategy=args.activation_strategy
            )
        else:
            for layer in layers.children():
                smp.set_activation_checkpointing(layer)

    optimizer = optim.AdamW(
        param_groups_by_weight_decay(model),
        betas=(args.beta1, args.beta2),
        lr=args.lr,
        eps=1e-8,
        weight_decay=args.weight_decay,
    )
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    lr_scheduler = AnnealingLR(optimizer, args.lr, args.warmup, args.max_steps, args.lr_decay_style)

    total_steps = start_batch_index = 0
    if args.load_full or args.load_partial:
        user_content = smp.resume_from_checkpoint(
            args.model_dir if args.load_full else args.checkpoint_dir,
            tag="fullmodel.pt" if args.load_full else None,
            partial=not args.load_full,
            load_optimizer=not args.load_full,
        )
        if user_content is not None and not args.load_full:
            total_steps = user_content["total_steps"]
            start_batch_index = user_content["start_batch_index"]
            lr_scheduler.load_state_dict(user_content["lr_scheduler"])
        if smp.rank() == 0:
            print(f"Resumed at step {total_steps}", flush=True)

    start = time.time()
    total_steps = train(
        args, model, optimizer, lr_scheduler, config, num_params, total_steps, start_batch_index
    )
    if smp.rank() == 0:
        print(f"SMP training finished successfully after {total_steps} steps, {time.time() - start:.1f} s")
        print(f"Peak memory: {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
    if args.save_final_full_model:
        smp.save_checkpoint(
            args.model_dir,
            tag="fullmodel.pt",
            partial=False,
            model=model,
            optimizer=optimizer,
            user_content=user_content_of(args, num_params, total_steps, config, lr_scheduler, 0),
        )
    smp.barrier()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
