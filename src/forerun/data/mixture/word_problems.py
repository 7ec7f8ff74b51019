"""Word problems of several steps, written here: stories with names, things and numbers to fill in.

A template is the story, then " || " and the questions that may end it, separated by " | ". Ranges
and steps are chosen so that the answers come out whole or to the cent.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from forerun.data.mixture.templates import fill_template, split_words
from forerun.data.mixture.word_problem_templates import TEMPLATES

_WORDS = {
    "girl": split_words(
        "Amara, Beatriz, Chloe, Divya, Elena, Fatima, Greta, Hana, Ingrid, Jasmine, Kavya, "
        "Leila, Mei, Nadia, Odette, Priya, Rosa, Sofia, Tamsin, Ursula, Vera, Wren, Ximena, "
        "Yuki, Zoe, Alma, Bridget, Carmen, Dora, Esther, Freya, Gloria, Hazel, Imani, Joan, "
        "Kirsten, Lucia, Maren, Noor, Olive"
    ),
    "boy": split_words(
        "Anton, Bilal, Cesar, Dmitri, Emeka, Felix, Gustavo, Hiro, Ivan, Jamal, Kofi, Luca, "
        "Mateo, Nikhil, Oscar, Pablo, Quinn, Rafael, Samir, Theo, Umar, Viktor, Wesley, Xavier, "
        "Yusuf, Zane, Arlo, Bruno, Cormac, Dev, Elias, Finn, Gideon, Hugo, Isaac, Jonas, Kenji, "
        "Lars, Marlon, Nils"
    ),
    "thing": split_words(
        "stickers, marbles, postcards, buttons, pencils, beads, seashells, stamps, badges, "
        "crayons, coins, toy cars, bookmarks, trading cards, paper stars, keyrings, erasers, "
        "magnets, ribbons, balloons"
    ),
    "food": split_words(
        "muffins, sandwiches, pretzels, bagels, tacos, spring rolls, cupcakes, empanadas, "
        "scones, samosas, waffles, dumplings, burritos, cinnamon rolls, fruit cups, smoothies"
    ),
    "fruit": split_words(
        "apples, pears, plums, oranges, peaches, lemons, mangoes, kiwis, figs, apricots"
    ),
    "animal": split_words("goats, sheep, rabbits, hens, ponies, alpacas, turkeys, llamas, donkeys"),
    "plant": split_words(
        "tulips, roses, daffodils, tomato plants, pepper plants, sunflowers, ferns, lilies"
    ),
    "place": split_words(
        "school, library, community centre, museum, sports club, youth club, hospital, theatre, "
        "art studio, town hall"
    ),
    "job": split_words(
        "plumber, gardener, tutor, electrician, photographer, carpenter, painter, mechanic"
    ),
    "day": split_words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday"),
    "month": split_words("March, April, May, June, September, October, November"),
}


def make_word_problems(seed: str, count: int) -> Iterator[tuple[str, str]]:
    """Yield `count` problems, the templates in turn."""
    rng = random.Random(seed)
    for index in range(count):
        story, questions = TEMPLATES[index % len(TEMPLATES)].split(" || ")
        text = f"{story} {rng.choice(questions.split(' | '))}"
        yield str(index), fill_template(text, _WORDS, rng)
