"""The loss on a text with a head's output from another text: python patch.py MODEL [HEAD]."""

import sys

import triptych

model = triptych.load(sys.argv[1])
clean = model.run("Two young men are playing in the park.")
patched = model.patch((*sys.argv, "3.2")[2], clean)
print(patched.run("Two young men are playing in the boat.").loss)
