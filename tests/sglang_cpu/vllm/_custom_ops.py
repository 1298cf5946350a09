"""Names that SGLang imports and does not call here."""


def rotary_embedding(*_arguments: object) -> None:
    raise RuntimeError("this stands in for an import alone")
