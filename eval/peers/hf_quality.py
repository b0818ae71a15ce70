"""Hugging Face's QuantizedCache on items: `python hf_quality.py job.json`, by a Python with it.

quality.py says what is read and written. One exact reading of a context serves every recipe:
QuantizedCache attends to a context as it is and stores it quantised, so that the exact keys and
values are what it is fed. At each later step it dequantises all that it stores, and tokens that it
reads later stay exact until there are `residual` of them: its memory while it attends is more than
the bytes that are counted here, which are what it stores.
"""

import sys

import quality
import transformers

DEFAULTS = {"group": 64, "residual": 128, "axis_key": 0, "axis_value": 0}  # as in transformers
RECIPES = {
    "int8": {"backend": "hqq", "bits": 8},  # quanto has 2 and 4 bits
    "int4": {"backend": "quanto", "bits": 4},
    "int2": {"backend": "quanto", "bits": 2},
}


class Peer:
    """QuantizedCache with the context that was read last."""

    packages = ("optimum-quanto", "hqq")
    exact: quality.State

    def notes(self, recipes):
        """What recipes ask for and QuantizedCache has no option for."""
        out = []
        for recipe in recipes:
            name, label = recipe["name"], recipe["label"]
            if name not in RECIPES:
                names = ", ".join(["exact", *RECIPES])
                raise ValueError(f"transformers has no recipe {name!r} here; it has {names}")
            for option, value in recipe.get("options", {}).items():
                if option not in DEFAULTS | RECIPES[name]:
                    said = f"QuantizedCache has no option {option}; {option}={value} is left out"
                    out.append({"note": said, "recipe": label})
        return out

    def read(self, model, ids):
        self.exact = quality.read(model, ids)
        return self.exact

    def compress(self, model, recipe, kept):
        """The quantised cache; it keeps every token."""
        known = DEFAULTS | RECIPES[recipe["name"]]
        given = {k: v for k, v in recipe.get("options", {}).items() if k in known}
        options = known | given
        cache = transformers.QuantizedCache(
            options["backend"], model.config, nbits=options["bits"],
            axis_key=options["axis_key"], axis_value=options["axis_value"],
            q_group_size=options["group"], residual_length=options["residual"],
        )  # fmt: skip
        for i, layer in enumerate(self.exact.cache.layers):
            cache.update(layer.keys, layer.values, i)
        return quality.State(cache, self.exact.seen)


if __name__ == "__main__":
    quality.main(sys.argv[1], Peer())
