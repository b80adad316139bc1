"""How much heads read of what earlier heads wrote: python composition.py MODEL [Q, K or V] [STACK]."""

import sys

import triptych

model = triptych.load(sys.argv[1])
print(model.composition((*sys.argv, "V")[2], *sys.argv[3:]))
