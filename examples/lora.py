"""Trains an adapter (LoRA, by peft) on a model that is spread over ranks, in a plain loop.

shardwright run -n 2 --set pipeline_parallel_degree=2 examples/lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright.torch as sw
from shardwright.integrations.peft import save_adapter


def main():
    sw.init({"seed": 0})
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=4, n_head=4))
    lora = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = sw.DistributedModel(get_peft_model(model, lora))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(trainable, lr=1e-2))

    @sw.step
    def train_step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(sw.dp_rank())
    for step in range(60):
        start, stride = torch.randint(64, (2, 16, 1), generator=generator)
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, (start + stride * torch.arange(32)) % 8).reduce_mean()  # 8 of 64 words
        optimizer.step()
        if step % 20 == 19 and sw.rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    save_adapter(model, "adapter")  # on all ranks; PeftModel.from_pretrained(base, "adapter") loads it
    if sw.rank() == 0:
        print("saved adapter")
    sw.shutdown()


if __name__ == "__main__":
    main()
