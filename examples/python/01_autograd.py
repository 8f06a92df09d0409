"""01: a small network learns y = x0 x1 from random points; as examples/01_autograd.c."""
import sys

import tshard


def learn(ctx):
    net = tshard.root()
    first, second = tshard.Linear(net, "up", 2, 32), tshard.Linear(net, "down", 32, 1)
    adam = tshard.Adam(net, lr=0.005)
    for step in range(501):
        x = tshard.randn((256, 2))
        loss = ((second(first(x).gelu()) - x[:, :1] * x[:, 1:]) ** 2).mean()
        loss.backward()
        value = loss.item()
        if step % 100 == 0:
            print("step %3d  loss %.4f" % (step, value))
        adam.step()
        tshard.zero_grads(net)
        tshard.step_end()
    return value


if __name__ == "__main__":
    sys.exit(tshard.run(1, learn)[0] > 0.1)  # guessing 0 has loss 1
