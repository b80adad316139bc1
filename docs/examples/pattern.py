"""Where a head looks on a text: python pattern.py MODEL [HEAD]."""

import sys

import triptych

model = triptych.load(sys.argv[1])
print(model.run("Two young men are playing in the park.")[(*sys.argv, "3.2")[2]].weights)  # [queries, keys]
