"""Class names made plain, and the sets of classes that the rules about people need.

Members of a set are named as in `groups.py`.
"""

from __future__ import annotations

# What class names say badly, by class index.
RENAMED: dict[int, str] = {
    21: "a kite, a bird of prey", 97: "a drake duck", 101: "a tusked elephant",
    133: "a bittern", 134: "a crane bird", 153: "a Maltese dog", 157: "a papillon dog",
    161: "a basset hound", 162: "a beagle", 163: "a bloodhound", 172: "a whippet",
    175: "an otterhound", 215: "a Brittany spaniel", 233: "a Bouvier des Flandres",
    242: "a boxer dog", 243: "a bullmastiff", 251: "a Dalmatian", 252: "an affenpinscher",
    262: "a Brussels griffon", 268: "a Mexican hairless dog", 271: "a red wolf",
    270: "a white wolf", 282: "a striped tabby cat", 312: "a cricket", 339: "a sorrel horse",
    348: "a ram", 352: "an impala", 354: "an Arabian camel", 389: "a barracouta fish",
    392: "a rock beauty fish", 395: "a gar fish", 421: "a handrail", 433: "a swimming cap",
    439: "a bearskin hat", 452: "a bonnet", 456: "an archery bow", 458: "a memorial plaque",
    478: "a cardboard box", 480: "a cash machine", 494: "a wind chime", 506: "a coil",
    513: "a trumpet", 519: "a crate", 521: "a slow cooker", 528: "a dial telephone",
    548: "an entertainment center", 556: "a fire screen", 570: "a gas mask", 583: "a guillotine",
    603: "a horse-drawn cart", 604: "an hourglass",
    605: "an iPod", 612: "a rickshaw", 619: "a lampshade",
    622: "a lens cap", 630: "a slip-on shoe", 632: "a loudspeaker", 633: "a magnifying glass",
    638: "a leotard", 639: "a one-piece swimsuit", 642: "a xylophone", 647: "a measuring cup",
    657: "a missile", 661: "a Ford Model T", 667: "a graduation cap", 677: "a metal nail",
    680: "a pacifier", 687: "a pipe organ", 692: "a packet", 696: "a paintbrush",
    705: "a railroad car", 721: "a pillow", 726: "a block plane", 735: "a poncho",
    744: "a projectile", 758: "a fishing reel", 769: "a ruler", 778: "a weighing scale",
    782: "a CRT screen", 785: "a seat belt", 789: "a shoji screen", 796: "a ski mask",
    810: "a space bar of a keyboard", 814: "a motorboat", 815: "a spider web",
    821: "a steel arch bridge", 824: "a stole", 842: "swimming trunks", 844: "a light switch",
    875: "a trombone", 884: "a vaulted ceiling", 885: "velvet", 890: "a volleyball",
    903: "a wig", 908: "an airplane wing", 914: "a yawl boat", 919: "a street sign",
    921: "a book jacket", 925: "consomme", 948: "a Granny Smith apple", 956: "a custard apple",
    959: "pasta carbonara", 988: "an acorn", 998: "an ear of grain", 990: "a horse chestnut",
    981: "a baseball player", 982: "a bridegroom", 916: "a website",
    300: "a tiger beetle", 985: "a daisy", 986: "a yellow lady's slipper flower",
}  # fmt: skip

# Names that take no article.
BARE = frozenset(
    """binoculars; jeans; pajamas; sunglasses; parallel bars; face powder; hair spray; lotion;
    perfume; sunscreen; chain mail; clogs; wool; guacamole; ice cream; mashed potatoes; broccoli;
    hay; chocolate syrup; dough; red wine; eggnog; toilet paper; rapeseed; corn; cauliflower;
    mortar and pestle""".replace("\n    ", " ").split("; ")
)
VOWEL_SOUND_EXCEPTIONS = ("uni", "euro", "ukulele", "use", "one-")

# What a person wears rather than holds: "a person in ...".
WORN: tuple[str, ...] = (
    "clothing", "garment", "headdress", "helmet", "robe", "armor", "neckwear", "swimsuit",
    "scarf", "mask", "sunglasses", "hair wig", "bulletproof vest", "lab coat", "pajamas", "jeans",
    "military uniform", "academic gown", "kimono", "abaya", "suit", "apron", "stole scarf",
    "oxygen mask", "gas mask or respirator", "balaclava ski mask", "breastplate", "cap", "hat",
    "feather boa", "-knee pad", "-seat belt", "-muzzle", "-lens cap", "-bottle cap", "-thimble",
    "-baby pacifier", "-diaper", "-mitten", "-holster", "-scabbard", "-handkerchief",
)  # fmt: skip

# What people stand beside: "a bus with two people", where the people are not the larger part.
LARGE: tuple[str, ...] = (
    "vehicle", "wheeled vehicle", "structure", "building", "furniture", "geological formation",
    "lakeshore", "mercantile establishment", "aircraft", "sailing vessel", "home appliance",
    "white goods", "valley", "movie theater", "home theater", "stage", "restaurant", "library",
    "patio", "fountain", "car", "craft", "-folding chair", "-bicycle", "-missile", "-helmet",
)  # fmt: skip

# Things that have a face, or look as if they had: a found face is no person there.
FACE_LIKE: tuple[str, ...] = (
    "animal", "mask", "teddy bear", "totem pole", "carved pumpkin", "comic book", "dust jacket",
    "jigsaw puzzle", "piggy bank", "toy store", "website", "altar", "stupa", "fountain",
    "envelope", "pedestal", "brass memorial plaque", "menu", "handkerchief", "Christmas stocking",
    "shield", "product packet / packaging", "crossword", "balloon", "carousel",
)  # fmt: skip
