"""What both engines share: request types, sampling, tokenizer, HTTP server, model store.

Nothing here imports a model runtime (torch, ONNX Runtime) or the router.
"""
