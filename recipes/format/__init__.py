"""Turn an order in plain English into JSON with three fields; counts are often written as words."""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import product
from random import Random
from typing import Any

ITEMS = """
apples bicycles books bottles boxes bricks cameras candles carpets chairs clocks coats cups desks doors drums
eggs forks gloves guitars hammers hats jackets kettles keys ladders lamps lemons maps mirrors nails onions pens
phones pillows plates pumps radios ropes rugs shoes shovels soaps spoons stamps tables tents tiles towels toys
tyres vases
"""
CITIES = """
Accra Athens Berlin Bogota Boston Cairo Chicago Dakar Delhi Denver Dublin Geneva Hanoi Helsinki Houston Jakarta
Kyoto Lagos Lima Lisbon London Lyon Madrid Manila Miami Milan Montreal Moscow Nairobi Oslo Paris Prague Quito
Riga Rome Seattle Seoul Sydney Tokyo Toronto Tunis Vienna Warsaw Zurich
"""
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SENTENCES = (
    "Please send {count} {item} to our shop in {city}.",
    "Our office in {city} needs {count} {item} by Monday.",
    "We would like to order {count} {item}. Deliver them to {city}.",
    "{city} is out of {item} again: ship {count} of them.",
    "Could you get {count} {item} to {city} this week?",
)
EXAMPLE = (
    {"role": "user", "content": "The shop in Perth wants three boats."},
    {"role": "assistant", "content": '{"item": "boats", "count": 3, "city": "Perth"}'},
)
HELD_OUT = 0.1  # share of the pairs of item and city


def rows(count: int, held_out: bool) -> list[dict[str, Any]]:
    """Return `count` different orders. A pair of item and city is either held out or not."""
    random = Random(0)
    pairs = [pair for pair in product(ITEMS.split(), CITIES.split()) if (_place(*pair) < HELD_OUT) == held_out]
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        (item, city), number = random.choice(pairs), random.randint(2, 12)
        shown = random.choice([str(number), WORDS[number - 1]])
        text = random.choice(SENTENCES).format(count=shown, item=item, city=city)
        answer = {"item": item, "count": number, "city": city}
        found[text] = {"prompt": [*EXAMPLE, {"role": "user", "content": text}], "answer": json.dumps(answer)}
    return list(found.values())


def _place(item: str, city: str) -> float:
    return int.from_bytes(sha256(f"{item} {city}".encode()).digest()[:8], "big") / 2**64
