#!/usr/bin/env python3
"""Writes 200 chats about a made-up town as JSON lines, {"messages": [...]}, the same each time:
files to try fine-tuning with.

    make_chats_data.py chats.jsonl [200]

Answers are short, always of the same form, and follow from what is asked, so that a model that has
learnt them also answers what it has not seen."""

import json
import random
import sys

TOWN = "Ottersby"
PEOPLE = ["Ada", "Bram", "Cleo", "Dirk", "Elin", "Faro", "Gwen", "Hugo"]
PLACES = ["the mill", "the harbour", "the old bridge", "the school", "the bakery", "the lighthouse",
          "the market", "the station"]
WORK = ["baker", "ferryman", "teacher", "smith", "gardener", "clockmaker", "weaver", "postwoman"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
           "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen",
           "eighteen"]


def facts():
    """What is so in the town: where each person works, as what, and on which day they rest."""
    rng = random.Random(46)
    places, work = PLACES[:], WORK[:]
    rng.shuffle(places)
    rng.shuffle(work)
    return {person: (places[i], work[i], DAYS[i % 7]) for i, person in enumerate(PEOPLE)}


def question(rng, town):
    person = rng.choice(PEOPLE)
    place, work, day = town[person]
    a, b = rng.randrange(10), rng.randrange(10)
    kind = rng.randrange(5)
    if kind == 0:
        ask = rng.choice(["Where does %s work?", "Where do I find %s?", "Where is %s today?"])
        return ask % person, "At %s, in %s." % (place, TOWN)
    if kind == 1:
        ask = rng.choice(["What does %s do?", "What is %s's trade?", "Who is %s?"])
        return ask % person, "%s is the %s of %s." % (person, work, TOWN)
    if kind == 2:
        ask = rng.choice(["When does %s rest?", "Which day is %s free?"])
        return ask % person, "On %s." % day
    if kind == 3:
        ask = rng.choice(["%s boats and %s boats: how many?", "What are %s and %s?"])
        return ask % (NUMBERS[a], NUMBERS[b]), "%s." % NUMBERS[a + b].capitalize()
    ask = rng.choice(["Who works at %s?", "Whom do I meet at %s?"])
    return ask % place, "%s, the %s." % (person, work)


def main():
    path, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200
    rng, town, chats = random.Random(2026), facts(), {}
    while len(chats) < count: # each one once
        messages = []
        for _ in range(1 + rng.randrange(3)):
            ask, answer = question(rng, town)
            messages += [{"role": "user", "content": ask[0].upper() + ask[1:]},
                         {"role": "assistant", "content": answer}]
        chats[json.dumps({"messages": messages})] = None
    with open(path, "w", encoding="ascii") as file:
        file.writelines(line + "\n" for line in chats)


if __name__ == "__main__":
    main()
