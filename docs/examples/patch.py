"""The loss on a text with a head's output from another text: python patch.py MODEL [HEAD]."""

import sys

import triptych

model = triptych.load(sys.argv[1])
clean = model.run("The man sees the dog.")
patched = model.patch((*sys.argv, "3.2")[2], clean)
print(patched.run("The dog sees the man.").loss)
