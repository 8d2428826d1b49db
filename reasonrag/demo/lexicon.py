"""The fixed vocabulary of the demo: invented names by type of entity, the relations between them, and their questions.

Every name has two words. The split of a pair of words does not depend on a seed, so a test name never occurs in
training, in any world.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "dev", "test"]
Kind = Literal["person", "film", "city", "band", "company", "country"]

SPLITS: tuple[Split, ...] = ("train", "dev", "test")

_NAMES: dict[Kind, tuple[str, str]] = {
    "person": (
        "Marla Tovin Selka Orban Hedda Rulik Vanya Jorun Pella Dorik Isolde Kasim Lumi Nadir Oksana Perrin Quilla "
        "Rasko Sunniva Talin",
        "Abreko Bolvar Cresk Dantov Elvik Farrowin Gollan Hrast Ivarson Jelink Kovrin Lestrad Mornak Nyberin Oltan "
        "Pradow Quist Rovnik Strell Tarkas",
    ),
    "film": (
        "Crimson Silent Golden Broken Hidden Frozen Distant Hollow Scarlet Burning Gentle Savage Velvet Restless "
        "Lonely Bitter Paper Copper Midnight Painted",
        "Harbor Orchard Lantern Compass Garden Mirror Carnival Voyage Winter Promise Castle Thunder Island Letter "
        "Window Shadow Journey Empire Bridge Summer",
    ),
    "city": (
        "Port Mount Fort Lake Saint Point Glen Loch Cape Villa Burg Nether Alt Bad Cerro Monte Puerto Rio Stara Castel",
        "Kelda Ferin Ozmar Tullow Brask Wenlin Drovna Ilmar Sorvik Pandel Grunau Haskel Jarrow Lomza Mirvan Nolby "
        "Rustan Savren Teplin Ulven",
    ),
    "band": (
        "Electric Neon Plastic Cosmic Rusty Lazy Cheerful Invisible Royal Purple Sonic Nervous Hungry Rapid Sleepy "
        "Polar Atomic Tropical Jolly Dusty",
        "Foxes Wolves Comets Rockets Pirates Owls Tigers Robots Spiders Ravens Monkeys Cowboys Sailors Turtles Bandits "
        "Dragons Rabbits Falcons Beetles Camels",
    ),
    "company": (
        "Velox Brantek Cordia Dynar Exalta Fenwick Gravix Helion Inova Jutlan Kestra Lumox Maxdor Nexa Orbis Pantor "
        "Quorum Ryton Solvex Trimar",
        "Works Foods Motors Systems Energy Textiles Airways Chemicals Mining Optics Carpets Timber Shipping Glass "
        "Tools Toys Cables Engines Brewing Publishing",
    ),
    "country": (
        "Upper Lower Greater Inner Outer Western Eastern Northern Southern Central",
        "Savonia Krelland Bordavia Zemblia Orlund Tarmania Vespria Galdoria Estmark Norwald",
    ),
}

# A famous name opens with a word that no other name has: the policy knows these entities by heart.
_FAMOUS: dict[Kind, str] = {
    "person": "Ansel Bettina Cosmo Delphine Egmont Fiorella Gaspard Henrike Ignaz Jolanda Klemens Ludmila Matteo Noemi "
    "Ottokar Philippa Quentin Rosalind Severin Thekla",
    "film": "Emerald Wooden Ancient Jagged Fearless Magnetic Sunken Stolen Twisted Infinite Foggy Whispering",
    "city": "Aldwyn Brox Cardel Dunmar Eska Fallow Grim Holm Inver Kirk",
    "band": "Angry Blue Clever Dizzy Elegant Fuzzy Giant Happy",
    "company": "Acmeon Borealis Citadon Duronix Equivon Fortuna Globrex Hyperia",
    "country": "Free United Ducal Imperial",
}

# Every name of two words belongs to one split: dev, test or train by the sum of the two words' places.
_SPLIT_OF_RESIDUE = ("dev", "test", "test", "test", "train", "dev", "train", "train", "train", "train")


@dataclass(frozen=True, slots=True)
class Relation:
    """One attribute of a page.

    `target` is the type of entity that it leads to, or the classes that are its values; `ask` and `phrase` are how a
    question names it, with `{x}` for the subject. `more` is the comparative of ordered classes (least first), else "".
    """

    key: str
    subject: Kind
    target: Kind | tuple[str, ...]
    ask: str
    phrase: str = ""
    more: str = ""


def _classes(words: str) -> tuple[str, ...]:
    return tuple(words.split())


RELATIONS: tuple[Relation, ...] = (
    Relation("birthplace", "person", "city", "Where was {x} born?", "the birthplace of {x}"),
    Relation("spouse", "person", "person", "Who is married to {x}?", "the spouse of {x}"),
    Relation("employer", "person", "company", "Who employs {x}?", "the employer of {x}"),
    Relation("instrument", "person", _classes("piano violin trumpet harp drums"), "What does {x} play?"),
    Relation("director", "film", "person", "Who directed {x}?", "the director of {x}"),
    Relation("star", "film", "person", "Who acts in {x}?", "the star of {x}"),
    Relation("studio", "film", "company", "Who produced {x}?", "the studio of {x}"),
    Relation("genre", "film", _classes("comedy drama thriller musical romance"), "What kind of film is {x}?"),
    Relation("mayor", "city", "person", "Who governs {x}?", "the mayor of {x}"),
    Relation("country", "city", "country", "In which country is {x}?", "the country of {x}"),
    Relation("population", "city", _classes("tiny small large huge"), "How big is {x}?", more="larger"),
    Relation("singer", "band", "person", "Who sings in {x}?", "the singer of {x}"),
    Relation("label", "band", "company", "Who signed {x}?", "the label of {x}"),
    Relation("origin", "band", "city", "Where was {x} formed?", "the origin of {x}"),
    Relation("style", "band", _classes("rock jazz folk disco opera"), "What style is {x}?"),
    Relation("founder", "company", "person", "Who founded {x}?", "the founder of {x}"),
    Relation("headquarters", "company", "city", "Where is {x} based?", "the headquarters of {x}"),
    Relation("revenue", "company", _classes("poor modest solid rich"), "How wealthy is {x}?", more="wealthier"),
    Relation("capital", "country", "city", "Which city rules {x}?", "the capital of {x}"),
    Relation("leader", "country", "person", "Who leads {x}?", "the leader of {x}"),
    Relation("currency", "country", _classes("crown dinar florin peso thaler"), "How does one pay in {x}?"),
)

KINDS: tuple[Kind, ...] = tuple(_NAMES)


def relations_of(kind: Kind) -> tuple[Relation, ...]:
    """Return the attributes of a page of this type, in page order."""
    return tuple(relation for relation in RELATIONS if relation.subject == kind)


def names(kind: Kind, split: Split) -> tuple[str, ...]:
    """Return every name of the type that belongs to the split; the three splits share no name."""
    firsts, lasts = (words.split() for words in _NAMES[kind])
    return tuple(
        f"{first} {last}"
        for i, first in enumerate(firsts)
        for j, last in enumerate(lasts)
        if _SPLIT_OF_RESIDUE[(i + j) % len(_SPLIT_OF_RESIDUE)] == split
    )


def famous_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of the type that every world has."""
    lasts = _NAMES[kind][1].split()
    return tuple(f"{first} {lasts[-1 - place % len(lasts)]}" for place, first in enumerate(_FAMOUS[kind].split()))


def words() -> tuple[str, ...]:
    """Return every word that a page or a query can hold, once each, in a fixed order."""
    pools = [pool for pair in _NAMES.values() for pool in pair] + list(_FAMOUS.values())
    classes = [value for relation in RELATIONS if isinstance(relation.target, tuple) for value in relation.target]
    return (*(word for pool in pools for word in pool.split()), *(relation.key for relation in RELATIONS), *classes)
