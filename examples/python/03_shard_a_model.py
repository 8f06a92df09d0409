"""03: a model written for one device is sharded by a plan, and computes the same numbers; as
examples/03_shard_a_model.c. Four ranks, ten hidden features: they own 3, 3, 3 and 1 of them."""
import sys

import tshard

PLAN = [{"path": "mlp.up", "style": tshard.COLWISE},     # output features are cut ...
        {"path": "mlp.down", "style": tshard.ROWWISE}]   # ... and are the input features here


class MLP(tshard.Module):
    def __init__(self, parent, name):
        super().__init__(parent, name)
        self.up, self.down = tshard.Linear(self, "up", 4, 10), tshard.Linear(self, "down", 10, 3)

    def forward(self, x):
        return self.down(self.up(x).relu())


def show(path, param, ranks):
    own = ""
    for r in range(ranks if param.layout.kind == tshard.SHARDED else 0):
        start, length = tshard.shard_range(param.layout, param.shape[param.layout.dim], ranks, r)[0]
        own += "  rank %d: %d..%d" % (r, start, start + length - 1)
    print("%-16s %-5s%s" % (path, param.layout, own))


def shard(ctx):
    model = MLP(tshard.root(), "mlp")
    x = tshard.randn((5, 4)).keep()
    dense = model(x).numpy().copy()
    tshard.step_end()
    tshard.parallelize(tshard.root(), PLAN)  # values that are there already are sliced in place
    sharded = model(x).numpy()
    worst = abs(sharded - dense).max()
    if ctx.rank == 0:
        for path, param in tshard.root().parameters().items():
            show(path, param, ctx.size)
        print("output (0, 0) %g, dense %g" % (sharded[0, 0], dense[0, 0]))
        print("largest difference to the dense model: %.1e" % worst)
    return sharded[0, 0] != 0 and worst < 1e-5


if __name__ == "__main__":
    sys.exit(not all(tshard.run(4, shard)))
