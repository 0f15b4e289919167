"""The edge engine: a small INT8 ONNX model on this machine. Never imports torch at run time."""

import os

# onnxruntime >= 1.29 wheels for Linux write a device id and an event database unless told not to
# before the import; its Python API alone comes too late.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# A build's linear algebra is many small problems. On busy cores OpenBLAS makes them ten times slower
# by spreading them over threads, on idle ones no faster.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
