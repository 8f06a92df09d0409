"""02: program 01 on two ranks, each with half of the hidden layer; as examples/02_two_ranks.c. The
styles of the layers and the number of ranks changed, and only rank 0 prints."""
import sys

import tshard


def learn(ctx):
    net = tshard.root()
    first = tshard.Linear(net, "up", 2, 32, style=tshard.COLWISE)
    second = tshard.Linear(net, "down", 32, 1, style=tshard.ROWWISE)
    adam = tshard.Adam(net, lr=0.005)
    for step in range(501):
        x = tshard.randn((256, 2))
        loss = ((second(first(x).gelu()) - x[:, :1] * x[:, 1:]) ** 2).mean()
        loss.backward()
        value = loss.item()
        if step % 100 == 0 and ctx.rank == 0:
            print("step %3d  loss %.4f" % (step, value))
        adam.step()
        tshard.zero_grads(net)
        tshard.step_end()
    return value


if __name__ == "__main__":
    sys.exit(tshard.run(2, learn)[0] > 0.1)  # guessing 0 has loss 1
