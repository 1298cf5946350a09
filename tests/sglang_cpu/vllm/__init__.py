"""Stands where SGLang imports vLLM on a machine without a GPU; nothing of it is called."""
