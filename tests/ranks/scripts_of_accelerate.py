"""Scripts after the examples of Accelerate, on small synthetic data: see `scripts_kit`."""

from scripts_kit import Script

__all__ = ["SCRIPTS_OF_ACCELERATE"]

_BEGIN = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader
from accelerate import Accelerator                                                      #-
from shardwright.integrations.accelerate import Accelerator                             #+
"""

_BERT = """
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

def bert():
    sizes = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(BertConfig(vocab_size=20, **sizes, **dropout))

def samples(number):
    for i in range(number):
        ids = torch.randint(1, 20, (6,))
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(i % 2)}
"""


_ACCUMULATION = """
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)                      #-
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, config=SETTINGS)     #+
model = bert()
train_dataloader = DataLoader(list(samples(32)), batch_size=8 // accelerator.num_processes)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
for epoch in range(2):
    for step, batch in enumerate(train_dataloader):
        with accelerator.accumulate(model):
            output = model(**batch)
            loss = output.loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        told(loss)
"""


_LORA = """
from peft import LoraConfig, TaskType, get_peft_model
accelerator = Accelerator(cpu=True)                                                     #-
accelerator = Accelerator(cpu=True, config=SETTINGS)                                    #+
sizes = dict(r=4, lora_alpha=8, lora_dropout=0.0)
lora = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["query", "value"], **sizes)
model = get_peft_model(bert(), lora)
train_dataloader = DataLoader(list(samples(24)), batch_size=8 // accelerator.num_processes)
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
for epoch in range(2):
    model.train()
    total_loss = 0
    for batch in train_dataloader:
        loss = model(**batch).loss
        total_loss += loss.detach().float()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    told(total_loss / len(train_dataloader))
"""

SCRIPTS_OF_ACCELERATE: dict[str, Script] = {
    # A scheduler of Accelerate steps once for each process: two train otherwise than one.
    "gradient_accumulation": Script(_BEGIN + _BERT + _ACCUMULATION),
    "peft_lora": Script(_BEGIN + _BERT + _LORA),
}
