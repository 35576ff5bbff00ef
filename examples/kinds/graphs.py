"""Graphs of different sizes: each micro-batch is one large graph of several small ones."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


class Gcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x, edges, graph_of, graphs):
        for layer in (self.first, self.second):
            came = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = layer(x + came).relu()
        return self.head(x.new_zeros(graphs, 16).index_add(0, graph_of, x))


def joined(graphs):
    """Return (x, edges, the graph of each node, y) of several graphs as one."""
    sizes = [len(x) for x, _, _ in graphs]
    starts = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    edges = torch.cat([one + start for (_, one, _), start in zip(graphs, starts, strict=True)], 1)
    graph_of = torch.arange(len(graphs)).repeat_interleave(torch.tensor(sizes))
    return (
        torch.cat([x for x, _, _ in graphs]),
        edges,
        graph_of,
        torch.tensor([y for *_, y in graphs]),
    )


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        graphs = []
        for size in torch.randint(4, 12, (32,), generator=random).tolist():
            x = torch.randn(size, 8, generator=random)
            graphs.append(
                (x, torch.randint(size, (2, 2 * size), generator=random), int(x.sum() > 0))
            )
        yield graphs


def loss_of(model, x, edges, graph_of, y):
    return F.cross_entropy(model(x, edges, graph_of, len(y)), y)


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = Gcn(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for graphs in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *joined(graphs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def with_count(model, *batch):
    return loss_of(model, *batch) * len(batch[-1]), len(batch[-1])


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = Gcn(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, objective=with_count, **options) as trainer:
        for graphs in batches(steps):
            parts = [joined(graphs[part::shards]) for part in range(shards)]
            loss = trainer.step(evenstep.Shards(parts))
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
