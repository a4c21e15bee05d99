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

_NLP = """
accelerator = Accelerator(cpu=True)                                                     #-
accelerator = Accelerator(cpu=True, config=SETTINGS)                                    #+
model, batch_size = bert(), 8 // accelerator.num_processes
train_dataloader = DataLoader(list(samples(24)), batch_size=batch_size)
eval_dataloader = DataLoader(list(samples(16)), batch_size=batch_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=6)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
for epoch in range(2):
    model.train()
    for step, batch in enumerate(train_dataloader):
        outputs = model(**batch)
        loss = outputs.loss
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        told(loss)
    model.eval()
    right = 0
    for step, batch in enumerate(eval_dataloader):
        with torch.no_grad():
            outputs = model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        right += (predictions == references).sum().item()
    told(right)
"""

_CV = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 16, 16), nn.Linear(16, 5)

    def forward(self, image, label=None):                                               #+
        out = F.relu(self.conv2(F.relu(self.conv1(image)))).flatten(1)                  #+
        out = self.fc2(F.relu(self.fc1(out)))                                           #+
        return (out,) if label is None else (F.cross_entropy(out, label), out)          #+
    def forward(self, image):                                                           #-
        out = F.relu(self.conv2(F.relu(self.conv1(image)))).flatten(1)                  #-
        return self.fc2(F.relu(self.fc1(out)))                                          #-

accelerator = Accelerator(cpu=True)                                                     #-
accelerator = Accelerator(cpu=True, config=SETTINGS)                                    #+
data = [{"image": torch.randn(3, 8, 8), "label": i % 5} for i in range(24)]
train_dataloader = DataLoader(data, batch_size=8 // accelerator.num_processes)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, epochs=2, steps_per_epoch=3)
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, lr_scheduler
)
mean = torch.tensor([0.1, 0.2, 0.3])[None, :, None, None]
for epoch in range(2):
    model.train()
    for step, batch in enumerate(train_dataloader):
        inputs = (batch["image"] - mean) / 2
        outputs = model(inputs)                                                         #-
        loss = F.cross_entropy(outputs, batch["label"])                                 #-
        loss = model(inputs, batch["label"])[0]                                         #+
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        told(loss)
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

_CHECKPOINTING = """
import os, tempfile
accelerator = Accelerator(cpu=True)                                                     #-
accelerator = Accelerator(cpu=True, config=SETTINGS)                                    #+
model = bert()
train_dataloader = DataLoader(list(samples(24)), batch_size=8 // accelerator.num_processes)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, lr_scheduler
)
output_dir = os.path.join(os.environ["FOLDER"], "step_3")

def train(batches):
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        told(loss)

train(train_dataloader)
accelerator.save_state(output_dir)
train(train_dataloader)
accelerator.load_state(output_dir)
train(accelerator.skip_first_batches(train_dataloader, 1))
unwrapped = accelerator.unwrap_model(model)
told(len(accelerator.get_state_dict(model)))
accelerator.end_training()
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
    "nlp_example": Script(_BEGIN + _BERT + _NLP, replicates=False),
    "cv_example": Script(_BEGIN + _CV, replicates=False),
    "gradient_accumulation": Script(_BEGIN + _BERT + _ACCUMULATION),
    "checkpointing": Script(_BEGIN + _BERT + _CHECKPOINTING, replicates=False),
    "peft_lora": Script(_BEGIN + _BERT + _LORA),
}
