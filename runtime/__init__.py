"""The DDTree serving runtime. Importing this package loads neither torch nor transformers."""
