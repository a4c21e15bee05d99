"""Models that call experts of a list, as the code of others does. Nothing here knows of Shardwright."""

import torch
import torch.nn.functional as F
from test_shared_layers import HEADS, WIDTH, WORDS
from torch import Tensor, nn

INNER, TAKEN = 20, 2


class Mlp(nn.Module):
    """Of Mixtral: three products."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DroppingMlp(Mlp):
    """With dropout, as Switch Transformers have it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.dropout(F.silu(self.w1(x)) * self.w3(x), 0.2, self.training))


class Mixtral(nn.Module):
    """The block of transformers 4: masks, and `index_add_`; gives the logits of its router, too."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList([Mlp() for _ in range(num_experts)])

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch_size, length, width = hidden_states.shape
        hidden_states = hidden_states.view(-1, width)
        router_logits = self.gate(hidden_states)
        weights = F.softmax(router_logits, dim=1)
        weights, selected = torch.topk(weights, TAKEN, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden_states.dtype)
        final = torch.zeros(
            (batch_size * length, width), dtype=hidden_states.dtype, device=hidden_states.device
        )
        mask = F.one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for index in hit:
            expert = self.experts[index]
            place, token = torch.where(mask[index].squeeze(0))
            current = hidden_states[None, token].reshape(-1, width)
            current = expert(current) * weights[token, place, None]
            final.index_add_(0, token, current.to(hidden_states.dtype))
        return final.reshape(batch_size, length, width), router_logits


class Qwen(Mixtral):
    """The same with an expert that all tokens take, behind a gate."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self.shared_expert, self.shared_expert_gate = Mlp(), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        found, logits = super().forward(hidden_states)
        shared = torch.sigmoid(self.shared_expert_gate(hidden_states)) * self.shared_expert(hidden_states)
        return found + shared, logits


class Mistral(nn.Module):
    """The loop of Mistral's own code: all experts, `+=` at indices."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList([Mlp() for _ in range(num_experts)])

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        squashed = inputs.view(-1, inputs.shape[-1])
        logits = self.gate(squashed)
        weights, selected = torch.topk(logits, TAKEN)
        weights = F.softmax(weights, dim=1, dtype=torch.float).type_as(inputs)
        results = torch.zeros_like(squashed)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(selected == i)
            results[token] += weights[token, place, None] * expert(squashed[token])
        return results.view_as(inputs), logits


class DeepSeek(nn.Module):
    """The block of DeepSeek's own code in training: all routes one after the other, masks, shared experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList([Mlp() for _ in range(num_experts)])
        self.shared_experts = Mlp()

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        identity, shape = hidden_states, hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        logits = self.gate(hidden_states)
        weights, index = torch.topk(logits.softmax(-1), TAKEN, dim=-1, sorted=False)
        flat_index = index.view(-1)
        hidden_states = hidden_states.repeat_interleave(TAKEN, dim=0)
        y = torch.empty_like(hidden_states)
        for i, expert in enumerate(self.experts):
            y[flat_index == i] = expert(hidden_states[flat_index == i])
        y = (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
        return y.view(*shape) + self.shared_experts(identity), logits


class Switch(nn.Module):
    """Experts by name, one for a token, behind a mask; the code of Switch Transformers."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleDict({f"expert_{i}": DroppingMlp() for i in range(num_experts)})

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(hidden_states)
        probabilities, chosen = logits.softmax(-1).max(dim=-1)
        next_states = torch.zeros_like(hidden_states)
        for i, expert in enumerate(self.experts.values()):
            tokens = (chosen == i).nonzero(as_tuple=True)
            if len(tokens[0]):
                next_states[tokens] = expert(hidden_states[tokens])
        return hidden_states + probabilities.unsqueeze(-1) * next_states, logits


class Capped(Mistral):
    """Experts with room for few tokens: by a running sum over all of them, the last ones are left out."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        tokens = inputs.flatten(0, -2)
        room = len(tokens) // len(self.experts)
        logits = self.gate(tokens)
        weights, chosen = logits.softmax(-1).max(-1)
        taken = F.one_hot(chosen, len(self.experts))
        kept = (taken.cumsum(0) * taken).amax(-1) <= room
        results = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            (own,) = torch.where((chosen == i) & kept)
            results.index_add_(0, own, expert(tokens[own]) * weights[own, None])
        return results.view_as(inputs), logits


BLOCKS = {each.__name__: each for each in (Mixtral, Qwen, Mistral, DeepSeek, Switch, Capped)}


class Layer(nn.Module):
    """Attention, and a block of experts."""

    def __init__(self, block: str, num_experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = BLOCKS[block](num_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        found, logits = self.mlp(self.norm2(x))
        return x + found, logits


class SparseModel(nn.Module):
    """A layer of each kind of block, and a loss that balances the routes."""

    def __init__(self, *blocks: str, num_experts: int = 5) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(each, num_experts) for each in blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids_BT: Tensor, target: Tensor) -> Tensor:
        x = self.words(ids_BT) + self.places(torch.arange(ids_BT.shape[1]))
        balance = torch.zeros(())
        for layer in self.layers:
            x, logits = layer(x)
            balance = balance + logits.reshape(-1, logits.shape[-1]).softmax(-1).mean(0).square().sum()
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())
        return loss + 0.1 * balance
