"""Weight files: GGUF, safetensors, and the canonical names their tensors are taken by. Imports graph and core."""
