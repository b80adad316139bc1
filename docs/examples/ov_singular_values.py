"""Singular values of W_V W_O of a head: python ov_singular_values.py MODEL [HEAD]."""

import sys

import triptych

model = triptych.load(sys.argv[1])
print(model[(*sys.argv, "3.2")[2]].ov.singular_values())
