"""Fine-tunes a model of the Flan-T5 kind with SMP: an encoder and a decoder over the stages of a pipeline."""

import argparse
import os

import numpy as np
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoModelForSeq2SeqLM, T5Config

import smdistributed.modelparallel.torch as smp

PAD = 0


class Questions(Dataset):
    """The answer has the tokens of the question, backwards; both are padded."""

    def __init__(self, vocab_size, length, seed, count=256):
        rng = np.random.default_rng(seed)
        self.rows = []
        for _ in range(count):
            size = int(rng.integers(length // 2, length + 1))
            tokens = rng.integers(2, vocab_size, size=size)
            question = np.full(length, PAD)
            question[:size] = tokens
            answer = np.full(length, -100)
            answer[:size] = tokens[::-1]
            self.rows.append((question, (question != PAD).astype(np.int64), answer))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        question, mask, answer = self.rows[index]
        return {"input_ids": question, "attention_mask": mask, "labels": answer}


@smp.step
def train_step(model, batch):
    output = model(**batch)
    model.backward(output["loss"])
    return {"loss": output.loss, "logits": output.logits}


@smp.step
def eval_step(model, batch):
    return model(**batch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=4)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--gradient_checkpointing", type=int, default=1)
    parser.add_argument("--model_dir", type=str, default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--n_gpus", type=str, default=os.environ["SM_NUM_GPUS"])
    args, _ = parser.parse_known_args()

    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": 2,
            "ddp": True,
            "optimize": "speed",
            "auto_partition": True,
            "default_partition": 0,
            "tensor_parallel_degree": 1,
        }
    )
    torch.manual_seed(42)
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda", smp.local_rank())

    config = T5Config(vocab_size=37, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0)
    config.feed_forward_proj = "gated-gelu"
    config.decoder_start_token_id = PAD
    with smp.model_creation(tensor_parallelism=False, dtype=torch.float32):
        model = AutoModelForSeq2SeqLM.from_config(config)
    model = smp.DistributedModel(model, trace_device="gpu")
    if args.gradient_checkpointing:
        for stack in (model.get_module().encoder, model.get_module().decoder):
            for block in stack.block:
                smp.set_activation_checkpointing(block)

    optimizer = smp.DistributedOptimizer(AdamW(model.parameters(), lr=args.learning_rate))
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))

    dataset = Questions(config.vocab_size, 8, seed=0)
    sampler = DistributedSampler(dataset, num_replicas=smp.dp_size(), rank=smp.dp_rank(), drop_last=True)
    loader = DataLoader(dataset, batch_size=args.train_batch_size, sampler=sampler, drop_last=True)

    model.train()
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            optimizer.zero_grad()
            output = train_step(model, batch)
            optimizer.step()
            scheduler.step()
            step += 1
            if smp.rank() == 0:
                loss, logits = output["loss"].reduce_mean(), output["logits"].concat()
                print(f"step {step} loss {loss.item():.6f}", tuple(logits.shape), flush=True)
            if step >= args.max_steps:
                break

    model.eval()
    with torch.no_grad():
        output = eval_step(model, batch)
    if smp.rank() == 0:
        print(f"eval loss {output['loss'].reduce_mean().item():.6f}", sorted(output)[:2], flush=True)
    content = {"step": step}
    smp.save_checkpoint(args.model_dir, tag="flan.pt", partial=False, model=model, user_content=content)
    smp.barrier()


if __name__ == "__main__":
    main()
