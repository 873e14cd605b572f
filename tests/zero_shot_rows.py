"""A few rows for each task of the paper's table, in the Hub's columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ARC = [
    {
        "id": f"a{i}",
        "question": f"What do {count} cats see at night?",
        "choices": {"text": ["a dog", "the moon", "seven birds", "rain"], "label": list(labels)},
        "answerKey": labels[i % 4],
    }
    for i, (count, labels) in enumerate(
        [("two", "ABCD"), ("nine", "1234"), ("no", "ABCD"), ("all", "ABCD"), ("ten", "1234")]
    )
]
_STORIES = [
    "The cat sat on the mat and the dog saw the cat",
    "A bird was heard under the tree . it was a small bird",
    "`` no '' , said the dog , and went to the house",
    "She saw 7 birds near 12 trees and counted the birds",
    "then it slept",
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "wikitext": [
        {"page": f" = {title} = \n \n The {title} is a cat @-@ like bird , 1 @,@ 204 old . \n"}
        for title in ("Dog", "Tree ( plant )", "House", "Mat", "Moon")
    ],
    "lambada_standard": [{"text": text.lower()} for text in _STORIES],
    "lambada_openai": [{"text": text} for text in _STORIES],
    "piqa": [
        {
            "goal": f"Wash {n} cats.",
            "sol1": "Use warm water.",
            "sol2": f"Use {n} dogs.",
            "label": n % 2,
        }
        for n in range(5)
    ],
    "hellaswag": [
        {
            "ind": n,
            "activity_label": "Petting [header] cats",
            "ctx_a": f"A man sees {n} cats.",
            "ctx_b": "he",
            "ctx": f"A man sees {n} cats. he",
            "endings": ["runs  away.", "pets them [title] all.", "sleeps.", "eats a tree."],
            "label": str(n % 4),
        }
        for n in range(5)
    ],
    "winogrande": [
        {
            "sentence": f"The cat saw the dog and the _ ran {n} miles.",
            "option1": "cat",
            "option2": "dog",
            "answer": str(1 + n % 2),
        }
        for n in range(5)
    ],
    "arc_easy": _ARC,
    "arc_challenge": _ARC[::-1],
}


def write_rows(folder: Path, rows: dict[str, list[dict[str, Any]]] = ROWS) -> Path:
    """A folder for --data-dir."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, values in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in values)
        (folder / f"{task}.jsonl").write_text(lines, encoding="utf-8")
    return folder
