"""W_Q of a head: python head_matrix.py MODEL [HEAD]."""

import sys

import triptych

model = triptych.load(sys.argv[1])
print(model[(*sys.argv, "3.2")[2]].W_Q)  # [d_model, d_k]
