"""The loss on a text without a head: python ablate.py MODEL [HEAD]."""

import sys

import triptych

model = triptych.load(sys.argv[1])
print(model.ablate((*sys.argv, "3.2")[2]).run("Two young men are playing in the park.").loss)
