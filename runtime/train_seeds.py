"""Openers of self-prompts: how a user turn starts before the target itself writes the rest of it.

They steer the target's own prompts towards code, mathematics and writing; none comes from an evaluation set.
"""

from __future__ import annotations

from typing import NamedTuple


class Opener(NamedTuple):
    """Text that starts a user turn, its kind, how often it is drawn, the longest turn in tokens, its temperature."""

    text: str
    kind: str
    weight: float
    max_tokens: int
    temperature: float


_SIGNATURES = (
    "from typing import List\n\n\ndef ",
    "from typing import List, Tuple\n\n\ndef ",
    "from typing import List, Optional\n\n\ndef ",
    "from typing import Dict, List\n\n\ndef ",
    "import math\n\n\ndef ",
    "def ",
    "\ndef ",
    "def is_",
    "def count_",
    "def find_",
    "def get_",
    "def sum_",
    "def max_",
    "def remove_",
    "def check_",
    "def sort_",
    "def string_",
    "def reverse_",
    "def largest_",
    "def compute_",
    "def filter_",
    "def split_",
    "def to_",
    "def convert_",
    "def make_",
    "def next_",
    "def prime_",
    "def encode_",
    "def has_",
    "def words_",
)

_CODE = (
    "Write a Python function",
    "Write a Python function that",
    "Write a Python function to",
    "Write a function to",
    "Write a python function to find",
    "Write a function that takes",
    "Write a Python program",
    "Write a program that",
    "Write code that",
    "Implement",
    "Implement a function",
    "Implement a class",
    "Complete the following Python function:\n\ndef ",
    "Complete this function.\n\ndef ",
    "Here is a Python function:\n\ndef ",
    "Fix the bug in this code:\n\n",
    "How do I write a function in Python that",
    "Create a Python class",
    "Given a list of integers,",
    "Given a string",
    "Write an SQL query",
    "Write a C++ program",
    "Write a JavaScript function",
    "What does this code do?\n\n",
)

_NAMES = (
    "Anna", "Ben", "Carla", "Diego", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Kim", "Liam", "Maya", "Noah",
    "Olga", "Pedro", "Quinn", "Rosa", "Sam", "Tara", "Umar", "Vera", "Will", "Yara", "Zoe", "Mrs. Lopez", "Mr. Chen",
    "A farmer", "A baker", "A shop", "A train", "A school", "A class", "A family", "A teacher",
)  # fmt: skip

_MATHS = (
    "Solve",
    "Calculate",
    "Find the value of",
    "How many",
    "How much",
    "What is the sum of",
    "What is the probability",
    "If a",
    "If x",
    "There are",
    "In a",
    "The sum of",
    "The price of",
    "Each",
    "Two",
    "A rectangle",
    "A box",
    "A car",
)

_WRITING = (
    "Write a",
    "Write an",
    "Write a short story",
    "Write a poem",
    "Write a letter",
    "Write an email",
    "Write a blog post",
    "Write a persuasive",
    "Write a paragraph",
    "Write a detailed",
    "Compose",
    "Compose a",
    "Draft a",
    "Create a",
    "Describe",
    "Describe a",
    "Imagine you are",
    "Pretend to be",
    "Act as",
    "You are a",
    "Suppose you are",
    "Rewrite the following",
    "Edit the following paragraph",
    "Tell me a story about",
    "Outline",
)

_GENERAL = (
    "Explain",
    "Explain the",
    "Explain how",
    "What is",
    "What are",
    "What are the",
    "What would",
    "Why",
    "Why do",
    "How",
    "How do",
    "How does",
    "How can I",
    "Can you",
    "Could you",
    "Please",
    "Compare",
    "Discuss",
    "Analyze",
    "Summarize",
    "Identify",
    "List",
    "Give me",
    "Give an example of",
    "Suggest",
    "Extract",
    "Classify",
    "Read the following passage and answer the question.",
    "Based on the following",
    "Given the following",
    "Provide",
    "Which",
    "Who",
    "When",
    "Is it",
    "Should",
    "Tell me about",
    "I am",
    "I need",
    "I want to",
    "Help me",
    "Evaluate",
    "Consider",
    "Translate",
    "In the field of",
    "What are some",
    "What is the difference between",
)


_VERBS = (
    "count", "find", "remove", "filter", "sort", "merge", "check", "sum", "split", "group", "rotate", "select",
    "reverse", "replace", "extract", "compare", "longest", "smallest", "unique", "encode",
)  # fmt: skip

_NOUNS = (
    ("vowels", "text: str", "int"),
    ("words", "sentence: str", "List[str]"),
    ("digits", "n: int", "int"),
    ("even_numbers", "numbers: List[int]", "List[int]"),
    ("odd_numbers", "numbers: List[int]", "List[int]"),
    ("duplicates", "items: list", "list"),
    ("intervals", "intervals: List[Tuple[int, int]]", "List[Tuple[int, int]]"),
    ("characters", "s: str", "str"),
    ("substring", "s: str, t: str", "str"),
    ("prime_factors", "n: int", "List[int]"),
    ("pairs", "numbers: List[int], target: int", "List[Tuple[int, int]]"),
    ("elements", "lst, k", ""),
    ("matrix_rows", "matrix: List[List[int]]", "List[int]"),
    ("divisors", "n", ""),
    ("string", "text", ""),
    ("list", "l: list", ""),
    ("brackets", "text: str", "bool"),
    ("keys", "table: Dict[str, int]", "List[str]"),
    ("letters", "word", ""),
    ("squares", "numbers: List[float]", "float"),
    ("values", "a, b", ""),
    ("sequence", "n: int", "List[int]"),
    ("peaks", "heights: List[int]", "int"),
    ("dates", "date: str", "bool"),
)

_IMPORTS = ("", "", "from typing import List\n\n\n", "\n\n", "import math\n\n\n")


def _function_headers() -> tuple[str, ...]:
    """Python functions up to the opening of their docstring."""
    headers = []
    for row, verb in enumerate(_VERBS):
        for column, (noun, arguments, result) in enumerate(_NOUNS):
            before = _IMPORTS[(row + column) % len(_IMPORTS)]
            arrow = f" -> {result}" if result else ""
            quotes = "'''" if (row + 2 * column) % 9 == 0 else '"""'
            space = (" ", "", "\n    ")[(row + column) % 3]
            headers.append(f"{before}def {verb}_{noun}({arguments}){arrow}:\n    {quotes}{space}")
    return tuple(headers)


def _spread(
    texts: tuple[str, ...], kind: str, share: float, max_tokens: int, temperature: float = 1.0
) -> tuple[Opener, ...]:
    return tuple(Opener(text, kind, share / len(texts), max_tokens, temperature) for text in texts)


OPENERS: tuple[Opener, ...] = (
    Opener("", "chat", 0.16, 120, 1.0),
    *_spread(_function_headers(), "signature", 0.2, 120, 0.9),
    *_spread(_SIGNATURES, "signature", 0.06, 150, 0.8),
    *_spread(_CODE, "code", 0.12, 160, 0.8),
    *_spread(_NAMES, "maths", 0.12, 120),
    *_spread(_MATHS, "maths", 0.05, 120),
    *_spread(_WRITING, "writing", 0.13, 120),
    *_spread(_GENERAL, "general", 0.16, 120),
)
"""All openers; the weights add up to 1."""
