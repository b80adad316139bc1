"""The model without a head, written for other programs: python write.py MODEL OUT [HEAD]."""

import sys

import triptych

model = triptych.load(sys.argv[1])
changed = model.ablate((*sys.argv, "3.2")[3])
print(changed.save(sys.argv[2]))
