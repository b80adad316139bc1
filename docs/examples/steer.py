"""The loss on a text with a direction added to the residual stream: python steer.py MODEL [RESIDUAL]."""

import sys

import triptych

model = triptych.load(sys.argv[1])
print(model.steer((*sys.argv, "residual.3")[2], model.layers[0].W_O[2, 0], 4.0).run("Two men sit.").loss)
