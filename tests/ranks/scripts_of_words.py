"""Scripts after pytorch/examples that train on words, graphs, series and games, on small synthetic data.

See `scripts_kit`.
"""

from scripts_kit import Script

__all__ = ["SCRIPTS_OF_WORDS"]

_BEGIN = """
import math, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import shardwright.torch as sw                                                          #+
sw.init(SETTINGS)                                                                       #+
"""

_LSTM = """
class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(ntoken, ninp), nn.Linear(nhid, ntoken)
        self.rnn = nn.LSTM(ninp, nhid, nlayers)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return F.log_softmax(self.decoder(output).view(-1, self.decoder.out_features), dim=1), hidden

def repackage_hidden(h):
    return tuple(v.detach() for v in h)

train_data = torch.randint(0, 20, (24, 8))      # words x batch
model = RNNModel(20, 8, 12, 2)
model = sw.DistributedModel(model)                                                      #+
criterion, lr = nn.NLLLoss(), 0.5
hidden = torch.zeros(2, 8, 12), torch.zeros(2, 8, 12)

@sw.step(input_split_axes={"data": 1, "targets": 1, "h": 1, "c": 1})                    #+
def train_step(model, data, targets, h, c):                                             #+
    output, (h, c) = model(data, (h, c))                                                #+
    loss = criterion(output, targets.reshape(-1))                                       #+
    loss.backward()                                                                     #+
    return loss, h, c                                                                   #+

for i in range(0, 18, 6):
    data, targets = train_data[i : i + 6], train_data[i + 1 : i + 7]
    model.zero_grad()
    hidden = repackage_hidden(hidden)
    output, hidden = model(data, hidden)                                                #-
    loss = criterion(output, targets.reshape(-1))                                       #-
    loss.backward()                                                                     #-
    loss, h, c = train_step(model, data, targets, *hidden)                              #+
    loss, hidden = loss.reduce_mean(), (h.concat(1), c.concat(1))                       #+
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)
    told(loss)
"""


_REINFORCE = """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.hidden, self.affine2 = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x):
        return F.softmax(self.affine2(torch.relu(self.hidden(torch.relu(self.affine1(x))))), dim=1)

policy = Policy()                                                                       #-
policy = sw.DistributedModel(Policy())                                                  #+
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)

@sw.step                                                                                #+
def probabilities(policy, state):                                                       #+
    return policy(state)                                                                #+

@sw.step                                                                                #+
def train_step(policy, states, actions, returns):                                       #+
    chosen = policy(states).gather(1, actions[:, None])[:, 0]                           #+
    loss = (-chosen.log() * returns).sum()                                              #+
    loss.backward()                                                                     #+
    return loss                                                                         #+

for episode in range(3):
    state, rewards, log_probs = torch.zeros(1, 4), [], []
    states, actions = [], []                                                            #+
    for t in range(7 + episode):
        probs = policy(state)                                                           #-
        with torch.no_grad():                                                           #+
            probs = probabilities(policy, state).concat()                               #+
        action = int(torch.rand((), generator=generator) > probs[0, 0])
        log_probs.append(probs[0, action].log())                                        #-
        states.append(state)                                                            #+
        actions.append(action)                                                          #+
        state = torch.tanh(state + torch.tensor([action, 1, -action, 0.5]))
        rewards.append(float(state[0, 0]))
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    optimizer.zero_grad()
    policy_loss = torch.stack([-p * r for p, r in zip(log_probs, returns)]).sum()       #-
    policy_loss.backward()                                                              #-
    policy_loss = train_step(policy, torch.cat(states), torch.tensor(actions), returns) #+
    optimizer.step()
    told(policy_loss)                                                                   #-
    told(policy_loss.reduce_mean())                                                     #+
"""

_GCN = """
class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(input_dim, output_dim))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, input, adj):
        return torch.mm(adj, torch.mm(input, self.kernel))

class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConv(6, 8), GraphConv(8, 3)

    def forward(self, input, adj):
        return F.log_softmax(self.gc2(F.relu(self.gc1(input, adj)), adj), dim=1)

features, adj, labels = torch.randn(12, 6), torch.softmax(torch.randn(12, 12), 1), torch.arange(12) % 3
train = torch.arange(0, 12, 2)
model = GCN()                                                                           #-
model = sw.DistributedModel(GCN())                                                      #+
optimizer, criterion = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4), nn.NLLLoss()

@sw.step(non_split_inputs=["features", "adj", "labels"])                                #+
def train_step(model, features, adj, labels):                                           #+
    loss = criterion(model(features, adj)[train], labels[train])                        #+
    loss.backward()                                                                     #+
    return loss                                                                         #+

for epoch in range(4):
    optimizer.zero_grad()
    output = model(features, adj)                                                       #-
    loss = criterion(output[train], labels[train])                                      #-
    loss.backward()                                                                     #-
    loss = train_step(model, features, adj, labels).reduce_mean()                       #+
    optimizer.step()
    told(loss)
"""

_GAT = _GCN.replace(
    "        return torch.mm(adj, torch.mm(input, self.kernel))\n",
    "        h = torch.mm(input, self.kernel)\n"
    "        scores = F.leaky_relu(h.mean(1)[:, None] + h.amax(1)[None], 0.2)\n"
    "        scores = torch.where(adj > 0.05, scores, torch.full_like(scores, -9e15))\n"
    "        return torch.mm(torch.softmax(scores, 1), h)\n",
)


_FSDP2 = """
from torch.distributed.fsdp import fully_shard                                          #-

class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.output = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        x = self.tok_embeddings(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)

model = Transformer()
for layer in model.layers:                                                              #-
    fully_shard(layer)                                                                  #-
fully_shard(model)                                                                      #-
model = sw.DistributedModel(model)                                                      #+
optim = torch.optim.Adam(model.parameters(), lr=1e-2)

@sw.step                                                                                #+
def train_step(model, x):                                                               #+
    loss = model(x).sum()                                                               #+
    loss.backward()                                                                     #+
    return loss                                                                         #+

for _ in range(4):
    x = torch.randint(0, 20, (8, 5))
    loss = model(x).sum()                                                               #-
    loss.backward()                                                                     #-
    mine = x.chunk(sw.rdp_size())[sw.rdp_rank()]                                        #+
    loss = train_step(model, mine).reduce_mean()                                        #+
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optim.step()
    optim.zero_grad()
    told(loss)
"""

_TENSOR_PARALLEL = """
class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.relu, self.out_proj = nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))

model = ToyModel()
model = sw.DistributedModel(model)                                                      #+
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)

@sw.step                                                                                #+
def train_step(model, inp):                                                             #+
    loss = model(inp).sum()                                                             #+
    loss.backward()                                                                     #+
    return loss                                                                         #+

for i in range(4):
    torch.manual_seed(i)
    inp = torch.rand(20, 10)
    optimizer.zero_grad()
    output = model(inp)                                                                 #-
    output.sum().backward()                                                             #-
    loss = train_step(model, inp)                                                       #+
    optimizer.step()
    told(output.sum())                                                                  #-
    told(loss.reduce_mean())                                                            #+
"""


_TENSORS = {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2}

_REGRESSION = """
def make_features(x):
    return torch.stack([x**i for i in range(1, 5)], 1)

fc = nn.Linear(4, 1)
model = sw.DistributedModel(fc)                                                         #+
W_target, b_target = torch.randn(4, 1) * 5, torch.randn(1) * 5

@sw.step                                                                                #+
def train_step(model, batch_x, batch_y):                                                #+
    output = F.smooth_l1_loss(model(batch_x), batch_y)                                  #+
    output.backward()                                                                   #+
    return output                                                                       #+

for batch_idx in range(4):
    x = make_features(torch.randn(32))
    y = x.mm(W_target) + b_target
    x, y = (each.chunk(sw.rdp_size())[sw.rdp_rank()] for each in (x, y))                #+
    fc.zero_grad()
    output = F.smooth_l1_loss(fc(x), y)                                                 #-
    output.backward()                                                                   #-
    output = train_step(model, x, y).reduce_mean()                                      #+
    for param in fc.parameters():
        param.data.add_(-0.1 * param.grad)
    told(output)
"""

SCRIPTS_OF_WORDS: dict[str, Script] = {
    "regression": Script(_BEGIN + _REGRESSION, spreads=False),
    "word_language_model_lstm": Script(_BEGIN + _LSTM, replicates=False),
    "reinforcement_learning": Script(_BEGIN + _REINFORCE, microbatches=1, replicates=False),
    "gcn": Script(_BEGIN + _GCN, microbatches=1, replicates=False),
    "gat": Script(_BEGIN + _GAT, microbatches=1, replicates=False),
    "fsdp2": Script(_BEGIN + _FSDP2, is_sum=True),
    "tensor_parallel": Script(_BEGIN + _TENSOR_PARALLEL, settings=_TENSORS, replicates=False, is_sum=True),
}
