"""Models for models.py: an LSTM over characters, a graph attention network, a mixture of experts, a
ranking model of two towers. tests/models/test_lstm.c, test_gat.c, test_moe.c and test_towers.c are
the same models."""

import torch
import torch.nn.functional as F
from torch import nn

from models import adamw, below, data, sgd


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(13, 6), nn.LSTM(6, 7, 2), nn.Linear(7, 13)

    def loss(self, step):
        ids, noise = [below(13, "first", step, 4)], below(2, "noise", step, 8, 4)
        for bits in noise:
            ids.append((3 * ids[-1] + bits) % 13)
        ids = torch.stack(ids)
        y = self.head(self.lstm(self.embed(ids[:-1]))[0])
        return F.cross_entropy(y.flatten(0, 1), ids[1:].flatten())


class GraphAttention(nn.Module):
    """x (nodes, in) -> (nodes, heads out)"""

    def __init__(self, size, heads, out):
        super().__init__()
        self.linear = nn.Linear(size, heads * out, bias=False)
        self.src = nn.Parameter(torch.empty(heads, out))
        self.dst = nn.Parameter(torch.empty(heads, out))
        self.bias = nn.Parameter(torch.empty(heads * out))

    def forward(self, x, src, dst):
        h = self.linear(x).unflatten(-1, self.src.shape)
        e = (h * self.src).sum(-1)[src] + (h * self.dst).sum(-1)[dst]
        a = F.leaky_relu(e, 0.2).exp()
        a = a / a.new_zeros(len(x), a.shape[1]).index_add(0, dst, a)[dst]
        y = torch.zeros_like(h).index_add(0, dst, h[src] * a.unsqueeze(-1))
        return y.flatten(1) + self.bias


class Graph(nn.Module):
    NODES, EDGES = 11, 40

    def __init__(self):
        super().__init__()
        self.first, self.second = GraphAttention(5, 3, 4), GraphAttention(12, 1, 4)

    def nodes(self, end):
        return torch.cat([torch.arange(self.NODES),
                          below(self.NODES, end, 0, self.EDGES - self.NODES)])

    def loss(self, step):
        src, dst, x = self.nodes("src"), self.nodes("dst"), data("x", step, self.NODES, 5)
        target = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        target[4::5] = -100
        y = self.second(F.elu(self.first(x, src, dst)), src, dst)
        return F.nll_loss(F.log_softmax(y, -1), target)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.head = nn.Linear(6, 5)

    def loss(self, step):
        x = data("x", step, 1 if step % 3 == 2 else 12, 6)
        target = 2 * (x[:, 0] > 0).long() + (x[:, 1] > x[:, 2]).long()
        y, logits = x, self.router(x)
        top, index = logits.topk(2)
        weight = top.softmax(-1)
        for e, expert in enumerate(self.experts):
            row, place = torch.where(index == e)
            y = y.index_add(0, row, expert(x[row]) * weight[row, place].unsqueeze(-1))
        load = F.one_hot(index, 4).to(x.dtype).sum(1).mean(0)
        balance = (load * logits.softmax(-1).mean(0)).sum()
        return F.cross_entropy(self.head(y), target) + 0.1 * balance


class Tower(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(count, 8), nn.Linear(8, 7), nn.Linear(7, 5)

    def forward(self, ids):
        return self.down(F.relu(self.up(self.embed(ids))))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Tower(10), Tower(11)

    def loss(self, step):
        users, shift = below(10, "user", step, 9), below(3, "shift", step, 9)
        user, item = self.user(users), self.item((users + shift) % 11)
        cosine = F.cosine_similarity(user.unsqueeze(1), item.unsqueeze(0), -1)
        product = torch.einsum("ud,id->ui", user, item)
        return (F.cross_entropy(cosine / 0.2, torch.arange(9))
                + F.binary_cross_entropy_with_logits(product, torch.eye(9)))


MODELS = {
    "lstm": (Characters, Characters.loss, adamw(1e-2)),
    "gat": (Graph, Graph.loss, sgd(0.1, 0.9)),
    "moe": (Mixture, Mixture.loss, adamw(1e-2)),
    "towers": (Towers, Towers.loss, adamw(1e-2)),
}
