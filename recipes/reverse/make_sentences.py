"""Rebuild sentences.txt from WordNet 3.0's data files: python make_sentences.py /usr/share/wordnet (Debian: wordnet-base).

Usage examples stand in double quotes in a synset's gloss. Kept unchanged are those of 8 to 32 characters and three words
or more, in plain lower-case letters, space, comma and apostrophe.
"""

import re
import sys
from pathlib import Path

SENTENCE = re.compile(r"[a-z][a-z ',]*[a-z]")
# For a first look at a demo: leaves out a few words, and innocent ones that contain them.
UNFIT = re.compile(r"rape|nigg|shit|\bpee\b|jew|\bsex|murder|suicid|breast|nude|naked|slave|kill|fag")


def sentences(folder: Path) -> list[str]:
    found = set()
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text(encoding="utf-8").splitlines():
            if line.startswith("  "):  # the licence, at the top of each file
                continue
            gloss = line.partition("|")[2]
            found.update(example.strip() for example in re.findall(r'"([^"]+)"', gloss))
    fit = (s for s in found if SENTENCE.fullmatch(s) and 8 <= len(s) <= 32 and len(s.split()) >= 3 and "  " not in s)
    return sorted(s for s in fit if not UNFIT.search(s))


if __name__ == "__main__":
    out = Path(__file__).with_name("sentences.txt")
    lines = sentences(Path(sys.argv[1]))
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} sentences written to {out.name}")
