"""Trains a GPT-NeoX language model on the source code of Python's standard library.

    shardwright run -n 2 examples/train_gpt.py           # over two processes
    python examples/train_gpt.py                         # in one
    shardwright plan examples/train_gpt.py:build -n 2    # how it would be split, without running it

Nothing in it knows how many stages there are: the four lines marked with <-- are all it takes.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import shardwright.torch as sw


def tokens_of_standard_library(vocab_size: int, num_bytes: int) -> torch.Tensor:
    """The standard library's sources as one row of token ids."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "\n".join(path.read_text(errors="replace") for path in files)[:num_bytes]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text.splitlines(keepends=True), vocab_size=vocab_size, show_progress=False)
    return torch.tensor(tokenizer.encode(text).ids)


def unigram_entropy(tokens: torch.Tensor) -> float:
    """The loss, in nats, of a model that knows only how frequent each token is."""
    share = torch.bincount(tokens).double() / len(tokens)
    return float(torch.special.entr(share).sum())


def build(layers: int = 11, batch: int = 16, length: int = 64):
    """The model, and a batch to try it with."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    config = GPTNeoXConfig(vocab_size=4096, num_hidden_layers=layers, max_position_embeddings=length, **sizes)
    ids = torch.zeros(batch, length, dtype=torch.long)
    return GPTNeoXForCausalLM(config), {"input_ids": ids, "labels": ids}


def main() -> None:
    """Trains for a number of steps."""
    parser = argparse.ArgumentParser(description="Trains a GPT-NeoX on Python's standard library.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch of one replica")
    parser.add_argument("--length", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--layers", type=int, default=11)
    options = parser.parse_args()

    sw.init({"log_interval": 10, "steps": options.steps, "trace": True})  # <--
    tokens = tokens_of_standard_library(vocab_size=4096, num_bytes=2_000_000)
    torch.manual_seed(0)
    model, _ = build(options.layers, options.batch, options.length)
    model = sw.DistributedModel(model)  # <--
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))  # <--

    @sw.step  # <--
    def train_step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(sw.dp_rank())
    for _ in range(options.steps):
        starts = torch.randint(len(tokens) - options.length, (options.batch,), generator=generator)
        batch = torch.stack([tokens[start : start + options.length] for start in starts.tolist()])
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, batch).reduce_mean()
        optimizer.step()
    if sw.rank() == 0:
        print(f"final loss {loss:.4f}, unigram entropy {unigram_entropy(tokens):.4f}")
    sw.shutdown()


if __name__ == "__main__":
    main()
