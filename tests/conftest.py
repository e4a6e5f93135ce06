"""What all tests share."""

import os

import torch

# Tests run beside each other and start processes of their own: more threads would only get in each other's way.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
