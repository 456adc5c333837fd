# SPDX-License-Identifier: Apache-2.0
"""Writes a corpus of invented places and questions about them, for the recipe `search_qa`.

    python examples/search_qa.py search_qa --seed 0
    cd search_qa
    whet train search_qa model.path=MODEL data.train_files=train.jsonl data.val_files=held_out.jsonl

No model can know the answers: they are only in corpus.jsonl. Half of the questions need two searches, as in "What is
the river of the town where Lena Orvik was born?".
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

STARTS = ("Ar", "Bel", "Cor", "Dra", "Es", "Fal", "Gra", "Hol", "Is", "Jor", "Kel", "Lum", "Mar", "Nor", "Or", "Pel")
ENDS = ("bach", "burg", "den", "feld", "ham", "holm", "ick", "ling", "mont", "nau", "ora", "stad", "ton", "vik")
FIRST = ("Anna", "Boris", "Clara", "David", "Elif", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Lena", "Mara")
CRAFTS = ("baker", "clockmaker", "gardener", "glassblower", "painter", "piper", "printer", "weaver")


def write(folder: Path, seed: int, num_towns: int, num_held_out: int) -> tuple[int, int]:
    """Writes corpus.jsonl, train.jsonl and held_out.jsonl.  Returns the numbers of documents and of questions."""
    draws = random.Random(seed)
    names = [start + end for start in STARTS for end in ENDS]
    draws.shuffle(names)
    towns, rivers = names[:num_towns], [f"{name} Water" for name in names[num_towns : 2 * num_towns]]
    if len(rivers) < num_towns:
        raise SystemExit(f"--towns is {num_towns}; expected at most {len(names) // 2}, which have different names")
    documents, questions = [], []
    people = [f"{first} {name}" for first in FIRST for name in names]
    draws.shuffle(people)
    for town, river, person in zip(towns, rivers, people, strict=False):
        craft, year = draws.choice(CRAFTS), draws.randint(1100, 1900)
        documents.append({"title": town, "text": f"{town} is a town on the {river}. It was founded in {year}."})
        documents.append({"title": person, "text": f"{person} was a {craft}, and was born in the town of {town}."})
        questions += [
            {"question": f"In which year was {town} founded?", "answer": str(year)},
            {"question": f"What is the river of the town where {person}, the {craft}, was born?", "answer": river},
        ]
    draws.shuffle(documents)
    draws.shuffle(questions)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"corpus": documents, "held_out": questions[:num_held_out], "train": questions[num_held_out:]}
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(documents), len(questions)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes a corpus and questions for the recipe search_qa.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--towns", type=int, default=100)
    parser.add_argument("--held-out", type=int, default=40)
    given = parser.parse_args()
    found = write(given.folder, given.seed, given.towns, given.held_out)
    print(f"wrote {found[0]} documents and {found[1]} questions to {given.folder}")
