"""Uses what Accelerate's quickstart and its example of checkpoints call, with LoRA and recomputation."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup, set_seed


class Texts(Dataset):
    """Texts in which each token follows from the one before; the end of some does not count."""

    def __init__(self, num_texts, seed):
        first = torch.randint(0, 41, (num_texts, 1), generator=torch.Generator().manual_seed(seed))
        self.ids = (first + 3 * torch.arange(12)) % 41
        self.labels = self.ids.clone()
        for number in range(0, num_texts, 3):
            self.labels[number, 11 - number % 6 :] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Seen:
    """What a script of its own counts."""

    def __init__(self):
        self.batches = 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def new_model(lora):
    set_seed(3)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=41, n_positions=16, n_embd=32, n_layer=4, n_head=2, **dropouts)
    )
    model.gradient_checkpointing_enable()
    if lora:
        model.enable_input_require_grads()
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        )
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--resume")
    args = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulate, log_with="tensorboard", project_dir=args.output_dir
    )
    accelerator.init_trackers("quickstart", config={"lora": args.lora})
    with accelerator.main_process_first():
        train, evaluation = Texts(30, 1), Texts(18, 2)
    model = new_model(args.lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train_dataloader = DataLoader(train, batch_size=args.batch_size)
    eval_dataloader = DataLoader(evaluation, batch_size=args.batch_size)
    replicas = accelerator.num_processes
    scheduler = get_linear_schedule_with_warmup(optimizer, replicas, 12 * replicas)
    model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, scheduler
    )
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    if args.resume:
        accelerator.load_state(args.resume)
    losses, norms = [], []
    for _epoch in range(2):
        model.train()
        if seen.batches >= 8 * (_epoch + 1):
            continue
        batches = iter(accelerator.skip_first_batches(train_dataloader, seen.batches % 8))
        for _update in range((8 - seen.batches % 8) // args.accumulate):
            samples = [next(batches) for _ in range(args.accumulate)]
            num_items = sum(sample["labels"][:, 1:].ne(-100).sum() for sample in samples)
            num_items = accelerator.gather(num_items).sum().item()
            total = 0.0
            for sample in samples:
                with accelerator.accumulate(model):
                    loss = model(**sample, num_items_in_batch=num_items).loss
                    total += loss.detach().float()
                    accelerator.backward(loss * args.accumulate * accelerator.num_processes)
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                        accelerator.clip_grad_value_(model.parameters(), 0.1)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                seen.batches += 1
            losses.append(accelerator.reduce(total, reduction="sum").item())
            accelerator.log({"loss": losses[-1]}, step=len(losses))
            if len(losses) == 2 and not args.resume:
                accelerator.save_state(f"{args.output_dir}/state")
        model.eval()
        correct = []
        for batch in eval_dataloader:
            with torch.no_grad(), accelerator.autocast():
                logits = model(**batch).logits
            predictions, labels = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            correct.append((predictions == labels).float().mean(1))
        padded = accelerator.gather(
            accelerator.pad_across_processes(torch.ones(2 + accelerator.process_index))
        )
    accelerator.print("trained")
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        f"{args.output_dir}/pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.save_model(model, f"{args.output_dir}/model")
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.optimizer_step_was_skipped
    with accelerator.split_between_processes(list(range(4))) as part:
        assert len(part) == 4 // accelerator.num_processes
    accelerator.end_training()
    if accelerator.is_main_process:
        report = {
            "losses": losses,
            "norms": norms,
            "accuracy": torch.cat(correct).mean().item(),
            "evaluated": len(torch.cat(correct)),
            "padded": len(padded),
            "rate": scheduler.get_last_lr()[0],
            "files": sorted(
                str(p.relative_to(args.output_dir)) for p in Path(args.output_dir).rglob("*.safetensors")
            ),
        }
        Path(args.output_dir, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
