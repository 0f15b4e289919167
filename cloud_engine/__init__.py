"""The cloud engine: PyTorch, on a GPU where there is one and on the CPU where there is none."""

import os

# Torch's CPU threads spin while they wait for each other unless told not to before the import. On
# cores that another process uses too, such as the edge engine's, they then burn each other's time:
# with 2 threads on 2 busy cores decoding fell from 17 to 1.5 tokens/s.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
