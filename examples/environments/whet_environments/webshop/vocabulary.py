# SPDX-License-Identifier: Apache-2.0
"""The words that products are made of: categories, attributes, options, and the nouns of titles."""

from __future__ import annotations

# Three levels; of a kind its other names, which a title may add.
TREE: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "clothing": {
        "tops": {"shirt": ("tee", "top"), "sweater": ("pullover", "jumper"), "jacket": ("coat", "parka")},
        "shoes": {"sneakers": ("trainers", "footwear"), "boots": ("shoes", "footwear"), "sandals": ("slippers",)},
        "accessories": {"scarf": ("shawl",), "belt": ("strap",), "hat": ("cap", "beanie")},
    },
    "home": {
        "furniture": {"desk": ("table", "workstation"), "bookcase": ("shelf",), "sofa": ("couch", "loveseat")},
        "lighting": {"lamp": ("sconce", "torchiere"), "lantern": ("beacon",), "chandelier": ("pendant", "fixture")},
        "bedding": {"pillow": ("cushion",), "blanket": ("throw", "quilt"), "curtains": ("drapes", "panels")},
    },
    "electronics": {
        "audio": {"headphones": ("earbuds", "headset"), "speaker": ("soundbar",), "microphone": ("mic", "recorder")},
        "power": {"charger": ("adapter", "plug"), "battery": ("cell",), "cable": ("cord", "wire")},
        "photography": {"camera": ("camcorder",), "tripod": ("stand", "mount"), "projector": ("cinema",)},
    },
    "grocery": {
        "drinks": {"coffee": ("espresso", "roast"), "tea": ("infusion",), "juice": ("nectar", "cider")},
        "snacks": {"cookies": ("biscuits",), "crackers": ("crisps", "wafers"), "popcorn": ("kernels",)},
        "pantry": {"honey": ("syrup",), "pasta": ("noodles", "spaghetti"), "rice": ("grain", "basmati")},
    },
    "beauty": {
        "hair": {"shampoo": ("conditioner", "wash"), "comb": ("brush",), "wig": ("extensions",)},
        "skin": {"lotion": ("moisturizer", "cream"), "sunscreen": ("sunblock",), "serum": ("oil", "essence")},
        "bath": {"soap": ("bar",), "towel": ("washcloth",), "toothpaste": ("gel", "whitener")},
    },
}
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "clothing": (
        *("machine wash", "long lasting", "slim fit", "water resistant", "hand made", "light weight", "quick drying"),
        *("arch support", "rubber sole", "elastic waist", "moisture wicking", "classic fit"),
    ),
    "home": (
        *("easy assemble", "solid wood", "space saving", "easy clean", "eco friendly", "heavy duty", "mid century"),
        *("wall mounted", "super soft", "energy efficient", "ready hang", "white finish"),
    ),
    "electronics": (
        *("fast charging", "high quality", "noise cancelling", "easy carry", "long range", "shock proof"),
        *("gold plated", "wireless bluetooth", "plug play", "high definition", "hands free", "dust proof"),
    ),
    "grocery": (
        *("gluten free", "sugar free", "non gmo", "low sodium", "plant based", "fat free", "dairy free"),
        *("certified organic", "high protein", "artificial flavors", "keto friendly", "individually wrapped"),
    ),
    "beauty": (
        *("cruelty free", "paraben free", "sulfate free", "fragrance free", "anti aging", "dry skin", "damaged hair"),
        *("natural ingredients", "sensitive skin", "tea tree", "travel size", "alcohol free"),
    ),
}
COLOURS = ("black", "blue", "brown", "gold", "green", "grey", "orange", "pink", "purple", "red", "silver", "white")
SHADES = ("", "", "", "dark ", "light ", "matte ")  # half of the colours have none
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "clothing": {"color": COLOURS, "size": ("small", "medium", "large", "petite", "plus", "tall")},
    "home": {"color": COLOURS, "style": ("modern", "rustic", "classic", "industrial", "nordic")},
    "electronics": {"color": COLOURS, "length": ("3 feet", "6 feet", "10 feet", "1 yard")},
    "grocery": {
        "flavor": ("vanilla", "lemon", "ginger", "cocoa", "cinnamon", "mint"),
        "pack": ("single", "twin", "case"),
    },
    "beauty": {"scent": ("lavender", "rose", "coconut", "citrus", "jasmine"), "volume": ("mini", "regular", "jumbo")},
}
AUDIENCES = ("men", "women", "kids", "adults", "girls", "boys", "family", "seniors")
USES = (
    *("travel", "office", "garden", "kitchen", "school", "camping", "winter", "summer", "guests", "parties"),
    *("bedroom", "gym", "beach", "hiking", "studio", "holidays", "birthday", "workshop", "balcony", "picnic"),
)
EXTRAS = ("gift", "set", "bundle", "kit", "collection", "edition")
ADJECTIVES = (
    "premium",
    "portable",
    "original",
    "stylish",
    "compact",
    "vintage",
    "cozy",
    "essential",
    "deluxe",
    "fresh",
)
OPINIONS = ("good", "as described", "came late", "loved it")
SYLLABLES = (
    "al",
    "bor",
    "cen",
    "dul",
    "ek",
    "fam",
    "gor",
    "hin",
    "jul",
    "kos",
    "lum",
    "mer",
    "nor",
    "pel",
    "rud",
    "tav",
)
# The nouns of a title are these and its brand: a part-of-speech tagger would find the same in titles of this grammar.
NOUNS = frozenset(
    {kind for middle in TREE.values() for kinds in middle.values() for kind in kinds}
    | {name for middle in TREE.values() for kinds in middle.values() for names in kinds.values() for name in names}
    | {*AUDIENCES, *USES, *EXTRAS}
)
